//! What the design's table "Speed and size" asks for, and how costs grow: `cargo bench --bench figures [-- SECTION]`.
//!
//! Each row has its median, 99th percentile and count, and goes to `target/bench.json` too. Rows that compare take the
//! other program's command from the environment: `INSOMNIA_BENCH_TURN`, which asks the server at `OPENAI_BASE_URL` once
//! and ends, and `INSOMNIA_BENCH_SHELL`, which confines the command that follows it. `INSOMNIA_LONG=1` adds a build.
//! All is measured in `TMPDIR`; a real runtime directory lies in memory, as `TMPDIR=/dev/shm` does.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    clippy::wildcard_enum_match_arm,
    unreachable_pub,
    reason = "a measurement speaks and stops where it fails"
)]

#[path = "../tests/it/world.rs"]
mod world;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use serde_json::{Value, json};

use insomnia::store::life::{self, HeldLife};
use insomnia::store::paths::RuntimeDirectory;
use insomnia::store::scope_lock::ScopeLock;
use insomnia::store::session::Session;
use insomnia::sys::confine::View;
use insomnia::sys::process::{self, ErrorOutput, Program};
use insomnia::wire::sandbox::{Kept, Level, Plan, Sandbox};
use insomnia::words::allocation::{Allocation, AllocationState};
use insomnia::words::identity::{Pid, PodId, PodName};
use insomnia::words::limits::Limits;
use insomnia::words::message::Item;
use insomnia::words::scope::Rule;

use world::{PATIENCE, World, call, calls, lives, ran, spawn, wait_until};

const POD: &str = env!("CARGO_BIN_EXE_pod");
const INSOMNIA: &str = env!("CARGO_BIN_EXE_insomnia");

type Section = (&'static str, fn(&mut Figures));

const SECTIONS: [Section; 12] = [
    ("turn", turn),
    ("launch", launch),
    ("spawn", spawn_to_request),
    ("tools", tools),
    ("shell", shell),
    ("status", status),
    ("idle", idle),
    ("agents", agents),
    ("lock", lock),
    ("history", history),
    ("pods", pods),
    ("size", size),
];

fn main() {
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let mut figures = Figures::default();
    let place = format!("in {}", std::env::temp_dir().display());
    println!("{place:<62} {:>9} {:>9} {:>6}  reach", "median", "99th", "count");
    for (name, measure) in SECTIONS {
        if wanted.as_ref().is_none_or(|wanted| wanted == name) {
            measure(&mut figures);
        }
    }
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench.json");
    std::fs::write(&place, serde_json::to_string_pretty(&figures.rows).unwrap()).unwrap();
    println!("written to {}", place.display());
}

#[derive(Default)]
struct Figures {
    rows: Vec<Value>,
}

impl Figures {
    /// One row: what, in which unit, what it is to reach (median, then 99th; empty: nothing), and the samples.
    fn row(&mut self, what: &str, unit: &str, reach: &[f64], mut samples: Vec<f64>) {
        samples.sort_by(f64::total_cmp);
        let at = |percent: usize| samples[(samples.len() * percent / 100).min(samples.len() - 1)];
        let found = [at(50), at(99)];
        let is_missed = reach.iter().zip(found).any(|(reach, found)| found > *reach);
        let wanted = reach.iter().map(ToString::to_string).collect::<Vec<_>>().join(" / ");
        let verdict = if is_missed { " missed" } else { "" };
        let what = format!("{what}, {unit}");
        println!("{what:<62} {:>9.3} {:>9.3} {:>6}  {wanted}{verdict}", found[0], found[1], samples.len());
        self.rows.push(json!({ "what": what, "median": found[0], "p99": found[1], "count": samples.len(), "reach": reach }));
    }

    fn skip(&mut self, what: &str, reason: &str) {
        println!("{what:<62} skipped: {reason}");
        self.rows.push(json!({ "what": what, "skipped": reason }));
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begin = Instant::now();
    let value = work();
    (value, millis(begin.elapsed()))
}

/// A model server that answers at once, in the format of Chat Completions.
struct Server {
    url: String,
    /// When each request was there as a whole, and of which pod it was.
    requests: Arc<Mutex<Vec<(Instant, String)>>>,
}

impl Server {
    /// `reply` gets the pod_id, the number of tool results in the conversation, and what has been asked so far.
    fn start(reply: impl Fn(&str, usize) -> Value + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let requests: Arc<Mutex<Vec<(Instant, String)>>> = Arc::default();
        let (log, reply) = (Arc::clone(&requests), Arc::new(reply));
        let serve = move || {
            for mut stream in listener.incoming().flatten() {
                let (log, reply) = (Arc::clone(&log), Arc::clone(&reply));
                let one = move || {
                    let Some(body) = read_request(&mut stream) else { return };
                    let pod_id =
                        body.split("You are pod \\\"").nth(1).and_then(|rest| rest.split('\\').next());
                    let pod_id = pod_id.unwrap_or_default().to_owned();
                    log.lock().unwrap().push((Instant::now(), pod_id.clone()));
                    let delta = reply(&pod_id, body.matches("\"role\":\"tool\"").count());
                    let finish = if delta.get("tool_calls").is_some() { "tool_calls" } else { "stop" };
                    let chunk =
                        json!({ "choices": [{ "index": 0, "delta": delta, "finish_reason": finish }] });
                    let head =
                        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
                    let _ = write!(stream, "{head}data: {chunk}\n\ndata: [DONE]\n\n"); // it may be gone
                };
                std::thread::Builder::new().spawn(one).unwrap();
            }
        };
        std::thread::Builder::new().spawn(serve).unwrap();
        Server { url, requests }
    }

    /// A program that asks this server.
    fn asked_by(&self, program: Program) -> Program {
        program.env("OPENAI_BASE_URL", &self.url).env("OPENAI_API_KEY", "none")
    }

    fn taken(&self) -> Vec<(Instant, String)> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

fn read_request(stream: &mut std::net::TcpStream) -> Option<String> {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().to_ascii_lowercase().strip_prefix("content-length:") {
            Some(value) => length = value.trim().parse().ok()?,
            None if line.trim_end().is_empty() => break,
            None => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    String::from_utf8(body).ok()
}

fn says(text: &str) -> Value {
    json!({ "content": text })
}

fn tool_call(name: &str, input: Value) -> Value {
    let function = json!({ "name": name, "arguments": input.to_string() });
    json!({ "tool_calls": [{ "index": 0, "id": "c", "type": "function", "function": function }] })
}

/// Collects the ended processes that nobody waits for, and returns the CPU time of all collected ones in ms.
fn reap() -> f64 {
    while waitpid(None, Some(WaitPidFlag::WNOHANG)).is_ok_and(|status| status != WaitStatus::StillAlive) {}
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap();
    (usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e3
}

/// Runs `count` of these at once to their end, and all that they leave behind to its end. Wall and CPU time in ms.
fn at_once(world: &World, count: usize, program: &dyn Fn() -> Program) -> (f64, f64) {
    let before = reap();
    let ((), wall) = timed(|| {
        let mut all: Vec<_> = (0..count).map(|_| program().start(ErrorOutput::WithOutput).unwrap()).collect();
        for running in &mut all {
            let output = running.read_to_end(1 << 20, None, Instant::now() + PATIENCE).unwrap();
            let status = running.wait(Instant::now() + PATIENCE).unwrap();
            assert!(status.success(), "{}", String::from_utf8_lossy(&output));
        }
    });
    wait_until("all have ended", || world.processes().is_empty());
    (wall, reap() - before)
}

/// Wall and CPU time of `count` turns at once, ours and the other program's.
fn turns(figures: &mut Figures, what: &str, count: usize, rounds: usize, reach: [f64; 2]) {
    let server = Server::start(|_, _| says("ok"));
    let world = World::new();
    let ours = || server.asked_by(world.program(INSOMNIA, ["run", "--read-only", "say ok"]));
    let other = std::env::var("INSOMNIA_BENCH_TURN");
    let mut measure = |what: String, program: &dyn Fn() -> Program, reach: [f64; 2]| {
        at_once(&world, count, program); // what is read from the disk is read
        let (wall, cpu) = (0..rounds).map(|_| at_once(&world, count, program)).unzip();
        figures.row(&format!("{what}: wall"), "ms", &reach[..1], wall);
        figures.row(&format!("{what}: CPU"), "ms", &reach[1..], cpu);
    };
    nix::sys::prctl::set_child_subreaper(true).unwrap(); // pods are nobody's children
    measure(what.to_owned(), &ours, reach);
    match &other {
        Ok(command) => {
            let theirs = || server.asked_by(world.program("sh", ["-c", command]));
            measure(format!("{what}, by the other program"), &theirs, [f64::MAX; 2]);
        }
        Err(_) => figures.skip(&format!("{what}, by the other program"), "INSOMNIA_BENCH_TURN is not set"),
    }
    nix::sys::prctl::set_child_subreaper(false).unwrap();
}

fn turn(figures: &mut Figures) {
    turns(figures, "one headless turn over HTTP", 1, 50, [40.0, 30.0]);
}

fn agents(figures: &mut Figures) {
    turns(figures, "16 agents at once, a turn each", 16, 10, [350.0, 600.0]);
    let server = Server::start(|_, _| {
        std::thread::sleep(Duration::from_millis(700)); // all are there, each with its curl
        says("ok")
    });
    let world = World::new();
    let program = || server.asked_by(world.program(INSOMNIA, ["run", "--read-only", "say ok"]));
    let mut all: Vec<_> = (0..16).map(|_| program().start(ErrorOutput::WithOutput).unwrap()).collect();
    wait_until("all have asked", || server.requests.lock().unwrap().len() == 16);
    let pss = world.processes().into_iter().map(|pid| rollup(pid, &["Pss:"]) / 1e3).sum();
    figures.row("16 agents at once: PSS in all, with their curls and commands", "MB", &[80.0], vec![pss]);
    for running in &mut all {
        running.read_to_end(1 << 20, None, Instant::now() + PATIENCE).unwrap();
    }
}

/// The sum of these fields of `/proc/PID/smaps_rollup`, in kB.
fn rollup(pid: i32, fields: &[&str]) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let lines = text.lines().filter(|line| fields.iter().any(|field| line.starts_with(field)));
    lines.filter_map(|line| line.split_ascii_whitespace().nth(1)?.parse::<f64>().ok()).sum()
}

fn launched(world: &World, name: &str) -> f64 {
    let scope = format!("{name}:write");
    let (ran, wall) = timed(|| ran(world.program(POD, ["--name", name, "--scope", &scope])));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    wall
}

/// From the request to the end of the process, in ms.
fn shut_down(world: &World, pod_id: &str) -> f64 {
    let pid = world.pid(pod_id);
    let begin = Instant::now();
    world.ok(pod_id, "shutdown", Value::Null);
    while lives(pid) {
        std::thread::sleep(Duration::from_micros(50));
    }
    millis(begin.elapsed())
}

fn launch(figures: &mut Figures) {
    let world = World::with_script(json!({}));
    let (up, down) = (0..200).map(|_| (launched(&world, "a"), shut_down(&world, "a"))).unzip();
    figures.row("launch command to accepting connections", "ms", &[4.0], up);
    figures.row("shutdown request to process gone", "ms", &[5.0], down);
}

fn spawn_to_request(figures: &mut Figures) {
    let is_asked = Arc::new(Mutex::new(false)); // the child's first request is there
    let flag = Arc::clone(&is_asked);
    let server = Server::start(move |pod_id, results| {
        match (pod_id, results % 2) {
            ("main", 0) if results == 100 => return says("done"),
            ("main", 0) => return tool_call("SpawnPod", json!({ "name": "c", "task": "go" })),
            ("main", _) => {}
            _ => {
                *flag.lock().unwrap() = true;
                return says("ok");
            }
        }
        wait_until("the child has asked", || std::mem::take(&mut *flag.lock().unwrap()));
        tool_call("StopPod", json!({ "pod_id": "c" }))
    });
    let world = World::new();
    world.manifest(json!({ "wake_on_events": false }));
    world.start_with_env(&[("OPENAI_BASE_URL", &server.url), ("OPENAI_API_KEY", "none")], &[]);
    let events = events_of_turn(&world);
    let begun = events.iter().filter(|(_, event)| is_call(event, "SpawnPod")).map(|(at, _)| *at);
    let asked = server.taken().into_iter().filter(|(_, pod_id)| pod_id == "c").map(|(at, _)| at);
    let samples =
        begun.zip(asked).map(|(begun, asked)| millis(asked.saturating_duration_since(begun))).collect();
    figures.row("spawn call to the child's first model request over HTTP", "ms", &[15.0], samples);
}

fn is_call(event: &Value, tool: &str) -> bool {
    event["event"] == "tool_call" && event["data"]["name"] == tool
}

/// One turn of `main`, and when each of its events came.
fn events_of_turn(world: &World) -> Vec<(Instant, Value)> {
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({ "input": "go" }));
    let mut seen = Vec::new();
    while seen.last().is_none_or(|(_, event): &(Instant, Value)| event["event"] != "turn_ended") {
        let event = events.next().unwrap();
        seen.push((Instant::now(), event));
    }
    seen
}

/// How long each call of this tool took, from its event to that of its result, in ms.
fn calls_of(events: &[(Instant, Value)], tool: &str) -> Vec<f64> {
    let began = events.iter().filter(|(_, event)| is_call(event, tool));
    let took = began.map(|(began, call)| {
        let is_result =
            |event: &Value| event["event"] == "tool_result" && event["data"]["id"] == call["data"]["id"];
        let (ended, result) = events.iter().find(|(at, event)| at >= began && is_result(event)).unwrap();
        assert_eq!(result["data"]["ok"], true, "{result}");
        millis(*ended - *began)
    });
    took.collect()
}

fn between(times: &[Instant]) -> Vec<f64> {
    times.windows(2).map(|pair| millis(pair[1] - pair[0])).collect()
}

fn scripted(replies: Vec<Value>) -> World {
    let settings = json!({ "wake_on_events": false, "limits": { "steps": 100_000 } });
    let world = World::with_settings(json!({ "main": replies }), settings);
    world.start(&["--scope", ".:write"]);
    world
}

fn tools(figures: &mut Figures) {
    let spawns = [calls(&[spawn("c", &["c:write"])]), calls(&[call("StopPod", json!({ "pod_id": "c" }))])];
    let world = scripted(spawns.iter().cycle().take(200).cloned().collect());
    figures.row(
        "SpawnPod call, script provider",
        "ms",
        &[10.0],
        calls_of(&events_of_turn(&world), "SpawnPod"),
    );

    let server = Server::start(|_, results| match results {
        100 => says("done"),
        _ => tool_call("ListFiles", json!({})),
    });
    let world = World::new();
    world.start_with_env(&[("OPENAI_BASE_URL", &server.url), ("OPENAI_API_KEY", "none")], &[]);
    events_of_turn(&world);
    let asked: Vec<Instant> = server.taken().into_iter().map(|(at, _)| at).collect();
    figures.row("tool round over HTTP, with its curl", "ms", &[10.0], between(&asked));

    let world = scripted(vec![calls(&[call("ListFiles", json!({}))]); 500]);
    let events = events_of_turn(&world);
    let rounds: Vec<Instant> =
        events.iter().filter(|(_, e)| is_call(e, "ListFiles")).map(|(at, _)| *at).collect();
    figures.row("tool round, script provider", "ms", &[1.0], between(&rounds));

    let world = scripted(vec![calls(&[call("Shell", json!({ "command": "exit 0" }))]); 200]);
    let bare: Vec<f64> =
        (0..200).map(|_| timed(|| ran(Program::new("/bin/sh", ["-c", "exit 0"]))).1).collect();
    let middle = |mut samples: Vec<f64>| {
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    };
    let bare = middle(bare);
    let over = |samples: Vec<f64>| samples.into_iter().map(|sample| sample - bare).collect();
    let level = world.status("main")["sandbox"].clone();
    let shell = over(calls_of(&events_of_turn(&world), "Shell"));
    figures.row(&format!("Shell call over the bare command ({level})"), "ms", &[2.0], shell);
    match std::env::var("INSOMNIA_BENCH_SHELL") {
        Ok(command) => {
            let command = format!("exec {command} /bin/sh -c 'exit 0'");
            let samples =
                (0..200).map(|_| timed(|| ran(Program::new("/bin/sh", ["-c", &command]))).1).collect();
            figures.row("the same by the other program", "ms", &[], over(samples));
        }
        Err(_) => figures.skip("the same by the other program", "INSOMNIA_BENCH_SHELL is not set"),
    }
}

/// What confining one command costs below the tool: a helper that only supervises, and one that makes namespaces.
fn shell(figures: &mut Figures) {
    let far = || Instant::now() + PATIENCE;
    let place = tempfile::tempdir().unwrap();
    let scope = place.path().canonicalize().unwrap().join("scope");
    std::fs::create_dir_all(scope.join("a/lent")).unwrap();
    let life = File::create(place.path().join("life")).unwrap();
    let sandbox = Sandbox::with_program(POD.into(), life);
    let view = View {
        writable: [scope.clone()].into(),
        read_only: [scope.join("a/lent")].into(),
        hidden: ["/root".into()].into(),
        network: true,
        ..View::default()
    };
    let run = |level| {
        let command = ["/bin/sh", "-c", "exit 0"].map(str::to_owned).to_vec();
        let plan = Plan { level, view: view.clone(), command, directory: scope.clone(), variables: vec![] };
        timed(|| sandbox.run(&plan, &mut Kept::default(), None, far()).unwrap()).1
    };
    let bare = || timed(|| ran(Program::new("/bin/sh", ["-c", "exit 0"]))).1;
    figures.row("bare command", "ms", &[], (0..200).map(|_| bare()).collect());
    for (name, level) in [("only supervised", Level::Unconfined), ("in namespaces", Level::Namespaces)] {
        figures.row(&format!("command {name}"), "ms", &[], (0..200).map(|_| run(level.clone())).collect());
    }
}

/// How long one request of a person takes, from the connection to its close, in us.
fn asked(world: &World, request: &Value) -> f64 {
    let line = format!("{request}\n");
    let (reply, took) = timed(|| {
        let mut stream = UnixStream::connect(world.socket("main")).unwrap();
        stream.write_all(line.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    });
    assert!(reply.starts_with("{\"ok\""), "{reply}");
    took * 1e3
}

fn ask_status(world: &World) -> f64 {
    asked(world, &json!({ "method": "status" }))
}

fn status(figures: &mut Figures) {
    let world = scripted(vec![calls(&[spawn("child", &[])])]);
    let samples = (0..2_000).map(|_| ask_status(&world)).collect();
    figures.row("connect, status, close", "us", &[80.0, 200.0], samples);
    events_of_turn(&world);
    wait_until("the child is quiet", || world.status("child")["events_in_flight"] == 0);
    let (from, to) = (world.life("child"), world.life("main"));
    let report = json!({ "method": "pod_event", "params": { "event": "turn_ended", "pod_name": "child" },
        "from": { "pod_id": "child", "life": from }, "to": to });
    let line = format!("{report}\n");
    let samples = (0..200).map(|_| {
        let (reply, took) = timed(|| world.raw("main", line.as_bytes()));
        assert!(reply.starts_with("{\"ok\""), "{reply}");
        took
    });
    figures.row("child's event to the notice buffer, and the answer", "ms", &[1.0], samples.collect());
}

fn idle(figures: &mut Figures) {
    let world = World::with_script(json!({}));
    let pids: Vec<i32> = (0..20)
        .map(|n| {
            let name = format!("p{n}");
            launched(&world, &name);
            world.pid(&name)
        })
        .collect();
    let ticks = || -> f64 {
        let of = |pid: &i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let fields: Vec<f64> = stat
                .rsplit(')')
                .next()
                .unwrap()
                .split_ascii_whitespace()
                .skip(11)
                .take(2)
                .map(|field| field.parse().unwrap())
                .collect();
            fields[0] + fields[1]
        };
        pids.iter().map(of).sum()
    };
    std::thread::sleep(Duration::from_millis(500));
    let (before, began) = (ticks(), Instant::now());
    std::thread::sleep(Duration::from_secs(5));
    let cpu = (ticks() - before) / began.elapsed().as_secs_f64() / 20.0; // ticks of 10 ms: per cent of a core
    let private = pids.iter().map(|pid| rollup(*pid, &["Private_Clean:", "Private_Dirty:"]) / 1e3).collect();
    let pss = pids.iter().map(|pid| rollup(*pid, &["Pss:"]) / 1e3).collect();
    figures.row("idle pod of 20: private memory", "MB", &[0.4], private);
    figures.row("idle pod of 20: PSS", "MB", &[0.6], pss);
    figures.row("idle pod of 20: CPU", "% of a core", &[0.0], vec![cpu]);
}

fn entry(number: usize) -> Allocation {
    let pid = process::own_pid();
    let id = format!("pod-{number}");
    Allocation {
        pod_id: PodId::new(id.clone()).unwrap(),
        name: PodName::new("pod").unwrap(),
        pid: Pid::new(pid).unwrap(),
        start_time: process::process_stat(pid).unwrap().start_time,
        life: life::new_life().unwrap(),
        state: AllocationState::Live,
        spawned_by: None,
        socket: format!("/run/user/1000/insomnia/{id}/sock"),
        scope_allow: vec![Rule::try_from(format!("/home/somebody/project/part-{number}:write")).unwrap()],
        delegated_from: None,
        since: 1_700_000_000,
        extra: std::collections::BTreeMap::new(),
    }
}

/// One change of `scope.lock`: its lock, reading, probing of every life, checking and replacing.
fn lock(figures: &mut Figures) {
    let place = world::memory_place();
    let runtime = Arc::new(RuntimeDirectory::open_or_create(&place.path().join("run")).unwrap());
    let lock = ScopeLock::new(Arc::clone(&runtime));
    let limits = Limits { pods_per_user: 10_000, ..Limits::default() };
    let register = |entries: Vec<Allocation>| -> Vec<HeldLife> {
        let edited = lock.edit(None, |table| {
            let register = |entry: Allocation| {
                table.register(entry.clone(), &limits)?;
                HeldLife::create(&runtime, &entry)
            };
            entries.into_iter().map(register).collect()
        });
        edited.unwrap().value
    };
    let mut lives: Vec<HeldLife> = Vec::new();
    for (number, reach) in [(1, &[0.15][..]), (10, &[]), (100, &[0.5]), (1_000, &[5.0])] {
        lives.extend(register((lives.len()..number).map(entry).collect()));
        let mut samples = Vec::new();
        for _ in 0..(20_000 / number).clamp(200, 2_000) {
            let guest = entry(100_000);
            let (held, took) = timed(|| register(vec![guest.clone()]));
            samples.push(took);
            samples.push(timed(|| lock.edit(None, |table| Ok(table.release(&guest.life))).unwrap()).1);
            life::remove(&runtime, &guest.life);
            drop(held);
        }
        figures.row(&format!("lock update with {number} allocations"), "ms", reach, samples);
    }
}

fn history(figures: &mut Figures) {
    let world = scripted(vec![calls(&[call("ListFiles", json!({}))]); 5_000]);
    let events = events_of_turn(&world);
    let rounds: Vec<Instant> =
        events.iter().filter(|(_, e)| is_call(e, "ListFiles")).map(|(at, _)| *at).collect();
    for items in [100, 1_000, 9_900] {
        let round = items / 2; // a call and a result each
        let samples = between(&rounds[round - 40..round + 40]);
        figures.row(&format!("growth: tool round at item {items} of a history"), "ms", &[], samples);
    }
    let pid = world.pid("main");
    figures.row(
        "growth: memory (VmRSS) with 10,000 items",
        "MB",
        &[],
        vec![world::memory_kib(pid, "VmRSS") as f64 / 1e3],
    );
    shut_down(&world, "main");
    let resumed = timed(|| world.start(&["--resume", "--name", "main"])).1;
    figures.row("growth: resume with 10,000 items", "ms", &[], vec![resumed]);
    [100, 1_000, 10_000].into_iter().for_each(|items| long_session(figures, items));
}

/// What is asked of a pod whose history has so many items of 1 KiB.
fn long_session(figures: &mut Figures, items: u64) {
    let world = scripted(Vec::new());
    let folder = world.status("main")["state_dir"].as_str().unwrap().to_owned();
    shut_down(&world, "main");
    let session = Session::open(Path::new(&folder)).unwrap();
    let append = || {
        let item = Item::Input { text: "word ".repeat(205), from: None };
        timed(|| session.append(item).unwrap()).1 * 1e3
    };
    for _ in session.len()..items {
        append();
    }
    let appended = (0..200).map(|_| append()).collect();
    figures.row(&format!("growth: append an item to {items}"), "us", &[], appended);
    let last = session.len() - 1;
    drop(session);
    world.start(&["--resume"]);
    for (what, method, params) in [
        ("status", "status", Value::Null),
        ("read_output", "read_output", Value::Null),
        ("the last item", "get_history", json!({ "since": last })),
        ("a page from the middle", "get_history", json!({ "since": items / 2 })),
    ] {
        let request = json!({ "method": method, "params": params });
        let samples = (0..200).map(|_| asked(&world, &request)).collect();
        figures.row(&format!("growth: {what} of {items} items"), "us", &[], samples);
    }
}

fn pods(figures: &mut Figures) {
    let world = World::with_settings(json!({}), json!({ "limits": { "pods_per_user": 300 } }));
    world.start(&[]);
    let mut live = 1;
    for wanted in [1, 10, 50, 100, 200] {
        while live < wanted {
            launched(&world, &format!("p{live}"));
            live += 1;
        }
        let (up, down): (Vec<f64>, Vec<f64>) =
            (0..20).map(|_| (launched(&world, "guest"), shut_down(&world, "guest"))).unzip();
        figures.row(&format!("growth: launch beside {live} pods"), "ms", &[], up);
        figures.row(&format!("growth: shutdown beside {live} pods"), "ms", &[], down);
        let samples = (0..200).map(|_| ask_status(&world)).collect();
        figures.row(&format!("growth: status beside {live} pods"), "us", &[], samples);
        let lists = (0..10).map(|_| timed(|| assert_eq!(world.insomnia(["list"]).code, Some(0))).1).collect();
        figures.row(&format!("growth: insomnia list of {live} pods"), "ms", &[], lists);
    }
}

fn size(figures: &mut Figures) {
    for (name, path, reach) in [("pod", POD, &[1.5][..]), ("insomnia", INSOMNIA, &[])] {
        let bytes = std::fs::metadata(path).unwrap().len() as f64;
        figures.row(&format!("size of the {name} binary"), "MB", reach, vec![bytes / 1e6]);
    }
    let cargo = |args: &[&str]| {
        let program = Program::new(env!("CARGO"), args).directory(Path::new(env!("CARGO_MANIFEST_DIR")));
        let mut running = program.start(ErrorOutput::WithOutput).unwrap();
        let output = running.read_to_end(1 << 20, None, Instant::now() + Duration::from_secs(1_800)).unwrap();
        assert!(running.wait(Instant::now() + PATIENCE).unwrap().success());
        String::from_utf8_lossy(&output).into_owned()
    };
    let tree = cargo(&["tree", "--offline", "-e", "normal,build", "--prefix", "none", "-f", "{p}"]);
    let crates: BTreeSet<&str> = tree.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    figures.row("crates in the default tree, this one counted", "crates", &[30.0], vec![crates.len() as f64]);
    if !world::is_long() {
        return figures.skip("clean release build: CPU", "INSOMNIA_LONG is not set");
    }
    let place = tempfile::tempdir().unwrap();
    let before = reap();
    cargo(&["build", "--release", "--offline", "--target-dir", place.path().to_str().unwrap()]);
    figures.row("clean release build: CPU", "s", &[40.0], vec![(reap() - before) / 1e3]);
}
