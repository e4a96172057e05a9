//! Ten pods at work with trees three deep while some are killed at random: memory grows by the history only,
//! descriptors and threads stay, no zombie is left, and the table fits.
//!
//! Twenty seconds; ten minutes by `INSOMNIA_LONG=1 cargo test --release --test it soak`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::sys::process;

use crate::protocol::descriptors;
use crate::spawn_kills::table_fits;
use crate::world::{World, call, calls, is_at_rest, is_long, lives, memory_kib, spawn, wait_until};

const ROOTS: usize = 10;
/// The first roots are never killed: they are measured.
const MEASURED: usize = 3;

fn root(number: usize) -> String {
    format!("root{number}")
}

fn wait_for_all(seconds: u64) -> Value {
    calls(&[call("WaitPods", json!({ "until": "all", "timeout_seconds": seconds }))])
}

fn soaked() -> World {
    let mut script = serde_json::Map::new();
    for number in 0..ROOTS {
        let (middle, leaf) = (format!("middle{number}"), format!("leaf{number}"));
        let stop = calls(&[call("StopPod", json!({ "pod_id": middle, "tree": true }))]);
        let round =
            [calls(&[spawn(&middle, &["m:write"])]), wait_for_all(3), stop, json!({ "text": "done" })];
        script.insert(
            root(number),
            round.iter().cycle().take(if is_long() { 4_000 } else { 200 }).cloned().collect(),
        );
        script.insert(
            middle,
            json!([calls(&[spawn(&leaf, &["m/l:write"])]), wait_for_all(2), { "text": "done" }]),
        );
        let write = call("WriteFile", json!({ "path": "m/l/f", "content": "x" }));
        script.insert(leaf, json!([calls(&[write]), { "text": "done" }]));
    }
    let world = World::with_settings(Value::Object(script), json!({ "limits": { "wake_turns": 1_000_000 } }));
    (0..ROOTS).for_each(|number| start(&world, number, &[]));
    world
}

fn start(world: &World, number: usize, more: &[&str]) {
    let (name, directory) = (root(number), world.project().join(root(number)));
    std::fs::create_dir_all(&directory).unwrap();
    let mut args = vec!["--name", &name, "--dir", directory.to_str().unwrap()];
    args.extend(if more.is_empty() { &["--scope", ".:write"] } else { more });
    let ran = world.pod_command(&args);
    assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.stderr);
}

/// The table, which must be whole at every moment: each pod_id and its process.
fn table(world: &World) -> BTreeMap<String, i32> {
    let text = std::fs::read_to_string(world.runtime().join("scope.lock")).unwrap();
    let table: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let entries = table["allocations"].as_array().unwrap().iter();
    let pair = |entry: &Value| (entry["pod_id"].as_str().unwrap().to_owned(), entry["pid"].as_i64().unwrap());
    entries.map(pair).map(|(pod_id, pid)| (pod_id, i32::try_from(pid).unwrap())).collect()
}

/// Starts the roots again that were killed, and returns how many.
fn revive(world: &World) -> usize {
    let alive = table(world);
    let is_dead = |number: &usize| !alive.get(&root(*number)).is_some_and(|pid| lives(*pid));
    let dead: Vec<usize> = (0..ROOTS).filter(is_dead).collect();
    dead.iter().for_each(|number| start(world, *number, &["--resume"]));
    dead.len()
}

/// Whether a living pod answers that it has nothing to do.
fn is_quiet(world: &World, pod_id: &str) -> bool {
    let reply = world.raw(pod_id, b"{\"method\":\"status\"}\n");
    let reply: Value = serde_json::from_str(&reply).unwrap_or_default();
    let status = &reply["ok"];
    status["status"].is_string()
        && status["status"] != "running"
        && status["queued"] == 0
        && status["events_in_flight"] == 0
}

/// Ends what the roots have left running, until nobody but them is there and all of them are quiet.
fn calm(world: &World) {
    revive(world);
    wait_until("all is quiet", || {
        let others: Vec<String> =
            table(world).into_keys().filter(|pod_id| !pod_id.starts_with("root")).collect();
        others.iter().for_each(|pod_id| drop(world.insomnia(["stop", pod_id, "--tree"])));
        others.is_empty() && (0..ROOTS).all(|number| is_quiet(world, &root(number)))
    });
}

/// Descriptors, threads, KiB of memory and KiB of history of a pod that has nothing to do.
///
/// A late report begins a turn, which the history tells; one that begins none is a descriptor and a thread for a
/// moment, so the least of several counts is the pod's own.
fn measure(world: &World, pod_id: &str) -> [usize; 4] {
    let pid = world.pid(pod_id);
    let state = std::path::PathBuf::from(world.status(pod_id)["state_dir"].as_str().unwrap());
    let history = || usize::try_from(std::fs::metadata(state.join("history.jsonl")).unwrap().len()).unwrap();
    loop {
        calm(world);
        let (mut least, length) = ([usize::MAX; 2], history());
        for _ in 0..10 {
            wait_until("its short threads have ended", || is_at_rest(pid));
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
            least = [least[0].min(descriptors(pid)), least[1].min(threads)];
        }
        let memory = usize::try_from(memory_kib(pid, "VmRSS")).unwrap();
        if is_quiet(world, pod_id) && history() == length {
            return [least[0], least[1], memory, length >> 10];
        }
    }
}

#[test]
fn ten_pods_with_trees_that_are_killed_at_random_stay_as_they_were() {
    let duration = Duration::from_secs(if is_long() { 600 } else { 20 });
    let world = soaked();
    let mut dice = 0x9e37_79b9_7f4a_7c15_u64;
    let (mut kills, mut turns, mut restarts) = (0, 0, 0);
    let mut before: Vec<[usize; 4]> = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < duration {
        if before.is_empty() && begin.elapsed() > duration / 4 {
            before = (0..MEASURED).map(|number| measure(&world, &root(number))).collect();
        }
        restarts += revive(&world);
        for name in (0..ROOTS).map(root).filter(|name| is_quiet(&world, name)) {
            turns += 1;
            world.ok(&name, "run", json!({ "input": "go" }));
        }
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let measured: Vec<String> = (0..MEASURED).map(root).collect();
        let mortal: Vec<_> =
            table(&world).into_iter().filter(|(pod_id, _)| !measured.contains(pod_id)).collect();
        if let Some((_, pid)) = mortal.get(usize::try_from(dice >> 33).unwrap() % (2 * mortal.len().max(1))) {
            if let Some(stat) = process::process_stat(*pid) {
                // A reservation has its spawner's process, which may be one of the measured.
                let is_measured = measured.iter().any(|name| world.pid(name) == *pid);
                if !is_measured && process::kill_exactly(*pid, stat.start_time).is_ok() {
                    kills += 1;
                    wait_until("the killed pod is gone", || !lives(*pid));
                }
            }
        }
        std::thread::sleep(Duration::from_millis(50)); // the pods' time, not ours
    }
    let after: Vec<_> = (0..MEASURED).map(|number| measure(&world, &root(number))).collect();
    println!(
        "{turns} turns, {kills} kills, {restarts} restarts; descriptors, threads, memory, history: {before:?} {after:?}"
    );
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before[..2], after[..2], "descriptors and threads stay");
        let grown = after[2].saturating_sub(before[2]);
        assert!(
            grown <= 3 * (after[3] - before[3]) + 512,
            "memory grew by {grown} KiB: {before:?} {after:?}"
        );
    }
    wait_until("nobody is left over and no zombie", || table_fits(&world) && zombies(&table(&world)) == 0);
    assert!(kills > 3 && turns > 2 * ROOTS, "{kills} kills, {turns} turns");
}

/// The ended processes that a pod of the table has not collected.
fn zombies(table: &BTreeMap<String, i32>) -> usize {
    let of = |pid: &i32| {
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let ended =
            children.split_whitespace().filter_map(|child| process::process_stat(child.parse().ok()?));
        ended.filter(|stat| stat.is_zombie).count()
    };
    table.values().map(of).sum()
}
