//! What went wrong in other programs of this kind and no other file of tests holds.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::sys::process::{ErrorOutput, Running};

use crate::world::{
    PATIENCE, World, call, calls, copy_program, has_tool, is_long, lives, ran, skip, spawn, wait_until,
};

fn never() -> Value {
    json!({ "text": "never", "delay_ms": 600_000 })
}

fn inputs(world: &World, pod_id: &str) -> Vec<String> {
    let items = world.history(pod_id).into_iter().filter(|item| item["type"] == "input");
    items.map(|item| item["text"].as_str().unwrap().to_owned()).collect()
}

/// Lets the `n`th write of each thread to a file of a pod's session fail from now on: the disk is full. `None`
/// where tracing a running process is not allowed.
fn fill_disk(world: &World, pod_id: &str, file: &str, n: usize) -> Option<Running> {
    let path = PathBuf::from(world.status(pod_id)["state_dir"].as_str().unwrap()).join(file);
    trace(
        world,
        pod_id,
        &["-P", path.to_str().unwrap(), "-e", &format!("inject=write:error=ENOSPC:when={n}")],
    )
}

/// Traces a pod with these options. `None` where tracing a running process is not allowed.
fn trace(world: &World, pod_id: &str, options: &[&str]) -> Option<Running> {
    let pid = world.pid(pod_id);
    let pid_text = pid.to_string();
    let args = [&["-f", "-qq", "-o", "/dev/null", "-p", &pid_text], options].concat();
    let mut strace = world.program("strace", args).start(ErrorOutput::Separate).unwrap();
    let strace_pid = i32::try_from(strace.id()).unwrap();
    wait_until("strace is there", || !lives(strace_pid) || traced(pid) > 0 && traced(pid) == threads(pid));
    if lives(strace_pid) {
        return Some(strace);
    }
    let said = strace.error_text(1000);
    assert!(said.contains("not permitted"), "{said}");
    skip("nobody may trace a running process here");
    None
}

fn threads(pid: i32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
}

fn traced(pid: i32) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let status = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
    status.filter(|text| !text.contains("TracerPid:\t0\n")).count()
}

/// The disk has room again.
fn free_disk(world: &World, pod_id: &str, strace: Running) {
    drop(strace);
    wait_until("strace is gone", || traced(world.pid(pod_id)) == 0);
}

#[test]
fn what_a_turn_could_not_save_is_heard_in_the_next_one() {
    if !has_tool("strace") {
        return;
    }
    // A turn writes its start, the notices, the input, the reply.
    for (n, what) in [(1, "the start"), (2, "the notices"), (3, "the input")] {
        let world = World::with_script(json!({ "*": [{ "text": "heard" }] }));
        world.start(&[]);
        for message in ["remember this", "and that"] {
            world.ok("main", "notify", json!({ "message": message }));
        }
        let Some(strace) = fill_disk(&world, "main", "history.jsonl", n) else { return };
        let failed = world.turn("main", "first");
        assert_eq!(failed["result"], "failed", "{what}");
        assert!(failed["message"].as_str().unwrap().contains("No space left"), "{what}: {failed}");
        free_disk(&world, "main", strace);
        wait_until("it is paused", || world.status("main")["status"] == "paused");
        assert_eq!(world.turn("main", "second")["result"], "finished", "{what}");
        assert_eq!(inputs(&world, "main"), ["first", "second"], "{what}");
        for message in ["remember this", "and that"] {
            assert_eq!(
                world.notices("main").matches(message).count(),
                1,
                "{what}: {}",
                world.notices("main")
            );
        }
        // What has been heard does not come again.
        world.kill("main");
        assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
        world.turn("main", "third");
        assert_eq!(inputs(&world, "main"), ["first", "second", "third"], "{what}");
    }
}

#[test]
fn no_tool_runs_whose_call_is_not_saved() {
    if !has_tool("strace") {
        return;
    }
    let write = calls(&[call("WriteFile", json!({ "path": "f", "content": "x" }))]);
    let world = World::with_script(json!({ "main": [write, { "text": "done" }] }));
    world.start(&["--scope", ".:write"]);
    let Some(strace) = fill_disk(&world, "main", "history.jsonl", 3) else { return };
    assert_eq!(world.turn("main", "go")["result"], "failed");
    free_disk(&world, "main", strace);
    assert!(!world.project().join("f").exists());
    assert_eq!((world.count("main", "assistant"), world.count("main", "turn_ended")), (0, 1));
}

#[test]
fn an_input_that_cannot_be_kept_is_refused_and_costs_no_other() {
    if !has_tool("strace") {
        return;
    }
    let world = World::with_script(json!({ "main": [never(), { "text": "heard" }] }));
    world.start(&[]);
    world.ok("main", "run", json!({ "input": "first" }));
    wait_until("the turn waits", || world.count("main", "input") == 1);
    // The controller's thread accepts inputs, and this is its first write to that file from now on.
    let Some(strace) = fill_disk(&world, "main", "inbox.jsonl", 1) else { return };
    let refused = world.request("main", "run", json!({ "input": "lost" }));
    assert_eq!(refused["error"]["code"], "internal", "{refused}");
    free_disk(&world, "main", strace);
    assert_eq!(world.ok("main", "run", json!({ "input": "second" }))["queued"], true);
    world.kill("main");
    world.script(json!({ "main": [{ "text": "heard" }] }));
    assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
    wait_until("it has answered", || world.status("main")["last_response"] == "heard");
    assert_eq!(inputs(&world, "main"), ["first", "second"]);
}

#[test]
fn half_an_input_on_a_full_disk_costs_no_other() {
    let world = World::with_script(json!({ "main": [never(), { "text": "heard" }] }));
    let Some(_disk) = crate::lock_faults::Mounted::at(&world, world.path("state"), "size=512k") else {
        return;
    };
    world.start(&[]);
    world.ok("main", "run", json!({ "input": "first" }));
    wait_until("the turn waits", || world.count("main", "input") == 1);
    let filler = world.path("state/filler");
    let _ = std::fs::write(&filler, vec![b'x'; 1 << 20]); // as much as there is room for
    let full = std::fs::metadata(&filler).unwrap().len();
    std::fs::File::options().write(true).open(&filler).unwrap().set_len(full - 8192).unwrap();
    let refused = world.request("main", "run", json!({ "input": "long ".repeat(10_000) }));
    assert_eq!(refused["error"]["code"], "internal", "{refused}");
    std::fs::remove_file(&filler).unwrap();
    assert_eq!(world.ok("main", "run", json!({ "input": "second" }))["queued"], true);
    world.kill("main");
    world.script(json!({ "main": [{ "text": "heard" }] }));
    assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
    wait_until("it has answered", || world.status("main")["last_response"] == "heard");
    assert_eq!(inputs(&world, "main"), ["first", "second"]);
}

#[test]
fn a_turn_without_an_answer_has_failed() {
    let list = calls(&[call("ListFiles", json!({}))]);
    let world = World::with_script(json!({ "main": [{ "text": "first" }, {}, list, {}] }));
    world.start(&[]);
    assert_eq!(world.turn("main", "speak")["result"], "finished");
    let silent = world.turn("main", "speak again");
    assert_eq!(
        (&silent["result"], &silent["message"]),
        (&json!("failed"), &json!("the model gave an empty answer"))
    );
    wait_until("it is paused", || world.status("main")["status"] == "paused");
    // One that has worked need not speak.
    assert_eq!(world.turn("main", "work")["result"], "finished");
}

#[test]
fn a_refusal_reaches_only_who_asked() {
    let world = World::with_script(json!({ "main": [never()] }));
    world.start(&[]);
    let mut bystander = world.subscribe("main", None);
    for line in [&b"no JSON\n"[..], b"{\"method\":\"fly\"}\n", b"{\"method\":\"resume\"}\n"] {
        assert!(world.raw("main", line).starts_with("{\"error\""));
    }
    world.ok("main", "run", json!({ "input": "go" }));
    bystander.until(|event| event["event"] == "turn_started");
    let heard = bystander.seen.iter().skip(1).filter(|event| event["event"] != "status");
    assert_eq!(heard.count(), 1, "{:#?}", bystander.seen);
    assert!(bystander.seen.iter().all(|event| event.get("error").is_none()), "{:#?}", bystander.seen);
}

#[test]
fn a_list_that_is_asked_for_often_costs_no_descriptor_and_no_thread() {
    let children: Vec<Value> = (0..4).map(|n| spawn(&format!("p{n}"), &[])).collect();
    let world =
        World::with_settings(json!({ "main": [calls(&children)] }), json!({ "wake_on_events": false }));
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    let pids: Vec<i32> = ["main", "p0", "p1", "p2", "p3"].map(|pod| world.pid(pod)).into();
    let descriptors = |pid: &i32| std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let used = || pids.iter().map(|pid| (descriptors(pid), threads(*pid))).collect::<Vec<_>>();
    let settled = |used: &[(usize, usize)]| used.iter().all(|(_, threads)| *threads < 10);
    (0..4).for_each(|n| world.wait_turns(&format!("p{n}"), 1));
    world.ok("main", "list_pods", Value::Null);
    wait_until("nothing is on its way", || settled(&used()) && world.status("main")["events_in_flight"] == 0);
    let before = used();
    for _ in 0..if is_long() { 2000 } else { 100 } {
        assert_eq!(world.ok("main", "list_pods", Value::Null)["pods"].as_array().unwrap().len(), 4);
    }
    wait_until("all are closed", || {
        used().iter().zip(&before).all(|(now, before)| now.0 <= before.0 && now.1 <= before.1)
    });
}

#[test]
fn a_child_has_the_provider_of_its_spawner_though_no_manifest_names_one() {
    let world =
        World::with_script(json!({ "main": [calls(&[spawn("kid", &[])])], "kid": [{ "text": "I think" }] }));
    world.start(&["--scope", ".:write"]);
    world.manifest(json!({}));
    world.turn("main", "go");
    world.wait_turns("kid", 1);
    assert_eq!(world.status("kid")["last_response"], "I think");
}

#[test]
fn a_pod_command_that_dies_is_not_waited_for() {
    let world = World::with_settings(
        json!({ "main": [calls(&[spawn("kid", &[])]), {}] }),
        json!({ "pod_command": ["sh", "-c", "echo the disk is broken >&2; kill -9 $$"] }),
    );
    world.start(&["--scope", ".:write"]);
    let asked = Instant::now();
    world.turn("main", "go");
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
    let (ok, text) = world.results("main", "SpawnPod").remove(0);
    assert!(!ok && text.contains("the disk is broken") && text.contains("signal: 9"), "{text}");
}

#[test]
fn a_pod_whose_program_was_replaced_or_deleted_can_still_spawn() {
    let copy = |to: &Path| {
        let _ = std::fs::remove_file(to);
        copy_program(env!("CARGO_BIN_EXE_pod"), to);
    };
    let world = World::with_settings(
        json!({ "main": [calls(&[spawn("a", &[])]), {}, calls(&[spawn("b", &[])]), {}] }),
        json!({ "wake_on_events": false }),
    );
    std::fs::create_dir_all(world.path("own")).unwrap();
    std::fs::create_dir_all(world.path("on_path")).unwrap();
    let own = world.path("own/pod");
    copy(&own);
    copy(&world.path("on_path/pod"));
    let search = format!("{}:{}", world.path("on_path").display(), std::env::var("PATH").unwrap());
    let started = ran(world.program(own.to_str().unwrap(), ["--scope", ".:write"]).env("PATH", search));
    assert_eq!(started.code, Some(0), "{}", started.stderr);
    copy(&own);
    world.turn("main", "the new one beside it");
    std::fs::remove_file(&own).unwrap();
    world.turn("main", "none beside it");
    let spawned = world.results("main", "SpawnPod");
    assert!(spawned.iter().all(|(ok, _)| *ok) && spawned.len() == 2, "{spawned:?}");
}

#[test]
fn every_end_by_a_signal_leaves_nothing() {
    let world = World::with_script(json!({ "*": [{ "text": "ok" }] }));
    for round in 0..if is_long() { 500 } else { 20 } {
        world.start(&["--scope", ".:write"]);
        let pid = world.pid("main");
        if round % 2 == 0 {
            world.ok("main", "run", json!({ "input": "go" })); // some of them in mid-turn
        }
        world.signal("main", ["INT", "TERM"][round / 2 % 2]);
        wait_until("it is gone", || !lives(pid));
        assert_eq!(world.table()["allocations"], json!([]), "round {round}");
        let mut left: Vec<_> =
            std::fs::read_dir(world.runtime()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["life", "scope.lock"], "round {round}");
        assert_eq!(std::fs::read_dir(world.runtime().join("life")).unwrap().count(), 0, "round {round}");
    }
}

/// A pod in a turn that lasts until it is cancelled, its child `kid`, and a way to send it reports of that child.
fn busy_spawner() -> World {
    let world = World::with_script(json!({
        "main": [calls(&[spawn("kid", &[])]), { "text": "busy", "delay_ms": 4000 }, { "text": "noted" }, never()],
        "kid": [never()],
    }));
    world.start(&["--scope", ".:write"]);
    world.ok("main", "run", json!({ "input": "go" }));
    wait_until("the kid is at work", || world.entry("kid").is_some() && world.count("kid", "input") == 1);
    wait_until("the spawner is asked again", || world.count("main", "tool_result") == 1);
    world
}

/// Reports `count` failed turns of the kid, all at once, each with a number of its own.
fn report(world: &World, count: usize) {
    let life = world.life("kid");
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|threads| {
        for _ in 0..16 {
            threads.spawn(|| {
                loop {
                    let n = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if n >= count {
                        return;
                    }
                    let event =
                        json!({ "event": "errored", "pod_name": "kid", "message": format!("trouble {n}!") });
                    let from = json!({ "pod_id": "kid", "life": life });
                    let line = json!({ "method": "pod_event", "params": event, "from": from });
                    let reply = world.raw("main", format!("{line}\n").as_bytes());
                    assert!(reply.starts_with("{\"ok\""), "{reply}");
                }
            });
        }
    });
    assert_eq!(world.status("main")["turn"], 1, "the turn was to last until the reports are in");
}

#[test]
fn sixty_four_reports_at_once_make_one_turn_and_none_is_lost() {
    let world = busy_spawner();
    report(&world, 64);
    world.wait_turns("main", 2);
    world.wait_idle("main");
    assert_eq!((world.count("main", "turn_started"), world.count("main", "notification")), (2, 1));
    let notices = world.notices("main");
    for n in 0..64 {
        assert_eq!(notices.matches(&format!("trouble {n}!")).count(), 1, "{n}: {notices}");
    }
}

#[test]
fn three_hundred_reports_make_one_turn_and_what_did_not_fit_is_said() {
    let world = busy_spawner();
    report(&world, 300);
    world.wait_turns("main", 2);
    world.wait_idle("main");
    assert_eq!((world.count("main", "turn_started"), world.count("main", "notification")), (2, 1));
    let notices = world.notices("main");
    assert_eq!(notices.matches("trouble ").count(), 256);
    assert_eq!(notices.matches("- 44 more notices did not fit and were dropped").count(), 1, "{notices}");
}

#[test]
fn whoever_asks_a_pod_to_end_is_answered_before_it_has_ended() {
    if !has_tool("strace") {
        return skip("strace");
    }
    let world = World::with_script(json!({}));
    world.start(&[]);
    let pid = world.pid("main");
    // Answers leave late; the end itself sends nothing.
    let Some(strace) = trace(&world, "main", &["-e", "inject=sendto:delay_enter=100000"]) else { return };
    assert_eq!(world.request("main", "shutdown", Value::Null), json!({ "ok": {} }));
    wait_until("the pod has ended", || !lives(pid));
    drop(strace);
}

#[test]
fn a_run_that_was_stopped_for_a_while_goes_on_where_it_was() {
    let mut replies = vec![calls(&[call("ListFiles", json!({}))]); 1_500];
    replies.push(json!({ "text": "the final answer" }));
    let world = World::with_settings(json!({ "main": replies }), json!({ "limits": { "steps": 2_000 } }));
    let args = ["run", "--read-only", "go"];
    let mut running =
        world.program(env!("CARGO_BIN_EXE_insomnia"), args).start(ErrorOutput::Separate).unwrap();
    let stop = |signal: &str| {
        assert_eq!(ran(world.program("kill", [signal, &running.id().to_string()])).code, Some(0));
    };
    wait_until("its turn has begun", || {
        world.entry("main").is_some() && world.listens("main") && world.status("main")["turn"] == 1
    });
    stop("-STOP");
    wait_until("the turn is over", || world.status("main")["status"] == "idle");
    stop("-CONT");
    let said = running.read_to_end(1 << 20, None, Instant::now() + PATIENCE).unwrap();
    let code = running.wait(Instant::now() + PATIENCE).unwrap().code();
    assert_eq!((code, String::from_utf8_lossy(&said).as_ref()), (Some(0), "the final answer\n"));
    assert!(world.entry("main").is_none(), "it ended its pod");
}

#[test]
fn however_much_is_left_for_a_model_its_session_can_be_opened_again() {
    let world = World::with_script(json!({ "*": [{ "text": "one" }, { "text": "two" }] }));
    world.start(&[]);
    for _ in 0..12 {
        world.ok("main", "notify", json!({ "message": "<".repeat(1_000_000) }));
    }
    world.turn("main", "go");
    assert_eq!(world.insomnia(["stop", "main"]).code, Some(0));
    let resumed = world.insomnia(["resume", "main"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    assert_eq!(world.turn("main", "again")["result"], "finished");
}

#[test]
fn an_end_that_cannot_be_saved_is_told_to_who_waits_for_it() {
    if !has_tool("strace") {
        return skip("strace");
    }
    let world = World::with_script(json!({ "*": [{ "text": "one" }] }));
    world.start(&[]);
    // The beginning, the input and the reply of a turn are its first three items.
    let Some(strace) = fill_disk(&world, "main", "history.jsonl", 4) else { return };
    assert_eq!(world.turn("main", "go")["result"], "finished");
    assert_ne!(world.history("main").last().unwrap()["type"], "turn_ended");
    free_disk(&world, "main", strace);
}

#[test]
fn a_pod_that_is_stopped_while_it_starts_is_stopped_once_it_is_there() {
    let world = World::new();
    let slow = world.path("slow");
    let text = format!("#!/bin/sh\nsleep 1\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_pod"));
    std::fs::write(&slow, text).unwrap();
    std::fs::set_permissions(&slow, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let pods = json!({ "pods": { "main": [calls(&[spawn("coder", &["c:write"])]), {}], "*": [never()] } });
    std::fs::write(world.path("script.json"), pods.to_string()).unwrap();
    let provider = json!({ "kind": "script", "file": world.path("script.json") });
    world.manifest(json!({ "provider": provider, "wake_on_events": false, "pod_command": [slow] }));
    world.start(&["--scope", ".:write"]);
    world.ok("main", "run", json!({ "input": "go" }));
    wait_until("it is reserved", || world.entry("coder").is_some_and(|entry| entry["state"] == "starting"));
    let began = Instant::now();
    let stopped = world.insomnia(["stop", "coder"]);
    assert!(
        stopped.code == Some(0) && stopped.stdout.contains("pod coder ended"),
        "{} {}",
        stopped.stdout,
        stopped.stderr
    );
    assert!(began.elapsed() < Duration::from_secs(8));
    assert!(world.entry("coder").is_none() && world.entry("main").is_some());
}

#[test]
fn the_second_pod_of_a_long_name_can_go_on_too() {
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    let name = "n".repeat(32);
    for _ in 0..2 {
        world.start(&["--name", &name]);
    }
    let second = format!("{name}-2");
    world.turn(&second, "go");
    assert_eq!(world.insomnia(["stop", &second]).code, Some(0));
    let resumed = world.insomnia(["resume", &second]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    assert_eq!(world.status(&second)["name"], name);
}

#[test]
fn a_resumed_pod_knows_the_pods_that_the_lock_gives_back_whatever_else_is_lost() {
    let main =
        [calls(&[spawn("a", &["a:write"]), spawn("b", &["b:write"])]), json!({ "text": "ok" }), json!({})];
    let world = World::with_settings(
        json!({ "main": main, "*": [{ "text": "x" }] }),
        json!({ "wake_on_events": false }),
    );
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    world.wait_turns("a", 1);
    world.wait_turns("b", 1);
    let folder = PathBuf::from(world.status("main")["state_dir"].as_str().unwrap());
    world.kill("main");
    // Somebody has cleaned a life file away, and the record of the other pod was never written.
    std::fs::remove_file(world.runtime().join("life").join(world.life("a"))).unwrap();
    let records = folder.join("spawned_pods.json");
    let mut known: Value = serde_json::from_slice(&std::fs::read(&records).unwrap()).unwrap();
    known["pods"].as_array_mut().unwrap().retain(|pod| pod["pod_id"] == "a");
    std::fs::write(&records, known.to_string()).unwrap();
    world.start(&["--resume"]);
    world.kill("b");
    wait_until("the end of b is told", || {
        world.turn("main", "news?");
        world.notices("main").contains("pod \"b\" ended without saying so")
    });
    let listed = world.ok("main", "list_pods", Value::Null);
    let row = |pod: &Value| (pod["pod_id"].clone(), pod["status"].clone());
    let rows: Vec<_> = listed["pods"].as_array().unwrap().iter().map(row).collect();
    assert_eq!(rows, [(json!("a"), json!("idle"))], "{listed}");
}
