//! The whole main job over HTTP: `insomnia run` with nothing but a key and an address in the environment, against
//! servers that others wrote, through proxies and TLS, and what the official clients make of the same bytes.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Instant;

use insomnia::store::manifest::ProviderKind;
use insomnia::words::message::{AssistantMessage, Item, Stop, ToolCall, Usage};
use serde_json::{Value, json};

use crate::providers::{
    KEY, Server, aimock, answer_once, asker, curl, input, llmock, read_file, scenario, start_server,
    thread_park,
};
use crate::world::{World, has_tool, ran, read};

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

/// The official clients behind a server that streams the recorded replies.
fn clients(more: &[&str]) -> Option<Server> {
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
    let (program, replies) = (format!("{tests}/it/clients.py"), format!("{tests}/replies"));
    start_server("INSOMNIA_PYTHON", &[&[&*program, &*replies], more].concat(), &Value::Null)
}

#[test]
fn the_official_types_accept_our_requests_and_the_official_clients_see_what_we_see() {
    /// What only a lax reader takes, or what they take for whole although it was cut.
    const OTHERWISE: [&str; 4] =
        ["anthropic-max-tokens", "openai-cut-arguments", "openrouter-finish-error", "ollama-no-ids"];
    let Some(server) = clients(&[]) else { return };
    let call = |id: &str| ToolCall { id: id.into(), name: "ReadFile".into(), input: json!({"path": "a"}) };
    let result =
        |id: &str, ok| Item::ToolResult { id: id.into(), name: "ReadFile".into(), ok, text: "x".into() };
    let items = [
        input("hello"),
        Item::Assistant(AssistantMessage {
            text: "I look.".into(),
            tool_calls: vec![call("c/1"), call("c2")],
            thinking: vec![
                json!({"type": "thinking", "thinking": "hm", "signature": "s=="}),
                json!({"type": "redacted_thinking", "data": "d=="}),
            ],
            stop: Stop::ToolUse,
            usage: Usage::default(),
        }),
        result("c/1", true),
        result("c2", false),
        Item::Notification { text: "<notices from=\"system\">\n- x\n</notices>".into() },
        input("go on"),
    ];
    let mut seen = 0;
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/replies")).unwrap() {
        let name = entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned();
        let kind =
            if name.starts_with("anthropic-") { ProviderKind::Anthropic } else { ProviderKind::Openai };
        let given =
            |settings: &mut insomnia::store::manifest::ProviderSettings| settings.max_tokens = Some(9);
        let outcome = asker(kind, &format!("{}/{name}/v1", server.url), given).ask(&items, &read_file());
        let ours = outcome.as_ref().map_or(Value::Null, |message| {
            let calls = message.tool_calls.iter().map(|call| json!([call.id, call.name, call.input]));
            let Usage { input_tokens, output_tokens, cached_tokens } = message.usage;
            let tokens = [input_tokens, output_tokens, cached_tokens];
            json!({"text": message.text, "calls": calls.collect::<Vec<_>>(), "tokens": tokens})
        });
        assert!(!format!("{outcome:?}").contains("did not accept the request"), "{name}: {outcome:?}");
        let theirs = curl(&[&format!("{}/seen/{name}", server.url)]);
        if !name.starts_with("lax-") && !OTHERWISE.contains(&&*name) {
            assert_eq!(ours, theirs, "{name}: {outcome:?}");
            seen += usize::from(theirs.is_object());
        }
    }
    assert!(seen > 20, "they saw {seen} replies");
    let refused = |path: &str, body: Value| {
        let told = curl(&[&format!("{}/openai-text/v1/{path}", server.url), "-d", &body.to_string()]);
        assert!(told["error"]["message"].is_string(), "a wrong field passed: {body}");
    };
    let message = json!({"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]});
    refused("messages", json!({"model": "m", "max_tokens": 9, "stream": true, "messages": [message]}));
    refused("messages", json!({"model": "m", "max_token": 9, "stream": true, "messages": []}));
    refused("chat/completions", json!({"model": "m", "stream": true, "messages": [message]}));
    refused("chat/completions", json!({"model": "m", "stream": true, "messages": [], "toolz": []}));
}

/// Queues what the pod's next request meets, and returns how many attempts that takes. What is left of a stream
/// that breaks must not count, so the reply is queued for each attempt.
fn meet(queue: &mut Vec<Value>, fault: &str, reply: &Value) -> u64 {
    let stream = |kind: &str, seconds: f64| json!({"type": "stream_fault", "kind": kind, "after_chunks": 1, "stall_seconds": seconds});
    let mut attempts = 1;
    match fault {
        "none" => {}
        "disconnect" | "truncate" | "malformed" => {
            queue.extend([stream(fault, 0.0), reply.clone()]);
            attempts = 2;
        }
        "stall" => {
            queue.extend([stream(fault, 0.3), reply.clone()]);
            return attempts;
        }
        "delay" | "slow_first_token" => queue.push(json!({"type": fault, "seconds": 0.1})),
        "malformed_arguments" | "unknown_tool" => queue.push(json!({"type": "tool_fault", "kind": fault})),
        "429" => {
            queue.push(json!({"type": "fail", "status": 429, "retry_after": 0.7}));
            attempts = 2;
        }
        status => {
            queue.push(json!({"type": "fail", "status": status.parse::<u16>().unwrap()}));
            attempts = 2;
        }
    }
    // A stall of no time keeps later faults from this attempt.
    queue.extend([stream("stall", 0.0), reply.clone()]);
    attempts
}

/// A pod at llmock, and files whose number each tool call raises by one: a call that is run twice, or left out,
/// cannot find the number that it replaces.
struct Counter {
    world: World,
    server: Server,
    count: u64,
    attempts: u64,
}

impl Counter {
    fn new(kind: &str, path: &str) -> Option<Counter> {
        let server = llmock()?;
        let world = World::new();
        let provider = json!({"kind": kind, "model": "m", "base_url": format!("{}{path}", server.url), "api_key_env": "K"});
        world.manifest(json!({ "provider": provider }));
        std::fs::write(world.project().join("n"), "n=0.").unwrap();
        let scope = format!("{}:write", world.project().display());
        world.start_with_env(&[("K", KEY)], &["--name", "main", "--scope", &scope]);
        Some(Counter { world, server, count: 0, attempts: 0 })
    }

    /// A reply that counts on so many times, in calls beside each other.
    fn raise(&mut self, times: u64) -> Value {
        let calls: Vec<_> = (0..times)
            .map(|_| {
                self.count += 1;
                let (old, new) = (format!("n={}.", self.count - 1), format!("n={}.", self.count));
                json!({"name": "EditFile", "arguments": {"path": "n", "old": old, "new": new}})
            })
            .collect();
        json!({"type": "reply", "tool_calls": calls})
    }

    /// Checks the last turn and, at the end, everything.
    fn turn(&mut self, text: &str, queue: Vec<Value>) {
        scenario(&self.server, queue.into());
        let ended = self.world.turn("main", text);
        assert_eq!(ended["result"], "finished", "{text}: {ended}");
        let told = self.world.status("main")["last_response"].clone();
        assert_eq!(told, format!("{text} is done, says the model"), "{text}");
        assert_eq!(read(self.world.project().join("n")), format!("n={}.", self.count), "{text}");
    }

    fn check(&self, results: u64) {
        let verdict = curl(&[&format!("{}/_llmock/verdict", self.server.url)]);
        assert_eq!(
            (&verdict["findings"], &verdict["attempts"]),
            (&json!([]), &json!(self.attempts)),
            "{verdict}"
        );
        let history = self.world.history("main");
        let answers: Vec<_> = history.iter().filter(|item| item["type"] == "tool_result").collect();
        let ids: HashSet<_> = answers.iter().map(|answer| answer["id"].to_string()).collect();
        let went_well = answers.iter().filter(|answer| answer["ok"] == true).count();
        assert_eq!(
            (answers.len() as u64, ids.len() as u64, went_well as u64),
            (results, results, self.count)
        );
        let scenario = curl(&[&format!("{}/_llmock/scenario", self.server.url)]);
        assert_eq!(scenario["pending"], json!([]), "what was queued was met");
    }
}

fn done(text: &str) -> Value {
    json!({"type": "reply", "text": format!("{text} is done, says the model")})
}

#[test]
fn thirty_steps_of_tools_meet_each_broken_stream_and_no_call_is_run_twice() {
    let steps = |kind, path| {
        let Some(mut counter) = Counter::new(kind, path) else { return };
        let mut queue = Vec::new();
        for (step, fault) in
            (1..=30).zip(["none", "disconnect", "truncate", "stall", "malformed"].iter().cycle())
        {
            let reply = counter.raise(1 + step % 3);
            counter.attempts += meet(&mut queue, fault, &reply);
        }
        counter.attempts += meet(&mut queue, "truncate", &done("all"));
        counter.turn("all", queue);
        counter.check(60);
    };
    thread::scope(|threads| {
        threads.spawn(|| steps("anthropic", "/anthropic"));
        threads.spawn(|| steps("openai", "/v1"));
    });
}

#[test]
fn a_hundred_turns_with_anthropic_meet_every_fault_in_random_order() {
    meet_every_fault("anthropic", "/anthropic");
}

#[test]
fn a_hundred_turns_with_openai_meet_every_fault_in_random_order() {
    meet_every_fault("openai", "/v1");
}

/// A hundred turns of five pods side by side, because most of their time is the delay before the next attempt.
fn meet_every_fault(kind: &str, path: &str) {
    thread::scope(|threads| {
        for first in (0..100).step_by(20) {
            threads.spawn(move || meet_faults(kind, path, first..first + 20));
        }
    });
}

fn meet_faults(kind: &str, path: &str, turns: Range<usize>) {
    const FAULTS: [&str; 17] = [
        "none",
        "408",
        "409",
        "429",
        "500",
        "502",
        "503",
        "504",
        "529",
        "delay",
        "slow_first_token",
        "disconnect",
        "truncate",
        "malformed",
        "stall",
        "malformed_arguments",
        "unknown_tool",
    ];
    let Some(mut counter) = Counter::new(kind, path) else { return };
    let (mut order, mut results) = (0x2545_f491_4f6c_dd1d_u64 + turns.start as u64, 0);
    let mut roll = |sides: usize| {
        order ^= order << 13;
        order ^= order >> 7;
        order ^= order << 17;
        usize::try_from(order % sides as u64).unwrap()
    };
    for turn in turns {
        // Each fault at least five times, whatever is rolled.
        let first = if turn < 85 { FAULTS[(turn * 7) % 17] } else { FAULTS[roll(17)] };
        let second = ["none", "disconnect", "truncate", "malformed", "stall"][roll(5)];
        let mut queue = Vec::new();
        let is_broken = ["malformed_arguments", "unknown_tool"].contains(&first);
        let times = if is_broken { 1 } else { 1 + roll(3) as u64 };
        let reply = counter.raise(times);
        counter.count -= u64::from(is_broken); // the call does not get through
        results += times;
        counter.attempts += meet(&mut queue, first, &reply);
        let text = format!("turn {turn}");
        counter.attempts += meet(&mut queue, second, &done(&text));
        counter.turn(&text, queue);
    }
    counter.check(results);
}

#[test]
fn a_cancelled_turn_ends_with_its_curl_and_the_pod_goes_on() {
    const ANSWER: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n\
                  data: {\"choices\":[{\"delta\":{\"content\":\"first\"}}]}\n\n";
    let world = World::new();
    let url = answer_once(&[ANSWER], |stream| drop(thread_park(stream)));
    world.manifest(json!({"provider": {"kind": "openai", "base_url": url}}));
    world.start(&["--name", "main"]);
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({"input": "x"}));
    events.until(|event| event["event"] == "text_delta");
    assert_eq!(world.processes().len(), 2, "the pod and its curl");
    let started = Instant::now();
    world.ok("main", "cancel", Value::Null);
    assert_eq!(events.until_turn_ended()["result"], "cancelled");
    println!("a cancelled turn ended after {:?}", started.elapsed());
    assert_eq!(world.processes(), [world.pid("main")]);
    assert_eq!(world.status("main")["status"], "paused");
}

/// A proxy that lets everybody through, or answers each with this line; it tells the first line of each request.
fn proxy(refusal: Option<&'static str>) -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (url, (sender, receiver)) = (format!("http://{}", listener.local_addr().unwrap()), channel());
    let serve = move |mut client: TcpStream| {
        let (mut head, mut byte) = (String::new(), [0]);
        while !head.ends_with("\r\n\r\n") && client.read(&mut byte).is_ok_and(|count| count > 0) {
            head.push(byte[0].into());
        }
        let asked = head.lines().next().unwrap_or_default().to_owned();
        let target = asked.split(' ').nth(1).unwrap_or_default().to_owned();
        sender.send(asked).unwrap();
        let answer = refusal.unwrap_or("HTTP/1.1 200 OK");
        client.write_all(format!("{answer}\r\n\r\n").as_bytes()).unwrap();
        if refusal.is_none() {
            let mut server = TcpStream::connect(target).unwrap();
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let there = thread::Builder::new().spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
            });
            let _ = std::io::copy(&mut server, &mut client);
            let _ = client.shutdown(std::net::Shutdown::Both);
            there.unwrap().join().unwrap();
        }
    };
    let accept = move || listener.incoming().take(1).for_each(|client| serve(client.unwrap()));
    thread::Builder::new().name("proxy".into()).spawn(accept).unwrap();
    (url, receiver)
}

#[test]
fn proxies_and_certificates_are_curls_and_what_they_refuse_is_told() {
    if !has_tool("openssl") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let [certificate, key] =
        ["cert.pem", "key.pem"].map(|name| place.path().join(name).to_str().unwrap().to_owned());
    let make =
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost";
    let make = make.split(' ').chain(["-out", &certificate, "-keyout", &key]);
    assert_eq!(ran(insomnia::sys::process::Program::new("openssl", make)).code, Some(0));
    let (Some(tls), Some(plain)) = (clients(&[&certificate, &key]), clients(&[])) else { return };
    let address = |server: &Server| {
        format!("https://localhost:{}/openai-text/v1", server.url.rsplit_once(':').unwrap().1)
    };
    let (tls, plain) = (address(&tls), address(&plain));
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let closed = format!("http://{closed}");
    let check = |url: &str, variables: &[(&str, &str)], expected: Result<&str, &str>| {
        let world = World::new();
        world.manifest(json!({ "limits": { "retries": 0 } }));
        let run = world.program(env!("CARGO_BIN_EXE_insomnia"), ["run", "x"]);
        let run = run.env("OPENAI_API_KEY", KEY).env("OPENAI_BASE_URL", url);
        let ran = ran(variables.iter().fold(run, |run, (name, value)| run.env(name, value)));
        match expected {
            Ok(expected) => assert_eq!(ran.stdout, format!("{expected}\n"), "{variables:?}: {}", ran.stderr),
            Err(expected) => {
                assert!(ran.code == Some(1) && ran.stderr.contains(expected), "{expected}: {}", ran.stderr);
            }
        }
    };
    let trusted = ("CURL_CA_BUNDLE", &*certificate);
    check(&tls, &[], Err("is not trusted; check CURL_CA_BUNDLE"));
    check(&tls, &[("CURL_CA_BUNDLE", "/nowhere")], Err("cannot be set up; check CURL_CA_BUNDLE"));
    check(&tls, &[trusted], Ok("Hello, 日本."));
    check(&plain, &[trusted], Err("does not speak TLS; check \"base_url\""));
    let (open, asked) = proxy(None);
    check(&tls, &[trusted, ("HTTPS_PROXY", &open)], Ok("Hello, 日本."));
    let target = tls.split('/').nth(2).unwrap();
    assert_eq!(asked.recv().unwrap(), format!("CONNECT {target} HTTP/1.1"));
    check(&tls, &[trusted, ("HTTPS_PROXY", &closed), ("NO_PROXY", "localhost")], Ok("Hello, 日本."));
    check(
        &tls,
        &[trusted, ("HTTPS_PROXY", &closed)],
        Err("the proxy refuses the connection; check HTTPS_PROXY"),
    );
    check(
        &tls,
        &[trusted, ("HTTPS_PROXY", "http://nosuchproxy.invalid")],
        Err("cannot find the proxy: check HTTPS_PROXY"),
    );
    let (strict, _asked) = proxy(Some("HTTP/1.1 407 Proxy Authentication Required"));
    check(
        &tls,
        &[trusted, ("HTTPS_PROXY", &strict)],
        Err("the proxy does not let us through; check HTTPS_PROXY"),
    );
    let (strict, _asked) = proxy(Some("HTTP/1.1 407 Proxy Authentication Required"));
    check(
        "http://localhost:1/v1",
        &[("http_proxy", &strict)],
        Err("the proxy wants a user and a password (HTTP 407)"),
    );
}

#[test]
fn the_example_makes_a_program_that_knows_no_tools_a_model() {
    if !has_tool("python3") {
        return;
    }
    let world = World::new();
    // Stands for ollama: sees its arguments and the prompt, asks for a tool first, and fails once in between.
    let program = world.path("bin/ollama");
    std::fs::create_dir(world.path("bin")).unwrap();
    let text = format!(
        "#!/bin/sh\nprompt=$(cat)\ncase $prompt in\n*'[result of ReadFile]'*hello*) \
         [ -e {0} ] || {{ : > {0}; echo overloaded >&2; exit 1; }}; echo \"$* read it:\"; echo hello;;\n\
         *'[user] read a'*) echo 'I look.'; echo 'TOOL {{\"name\":\"ReadFile\",\"input\":{{\"path\":\"a\"}}}}';;\nesac\n",
        world.path("failed").display()
    );
    std::fs::write(&program, text).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, executable).unwrap();
    std::fs::write(world.project().join("a"), "hello\n").unwrap();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/ollama-model.py");
    world.manifest(json!({"provider": {"kind": "command", "command": [example, "qwen3"]}}));
    let path = format!("{}:{}", world.path("bin").display(), std::env::var("PATH").unwrap());
    let ran = ran(world.program(env!("CARGO_BIN_EXE_insomnia"), ["run", "read a"]).env("PATH", path));
    assert_eq!(ran.stdout.trim(), "run qwen3 read it:\nhello", "{}", ran.stderr);
    assert!(ran.stderr.contains("exit status: 75") && ran.stderr.contains("overloaded"), "{}", ran.stderr);
    assert_eq!(world.results("main", "ReadFile").len(), 1);
}
