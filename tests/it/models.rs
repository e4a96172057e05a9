//! The whole main job over HTTP: `insomnia run` with nothing but a key and an address in the environment, against
//! a server that others wrote.

use serde_json::json;

use crate::providers::{KEY, aimock};
use crate::world::{World, ran, read};

#[test]
fn run_needs_nothing_but_the_environment_for_both_formats() {
    let fixtures = json!({"fixtures": [
        {"match": {"userMessage": "write the file", "hasToolResult": false}, "response": {
            "content": "I write it now.", "toolCalls": [
                {"name": "WriteFile", "arguments": "{\"path\":\"a.txt\",\"content\":\"hello\"}"},
                {"name": "SpawnPod", "arguments": "{\"name\":\"kid\",\"task\":\"say something\",\"scope\":[\"sub:write\"]}"},
                {"name": "WaitPods", "arguments": "{}"},
                {"name": "ReadPodOutput", "arguments": "{\"pod_id\":\"kid\"}"} ]}},
        {"match": {"userMessage": "say something"}, "response": {"content": "kid speaks 日本"}},
        {"match": {"hasToolResult": true}, "response": {"content": "It is written."}} ]});
    let Some(server) = aimock(&fixtures) else { return };
    for (key, address, path) in
        [("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", ""), ("OPENAI_API_KEY", "OPENAI_BASE_URL", "/v1")]
    {
        let world = World::new();
        let run = world.program(env!("CARGO_BIN_EXE_insomnia"), ["run", "write the file"]);
        let ran = ran(run.env(key, KEY).env(address, format!("{}{path}", server.url)));
        assert_eq!(ran.code, Some(0), "{key}: {}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.stdout, "It is written.\n", "{}", ran.stderr);
        assert_eq!(read(world.project().join("a.txt")), "hello");
        assert!(ran.stderr.contains("I write it now."), "text streams: {}", ran.stderr);
        let output = &world.results("main", "ReadPodOutput")[0];
        assert!(output.0 && output.1.contains("kid speaks 日本"), "{output:?}");
        assert_eq!(world.processes(), Vec::<i32>::new());
    }
}

#[test]
fn what_goes_wrong_on_the_way_to_the_model_is_one_clear_sentence() {
    let check = |variables: &[(&str, &str)], expected: &str| {
        let world = World::new();
        world.manifest(json!({ "limits": { "retries": 0 } }));
        let run = world.program(env!("CARGO_BIN_EXE_insomnia"), ["run", "x"]);
        let ran = ran(variables.iter().fold(run, |run, (name, value)| run.env(name, value)));
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{expected}: {}", ran.stderr);
        assert!(!ran.stderr.contains("panicked") && !ran.stderr.contains(&KEY[8..16]), "{}", ran.stderr);
    };
    check(&[("OPENAI_API_KEY", KEY), ("OPENAI_BASE_URL", "http://127.0.0.1:1")], "127.0.0.1");
    check(
        &[("ANTHROPIC_API_KEY", KEY), ("ANTHROPIC_BASE_URL", "http://nosuchhost.invalid")],
        "nosuchhost.invalid",
    );
    check(&[("ANTHROPIC_API_KEY", KEY), ("ANTHROPIC_BASE_URL", "not a url")], "begins with neither http");
    check(&[], "ANTHROPIC_API_KEY");
    check(&[("PATH", "/nonexistent"), ("OPENAI_API_KEY", KEY)], "curl");
}
