//! Starting and ending one pod: the launch contract, the ready line, and what is left afterwards.

use serde_json::{Value, json};

use crate::world::{World, lives, wait_until};

#[test]
fn a_pod_says_that_it_is_ready_and_answers() {
    let world = World::with_script(json!({ "main": [{ "text": "hello" }] }));
    let ready = world.start(&["--name", "main"]);
    assert_eq!(ready["pod_id"], "main");
    assert_eq!(world.status("main")["status"], "idle");
    assert_eq!(world.turn("main", "hi")["result"], "finished");
    assert_eq!(world.ok("main", "read_output", Value::Null)["text"], "hello");
}

#[test]
fn u12_sigterm_ends_an_idle_pod_and_leaves_nothing() {
    for signal in ["TERM", "INT"] {
        let world = World::with_script(json!({}));
        world.start(&["--scope", ".:write"]);
        let pid = world.pid("main");
        world.signal("main", signal);
        wait_until("the pod is gone", || !lives(pid));
        assert_eq!(world.entry("main"), None);
        assert!(!world.socket("main").exists() && !world.runtime().join("main").exists());
        assert_eq!(std::fs::read_dir(world.runtime().join("life")).unwrap().count(), 0);
    }
}

#[test]
fn a_pipe_where_a_text_should_be_hinders_nobody() {
    if !crate::world::has_tool("mkfifo") {
        return;
    }
    let world = World::with_script(json!({ "main": [{ "text": "hello" }] }));
    let pipe = |path: std::path::PathBuf| crate::world::ran(world.program("mkfifo", [path]));
    pipe(world.project().join("AGENTS.md"));
    world.start(&[]);
    assert_eq!(world.turn("main", "hi")["result"], "finished");
    world.kill("main");
    std::fs::create_dir(world.project().join(".insomnia")).unwrap();
    pipe(world.project().join(".insomnia/manifest.json"));
    let refused = world.pod_command(["--name", "other"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("no regular file"), "{}", refused.stderr);
    assert_eq!(world.processes(), Vec::<i32>::new());
}

#[test]
fn a_folder_that_nobody_owns_goes_with_the_next_start() {
    let world = World::with_script(json!({}));
    world.start(&["--name", "gone"]);
    world.kill("gone");
    std::fs::remove_file(world.runtime().join("scope.lock")).unwrap();
    world.start(&["--name", "next"]);
    assert!(!world.runtime().join("gone").exists() && world.runtime().join("next").exists());
}

#[test]
fn a_pod_keeps_nothing_open_that_its_caller_had() {
    let world = World::with_script(json!({}));
    let start = format!("exec 9>held; {} ", env!("CARGO_BIN_EXE_pod"));
    assert_eq!(crate::world::ran(world.program("bash", ["-c", &start])).code, Some(0));
    let open = std::fs::read_dir(format!("/proc/{}/fd", world.pid("main"))).unwrap();
    let names: Vec<_> = open.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()).collect();
    assert!(names.len() > 3 && !names.iter().any(|name| name.ends_with("held")), "{names:?}");
}
