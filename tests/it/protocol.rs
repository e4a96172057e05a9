//! The socket under hostile and careless clients: every bad request gets its error or a clean close, and the
//! pod serves the next one.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::{PATIENCE, World, call, lives, memory_kib, wait_until};

const MIB: usize = 1 << 20;
const STRANGER: &str = "00000000000000000000000000000000";

fn main_pod(replies: Value) -> World {
    let world = World::with_script(json!({ "main": replies }));
    world.start(&[]);
    world
}

fn connect(world: &World) -> UnixStream {
    let stream = UnixStream::connect(world.socket("main")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Asks again while the pod is busy, as a client may, and fails when that goes on for long.
pub fn serves_soon(world: &World, line: &[u8]) {
    let asked = Instant::now();
    while !world.raw("main", line).starts_with("{\"ok\"") {}
    // An unoptimised pod needs its time.
    let limit = if cfg!(debug_assertions) { 20_000 } else { 1_000 };
    assert!(asked.elapsed() < Duration::from_millis(limit), "it took {:?}", asked.elapsed());
}

/// The code of the refusal of one raw line.
fn code(world: &World, line: &[u8]) -> String {
    let reply = world.raw("main", line);
    let reply: Value = serde_json::from_str(&reply).unwrap_or_else(|error| {
        panic!("{error}: {reply:?} to {:?}", String::from_utf8_lossy(&line[..line.len().min(70)]))
    });
    reply["error"]["code"].as_str().unwrap_or_else(|| panic!("not refused: {reply}")).to_owned()
}

pub fn threads_named(pid: i32, name: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let comm = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("comm")).ok();
    tasks.filter_map(|entry| comm(entry.ok()?)).filter(|comm| comm.trim_end() == name).count()
}

pub fn descriptors(pid: i32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn u09_each_bad_line_gets_its_error_and_the_pod_serves_the_next() {
    let world = main_pod(json!([]));
    let nested = |open: &str| open.repeat(100_000);
    let rows: Vec<(Vec<u8>, &str)> = vec![
        (br#"{"method":"fly"}"#.to_vec(), "unknown_method"),
        (br#"{"method":"Status"}"#.to_vec(), "unknown_method"),
        (br#"{"method":"fly","params":{"deep":[[[]]]}}"#.to_vec(), "unknown_method"),
        (br#"{"method":"introduce"}"#.to_vec(), "bad_request_or_unknown_method"),
        (br#"{"method":"status","extra":1}"#.to_vec(), "bad_request"),
        (br#"{"method":"status","method":"shutdown"}"#.to_vec(), "bad_request"),
        (br#"{"method":"status"} {"method":"status"}"#.to_vec(), "bad_request"),
        (br#"{"method":"status","params":{"x":1}}"#.to_vec(), "bad_request"),
        (br#"{"method":"status","params":[]}"#.to_vec(), "bad_request"),
        (br#"{"method":"status","params":""}"#.to_vec(), "bad_request"),
        (br#"{"method":"status","params":false}"#.to_vec(), "bad_request"),
        (br#"{"method":1}"#.to_vec(), "bad_request"),
        (br#"{"method":null}"#.to_vec(), "bad_request"),
        (br#"{"params":{}}"#.to_vec(), "bad_request"),
        (br#"{"method":"run"}"#.to_vec(), "bad_request"),
        (br#"{"method":"run","params":null}"#.to_vec(), "bad_request"),
        (br#"{"method":"run","params":["x"]}"#.to_vec(), "bad_request"),
        (br#"{"method":"run","params":{"input":1}}"#.to_vec(), "bad_request"),
        (br#"{"method":"run","params":{"input":null}}"#.to_vec(), "bad_request"),
        (br#"{"method":"run","params":{"input":"x","more":1}}"#.to_vec(), "bad_request"),
        (br#"{"method":"run","params":{"input":"\ud800"}}"#.to_vec(), "bad_request"),
        (br#"{"method":"notify","params":{"text":"x"}}"#.to_vec(), "bad_request"),
        (br#"{"method":"get_history","params":{"since":-1}}"#.to_vec(), "bad_request"),
        (br#"{"method":"get_history","params":{"since":1.5}}"#.to_vec(), "bad_request"),
        (br#"{"method":"get_history","params":{"since":"1"}}"#.to_vec(), "bad_request"),
        (br#"{"method":"subscribe","params":{"since":1e300}}"#.to_vec(), "bad_request"),
        (br#"{"method":"pod_event","params":{"event":"born","pod_name":"a"}}"#.to_vec(), "bad_request"),
        (
            br#"{"method":"pod_event","params":{"event":"shut_down","pod_name":"../a"}}"#.to_vec(),
            "bad_request",
        ),
        (br#"{"method":"status","from":{"pod_id":"main"}}"#.to_vec(), "bad_request"),
        (br#"{"method":"status","from":"main"}"#.to_vec(), "bad_request"),
        (br#"{"method":"status","to":"short"}"#.to_vec(), "bad_request"),
        (br#"{"method":"status","to":5}"#.to_vec(), "bad_request"),
        (b"".to_vec(), "bad_request"),
        (b" \t ".to_vec(), "bad_request"),
        (b"[]".to_vec(), "bad_request"),
        (br#"["status",null,null,null]"#.to_vec(), "bad_request"),
        (b"null".to_vec(), "bad_request"),
        (b"\"status\"".to_vec(), "bad_request"),
        (b"{".to_vec(), "bad_request"),
        (b"{\"method\":\"status\"}\0".to_vec(), "bad_request"),
        (b"\0".to_vec(), "bad_request"),
        (b"\0\0{\"method\":\"status\"}".to_vec(), "bad_request"),
        (b"\xef\xbb\xbf{\"method\":\"status\"}".to_vec(), "bad_request"),
        (b"{\"method\":\"run\",\"params\":{\"input\":\"\xff\xfe\"}}".to_vec(), "bad_request"),
        (b"\xc3".to_vec(), "bad_request"),
        (b"GET / HTTP/1.1\r".to_vec(), "bad_request"),
        (nested("[").into_bytes(), "bad_request"),
        (nested("{\"a\":").into_bytes(), "bad_request"),
        (format!("{{\"method\":\"run\",\"params\":{}", nested("[")).into_bytes(), "bad_request"),
        (format!("{{\"method\":\"run\",\"params\":{}", nested("{\"a\":")).into_bytes(), "bad_request"),
        (format!("{{\"method\":\"pod_event\",\"params\":{}", nested("[")).into_bytes(), "bad_request"),
        (vec![b' '; MIB + 1], "too_large"),
        (vec![b'x'; 3 * MIB], "too_large"),
    ];
    for (mut line, expected) in rows {
        let shown = String::from_utf8_lossy(&line[..line.len().min(70)]).into_owned();
        line.push(b'\n');
        let found = code(&world, &line);
        assert!(expected.split("_or_").any(|one| one == found), "{shown}: {found}");
        assert_eq!(world.status("main")["status"], "idle", "after {shown}");
    }
}

#[test]
fn a_line_of_one_mebibyte_is_taken_and_one_byte_more_is_not() {
    let world = main_pod(json!([]));
    let line = |bytes: usize| {
        let mut line = br#"{"method":"status"}"#.to_vec();
        line.resize(bytes - 1, b' ');
        line.push(b'\n');
        line
    };
    assert!(world.raw("main", &line(MIB)).contains("\"ok\""));
    assert_eq!(code(&world, &line(MIB + 1)), "too_large");
}

#[test]
fn methods_without_parameters_take_none_null_and_an_empty_object() {
    let world = main_pod(json!([]));
    for params in ["", r#","params":null"#, r#","params":{}"#] {
        for method in ["status", "list_pods", "cancel", "get_history", "read_output", "subscribe"] {
            let reply = world.raw("main", format!("{{\"method\":\"{method}\"{params}}}\n").as_bytes());
            assert!(reply.starts_with("{\"ok\""), "{method}{params}: {reply}");
        }
        assert_eq!(code(&world, format!("{{\"method\":\"resume\"{params}}}\n").as_bytes()), "conflict");
    }
    let pid = world.pid("main");
    assert!(world.raw("main", b"{\"method\":\"shutdown\",\"params\":{}}\n").starts_with("{\"ok\""));
    wait_until("the pod is gone", || !lives(pid));
}

#[test]
fn a_client_that_leaves_early_is_a_close_and_one_that_only_reads_is_served() {
    let world = main_pod(json!([]));
    drop(connect(&world));
    connect(&world).write_all(b"{\"method\":\"shut").unwrap();
    // No newline, then the end of what the client says: no request, a clean close, and no shutdown.
    let mut stream = connect(&world);
    stream.write_all(b"{\"method\":\"shutdown\"}").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text, "");
    // A whole request, then the end of what the client says: it still gets its reply.
    let mut stream = connect(&world);
    stream.write_all(b"{\"method\":\"status\"}\n").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("{\"ok\"") && text.ends_with('\n'), "{text}");
    // The server speaks second, always, and says one line to one request.
    let mut stream = connect(&world);
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(stream.read(&mut [0; 16]).is_err(), "it speaks unasked");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"{\"method\":\"status\"}\n{\"method\":\"status\"}\n").unwrap();
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes); // a reset after the reply is fine
    assert_eq!(bytes.iter().filter(|&&byte| byte == b'\n').count(), 1);
    assert_eq!(world.status("main")["status"], "idle");
}

#[test]
fn u06_a_line_without_end_costs_less_than_two_mebibytes() {
    let world = main_pod(json!([]));
    let pid = world.pid("main");
    world.status("main");
    // Without the pages of the program's own file, which come as they are first used, many at a time.
    let before = memory_kib(pid, "RssAnon");
    let peak = std::sync::atomic::AtomicU64::new(0);
    let look = || peak.fetch_max(memory_kib(pid, "RssAnon"), std::sync::atomic::Ordering::SeqCst);
    let attack = |line: &dyn Fn(&mut UnixStream)| {
        let mut stream = connect(&world);
        line(&mut stream);
        look();
        let mut reply = String::new();
        let _ = BufReader::new(stream).read_line(&mut reply);
        assert!(reply.contains("\"error\""), "{reply}");
    };
    for byte in [b'x', b' ', b'[', 0, 0xff] {
        let endless = |stream: &mut UnixStream| {
            let piece = vec![byte; 64 << 10];
            for _ in 0..1024 {
                if stream.write_all(&piece).is_err() {
                    return; // cut, as it should be
                }
                look();
            }
            panic!("64 MiB without a newline were taken");
        };
        attack(&endless);
    }
    attack(&|stream| {
        let _ = stream.write_all(&vec![b'\n'; 100_000]);
    });
    let grown = peak.load(std::sync::atomic::Ordering::SeqCst).saturating_sub(before);
    assert!((512..2048).contains(&grown), "grew by {grown} KiB, of which a line is seen");
    assert_eq!(world.status("main")["status"], "idle");
}

#[test]
fn u06_a_line_full_of_small_values_costs_no_more_than_its_length() {
    let world = main_pod(json!([]));
    let pid = world.pid("main");
    world.status("main");
    let before = memory_kib(pid, "VmHWM");
    for method in ["status", "run", "pod_event", "fly"] {
        let mut line = format!("{{\"method\":\"{method}\",\"params\":{{\"event\":\"shut_down\",\"x\":[0");
        line.push_str(&",0".repeat((MIB - line.len() - 8) / 2));
        line.push_str("]}}\n");
        code(&world, line.as_bytes());
    }
    let grown = memory_kib(pid, "VmHWM").saturating_sub(before);
    assert!(grown < 4096, "grew by {grown} KiB");
}

#[test]
fn u07_silent_clients_keep_nobody_waiting() {
    let world = main_pod(json!([]));
    let pid = world.pid("main");
    let before = descriptors(pid);
    let mut silent: Vec<UnixStream> = Vec::new();
    for round in 0..200 {
        let mut stream = connect(&world);
        if round % 2 == 0 {
            let _ = stream.write_all(b"{"); // one byte of a request is as good as none
        }
        silent.push(stream);
        if round % 20 == 19 {
            serves_soon(&world, b"{\"method\":\"status\"}\n");
            wait_until("those over the limit have ended", || threads_named(pid, "connection") <= 64);
        }
    }
    // The silent ones are dropped after the documented 5 s, and told why, as are those that were cut before.
    let told = silent.iter().filter(|stream| {
        let mut reply = String::new();
        let _ = BufReader::new(*stream).read_line(&mut reply);
        assert!(reply.contains("\"busy\"") || reply.contains("no request line came within 5 s"), "{reply:?}");
        reply.contains("5 s")
    });
    assert!((1..=64).contains(&told.count()));
    drop(silent);
    wait_until("the silent ones are gone", || descriptors(pid) <= before);
    wait_until("their threads have ended", || threads_named(pid, "connection") == 0);
}

#[test]
fn u07_of_many_clients_at_once_each_gets_its_answer_or_hears_busy() {
    let world = main_pod(json!([{ "text": "late", "delay_ms": 600_000 }]));
    let start = std::sync::Barrier::new(300);
    let served = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|threads| {
        for _ in 0..300 {
            threads.spawn(|| {
                start.wait();
                let reply = world.raw("main", b"{\"method\":\"run\",\"params\":{\"input\":\"Ui\"}}\n");
                assert!(reply.starts_with("{\"ok\"") || reply.contains("\"busy\""), "{reply:?}");
                let is_ok = usize::from(reply.starts_with("{\"ok\""));
                served.fetch_add(is_ok, std::sync::atomic::Ordering::SeqCst);
            });
        }
    });
    assert!(served.into_inner() > 0);
}

#[test]
fn u07_clients_that_go_silent_in_a_long_line_keep_nobody_out() {
    let world = main_pod(json!([]));
    let long = [b'x'; 70_000];
    let mut silent: Vec<UnixStream> = (0..64).map(|_| connect(&world)).collect();
    silent.iter_mut().for_each(|stream| drop(stream.write_all(&long)));
    (0..3).for_each(|_| serves_soon(&world, b"{\"method\":\"status\"}\n"));
    drop(silent);
    // Nor do those that come again each time; one with as much to say has its turn as well.
    let over = std::sync::atomic::AtomicBool::new(false);
    let come_again = || {
        while !over.load(std::sync::atomic::Ordering::SeqCst) {
            world.raw("main", &long);
        }
    };
    std::thread::scope(|threads| {
        (0..12).for_each(|_| drop(threads.spawn(come_again)));
        wait_until("all have come", || threads_named(world.pid("main"), "connection") == 12);
        let request = [b"{\"method\":\"status\"".as_slice(), &[b' '; 100_000], b"}\n"].concat();
        let asked = std::panic::AssertUnwindSafe(|| (0..3).for_each(|_| serves_soon(&world, &request)));
        let asked = std::panic::catch_unwind(asked);
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        asked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn u08_a_client_that_does_not_read_holds_up_nobody() {
    let text = "x".repeat(500_000);
    let replies: Vec<Value> = (0..10).map(|_| json!({ "text": text })).collect();
    let world = main_pod(json!(replies));
    (0..10).for_each(|_| assert_eq!(world.turn("main", "go")["result"], "finished"));
    let pid = world.pid("main");
    let slow: Vec<UnixStream> = (0..8)
        .map(|n| {
            let mut stream = connect(&world);
            let method = if n % 2 == 0 { "get_history" } else { "subscribe" };
            // From the first huge item on, which no socket buffer holds.
            let line = format!("{{\"method\":\"{method}\",\"params\":{{\"since\":3}}}}\n");
            stream.write_all(line.as_bytes()).unwrap();
            stream
        })
        .collect();
    wait_until("all are being answered", || threads_named(pid, "connection") == slow.len());
    for _ in 0..3 {
        for (method, params) in [("status", json!(null)), ("get_history", json!({ "since": 4 }))] {
            let asked = Instant::now();
            world.ok("main", method, params);
            assert!(asked.elapsed() < Duration::from_millis(4_500), "{method} took {:?}", asked.elapsed());
        }
        let asked = Instant::now();
        assert_eq!(world.turn("main", "go on")["result"], "finished");
        assert!(asked.elapsed() < Duration::from_millis(4_500), "a turn took {:?}", asked.elapsed());
    }
    wait_until("the slow ones are cut", || threads_named(pid, "connection") == 0);
    for stream in slow {
        let mut bytes = Vec::new();
        let _ = BufReader::new(stream).read_to_end(&mut bytes);
        assert!(!bytes.is_empty() && bytes.len() < 5_000_000, "{}", bytes.len());
    }
}

/// The items of a history as `subscribe` from `since` brings them, until the last turn has ended.
fn items_of(events: &[Value]) -> Vec<Value> {
    events.iter().filter(|event| event["event"] == "item").map(|event| event["data"].clone()).collect()
}

#[test]
fn u08_a_subscriber_that_overflows_is_told_and_goes_on_from_its_cursor() {
    let many: Vec<Value> = (0..700).map(|_| call("ListFiles", json!({}))).collect();
    let calls = json!({ "tool_calls": many }); // twice: far more than the queue and the socket hold
    let world = main_pod(json!([calls, calls, { "text": "done" }]));
    let mut slow = world.subscribe("main", Some(0));
    world.ok("main", "run", json!({ "input": "go" }));
    world.wait_turns("main", 1);
    while slow.next().is_some() {}
    let last = slow.seen.last().unwrap();
    assert_eq!(last["event"], "dropped", "{last}");
    assert!(last["data"]["reason"].as_str().unwrap().contains("subscribe again"), "{last}");
    let mut items = items_of(&slow.seen);
    let mut again = world.subscribe("main", Some(items.len() as u64));
    again.until(|event| event["event"] == "item" && event["data"]["type"] == "turn_ended");
    items.extend(items_of(&again.seen));
    assert_eq!(items, world.history("main"));
}

#[test]
fn u10_ten_thousand_clients_that_do_not_wait_cost_no_descriptor() {
    let world = main_pod(json!([]));
    let pid = world.pid("main");
    world.status("main");
    let (before, memory) = (descriptors(pid), memory_kib(pid, "VmRSS"));
    for _ in 0..10_000 {
        let mut stream = UnixStream::connect(world.socket("main")).unwrap();
        let _ = stream.write_all(b"{\"method\":\"status\"}\n"); // may be refused as busy already
    }
    // The last ones may still wait to be accepted, so that for a moment no place is free.
    let is_idle = || world.request("main", "status", Value::Null)["ok"]["status"] == "idle";
    wait_until("all are done with", || threads_named(pid, "connection") == 0 && is_idle());
    wait_until("all are closed", || descriptors(pid) <= before);
    assert!(memory_kib(pid, "VmRSS") < memory + 16_384);
    assert!(!log(&world, "main").contains("panicked"));
}

/// The text of a living pod's log.
fn log(world: &World, pod_id: &str) -> String {
    std::fs::read_to_string(world.status(pod_id)["log"].as_str().unwrap()).unwrap()
}

#[test]
fn requests_for_another_life_or_from_a_stranger_are_refused() {
    let world = main_pod(json!([]));
    let life = world.life("main");
    let check = |line: String, expected: &str| assert_eq!(code(&world, line.as_bytes()), expected, "{line}");
    let stranger = format!("\"from\":{{\"pod_id\":\"coder\",\"life\":\"{STRANGER}\"}}");
    let impostor = format!("\"from\":{{\"pod_id\":\"coder\",\"life\":\"{life}\"}}");
    let event = r#""method":"pod_event","params":{"event":"turn_ended","pod_name":"coder"}"#;
    for method in ["status", "shutdown", "list_pods", "cancel", "resume", "get_history", "read_output"] {
        check(format!("{{\"method\":\"{method}\",\"to\":\"{STRANGER}\"}}\n"), "unknown_pod");
    }
    check(
        format!("{{\"method\":\"run\",\"params\":{{\"input\":\"x\"}},\"to\":\"{STRANGER}\"}}\n"),
        "unknown_pod",
    );
    check(format!("{{{event}}}\n"), "not_allowed");
    check(format!("{{{event},{stranger}}}\n"), "unknown_pod");
    check(format!("{{{event},{impostor}}}\n"), "unknown_pod");
    check(format!("{{{event},\"from\":{{\"pod_id\":\"main\",\"life\":\"{life}\"}}}}\n"), "bad_request");
    for from in [&stranger, &impostor] {
        check(format!("{{\"method\":\"run\",\"params\":{{\"input\":\"x\"}},{from}}}\n"), "unknown_pod");
        check(format!("{{\"method\":\"status\",{from}}}\n"), "unknown_pod");
        for method in ["shutdown", "cancel", "resume", "subscribe"] {
            check(format!("{{\"method\":\"{method}\",{from}}}\n"), "not_allowed");
        }
    }
    assert!(
        world.raw("main", format!("{{\"method\":\"status\",\"to\":\"{life}\"}}\n").as_bytes()).contains("ok")
    );
    assert_eq!(world.count("main", "turn_started"), 0);
    assert_eq!(world.status("main")["status"], "idle");
}

#[test]
fn a_subscription_from_any_cursor_in_mid_turn_brings_each_item_once() {
    let step =
        |text: &str| json!({ "text": text, "tool_calls": [call("ListFiles", json!({}))], "delay_ms": 3 });
    let mut replies: Vec<Value> = (0..30).map(|n| step(&format!("step number {n}"))).collect();
    replies.push(json!({ "text": "the end of it all", "delay_ms": 5000 })); // so that each stream begins before the end
    let world = main_pod(json!(replies));
    world.ok("main", "run", json!({ "input": "go" }));
    let mut streams = Vec::new();
    let mut cursor = 0;
    while world.status("main")["status"] == "running" {
        let history = world.ok("main", "get_history", json!({ "since": cursor }));
        streams.push((cursor, world.subscribe("main", Some(cursor))));
        cursor = history["cursor"].as_u64().unwrap();
        if streams.len() == 12 {
            break;
        }
    }
    assert!(streams.len() > 3, "the turn was too short to look into");
    let is_end = |event: &Value| event["event"] == "item" && event["data"]["type"] == "turn_ended";
    for (since, mut events) in streams {
        events.until(is_end);
        let whole = world.history("main");
        assert_eq!(items_of(&events.seen), whole[usize::try_from(since).unwrap()..], "since {since}");
        let ends = events.seen.iter().filter(|event| event["event"] == "turn_ended").count();
        assert_eq!(ends, 1);
    }
    // Past the end counts as now.
    let mut late = world.subscribe("main", Some(1_000_000));
    assert_eq!(world.turn("main", "again")["result"], "finished");
    late.until_turn_ended();
    assert_eq!(items_of(&late.seen)[0]["type"], "turn_started");
}

#[test]
fn the_history_is_served_in_mid_turn_and_in_pages() {
    let world = main_pod(json!([
        { "text": "thinking", "tool_calls": [call("ListFiles", json!({}))] },
        { "text": "never", "delay_ms": 60_000 },
    ]));
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({ "input": "go" }));
    events.until(|event| event["event"] == "tool_result");
    wait_until("the result is in the history", || world.count("main", "tool_result") == 1);
    let history = world.ok("main", "get_history", json!({ "since": 0 }));
    let types: Vec<&str> =
        history["items"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["session", "turn_started", "input", "assistant", "tool_result"]);
    assert_eq!((&history["status"], &history["more"]), (&json!("running"), &json!(false)));
    assert_eq!(world.ok("main", "read_output", json!(null))["text"], "thinking");
    let past = world.ok("main", "get_history", json!({ "since": 999 }));
    assert_eq!(past["items"], json!([]));
    assert_eq!(world.ok("main", "cancel", json!({}))["cancelled"], true);
    assert_eq!(events.until_turn_ended()["result"], "cancelled");
    assert_eq!(world.ok("main", "cancel", json!({}))["cancelled"], false);
}

#[test]
fn each_accepted_turn_has_exactly_one_end() {
    let world = World::with_settings(
        json!({ "main": [
            { "text": "fine" },
            { "error": { "status": 400, "message": "no such model" } },
            { "text": "resumed" },
            { "text": "", "tool_calls": [call("ListFiles", json!({}))] },
            { "text": "", "tool_calls": [call("ListFiles", json!({}))] },
            { "text": "", "tool_calls": [call("ListFiles", json!({}))] },
            { "text": "never", "delay_ms": 60_000 },
            { "text": "slow", "delay_ms": 3000 },
            { "text": "with the queued one" },
        ] }),
        json!({ "limits": { "steps": 3 } }),
    );
    world.start(&[]);
    let mut events = world.subscribe("main", Some(0));
    let mut ends = Vec::new();
    let end = |events: &mut crate::world::Events, ends: &mut Vec<(u64, String)>| {
        let data = events.until_turn_ended();
        ends.push((data["turn"].as_u64().unwrap(), data["result"].as_str().unwrap().to_owned()));
    };
    world.ok("main", "run", json!({ "input": "1" }));
    end(&mut events, &mut ends);
    world.ok("main", "run", json!({ "input": "2" }));
    end(&mut events, &mut ends);
    wait_until("it is paused", || world.status("main")["status"] == "paused");
    assert_eq!(world.ok("main", "resume", json!(null))["turn"], 3);
    end(&mut events, &mut ends);
    world.ok("main", "run", json!({ "input": "4" }));
    end(&mut events, &mut ends);
    world.wait_idle("main");
    world.ok("main", "run", json!({ "input": "5" }));
    events.until(|event| event["event"] == "turn_started" && event["data"]["turn"] == 5);
    events.until(|event| event["data"]["detail"] == "waiting for the model");
    world.ok("main", "cancel", json!(null));
    end(&mut events, &mut ends);
    world.wait_idle("main");
    let first = world.ok("main", "run", json!({ "input": "6" }));
    let second = world.ok("main", "run", json!({ "input": "6 too" }));
    assert_eq!((&first["queued"], &second["queued"]), (&json!(false), &json!(true)));
    assert_eq!((&first["turn"], &second["turn"]), (&json!(6), &json!(6)));
    end(&mut events, &mut ends);
    let expected = ["finished", "failed", "finished", "limit", "cancelled", "finished"];
    let expected: Vec<(u64, String)> = (1..).zip(expected.map(str::to_owned)).collect();
    assert_eq!(ends, expected);
    world.wait_idle("main");
    assert_eq!((world.count("main", "turn_started"), world.count("main", "turn_ended")), (6, 6));
    let inputs: Vec<Value> =
        world.history("main").into_iter().filter(|item| item["type"] == "input").collect();
    assert_eq!(inputs.len(), 6, "each input exactly once: {inputs:?}");
}

#[test]
fn at_most_sixteen_clients_watch_a_pod() {
    let world = main_pod(json!([]));
    let mut watching: Vec<crate::world::Events> = (0..16).map(|_| world.subscribe("main", None)).collect();
    assert_eq!(code(&world, b"{\"method\":\"subscribe\"}\n"), "busy");
    assert_eq!(world.status("main")["status"], "idle");
    drop(watching.pop());
    wait_until("there is room again", || {
        world.raw("main", b"{\"method\":\"subscribe\"}\n").starts_with("{\"ok\"")
    });
}

#[test]
fn an_answer_that_is_nested_or_endless_is_an_error_for_the_asker() {
    use insomnia::wire::client::{self, Address};
    use insomnia::words::protocol::{Method, StatusReply};
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let levels =
        |open: &str, close: &str, n: usize| format!("{{\"ok\":{}0{}}}\n", open.repeat(n), close.repeat(n));
    let answers = [
        levels("[", "]", 120),
        levels("{\"a\":", "}", 120),
        levels("[", "]", 100_000),
        levels("{\"a\":", "}", 100_000),
        "\n".into(),
        "{\"ok\":{}}\n".into(),
        "{\"error\":{\"code\":\"new_code\",\"message\":\"x\"}}\n".into(),
        "not json\n".into(),
        "{\"ok\":{}".into(),
        String::new(),
    ];
    let count = answers.len();
    let serve = move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            let _ = stream.write_all(answer.as_bytes());
        }
    };
    let serve = std::thread::Builder::new().name("odd pod".into()).spawn(serve).unwrap();
    let address = Address { pod: "odd".into(), socket, life: None };
    for _ in 0..count {
        let address = address.clone();
        let ask = move || client::ask::<StatusReply>(&address, None, Method::Status);
        // On a stack as small as that of the threads that ask.
        let asked =
            std::thread::Builder::new().stack_size(insomnia::sys::thread::STACK_BYTES).spawn(ask).unwrap();
        let error = asked.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("\"odd\""), "{error}");
    }
    serve.join().unwrap();
}

#[test]
fn what_was_queued_for_a_turn_that_failed_reaches_the_next_one() {
    let world = main_pod(json!([
        { "error": { "status": 400, "message": "no" }, "delay_ms": 3000 },
        { "text": "all at once" },
    ]));
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({ "input": "a" }));
    assert_eq!(world.ok("main", "run", json!({ "input": "b" }))["queued"], true);
    assert_eq!(events.until_turn_ended()["result"], "failed");
    world.wait_idle("main");
    assert_eq!(world.turn("main", "c")["result"], "finished");
    let inputs: Vec<Value> = world
        .history("main")
        .into_iter()
        .filter(|item| item["type"] == "input")
        .map(|item| item["text"].clone())
        .collect();
    assert_eq!(inputs, ["a", "b", "c"]);
}
