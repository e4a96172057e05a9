//! The providers against servers that others wrote, and against sockets that misbehave.
//!
//! `aimock` (npm), `llmock` (PyPI) and the official clients (PyPI) are found by INSOMNIA_AIMOCK, INSOMNIA_LLMOCK and
//! INSOMNIA_PYTHON, which `.ci/install-model-servers` prints. Without them their tests are skipped, in CI they fail.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::wildcard_enum_match_arm,
    reason = "a test fails by a panic, and says on stdout that it is skipped"
)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use insomnia::store::manifest::{ProviderKind, ProviderSettings};
use insomnia::sys::process::{ErrorOutput, Output, Program, Running};
use insomnia::sys::wait::Cancel;
use insomnia::wire::provider::child::Patience;
use insomnia::wire::provider::{Failure, ModelRequest, Outcome, Provider, ProviderPlace, ToolSpec, backoff};
use insomnia::words::identity::{PodId, PodName};
use insomnia::words::message::{Item, Stop};
use serde_json::{Value, json};

pub const KEY: &str = "sk-test-0123456789-abcdefghijklmnop";

/// Keeps every log line of this process, at the highest level, to be searched for the key.
struct Capture(Mutex<String>);

static CAPTURE: Capture = Capture(Mutex::new(String::new()));

impl log::Log for Capture {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().unwrap().push_str(&format!("{} {}\n", record.target(), record.args()));
    }

    fn flush(&self) {}
}

/// A server of others, ended when it is dropped.
pub struct Server {
    pub url: String,
    _running: Running,
    _place: tempfile::TempDir,
}

/// Starts what `variable` names; `None` when it is not installed, which CI does not accept.
pub fn start_server(variable: &str, args: &[&str], fixtures: &Value) -> Option<Server> {
    let Ok(program) = std::env::var(variable) else {
        assert!(
            std::env::var("CI").as_deref() != Ok("true"),
            "{variable} is not set; see .ci/install-model-servers"
        );
        println!("skipped: needs {variable}, see .ci/install-model-servers");
        return None;
    };
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("fixtures.json"), fixtures.to_string()).unwrap();
    let mut command = Vec::new();
    if Path::new(&program).extension().is_some_and(|end| end == "js") {
        command.push("node");
    }
    command.push(&program);
    command.extend(args);
    let mut running = Program::new(command[0], &command[1..])
        .directory(place.path())
        .env("AIMOCK_API_KEYS", KEY)
        .start(ErrorOutput::WithOutput)
        .unwrap();
    let url = wait_for_url(&mut running);
    Some(Server { url, _running: running, _place: place })
}

/// The address in the line that says that the server is ready.
fn wait_for_url(running: &mut Running) -> String {
    let deadline = Instant::now() + Duration::from_secs(60);
    let (mut said, mut buffer) = (String::new(), [0; 4096]);
    loop {
        match running.read(&mut buffer, None, deadline).unwrap() {
            Output::Bytes(count) => said.push_str(&String::from_utf8_lossy(&buffer[..count])),
            other => panic!("the server did not start: {other:?}: {said}"),
        }
        let complete = said.rfind('\n').map_or("", |end| &said[..end]);
        let ready =
            complete.lines().find(|line| line.contains("listening on") || line.contains("running on"));
        if let Some((_, url)) = ready.and_then(|line| line.split_once("http://")) {
            return format!("http://{}", url.split_whitespace().next().unwrap());
        }
    }
}

pub fn aimock(fixtures: &Value) -> Option<Server> {
    start_server("INSOMNIA_AIMOCK", &["-p", "0", "-f", "fixtures.json", "--chunk-size", "5"], fixtures)
}

pub fn llmock() -> Option<Server> {
    // Slow enough that it still streams when we hang up; else it takes the attempt for one that went well.
    let args = ["serve", "-p", "0", "--stream-chunk-delay-ms", "20"];
    start_server("INSOMNIA_LLMOCK", &args, &Value::Null)
}

/// Runs curl for a test's own questions to a server.
pub fn curl(args: &[&str]) -> Value {
    let args = ["-q", "-sS"].iter().chain(args);
    let mut running = Program::new("curl", args).start(ErrorOutput::Separate).unwrap();
    let answer = running.read_to_end(1 << 20, None, Instant::now() + Duration::from_secs(30)).unwrap();
    serde_json::from_slice(&answer).unwrap_or_else(|error| panic!("{error}: {}", running.error_text(1000)))
}

/// A pod's place and its provider, with the key in a file.
pub struct Asker {
    place: tempfile::TempDir,
    provider: Provider,
}

pub fn asker(kind: ProviderKind, base_url: &str, change: impl FnOnce(&mut ProviderSettings)) -> Asker {
    if log::set_logger(&CAPTURE).is_ok() {
        log::set_max_level(log::LevelFilter::Trace);
    }
    let place = tempfile::tempdir().unwrap();
    let key_file = place.path().join("key");
    std::fs::write(&key_file, KEY).unwrap();
    std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::create_dir(place.path().join("private")).unwrap();
    let mut settings = ProviderSettings {
        kind: Some(kind),
        model: Some("test-model".into()),
        base_url: Some(base_url.into()),
        api_key_file: Some(key_file),
        ..ProviderSettings::default()
    };
    change(&mut settings);
    let pod = ProviderPlace {
        pod_id: PodId::new("main").unwrap(),
        name: PodName::new("main").unwrap(),
        directory: place.path().to_owned(),
        private_dir: place.path().join("private"),
    };
    let provider = Provider::new(&settings, pod).unwrap();
    Asker { place, provider }
}

fn patient(connect: Duration, rest: Duration) -> Patience {
    Patience { connect, silence: rest, total: Duration::from_secs(60) }
}

impl Asker {
    fn with_patience(mut self, patience: Patience) -> Asker {
        self.provider = self.provider.with_patience(patience);
        self
    }

    /// One attempt; what was streamed is the text of the reply.
    pub fn ask(&self, items: &[Item], tools: &[ToolSpec]) -> Outcome {
        let cancel = Cancel::new().unwrap();
        let mut heard = String::new();
        let outcome = self.ask_with(items, tools, &cancel, &mut |text| heard.push_str(text));
        if let Ok(message) = &outcome {
            assert_eq!(message.text, heard);
        }
        self.check_clean(&outcome);
        outcome
    }

    fn ask_with(
        &self,
        items: &[Item],
        tools: &[ToolSpec],
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str),
    ) -> Outcome {
        let request = ModelRequest { system: "You are a test.", items, tools, number: 0 };
        self.provider.request(&request, cancel, on_text)
    }

    /// As a turn does: tries again after failures that may pass, with the pauses of `backoff`.
    fn ask_until_answered(&self, items: &[Item], tools: &[ToolSpec]) -> (u32, Outcome) {
        for attempt in 1.. {
            match self.ask(items, tools) {
                Err(Failure::Retry { wait, .. }) if attempt < 6 => thread::sleep(backoff(attempt, wait, 0.1)),
                outcome => return (attempt, outcome),
            }
        }
        unreachable!()
    }

    /// Nothing is left on disk, and no part of the key is in what was said or logged.
    fn check_clean(&self, outcome: &Outcome) {
        assert_eq!(std::fs::read_dir(self.place.path().join("private")).unwrap().count(), 0);
        let logged = CAPTURE.0.lock().unwrap().clone();
        assert!(logged.contains("model request 0 to http://"), "the log is not what was searched");
        let said = format!("{outcome:?} {:?} {logged}", self.provider);
        for part in KEY.as_bytes().windows(8) {
            let part = std::str::from_utf8(part).unwrap();
            assert!(!said.contains(part), "a part of the key is in: {said}");
        }
    }
}

pub fn input(text: &str) -> Item {
    Item::Input { text: text.into(), from: None }
}

pub fn read_file() -> [ToolSpec; 1] {
    let schema = json!({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]});
    [ToolSpec { name: "ReadFile", description: "Reads a file.".into(), input_schema: schema }]
}

#[test]
fn both_protocols_stream_text_and_tool_calls_from_aimock() {
    let fixtures = json!({"fixtures": [
        {"match": {"userMessage": "read the file", "hasToolResult": false}, "response": {
            "content": "I read it now.", "toolCalls": [
                {"name": "ReadFile", "arguments": "{\"path\":\"a.txt\"}"},
                {"name": "ReadFile", "arguments": "{\"path\":\"b.txt\"}"}]}},
        {"match": {"hasToolResult": true}, "response": {"content": "The files say 42 and 日本."}},
        {"match": {"model": "no-such-model"}, "response": {
            "error": {"message": "model: no-such-model", "type": "not_found_error"}, "status": 404}},
        {"match": {"userMessage": "too much"}, "response": {
            "error": {"message": "prompt is too long: 9 tokens > 8 maximum", "type": "invalid_request_error"},
            "status": 400}},
    ]});
    let Some(server) = aimock(&fixtures) else { return };
    for kind in [ProviderKind::Anthropic, ProviderKind::Openai] {
        let asker = asker(kind, &server.url, |_| {});
        let mut items = vec![input("read the file")];
        let message = asker.ask(&items, &read_file()).unwrap();
        assert_eq!((message.text.as_str(), message.stop), ("I read it now.", Stop::ToolUse), "{kind:?}");
        let inputs: Vec<_> = message.tool_calls.iter().map(|call| call.input.clone()).collect();
        assert_eq!(inputs, [json!({"path": "a.txt"}), json!({"path": "b.txt"})], "{kind:?}");
        items.push(Item::Assistant(message.clone()));
        items.extend(message.tool_calls.iter().map(|call| Item::ToolResult {
            id: call.id.clone(),
            name: call.name.clone(),
            ok: true,
            text: "42".into(),
        }));
        let message = asker.ask(&items, &read_file()).unwrap();
        assert_eq!(message.text, "The files say 42 and 日本.", "{kind:?}");
        assert_eq!((message.stop, message.tool_calls.len()), (Stop::Done, 0));
        let long = asker.ask(&[input("too much")], &[]);
        assert!(matches!(long, Err(Failure::ContextTooLong(_))), "{kind:?}: {long:?}");
    }
}

#[test]
fn a_wrong_key_and_an_unknown_model_are_told_once() {
    let fixtures = json!({"fixtures": [{"match": {"model": "no-such-model"}, "response": {
        "error": {"message": "model: no-such-model", "type": "not_found_error"}, "status": 404}}]});
    let Some(server) = aimock(&fixtures) else { return };
    for kind in [ProviderKind::Anthropic, ProviderKind::Openai] {
        let unknown = asker(kind, &server.url, |settings| settings.model = Some("no-such-model".into()));
        let Err(Failure::Final(told)) = unknown.ask(&[input("x")], &[]) else { panic!("{kind:?}") };
        assert!(told.contains("does not know the model \"no-such-model\""), "{told}");
        assert!(told.contains("check \"model\" and \"base_url\""), "{told}");
        let wrong = asker(kind, &server.url, |settings| {
            std::fs::write(settings.api_key_file.as_ref().unwrap(), "not-the-right-key").unwrap();
        });
        let Err(Failure::Final(told)) = wrong.ask(&[input("x")], &[]) else { panic!("{kind:?}") };
        assert!(told.contains("the key was refused (HTTP 401)") && told.contains("the file \""), "{told}");
        assert!(!told.contains("not-the-right-key"), "{told}");
    }
}

/// Queues faults for the next requests.
pub fn scenario(server: &Server, behaviors: Value) {
    let body = json!({ "behaviors": behaviors }).to_string();
    curl(&[&format!("{}/_llmock/scenario", server.url), "-d", &body]);
}

#[test]
fn a_turn_with_anthropic_recovers_from_every_fault_of_llmock_and_gets_its_verdict() {
    recover_from_every_fault(ProviderKind::Anthropic, "/anthropic");
}

#[test]
fn a_turn_with_openai_recovers_from_every_fault_of_llmock_and_gets_its_verdict() {
    recover_from_every_fault(ProviderKind::Openai, "/v1");
}

fn recover_from_every_fault(kind: ProviderKind, path: &str) {
    let Some(server) = llmock() else { return };
    let fault = |kind: &str| json!([{"type": "stream_fault", "kind": kind, "after_chunks": 3}]);
    let rows = [
        ("rate limit", json!([{"type": "fail", "status": 429, "retry_after": 1, "times": 2}]), 3),
        ("server error", json!([{"type": "fail", "status": 500, "times": 2}]), 3),
        ("unavailable", json!([{"type": "fail", "status": 503}]), 2),
        ("dropped", fault("disconnect"), 2),
        ("truncated", fault("truncate"), 2),
        ("malformed", fault("malformed"), 2),
        (
            "stalled",
            json!([{"type": "stream_fault", "kind": "stall", "after_chunks": 3, "stall_seconds": 20}]),
            2,
        ),
        ("slow", json!([{"type": "slow_first_token", "seconds": 0.2}]), 1),
    ];
    let patience = patient(Duration::from_secs(5), Duration::from_secs(2));
    let asker = asker(kind, &format!("{}{path}", server.url), |_| {}).with_patience(patience);
    for (name, behaviors, attempts) in &rows {
        let text = json!({"type": "reply", "text": "The answer has quite a few words, so that it comes in pieces.", "times": attempts});
        let mut all = behaviors.as_array().unwrap().clone();
        all.push(text);
        scenario(&server, all.into());
        let (made, outcome) = asker.ask_until_answered(&[input(&format!("{kind:?} {name}"))], &[]);
        let message = outcome.unwrap_or_else(|failure| panic!("{kind:?} {name}: {failure:?}"));
        assert!(message.text.ends_with("comes in pieces."), "{kind:?} {name}: {}", message.text);
        assert_eq!(made, *attempts, "{kind:?} {name}");
        curl(&["-X", "DELETE", &format!("{}/_llmock/scenario", server.url)]);
    }
    let verdict = curl(&[&format!("{}/_llmock/verdict", server.url)]);
    assert_eq!(verdict["findings"], json!([]), "{verdict}");
    assert!(verdict["faults_injected"].as_u64().unwrap() >= 7, "{verdict}");
}

#[test]
fn what_llmock_refuses_for_good_is_not_tried_again() {
    let Some(server) = llmock() else { return };
    for (kind, path) in [(ProviderKind::Anthropic, "/anthropic"), (ProviderKind::Openai, "/v1")] {
        let asker = asker(kind, &format!("{}{path}", server.url), |_| {});
        for (status, expected) in
            [(401, "the key was refused"), (404, "does not know"), (400, "did not accept")]
        {
            scenario(&server, json!([{"type": "fail", "status": status}]));
            let (made, outcome) = asker.ask_until_answered(&[input(&format!("{kind:?} {status}"))], &[]);
            let Err(Failure::Final(told)) = outcome else { panic!("{kind:?} {status}: {outcome:?}") };
            assert!(told.contains(expected) && made == 1, "{told}");
        }
        scenario(&server, json!([{"type": "tool_fault", "kind": "malformed_arguments"}]));
        let message = asker.ask(&[input("please read the file")], &read_file()).unwrap();
        let broken = &message.tool_calls.first().unwrap().input;
        assert!(broken["_invalid_arguments"].is_string(), "{kind:?}: {broken}");
        scenario(&server, json!([{"type": "tool_fault", "kind": "unknown_tool"}]));
        let message = asker.ask(&[input("read the file please")], &read_file()).unwrap();
        assert_ne!(message.tool_calls.first().unwrap().name, "ReadFile");
    }
    let verdict = curl(&[&format!("{}/_llmock/verdict", server.url)]);
    assert_eq!(verdict["errors"], json!(0), "{verdict}");
}

#[test]
fn what_llmock_limits_is_told_with_the_wait_that_it_wants() {
    let args = ["serve", "-p", "0", "--context-window", "300", "--rpm", "1"];
    for (kind, path) in [(ProviderKind::Anthropic, "/anthropic"), (ProviderKind::Openai, "/v1")] {
        let Some(server) = start_server("INSOMNIA_LLMOCK", &args, &Value::Null) else { return };
        let asker = asker(kind, &format!("{}{path}", server.url), |settings| settings.max_tokens = Some(9));
        let long = asker.ask(&[input(&"many words ".repeat(500))], &[]);
        assert!(matches!(long, Err(Failure::ContextTooLong(_))), "{kind:?}: {long:?}");
        let outcomes = [asker.ask(&[input("x")], &[]), asker.ask(&[input("y")], &[])];
        let wanted = outcomes.iter().find_map(|outcome| match outcome {
            Err(Failure::Retry { reason, wait }) if reason.contains("slow down (HTTP 429)") => *wait,
            _ => None,
        });
        assert!(wanted.is_some_and(|wait| wait > Duration::ZERO), "{kind:?}: {outcomes:?}");
    }
}

/// A socket that answers one request with these pieces; the connection closes when the answer is dropped.
pub fn answer_once(pieces: &'static [&'static str], then: impl FnOnce(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::Builder::new()
        .name("answer".into())
        .spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut buffer = [0; 4096];
            while !String::from_utf8_lossy(&request).contains("\r\n\r\n") {
                let count = stream.read(&mut buffer).unwrap();
                assert!(count > 0);
                request.extend_from_slice(&buffer[..count]);
            }
            for piece in pieces {
                stream.write_all(piece.as_bytes()).unwrap();
            }
            then(stream);
        })
        .unwrap();
    url
}

#[test]
fn connections_that_fail_are_told_in_a_sentence() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let check_within = |silence: u64, url: &str, kind: &str, expected: &str| {
        let patience = patient(Duration::from_secs(30), Duration::from_millis(silence));
        let asker = asker(ProviderKind::Openai, url, |_| {}).with_patience(patience);
        let told = format!("{:?}", asker.ask(&[input("x")], &[]).unwrap_err());
        assert!(told.starts_with(kind) && told.contains(expected), "{url}: {told}");
    };
    let check = |url: &str, kind: &str, expected: &str| check_within(30_000, url, kind, expected);
    check(&format!("http://{free}"), "Retry", "refuses the connection");
    check("http://nosuchhost.invalid", "Retry", "cannot find the host nosuchhost.invalid");
    check(&answer_once(&[], drop), "Retry", "was dropped");
    check_within(
        300,
        &answer_once(&[], |stream| drop(thread_park(stream))),
        "Retry",
        "sent nothing for 0.3 s",
    );
    check(&answer_once(&["SSH-2.0-x\r\n\r\n"], drop), "Final", "does not answer in HTTP");
    check(
        &answer_once(&["HTTP/1.1 302 Found\r\nLocation: http://x\r\nContent-Length: 0\r\n\r\n"], drop),
        "Final",
        "redirects",
    );
    check(
        &answer_once(&["HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"], drop),
        "Final",
        "answers with a web page",
    );
    check(
        &answer_once(&["HTTP/1.1 429 Slow\r\nRetry-After: 7\r\n\r\nslow"], drop),
        "Retry",
        "slow down (HTTP 429): slow\", wait: Some(7s)",
    );
    check(
        &answer_once(
            &[
                "HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n",
                "data: {\"choices\":[{\"delta\":{\"content\":\"h\"}}]}\n\n",
            ],
            drop,
        ),
        "Retry",
        "was dropped",
    );
}

#[test]
fn a_cancel_before_the_first_byte_ends_the_request() {
    let cancel = Cancel::new().unwrap();
    let asked = cancel.clone();
    let url = answer_once(&[], move |stream| {
        asked.set();
        drop(thread_park(stream));
    });
    let asker = asker(ProviderKind::Anthropic, &url, |_| {});
    let outcome = asker.ask_with(&[input("x")], &[], &cancel, &mut |_| {});
    assert_eq!(outcome, Err(Failure::Cancelled));
    asker.check_clean(&outcome);
}

#[test]
fn a_connection_that_does_not_stand_in_time_and_a_server_that_does_not_end_are_not_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap(); // nobody takes the connection
    let silent = format!("https://{}", listener.local_addr().unwrap());
    let asker = |url: &str| {
        let patience = patient(Duration::from_millis(300), Duration::from_secs(50));
        asker(ProviderKind::Openai, url, |_| {}).with_patience(patience)
    };
    let told = format!("{:?}", asker(&silent).ask(&[input("x")], &[]).unwrap_err());
    assert!(told.starts_with("Retry") && told.contains("no connection to 127.0.0.1:"), "{told}");
    let url = answer_once(
        &[
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"whole\"},\"finish_reason\":\"stop\"}]}\n\n",
        ],
        |stream| drop(thread_park(stream)),
    );
    let started = Instant::now();
    assert_eq!(asker(&url).ask(&[input("x")], &[]).unwrap().text, "whole");
    assert!(started.elapsed() < Duration::from_secs(25), "half of the silence that is allowed");
}

/// Keeps a connection open, without a word, until the other end closes it.
pub fn thread_park(mut stream: TcpStream) -> TcpStream {
    let _ = stream.read_to_end(&mut Vec::new());
    stream
}

#[test]
fn a_finished_reply_counts_even_if_the_server_closes_badly() {
    let url = answer_once(
        &[
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"whole\"},\"finish_reason\":\"stop\"}]}\n\n",
        ],
        drop,
    );
    let message = asker(ProviderKind::Openai, &url, |_| {}).ask(&[input("x")], &[]).unwrap();
    assert_eq!(message.text, "whole");
    let url = answer_once(
        &[
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n",
            "{\"choices\":[{\"message\":{\"content\":\"not streamed\"},\"finish_reason\":\"stop\"}]}",
        ],
        drop,
    );
    let message = asker(ProviderKind::Openai, &url, |_| {}).ask(&[input("x")], &[]).unwrap();
    assert_eq!(message.text, "not streamed");
}

#[test]
fn r07_a_server_that_echoes_the_key_does_not_get_it_into_our_words() {
    let check = |pieces: &'static [&'static str]| {
        for kind in [ProviderKind::Anthropic, ProviderKind::Openai] {
            let url = answer_once(pieces, drop);
            let Err(Failure::Final(told)) = asker(kind, &url, |_| {}).ask(&[input("x")], &[]) else {
                panic!("{kind:?}")
            };
            assert!(told.contains("[key]"), "{told}");
        }
    };
    check(&[
        "HTTP/1.1 401 No\r\nConnection: close\r\n\r\n",
        "{\"error\":{\"message\":\"bad key sk-test-0123456789-abcdefghijklmnop, sk-test-01...jklmnop\"}}",
    ]);
    check(&[
        "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        "data: {\"error\":{\"message\":\"sk-test-0123456789-abcdefghijklmnop\",\"type\":\"authentication_error\"}}\n\n",
    ]);
}

/// The processes whose arguments hold `part`: their pids.
fn processes_with_argument(part: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        if !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&arguments).contains(part) {
            found.push(pid);
        }
    }
    found
}

#[test]
fn r05_the_key_is_in_no_argument_and_a_cancel_leaves_nothing_behind() {
    let url = answer_once(
        &[
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"first\"}}]}\n\n",
        ],
        |stream| drop(thread_park(stream)),
    );
    // A patience that tells our curl from those of tests that run beside this one.
    let patience = Duration::from_millis(27_000 + u64::from(std::process::id()) % 1000);
    let mark = &format!("\0{:.3}\0", patience.as_secs_f64());
    let asker =
        asker(ProviderKind::Openai, &url, |_| {}).with_patience(patient(patience, Duration::from_secs(100)));
    let private = asker.place.path().join("private");
    let cancel = Cancel::new().unwrap();
    let seen = Mutex::new(Vec::new());
    let mut started = None;
    let outcome = asker.ask_with(&[input("x")], &[], &cancel, &mut |text| {
        let curls = processes_with_argument(mark);
        let mut leaks = processes_with_argument("sk-test-");
        for pid in &curls {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            if String::from_utf8_lossy(&environment).contains("sk-test-") {
                leaks.push(pid.clone());
            }
        }
        let bodies: Vec<_> =
            std::fs::read_dir(&private).unwrap().flatten().map(|entry| entry.path()).collect();
        let modes: Vec<_> =
            bodies.iter().map(|path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777).collect();
        let bodies: String = bodies.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
        assert!(!bodies.contains("sk-test-"));
        seen.lock().unwrap().push((text.to_owned(), curls.len(), leaks, modes));
        started = Some(Instant::now());
        cancel.set();
    });
    assert_eq!(outcome, Err(Failure::Cancelled));
    let elapsed = started.unwrap().elapsed();
    println!("a cancelled request ended after {elapsed:?}");
    assert!(elapsed < Duration::from_secs(5), "far below the 100 s of silence");
    assert_eq!(seen.into_inner().unwrap(), [("first".to_owned(), 1, vec![], vec![0o600])]);
    assert!(processes_with_argument(mark).is_empty());
    asker.check_clean(&outcome);
}
