//! The `insomnia` command as a person or a script uses it.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

use insomnia::sys::process::{ErrorOutput, Output};

use crate::world::{PATIENCE, World, has_files, ran, read, wait_until};

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn the_demo_shows_the_main_job_and_leaves_nothing_behind() {
    let world = World::new();
    let ran = world.insomnia(["demo"]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.stdout, ran.stderr);
    for told in [
        "is lent to pod \"coder\"",
        "held by pod \"coder\" (pid ",
        "ended without saying so",
        "this scope came back to you",
        "\"how\":\"graceful\"",
        "tester",
        "the final scope list",
        "Every pod has ended",
    ] {
        assert!(ran.stdout.contains(told), "{told}: {}", ran.stdout);
    }
    assert!(!ran.stdout.contains("NOT SO"), "{}", ran.stdout);
    let begin = ran.stdout.find("/tmp/insomnia-demo-").unwrap();
    let place = ran.stdout[begin..].split("/project").next().unwrap();
    assert!(!Path::new(place).exists(), "{place}");
    assert_eq!(world.processes(), Vec::<i32>::new());
}

#[test]
fn run_streams_and_prints_the_final_answer_and_ends_its_tree() {
    let world = World::with_script(json!({
        "main": [
            { "text": "I delegate.", "tool_calls": [
                { "name": "SpawnPod", "input": { "name": "kid", "task": "work", "scope": ["a:write"] } } ] },
            { "text": "Started." },
            { "text": "All is done." }
        ],
        "kid": [{ "delay_ms": 2000, "text": "kid is done" }]
    }));
    let ran = world.insomnia(["run", "do it"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(ran.stdout, "All is done.\n", "{}", ran.stderr);
    for told in ["-> SpawnPod", "-- waiting for kid", "finished a turn", "-- turn 2 (wake)"] {
        assert!(ran.stderr.contains(told), "{told}: {}", ran.stderr);
    }
    assert_eq!(world.table()["allocations"], json!([]));
    assert_eq!(world.processes(), Vec::<i32>::new());
}

#[test]
fn run_prints_events_as_json_and_fails_with_the_turn() {
    let error = json!({ "error": { "status": 401, "message": "no such key" } });
    let world = World::with_script(json!({ "main": [error] }));
    let ran = world.insomnia(["run", "--json", "x"]);
    assert_eq!(ran.code, Some(1));
    let events: Vec<Value> = ran.stdout.lines().map(json_of).collect();
    let ended: Vec<&Value> = events.iter().filter(|event| event["event"] == "turn_ended").collect();
    assert_eq!(ended.len(), 1, "{}", ran.stdout);
    assert_eq!(ended[0]["data"]["result"], "failed");
}

#[test]
fn a_failure_is_told_although_quiet() {
    let error = || json!({ "error": { "status": 401, "message": "no such key" } });
    let world = World::with_script(json!({ "main": [error(), error()] }));
    let check = |words: &[&str]| {
        let ran = world.insomnia(words);
        assert_eq!((ran.code, ran.stdout.trim()), (Some(1), ""), "{words:?}");
        assert!(ran.stderr.contains("no such key") && ran.stderr.lines().count() == 1, "{}", ran.stderr);
    };
    check(&["run", "--quiet", "--keep", "x"]);
    check(&["send", "main", "x", "--wait", "--quiet"]);
}

#[test]
fn run_without_a_task_takes_lines_from_its_input() {
    let world = World::with_script(json!({ "main": [{ "text": "one" }, { "text": "two" }] }));
    let program =
        world.program(env!("CARGO_BIN_EXE_insomnia"), ["run", "--quiet"]).input("first\n\nsecond\n");
    let ran = ran(program);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "one\ntwo\n"), "{}", ran.stderr);
    assert_eq!(world.history("main").iter().filter(|item| item["type"] == "input").count(), 2);
}

#[test]
fn run_reads_only_when_told_and_the_refusal_offers_it() {
    let write = json!({ "tool_calls": [{ "name": "WriteFile", "input": { "path": "x", "content": "1" } }] });
    let world = World::with_script(json!({ "reader": [write, { "text": "ok" }] }));
    world.start(&["--name", "holder", "--scope", ".:write"]);
    let refused = world.insomnia(["run", "--name", "reader", "x"]);
    assert_eq!(refused.code, Some(1));
    let pid = world.pid("holder").to_string();
    for told in ["\"holder\"", &pid, "insomnia stop holder", "--read-only"] {
        assert!(refused.stderr.contains(told), "{told}: {}", refused.stderr);
    }
    let ran = world.insomnia(["run", "--name", "reader", "--read-only", "x"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(!world.project().join("x").exists());
    assert!(!world.results("reader", "WriteFile")[0].0);
}

#[test]
fn run_detaches_and_keeps() {
    let world = World::with_script(json!({ "*": [{ "text": "hello" }] }));
    let detached = json_of(&world.insomnia(["run", "--detach", "--name", "a", "--read-only", "x"]).stdout);
    assert_eq!(detached["pod_id"], "a");
    assert_eq!(world.insomnia(["run", "--keep", "--name", "b", "--read-only", "x"]).stdout, "hello\n");
    wait_until("both are idle", || ["a", "b"].iter().all(|pod| world.status(pod)["status"] == "idle"));
}

#[test]
fn ctrl_c_cancels_the_turn_and_twice_ends_the_tree() {
    let kid = json!({ "name": "SpawnPod", "input": { "name": "kid", "task": "work" } });
    let never = json!({ "delay_ms": 600_000, "text": "never" });
    let world =
        World::with_script(json!({ "main": [{ "tool_calls": [kid] }, never.clone()], "kid": [never] }));
    let mut running =
        world.program(env!("CARGO_BIN_EXE_insomnia"), ["run", "x"]).start(ErrorOutput::WithOutput).unwrap();
    wait_until("the kid works", || world.count("kid", "input") == 1);
    let pid = running.id().to_string();
    let press = || assert_eq!(ran(world.program("kill", ["-INT", &pid])).code, Some(0));
    press();
    let mut text = String::new();
    let mut read_until = |wanted: &str| {
        let mut buffer = [0; 4096];
        while !text.contains(wanted) {
            match running.read(&mut buffer, None, Instant::now() + PATIENCE).unwrap() {
                Output::Bytes(count) => text.push_str(&String::from_utf8_lossy(&buffer[..count])),
                other => panic!("{other:?} after {text}"),
            }
        }
    };
    read_until("turn 1 cancelled");
    press();
    wait_until("the pod is gone", || world.processes().is_empty());
    assert_eq!(world.table()["allocations"], json!([]));
}

#[test]
fn each_turn_has_its_own_first_ctrl_c() {
    let never = || json!({ "delay_ms": 600_000, "text": "never" });
    let world = World::with_script(json!({ "main": [never(), never()] }));
    let insomnia = env!("CARGO_BIN_EXE_insomnia");
    world.start(&[]);
    let attach = world.program(insomnia, ["attach", "main"]);
    let mut attached = attach.start(ErrorOutput::WithOutput).unwrap();
    let mut text = String::new();
    let pid = attached.id().to_string();
    let mut read_until = |wanted: &str| {
        let mut buffer = [0; 4096];
        while !text.contains(wanted) {
            match attached.read(&mut buffer, None, Instant::now() + PATIENCE).unwrap() {
                Output::Bytes(count) => text.push_str(&String::from_utf8_lossy(&buffer[..count])),
                other => panic!("{other:?} before {wanted:?}: {text}"),
            }
        }
    };
    read_until("-- following pod main");
    for turn in 1..=2 {
        world.ok("main", "run", json!({ "input": "x" }));
        read_until(&format!("-- turn {turn} (run)"));
        assert_eq!(ran(world.program("kill", ["-INT", &pid])).code, Some(0));
        read_until(&format!("-- turn {turn} cancelled"));
    }
}

#[test]
fn the_second_terminal_sees_sends_reads_and_stops() {
    let world = World::with_script(json!({
        "main": [{ "text": "first answer" }, { "text": "second answer" },
                 { "delay_ms": 600_000, "text": "never" }, { "text": "after the resume" }]
    }));
    assert_eq!(world.insomnia(["list"]).code, Some(0));
    world.start(&["--scope", "a:write"]);
    let sent = world.insomnia(["send", "main", "hi", "--wait"]);
    assert_eq!((sent.code, sent.stdout.as_str()), (Some(0), "first answer\n"), "{}", sent.stderr);
    let list = json_of(&world.insomnia(["list", "--json"]).stdout);
    assert_eq!(list["pods"][0]["pod_id"], "main");
    assert_eq!(list["pods"][0]["status"], "idle");
    assert_eq!(list["pods"][0]["last_response"], "first answer");
    assert!(world.insomnia(["list"]).stdout.contains("first answer"));

    let sent = json_of(&world.insomnia(["send", "main", "again", "--wait", "--json"]).stdout);
    assert_eq!((&sent["text"], &sent["result"]), (&json!("second answer"), &json!("finished")));
    assert_eq!(world.insomnia(["read", "main"]).stdout, "second answer\n");
    let all = json_of(&world.insomnia(["read", "main", "--since", "0", "--json"]).stdout);
    assert_eq!(all["text"], "first answer\n\nsecond answer");

    assert_eq!(json_of(&world.insomnia(["send", "main", "long", "--json"]).stdout)["turn"], 3);
    wait_until("the model is asked", || world.status("main")["detail"] == "waiting for the model");
    let cancelled = world.insomnia(["cancel", "main", "--json"]);
    assert_eq!((cancelled.code, cancelled.stdout.as_str()), (Some(0), "{\"cancelled\":true}\n"));
    wait_until("the turn is cancelled", || world.status("main")["status"] == "paused");
    assert_eq!(world.insomnia(["cancel", "main"]).code, Some(1));
    assert_eq!(json_of(&world.insomnia(["resume", "main", "--json"]).stdout)["turn"], 4);
    wait_until("it went on", || world.status("main")["last_response"] == "after the resume");

    let scopes = json_of(&world.insomnia(["scope", "list", "--json"]).stdout);
    assert_eq!(scopes["allocations"][0]["alive"], true);
    assert_eq!(scopes["allocations"][0]["lent"], json!([]));
    assert!(world.insomnia(["scope", "list"]).stdout.contains("project/a"));

    let pid = world.pid("main");
    let stopped = json_of(&world.insomnia(["stop", "main", "--json"]).stdout);
    assert_eq!(stopped["stopped"][0]["how"], "graceful");
    wait_until("its files are closed", || !has_files(pid));
    for (words, expected) in [
        (["read", "main"], "after the resume"),
        (["history", "main"], "person: again"),
        (["log", "main"], "pod \"main\" ended"),
        (["list", "--all"], "stopped"),
    ] {
        let ran = world.insomnia(words);
        assert!(
            ran.code == Some(0) && ran.stdout.contains(expected),
            "{words:?}: {}{}",
            ran.stdout,
            ran.stderr
        );
    }
    let history = world.insomnia(["history", "main", "--json"]).stdout;
    assert!(history.lines().all(|line| json_of(line)["type"].is_string()));
    assert!(json_of(&world.insomnia(["log", "main", "--json"]).stdout)["lines"].is_array());
}

#[test]
fn stop_takes_the_tree_along_and_names_survivors_without() {
    let spawn = json!({ "tool_calls": [
        { "name": "SpawnPod", "input": { "name": "kid", "task": "work", "scope": ["a:write"] } } ] });
    let script = json!({ "main": [spawn.clone(), { "text": "ok" }], "kid": [{ "text": "idle" }] });
    let world = World::with_script(script.clone());
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    let stopped = world.insomnia(["stop", "main"]);
    assert!(stopped.stdout.contains("pod kid lives on and keeps"), "{}", stopped.stdout);
    assert!(world.insomnia(["stop", "kid", "--kill", "--json"]).stdout.contains("killed"));
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    let back = world.insomnia(["stop", "kid"]).stdout;
    assert!(back.contains("is back with pod main"), "{back}");

    let world = World::with_script(script);
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    assert_eq!(world.insomnia(["stop", "main", "--tree"]).code, Some(0));
    assert_eq!(world.table()["allocations"], json!([]));
    assert_eq!(world.processes(), Vec::<i32>::new());
}

#[test]
fn attach_follows_a_conversation_in_plain_lines() {
    let world = World::with_script(json!({ "main": [{ "text": "hello \u{1b}[2Jthere" }] }));
    world.start(&[]);
    let attach = world.program(env!("CARGO_BIN_EXE_insomnia"), ["attach", "main"]);
    let mut attached = attach.start(ErrorOutput::WithOutput).unwrap();
    let mut text = String::new();
    let mut buffer = [0; 4096];
    let mut started = false;
    while !text.contains("turn 1 finished") {
        match attached.read(&mut buffer, None, Instant::now() + PATIENCE).unwrap() {
            Output::Bytes(count) => text.push_str(&String::from_utf8_lossy(&buffer[..count])),
            other => panic!("{other:?} after {text}"),
        }
        if !std::mem::replace(&mut started, true) {
            world.ok("main", "run", json!({ "input": "hi" }));
        }
    }
    assert!(text.contains("hello \\x1b[2Jthere") && !text.contains('\u{1b}'), "{text:?}");
}

#[test]
fn attach_replays_the_conversation_and_goes_on_with_it_once() {
    let write = json!({ "name": "WriteFile", "input": { "path": "a/x", "content": "1" } });
    let world = World::with_script(json!({ "main": [
        { "text": "first words", "tool_calls": [write] }, { "text": "old answer" }, { "text": "new answer" }] }));
    world.start(&["--scope", "a:write"]);
    world.turn("main", "go");
    let attach = |words: &[&str], last: &str| {
        let program = world.program(env!("CARGO_BIN_EXE_insomnia"), [&["attach", "main"], words].concat());
        let mut attached = program.start(ErrorOutput::WithOutput).unwrap();
        let (mut text, mut buffer) = (String::new(), [0; 4096]);
        let mut asked = words.contains(&"--quiet");
        while !text.contains(last) {
            match attached.read(&mut buffer, None, Instant::now() + PATIENCE).unwrap() {
                Output::Bytes(count) => text.push_str(&String::from_utf8_lossy(&buffer[..count])),
                other => panic!("{other:?} after {text}"),
            }
            if text.contains("-- turn 1 finished") && !std::mem::replace(&mut asked, true) {
                world.ok("main", "run", json!({ "input": "on" }));
            }
        }
        text
    };
    let text = attach(&["--since", "0"], "-- turn 2 finished");
    let mut rest = text.as_str();
    for line in [
        "-- turn 1 (run)",
        ">> a person: go",
        "first words",
        "-> WriteFile",
        "<- ",
        "old answer",
        "-- turn 1 finished",
        "-- turn 2 (run)",
        ">> a person: on",
        "new answer",
        "-- turn 2 finished",
    ] {
        assert_eq!(text.matches(line).count(), 1, "{line}: {text}");
        rest = rest.split_once(line).unwrap_or_else(|| panic!("{line} is not in its place: {text}")).1;
    }
    assert_eq!(attach(&["--since", "0", "--quiet"], "new answer\n"), "first words\nold answer\nnew answer\n");
}

#[test]
fn what_is_not_there_is_said_clearly() {
    let world = World::with_script(json!({}));
    let check = |words: &[&str], code: i32, expected: &str| {
        let ran = world.insomnia(words);
        assert_eq!(ran.code, Some(code), "{words:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{words:?}: {}", ran.stderr);
    };
    check(&["read", "ghost"], 1, "there is no pod \"ghost\"");
    check(&["send", "ghost", "x"], 1, "there is no living pod \"ghost\"");
    check(&["stop", "../x"], 1, "there is no living pod");
    check(&["send", "ghost"], 2, "TEXT is missing");
    check(&["read"], 2, "POD is missing");
    check(&["fly"], 2, "there is no command \"fly\"");
    check(&["read", "x", "--since", "y"], 2, "--since needs a number");
    check(&["run", "--dir", "nowhere", "x"], 1, "nowhere");
    check(&["run", "--name", "../x", "x"], 2, "../x");
    check(&["run", "--provider", "magic", "x"], 2, "magic");
    check(&["run", " "], 2, "the task is empty");
    check(&["run", "--scope", "a", "x"], 1, "scope rule \"a\" is not valid");
    world.manifest(json!({ "provder": {} }));
    check(&["run", "x"], 1, "provder");
    world.manifest(json!({}));
    check(&["run", "x"], 1, "insomnia demo");
    assert_eq!(world.table()["allocations"], json!([]), "nothing was started");
    assert_eq!(world.insomnia(["--help"]).code, Some(0));
    assert_eq!(world.pod_command(["--help"]).code, Some(0));
}

#[test]
fn u10_a_closed_pipe_is_a_quiet_end() {
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    world.start(&["--name", "a"]);
    let script =
        format!("{} scope list --json | true; exit ${{PIPESTATUS[0]}}", env!("CARGO_BIN_EXE_insomnia"));
    let ran = ran(world.program("bash", ["-c", &script]));
    assert!(matches!(ran.code, Some(0)), "{:?} {}", ran.code, ran.stderr);
    assert!(!ran.stderr.contains("panic"), "{}", ran.stderr);
    let script = format!(
        "{} list 2>&-; {} read ghost 2>&-; true",
        env!("CARGO_BIN_EXE_insomnia"),
        env!("CARGO_BIN_EXE_insomnia")
    );
    assert_eq!(crate::world::ran(world.program("bash", ["-c", &script])).code, Some(0));
}

#[test]
fn u10_no_command_minds_where_its_output_goes() {
    let long = "word ".repeat(40_000);
    let world = World::with_script(json!({ "*": [{ "text": long }] }));
    world.start(&["--name", "a"]);
    world.turn("a", "go");
    let insomnia = env!("CARGO_BIN_EXE_insomnia");
    // Enough text that the pipe is closed while there is more to say.
    let commands = ["list", "scope list", "read a", "history a", "log a", "attach a --since 0", "--help"];
    for command in commands {
        for (ending, quiet) in
            [("| head -c 1 >/dev/null", true), (">&-", false), ("2>&- | cat >/dev/null", true)]
        {
            let redirected = format!("timeout -k 1 3 {insomnia} {command} {ending}; echo ${{PIPESTATUS[0]}}");
            let ran = ran(world.program("bash", ["-c", &redirected]));
            let code = ran.stdout.trim();
            let follows = command.starts_with("attach") && code == "124"; // it has no end
            assert!(code == "0" || follows || !quiet && code == "1", "{command} {ending}: {ran:?}");
            assert!(!ran.stderr.contains("panic"), "{command} {ending}: {}", ran.stderr);
        }
        if command.starts_with("attach") {
            continue;
        }
        let full = ran(world.program("bash", ["-c", &format!("{insomnia} {command} >/dev/full")]));
        assert!(full.code == Some(1) && !full.stderr.contains("panic"), "{command}: {full:?}");
        assert!(full.stderr.contains("to standard output"), "{command}: {full:?}");
    }
    assert_eq!(world.status("a")["status"], "idle");
}

#[test]
fn r03_pods_live_on_when_the_terminal_of_their_start_is_gone() {
    if !crate::world::has_tool("script") {
        return;
    }
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    let command = format!("{} --name a", env!("CARGO_BIN_EXE_pod"));
    let ran = ran(world.program("script", ["-qec", &command, "/dev/null"]));
    assert_eq!(ran.code, Some(0), "{}{}", ran.stdout, ran.stderr);
    let pid = world.pid("a");
    assert_eq!(world.turn("a", "still there?")["result"], "finished");
    for descriptor in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        let target = std::fs::read_link(descriptor.path()).unwrap_or_default();
        assert!(!target.to_string_lossy().contains("/dev/pts"), "{target:?}");
    }
    let stat = read(format!("/proc/{pid}/stat"));
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    assert_eq!(fields[3], pid.to_string(), "it leads a session of its own");
}

#[test]
fn r05_a_key_is_nowhere_to_be_found() {
    let key = "sk-test-0123456789abcdefXYZ";
    let world = World::new();
    let config = json!({ "provider": { "kind": "openai", "base_url": "http://127.0.0.1:1", "api_key_env": "OPENAI_API_KEY" },
        "limits": { "retries": 1 } });
    world.manifest(config);
    let run = |args: &[&str]| {
        ran(world
            .program(env!("CARGO_BIN_EXE_insomnia"), args)
            .env("OPENAI_API_KEY", key)
            .env("RUST_LOG", "trace"))
    };
    let ended = run(&["run", "--keep", "x"]);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("127.0.0.1"), "{}", ended.stderr);
    for pid in world.processes() {
        let command_line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&command_line).contains(&key[8..16]));
    }
    assert!(!ended.stderr.contains(&key[8..16]) && !ended.stdout.contains(&key[8..16]));
    world.insomnia(["stop", "main"]);
    let mut seen = 0;
    let mut folders = vec![world.path("")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if let Ok(content) = std::fs::read(entry.path()) {
                seen += 1;
                assert!(!String::from_utf8_lossy(&content).contains(&key[8..16]), "{:?}", entry.path());
            }
        }
    }
    assert!(seen > 4, "the history, the log, the manifest and the lock were looked at");
    std::io::stdout().flush().unwrap();
}

#[test]
fn scope_who_names_the_writer_and_the_line_of_loans() {
    let kid = json!({ "name": "SpawnPod", "input": { "name": "kid", "task": "work", "scope": ["a:write"] } });
    let world = World::with_script(
        json!({ "main": [{ "tool_calls": [kid] }, { "text": "ok" }], "*": [{ "text": "x" }] }),
    );
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    let lent = world.insomnia(["scope", "who", "a/x/../f"]);
    assert!(lent.stdout.starts_with("pod kid (pid "), "{}", lent.stdout);
    assert!(
        lent.stdout.contains("pod main holds") && lent.stdout.contains("and has lent"),
        "{}",
        lent.stdout
    );
    let own = json_of(&world.insomnia(["scope", "who", "b", "--json"]).stdout);
    assert_eq!((&own["writer"], own["holders"].as_array().unwrap().len()), (&json!("main"), 1));
    let nobody = world.insomnia(["scope", "who", "/usr"]);
    assert_eq!((nobody.code, nobody.stdout.as_str()), (Some(1), "nobody holds /usr\n"));
    world.kill("main");
    let path = world.project().join("b");
    let dead = world.insomnia(["scope", "who", "b"]);
    assert_eq!((dead.code, dead.stdout), (Some(1), format!("nobody holds {}\n", path.display())));
    let dead = json_of(&world.insomnia(["scope", "who", "b", "--json"]).stdout);
    assert_eq!((&dead["writer"], &dead["holders"][0]["alive"]), (&Value::Null, &json!(false)));
}

#[test]
fn scope_repair_rebuilds_the_file_and_keeps_the_bad_one() {
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    world.start(&["--scope", "a:write"]);
    let sound = world.insomnia(["scope", "repair"]);
    assert!(sound.stdout.contains("is sound"), "{}", sound.stdout);
    let before = world.table();
    std::fs::write(world.runtime().join("scope.lock"), "{ half").unwrap();
    let refused = world.pod_command(["--name", "other"]);
    assert!(
        refused.code == Some(1) && refused.stderr.contains("insomnia scope repair"),
        "{}",
        refused.stderr
    );
    assert_eq!(world.turn("main", "still alive?")["result"], "finished");
    let repaired = json_of(&world.insomnia(["scope", "repair", "--json"]).stdout);
    assert_eq!(read(repaired["kept_aside"].as_str().unwrap()), "{ half");
    assert_eq!(world.table()["allocations"], before["allocations"]);
    world.start(&["--name", "other", "--scope", "b:write"]);
}

#[test]
fn a_demo_or_run_whose_reader_has_gone_leaves_nothing_behind() {
    let world = World::with_script(json!({ "*": [{ "text": "line one\nline two" }] }));
    let program = env!("CARGO_BIN_EXE_insomnia");
    for (line, code) in [
        (format!("{program} demo | head -2"), Some(0)),
        (format!("{program} run --json x | head -1"), Some(0)),
        (format!("{program} run x > /dev/full"), Some(1)),
        (format!("head -c 2000000 /dev/zero | tr '\\0' x | {program} run --quiet"), Some(1)),
    ] {
        let ran = ran(world.program("bash", ["-c", &line]));
        assert_eq!(ran.code, code, "{line}: {}", ran.stderr);
        wait_until("nothing is left", || world.processes().is_empty());
        assert_eq!(world.table()["allocations"], json!([]), "{line}");
    }
    let full = ran(world.program("bash", ["-c", &format!("{program} list --json > /dev/full")]));
    assert!(full.stderr.contains("cannot write to standard output"), "{}", full.stderr);
}

#[test]
fn an_interrupted_demo_tidies_up() {
    let world = World::new();
    let mut demo =
        world.program(env!("CARGO_BIN_EXE_insomnia"), ["demo"]).start(ErrorOutput::WithOutput).unwrap();
    let mut buffer = [0; 4096];
    let mut text = String::new();
    while !text.contains("2. ") {
        match demo.read(&mut buffer, None, Instant::now() + PATIENCE).unwrap() {
            Output::Bytes(count) => text.push_str(&String::from_utf8_lossy(&buffer[..count])),
            other => panic!("{other:?} after {text}"),
        }
    }
    assert_eq!(ran(world.program("kill", ["-INT", &demo.id().to_string()])).code, Some(0));
    demo.read_to_end(1 << 20, None, Instant::now() + PATIENCE).unwrap();
    assert_eq!(demo.wait(Instant::now() + PATIENCE).unwrap().code(), Some(1));
    wait_until("nothing is left", || world.processes().is_empty());
}
