//! Conversations that outgrow the model's context, and models that change in a living pod.

use serde_json::{Value, json};

use crate::asking::Model;
use crate::resuming::check_history;
use crate::world::{World, call, calls, spawn, wait_until};

const TOO_LONG: &str = "prompt is too long: 9 tokens > 8 maximum";

fn step(name: &str) -> Value {
    calls(&[call("WriteFile", json!({ "path": name, "content": "x".repeat(100) }))])
}

/// A step with so much text.
fn long_step(n: usize, bytes: usize) -> Value {
    json!({ "text": "word ".repeat(bytes / 5), "tool_calls": step(&format!("f{n}"))["tool_calls"] })
}

fn compactions(world: &World) -> Vec<Value> {
    world.history("main").into_iter().filter(|item| item["type"] == "compaction").collect()
}

#[test]
fn the_model_gets_a_summary_between_the_task_and_its_last_replies() {
    let mut replies: Vec<Value> = (0..9).map(|n| long_step(n, 1000)).collect();
    replies[8]["tokens"] = json!(9_990); // the next request would be over 10,000 - 100
    replies.push(json!({ "text": "SUMMARY </conversation_summary>\n</notices>" }));
    let model = Model::new(replies);
    let world = model.world(10_000);
    world.start(&["--scope", ".:write"]);
    let mut events = world.subscribe("main", None);
    assert_eq!(world.turn("main", "the task")["result"], "finished");
    let told = events.until(|event| event["event"] == "compaction")["data"].clone();
    let [item] = compactions(&world).try_into().unwrap();
    assert_eq!((&told["until"], &told["summary"]), (&item["until"], &item["summary"]));
    assert!(events.seen.iter().all(|event| !event["data"]["text"].to_string().contains("SUMMARY")));

    let asked = model.asked();
    assert_eq!(asked.len(), 11);
    let (question, after) = (&asked[9], &asked[10]);
    assert!(question.get("tools").is_none() && after["tools"].is_array());
    let transcript = question["messages"][1]["content"].to_string();
    assert!(
        transcript.contains("the task") && transcript.contains("f4") && !transcript.contains("f5"),
        "{transcript}"
    );
    let messages = after["messages"].as_array().unwrap();
    let first = messages[1]["content"].to_string();
    assert!(first.contains("the task") && first.contains("SUMMARY"), "{first}");
    assert!(first.contains("<conversation_summary>") && !first.contains("</notices"), "{first}");
    assert_eq!(first.matches("</conversation_summary>").count(), 1, "{first}");
    let rest = json!(messages[2..]).to_string();
    assert!(!rest.contains("f4") && (5..9).all(|n| rest.contains(&format!("f{n}"))), "{rest}");
    assert_eq!(messages.len(), 2 + 4 * 2);

    check_history(&world, "main");
    assert_eq!(world.count("main", "assistant"), 10);
    assert_eq!(world.status("main")["usage"]["output_tokens"], 11, "the summary counts");
    let shown = world.insomnia(["history", "main"]).stdout;
    assert!(shown.contains(&format!("a summary stands for the items before {}", item["until"])), "{shown}");
}

#[test]
fn a_resumed_pod_goes_on_behind_its_last_summary() {
    let too_long = || json!({ "status": 400, "message": TOO_LONG });
    let mut replies: Vec<Value> = (0..6).map(|n| step(&format!("f{n}"))).collect();
    replies.extend([too_long(), json!({ "text": "SUMMARY one" })]);
    replies.extend((6..12).map(|n| step(&format!("f{n}"))));
    replies.extend([too_long(), json!({ "text": "SUMMARY two" }), json!({ "text": "here" })]);
    let model = Model::new(replies);
    let world = model.world(200_000);
    world.start(&["--scope", ".:write"]);
    assert_eq!(world.turn("main", "the task")["result"], "finished");
    assert_eq!(world.count("main", "model_error"), 2);
    world.kill("main");
    assert_eq!(world.insomnia(["resume", "main"]).code, Some(0));
    assert_eq!(world.turn("main", "and now")["result"], "finished");
    check_history(&world, "main");
    let asked = model.asked();
    let before: Vec<Value> = asked[asked.len() - 2]["messages"].as_array().unwrap()[1..].to_vec();
    let mut after: Vec<Value> = asked[asked.len() - 1]["messages"].as_array().unwrap()[1..].to_vec();
    assert!(after.pop().unwrap().to_string().contains("and now"));
    assert_eq!(after.pop().unwrap()["content"], "here");
    assert_eq!(after, before, "the same conversation as before the kill");
    assert!(!json!(after).to_string().contains("SUMMARY one"));
}

#[test]
fn a_context_that_stays_too_small_ends_the_turn_and_is_asked_no_further() {
    let error = || json!({ "error": { "status": 400, "message": TOO_LONG } });
    let steps = || (0..6).map(|n| step(&format!("f{n}")));
    let check = |script: Vec<Value>, requests: u64, summaries: usize| {
        let world = World::with_script(json!({ "main": script }));
        world.start(&["--scope", ".:write"]);
        let ended = world.turn("main", "the task");
        let message = ended["message"].as_str().unwrap();
        assert!(
            ended["result"] == "failed" && message.contains("set a model with a larger context"),
            "{ended}"
        );
        let asked = world.count("main", "assistant") + world.count("main", "model_error") + summaries;
        assert_eq!((asked as u64, compactions(&world).len()), (requests, summaries));
        check_history(&world, "main");
        // It is paused with the reason, and takes up again with whatever the model says then.
        wait_until("it is paused", || world.status("main")["status"] == "paused");
        assert!(world.status("main")["detail"].as_str().unwrap().contains("too long"));
        world.ok("main", "resume", Value::Null);
        world.wait_turns("main", 2);
        assert_eq!(world.history("main").last().unwrap()["result"], "finished");
    };
    // Nothing is old.
    check(vec![error()], 1, 0);
    check(vec![step("f"), error()], 2, 0);
    // The summary is no shorter, or there is none.
    let long = json!({ "text": "long ".repeat(1000) });
    check(steps().chain([error(), long]).collect(), 8, 0);
    check(steps().chain([error(), json!({})]).collect(), 8, 0);
    // The context is too small even for what a summary leaves.
    let errors = std::iter::repeat_with(error).take(20);
    let script = steps().chain([error(), json!({ "text": "short" })]).chain(errors);
    let world = World::with_script(json!({ "main": script.collect::<Vec<_>>() }));
    world.start(&["--scope", ".:write"]);
    assert_eq!(world.turn("main", "the task")["result"], "failed");
    assert_eq!(compactions(&world).len(), 1);
    assert!(world.count("main", "model_error") < 20, "it gives up");
}

#[test]
fn an_estimate_that_says_full_stops_no_model_that_has_room() {
    let check = |context: u64, agents: usize, task: usize, replies: Vec<Value>| {
        let model = Model::new(replies);
        let world = model.world(context);
        std::fs::write(world.project().join("AGENTS.md"), "a ".repeat(agents / 2)).unwrap();
        world.start(&["--scope", ".:write"]);
        let ended = world.turn("main", &"t".repeat(task));
        assert_eq!(ended["result"], "finished", "{ended}");
        assert_eq!(world.turn("main", "and now")["result"], "finished");
        check_history(&world, "main");
        let summaries = model.asked().iter().filter(|body| body.get("tools").is_none()).count();
        (model.asked().len(), summaries, compactions(&world).len())
    };
    let uncounted = |n, bytes| {
        let mut reply = long_step(n, bytes);
        reply["tokens"] = json!(0);
        reply
    };
    let steps = |count: usize, bytes: usize| (0..count).map(|n| uncounted(n, bytes)).collect();
    // Instruction and tools alone come to more than the estimate grants, and little is old.
    for (context, agents) in [(8192, 12_480), (2000, 0), (0, 0)] {
        assert_eq!(check(context, agents, 9, steps(8, 250)), (10, 0, 0), "{context}");
    }
    // What is old is worth a summary, again and again.
    let (_, summaries, compactions) = check(8192, 12_480, 9, steps(40, 1000));
    assert!(summaries == compactions && (3..12).contains(&summaries), "{summaries} {compactions}");
    // The task stays, so that no summary makes room: it is tried once a turn, not before each request.
    let (asked, summaries, compactions) = check(8192, 12_480, 30_000, steps(12, 1000));
    assert_eq!((asked, compactions), (14, 0));
    assert!((1..=2).contains(&summaries), "{summaries}");
}

#[test]
fn a_provider_that_takes_no_more_gets_fewer_of_the_last_replies() {
    let too_long = || json!({ "status": 400, "message": TOO_LONG });
    let mut replies: Vec<Value> = (0..7).map(|n| long_step(n, 5000)).collect();
    replies.extend([
        too_long(),
        json!({ "text": "SUMMARY one" }),
        too_long(),
        json!({ "text": "SUMMARY two" }),
    ]);
    let model = Model::new(replies);
    let world = model.world(200_000);
    world.start(&["--scope", ".:write"]);
    let ended = world.turn("main", "the task");
    assert_eq!((&ended["result"], compactions(&world).len()), (&json!("finished"), 2), "{ended}");
    let last = json!(model.asked().last().unwrap()["messages"]).to_string();
    assert!(last.contains("f6") && !last.contains("f5") && last.contains("SUMMARY two"), "{last}");
    check_history(&world, "main");
}

#[test]
fn a_session_that_is_too_long_goes_on_with_corrected_settings() {
    let long = json!({ "status": 400, "message": TOO_LONG });
    let cut = json!({ "text": "half", "finish_reason": "length" });
    let model = Model::new(vec![long, cut]);
    let world = model.world(8192);
    world.start(&[]);
    let message = world.turn("main", "go")["message"].to_string();
    assert!(message.contains("insomnia resume POD --manifest FILE"), "{message}");
    let given = world.path("given.json");
    std::fs::write(&given, r#"{"provider":{"context_tokens":200000}}"#).unwrap();
    let resume = || world.insomnia(["resume", "main", "--manifest", "../given.json"]);
    let refused = resume();
    assert!(refused.code == Some(1) && refused.stderr.contains("insomnia stop main"), "{}", refused.stderr);
    assert_eq!(world.insomnia(["stop", "main"]).code, Some(0));
    let resumed = resume();
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    let shown = world.insomnia(["show", "main"]).stdout;
    let row = shown.lines().find(|line| line.starts_with("provider.context_tokens")).unwrap();
    assert!(row.contains(" 200000 ") && row.ends_with("given.json"), "{row}");
    world.wait_turns("main", 2);
    let message = world.history("main").last().unwrap()["message"].to_string();
    assert!(message.contains("provider.max_tokens") && message.contains("the model's context"), "{message}");
}

#[test]
fn a_text_that_is_too_long_to_be_summarised_is_halved_until_it_fits() {
    let too_long = || json!({ "status": 400, "message": TOO_LONG });
    let mut replies: Vec<Value> = (0..20).map(|n| long_step(n, 3000)).collect();
    replies.extend([too_long(), too_long(), too_long(), json!({ "text": "SUMMARY" })]);
    let model = Model::new(replies);
    let world = model.world(200_000);
    world.start(&["--scope", ".:write"]);
    assert_eq!(world.turn("main", "the task")["result"], "finished");
    let lengths =
        model.asked()[21..24].iter().map(|body| body["messages"][1].to_string().len()).collect::<Vec<_>>();
    assert!(lengths[0] > lengths[1] + 10_000 && lengths[1] > lengths[2] + 5_000, "{lengths:?}");
    assert_eq!((compactions(&world).len(), world.count("main", "model_error")), (1, 3));
    check_history(&world, "main");
}

#[test]
fn a_summary_that_fails_or_is_cancelled_leaves_the_session_usable() {
    let too_long = json!({ "error": { "status": 400, "message": TOO_LONG } });
    let refused = json!({ "error": { "status": 401, "message": "no" } });
    let busy = json!({ "error": { "status": 529, "message": "busy", "retry_after_seconds": 0.01 } });
    let never = json!({ "text": "never", "delay_ms": 600_000 });
    let mut script: Vec<Value> = (0..6).map(|n| step(&format!("f{n}"))).collect();
    let summary = json!({ "text": "SUMMARY" });
    script.extend([
        too_long.clone(),
        refused,
        too_long.clone(),
        never,
        too_long,
        busy,
        summary,
        json!({ "text": "done" }),
    ]);
    let world = World::with_script(json!({ "main": script }));
    world.start(&["--scope", ".:write"]);
    let failed = world.turn("main", "the task");
    assert!(failed["message"].as_str().unwrap().contains("key was refused"), "{failed}");
    let mut events = world.subscribe("main", None);
    world.ok("main", "resume", Value::Null);
    events.until(|event| event["data"]["detail"].as_str().is_some_and(|detail| detail.contains("summarise")));
    world.ok("main", "cancel", Value::Null);
    assert_eq!(events.until_turn_ended()["result"], "cancelled");
    world.wait_turns("main", 2);
    assert!(compactions(&world).is_empty());
    world.ok("main", "resume", Value::Null);
    assert_eq!(events.until_turn_ended()["result"], "finished");
    assert!(
        events.seen.iter().any(|event| event["event"] == "retry"),
        "a summary is tried again like any reply"
    );
    assert_eq!(compactions(&world).len(), 1);
    assert_eq!(world.status("main")["last_response"], "done");
    check_history(&world, "main");
}

#[test]
fn summaries_count_as_steps_and_are_shown_to_people() {
    let too_long = json!({ "error": { "status": 400, "message": TOO_LONG } });
    let mut script: Vec<Value> = (0..6).map(|n| step(&format!("f{n}"))).collect();
    script.extend([too_long, json!({ "text": "SUMMARY" }), json!({ "text": "the answer" })]);
    let world = World::with_settings(json!({ "main": script }), json!({ "limits": { "steps": 8 } }));
    let ran = world.insomnia(["run", "go"]);
    assert!(ran.stderr.contains("-- a summary stands for the items before"), "{}", ran.stderr);
    assert!(ran.code == Some(1) && ran.stderr.contains("limits.steps"), "{}", ran.stderr);
    assert_eq!(compactions(&world).len(), 1);
}

#[test]
fn a_model_that_is_set_is_asked_next_and_by_children_and_after_a_resume() {
    let model = Model::new(vec![
        json!({ "text": "one" }),
        json!({ "text": "two" }),
        json!({ "text": "three" }),
        calls(&[spawn("kid", &[])]),
    ]);
    let world = model.world(200_000);
    world.start(&["--scope", ".:write"]);
    assert_eq!(world.status("main")["model"], "first");
    world.turn("main", "go");
    let set = world.insomnia(["set", "main", "model", "second"]);
    assert_eq!((set.code, set.stdout.as_str()), (Some(0), "the next request of pod main asks second\n"));
    assert_eq!(world.status("main")["model"], "second");
    let check_shown = || {
        let shown = world.insomnia(["show", "main"]).stdout;
        let row = shown.lines().find(|line| line.starts_with("provider.model")).unwrap();
        assert!(row.contains(" \"second\" ") && row.ends_with(" insomnia set"), "{row}");
    };
    check_shown();
    world.turn("main", "go");
    world.kill("main");
    check_shown();
    assert_eq!(world.insomnia(["resume", "main", "--json"]).code, Some(0));
    assert_eq!(world.status("main")["model"], "second");
    world.turn("main", "go");
    world.turn("main", "spawn");
    world.wait_turns("kid", 1);
    assert_eq!(world.status("kid")["model"], "second");
    let models: Vec<Value> = model.asked().iter().map(|body| body["model"].clone()).collect();
    assert_eq!(models[..4], ["first", "second", "second", "second"]);
    assert!(models.len() >= 6 && models[4..].iter().all(|model| model == "second"), "{models:?}");

    // Only a person or who stands above may ask, and only for a name.
    let ask = |to: &str, from: &str| {
        let from = json!({ "pod_id": from, "life": world.life(from) });
        let line = json!({ "method": "set", "params": { "model": "third" }, "from": from });
        world.raw(to, format!("{line}\n").as_bytes())
    };
    assert!(ask("main", "kid").contains("not_allowed"));
    assert!(ask("kid", "main").starts_with("{\"ok\""));
    assert_eq!(world.status("kid")["model"], "third");
    for params in
        [json!({}), json!({ "model": "" }), json!({ "model": "a\nb" }), json!({ "model": "x".repeat(300) })]
    {
        assert_eq!(world.request("kid", "set", params)["error"]["code"], "bad_request");
    }
    assert_eq!(world.insomnia(["set", "kid", "colour", "red"]).code, Some(2));
    let shown = world.insomnia(["history", "main"]).stdout;
    assert!(shown.contains("the model is second from here on"), "{shown}");

    // What a person says last counts: a manifest that is given to the resumed pod goes before what was set.
    let file = world.path("other.json");
    std::fs::write(&file, json!({ "provider": { "model": "fourth" } }).to_string()).unwrap();
    assert_eq!(world.insomnia(["stop", "kid"]).code, Some(0));
    let resume = ["resume", "kid", "--manifest", file.to_str().unwrap()];
    assert_eq!(world.insomnia(resume).code, Some(0));
    assert_eq!(world.status("kid")["model"], "fourth");
    let shown = world.insomnia(["show", "kid"]).stdout;
    let row = shown.lines().find(|line| line.starts_with("provider.model")).unwrap();
    assert!(row.contains(" \"fourth\" ") && row.ends_with(file.to_str().unwrap()), "{row}");
}

/// An item that a connection logs while the turn logs its own: the order of the events is that of the file.
#[test]
fn a_model_set_in_mid_turn_is_one_item_in_its_place() {
    let script: Vec<Value> = (0..100).map(|n| step(&format!("f{n}"))).collect();
    let world = World::with_script(json!({ "main": script }));
    world.start(&["--scope", ".:write"]);
    let mut events = world.subscribe("main", Some(0));
    world.ok("main", "run", json!({ "input": "go" }));
    for n in 0..20 {
        world.ok("main", "set", json!({ "model": format!("m{n}") }));
    }
    events.until_turn_ended();
    events.until(|event| event["event"] == "item" && event["data"]["type"] == "turn_ended");
    let told: Vec<Value> =
        events.seen.iter().filter(|event| event["event"] == "item").map(|e| e["data"].clone()).collect();
    wait_until("all is on disk", || world.history("main").len() >= told.len());
    assert_eq!(world.history("main")[..told.len()], told[..]);
    assert_eq!(world.count("main", "model_set"), 20);
}
