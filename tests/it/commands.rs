//! What makes the commands of `insomnia` feel at home: doctor, show, prune, progress, completions and the manual, and
//! that nothing which pods, files or names say drives a terminal.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};

use insomnia::doors::commands::COMMANDS;
use insomnia::sys::process::{self, ErrorOutput, Output, Running};
use insomnia::words::text::harmless;

use crate::world::{
    PATIENCE, Ran, World, call, calls, copy_program, has_files, has_tool, ran, skip, spawn, wait_until,
};

const INSOMNIA: &str = env!("CARGO_BIN_EXE_insomnia");

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn with_env(world: &World, variables: &[(&str, &str)], args: &[&str]) -> Ran {
    let program = world.program(INSOMNIA, args);
    ran(variables.iter().fold(program, |program, (name, value)| program.env(name, value)))
}

/// Reads a running command's output until it has these words.
fn read_until(running: &mut Running, text: &mut String, wanted: &str) {
    let mut buffer = [0; 4096];
    while !text.contains(wanted) {
        match running.read(&mut buffer, None, Instant::now() + PATIENCE).unwrap() {
            Output::Bytes(count) => text.push_str(&String::from_utf8_lossy(&buffer[..count])),
            other => panic!("{other:?} before {wanted:?}: {text}"),
        }
    }
}

fn interrupt(world: &World, running: &Running) {
    assert_eq!(ran(world.program("kill", ["-INT", &running.id().to_string()])).code, Some(0));
}

/// Kills a pod of another runtime directory, by the ready line of its start.
fn kill(ready: &Value) {
    let pid = i32::try_from(ready["pid"].as_i64().unwrap()).unwrap();
    let stat = process::process_stat(pid).unwrap();
    process::kill_exactly(pid, stat.start_time).unwrap();
    wait_until("the pod is gone", || process::process_stat(pid).is_none_or(|stat| stat.is_zombie));
}

#[test]
fn doctor_finds_each_fault_and_says_what_to_do() {
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    let check = |variables: &[(&str, &str)], code: i32, what: &str, state: &str, told: &str| {
        let answer = with_env(&world, variables, &["doctor", "--json"]);
        assert_eq!(answer.code, Some(code), "{what}: {}{}", answer.stdout, answer.stderr);
        let answer = json_of(&answer.stdout);
        assert_eq!(answer["can_run"], code == 0);
        let findings = answer["findings"].as_array().unwrap();
        let finding = findings.iter().find(|finding| finding["what"] == what && finding["state"] == state);
        let finding = finding.unwrap_or_else(|| panic!("{what} is not {state}: {answer:#}"));
        assert!(finding["finding"].as_str().unwrap().contains(told), "{told}: {finding}");
        assert_eq!(finding["todo"].is_string(), state != "ok", "{finding}");
    };
    check(&[], 0, "runtime directory", "ok", "INSOMNIA_RUNTIME_DIR is set");
    check(&[], 0, "scope.lock", "ok", "none yet");
    check(&[], 0, "provider", "ok", "script.json");
    check(&[], 0, "pod command", "ok", "pod 0.");
    check(&[("INSOMNIA_POD_COMMAND", "env pod")], 0, "pod command", "ok", "env pod");
    check(
        &[("INSOMNIA_POD_COMMAND", "env pod")],
        0,
        "sandbox",
        "ok",
        "not tried, as \"env pod\" starts pods",
    );
    check(&[("INSOMNIA_POD_COMMAND", "/nowhere/pod x")], 1, "pod command", "fault", "/nowhere/pod");
    if has_tool("curl") {
        check(&[], 0, "curl", "ok", "curl ");
        check(&[("PATH", "/nowhere")], 0, "curl", "note", "cannot run");
    }
    check(&[("PATH", "/nowhere")], 0, "grep", "note", "cannot run");
    let main = world.start(&["--name", "a", "--scope", "a:write"]);
    check(&[], 0, "scope.lock", "ok", "has 1 entries");
    world.kill(main["pod_id"].as_str().unwrap());
    check(&[], 0, "dead entries", "note", "without saying so: a");

    std::fs::create_dir(world.project().join(".insomnia")).unwrap();
    let project = world.project().join(".insomnia/manifest.json");
    std::fs::write(&project, "{\"limits\":{\"steps\":5}}").unwrap();
    let user = world.path("config/insomnia/manifest.json");
    let order = format!("\"{}\" (yours), then \"{}\" (the project's", user.display(), project.display());
    check(&[], 0, "manifests", "ok", &order);
    std::fs::write(&project, "{\"limits\":\n{\"steps\":\"many\"}}").unwrap();
    check(&[], 1, "manifests", "fault", "line 2, key \"limits.steps\"");
    assert_eq!(world.insomnia(["doctor"]).stdout.matches("\nfault").count(), 1, "one fault is told once");
    let long = world.path(&"d".repeat(100));
    check(&[("INSOMNIA_RUNTIME_DIR", long.to_str().unwrap())], 1, "runtime directory", "fault", "103");
    assert!(!long.exists());
    std::fs::remove_file(&project).unwrap();

    world.manifest(json!({ "instruction": "nowhere.md" }));
    check(&[], 1, "instruction", "fault", "nowhere.md");
    world.manifest(json!({ "provider": { "kind": "openai", "base_url": "http://127.0.0.1:1/v1" } }));
    check(&[("OPENAI_API_KEY", "sk-0123456789abcdef")], 0, "provider", "ok", "variable OPENAI_API_KEY");
    check(&[("PATH", "/nowhere")], 1, "curl", "fault", "cannot run");
    world.manifest(json!({ "provider": { "kind": "anthropic" } }));
    check(&[], 1, "provider", "fault", "ANTHROPIC_API_KEY");
    world.manifest(json!({ "shell": { "sandbox": "off" } }));
    check(&[], 1, "sandbox", "note", "level 0");
    check(&[], 1, "provider", "fault", "insomnia demo");

    std::fs::write(world.runtime().join("scope.lock"), "{ half").unwrap();
    check(&[], 1, "scope.lock", "fault", "insomnia scope repair");
    let plain = world.insomnia(["doctor"]);
    assert!(plain.stdout.contains("-> ") && plain.stdout.contains("no pod can run here"), "{}", plain.stdout);
    let key = with_env(&world, &[("ANTHROPIC_API_KEY", "sk-0123456789abcdef")], &["doctor"]);
    assert!(key.stdout.contains("ANTHROPIC_API_KEY") && !key.stdout.contains("0123456789"), "{}", key.stdout);
    let run = ran(world.program("chmod", ["755".into(), world.runtime()]));
    assert_eq!(run.code, Some(0));
    check(&[], 1, "runtime directory", "fault", "others can enter it");
}

#[test]
fn show_tells_each_value_and_where_it_comes_from() {
    let spawn = json!({ "tool_calls": [call("SpawnPod", json!({ "name": "kid", "task": "work", "scope": ["a:write"],
        "tools_deny": ["Shell"] }))] });
    let world = World::with_settings(
        json!({ "main": [spawn, { "text": "ok" }], "*": [{ "text": "x" }] }),
        json!({ "shell": { "timeout_seconds": 60 }, "limits": { "depth": 3 } }),
    );
    std::fs::create_dir(world.project().join(".insomnia")).unwrap();
    let project = world.project().join(".insomnia/manifest.json");
    std::fs::write(&project, "{\"limits\":{\"steps\":5}}").unwrap();
    let given = world.path("given.json");
    std::fs::write(&given, "{\"tools\":{\"deny\":[\"WriteFile\"]}}").unwrap();
    let given = given.to_str().unwrap();
    let ran = world.insomnia(["run", "--detach", "--model", "m1", "--manifest", given, "go"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    world.wait_turns("kid", 1);
    let user = world.path("config/insomnia/manifest.json");
    let (user, project) = (user.to_str().unwrap(), project.to_str().unwrap());
    let check = |pod: &str, pointer: &str, value: Value, source: Option<&str>| {
        let shown = json_of(&world.insomnia(["show", pod, "--json"]).stdout);
        assert_eq!(
            shown["settings"].pointer(&format!("/{}", pointer.replace('.', "/"))),
            Some(&value),
            "{shown:#}"
        );
        assert_eq!(shown["sources"][pointer].as_str(), source, "{pod} {pointer}: {shown:#}");
    };
    let dir = world.project();
    let scope = |sub: &str| json!([format!("{}{sub}:write:recursive", dir.display())]);
    let check_main = || {
        check("main", "provider.model", json!("m1"), Some("the command line"));
        check("main", "provider.kind", json!("script"), Some(user));
        check("main", "shell.timeout_seconds", json!(60), Some(user));
        check("main", "limits.steps", json!(5), Some(project));
        check("main", "tools.deny", json!(["WriteFile"]), Some(given));
        check("main", "scope", scope(""), Some("the command line"));
        check("main", "wake_on_events", json!(true), None);
    };
    check_main();
    check("kid", "provider.model", json!("m1"), Some("its spawner"));
    check("kid", "scope", scope("/a"), Some("its spawner"));
    check("kid", "limits.steps", json!(5), Some("its spawner"));
    let plain = world.insomnia(["show", "kid"]).stdout;
    let row = |key: &str| plain.lines().find(|line| line.starts_with(key)).unwrap().to_owned();
    assert!(row("tools.deny").contains("Shell") && row("tools.deny").ends_with("its spawner"), "{plain}");
    assert!(row("instruction").ends_with("built in"), "{plain}");
    assert_eq!(world.insomnia(["stop", "main", "--tree"]).code, Some(0));
    check_main();
    assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
    check_main();

    let headers = json!({ "X-Api-Key": "secret-value" });
    world.manifest(
        json!({ "provider": { "kind": "openai", "base_url": "http://127.0.0.1:1", "headers": headers } }),
    );
    world.start(&["--name", "web"]);
    let web = world.insomnia(["show", "web"]).stdout;
    assert!(web.contains("X-Api-Key") && !web.contains("secret-value"), "{web}");
    let folder = PathBuf::from(world.status("web")["state_dir"].as_str().unwrap());
    let kept = || std::fs::read_to_string(folder.join("manifest.json")).unwrap();
    assert!(kept().contains("X-Api-Key") && !kept().contains("secret-value"), "{}", kept());
    assert_eq!(world.insomnia(["stop", "web"]).code, Some(0));
    assert_eq!(world.insomnia(["resume", "web"]).code, Some(0), "the manifest gives it again");
    assert!(!kept().contains("secret-value"), "{}", kept());
    assert_eq!(world.insomnia(["stop", "web"]).code, Some(0));
    world.manifest(json!({}));
    let refused = world.insomnia(["resume", "web"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("\"X-Api-Key\" has no value"), "{}", refused.stderr);
    world.manifest(json!({}));
    world.start_with_env(&[("OPENAI_BASE_URL", "http://127.0.0.1:1")], &["--name", "env"]);
    check("env", "provider.base_url", json!("http://127.0.0.1:1"), Some("the environment"));
    check("env", "provider.kind", json!("openai"), Some("the environment"));
}

#[test]
fn prune_removes_old_sessions_and_never_one_of_a_living_pod() {
    let world =
        World::with_script(json!({ "*": [{ "text": "x" }, { "delay_ms": 600_000, "text": "never" }] }));
    for name in ["old", "new", "resumed", "busy"] {
        world.start(&["--name", name]);
        world.turn(name, "hi");
    }
    let pids: Vec<i32> = ["old", "new", "resumed"].iter().map(|name| world.pid(name)).collect();
    for name in ["old", "new", "resumed"] {
        assert_eq!(world.insomnia(["stop", name]).code, Some(0));
    }
    wait_until("their files are closed", || pids.iter().all(|pid| !has_files(*pid)));
    assert_eq!(world.insomnia(["resume", "resumed"]).code, Some(0));
    world.ok("busy", "run", json!({ "input": "long" }));
    world.signal("busy", "STOP");
    // A pod of another runtime directory that shares the state.
    let other = world.path("other");
    let variables = [("INSOMNIA_RUNTIME_DIR", other.to_str().unwrap())];
    let elsewhere = world.start_with_env(&variables, &["--name", "elsewhere"]);
    for name in ["old", "resumed", "busy", "elsewhere"] {
        let find = "find \"$0\" -type f -exec touch -d '9 days ago' {} +";
        let state = world.state().join(name);
        assert_eq!(ran(world.program("bash", ["-c", find, state.to_str().unwrap()])).code, Some(0));
    }
    let has = |name: &str| world.state().join(name).exists();
    let prune = |words: &[&str]| {
        let ran = world.insomnia([&["prune", "--json"], words].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        json_of(&ran.stdout)
    };
    let pods = |answer: &Value| -> Vec<String> {
        let sessions = answer["sessions"].as_array().unwrap().iter();
        sessions.map(|session| session["pod_id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(prune(&[])["sessions"], json!([]), "nothing is 30 days old");
    let dry = prune(&["--older-than", "7d", "--dry-run"]);
    assert_eq!(pods(&dry), ["old"]);
    assert!(dry["bytes"].as_u64().unwrap() > 500 && has("old"), "{dry}");
    let done = prune(&["--older-than", "7d"]);
    assert_eq!((pods(&done), &done["bytes"]), (pods(&dry), &dry["bytes"]));
    assert!(!has("old") && has("new") && !has(".pruned"));
    assert_eq!(pods(&prune(&["--older-than", "0d"])), ["new"]);
    assert!(has("resumed") && has("busy") && has("elsewhere"));
    world.signal("busy", "CONT");
    for pod in ["resumed", "busy"] {
        assert_eq!(world.status(pod)["pod_id"], pod);
        assert_eq!(world.insomnia(["history", pod]).code, Some(0));
    }
    assert_eq!(world.insomnia(["prune", "--older-than", "soon"]).code, Some(2));
    std::fs::write(world.runtime().join("scope.lock"), "{ half").unwrap();
    let damaged = world.insomnia(["prune", "--older-than", "0d"]);
    assert!(damaged.code == Some(1) && damaged.stderr.contains("scope repair"), "{}", damaged.stderr);
    kill(&elsewhere);
}

#[test]
fn the_age_of_a_session_counts_from_the_end_of_its_pod() {
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    world.start(&["--name", "patient"]);
    world.turn("patient", "hi");
    let pid = world.pid("patient");
    assert_eq!(world.insomnia(["stop", "patient"]).code, Some(0));
    wait_until("its files are closed", || !has_files(pid));
    let since = || json_of(&world.insomnia(["list", "--all", "--json"]).stdout)["pods"][0]["since"].clone();
    let ended = since();
    let touch = "find \"$0\" -name history.jsonl -exec touch -d '9 days ago' {} +";
    assert_eq!(ran(world.program("bash", ["-c", touch, world.state().to_str().unwrap()])).code, Some(0));
    let prune = || json_of(&world.insomnia(["prune", "--older-than", "7d", "--json"]).stdout);
    assert_eq!(prune()["sessions"], json!([]));
    let log = "find \"$0\" -name pod.log -exec touch -d '8 days ago' {} +";
    assert_eq!(ran(world.program("bash", ["-c", log, world.state().to_str().unwrap()])).code, Some(0));
    let day = 86_400;
    let (ended, since) = (ended.as_u64().unwrap(), since().as_u64().unwrap());
    assert!((7 * day..9 * day).contains(&(ended - since)), "{ended} {since}");
    assert_eq!(prune()["sessions"].as_array().unwrap().len(), 1);
}

#[test]
fn prune_follows_no_link_and_goes_on_past_what_cannot_be_removed() {
    let world = World::with_script(json!({}));
    let session = |place: std::path::PathBuf| {
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join("history.jsonl"), "").unwrap();
        place
    };
    let outside = session(world.path("outside/precious"));
    std::fs::create_dir_all(world.state()).unwrap();
    std::os::unix::fs::symlink(world.path("outside"), world.state().join("linked")).unwrap();
    let (first, stuck, last) = (
        session(world.state().join("a/one")),
        session(world.state().join("b/one")),
        session(world.state().join("c/one")),
    );
    session(world.state().join(".pruned/b-one")); // in the way of a rename
    let prune = world.insomnia(["prune", "--older-than", "0d"]);
    assert_eq!(prune.code, Some(1), "{}", prune.stdout);
    assert!(prune.stderr.contains("/b/one") && prune.stdout.contains("of 2 sessions"), "{}", prune.stderr);
    assert!(!first.exists() && stuck.exists() && !last.exists() && outside.exists());
    let aside = world.state().join(".pruned");
    std::os::unix::fs::symlink(world.path("outside"), &aside).unwrap();
    let prune = world.insomnia(["prune", "--older-than", "0d"]);
    assert!(prune.code == Some(1) && prune.stderr.contains(".pruned"), "{}", prune.stderr);
    assert!(stuck.exists() && outside.exists());
    std::fs::remove_file(&aside).unwrap();
    assert_eq!(world.insomnia(["prune", "--older-than", "0d"]).code, Some(0));
    assert!(!stuck.exists() && outside.exists());
}

#[test]
fn with_json_or_quiet_nothing_else_is_printed() {
    let kid = call("SpawnPod", json!({ "name": "kid", "task": "work" }));
    let world = World::with_script(json!({
        "main": [calls(&[kid]), { "text": "one" }, { "text": "two" }], "*": [{ "delay_ms": 200, "text": "x" }] }));
    for words in [&["run", "--json", "x"][..], &["run", "--quiet", "--json", "x"]] {
        let ran = world.insomnia(words);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{words:?}");
        assert!(ran.stdout.lines().count() > 5);
        assert!(ran.stdout.lines().all(|line| json_of(line)["event"].is_string()));
    }
    let ran = world.insomnia(["run", "--quiet", "--keep", "x"]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(0), "two\n", ""));
    let sent = world.insomnia(["send", "main", "x", "--wait", "--json"]);
    assert_eq!((sent.code, sent.stderr.as_str()), (Some(0), ""));
    assert_eq!(json_of(&sent.stdout)["result"], "finished");
    let sent = world.insomnia(["send", "kid", "x", "--wait", "--quiet"]);
    assert_eq!((sent.stdout.as_str(), sent.stderr.as_str()), ("(end of script)\n", ""));
    let sent = world.insomnia(["send", "kid", "x", "--wait"]);
    assert_eq!(sent.stdout, "(end of script)\n");
    assert!(sent.stderr.contains("-- turn 3 (run)") && !sent.stderr.contains('\u{1b}'), "{}", sent.stderr);
}

#[test]
fn a_spinner_turns_on_a_terminal_only() {
    if !has_tool("script") {
        return;
    }
    let slow = json!({ "delay_ms": 900, "text": "slow answer" });
    let world = World::with_script(json!({ "*": [slow] }));
    let in_terminal = |words: &str, term: &str| {
        let line = format!("{INSOMNIA} {words}");
        let program = world.program("script", ["-qec", &line, "/dev/null"]).env("TERM", term);
        let ran = ran(program);
        assert_eq!(ran.code, Some(0), "{}", ran.stdout);
        assert!(ran.stdout.contains("slow answer"), "{}", ran.stdout);
        ran.stdout
    };
    let seen = in_terminal("run x", "xterm");
    assert!(seen.contains("\r\u{1b}[K/ ") && seen.contains("\r\u{1b}[K- "), "it turns: {seen:?}");
    assert!(seen.contains("model, 0 s"), "it says what is done: {seen:?}");
    for (words, term) in [("run x", "dumb"), ("run --quiet x", "xterm"), ("run --json x", "xterm")] {
        assert!(!in_terminal(words, term).contains('\u{1b}'), "{words} {term}");
    }
    assert!(!world.insomnia(["run", "x"]).stderr.contains('\u{1b}'));
}

#[test]
fn ctrl_c_leaves_what_is_only_watched_and_says_how_to_reach_it() {
    let never = json!({ "delay_ms": 600_000, "text": "never" });
    let world = World::with_script(json!({ "*": [never.clone(), never.clone(), never] }));
    world.start(&[]);
    let start = |words: &[&str]| world.program(INSOMNIA, words).start(ErrorOutput::WithOutput).unwrap();
    for (turn, words) in [(1, &["send", "main", "x", "--wait"][..]), (2, &["attach", "main"])] {
        let (mut running, mut text) = (start(words), String::new());
        if turn == 2 {
            read_until(&mut running, &mut text, "-- following pod main");
            world.ok("main", "run", json!({ "input": "y" }));
        }
        read_until(&mut running, &mut text, "(run)");
        interrupt(&world, &running);
        read_until(&mut running, &mut text, &format!("turn {turn} cancelled"));
        assert!(text.contains("Ctrl-C again leaves the pod running"), "{text}");
        if turn == 2 {
            interrupt(&world, &running);
            read_until(&mut running, &mut text, "insomnia stop main --tree");
            assert!(text.contains("pod main lives on") && text.contains("insomnia attach main"), "{text}");
        }
        let code = running.wait(Instant::now() + PATIENCE).unwrap().code();
        assert_eq!(code, Some(i32::from(turn == 1)), "a turn that was waited for did not finish");
    }
    let mut idle = start(&["attach", "main"]);
    let mut text = String::new();
    read_until(&mut idle, &mut text, "-- following");
    interrupt(&world, &idle);
    read_until(&mut idle, &mut text, "lives on");
    assert_eq!(idle.wait(Instant::now() + PATIENCE).unwrap().code(), Some(0));

    let mut sent = start(&["send", "main", "x", "--wait"]);
    let mut text = String::new();
    read_until(&mut sent, &mut text, "(run)");
    world.signal("main", "STOP"); // so that the cancelled turn does not end
    interrupt(&world, &sent);
    std::thread::sleep(std::time::Duration::from_millis(50)); // two presses of a person, not one
    interrupt(&world, &sent);
    world.signal("main", "CONT");
    assert_eq!(sent.wait(Instant::now() + PATIENCE).unwrap().code(), Some(1));
    assert_eq!(world.status("main")["pod_id"], "main");
}

#[test]
fn who_presses_ctrl_c_while_a_pod_starts_leaves_none_behind() {
    let world = World::with_script(json!({}));
    let (begun, go_on) = (world.path("begun"), world.path("go on"));
    let slow = world.path("slow-pod");
    let wait =
        format!("touch '{}'; until test -e '{}'; do sleep 0.01; done", begun.display(), go_on.display());
    std::fs::write(&slow, format!("{wait}; exec {} \"$@\"\n", env!("CARGO_BIN_EXE_pod"))).unwrap();
    let command = format!("sh {}", slow.display());
    for (name, words) in [("a", &["go"][..]), ("b", &[]), ("c", &["go", "--detach"])] {
        let args = [&["run", "--name", name], words].concat();
        let program = world.program(INSOMNIA, args).env("INSOMNIA_POD_COMMAND", &command);
        let mut running = program.start(ErrorOutput::WithOutput).unwrap();
        wait_until("it starts", || begun.exists());
        interrupt(&world, &running);
        std::fs::write(&go_on, "").unwrap();
        assert_eq!(running.wait(Instant::now() + PATIENCE).unwrap().code(), Some(1), "{name}");
        assert!(world.table()["allocations"].as_array().unwrap().is_empty(), "{name}");
        [&begun, &go_on].into_iter().for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

#[test]
fn a_run_at_its_prompt_does_nothing_to_a_later_pod_of_the_same_name() {
    use std::io::Write;
    let world = World::with_script(json!({}));
    let lines = world.path("lines");
    let script = format!("exec {INSOMNIA} run --read-only --name su < '{}'", lines.display());
    for (typed, code) in [("", 0), ("a secret\n", 1)] {
        assert_eq!(ran(world.program("mkfifo", [&lines])).code, Some(0));
        let mut running = world.program("sh", ["-c", &script]).start(ErrorOutput::WithOutput).unwrap();
        let mut input = std::fs::File::options().write(true).open(&lines).unwrap();
        let mut text = String::new();
        read_until(&mut running, &mut text, "-- pod su");
        world.kill("su");
        world.start(&["--name", "su"]);
        input.write_all(typed.as_bytes()).unwrap();
        drop(input);
        let ended = running.wait(Instant::now() + PATIENCE).unwrap().code();
        assert_eq!((ended, world.status("su")["turn"].as_u64()), (Some(code), Some(0)), "{typed:?}");
        world.kill("su");
        std::fs::remove_file(&lines).unwrap();
    }
}

#[test]
fn a_pod_that_is_to_be_kept_is_kept_though_it_answers_no_cancel() {
    let world = World::with_script(json!({ "*": [{ "delay_ms": 600_000, "text": "never" }] }));
    let mut running = world.program(INSOMNIA, ["run", "--keep", "x"]).start(ErrorOutput::WithOutput).unwrap();
    let mut text = String::new();
    read_until(&mut running, &mut text, "(run)");
    world.signal("main", "STOP");
    interrupt(&world, &running);
    read_until(&mut running, &mut text, "does not answer");
    assert_eq!(running.wait(Instant::now() + PATIENCE).unwrap().code(), Some(1));
    assert!(text.contains("pod main lives on"), "{text}");
    world.signal("main", "CONT");
    assert_eq!(world.status("main")["pod_id"], "main");
}

#[test]
fn a_polite_kill_leaves_what_is_watched_and_cancels_nothing() {
    let world = World::with_script(json!({ "*": [{ "delay_ms": 600_000, "text": "never" }] }));
    world.start(&[]);
    let mut attached = world.program(INSOMNIA, ["attach", "main"]).start(ErrorOutput::WithOutput).unwrap();
    let mut text = String::new();
    read_until(&mut attached, &mut text, "-- following");
    world.ok("main", "run", json!({ "input": "y" }));
    read_until(&mut attached, &mut text, "(run)");
    assert_eq!(ran(world.program("kill", [attached.id().to_string()])).code, Some(0));
    read_until(&mut attached, &mut text, "pod main lives on");
    assert_eq!(attached.wait(Instant::now() + PATIENCE).unwrap().code(), Some(0));
    assert_eq!(world.status("main")["status"], "running");
}

#[test]
fn completions_and_the_manual_are_what_shells_and_roff_understand() {
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    world.start(&["--name", "solo"]);
    let write = |words: &[&str], name: &str| {
        let ran = world.insomnia(words);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        std::fs::write(world.path(name), ran.stdout).unwrap();
        world.path(name).to_str().unwrap().to_owned()
    };
    let bin = std::path::Path::new(INSOMNIA).parent().unwrap().to_str().unwrap().to_owned();
    let path = format!("{bin}:{}", std::env::var("PATH").unwrap());
    let said = |program: &str, args: &[&str]| {
        let ran = ran(world.program(program, args).env("PATH", &path).env("LC_ALL", "C.UTF-8"));
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{program} {args:?}");
        ran.stdout
    };
    for shell in ["bash", "zsh", "fish"] {
        let file = write(&["completions", shell], shell);
        if has_tool(shell) {
            said(shell, &["-n", &file]);
        }
    }
    let bash = world.path("bash");
    let complete = |words: &str, wanted: &[&str]| {
        let count = words.split(' ').count() - 1;
        let script = format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD={count}; _insomnia; echo ${{COMPREPLY[@]}}",
            bash.display()
        );
        let said = said("bash", &["-c", &script]);
        let said: Vec<&str> = said.split_whitespace().collect();
        assert!(wanted.iter().all(|word| said.contains(word)), "{words}: {said:?}");
    };
    complete("insomnia ''", &["run", "scope", "doctor", "completions"]);
    complete("insomnia scope ''", &["list", "who", "repair"]);
    complete("insomnia stop --t", &["--tree"]);
    complete("insomnia stop s", &["solo"]);
    complete("insomnia completions f", &["fish"]);
    if has_tool("fish") {
        let source = format!("source {}; ", world.path("fish").display());
        let fish = |line: &str| said("fish", &["-c", &format!("{source} complete -C '{line}'")]);
        assert!(fish("insomnia sco").starts_with("scope"));
        assert!(fish("insomnia scope ").contains("repair"));
        assert!(fish("insomnia stop s").contains("solo"));
        assert!(fish("insomnia stop --t").contains("--tree"));
    }
    let manual = write(&["man"], "insomnia.1");
    if has_tool("groff") {
        said("groff", &["-man", "-z", "-ww", &manual]);
    }
    if has_tool("man") {
        let page = said("man", &["-l", &manual]);
        assert!(page.contains("insomnia scope who PATH") && page.contains("EXIT STATUS"), "{page}");
    }
    assert_eq!(world.insomnia(["completions", "tcsh"]).code, Some(2));
    assert!(world.insomnia(["stop", "solo", "--tre"]).stderr.contains("did you mean \"--tree\"?"));
}

#[test]
fn nothing_that_pods_files_or_names_say_drives_a_terminal() {
    const EVIL: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\rX\u{9b}31m\u{202e}\u{7f}\u{8}end";
    let kid =
        call("SpawnPod", json!({ "name": "kid", "task": EVIL, "scope": [format!("{EVIL}/sub:write")] }));
    let read = call("ReadFile", json!({ "path": EVIL }));
    let write = call("WriteFile", json!({ "path": format!("{EVIL}.txt"), "content": EVIL }));
    let fail = json!({ "error": { "status": 400, "message": EVIL } });
    let talk = json!({ "text": EVIL, "tool_calls": [kid, read, write, call(EVIL, json!({ EVIL: EVIL }))] });
    let world = World::with_script(json!({
        "main": [talk.clone(), { "text": EVIL }, { "text": EVIL }], "gone": [talk, { "text": EVIL }],
        "*": [fail.clone(), { "text": EVIL }] }));
    let project = world.project();
    std::fs::create_dir(project.join(EVIL)).unwrap();
    let scope = format!("{EVIL}:write");
    for pod in ["gone", "main"] {
        world.start(&["--name", pod, "--scope", &scope]);
        world.turn(pod, EVIL);
        world.wait_turns("kid", 1);
        if pod == "gone" {
            assert_eq!(world.insomnia(["stop", pod, "--tree"]).code, Some(0));
        }
    }
    world.wait_idle("main");
    let mut lines: Vec<Vec<String>> = Vec::new();
    for command in COMMANDS.iter().filter(|command| !["demo", "stop", "prune"].contains(&command.name)) {
        let arguments: Vec<Vec<&str>> = match command.arguments {
            "POD" => ["main", "gone", "kid", EVIL].map(|pod| vec![pod]).to_vec(),
            "POD TEXT" => vec![vec!["main", EVIL], vec![EVIL, EVIL], vec!["main", EVIL, "--wait"]],
            "POD model NAME" => {
                vec![vec!["main", "model", EVIL], vec![EVIL, "model", "x"], vec!["main", EVIL]]
            }
            "[POD]" | "PATH" | "[TASK]" | "bash|zsh|fish" => vec![vec![EVIL]],
            _ => vec![vec![]],
        };
        for argument in arguments {
            let whole = [command.name.split(' ').collect(), argument].concat();
            for flag in command.flags.iter().filter(|flag| ["json", "all", "since"].contains(&flag.name)) {
                let (name, value) =
                    (format!("--{}", flag.name), if flag.value.is_empty() { None } else { Some("0") });
                let words = whole.iter().copied().chain([name.as_str()]).chain(value);
                lines.push(words.map(str::to_owned).collect());
            }
            lines.push(whole.iter().map(ToString::to_string).collect());
            lines.push([&whole[..], &["--since", EVIL]].concat().iter().map(ToString::to_string).collect());
        }
    }
    let fixed: [&[&str]; 10] = [
        &[EVIL],
        &["scope", EVIL],
        &["list", EVIL],
        &["run", "--name", EVIL, "x"],
        &["run", "--scope", EVIL, "x"],
        &["run", "--dir", EVIL, "--name", "third", "x"],
        &["run", "--manifest", EVIL, "x"],
        &["prune", "--older-than", EVIL],
        &["prune", "--older-than", "0d", "--dry-run"],
        &["stop", "main", "--tree"],
    ];
    lines.extend(fixed.map(|line| line.iter().map(ToString::to_string).collect()));
    let hostile = std::cell::Cell::new(0);
    let check = |line: &[String], ran: &Ran| {
        for text in [&ran.stdout, &ran.stderr] {
            assert_eq!(harmless(text), *text, "{line:?}");
            hostile.set(hostile.get() + usize::from(text.contains("owned")));
        }
        assert!(ran.code.is_some(), "{line:?} was killed");
    };
    for line in &lines {
        let ran = if line[0] == "attach" {
            // It follows what was and what is, and leaves when it is interrupted.
            let args = [&["-s".to_owned(), "INT".into(), "1".into(), INSOMNIA.into()][..], line].concat();
            ran(world.program("timeout", args))
        } else {
            world.insomnia(line)
        };
        check(line, &ran);
    }
    assert!(hostile.get() > lines.len() / 2, "{} of {} had something to show", hostile.get(), lines.len());
    std::fs::write(world.path("config/insomnia/manifest.json"), json!({ EVIL: EVIL }).to_string()).unwrap();
    for line in [["doctor"].as_slice(), &["run", "x"], &["doctor", "--json"]] {
        let words: Vec<String> = line.iter().map(ToString::to_string).collect();
        check(&words, &world.insomnia(line));
    }
    std::fs::write(world.runtime().join("scope.lock"), EVIL).unwrap();
    for line in [["list"].as_slice(), &["scope", "list"], &["scope", "repair"], &["doctor"]] {
        let words: Vec<String> = line.iter().map(ToString::to_string).collect();
        check(&words, &world.insomnia(line));
    }
}

#[test]
fn what_is_damaged_or_over_comes_with_a_hint() {
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    world.start(&[]);
    world.turn("main", "hi");
    for (words, told) in [
        (["read", "main", "--since", "18446744073709551615"], "only 5 items"),
        (["history", "main", "--since", "99999999999"], "only 5 items"),
    ] {
        let ran = world.insomnia(words);
        assert_eq!(ran.code, Some(0));
        assert!(ran.stderr.contains(told), "{words:?}: {}", ran.stderr);
    }
    let pid = world.pid("main");
    assert_eq!(world.insomnia(["stop", "main"]).code, Some(0));
    wait_until("its files are closed", || !has_files(pid));
    let listed = json_of(&world.insomnia(["list", "--all", "--json"]).stdout);
    let last = world.history("main").last().unwrap()["at"].as_u64().unwrap() / 1000;
    // Its last sign of life is the last item, or a line of its log after that.
    let since = listed["pods"][0]["since"].as_u64().unwrap();
    assert!((last..=std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()).contains(&since), "{listed}");
    let plain = world.insomnia(["list", "--all"]).stdout;
    assert!(plain.lines().nth(1).unwrap().split_whitespace().nth(2).unwrap().ends_with('s'), "{plain}");

    let folder = std::fs::read_dir(world.state().join("main")).unwrap().next().unwrap().unwrap().path();
    let registry = folder.join("spawned_pods.json");
    for damaged in ["{ half", "{}", "{\"version\":1,\"pods\":[{}],\"ended\":[]}"] {
        std::fs::write(&registry, damaged).unwrap();
        let ran = world.insomnia(["resume", "main"]);
        assert!(
            ran.code == Some(1) && ran.stderr.contains("spawned_pods.json\" is damaged"),
            "{}",
            ran.stderr
        );
        assert!(ran.stderr.contains("move it away to go on without it"), "{}", ran.stderr);
    }
    std::fs::remove_file(&registry).unwrap();
    let history = folder.join("history.jsonl");
    let text = crate::world::read(&history);
    let (_, rest) = text.split_once('\n').unwrap();
    std::fs::write(&history, rest).unwrap();
    let ran = world.insomnia(["resume", "main"]);
    assert_eq!(ran.code, Some(1));
    for told in ["has lost its first line", "insomnia history main", "moved away"] {
        assert!(ran.stderr.contains(told), "{told}: {}", ran.stderr);
    }
    assert!(world.insomnia(["history", "main"]).stdout.contains("person: hi"));
    std::fs::write(&history, "no item\n").unwrap();
    let listed = world.insomnia(["list", "--all", "--json"]).stdout;
    assert!(json_of(&listed)["pods"][0]["detail"].as_str().unwrap().contains("line 1: no item"), "{listed}");
}

#[test]
fn root_reaches_the_pod_of_another_user_by_its_socket() {
    if process::own_uid() != 0 {
        return skip("only root can act as another user");
    }
    if !has_tool("setpriv") {
        return;
    }
    let world =
        World::with_script(json!({ "*": [{ "text": "hello root" }, { "delay_ms": 600_000, "text": "x" }] }));
    let pod = world.path("pod"); // a copy that the other user can reach
    copy_program(env!("CARGO_BIN_EXE_pod"), &pod);
    let open = "chmod -R a+rX \"$0\" && mkdir -m 777 \"$0/theirs\"";
    let place = world.path("");
    assert_eq!(ran(world.program("bash", ["-c", open, place.to_str().unwrap()])).code, Some(0));
    let theirs = world.path("theirs/run");
    let words =
        ["--reuid=65534", "--regid=65534", "--clear-groups", pod.to_str().unwrap(), "--name", "theirs"];
    let started = world.program("setpriv", words).env("INSOMNIA_RUNTIME_DIR", &theirs);
    let started =
        ran(started.env("XDG_STATE_HOME", world.path("theirs/state")).env("HOME", world.path("theirs")));
    assert_eq!(started.code, Some(0), "{}", started.stderr);
    let socket = json_of(&started.stdout)["socket"].as_str().unwrap().to_owned();
    let check = |words: &[&str], code: i32, told: &str| {
        let ran = world.insomnia(words);
        assert_eq!(ran.code, Some(code), "{words:?}: {}{}", ran.stdout, ran.stderr);
        assert!(
            format!("{}{}", ran.stdout, ran.stderr).contains(told),
            "{words:?}: {}{}",
            ran.stdout,
            ran.stderr
        );
    };
    check(&["send", &socket, "hi", "--wait"], 0, "hello root");
    check(&["read", &socket], 0, "hello root");
    check(&["history", &socket], 0, "person: hi");
    check(&["show", &socket], 0, "script.json");
    check(&["send", &socket, "again"], 0, "started turn 2");
    check(&["cancel", &socket], 0, "cancelled");
    check(&["stop", &socket], 1, "as user 65534");
    kill(&json_of(&started.stdout));
}

/// Hears a program over a terminal of its own until it says this, takes the terminal away, and prints how the program
/// ended.
const HANG_UP: &str = "import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
seen = b''
while os.environ['UNTIL'].encode() not in seen:
    seen += os.read(terminal, 1000)
os.close(terminal)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))";

#[test]
fn a_terminal_that_goes_leaves_the_pods_running() {
    let world = World::with_script(json!({ "*": [{ "text": "never", "delay_ms": 600_000 }] }));
    for (name, until, status, more) in [
        ("a", "\n> ", "idle", &[][..]),
        ("b", "\n> ", "idle", &["--keep"]),
        ("c", "waiting for the model", "running", &["go"]),
    ] {
        let args = [&["-c", HANG_UP, INSOMNIA, "run", "--read-only", "--name", name], more].concat();
        let program = world.program("python3", args).env("TERM", "xterm").env("UNTIL", until);
        let ran = ran(program);
        assert_eq!(ran.stdout, "0\n", "{}", ran.stderr);
        assert_eq!(world.status(name)["status"], status);
    }
}

#[test]
fn a_run_whose_answer_nobody_will_read_ends_its_pods_unless_they_are_to_be_kept() {
    let never = json!({ "delay_ms": 600_000, "text": "never" });
    let world = World::with_script(json!({ "*": [never.clone(), never.clone(), never] }));
    for flag in ["--name=a", "--json"] {
        let line = format!("{INSOMNIA} run x {flag} 2>/dev/null | true");
        assert_eq!(ran(world.program("sh", ["-c", &line])).code, Some(0));
        assert!(world.table()["allocations"].as_array().unwrap().is_empty(), "{flag}");
    }
    for words in ["run x --keep", "send main y --wait"] {
        let line = format!("{INSOMNIA} {words} 2>/dev/null | true");
        assert_eq!(ran(world.program("bash", ["-c", &format!("set -o pipefail; {line}")])).code, Some(0));
        assert_eq!(world.status("main")["status"], "running", "{words}");
    }
}

#[test]
fn a_damaged_lock_hides_no_pod_from_who_wants_to_ask_or_end_it() {
    let family = json!([calls(&[spawn("child", &["b/c:write"])]), { "text": "done" }]);
    let world =
        World::with_script(json!({ "other": family, "*": [{ "text": "here" }, { "delay_ms": 600_000 }] }));
    world.start(&["--scope", "a:write"]);
    world.start(&["--name", "other", "--scope", "b:write"]);
    world.turn("other", "go");
    wait_until("its child is there", || world.entry("child").is_some_and(|entry| entry["state"] == "live"));
    let lock = world.runtime().join("scope.lock");
    std::fs::write(&lock, "garbage").unwrap();
    let works = |args: &[&str], part: &str| {
        let ran = world.insomnia(args);
        assert!(ran.code == Some(0) && ran.stdout.contains(part), "{args:?}: {} {}", ran.stdout, ran.stderr);
        let is_told = ran.stderr.matches("insomnia scope repair").count() == 1;
        assert!(is_told, "{args:?}: {}", ran.stderr);
    };
    works(&["list"], "other");
    works(&["send", "main", "hello", "--wait"], "here");
    works(&["set", "main", "model", "m"], "asks m");
    works(&["send", "main", "more"], "started turn 2");
    works(&["cancel", "main"], "cancelled");
    works(&["stop", "main", "--tree"], "pod main ended");
    let refused = world.insomnia(["run", "x"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("scope repair"), "{}", refused.stderr);
    assert_eq!(std::fs::read_to_string(&lock).unwrap(), "garbage", "nobody but a person mends it");
    works(&["stop", "other", "--tree"], "pod child ended");
    assert_eq!(world.processes(), [0; 0]);
    assert_eq!(world.insomnia(["scope", "repair"]).code, Some(0));
    assert!(world.table()["allocations"].as_array().unwrap().is_empty());
}

#[test]
fn wrong_words_are_told_with_what_is_meant() {
    let world = World::with_script(json!({}));
    let check = |args: &[&str], code: i32, part: &str| {
        let ran = world.insomnia(args);
        assert!(
            ran.code == Some(code) && ran.stderr.contains(part),
            "{args:?}: {:?} {}",
            ran.code,
            ran.stderr
        );
    };
    check(&[""], 2, "there is no command \"\"");
    check(&["run", "--frobnicate"], 2, "see \"insomnia run --help\"");
    check(&["scope", "wo"], 2, "(did you mean \"scope who\"?); see \"insomnia --help\"");
    check(&["send", "main"], 2, "TEXT is missing; see \"insomnia send --help\"");
    check(&["set", "main", "colour", "red"], 2, "\"model\" can be set");
    check(&["run", "x", "--scope", "d:write:recursve"], 1, "must be \"recursive\" or \"flat\"");
    check(&["run", "x", "--scope", "~/d:write"], 1, "write the whole path");
    let there = world.project().join("r.md");
    check(&["run", "x", "--instruction", "r.md"], 1, &format!("\"{}\"", there.display()));
    std::fs::write(&there, "Be brief.").unwrap();
    assert_eq!(world.insomnia(["run", "x", "--instruction", "r.md"]).code, Some(0));

    let settings = |settings: Value| {
        let mut all = settings;
        all["provider"] = json!({ "kind": "script", "file": world.path("script.json") });
        world.manifest(all);
    };
    settings(json!({ "tools": { "deny": ["WriteFile", "Shel"] } }));
    check(&["run", "x"], 1, "\"Shel\", which is no tool; the tools are SpawnPod");
    settings(json!({ "shell": { "writable": ["/tmp", "~/.cache"] } }));
    check(&["run", "x"], 1, "key \"shell.writable\" is not valid: only a shell knows");
    settings(json!({ "shell": { "writable": ["/"] } }));
    check(&["run", "x"], 1, "\"shell.writable\" of the manifest: write scope \"/\" is refused");
    settings(json!({}));
    std::fs::create_dir(world.project().join(".insomnia")).unwrap();
    let project = world.project().join(".insomnia/manifest.json");
    std::fs::write(&project, json!({ "limits": { "steps": 500 } }).to_string()).unwrap();
    check(&["run", "x"], 1, "may not raise \"limits.steps\" (it is 200)");
    std::fs::remove_file(&project).unwrap();

    world.start(&[]);
    let line = "mkdir gone && cd gone && rmdir ../gone && \"$0\" list && ! \"$0\" run x";
    let ran = ran(world.program("sh", ["-c", line, INSOMNIA]));
    assert!(ran.code == Some(0) && ran.stdout.contains("main"), "{} {}", ran.stdout, ran.stderr);
    assert!(ran.stderr.contains("the current directory was removed"), "{}", ran.stderr);
}
