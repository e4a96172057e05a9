//! Talking to pods that run: sending, reading, listing and waiting, also while they are in a turn.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::{Events, World, call, calls, is_long, spawn, wait_until};

fn quiet(pods: Value) -> World {
    let world = World::with_settings(pods, json!({ "wake_on_events": false }));
    world.start(&["--scope", ".:write"]);
    world
}

fn send(pod_id: &str, message: &str) -> Value {
    call("SendToPod", json!({ "pod_id": pod_id, "message": message }))
}

fn read(input: Value) -> Value {
    call("ReadPodOutput", input)
}

fn wait(input: Value) -> Value {
    call("WaitPods", input)
}

fn never() -> Value {
    json!({ "text": "never", "delay_ms": 600_000 })
}

/// Starts a turn of `main` and waits until this tool's call has begun.
fn run_until(world: &World, tool: &str) -> Events {
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({ "input": "go" }));
    events.until(|event| {
        let detail = event["data"]["detail"].as_str().unwrap_or_default();
        detail.starts_with(tool)
    });
    events
}

fn finished_within(started: Instant, limit: Duration) {
    assert!(started.elapsed() < limit, "it took {:?}", started.elapsed());
}

fn parsed(results: &[(bool, String)]) -> Vec<Value> {
    results
        .iter()
        .map(|(ok, text)| if *ok { serde_json::from_str(text).unwrap() } else { json!(text) })
        .collect()
}

#[test]
fn a_message_to_an_idle_pod_starts_a_turn_and_its_output_can_be_read() {
    let world = quiet(json!({
        "main": [
            calls(&[spawn("coder", &[]), wait(json!({})), read(json!({ "pod_id": "coder" }))]),
            calls(&[send("coder", "and now?"), wait(json!({ "pod_ids": ["coder"] })), read(json!({ "pod_id": "coder" }))]),
            calls(&[
                read(json!({ "pod_id": "coder", "since": 0 })),
                read(json!({ "pod_id": "coder", "since": 10_000 })),
                read(json!({ "pod_id": "nobody" })), send("nobody", "x"), send("main", "x"),
                read(json!({ "pod_id": "../coder" })),
            ]),
            {},
        ],
        "coder": [{ "text": "first answer" }, { "text": "second answer" }],
    }));
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let reads = parsed(&world.results("main", "ReadPodOutput"));
    assert_eq!(
        (&reads[0]["text"], &reads[0]["status"], &reads[0]["turn"]),
        (&json!("first answer"), &json!("idle"), &json!(1))
    );
    assert_eq!((&reads[1]["text"], &reads[1]["turn"]), (&json!("second answer"), &json!(2)));
    assert_eq!(reads[2]["text"], "first answer\n\nsecond answer");
    assert_eq!(reads[2]["cursor"], json!(world.history("coder").len()));
    assert_eq!(reads[3]["text"], "");
    for unknown in &reads[4..] {
        assert!(unknown.as_str().unwrap().contains("you know: coder"), "{unknown}");
    }
    let sends = parsed(&world.results("main", "SendToPod"));
    assert_eq!(
        (&sends[0]["delivered"], &sends[0]["queued"], &sends[0]["turn"]),
        (&json!(true), &json!(false), &json!(2))
    );
    assert!(sends[1].is_string() && sends[2].is_string(), "{sends:?}");
    let inputs: Vec<Value> =
        world.history("coder").into_iter().filter(|item| item["type"] == "input").collect();
    assert_eq!((&inputs[1]["text"], &inputs[1]["from"]), (&json!("and now?"), &json!("main")));
}

#[test]
fn the_cursor_of_one_reading_is_where_the_next_goes_on() {
    let world = quiet(json!({
        "main": [calls(&[spawn("coder", &[]), wait(json!({}))]), {}],
        "coder": [{ "text": "one", "tool_calls": [call("ListFiles", json!({}))] }, { "text": "two" }, { "text": "three" }],
    }));
    world.turn("main", "go");
    let all = world.ok("coder", "read_output", json!({ "since": 0 }));
    assert_eq!((&all["text"], &all["more"]), (&json!("one\n\ntwo"), &json!(false)));
    world.turn("coder", "more");
    let rest = world.ok("coder", "read_output", json!({ "since": all["cursor"] }));
    assert_eq!(rest["text"], "three");
    assert_eq!(world.ok("coder", "read_output", json!({ "since": rest["cursor"] }))["text"], "");
}

#[test]
fn what_is_sent_in_mid_turn_reaches_the_model_before_its_next_request() {
    let world = quiet(json!({
        "main": [
            calls(&[spawn("coder", &[])]), {},
            calls(&[send("coder", "one more thing"), read(json!({ "pod_id": "coder" })), wait(json!({}))]), {},
        ],
        "coder": [
            { "text": "thinking" , "delay_ms": 1, "tool_calls": [call("ListFiles", json!({}))] },
            { "text": "working", "delay_ms": 4000, "tool_calls": [call("ListFiles", json!({}))] },
            { "text": "done with both" },
        ],
    }));
    world.turn("main", "go");
    wait_until("the coder has thought", || world.count("coder", "tool_result") == 1);
    assert_eq!(world.turn("main", "send")["result"], "finished");
    let sent = world.answer("main", "SendToPod");
    assert_eq!((&sent["queued"], &sent["turn"]), (&json!(true), &json!(1)));
    let reading = world.answer("main", "ReadPodOutput");
    assert_eq!((&reading["status"], &reading["text"]), (&json!("running"), &json!("thinking")));
    let order: Vec<String> = world
        .history("coder")
        .iter()
        .map(|item| match item["type"].as_str().unwrap() {
            "input" => item["text"].as_str().unwrap().to_owned(),
            kind => kind.to_owned(),
        })
        .collect();
    assert_eq!(
        order,
        [
            "session",
            "turn_started",
            "task of coder",
            "assistant",
            "tool_result",
            "assistant",
            "tool_result",
            "one more thing",
            "assistant",
            "turn_ended"
        ]
    );
}

#[test]
fn what_is_sent_during_the_last_request_gets_an_answer_in_the_same_turn() {
    let world = quiet(json!({
        "main": [calls(&[spawn("coder", &[])]), {}, calls(&[send("coder", "wait!"), wait(json!({}))]), {}],
        "coder": [{ "text": "done", "delay_ms": 3000 }, { "text": "done again" }],
    }));
    world.turn("main", "go");
    wait_until("it is asked", || world.status("coder")["detail"] == "waiting for the model");
    world.turn("main", "send");
    assert_eq!(world.answer("main", "SendToPod")["queued"], true);
    let types: Vec<Value> = world.history("coder").into_iter().map(|item| item["type"].clone()).collect();
    assert_eq!(types, ["session", "turn_started", "input", "assistant", "input", "assistant", "turn_ended"]);
}

#[test]
fn the_list_tells_running_idle_paused_stopped_and_silent_pods_apart() {
    let world = quiet(json!({
        "main": [
            calls(&[spawn("idle", &[]), spawn("busy", &["b:write"]), spawn("failed", &[]), spawn("silent", &[]), spawn("dead", &[])]),
            {},
            calls(&[call("ListPods", json!({}))]), {},
        ],
        "idle": [{ "text": "idle words" }],
        "busy": [never()],
        "failed": [{ "error": { "status": 400, "message": "no" } }],
        "silent": [{ "text": "last words" }],
        "dead": [{ "text": "dead words" }],
    }));
    world.turn("main", "go");
    for pod in ["idle", "silent", "dead", "failed"] {
        world.wait_turns(pod, 1);
        world.wait_idle(pod);
    }
    world.signal("silent", "STOP");
    let before = world.ok("main", "list_pods", json!(null));
    let dead = before["pods"].as_array().unwrap().iter().find(|pod| pod["pod_id"] == "dead").unwrap();
    assert_eq!((&dead["status"], &dead["last_response"]), (&json!("idle"), &json!("dead words")));
    world.kill("dead");
    let asked = Instant::now();
    world.turn("main", "list");
    finished_within(asked, Duration::from_millis(2500));
    let answer = world.answer("main", "ListPods");
    let pods = answer["pods"].as_array().unwrap();
    let row = |pod_id: &str| pods.iter().find(|pod| pod["pod_id"] == pod_id);
    let check = |pod_id: &str, status: &str, answers: bool, last_response: &str| {
        let row = row(pod_id).unwrap_or_else(|| panic!("{pod_id} is not in {answer}"));
        assert_eq!(row["status"], status, "{row}");
        assert_eq!(row["answers"], answers, "{row}");
        assert_eq!(row["last_response"], last_response, "{row}");
        assert_eq!(row["spawner"], "main", "{row}");
    };
    check("idle", "idle", true, "idle words");
    check("busy", "running", true, "");
    check("failed", "paused", true, "");
    check("silent", "idle", false, "last words");
    let rule = format!("{}:write:recursive", world.project().join("b").display());
    assert_eq!(row("busy").unwrap()["scope"], json!([rule]));
    if let Some(row) = row("dead") {
        assert_eq!(row["status"], "stopped", "{row}"); // until its watcher has spoken for it
    }
    wait_until("the dead one is dropped", || {
        !world.ok("main", "list_pods", json!(null)).to_string().contains("\"dead\"")
    });
    world.signal("silent", "CONT");
    assert!(world.ok("main", "list_pods", json!(null)).to_string().contains("\"silent\""));
}

#[test]
fn pods_that_hang_are_asked_in_parallel() {
    let spawns: Vec<Value> = (0..6).map(|n| spawn(&format!("p{n}"), &[])).collect();
    let world = quiet(json!({ "main": [{ "tool_calls": spawns }, {}] }));
    world.turn("main", "go");
    for n in 0..6 {
        world.wait_turns(&format!("p{n}"), 1);
        world.signal(&format!("p{n}"), "STOP");
    }
    let asked = Instant::now();
    let answer = world.ok("main", "list_pods", json!(null));
    finished_within(asked, Duration::from_millis(1800));
    for pod in answer["pods"].as_array().unwrap() {
        assert_eq!((&pod["answers"], &pod["status"]), (&json!(false), &json!("idle")), "{pod}");
    }
}

#[test]
fn waiting_ends_when_any_or_all_are_done() {
    let world = quiet(json!({
        "main": [
            calls(&[spawn("fast", &[]), spawn("slow", &[])]),
            calls(&[wait(json!({ "until": "any" })), wait(json!({ "until": "all" })), wait(json!({}))]),
            {},
        ],
        "fast": [{ "text": "fast answer" }],
        "slow": [{ "text": "slow answer", "delay_ms": 1500 }],
    }));
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let waits = parsed(&world.results("main", "WaitPods"));
    assert_eq!(waits[0]["done"][0]["pod_id"], "fast");
    assert_eq!(waits[0]["done"][0]["last_response"], "fast answer");
    assert_eq!(waits[0]["still_running"], json!(["slow"]));
    for all in &waits[1..] {
        assert_eq!(all["done"].as_array().unwrap().len(), 2, "{all}");
        assert_eq!(all["still_running"], json!([]));
    }
    let items = world.history("main");
    let times: Vec<u64> = items
        .iter()
        .filter(|item| item["name"] == "WaitPods" && item["type"] == "tool_result")
        .map(|item| item["at"].as_u64().unwrap())
        .collect();
    assert!(times[1] - times[0] < 4500, "it polled instead of hearing the event: {times:?}");
    assert!(times[2] - times[1] < 1000, "it waited although all were done: {times:?}");
}

#[test]
fn waiting_ends_when_the_time_is_over() {
    let world = quiet(json!({
        "main": [
            calls(&[spawn("slow", &[]), wait(json!({ "timeout_seconds": 1 })), wait(json!({ "pod_ids": ["nobody"] })), wait(json!({ "pod_ids": [] }))]),
            {},
        ],
        "slow": [never()],
    }));
    let asked = Instant::now();
    assert_eq!(world.turn("main", "go")["result"], "finished");
    assert!(asked.elapsed() >= Duration::from_secs(1));
    finished_within(asked, Duration::from_secs(4));
    let waits = world.results("main", "WaitPods");
    let timed_out: Value = serde_json::from_str(&waits[0].1).unwrap();
    assert_eq!((&timed_out["why"], &timed_out["done"]), (&json!("the time is over"), &json!([])));
    assert!(!waits[1].0 && waits[1].1.contains("you know: slow"), "{waits:?}");
    assert!(!waits[2].0, "{waits:?}");
}

#[test]
fn a_message_a_cancel_and_a_shutdown_end_the_waiting_at_once() {
    let replies = json!([calls(&[spawn("slow", &[]), wait(json!({}))]), { "text": "heard you" }]);
    let start = || {
        let world = quiet(json!({ "main": replies, "slow": [never()] }));
        let events = run_until(&world, "waiting for slow");
        (world, events)
    };
    let (world, mut events) = start();
    let asked = Instant::now();
    world.ok("main", "run", json!({ "input": "never mind" }));
    assert_eq!(events.until_turn_ended()["result"], "finished");
    finished_within(asked, Duration::from_secs(2));
    assert_eq!(world.answer("main", "WaitPods")["why"], "a message for you has arrived");
    let types: Vec<Value> =
        world.history("main").iter().rev().take(4).map(|item| item["type"].clone()).collect();
    assert_eq!(types, ["turn_ended", "assistant", "input", "tool_result"]);

    let (world, mut events) = start();
    let asked = Instant::now();
    world.ok("main", "cancel", json!(null));
    assert_eq!(events.until_turn_ended()["result"], "cancelled");
    finished_within(asked, Duration::from_secs(2));
    assert_eq!(world.results("main", "WaitPods"), [(false, "cancelled".to_owned())]);
    assert_eq!(world.status("slow")["status"], "running", "the pods that were waited for go on");

    let (world, mut events) = start();
    let asked = Instant::now();
    world.ok("main", "shutdown", json!(null));
    assert_eq!(events.until_turn_ended()["result"], "cancelled");
    wait_until("it is gone", || world.entry("main").is_none());
    finished_within(asked, Duration::from_secs(3));
    assert_eq!(world.entry("slow").unwrap()["delegated_from"], Value::Null);
}

#[test]
fn waiting_tells_a_pod_that_was_killed_meanwhile() {
    let world = quiet(json!({
        "main": [
            calls(&[
                spawn("slow", &["s:write"]), wait(json!({})),
                call("WriteFile", json!({ "path": "s/x", "content": "x" })),
            ]),
            { "text": "I see" },
        ],
        "slow": [never()],
    }));
    let mut events = run_until(&world, "waiting for slow");
    let asked = Instant::now();
    world.kill("slow");
    assert_eq!(events.until_turn_ended()["result"], "finished");
    finished_within(asked, Duration::from_secs(4));
    let answer = world.answer("main", "WaitPods");
    assert_eq!(
        (&answer["done"][0]["pod_id"], &answer["done"][0]["status"]),
        (&json!("slow"), &json!("stopped"))
    );
    assert!(
        world.results("main", "WriteFile")[0].0,
        "its scope is not back: {:?}",
        world.results("main", "WriteFile")
    );
    world.turn("main", "anything else?");
    assert!(!world.notices("main").contains("slow"), "told twice: {}", world.notices("main"));
}

#[test]
fn the_output_of_a_pod_that_has_ended_can_still_be_read() {
    let world = quiet(json!({
        "main": [
            calls(&[spawn("stopped", &[]), spawn("killed", &[]), wait(json!({}))]), {},
            calls(&[
                call("StopPod", json!({ "pod_id": "stopped" })),
                read(json!({ "pod_id": "stopped" })), read(json!({ "pod_id": "killed" })),
                read(json!({ "pod_id": "killed", "since": 0 })),
                send("killed", "are you there?"),
                wait(json!({ "pod_ids": ["stopped", "killed"] })),
            ]), {},
        ],
        "stopped": [{ "text": "words of the stopped" }],
        "killed": [{ "text": "words of the killed" }],
    }));
    world.turn("main", "go");
    world.kill("killed");
    wait_until("its end is known", || {
        !world.ok("main", "list_pods", json!(null)).to_string().contains("\"killed\"")
    });
    world.turn("main", "read");
    let reads = parsed(&world.results("main", "ReadPodOutput"));
    assert_eq!((&reads[0]["text"], &reads[0]["status"]), (&json!("words of the stopped"), &json!("stopped")));
    for read in &reads[1..] {
        assert_eq!((&read["text"], &read["status"]), (&json!("words of the killed"), &json!("stopped")));
    }
    assert!(!world.results("main", "SendToPod")[0].0);
    let waited = world.answer("main", "WaitPods");
    assert_eq!(waited["done"].as_array().unwrap().len(), 2, "{waited}");
}

#[test]
fn a_pod_of_the_same_name_gets_no_message_meant_for_the_dead_one() {
    let world = quiet(json!({
        "main": [calls(&[spawn("coder", &[])]), {}, calls(&[send("coder", "for the old one")]), {}],
    }));
    world.turn("main", "go");
    world.wait_turns("coder", 1);
    // The spawner hangs while its pod dies and another takes the name, so it cannot know yet.
    world.signal("main", "STOP");
    world.kill("coder");
    world.start(&["--name", "coder"]);
    world.signal("main", "CONT");
    world.turn("main", "send");
    let (ok, text) = world.results("main", "SendToPod").remove(0);
    assert!(!ok, "{text}");
    assert_eq!(world.count("coder", "input"), 0);
}

#[test]
fn a_pod_below_that_no_record_names_is_found_in_the_lock() {
    let script = json!({
        "main": [calls(&[spawn("kid", &["k:write"]), call("WaitPods", json!({}))]), { "text": "ok" },
                 calls(&[call("StopPod", json!({ "pod_id": "kid" }))]), { "text": "ok" }],
        "kid": [{ "text": "ready" }],
    });
    let world = World::with_script(script);
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    world.kill("main");
    let state_dir = std::fs::read_dir(world.state().join("main")).unwrap().next().unwrap().unwrap().path();
    std::fs::remove_file(state_dir.join("spawned_pods.json")).unwrap();
    assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
    world.turn("main", "stop it");
    let stopped = world.results("main", "StopPod").remove(0);
    assert!(stopped.0, "{stopped:?}");
    assert_eq!(world.entry("kid"), None);
}

/// Gives a pod so many texts from each of three sides at once, and returns each with the turn that was told for it.
fn besiege(world: &World, pod_id: &str, count: usize) -> Vec<(String, u64)> {
    let one_side = |side: usize| -> Vec<(String, u64)> {
        let tell = |number: usize| {
            let text = format!("{side}-{number}");
            let turn = world.ok(pod_id, "run", json!({ "input": text }))["turn"].as_u64().unwrap();
            std::thread::sleep(Duration::from_micros(u64::try_from(number * 37 % 4000).unwrap())); // at every moment
            (text, turn)
        };
        (0..count).map(tell).collect()
    };
    std::thread::scope(|scope| {
        let sides: Vec<_> = (0..3).map(|side| scope.spawn(move || one_side(side))).collect();
        sides.into_iter().flat_map(|side| side.join().unwrap()).collect()
    })
}

#[test]
fn each_text_is_answered_by_the_turn_that_its_sender_was_told() {
    let world = World::with_script(json!({}));
    world.start(&[]);
    let told = besiege(&world, "main", if is_long() { 1000 } else { 100 });
    wait_until("all is answered", || world.status("main")["status"] == "idle");
    let (mut turn, mut heard) = (0, BTreeMap::new());
    for item in world.history("main") {
        turn = item["turn"].as_u64().unwrap_or(turn);
        if item["type"] == "input" {
            heard.insert(item["text"].as_str().unwrap().to_owned(), turn);
        }
    }
    assert_eq!(heard, told.into_iter().collect());
}

#[test]
fn a_turn_that_was_told_comes_also_when_the_one_before_it_fails() {
    let no = json!({ "error": { "status": 400, "message": "no" } });
    let world = World::with_script(json!({ "main": vec![no; 10_000] }));
    world.start(&[]);
    for _ in 0..if is_long() { 1000 } else { 60 } {
        let last = besiege(&world, "main", 3).into_iter().map(|(_, turn)| turn).max();
        wait_until("it rests", || world.status("main")["status"] == "paused");
        assert!(world.status("main")["turn"].as_u64() >= last, "{} {last:?}", world.status("main"));
    }
}
