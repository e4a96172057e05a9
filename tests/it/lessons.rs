//! What went wrong in other programs of this kind and no other file of tests holds.

use std::path::PathBuf;

use serde_json::{Value, json};

use insomnia::sys::process::{ErrorOutput, Running};

use crate::world::{World, call, calls, has_tool, lives, skip, wait_until};

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
    let pid = world.pid(pod_id);
    let path = PathBuf::from(world.status(pod_id)["state_dir"].as_str().unwrap()).join(file);
    let (inject, pid_text) = (format!("inject=write:error=ENOSPC:when={n}"), pid.to_string());
    let args = ["-f", "-qq", "-o", "/dev/null", "-P", path.to_str().unwrap(), "-e", &inject, "-p", &pid_text];
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
