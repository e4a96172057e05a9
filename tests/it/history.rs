//! Long sessions: what they cost, and that nothing is lost in them whatever happens.

use std::io::Write;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::resuming::check_history;
use crate::world::{World, call, calls, is_long, memory_kib, wait_until};

/// Lets the session of `main` have so many items with 1 KiB of text each, in one turn, as a pod would write them.
fn lengthen(world: &World, items: u64) -> PathBuf {
    let folder = PathBuf::from(world.status("main")["state_dir"].as_str().unwrap());
    assert_eq!(world.insomnia(["stop", "main"]).code, Some(0));
    let text = "word ".repeat(205);
    let mut lines = format!("{}\n", json!({ "at": 1, "type": "turn_started", "turn": 1, "cause": "run" }));
    lines += &format!("{}\n", json!({ "at": 1, "type": "input", "text": "the task" }));
    for n in 0..(items - 4) / 2 {
        let call = json!({ "id": format!("c{n}"), "name": "ReadFile", "input": {} });
        let reply = json!({ "at": n, "type": "assistant", "text": text, "tool_calls": [call], "stop": "tool_use", "usage": { "input_tokens": 0, "output_tokens": 0, "cached_tokens": 0 } });
        let result = json!({ "at": n, "type": "tool_result", "id": format!("c{n}"), "name": "ReadFile", "ok": true, "text": text });
        lines += &format!("{reply}\n{result}\n");
    }
    lines += &format!("{}\n", json!({ "at": 1, "type": "turn_ended", "turn": 1, "result": "finished" }));
    let path = folder.join("history.jsonl");
    std::fs::File::options().append(true).open(&path).unwrap().write_all(lines.as_bytes()).unwrap();
    path
}

/// Bytes that a process has read by any means so far.
fn bytes_read(pid: i32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

fn resumed(world: &World, items: u64) -> PathBuf {
    world.start(&["--scope", ".:write"]);
    let path = lengthen(world, items);
    assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
    path
}

#[test]
fn answers_read_no_more_of_a_long_session_than_of_a_short_one() {
    let read = [100, 10_000].map(|items| {
        let world = World::with_script(json!({ "main": [] }));
        resumed(&world, items);
        world.status("main");
        let (pid, last) = (world.pid("main"), items - 1);
        let before = bytes_read(pid);
        for _ in 0..10 {
            world.status("main");
            let page = world.ok("main", "get_history", json!({ "since": last }));
            assert_eq!((page["cursor"].as_u64(), page["more"].as_bool()), (Some(items + 1), Some(false)));
            world.ok("main", "read_output", Value::Null);
            let mut events = world.subscribe("main", Some(last));
            assert_eq!(events.next().unwrap()["data"], page["items"][0]);
        }
        // A turn appends five items and one input.
        assert_eq!(world.turn("main", "go")["result"], "finished");
        // In the middle it is one page of 256 KiB for each subscriber.
        let middle = world.ok("main", "get_history", json!({ "since": items / 2 }));
        assert_eq!(middle["items"][0], world.history("main")[usize::try_from(items / 2).unwrap()]);
        bytes_read(pid) - before
    });
    let page = 300 << 10;
    assert!(read[1] < read[0] + page, "{read:?}");
}

#[test]
fn a_cursor_anywhere_gives_what_follows_in_mid_turn_too() {
    // Each reply of the history has taken one of the script.
    let mut script = vec![json!({}); (3000 - 4) / 2];
    script.push(calls(&[call("ListFiles", json!({})), call("ListFiles", json!({}))]));
    script.push(json!({ "text": "never", "delay_ms": 600_000 }));
    let world = World::with_script(json!({ "main": script }));
    resumed(&world, 3000);
    world.ok("main", "run", json!({ "input": "go" }));
    wait_until("the turn waits", || world.history("main").last().unwrap()["type"] == "tool_result");
    let all = world.history("main");
    for since in [0, 1, 1500, all.len() - 4, all.len() - 1, all.len()] {
        let mut events = world.subscribe("main", Some(since as u64));
        let (mut paged, mut cursor) = (Vec::new(), since as u64);
        loop {
            let page = world.ok("main", "get_history", json!({ "since": cursor }));
            assert_eq!(page["status"], "running");
            paged.extend(page["items"].as_array().unwrap().clone());
            cursor = page["cursor"].as_u64().unwrap();
            if page["more"] == false {
                break;
            }
        }
        assert!(paged == all[since..], "from {since}");
        let followed: Vec<Value> =
            (since..all.len()).map(|_| events.next().unwrap()["data"].clone()).collect();
        assert!(followed == all[since..], "from {since}");
    }
}

#[test]
fn memory_stays_within_three_times_the_text() {
    let world = World::with_script(json!({ "main": [] }));
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    let small = memory_kib(world.pid("main"), "VmHWM");
    let text = std::fs::metadata(lengthen(&world, 10_000)).unwrap().len() >> 10;
    assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
    assert_eq!(world.turn("main", "go on")["result"], "finished");
    (0..10).for_each(|n| drop(world.ok("main", "get_history", json!({ "since": n * 1000 }))));
    let grown = memory_kib(world.pid("main"), "VmHWM") - small;
    assert!(grown < 3 * text, "{text} KiB of text, at most {grown} KiB more memory");
}

/// The steps of the long session, three compactions and five kills on its way.
#[test]
fn a_working_day_with_compactions_and_kills_ends_with_the_right_answer() {
    let steps: usize = if is_long() { 2000 } else { 300 };
    let too_long = json!({ "error": { "status": 400, "message": "prompt is too long" } });
    // Kills come well between two compactions, where a repeated request is the same request; a pause sees to it.
    let kills = [2, 6, 10, 13, 14].map(|part| steps * part / 16);
    let mut script: Vec<Value> = Vec::new();
    for n in 0..steps {
        if [steps / 4, steps / 2, steps * 3 / 4].contains(&n) {
            script.extend([too_long.clone(), json!({ "text": format!("SUMMARY before step {n}") })]);
        }
        let mut step = calls(&[
            call("WriteFile", json!({ "path": format!("day/{n}"), "content": n.to_string() })),
            call("ReadFile", json!({ "path": format!("day/{n}") })),
        ]);
        step["text"] = json!(format!("step {n}"));
        if kills.iter().any(|kill| n == kill + steps / 20) {
            step["delay_ms"] = json!(400);
        }
        script.push(step);
    }
    script.push(json!({ "text": format!("all {steps} steps are done") }));
    let requests = script.len();
    let world = World::with_settings(json!({ "main": script }), json!({ "limits": { "steps": 5000 } }));
    world.start(&["--scope", ".:write"]);
    world.ok("main", "run", json!({ "input": "the task of the day" }));
    for kill in kills {
        wait_until("it is there", || world.project().join(format!("day/{kill}")).exists());
        world.kill("main");
        let items = world.history("main").len();
        assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
        assert!(items > 0 && world.history("main").len() > items);
    }
    wait_until("it is done", || world.history("main").last().unwrap()["result"] == "finished");

    check_history(&world, "main");
    let output = world.ok("main", "read_output", Value::Null)["text"].clone();
    assert!(output.as_str().unwrap().ends_with(&format!("\n\nall {steps} steps are done")), "{output}");
    let items = world.history("main");
    let of = |kind: &str| items.iter().filter(|item| item["type"] == kind).cloned().collect::<Vec<_>>();
    let said: Vec<String> =
        of("assistant").iter().map(|item| item["text"].as_str().unwrap().to_owned()).collect();
    let mut expected: Vec<String> = (0..steps).map(|n| format!("step {n}")).collect();
    expected.push(format!("all {steps} steps are done"));
    assert_eq!(said, expected, "no reply is lost and none comes twice");
    assert_eq!((of("compaction").len(), of("session").len(), of("input").len()), (3, 6, 1));
    assert_eq!(said.len() + 3 + of("model_error").len(), requests);
    let results = of("tool_result");
    let interrupted = results.iter().filter(|item| item["ok"] == false).count();
    assert!(
        results.len() == 2 * steps && interrupted <= 10,
        "{} results, {interrupted} interrupted",
        results.len()
    );
    // A kill interrupts one step; of its two calls the second may not have begun.
    let missing = (0..steps).filter(|n| !world.project().join(format!("day/{n}")).exists()).count();
    assert!(missing <= 5 && missing <= interrupted, "{missing} missing, {interrupted} interrupted");
    // The pages of the protocol are the lines of the file, each once.
    let (mut paged, mut cursor) = (Vec::new(), 0);
    while cursor < items.len() as u64 {
        let page = world.ok("main", "get_history", json!({ "since": cursor }));
        paged.extend(page["items"].as_array().unwrap().clone());
        cursor = page["cursor"].as_u64().unwrap();
    }
    assert!(paged == items, "page by page it is another history");
}
