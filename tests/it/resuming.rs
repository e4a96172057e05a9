//! Going on with a session after an end or a crash, and introducing pods to each other.

use serde_json::{Value, json};

use crate::world::{World, wait_until};

fn write(path: &str) -> Value {
    json!({ "name": "WriteFile", "input": { "path": path, "content": "x" } })
}

fn spawn(name: &str, scope: &str) -> Value {
    json!({ "name": "SpawnPod", "input": { "name": name, "task": "work", "scope": [scope] } })
}

fn calls(calls: &[Value]) -> Value {
    json!({ "tool_calls": calls })
}

/// Every call has exactly one result, after it; every turn that began has exactly one end.
pub fn check_history(world: &World, pod: &str) {
    let items = world.history(pod);
    let mut open: Vec<String> = Vec::new();
    let (mut begun, mut ended) = (0, 0);
    for item in &items {
        match item["type"].as_str().unwrap() {
            "assistant" => {
                let ids = item["tool_calls"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(|call| call["id"].as_str().unwrap());
                open.extend(ids.map(str::to_owned));
            }
            "tool_result" => {
                let id = item["id"].as_str().unwrap();
                let at = open
                    .iter()
                    .position(|call| call == id)
                    .unwrap_or_else(|| panic!("{id} has no call: {items:#?}"));
                open.remove(at);
            }
            "turn_started" => begun += 1,
            "turn_ended" => ended += 1,
            _ => {}
        }
    }
    assert!(open.is_empty(), "calls without a result: {open:?} in {items:#?}");
    assert_eq!(begun, ended, "{items:#?}");
}

#[test]
fn a_pod_goes_on_with_its_session_and_its_scope() {
    let world =
        World::with_script(json!({ "main": [{ "text": "one" }, calls(&[write("a/f")]), { "text": "two" }] }));
    world.start(&["--scope", "a:write"]);
    world.turn("main", "first");
    assert_eq!(world.insomnia(["stop", "main"]).code, Some(0));
    let resumed = world.insomnia(["resume", "main", "--json"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    assert_eq!(world.status("main")["turn"], 1);
    assert_eq!(world.status("main")["last_response"], "one");
    assert_eq!(world.turn("main", "second")["turn"], 2);
    assert!(world.project().join("a/f").is_file());
    assert_eq!(world.ok("main", "read_output", json!({ "since": 0 }))["text"], "one\n\ntwo");
    let again = world.insomnia(["resume", "main"]);
    assert_eq!(again.code, Some(1), "{}", again.stdout);
    let twice = world.pod_command(["--resume"]);
    assert!(twice.stderr.contains("registered already"), "{}", twice.stderr);
    let nobody = world.pod_command(["--resume", "--name", "ghost"]);
    assert!(nobody.stderr.contains("no session of \"ghost\""), "{}", nobody.stderr);
}

#[test]
fn a_pod_killed_at_any_moment_of_a_turn_can_go_on() {
    let rounds = if std::env::var_os("INSOMNIA_LONG").is_some() { 200 } else { 20 };
    for round in 0..rounds {
        let steps: Vec<Value> = (0..6)
            .map(|step| calls(&[write(&format!("f{step}")), json!({ "name": "ListFiles", "input": {} })]))
            .collect();
        let script: Vec<Value> = steps.into_iter().chain([json!({ "text": "all done" })]).collect();
        let world = World::with_script(json!({ "main": script, "*": [] }));
        world.start(&["--scope", ".:write"]);
        world.ok("main", "run", json!({ "input": "go" }));
        std::thread::sleep(std::time::Duration::from_micros(round * 173 % 4000)); // any moment, no signal
        world.kill("main");
        let resumed = world.insomnia(["resume", "main"]);
        assert_eq!(
            resumed.code,
            Some(0),
            "round {round}: {}{}",
            resumed.stderr,
            world.insomnia(["log", "main"]).stdout
        );
        wait_until("it has answered", || {
            let said = world.status("main")["last_response"].as_str().unwrap().to_owned();
            said.ends_with("all done") || said.ends_with("(end of script)") // killed between answer and end
        });
        wait_until("it is idle", || world.status("main")["status"] == "idle");
        check_history(&world, "main");
        let items = world.history("main");
        assert_eq!(
            items.iter().filter(|item| item["type"] == "input").count(),
            1,
            "no input lost or doubled"
        );
        // The one call that was running is not repeated behind the model's back; its result says so.
        let interrupted = world
            .results("main", "WriteFile")
            .iter()
            .filter(|(ok, text)| !ok && text.contains("interrupted"))
            .count();
        let missing = (0..6).filter(|step| !world.project().join(format!("f{step}")).is_file()).count();
        assert!(missing <= interrupted && interrupted <= 1, "{missing} missing, {interrupted} interrupted");
    }
}

/// The same at each moment between two writes: to the history, to the pod's files, into pipes.
#[test]
fn a_pod_killed_before_any_write_of_a_turn_can_go_on() {
    if !crate::world::has_tool("strace") {
        return;
    }
    let steps: usize = 3;
    let (mut killed, mut interrupted_in_all) = (0, 0);
    for n in 1..=40 {
        let mut script: Vec<Value> = (0..steps).map(|step| calls(&[write(&format!("f{step}"))])).collect();
        script.push(json!({ "text": "all done" }));
        let world = World::with_script(json!({ "main": script }));
        world.start(&["--scope", ".:write"]);
        let pid = world.pid("main");
        let Some(_strace) = crate::spawn_kills::trace(&world, pid, "write", n) else {
            return crate::world::skip("nobody may trace a running process here");
        };
        world.raw("main", b"{\"method\":\"run\",\"params\":{\"input\":\"go\"}}\n"); // it may be killed before it answers
        wait_until("it is killed, or done", || {
            !crate::world::lives(pid) || world.count("main", "turn_ended") == 1
        });
        if crate::world::lives(pid) {
            break; // there are no more writes in this turn
        }
        killed += 1;
        let begun = world.count("main", "turn_started");
        wait_until("it can be resumed", || world.insomnia(["resume", "main"]).code == Some(0));
        wait_until("it has answered", || {
            world.status("main")["last_response"].as_str().unwrap().ends_with("all done")
                || world.status("main")["last_response"].as_str().unwrap().ends_with("(end of script)")
        });
        world.wait_idle("main");
        check_history(&world, "main");
        assert_eq!(world.count("main", "turn_started"), begun + 1, "write {n}: it goes on once");
        assert_eq!(world.count("main", "input"), 1, "write {n}: an input is lost or doubled");
        let results = world.results("main", "WriteFile");
        let interrupted = results.iter().filter(|(ok, text)| !ok && text.contains("interrupted")).count();
        let missing = (0..steps).filter(|step| !world.project().join(format!("f{step}")).is_file()).count();
        assert!(missing <= interrupted && interrupted <= 1, "write {n}: {missing} missing, {results:?}");
        assert_eq!(results.len(), steps, "write {n}: {results:?}");
        interrupted_in_all += interrupted;
    }
    println!("{killed} kills, {interrupted_in_all} of them while a tool ran");
    assert!(killed > 3 * steps && interrupted_in_all >= steps, "{killed} {interrupted_in_all}");
}

#[test]
fn a_text_that_was_accepted_in_mid_turn_survives_a_kill() {
    let world = World::with_script(
        json!({ "main": [{ "delay_ms": 600_000, "text": "never" }, { "text": "heard" }] }),
    );
    world.start(&[]);
    world.ok("main", "run", json!({ "input": "first" }));
    assert_eq!(world.ok("main", "run", json!({ "input": "second" }))["queued"], true);
    wait_until("the turn is in the history", || {
        world.history("main").iter().any(|item| item["type"] == "input")
    });
    world.kill("main");
    // The request that was running has no outcome in the history, so the script gives that reply once more.
    world.script(json!({ "main": [{ "text": "heard" }] }));
    assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
    wait_until("it has answered", || world.status("main")["last_response"] == "heard");
    let items = world.history("main");
    let inputs: Vec<&str> = items
        .iter()
        .filter(|item| item["type"] == "input")
        .map(|item| item["text"].as_str().unwrap())
        .collect();
    assert_eq!(inputs, ["first", "second"]);
}

#[test]
fn children_that_live_come_back_and_those_that_died_are_told_once() {
    let world = World::with_script(json!({
        "main": [calls(&[spawn("lives", "a:write"), spawn("dies", "b:write"), json!({ "name": "WaitPods", "input": {} })]), { "text": "ok" },
                 calls(&[write("a/f"), write("b/f"), json!({ "name": "StopPod", "input": { "pod_id": "lives" } }), write("a/f")]),
                 { "text": "ok" }, { "text": "ok" }],
        "*": [{ "text": "idle" }]
    }));
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    world.kill("main");
    world.kill("dies");
    assert_eq!(world.insomnia(["list"]).code, Some(0));
    let resumed = world.insomnia(["resume", "main"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    wait_until("it is calm", || world.status("main")["status"] == "idle");
    assert_eq!(world.entry("lives").unwrap()["delegated_from"], "main");
    assert_eq!(world.entry("dies"), None);
    world.turn("main", "write");
    let writes = world.results("main", "WriteFile");
    assert!(!writes[0].0 && writes[0].1.contains("\"lives\""), "{writes:?}");
    assert!(writes[1].0 && writes[2].0, "{writes:?}");
    assert_eq!(
        world.notices("main").matches("pod \"dies\" has ended").count(),
        1,
        "{}",
        world.notices("main")
    );
    assert!(!world.notices("main").contains("pod \"lives\" has ended"));
    check_history(&world, "main");
}

#[test]
fn what_somebody_else_holds_by_now_is_lost_and_named() {
    let world = World::with_script(json!({ "*": [{ "text": "x" }] }));
    world.start(&["--scope", "a:write", "--scope", "b:write"]);
    world.turn("main", "go");
    world.kill("main");
    world.start(&["--name", "other", "--scope", "a/deep:write"]);
    let resumed = world.insomnia(["resume", "main"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    let scope = world.entry("main").unwrap()["scope_allow"].to_string();
    assert!(scope.contains("project/b:write") && !scope.contains("project/a:"), "{scope}");
    let notices = world.notices("main");
    assert!(notices.contains("you have lost") && notices.contains("held by pod \"other\""), "{notices}");
}

#[test]
fn an_introduced_pod_can_be_sent_to_and_read_and_not_stopped() {
    let to = |name: &str, input: Value| calls(&[json!({ "name": name, "input": input })]);
    let world = World::with_script(json!({
        "main": [calls(&[spawn("a", "a:write"), spawn("b", "b:write"), json!({ "name": "WaitPods", "input": {} }),
                         json!({ "name": "IntroducePod", "input": { "to": "a", "pod_id": "b" } }),
                         json!({ "name": "SendToPod", "input": { "pod_id": "a", "message": "talk to b" } }),
                         json!({ "name": "WaitPods", "input": {} })]),
                 { "text": "done" }],
        "a": [{ "text": "ready" },
              to("SendToPod", json!({ "pod_id": "b", "message": "hello from a" })),
              to("WaitPods", json!({ "pod_ids": ["b"] })),
              to("ReadPodOutput", json!({ "pod_id": "b" })),
              to("StopPod", json!({ "pod_id": "b" })),
              to("SendToPod", json!({ "pod_id": "main", "message": "no" })), { "text": "talked" }],
        "b": [{ "text": "ready" }, { "text": "hello a" }]
    }));
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    let (sent, read, stop) =
        (world.results("a", "SendToPod"), world.results("a", "ReadPodOutput"), world.results("a", "StopPod"));
    assert!(sent[0].0 && read[0].0 && read[0].1.contains("hello a"), "{sent:?} {read:?}");
    assert!(!stop[0].0 && stop[0].1.contains("only introduced"), "{stop:?}");
    assert!(
        !sent[1].0 && sent[1].1.contains("no living pod \"main\" that you know"),
        "its spawner is not in its list: {sent:?}"
    );
    let from: Vec<Value> = world
        .history("b")
        .iter()
        .filter(|item| item["type"] == "input")
        .map(|item| item["from"].clone())
        .collect();
    assert_eq!(from, ["main", "a"]);

    let life = |pod: &str| world.entry(pod).unwrap()["life"].clone();
    let introduction = json!({ "pods": [{ "pod_id": "main", "life": life("main") }] });
    let asked = json!({ "method": "introduce", "params": introduction, "from": { "pod_id": "a", "life": life("a") } });
    let refused = world.raw("b", format!("{asked}\n").as_bytes());
    assert!(refused.contains("not_allowed"), "{refused}");
    world.ok("b", "introduce", introduction);
    let known = world.ok("b", "list_pods", Value::Null);
    assert_eq!(known["pods"][0]["pod_id"], "main");
}
