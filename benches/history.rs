//! What a long session costs: the same questions to pods with 100, 1,000 and 10,000 items of 1 KiB, median of many,
//! and the memory beside the text.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a measurement speaks and stops where it fails"
)]

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::store::session::Session;
use insomnia::sys::process::{ErrorOutput, Program};
use insomnia::wire::client::{self, Address, Next};
use insomnia::words::message::Item;
use insomnia::words::protocol::{Method, StreamEvent};

const ROUNDS: usize = 200;

fn main() {
    println!(
        "  items     append     status  read_output  last item  middle page  subscribe       turn  memory/text"
    );
    for items in [100, 1_000, 10_000] {
        let place = tempfile::tempdir().unwrap();
        measure(place.path(), items);
    }
}

fn measure(place: &Path, items: u64) {
    std::fs::create_dir_all(place.join("config/insomnia")).unwrap();
    let script = place.join("script.json");
    std::fs::write(&script, json!({ "pods": {} }).to_string()).unwrap();
    let manifest = json!({ "provider": { "kind": "script", "file": script } });
    std::fs::write(place.join("config/insomnia/manifest.json"), manifest.to_string()).unwrap();

    let run = |program: &str, args: &[&str]| {
        let variables =
            [("INSOMNIA_RUNTIME_DIR", "run"), ("XDG_STATE_HOME", "state"), ("XDG_CONFIG_HOME", "config")];
        let variables = variables.map(|(name, folder)| (name.into(), place.join(folder).into()));
        let program = Program::new(program, args).only_env(variables).directory(place);
        let mut running = program.start(ErrorOutput::WithOutput).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let said = running.read_to_end(1 << 20, None, deadline).unwrap();
        assert!(running.wait(deadline).unwrap().success(), "{}", String::from_utf8_lossy(&said));
    };
    let (pod, insomnia) = (env!("CARGO_BIN_EXE_pod"), env!("CARGO_BIN_EXE_insomnia"));
    run(pod, &[]);
    let address = Address { pod: "main".into(), socket: place.join("run/main/sock"), life: None };
    let ask = |method: Method| client::ask::<Value>(&address, None, method).unwrap();
    let state_dir = ask(Method::Status)["state_dir"].as_str().unwrap().to_owned();
    run(insomnia, &["stop", "main"]);

    let session = Session::open(Path::new(&state_dir)).unwrap();
    let item = || Item::Input { text: "word ".repeat(205), from: None };
    (session.len()..items).for_each(|_| drop(session.append(item()).unwrap()));
    let append = median(|| drop(session.append(item()).unwrap()));
    let (last, text) =
        (session.len() - 1, std::fs::metadata(Path::new(&state_dir).join("history.jsonl")).unwrap().len());
    drop(session);

    run(pod, &["--resume"]);
    let status = median(|| drop(ask(Method::Status)));
    let read = median(|| drop(ask(Method::ReadOutput { since: None })));
    let page = |since| median(|| drop(ask(Method::GetHistory { since: Some(since) })));
    let (last, middle) = (page(last), page(items / 2));
    let subscribe = median(|| {
        let mut events = client::subscribe(&address, Some(items)).unwrap();
        events.next(Instant::now() + Duration::from_secs(5)).unwrap();
    });
    let turn = median(|| {
        let mut events = client::subscribe(&address, None).unwrap();
        ask(Method::Run { input: "go".into() });
        loop {
            let next = events.next(Instant::now() + Duration::from_secs(5)).unwrap();
            if matches!(next, Next::Event(event) if matches!(*event, StreamEvent::TurnEnded { .. })) {
                return;
            }
        }
    });
    let pid = ask(Method::Status)["pid"].clone();
    let memory = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let peak = memory.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    let ratio = format!("{peak_kib}/{} KiB", text >> 10);
    println!(
        "{items:>7} {append:>10.2?} {status:>10.2?} {read:>12.2?} {last:>10.2?} {middle:>12.2?} {subscribe:>10.2?} {turn:>10.2?}  {ratio}"
    );
    run(insomnia, &["stop", "main"]);
}

fn median(mut work: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times.swap_remove(ROUNDS / 2)
}
