//! A spawner killed before any one of the system calls of SpawnPod: no allocation without a process, no process
//! without an allocation, and a child that lives on is found again.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Mutex;

use serde_json::{Value, json};

use insomnia::store::life::{self, Holding};
use insomnia::store::paths::RuntimeDirectory;
use insomnia::sys::process::{ErrorOutput, Running};
use insomnia::words::identity::Life;

use crate::world::{World, call, calls, has_tool, is_long, lives, skip, spawn, wait_until};

/// The calls that the turn of a SpawnPod makes, and how many of each: found with strace. What comes after the
/// spawn is left out, so that each kill meets the spawn itself.
const CALLS: [(&str, usize); 14] = [
    ("write", 6), // the model's call, the reservation, the table, the child's settings, the record, the result
    ("fsync", 4),
    ("?renameat,?renameat2", 2),
    ("flock", 5),
    ("openat", 11),
    ("?mkdir,?mkdirat", 2),
    ("?unlink,?unlinkat", 4),
    ("pipe2", 3),
    ("?clone,?clone3,?fork,?vfork", 1),
    ("?poll,?ppoll", 2),
    ("wait4", 1),
    ("connect", 1),
    ("sendto", 1),
    ("recvfrom", 1),
];

/// Those of the long form, too many for every run.
const MORE_CALLS: [(&str, usize); 5] =
    [("close", 16), ("read", 28), ("fcntl", 14), ("futex", 4), ("?statx,?newfstatat", 50)];

fn tasks_named(pid: i32, name: &str) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let named = tasks.filter(|task| {
        let comm = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        comm.trim_end() == name
    });
    named.filter_map(|task| task.file_name().into_string().ok()).collect()
}

/// Has strace kill a pod before the `n`th of these calls of its turns from now on. `None` where tracing a running
/// process is not allowed.
pub fn trace(world: &World, pid: i32, names: &str, n: usize) -> Option<Running> {
    let mut turn = Vec::new();
    wait_until("the turn has its thread", || {
        turn = tasks_named(pid, "turn");
        turn.len() == 1
    });
    let inject = format!("inject={names}:signal=SIGKILL:when={n}");
    let args = ["-qq", "-o", "/dev/null", "-e", &inject, "-p", &turn[0]];
    let mut strace = world.program("strace", args).start(ErrorOutput::Separate).unwrap();
    let tracer = format!("TracerPid:\t{}\n", strace.id());
    let (status, strace_pid) = (format!("/proc/{}/status", turn[0]), strace.id().try_into().unwrap());
    wait_until("strace is there", || {
        !lives(strace_pid) || std::fs::read_to_string(&status).is_ok_and(|text| text.contains(&tracer))
    });
    // One that came when the turn was over, or has seen its end, has done its work too.
    let may_trace = lives(strace_pid) || !strace.error_text(1000).contains("not permitted");
    may_trace.then_some(strace)
}

fn ids(world: &World) -> BTreeSet<String> {
    let table = world.table();
    let entries = table["allocations"].as_array().unwrap().iter();
    entries.map(|entry| entry["pod_id"].as_str().unwrap().to_owned()).collect()
}

/// Whether each entry has its process, which holds its life, and each process its entry.
pub fn table_fits(world: &World) -> bool {
    let runtime = RuntimeDirectory::open(&world.runtime()).unwrap();
    let table = world.table();
    let entries = table["allocations"].as_array().unwrap();
    let pids: BTreeSet<i64> = entries.iter().map(|entry| entry["pid"].as_i64().unwrap()).collect();
    let processes: BTreeSet<i64> = world.processes().into_iter().map(i64::from).collect();
    pids == processes
        && pids.len() == entries.len()
        && entries.iter().all(|entry| {
            let life = Life::new(entry["life"].as_str().unwrap()).unwrap();
            entry["state"] == "live" && life::probe(&runtime, &life) == Holding::Held
        })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// No such call came before the spawn was over.
    NotMet,
    /// Killed, and no child is left.
    Alone,
    /// Killed, and the child lives on.
    Orphan,
    /// Nobody may trace a running process here.
    NotAllowed,
}

fn kill_before(names: &str, n: usize) -> Outcome {
    let first = calls(&[spawn("child", &["lent/deep:write"])]);
    let write = call("WriteFile", json!({ "path": "lent/deep/f", "content": "x" }));
    let world = World::with_settings(
        json!({ "main": [first, { "text": "done" }, calls(&[write]), { "text": "written" }],
            "child": [{ "text": "ok" }] }),
        json!({ "wake_on_events": false, "limits": { "launch_seconds": 1 } }),
    );
    world.start(&["--scope", ".:write"]);
    let (main, life) = (world.pid("main"), world.life("main"));
    let Some(_strace) = trace(&world, main, names, n) else { return Outcome::NotAllowed };
    world.raw("main", b"{\"method\":\"run\",\"params\":{\"input\":\"go\"}}\n"); // it may be killed before it answers
    wait_until("it is killed, or past the spawn", || !lives(main) || world.count("main", "turn_ended") == 1);
    if lives(main) {
        return Outcome::NotMet;
    }
    let what = format!("{names} {n}");
    let runtime = RuntimeDirectory::open(&world.runtime()).unwrap();
    let life = Life::new(life).unwrap();
    wait_until("its life is free", || life::probe(&runtime, &life) == Holding::Free);

    // Whoever comes next finds nothing of the dead and starts.
    let listed = world.insomnia(["list"]);
    assert_eq!(listed.code, Some(0), "{what}: {}", listed.stderr);
    world.start(&["--name", "next"]);
    let left = ids(&world);
    assert!(!left.contains("main"), "{what}: {left:?}");
    assert!(world.entry("child").is_none_or(|entry| entry["state"] == "live"), "{what}: {:?}", world.table());
    // A child without its task ends itself; one that has it goes on.
    wait_until(&format!("{what}: the table fits"), || {
        let has_task = world.count("child", "turn_started") > 0;
        table_fits(&world) && (has_task || !ids(&world).contains("child"))
    });
    let orphan = world.entry("child");
    assert!(
        orphan.as_ref().is_none_or(|entry| entry["delegated_from"].is_null()),
        "{what}: its dead spawner is still above it: {orphan:?}"
    );

    let resumed = world.insomnia(["resume", "main"]);
    assert_eq!(resumed.code, Some(0), "{what}: {}", resumed.stderr);
    wait_until("it has gone on", || world.status("main")["last_response"].as_str().unwrap().contains("done"));
    world.wait_idle("main");
    let child = world.entry("child");
    if orphan.is_some() {
        let child = child.as_ref().unwrap_or_else(|| panic!("{what}: the child is gone"));
        assert_eq!(child["delegated_from"], "main", "{what}");
        assert_eq!(Some(&child["life"]), orphan.as_ref().map(|entry| &entry["life"]), "{what}");
        assert_eq!(world.count("child", "input"), 1, "{what}: its task came once");
    }
    let known = world.ok("main", "list_pods", Value::Null);
    let known: Vec<&str> =
        known["pods"].as_array().unwrap().iter().map(|pod| pod["pod_id"].as_str().unwrap()).collect();
    assert_eq!(known, child.iter().map(|_| "child").collect::<Vec<_>>(), "{what}");
    assert_eq!(world.status("main")["lent"].as_array().unwrap().len(), known.len(), "{what}");
    world.turn("main", "write");
    let (written, said) = world.results("main", "WriteFile").pop().unwrap();
    assert_eq!(written, child.is_none(), "{what}: what a child holds is not the spawner's: {said}");

    let stopped = world.insomnia(["stop", "main", "--tree"]);
    assert_eq!(stopped.code, Some(0), "{what}: {}", stopped.stderr);
    world.start(&["--name", "last", "--scope", ".:write"]);
    wait_until(&format!("{what}: only the two are left"), || {
        table_fits(&world) && ids(&world).iter().eq(["last", "next"])
    });
    let names = |path: PathBuf| {
        let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        entries.map(|name| name.into_string().unwrap()).collect::<BTreeSet<_>>()
    };
    assert_eq!(
        names(world.runtime().join("life")),
        BTreeSet::from([world.life("last"), world.life("next")]),
        "{what}"
    );
    let expected = ["last", "life", "next", "scope.lock"].map(str::to_owned);
    assert_eq!(names(world.runtime()), BTreeSet::from(expected), "{what}");
    if orphan.is_some() { Outcome::Orphan } else { Outcome::Alone }
}

#[test]
fn a_spawner_killed_at_any_step_leaves_a_table_that_fits_and_a_child_that_is_found() {
    if !has_tool("strace") {
        return;
    }
    let more = if is_long() { &MORE_CALLS[..] } else { &[] };
    let all: Vec<(&str, usize)> = CALLS
        .iter()
        .chain(more)
        .rev()
        .flat_map(|&(names, count)| (1..=count).map(move |n| (names, n)))
        .collect();
    let (count, left, outcomes) = (all.len(), Mutex::new(all), Mutex::new(Vec::new()));
    // Most of each round is waiting.
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                while let Some((names, n)) = { left.lock().unwrap().pop() } {
                    let outcome = kill_before(names, n);
                    outcomes.lock().unwrap().push((names, n, outcome));
                    if outcome == Outcome::NotAllowed {
                        left.lock().unwrap().clear();
                    }
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().unwrap();
    let of = |wanted: Outcome| outcomes.iter().filter(|(.., outcome)| *outcome == wanted).count();
    if of(Outcome::NotAllowed) > 0 {
        return skip("nobody may trace a running process here");
    }
    let (alone, orphans) = (of(Outcome::Alone), of(Outcome::Orphan));
    println!("{count} kills: {alone} left nobody, {orphans} a child, {} not met", of(Outcome::NotMet));
    assert!(alone * 2 > count / 2 && orphans > 0, "too few were met: {outcomes:?}");
}
