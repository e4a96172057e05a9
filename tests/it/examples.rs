//! The files that people copy: each is understood, and those that start pods really do.

use std::path::{Path, PathBuf};

use insomnia::store::instruction;
use insomnia::store::manifest::{Layer, Source, lay_over};
use serde_json::{Value, json};

use crate::world::{World, calls, ran, read, spawn, wait_until};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")
}

fn names(directory: &str) -> Vec<String> {
    let entries = std::fs::read_dir(examples().join(directory)).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn each_manifest_is_one_for_the_user() {
    let manifests: Vec<String> =
        names("manifests").into_iter().filter(|name| name != "replies.json").collect();
    assert!(manifests.len() >= 5, "{manifests:?}");
    for name in manifests {
        let path = examples().join("manifests").join(&name);
        let layer = Layer::parse(&read(&path), Source::User, &name, path.parent().unwrap()).unwrap();
        assert!(lay_over(&[layer]).unwrap().provider.kind.is_some(), "{name} names no provider");
    }
}

#[test]
fn the_script_of_the_examples_runs_from_its_task_to_its_answer() {
    let world = World::new();
    let manifest = examples().join("manifests/script.json");
    let run = world.insomnia(["run", "--manifest", manifest.to_str().unwrap(), "go"]);
    assert_eq!(run.stdout, "The first test is there.\n", "{}", run.stderr);
    assert_eq!(read(world.project().join("tests/first.txt")), "1 + 1 = 2\n");
}

#[test]
fn each_instruction_is_found_by_its_name() {
    let files = names("instructions");
    assert_eq!(files, ["orchestrator.md", "reviewer.md", "tester.md"]);
    for file in files {
        let name = format!("$user/{}", file.trim_end_matches(".md"));
        let text = instruction::resolve(&name, &examples(), Path::new("/"), &[], &mut Vec::new()).unwrap();
        assert_eq!(text, read(examples().join("instructions").join(file)));
    }
}

/// A program of this name comes before the real one on the `PATH` of the world: it leaves out its own arguments up to
/// `last` and runs the rest.
fn stand_in(world: &World, name: &str, last: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = world.path("bin").join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(
        &path,
        format!("#!/bin/sh\nwhile [ \"$1\" != {last} ]; do shift; done; shift\nexec \"$@\"\n"),
    )
    .unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    format!("{}:{}", path.parent().unwrap().display(), std::env::var("PATH").unwrap())
}

/// A child started through an example lives, works in its lent scope, and its end is told.
fn starts_a_child(example: &str, name: &str, last: &str) {
    let child =
        json!([{ "tool_calls": [{ "name": "WriteFile", "input": { "path": "lent/it", "content": "x" } }] }]);
    let world = World::with_script(
        json!({ "main": [calls(&[spawn("child", &["lent:write"])]), {}], "child": child }),
    );
    let command = examples().join(example);
    let path = stand_in(&world, name, last);
    let variables = [
        ("INSOMNIA_POD_COMMAND", command.to_str().unwrap()),
        ("POD", env!("CARGO_BIN_EXE_pod")),
        ("POD_IMAGE", last),
        ("PATH", path.as_str()),
    ];
    world.start_with_env(&variables, &["--scope", ".:write"]);
    world.turn("main", "go");
    let results = world.results("main", "SpawnPod");
    assert!(results[0].0, "{results:?}");
    wait_until("the child has written", || world.project().join("lent/it").exists());
    world.ok("child", "shutdown", Value::Null);
    wait_until("the child is gone", || world.entry("child").is_none());
    wait_until("only main is left", || world.processes() == [world.pid("main")]);
}

/// The same command with a scope that another pod holds: the pod's own words come through.
fn passes_a_refusal_on(example: &str, name: &str, last: &str) {
    let world = World::with_script(json!({}));
    world.start(&["--scope", ".:write"]);
    let path = stand_in(&world, name, last);
    let command = examples().join(example);
    let program = world
        .program(command.to_str().unwrap(), ["--name", "second", "--scope", ".:write"])
        .env("POD", env!("CARGO_BIN_EXE_pod"))
        .env("POD_IMAGE", last)
        .env("PATH", path);
    let refused = ran(program);
    assert_ne!(refused.code, Some(0));
    assert!(refused.stderr.contains("is held by pod \"main\""), "{}", refused.stderr);
}

#[test]
fn a_pod_starts_through_systemd_run() {
    starts_a_child("pod-in-systemd-run", "systemd-run", "--");
    passes_a_refusal_on("pod-in-systemd-run", "systemd-run", "--");
}

#[test]
fn a_pod_starts_in_a_container() {
    starts_a_child("pod-in-container", "podman", "image");
    passes_a_refusal_on("pod-in-container", "podman", "image");
}

#[test]
fn a_container_without_an_image_is_refused_before_anything_is_made() {
    let world = World::new();
    let command = examples().join("pod-in-container");
    let refused = ran(world.program("timeout", ["10", command.to_str().unwrap()]));
    assert!(!matches!(refused.code, Some(0 | 124)), "{refused:?}");
    assert!(refused.stderr.contains("set POD_IMAGE"), "{}", refused.stderr);
    assert!(!world.state().exists());
}

/// Starts the service's pod as its unit says, with what its model is to answer, and runs a turn.
fn service(replies: Value) -> (World, impl Fn(&str) -> String) {
    let world = World::with_script(json!({ "unit-notes": replies }));
    let home = world.path("home").to_str().unwrap().to_owned();
    std::fs::create_dir_all(world.path("home/projects/notes")).unwrap();
    let unit = read(examples().join("insomnia-pod@.service"));
    let command = move |key: &str| {
        let line = unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        let line = line.replace("%h", &home).replace("%i", "notes");
        // Where "cargo install" puts the two programs.
        let line = line.replace(&format!("{home}/.cargo/bin/pod"), env!("CARGO_BIN_EXE_pod"));
        line.replace(&format!("{home}/.cargo/bin/insomnia"), env!("CARGO_BIN_EXE_insomnia"))
    };
    let background = format!("exec {} </dev/null >ready 2>&1 &", command("ExecStart="));
    ran(world.program("sh", ["-c", &background]));
    wait_until("the pod is ready", || {
        std::fs::read_to_string(world.project().join("ready")).unwrap_or_default().ends_with('\n')
    });
    let scope = format!("{}/projects/notes:write:recursive", world.path("home").display());
    assert_eq!(world.status("unit-notes")["scope"], json!([scope]));
    world.turn("unit-notes", "go");
    (world, command)
}

#[test]
fn the_command_of_the_service_starts_a_pod_that_ends_on_sigterm() {
    let (world, _) = service(json!([{}]));
    world.signal("unit-notes", "TERM");
    wait_until("nothing is left", || world.processes().is_empty());
    assert!(world.entry("unit-notes").is_none());
}

#[test]
fn the_service_stops_with_all_pods_that_it_has_spawned() {
    let (world, command) = service(json!([calls(&[spawn("child", &["lent:write"])]), {}]));
    assert!(world.entry("child").is_some());
    let stopped = ran(world.program("sh", ["-c", command("ExecStop=-").as_str()]));
    assert_eq!(stopped.code, Some(0), "{}", stopped.stderr);
    wait_until("nothing is left", || world.processes().is_empty());
    assert!(world.entry("unit-notes").is_none() && world.entry("child").is_none());
}
