//! Ending pods: graceful in mid-turn, by force when they do not obey, never the wrong process, and the scope is
//! back only when the process is gone.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::sys::process::{ErrorOutput, Program, Running};

use crate::world::{World, call, calls, has_files, lives, spawn, wait_until};

fn quiet(pods: Value, settings: Value) -> World {
    let mut settings = settings;
    settings["wake_on_events"] = json!(false);
    let world = World::with_settings(pods, settings);
    world.start(&["--scope", ".:write"]);
    world
}

fn stop(pod_id: &str) -> Value {
    call("StopPod", json!({ "pod_id": pod_id }))
}

/// A reply of a model that never answers.
fn never() -> Value {
    json!({ "text": "never", "delay_ms": 600_000 })
}

fn rule(world: &World, name: &str) -> String {
    format!("{}:write:recursive", world.project().join(name).display())
}

/// Changes the text of `scope.lock` as an editor would, in one step.
fn edit_table(world: &World, change: impl FnOnce(&mut Value)) {
    let mut table = world.table();
    change(&mut table);
    let path = world.runtime().join("scope.lock");
    std::fs::write(path.with_extension("edited"), table.to_string()).unwrap();
    std::fs::rename(path.with_extension("edited"), path).unwrap();
}

fn entry_of<'t>(table: &'t mut Value, pod_id: &str) -> &'t mut Value {
    let entries = table["allocations"].as_array_mut().unwrap();
    entries.iter_mut().find(|entry| entry["pod_id"] == pod_id).unwrap()
}

#[test]
fn a_pod_is_stopped_in_mid_turn_a_hundred_times_in_a_row() {
    let rounds = 100;
    let mut replies: Vec<Value> =
        (0..rounds).map(|_| calls(&[spawn("worker", &["w:write"]), stop("worker")])).collect();
    replies.push(json!({ "text": "done" }));
    let world = quiet(json!({ "main": replies, "worker": [never()] }), json!({}));
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let stops = world.results("main", "StopPod");
    assert_eq!(stops.len(), rounds);
    for (ok, text) in &stops {
        let answer: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"));
        assert!(*ok && answer["how"] == "graceful", "{text}");
        assert_eq!(answer["scope_returned"], json!([rule(&world, "w")]));
    }
    assert_eq!(world.processes(), [world.pid("main")]);
    assert_eq!(world.status("main")["lent"], json!([]));
    assert_eq!(std::fs::read_dir(world.runtime().join("life")).unwrap().count(), 1);
    assert!(!world.runtime().join("worker").exists());
    let history = world.history("worker");
    assert_eq!(history.last().unwrap()["type"], "turn_ended", "{history:#?}");
}

#[test]
fn a_pod_that_hangs_keeps_its_scope_until_it_is_killed() {
    let world = quiet(
        json!({
            "main": [
                calls(&[spawn("worker", &["w:write"])]), {},
                calls(&[stop("worker"), call("WriteFile", json!({ "path": "w/x", "content": "x" }))]), {},
            ],
            "worker": [never()],
        }),
        json!({ "limits": { "stop_seconds": 1 } }),
    );
    world.turn("main", "go");
    let pid = world.pid("worker");
    world.signal("worker", "STOP");
    let mut events = world.subscribe("main", None);
    let asked = Instant::now();
    world.ok("main", "run", json!({ "input": "stop it" }));
    events.until(|event| event["event"] == "tool_call" && event["data"]["name"] == "StopPod");
    while lives(pid) {
        // Its entry must be there as long as it could write; looked at in this order.
        let is_there = world.entry("worker").is_some();
        assert!(is_there || !has_files(pid), "the scope went back while the process lived");
    }
    assert_eq!(events.until_turn_ended()["result"], "finished");
    assert!(asked.elapsed() >= Duration::from_secs(1) && asked.elapsed() < Duration::from_secs(5));
    assert_eq!(world.answer("main", "StopPod")["how"], "killed");
    assert!(world.results("main", "WriteFile")[0].0);
    assert_eq!(world.entry("worker"), None);
}

#[test]
fn a_tree_ends_whole_and_survivors_of_a_single_stop_are_named() {
    let world = quiet(
        json!({
            "main": [
                calls(&[spawn("middle", &["m:write"])]), {},
                calls(&[stop("middle")]), {},
                calls(&[spawn("middle", &["n:write"])]), {},
                calls(&[call("StopPod", json!({ "pod_id": "middle", "tree": true }))]), {},
            ],
            "middle": [calls(&[
                spawn("writer", &["m/w:write"]), spawn("writer2", &["n/w:write"]), spawn("reader", &[]),
            ]), { "text": "ok" }],
            "writer": [calls(&[spawn("leaf", &["m/w/leaf:write"])]), never()],
            "writer2": [calls(&[spawn("leaf2", &["n/w/leaf:write"])]), never()],
            "*": [never()],
        }),
        json!({}),
    );
    world.turn("main", "go");
    world.wait_turns("middle", 1);
    wait_until("the leaf is there", || world.entry("leaf").is_some());
    world.turn("main", "stop the middle");
    let answer = world.answer("main", "StopPod");
    let mut survivors: Vec<(String, Value)> = answer["survivors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|survivor| (survivor["pod_id"].as_str().unwrap().to_owned(), survivor["keeps"].clone()))
        .collect();
    survivors.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(
        survivors,
        [("reader".to_owned(), json!([])), ("writer".to_owned(), json!([rule(&world, "m/w")]))],
        "{answer}"
    );
    for pod in ["writer", "reader"] {
        assert_eq!(world.entry(pod).unwrap()["delegated_from"], "main", "{pod}");
        assert_eq!(world.status(pod)["status"], "running");
    }
    assert_eq!(world.entry("leaf").unwrap()["delegated_from"], "writer");
    let known: Vec<Value> = world.ok("main", "list_pods", json!(null))["pods"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pod| pod["pod_id"].clone())
        .collect();
    for pod in ["writer", "reader", "leaf"] {
        assert!(known.contains(&json!(pod)), "{known:?}");
    }
    // The second middle is stopped with all that is below it; what is not below it lives on.
    world.turn("main", "another middle");
    world.wait_turns("middle", 1);
    wait_until("the second leaf is there", || world.entry("leaf2").is_some());
    let below = ["middle", "writer2", "leaf2"];
    let pids: Vec<i32> = below.iter().map(|pod| world.pid(pod)).collect();
    world.turn("main", "stop the tree");
    assert!(pids.iter().all(|pid| !has_files(*pid)), "some of {below:?} live on");
    let answer = world.answer("main", "StopPod");
    let stopped: Vec<&Value> =
        answer["stopped"].as_array().unwrap().iter().map(|stopped| &stopped["pod_id"]).collect();
    for pod in below {
        assert!(stopped.contains(&&json!(pod)), "{pod}: {answer}");
        assert_eq!(world.entry(pod), None);
    }
    assert!(world.entry("writer").is_some() && world.entry("leaf").is_some());
}

#[test]
fn u12_each_way_to_end_reaches_a_pod_whose_model_never_answers() {
    for way in ["TERM", "INT", "shutdown"] {
        let world = World::with_script(json!({ "main": [never()] }));
        world.start(&["--scope", ".:write"]);
        let mut events = world.subscribe("main", None);
        world.ok("main", "run", json!({ "input": "go" }));
        events.until(|event| event["data"]["detail"] == "waiting for the model");
        let pid = world.pid("main");
        let asked = Instant::now();
        if way == "shutdown" {
            world.ok("main", "shutdown", json!(null));
        } else {
            world.signal("main", way);
        }
        let end = events.until_turn_ended();
        assert_eq!((&end["result"], &end["message"]), (&json!("cancelled"), &json!("the pod is ending")));
        wait_until("the pod is gone", || !lives(pid));
        assert!(asked.elapsed() < Duration::from_secs(2), "{way} took {:?}", asked.elapsed());
        assert_eq!(world.entry("main"), None);
        assert!(!world.runtime().join("main").exists());
        assert_eq!(std::fs::read_dir(world.runtime().join("life")).unwrap().count(), 0);
    }
}

#[test]
fn a_pod_that_is_ending_refuses_new_work() {
    // Its report to a spawner that hangs holds its end up, so that there is time to ask.
    let world = quiet(
        json!({ "main": [calls(&[spawn("worker", &["w:write"])]), {}], "worker": [never()] }),
        json!({}),
    );
    world.turn("main", "go");
    let pid = world.pid("worker");
    world.signal("main", "STOP");
    let status = world.status("worker");
    world.ok("worker", "shutdown", json!(null));
    wait_until("the worker has ended its turn", || world.count("worker", "turn_ended") == 1);
    let refused = world.request("worker", "run", json!({ "input": "more" }));
    assert_eq!(refused["error"]["code"], "shutting_down", "{refused} {status}");
    assert_eq!(
        world.request("worker", "notify", json!({ "message": "x" }))["error"]["code"],
        "shutting_down"
    );
    world.signal("main", "CONT");
    wait_until("the worker is gone", || !lives(pid));
    assert_eq!(world.entry("worker"), None);
}

#[test]
fn r10_a_second_signal_ends_a_pod_at_once_and_its_scope_is_reclaimed() {
    for second in ["TERM", "INT"] {
        let world = quiet(
            json!({ "main": [calls(&[spawn("worker", &["w:write"])]), {}], "worker": [never()] }),
            json!({}),
        );
        world.turn("main", "go");
        let pid = world.pid("worker");
        // The report that its turn was cancelled is on its way to a spawner that hangs, for up to 5 s.
        world.signal("main", "STOP");
        let asked = Instant::now();
        world.signal("worker", "TERM");
        wait_until("the worker is ending", || world.count("worker", "turn_ended") == 1);
        assert!(lives(pid));
        world.signal("worker", second);
        wait_until("the worker is gone", || !lives(pid));
        assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
        world.signal("main", "CONT");
        // Nobody has handed anything back: whoever opens the lock next does.
        world.start(&["--name", "next"]);
        assert_eq!(world.entry("worker"), None);
        assert_eq!(world.status("main")["lent"], json!([]));
    }
}

/// A process that is none of ours, and its number.
fn bystander(world: &World) -> (Running, i32) {
    let marker = format!("600.{}", world.pid("main"));
    let running = Program::new("sleep", [&marker]).start(ErrorOutput::WithOutput).unwrap();
    let command_of = |pid: &i32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let wanted = format!("sleep\0{marker}\0").into_bytes();
    let mut found = None;
    wait_until("the bystander runs", || {
        let pids = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        found = pids.into_iter().find(|pid| command_of(pid) == wanted);
        found.is_some()
    });
    (running, found.unwrap())
}

#[test]
fn l13_r08_a_number_in_the_table_is_never_killed() {
    let world = quiet(
        json!({
            "main": [calls(&[spawn("worker", &["w:write"])]), {}, calls(&[stop("worker")]), {}],
            "worker": [never()],
        }),
        json!({ "limits": { "stop_seconds": 1 } }),
    );
    world.turn("main", "go");
    let worker = world.pid("worker");
    let (sleep, foreign) = bystander(&world);
    assert!(lives(foreign) && foreign != worker);
    world.signal("worker", "STOP"); // so that only a kill would help
    edit_table(&world, |table| entry_of(table, "worker")["pid"] = json!(foreign));
    assert_eq!(world.turn("main", "stop it")["result"], "finished");
    assert!(lives(foreign), "a process that is no pod was killed");
    let (ok, text) = world.results("main", "StopPod").remove(0);
    assert!(!ok && text.contains("lives on"), "{text}");
    assert!(world.entry("worker").is_some(), "the scope went back while its holder lives");
    let stat = insomnia::sys::process::process_stat(worker).unwrap();
    insomnia::sys::process::kill_exactly(worker, stat.start_time).unwrap();
    // It was not stopped, so its end is news.
    wait_until("its end is told", || {
        world.turn("main", "what is new?");
        world.notices("main").contains("pod \"worker\" ended without saying so")
    });
    drop(sleep);
}

#[test]
fn l13_r08_a_dead_pods_number_that_somebody_else_has_now_is_left_alone() {
    let world = quiet(
        json!({
            "main": [calls(&[spawn("worker", &["w:write"])]), {}, calls(&[stop("worker")]), {}],
            "worker": [never()],
        }),
        json!({ "limits": { "stop_seconds": 1 } }),
    );
    world.turn("main", "go");
    let (sleep, foreign) = bystander(&world);
    let start_time = insomnia::sys::process::process_stat(foreign).unwrap().start_time;
    // The worst case: the dead pod's number and even its start time are those of a stranger.
    world.signal("main", "STOP");
    world.kill_pid(world.pid("worker"));
    edit_table(&world, |table| {
        let entry = entry_of(table, "worker");
        entry["pid"] = json!(foreign);
        entry["start_time"] = json!(start_time);
    });
    world.signal("main", "CONT");
    world.turn("main", "stop it");
    assert!(lives(foreign), "a process that is no pod was killed");
    assert_eq!(world.entry("worker"), None);
    drop(sleep);
}

#[test]
fn l13_a_number_that_is_no_process_makes_the_table_invalid() {
    for number in [1, 0, -1] {
        let world = quiet(
            json!({
                "main": [calls(&[spawn("worker", &["w:write"])]), {}, calls(&[stop("worker")]), {}],
                "worker": [never()],
            }),
            json!({}),
        );
        world.turn("main", "go");
        let worker = world.pid("worker");
        edit_table(&world, |table| entry_of(table, "worker")["pid"] = json!(number));
        let text = std::fs::read_to_string(world.runtime().join("scope.lock")).unwrap();
        world.turn("main", "stop it");
        let (ok, words) = world.results("main", "StopPod").remove(0);
        assert!(!ok && words.contains("scope repair"), "{words}");
        assert!(lives(worker));
        let ran = world.pod_command(["--name", "other"]);
        assert!(ran.code == Some(1) && ran.stderr.contains("scope repair"), "{}", ran.stderr);
        assert_eq!(std::fs::read_to_string(world.runtime().join("scope.lock")).unwrap(), text);
    }
}

#[test]
fn r03_a_lost_terminal_does_not_end_a_pod() {
    let world = World::with_script(json!({ "main": [{ "text": "still here" }] }));
    world.start(&[]);
    (0..3).for_each(|_| world.signal("main", "HUP"));
    assert_eq!(world.turn("main", "are you there?")["result"], "finished");
    assert_eq!(world.ok("main", "read_output", json!(null))["text"], "still here");
}

#[test]
fn r10_a_second_signal_is_an_exit_that_says_so() {
    let world = World::with_script(json!({ "main": [never()] }));
    // A spawner that takes connections and never answers holds the end up.
    let deaf = std::os::unix::net::UnixListener::bind(world.path("deaf")).unwrap();
    let callback = world.path("deaf").to_string_lossy().into_owned();
    let args = ["--foreground", "--scope", ".:write", "--callback", &callback, "--task", "go"];
    let mut running = world.program(env!("CARGO_BIN_EXE_pod"), args).start(ErrorOutput::WithOutput).unwrap();
    wait_until("it is asked", || world.socket("main").exists() && world.count("main", "input") == 1);
    world.signal("main", "TERM");
    wait_until("it is ending", || world.count("main", "turn_ended") == 1);
    world.signal("main", "TERM");
    let status = running.wait(Instant::now() + Duration::from_secs(3)).unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(world.entry("main").is_some(), "nobody has handed it back yet");
    drop(deaf);
    // A helper of the pod may hold its life for a moment longer.
    wait_until("its scope is free", || {
        world.pod_command(["--name", "next", "--scope", ".:write"]).code == Some(0)
    });
    assert_eq!(world.entry("main"), None);
}

#[test]
fn a_cancel_ends_the_wait_for_the_lock_and_nobody_else_waits_for_it() {
    if !crate::world::has_tool("flock") {
        return;
    }
    let world = quiet(json!({ "main": [calls(&[spawn("worker", &["w:write"])]), {}] }), json!({}));
    let lock = world.runtime().join("scope.lock").to_string_lossy().into_owned();
    let marker = world.path("held").to_string_lossy().into_owned();
    let hold = format!("touch {marker}; sleep 60");
    let holder =
        world.program("flock", ["-o", &lock, "sh", "-c", &hold]).start(ErrorOutput::WithOutput).unwrap();
    wait_until("the lock is held", || std::path::Path::new(&marker).exists());
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({ "input": "go" }));
    events.until(|event| event["data"]["detail"] == "tool SpawnPod");
    let asked = Instant::now();
    assert_eq!(world.status("main")["status"], "running");
    world.ok("main", "cancel", json!(null));
    assert_eq!(events.until_turn_ended()["result"], "cancelled");
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    drop(holder);
    assert_eq!(world.table()["allocations"].as_array().unwrap().len(), 1);
}

#[test]
fn a_tree_that_is_still_growing_ends_whole() {
    let world = quiet(
        json!({
            "main": [
                calls(&[spawn("seed", &["s:write"]), call("StopPod", json!({ "pod_id": "seed", "tree": true }))]), {},
                calls(&[spawn("seed", &["s:write"])]), {},
                calls(&[call("StopPod", json!({ "pod_id": "seed", "tree": true }))]), {},
            ],
            "*": [calls(&[spawn("a", &[]), spawn("b", &["s:write"]), spawn("c", &[])]), never()],
        }),
        json!({ "limits": { "depth": 4, "pods_per_user": 40 } }),
    );
    assert_eq!(world.turn("main", "at once")["result"], "finished");
    world.answer("main", "StopPod");
    let main = world.pid("main");
    wait_until("nothing is left", || world.processes() == [main]);
    world.turn("main", "again");
    wait_until("it grows", || world.table()["allocations"].as_array().unwrap().len() > 6);
    assert_eq!(world.turn("main", "stop")["result"], "finished");
    world.answer("main", "StopPod");
    wait_until("nothing is left", || world.processes() == [main]);
    // What was about to start when its spawner ended gives up by itself and leaves nothing either.
    world.start(&["--name", "next"]);
    let entries = world.table()["allocations"].as_array().unwrap().len();
    assert_eq!(entries, 2, "{}", world.table());
    assert_eq!(world.status("main")["lent"], json!([]));
}

#[test]
fn each_request_during_the_end_gets_an_answer() {
    let world = World::with_script(json!({ "main": [never()] }));
    // A spawner that takes connections and never answers holds the end up.
    let deaf = std::os::unix::net::UnixListener::bind(world.path("deaf")).unwrap();
    world.start(&["--callback", world.path("deaf").to_str().unwrap(), "--task", "go"]);
    wait_until("it is asked", || world.count("main", "input") == 1);
    let ask = |method: &str, params: Value| {
        let asked = Instant::now();
        let reply = world.request("main", method, params); // fails when there is no reply
        assert!(asked.elapsed() < Duration::from_secs(2), "{method} took {:?}", asked.elapsed());
        reply
    };
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                while world.count("main", "turn_ended") == 0 {
                    ask("run", json!({ "input": "more" }));
                }
                (0..10).for_each(|_| {
                    ask("run", json!({ "input": "more" }));
                });
            });
        }
        world.ok("main", "shutdown", json!(null));
    });
    assert_eq!(ask("run", json!({ "input": "more" }))["error"]["code"], "shutting_down");
    assert_eq!(ask("subscribe", json!({}))["error"]["code"], "shutting_down");
    assert_eq!(ask("status", json!(null))["ok"]["detail"], "ending");
    assert_eq!(ask("cancel", json!(null))["ok"]["cancelled"], false);
    drop(deaf);
}

/// Who started whom, which programs ran, and who sent which signal to whom, from the text of strace. Numbers are
/// those outside of the sandboxes.
#[derive(Debug, Default)]
struct Signals {
    started_by: std::collections::HashMap<i32, i32>,
    programs: Vec<(i32, String)>,
    sent: Vec<(i32, i32)>,
}

impl Signals {
    fn read(trace: &str) -> Signals {
        let mut signals = Signals::default();
        for line in trace.lines() {
            let Some((pid, rest)) = line.split_once(' ') else { continue };
            let (pid, rest) = (pid.parse().unwrap(), rest.trim_start());
            let begins = |names: &[&str], bracket: &str| {
                names.iter().any(|name| rest.starts_with(&format!("{name}{bracket}")))
            };
            let clones = ["clone", "clone3", "fork", "vfork"];
            let resumed: Vec<String> = clones.iter().map(|name| format!("<... {name} resumed>")).collect();
            let is_clone = begins(&clones, "(") || resumed.iter().any(|start| rest.starts_with(start));
            if is_clone {
                let result = rest.rsplit_once("= ").map_or("", |(_, result)| result);
                signals.started_by.extend(outside(result).map(|child| (child, pid)));
            } else if begins(&["execve", "execveat"], "(") {
                signals.programs.push((pid, rest.to_owned()));
            } else if begins(&["kill", "tkill", "rt_sigqueueinfo"], "(") {
                let target = rest.split_once('(').unwrap().1.split(", ").next().unwrap();
                signals.sent.push((pid, outside(target).unwrap()));
            } else {
                assert!(!begins(&["tgkill", "pidfd_send_signal"], "("), "{line}");
            }
        }
        signals
    }

    /// Whether this process or thread came from the helper that confines a command: what the helper starts is in
    /// namespaces of its own.
    fn is_inside(&self, pid: i32) -> bool {
        let helper =
            |pid| self.programs.iter().any(|(of, text)| *of == pid && text.contains("\"--confined\""));
        std::iter::successors(self.started_by.get(&pid), |above| self.started_by.get(above))
            .any(|above| helper(*above))
    }
}

/// A process number as strace shows it: with its number outside where that is another one.
fn outside(text: &str) -> Option<i32> {
    match text.split_once("/* ") {
        Some((_, note)) => note.split(' ').next()?.parse().ok(),
        None => text.split([' ', ')']).next()?.parse().ok(),
    }
}

#[test]
fn r09_signals_go_to_what_was_started_here_and_to_nobody_else() {
    if !crate::world::has_tool("strace") {
        return;
    }
    let shell = |command: &str, seconds: u64| {
        call("Shell", json!({ "command": command, "timeout_seconds": seconds }))
    };
    let world = World::with_settings(
        json!({
            "main": [
                calls(&[shell("sleep 600 & sleep 600", 1), spawn("deaf", &["d:write"]), spawn("good", &["g:write"])]),
                { "text": "ready" },
                calls(&[stop("deaf"), stop("good"), shell("sleep 600", 600)]),
            ],
            "deaf": [never()],
        }),
        json!({ "wake_on_events": false, "limits": { "stop_seconds": 1 } }),
    );
    let trace = world.path("trace");
    let calls_shown =
        "trace=kill,tkill,tgkill,rt_sigqueueinfo,pidfd_send_signal,execve,execveat,clone,clone3,?fork,?vfork";
    let args =
        ["-f", "-qq", "-s", "200", "--decode-pids=pidns", "-o", trace.to_str().unwrap(), "-e", calls_shown];
    let pod = [env!("CARGO_BIN_EXE_pod"), "--foreground", "--scope", ".:write"];
    let args = args.into_iter().chain(pod);
    let mut running = world.program("strace", args).start(ErrorOutput::WithOutput).unwrap();
    wait_until("it listens", || world.entry("main").is_some() && world.listens("main"));
    let main = world.pid("main");
    let (_bystander, foreign) = bystander(&world);
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let deaf = world.pid("deaf");
    world.signal("deaf", "STOP");
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({ "input": "end them" }));
    events.until(|event| event["data"]["detail"] == "tool Shell");
    world.ok("main", "cancel", json!(null));
    assert_eq!(events.until_turn_ended()["result"], "cancelled");
    world.ok("main", "shutdown", json!(null));
    let _ = running.wait(Instant::now() + crate::world::PATIENCE).unwrap();
    let stops = world.results("main", "StopPod");
    assert!(stops[0].1.contains("killed") && stops[1].1.contains("graceful"), "{stops:?}");

    let text = crate::world::read(&trace);
    let signals = Signals::read(&text);
    assert!(signals.sent.iter().any(|(_, target)| *target == deaf), "the deaf one was not killed: {text}");
    for (sender, target) in &signals.sent {
        let is_ours = |pid: i32| pid > 1 && (pid == main || signals.started_by.contains_key(&pid));
        let allowed = match *target {
            -1 => signals.is_inside(*sender), // means those in there
            group if group < -1 => is_ours(-group),
            pid => is_ours(pid),
        };
        assert!(allowed && *target != foreign, "{sender} sent a signal to {target}: {text}");
    }
    for (_, program) in &signals.programs {
        assert!(!program.split('"').nth(1).unwrap().ends_with("kill"), "{program}");
    }
    assert!(lives(foreign));
}
