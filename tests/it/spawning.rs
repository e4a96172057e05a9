//! SpawnPod: an independent process with a lent scope, and nothing left of it when any step fails.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::world::{World, call, calls, lives, read, spawn, wait_until};

/// A root pod `main` with `project` as its scope, which the events of its pods do not wake.
fn quiet(pods: Value, settings: Value) -> World {
    let mut settings = settings;
    settings["wake_on_events"] = json!(false);
    let world = World::with_settings(pods, settings);
    world.start(&["--scope", ".:write"]);
    world
}

fn write(path: &str) -> Value {
    call("WriteFile", json!({ "path": path, "content": "x\n" }))
}

fn edit(path: &str) -> Value {
    call("EditFile", json!({ "path": path, "old": "x", "new": "y" }))
}

/// An executable shell script in the world, for `pod_command`.
fn program(world: &World, name: &str, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = world.path(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

const POD: &str = env!("CARGO_BIN_EXE_pod");

/// Waits until `main` is all that there is: in the table, in the runtime directory, of processes.
fn wait_for_main_alone(world: &World) {
    let main = world.pid("main");
    wait_until("only main is left", || world.processes() == [main]);
    let ids: Vec<Value> = world.table()["allocations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["pod_id"].clone())
        .collect();
    assert_eq!(ids, ["main"]);
    assert_eq!(world.status("main")["lent"], json!([]));
    let names = |path: PathBuf| {
        let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names(world.runtime()), ["life", "main", "scope.lock"]);
    assert_eq!(names(world.runtime().join("life")), [world.life("main")]);
    assert_eq!(names(world.runtime().join("main")), ["sock"]);
    assert!(!world.project().join("lent").exists(), "the lent directory stays");
    assert_eq!(world.ok("main", "list_pods", json!(null))["pods"], json!([]));
}

/// Has `main` try to spawn with this input and checks the reason, and that nothing is left.
fn fails(world: World, input: Value, expected: &str) {
    let mut wanted = json!({ "name": "child", "task": "t", "scope": ["lent/deep:write"] });
    for (key, value) in input.as_object().unwrap() {
        wanted[key] = value.clone();
    }
    let shown = wanted.to_string();
    std::fs::write(
        world.path("script.json"),
        json!({ "pods": { "main": [calls(&[call("SpawnPod", wanted)]), { "text": "done" }] } }).to_string(),
    )
    .unwrap();
    world.start(&["--scope", ".:write"]);
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let (ok, text) = world.results("main", "SpawnPod").remove(0);
    assert!(!ok && text.contains(expected), "{shown}: {text}");
    wait_for_main_alone(&world);
}

fn plain() -> World {
    World::with_script(json!({}))
}

fn with_command(command: &dyn Fn(&World) -> Vec<String>, settings: Value) -> World {
    let world = plain();
    let mut manifest = json!({ "provider": { "kind": "script", "file": world.path("script.json") } });
    for (key, value) in settings.as_object().unwrap() {
        manifest[key] = value.clone();
    }
    manifest["pod_command"] = json!(command(&world));
    world.manifest(manifest);
    world
}

fn shell(text: &'static str) -> impl Fn(&World) -> Vec<String> {
    move |world| vec![program(world, "command", text).to_string_lossy().into_owned()]
}

#[test]
fn a_spawned_pod_is_a_process_of_its_own_that_outlives_its_spawner() {
    let world = quiet(
        json!({
            "main": [calls(&[spawn("coder", &["src:write"])]), { "text": "spawned" }],
            "coder": [{ "text": "first" }, { "text": "second" }],
        }),
        json!({}),
    );
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let answer = world.answer("main", "SpawnPod");
    assert_eq!(answer["pod_id"], "coder");
    assert_eq!(answer["address"], world.socket("coder").to_string_lossy().as_ref());
    let rule = format!("{}:write:recursive", world.project().join("src").display());
    assert_eq!(answer["scope"], json!([rule]));
    let entry = world.entry("coder").unwrap();
    assert_eq!((&entry["delegated_from"], &entry["state"]), (&json!("main"), &json!("live")));
    assert_eq!(entry["scope_allow"], json!([rule]));
    assert_eq!(world.status("main")["lent"], json!([rule]));
    // Its task has run at once.
    world.wait_turns("coder", 1);
    let input = world.history("coder").into_iter().find(|item| item["type"] == "input").unwrap();
    assert_eq!((&input["text"], &input["from"]), (&json!("task of coder"), &json!("main")));
    // proc_pid_stat(5): after the name come state, parent, group, session.
    let pid = world.pid("coder");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let main = world.pid("main");
    assert_eq!(fields[3], pid.to_string(), "its session");
    assert_ne!(fields[1], main.to_string(), "its parent");
    for number in 0..3 {
        let target = std::fs::read_link(format!("/proc/{pid}/fd/{number}")).unwrap();
        let target = target.to_string_lossy();
        assert!(target == "/dev/null" || target.ends_with("/pod.log"), "descriptor {number} is {target}");
    }
    for descriptor in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let target = std::fs::read_link(descriptor.unwrap().path()).unwrap_or_default();
        let target = target.to_string_lossy().into_owned();
        assert!(!target.contains("/main/"), "it has {target} of its spawner open");
    }
    let known = std::fs::read_to_string(
        PathBuf::from(world.status("main")["state_dir"].as_str().unwrap()).join("spawned_pods.json"),
    )
    .unwrap();
    let known: Value = serde_json::from_str(&known).unwrap();
    assert_eq!(
        (&known["pods"][0]["pod_id"], &known["pods"][0]["origin"]),
        (&json!("coder"), &json!("spawned"))
    );
    assert_eq!(known["pods"][0]["life"], entry["life"]);
    world.kill("main");
    assert_eq!(world.turn("coder", "still there?")["result"], "finished");
    assert_eq!(world.ok("coder", "read_output", json!(null))["text"], "second");
    assert!(lives(pid));
}

#[test]
fn what_is_lent_is_refused_to_the_spawner_until_it_comes_back() {
    let world = quiet(
        json!({
            "main": [
                calls(&[write("src/a"), write("top"), spawn("coder", &["src:write"]), write("src/a"), edit("src/a"), write("top")]),
                calls(&[call("StopPod", json!({ "pod_id": "coder" })), write("src/b"), edit("src/a")]),
                { "text": "done" },
            ],
            "coder": [calls(&[edit("src/a"), write("top")]), { "text": "ok" }, { "text": "x", "delay_ms": 60_000 }],
        }),
        json!({}),
    );
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let oks = |results: &[(bool, String)]| results.iter().map(|(ok, _)| *ok).collect::<Vec<_>>();
    let writes = world.results("main", "WriteFile");
    assert_eq!(oks(&writes), [true, true, false, true, true], "{writes:?}");
    let edits = world.results("main", "EditFile");
    // Whether the coder was stopped before its edit decides whether the last one still finds an x.
    assert!(!edits[0].0, "{edits:?}");
    for (_, text) in [&writes[2], &edits[0]] {
        assert!(text.contains("\"coder\""), "the holder is not named: {text}");
    }
    let stopped = world.answer("main", "StopPod");
    assert_eq!(
        stopped["scope_returned"],
        json!([format!("{}:write:recursive", world.project().join("src").display())])
    );
    wait_for_main_alone(&world);
}

#[test]
fn conflicts_name_pod_process_and_rule() {
    let world = quiet(
        json!({
            "main": [
                calls(&[
                    spawn("a", &["x:write"]),
                    spawn("b", &["x:write"]), spawn("b", &["x/y:write"]), spawn("b", &[".:write"]),
                    spawn("b", &["x:write:flat"]), spawn("b", &["z:write", "x/y/z:write"]),
                    spawn("b", &["xy:write"]),
                ]),
                { "text": "done" },
            ],
        }),
        json!({}),
    );
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let results = world.results("main", "SpawnPod");
    let rule = format!("{}:write:recursive", world.project().join("x").display());
    for (ok, text) in &results[1..6] {
        assert!(!ok, "{text}");
        for part in ["\"a\"", &format!("pid {}", world.pid("a")), &rule] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }
    assert!(results[6].0, "xy is not below x: {results:?}");
    assert!(!world.project().join("z").exists(), "made for a loan that was refused");
    // A stranger who starts where somebody works is told who that is.
    for (scope, holder) in [(".:write", "main"), ("x/y:write", "a"), ("new:write", "main")] {
        let ran = world.pod_command(["--name", "stranger", "--scope", scope]);
        assert_eq!(ran.code, Some(1));
        for part in [format!("\"{holder}\""), format!("pid {}", world.pid(holder)), "write:recursive".into()]
        {
            assert!(ran.stderr.contains(&part), "{scope}: {part} is missing in: {}", ran.stderr);
        }
    }
    assert_eq!(world.entry("stranger"), None);
}

#[test]
fn a_pod_cannot_lend_what_a_stranger_holds() {
    let world = World::with_script(json!({
        "main": [calls(&[spawn("c", &["../other:write"]), spawn("c", &["mine:write"])]), { "text": "done" }],
    }));
    std::fs::create_dir(world.path("other")).unwrap();
    world.start(&["--name", "stranger", "--scope", "../other:write"]);
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    let results = world.results("main", "SpawnPod");
    assert!(!results[0].0 && results[0].1.contains("\"stranger\""), "{results:?}");
    assert!(results[0].1.contains(&format!("pid {}", world.pid("stranger"))), "{results:?}");
    assert!(results[1].0, "{results:?}");
}

#[test]
fn a_spawn_with_wrong_input_says_what_is_wrong() {
    fails(plain(), json!({ "scope": ["lent:fly"] }), "lent:fly");
    fails(plain(), json!({ "scope": ["lent/deep:write", "/etc:write"] }), "is not inside the scope");
    fails(plain(), json!({ "scope": ["../other:write"] }), "is not inside the scope");
    fails(plain(), json!({ "scope": [""] }), "scope");
    fails(plain(), json!({ "scope": "lent:write" }), "\"scope\"");
    fails(plain(), json!({ "name": "../x" }), "name");
    fails(plain(), json!({ "name": "" }), "name");
    fails(plain(), json!({ "name": "-rf" }), "name");
    fails(plain(), json!({ "name": "life" }), "name");
    fails(plain(), json!({ "name": "a".repeat(33) }), "name");
    fails(plain(), json!({ "name": "a\nb" }), "name");
    fails(plain(), json!({ "instruction": "$insomnia/nothing" }), "nothing");
    fails(plain(), json!({ "task": "x".repeat(2 << 20) }), "a request line is at most");
    fails(plain(), json!({ "dir": "missing" }), "is no directory");
    let world = plain();
    std::fs::write(world.project().join("file"), "").unwrap();
    fails(world, json!({ "dir": "file" }), "is no directory");
    let world = plain();
    std::fs::write(world.project().join("file"), "").unwrap();
    fails(world, json!({ "scope": ["file:write"] }), "file");
}

#[test]
fn a_spawn_into_a_project_that_would_widen_rights_is_refused_in_the_childs_words() {
    for (manifest, expected) in [
        (r#"{"scope":["/"]}"#, "may not set \"scope\""),
        (r#"{"provider":{"kind":"command","command":["sh"]}}"#, "may not set \"provider."),
        (r#"{"limits":{"steps":100000}}"#, "may not raise \"limits.steps\""),
        (r#"{"shell":{"sandbox":"off"}}"#, "may not set \"shell.sandbox\""),
        (r#"{"colour":1}"#, "colour"),
        ("{", "manifest"),
    ] {
        let world = plain();
        std::fs::create_dir_all(world.project().join("sub/.insomnia")).unwrap();
        std::fs::write(world.project().join("sub/.insomnia/manifest.json"), manifest).unwrap();
        fails(world, json!({ "dir": "sub" }), expected);
    }
}

#[test]
fn a_pod_command_that_fails_is_told_and_leaves_nothing() {
    let missing = |_: &World| vec!["/nowhere/pod".to_owned()];
    fails(with_command(&missing, json!({})), json!({}), "there is no such program");
    let words = shell("echo 'the disk is on fire' >&2; exit 3");
    fails(with_command(&words, json!({})), json!({}), "the disk is on fire");
    fails(with_command(&shell("exit 0"), json!({})), json!({}), "it said nothing");
    fails(with_command(&shell("echo hello; exit 0"), json!({})), json!({}), "is no ready line");
    fails(with_command(&shell("kill -9 $$"), json!({})), json!({}), "signal: 9");
    let impostor = shell(r#"echo '{"pod_id":"child","socket":"/x","pid":4242}'"#);
    fails(with_command(&impostor, json!({})), json!({}), "no entry in scope.lock");
    let much = shell("head -c 3000000 /dev/zero | tr '\\0' x; exit 0");
    fails(with_command(&much, json!({})), json!({}), "is no ready line");
    let hangs = shell("sleep 60 & sleep 60");
    let limits = json!({ "limits": { "launch_seconds": 1 } });
    fails(with_command(&hangs, limits.clone()), json!({}), "limits.launch_seconds");
    let denied: Vec<String> = (0..10_000).map(|n| format!("NoSuchTool{n}")).collect();
    fails(with_command(&hangs, limits), json!({ "tools_deny": denied }), "settings");
}

#[test]
fn a_pod_command_named_by_the_environment_comes_first() {
    let world = World::with_script(json!({ "main": [calls(&[spawn("child", &["lent/deep:write"])]), {}] }));
    let words = program(&world, "command", "echo 'from the environment' >&2; exit 1");
    let variable = [("INSOMNIA_POD_COMMAND", words.to_str().unwrap())];
    world.start_with_env(&variable, &["--scope", ".:write"]);
    world.turn("main", "go");
    let results = world.results("main", "SpawnPod");
    assert!(!results[0].0 && results[0].1.contains("from the environment"), "{results:?}");
    wait_for_main_alone(&world);
}

#[test]
fn a_child_that_started_but_gave_a_wrong_ready_line_is_stopped() {
    let world = with_command(
        &|world| {
            let path = program(world, "command", &format!("{POD} \"$@\" >/dev/null; echo hello"));
            vec![path.to_string_lossy().into_owned()]
        },
        json!({}),
    );
    fails(world, json!({}), "cannot start pod \"child\"");
}

#[test]
fn a_child_without_curl_says_so() {
    let world = with_command(
        &|world| {
            let overlay = world.path("http.json");
            let provider = json!({ "kind": "openai", "base_url": "http://127.0.0.1:1" });
            std::fs::write(&overlay, json!({ "provider": provider }).to_string()).unwrap();
            let text = format!("PATH=/nowhere exec {POD} \"$@\" --overlay {}", overlay.display());
            vec![program(world, "command", &text).to_string_lossy().into_owned()]
        },
        json!({}),
    );
    fails(world, json!({}), "install curl");
}

#[test]
fn u01_a_socket_path_that_is_too_long_is_refused_before_anything_is_made() {
    fails(plain().deep(4), json!({ "name": "child" }), "103");
    let world = World::with_script(json!({
        "main": [calls(&[spawn("twin", &[]), spawn("twin", &[])]), { "text": "done" }],
    }))
    .deep(4);
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    let results = world.results("main", "SpawnPod");
    assert!(results[0].0 && !results[1].0, "the second would be twin-2: {results:?}");
    assert!(results[1].1.contains("103") && results[1].1.contains("twin-2"), "{results:?}");
}

#[test]
fn a_spawn_that_is_cancelled_in_mid_launch_leaves_nothing() {
    for text in ["sleep 60".to_owned(), format!("{POD} \"$@\"; sleep 60")] {
        let world = with_command(
            &|world| vec![program(world, "command", &text).to_string_lossy().into_owned()],
            json!({}),
        );
        std::fs::write(
            world.path("script.json"),
            json!({ "pods": { "main": [calls(&[spawn("child", &["lent/deep:write"])]), {}] } }).to_string(),
        )
        .unwrap();
        world.start(&["--scope", ".:write"]);
        let mut events = world.subscribe("main", None);
        world.ok("main", "run", json!({ "input": "go" }));
        let state = if text.starts_with("sleep") { "starting" } else { "live" };
        wait_until("the launch is under way", || {
            world.entry("child").is_some_and(|entry| entry["state"] == state)
        });
        assert_eq!(world.ok("main", "cancel", json!(null))["cancelled"], true);
        assert_eq!(events.until_turn_ended()["result"], "cancelled");
        let results = world.results("main", "SpawnPod");
        assert!(!results[0].0 && results[0].1.contains("cancel"), "{results:?}");
        wait_for_main_alone(&world);
    }
}

#[test]
fn limits_are_named_with_their_setting() {
    let world = quiet(
        json!({
            "main": [calls(&[spawn("a", &["a:write"]), spawn("b", &["b:write"]), spawn("c", &["c:write"])]), {}],
            "a": [calls(&[spawn("deep", &["a/deep:write"])]), { "text": "ok" }],
        }),
        json!({ "limits": { "depth": 2, "pods_per_spawner": 2 } }),
    );
    world.turn("main", "go");
    let results = world.results("main", "SpawnPod");
    assert!(results[0].0 && results[1].0, "{results:?}");
    assert!(!results[2].0 && results[2].1.contains("limits.pods_per_spawner"), "{results:?}");
    world.wait_turns("a", 1);
    let deep = world.results("a", "SpawnPod");
    assert!(!deep[0].0 && deep[0].1.contains("limits.depth"), "{deep:?}");

    let world = quiet(
        json!({ "main": [calls(&[spawn("a", &["a:write"]), spawn("b", &["b:write"])]), {}] }),
        json!({ "limits": { "pods_per_user": 2 } }),
    );
    world.turn("main", "go");
    let results = world.results("main", "SpawnPod");
    assert!(results[0].0 && !results[1].0 && results[1].1.contains("limits.pods_per_user"), "{results:?}");
    let ran = world.pod_command(["--name", "third"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("limits.pods_per_user"), "{}", ran.stderr);
}

#[test]
fn a_name_in_use_gets_a_number() {
    let world = quiet(
        json!({ "main": [calls(&[spawn("twin", &["a:write"]), spawn("twin", &["b:write"]), spawn("main", &[])]), {}] }),
        json!({}),
    );
    world.turn("main", "go");
    let ids: Vec<String> = world
        .results("main", "SpawnPod")
        .iter()
        .map(|(_, text)| serde_json::from_str::<Value>(text).unwrap()["pod_id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(ids, ["twin", "twin-2", "main-2"]);
    for id in ids {
        assert_eq!(world.status(&id)["pod_id"], id);
    }
}

#[test]
fn a_reservation_dies_with_its_spawner_and_a_late_adopter_says_why() {
    let world = with_command(
        &|world| {
            let text = format!(
                "cat > {0}; echo \"$@\" > {1}.new; mv {1}.new {1}; sleep 60",
                world.path("overlay").display(),
                world.path("args").display()
            );
            vec![program(world, "command", &text).to_string_lossy().into_owned()]
        },
        json!({}),
    );
    std::fs::write(
        world.path("script.json"),
        json!({ "pods": { "main": [calls(&[spawn("child", &["lent:write"])]), {}] } }).to_string(),
    )
    .unwrap();
    world.start(&["--scope", ".:write"]);
    world.ok("main", "run", json!({ "input": "go" }));
    wait_until("the command has begun", || world.path("args").exists());
    assert_eq!(world.entry("child").unwrap()["state"], "starting");
    world.kill("main");
    let args = std::fs::read_to_string(world.path("args")).unwrap();
    let overlay = world.path("overlay").to_string_lossy().into_owned();
    let args = args.split_whitespace().map(|word| if word == "-" { overlay.as_str() } else { word });
    let ran = world.pod_command(args);
    assert_eq!(ran.code, Some(1), "{}", ran.stdout);
    assert!(ran.stderr.contains("the reservation for this pod is gone"), "{}", ran.stderr);
    // Whoever opens the table next finds it empty, and the scope free.
    world.start(&["--name", "next", "--scope", ".:write"]);
    assert_eq!(world.table()["allocations"].as_array().unwrap().len(), 1);
    assert_eq!(std::fs::read_dir(world.runtime().join("life")).unwrap().count(), 1);
}

#[test]
fn an_adopted_pod_that_hears_nothing_ends_itself() {
    let world = with_command(
        &|world| {
            let text = format!("{POD} \"$@\"; kill -9 $PPID");
            vec![program(world, "command", &text).to_string_lossy().into_owned()]
        },
        json!({ "limits": { "launch_seconds": 5 } }),
    );
    std::fs::write(
        world.path("script.json"),
        json!({ "pods": { "main": [calls(&[spawn("child", &["lent:write"])]), {}] } }).to_string(),
    )
    .unwrap();
    world.start(&["--scope", ".:write"]);
    let main = world.pid("main");
    world.ok("main", "run", json!({ "input": "go" }));
    wait_until("the spawner is dead", || !lives(main));
    wait_until("nobody is left", || world.processes().is_empty());
    assert_eq!(world.entry("child"), None);
    assert_eq!(world.count("child", "turn_started"), 0);
}

#[test]
fn denied_tools_are_denied_to_children_too() {
    let child = call(
        "SpawnPod",
        json!({ "name": "child", "task": "t", "scope": ["a:write"], "tools_deny": ["EditFile"] }),
    );
    let world = quiet(
        json!({
            "main": [calls(&[child]), {}],
            "child": [calls(&[write("a/x"), edit("a/x"), spawn("grandchild", &["a/b:write"])]), { "text": "ok" }],
            "grandchild": [calls(&[write("a/b/x"), edit("a/b/x"), call("ListFiles", json!({}))]), { "text": "ok" }],
        }),
        json!({ "tools": { "deny": ["WriteFile"] } }),
    );
    world.turn("main", "go");
    world.wait_turns("child", 1);
    world.wait_turns("grandchild", 1);
    for pod in ["child", "grandchild"] {
        for tool in ["WriteFile", "EditFile"] {
            let (ok, text) = world.results(pod, tool).remove(0);
            assert!(!ok && text.contains("there is no tool"), "{pod}: {text}");
        }
    }
    assert!(world.results("grandchild", "ListFiles")[0].0);
}

#[test]
fn s05_a_child_is_never_less_confined_than_its_spawner() {
    let with = |more: Value| {
        let mut input = json!({ "name": "child", "task": "t", "scope": ["mine/sub:write"] });
        for (key, value) in more.as_object().unwrap() {
            input[key] = value.clone();
        }
        call("SpawnPod", input)
    };
    let world = World::with_script(json!({}));
    let secret = world.path("config/insomnia/key");
    std::fs::write(&secret, "the secret key").unwrap();
    std::fs::write(world.path("home/private.md"), "private words").unwrap();
    let attempts = vec![
        with(json!({ "overlay": { "shell": { "sandbox": "off" } } })),
        with(json!({ "environment": { "INSOMNIA_POD_COMMAND": "sh" } })),
        with(json!({ "env": {} })),
        with(json!({ "pod_command": ["sh"] })),
        with(json!({ "manifest": "/tmp/x" })),
        with(json!({ "callback": "/tmp/x" })),
        with(json!({ "tools_deny": null, "tools": { "deny": [] } })),
        with(json!({ "scope": ["..:write"] })),
        with(json!({ "scope": ["docs:write"] })),
        with(json!({ "scope": ["mine:write", "docs:write"] })),
        with(json!({ "scope": ["mine/../../outside:write"] })),
        with(json!({ "scope": ["link:write"] })),
        with(json!({ "scope": ["../outside:read"] })),
        with(json!({ "scope": ["../config/insomnia:read"] })),
        with(json!({ "scope": ["../run:write"] })),
        with(json!({ "dir": "../home" })),
        with(json!({ "instruction": "../home/private.md" })),
        with(json!({ "instruction": world.path("home/private.md") })),
        with(json!({ "instruction": secret })),
        with(json!({ "instruction": "$user/../key" })),
        with(json!({ "instruction": format!("$user/{}", world.path("home/private").display()) })),
    ];
    let count = attempts.len();
    let script = json!({ "pods": { "main": [{ "tool_calls": attempts }, { "text": "done" }] } });
    std::fs::write(world.path("script.json"), script.to_string()).unwrap();
    for name in ["mine", "docs"] {
        std::fs::create_dir(world.project().join(name)).unwrap();
    }
    std::fs::create_dir(world.path("outside")).unwrap();
    std::os::unix::fs::symlink("../outside", world.project().join("link")).unwrap();
    let project = world.project();
    let read = format!("{}:read", project.display());
    world.start(&["--scope", "mine:write", "--scope", &read]);
    let before = world.table();
    world.turn("main", "go");
    let results = world.results("main", "SpawnPod");
    assert_eq!(results.len(), count);
    for (number, (ok, text)) in results.iter().enumerate() {
        assert!(!ok, "attempt {number}: {text}");
        assert!(!text.contains("the secret key") && !text.contains("private words"), "{text}");
    }
    assert_eq!(world.table(), before);
    assert!(!project.join("mine/sub").exists());
}

#[test]
fn r05_no_instruction_file_leads_a_model_to_the_key() {
    use std::os::unix::fs::symlink;
    let world = World::new();
    let (seen, first) = (world.path("seen"), world.path("first"));
    let key = world.path("config/insomnia/key");
    std::fs::write(&key, "the secret key").unwrap();
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    symlink("/proc/self/environ", world.project().join("AGENTS.md")).unwrap();
    symlink("/proc/self/environ", world.project().join("link.md")).unwrap();
    for (name, target) in [("environ", Path::new("/proc/self/environ")), ("key", &key)] {
        std::fs::create_dir(world.project().join(name)).unwrap();
        symlink(target, world.project().join(name).join("AGENTS.md")).unwrap();
    }
    std::fs::create_dir_all(world.project().join(".insomnia/instructions")).unwrap();
    symlink(&key, world.project().join(".insomnia/instructions/x.md")).unwrap();
    let attempts = [
        json!({ "name": "a", "task": "child", "instruction": "/proc/self/environ" }),
        json!({ "name": "b", "task": "child", "instruction": "link.md" }),
        json!({ "name": "c", "task": "child", "instruction": "$project/x" }),
        json!({ "name": "d", "task": "child", "dir": "environ" }),
        json!({ "name": "e", "task": "child", "dir": "key" }),
    ];
    let mut events: Vec<String> = attempts
        .iter()
        .map(|input| json!({ "event": "tool_call", "name": "SpawnPod", "input": input }).to_string())
        .collect();
    events.push(json!({ "event": "done" }).to_string());
    std::fs::write(world.path("events"), events.join("\n")).unwrap();
    // The model keeps all that it is told; the first that is asked starts the others.
    let model = format!(
        "cat >> {}; if mkdir {}; then cat {}; else echo '{{\"event\":\"done\"}}'; fi",
        seen.display(),
        first.display(),
        world.path("events").display()
    );
    world.manifest(json!({
        "provider": { "kind": "command", "command": ["sh", "-c", model], "api_key_file": key }
    }));
    world.start_with_env(&[("ANTHROPIC_API_KEY", "sk-of-the-environment")], &[]);
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let results = world.results("main", "SpawnPod");
    let reasons = ["view of the kernel", "view of the kernel", "outside the project"];
    for ((ok, text), reason) in results.iter().zip(reasons) {
        assert!(!ok && text.contains(reason), "{text}");
    }
    assert_eq!(results.iter().filter(|(ok, _)| *ok).count(), 2, "AGENTS.md is optional: {results:?}");
    for pod in ["main", "d", "e"] {
        world.wait_turns(pod, 1);
        let log = read(world.status(pod)["log"].as_str().unwrap());
        assert!(log.contains("AGENTS.md") && log.contains("outside the project"), "{pod}: {log}");
    }
    let seen = read(seen);
    for secret in ["the secret key", "sk-of-the-environment", "INSOMNIA_RUNTIME_DIR="] {
        assert!(!seen.contains(secret), "{secret} in {seen}");
    }
}

#[test]
fn of_ten_that_want_one_scope_at_once_exactly_one_starts() {
    let world = World::with_script(json!({}));
    let start = |scope: &'static [&'static str]| {
        std::thread::scope(|threads| {
            let started: Vec<_> = (0..10)
                .map(|_| {
                    threads.spawn(|| {
                        let args = ["--name", "twin"].iter().chain(scope).copied();
                        world.pod_command(args)
                    })
                })
                .collect();
            started.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let (started, refused): (Vec<_>, Vec<_>) =
        start(&["--scope", "one:write"]).into_iter().partition(|ran| ran.code == Some(0));
    assert_eq!(started.len(), 1, "{refused:?}");
    for ran in &refused {
        assert!(ran.stderr.contains("is held by pod \"twin\""), "{}", ran.stderr);
    }
    // Without a scope to quarrel about all of them start, each with an id and a socket of its own.
    let mut ids: Vec<String> = start(&[])
        .iter()
        .map(|ran| serde_json::from_str::<Value>(&ran.stdout).unwrap()["pod_id"].as_str().unwrap().to_owned())
        .collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 10, "{ids:?}");
    for id in ids {
        assert_eq!(world.status(&id)["pod_id"], id);
    }
    assert_eq!(world.table()["allocations"].as_array().unwrap().len(), 11);
}

#[test]
fn a_dead_pods_socket_is_replaced_and_anything_else_in_its_place_is_not_touched() {
    let world = World::with_script(json!({}));
    world.start(&["--name", "a", "--scope", ".:write"]);
    world.kill("a");
    assert!(world.socket("a").exists());
    world.start(&["--name", "a", "--scope", ".:write"]);
    assert_eq!(world.status("a")["pod_id"], "a");
    for place in ["file", "directory", "link"] {
        let folder = world.runtime().join(place);
        std::fs::create_dir(&folder).unwrap();
        match place {
            "file" => std::fs::write(folder.join("sock"), "mine").unwrap(),
            "directory" => std::fs::create_dir(folder.join("sock")).unwrap(),
            _ => std::os::unix::fs::symlink("elsewhere", folder.join("sock")).unwrap(),
        }
        let ran = world.pod_command(["--name", place]);
        assert_eq!(ran.code, Some(1));
        assert!(ran.stderr.contains("is in the way of the socket"), "{}", ran.stderr);
        assert!(folder.join("sock").symlink_metadata().is_ok(), "{place} was taken away");
        assert_eq!(world.entry(place), None);
    }
}

#[test]
fn no_pod_can_have_the_name_of_what_lies_beside_its_folder() {
    let world = World::with_script(json!({}));
    world.start(&["--name", "main", "--scope", ".:write"]);
    let ran = world.pod_command(["--name", "life"]);
    if ran.code == Some(0) {
        let pid = world.pid("life");
        world.ok("life", "shutdown", json!(null));
        wait_until("it is gone", || !lives(pid));
    }
    assert!(world.runtime().join("life").join(world.life("main")).exists(), "the life of main is gone");
    assert_eq!(ran.code, Some(2), "{}", ran.stdout);
    assert!(ran.stderr.contains("\"life\""), "{}", ran.stderr);
}

#[test]
fn u04_nobody_else_can_reach_a_pod_whatever_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::with_script(json!({}));
    let start = format!("umask 0; exec {POD} --name main");
    let ran = crate::world::ran(world.program("sh", ["-c", &start]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let folder = PathBuf::from(world.status("main")["state_dir"].as_str().unwrap());
    let check = |path: PathBuf, expected: u32| {
        let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, expected, "{} has mode {mode:o}", path.display());
    };
    check(world.runtime(), 0o700);
    check(world.runtime().join("main"), 0o700);
    check(world.runtime().join("life"), 0o700);
    check(world.socket("main"), 0o600);
    check(world.runtime().join("scope.lock"), 0o600);
    check(world.runtime().join("life").join(world.life("main")), 0o600);
    check(folder.clone(), 0o700);
    for name in ["history.jsonl", "pod.log", "manifest.json"] {
        check(folder.join(name), 0o600);
    }
}
