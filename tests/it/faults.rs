//! The n-th system call of a start, a spawn, a stop, a shell call, a turn, an end or a repair fails, or is the last
//! one of its process: no panic, no hang, no broken file, nothing unconfined, nobody left, and what comes next works.
//!
//! A fixed sample in each run; every call, error and number by `INSOMNIA_LONG=1 cargo test --release --test it faults`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use insomnia::store::life::{self, Holding};
use insomnia::store::paths::RuntimeDirectory;
use insomnia::sys::process::{ErrorOutput, Output, Running};
use insomnia::words::identity::Life;

use crate::spawn_kills::table_fits;
use crate::world::{
    PATIENCE, World, call, calls, has_tool, is_at_rest, is_long, lives, skip, spawn, wait_until,
};

/// What is done while calls fail: by a command under strace from its beginning, or by a pod that strace has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Deed {
    /// A pod starts in the foreground and reclaims the one before it, which was killed.
    Start,
    /// The launch command starts one in the background.
    Launch,
    /// `insomnia stop` of an idle pod.
    Stop,
    /// `insomnia scope repair` of a damaged table.
    Repair,
    /// A turn of SpawnPod and StopPod, and all that the child does.
    Spawn,
    /// A turn of Shell.
    Shell,
    /// A turn of WriteFile and ReadFile.
    Turn,
    /// The end of a pod that was asked to end.
    End,
}

const DEEDS: [Deed; 8] =
    [Deed::Start, Deed::Launch, Deed::Stop, Deed::Repair, Deed::Spawn, Deed::Shell, Deed::Turn, Deed::End];

const CALLS: [&str; 12] = [
    "openat",
    "write",
    "fsync",
    "?rename,?renameat,?renameat2",
    "flock",
    "?mkdir,?mkdirat",
    "bind",
    "connect",
    "accept4",
    "pipe2",
    "?clone,?clone3,?fork,?vfork",
    "execve",
];

const KILL: &str = "signal=SIGKILL";

const ERRORS: [&str; 6] = ["EIO", "ENOSPC", "EMFILE", "EACCES", "EINTR", "ENOMEM"];

/// Which call meets what: the `n`th of these calls in each thread.
#[derive(Debug, Clone, Copy)]
struct Fault {
    calls: &'static str,
    action: &'static str,
    n: usize,
}

/// What was seen over all rounds.
#[derive(Debug, Default)]
struct Seen {
    tried: AtomicUsize,
    met: AtomicUsize,
    longest_millis: AtomicUsize,
    by_deed: Mutex<BTreeMap<Deed, usize>>,
}

/// A world with a pod that nothing may happen to and one whose turns are all alike.
struct Stage {
    world: World,
    deed: Deed,
    keeper: Value,
    main: i32,
}

impl Stage {
    fn new(deed: Deed) -> Stage {
        let world = World::new();
        let outside = world.path("outside");
        std::fs::create_dir_all(&outside).unwrap();
        let command = format!("echo x > {}/escaped; echo x > m/inside; true", outside.display());
        let child = spawn("child", &["m/lent:write"]);
        let stop = call("StopPod", json!({ "pod_id": "child" }));
        let reply = match deed {
            Deed::Spawn => calls(&[child, stop]),
            Deed::Shell => calls(&[call("Shell", json!({ "command": command }))]),
            _ => calls(&[
                call("WriteFile", json!({ "path": "m/f", "content": "x" })),
                call("ReadFile", json!({ "path": "m/f" })),
            ]),
        };
        // One request in each turn, so that a turn that fails early leaves the next one its reply.
        let replies = json!({ "pods": { "main": vec![reply; 1000] } });
        std::fs::write(world.path("script.json"), replies.to_string()).unwrap();
        world.manifest(json!({
            "provider": { "kind": "script", "file": world.path("script.json") },
            "wake_on_events": false,
            "limits": { "steps": 1, "launch_seconds": 2, "stop_seconds": 2 },
        }));
        world.start(&["--name", "keeper", "--scope", "kept:write"]);
        world.start(&["--scope", "m:write"]);
        let (keeper, main) = (world.entry("keeper").unwrap(), world.pid("main"));
        Stage { world, deed, keeper, main }
    }

    fn trace_path(&self) -> PathBuf {
        self.world.path("trace")
    }

    fn strace(&self, fault: Fault, rest: &[&str]) -> Running {
        let Fault { calls, action, n } = fault;
        let trace = self.trace_path();
        let (only, inject) = (format!("trace={calls}"), format!("inject={calls}:{action}:when={n}"));
        let args = ["-f", "-q", "-o", trace.to_str().unwrap(), "-e", &only, "-e", &inject];
        self.world.program("strace", args.iter().chain(rest)).start(ErrorOutput::Separate).unwrap()
    }

    /// Does the deed with this fault and judges what is left. Whether the fault was met; `None` where nobody may
    /// trace a running process.
    fn play(&self, fault: Fault, seen: &Seen) -> Option<bool> {
        let what = format!("{:?}: {fault:?}", self.deed);
        let _ = std::fs::remove_file(self.trace_path());
        let begin = Instant::now();
        let is_whole = match self.deed {
            Deed::Start => self.command(fault, &[POD, "--foreground", "--name", "x", "--scope", "s:write"]),
            Deed::Launch => self.command(fault, &[POD, "--name", "x", "--scope", "s:write"]),
            Deed::Stop => {
                self.world.start(&["--name", "x", "--scope", "s:write"]);
                self.command(fault, &[INSOMNIA, "stop", "x"])
            }
            Deed::Repair => {
                std::fs::write(self.world.runtime().join("scope.lock"), "{").unwrap();
                self.command(fault, &[INSOMNIA, "scope", "repair"])
            }
            Deed::Spawn | Deed::Shell | Deed::Turn => self.turn(fault)?,
            Deed::End => self.end(fault)?,
        };
        let millis = usize::try_from(begin.elapsed().as_millis()).unwrap();
        seen.longest_millis.fetch_max(millis, Ordering::SeqCst);
        self.judge(&what);
        let trace = std::fs::read_to_string(self.trace_path()).unwrap_or_default();
        // Strace does not mark a call before which it kills.
        let is_met = trace.contains("(INJECTED)") || fault.action == KILL && !is_whole;
        seen.tried.fetch_add(1, Ordering::SeqCst);
        seen.met.fetch_add(usize::from(is_met), Ordering::SeqCst);
        *seen.by_deed.lock().unwrap().entry(self.deed).or_default() += usize::from(is_met);
        Some(is_met)
    }

    /// Runs a command that must come to an end, or a pod that must be ready, within ten seconds. Whether it said so.
    fn command(&self, fault: Fault, command: &[&str]) -> bool {
        let what = format!("{:?}: {fault:?}", self.deed);
        let begin = Instant::now();
        let mut running = self.strace(fault, command);
        let mut line = [0; 4096];
        let is_whole = loop {
            let soon = Instant::now() + Duration::from_millis(50);
            match running.read(&mut line, None, soon).unwrap() {
                Output::End => break false,
                Output::Bytes(_) if self.deed == Deed::Start || self.deed == Deed::Launch => break true,
                // Its command was killed, or its ready line failed, and the pod goes on without it.
                Output::TimedOut if self.deed != Deed::Stop && self.x_answers() => break false,
                Output::Bytes(_) | Output::TimedOut | Output::Cancelled => {
                    assert!(begin.elapsed() < Duration::from_secs(10), "{what}: hangs");
                }
            }
        };
        if matches!(self.deed, Deed::Start | Deed::Launch) {
            self.end_x(&what);
        }
        running.wait(Instant::now() + PATIENCE).unwrap_or_else(|error| panic!("{what}: {error}"));
        let said = running.error_text(1 << 16);
        assert!(!said.contains("panicked"), "{what}: {said}");
        is_whole || self.deed == Deed::Stop && !self.is_killed()
    }

    fn is_killed(&self) -> bool {
        std::fs::read_to_string(self.trace_path()).is_ok_and(|text| text.contains("killed by SIGKILL"))
    }

    /// Whether x lives and accepts connections; the entry of the one before it may still be there.
    fn x_answers(&self) -> bool {
        self.pid("x").is_some_and(lives) && UnixStream::connect(self.world.socket("x")).is_ok()
    }

    fn pid(&self, pod_id: &str) -> Option<i32> {
        i32::try_from(self.world.entry(pod_id)?["pid"].as_i64()?).ok()
    }

    /// Kills x, whose entry stays for whoever comes next, and waits until its life is free.
    fn end_x(&self, what: &str) {
        let Some(entry) = self.world.entry("x") else { return };
        let pid = i32::try_from(entry["pid"].as_i64().unwrap()).unwrap();
        let life = Life::new(entry["life"].as_str().unwrap()).unwrap();
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // dead already is fine
        let runtime = RuntimeDirectory::open(&self.world.runtime()).unwrap();
        wait_until(&format!("{what}: x is gone"), || {
            !lives(pid) && life::probe(&runtime, &life) != Holding::Held
        });
    }

    /// Has strace come to all threads of a pod, and to those that it makes.
    fn attach(&self, fault: Fault, pid: i32) -> Option<Running> {
        let mut strace = self.strace(fault, &["-p", &pid.to_string()]);
        let strace_pid = i32::try_from(strace.id()).unwrap();
        let tracer = format!("TracerPid:\t{strace_pid}\n");
        wait_until("strace is there", || {
            let mut tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            !lives(strace_pid)
                || tasks.all(|task| {
                    let status = std::fs::read_to_string(task.path().join("status"));
                    status.is_ok_and(|text| text.contains(&tracer))
                })
        });
        if lives(strace_pid) || !lives(pid) {
            return Some(strace);
        }
        let said = strace.error_text(1000);
        assert!(said.contains("not permitted"), "{said}");
        skip("nobody may trace a running process here");
        None
    }

    fn turn(&self, fault: Fault) -> Option<bool> {
        let what = format!("{:?}: {fault:?}", self.deed);
        let mut strace = self.attach(fault, self.main)?;
        let begin = Instant::now();
        self.world.raw("main", b"{\"method\":\"run\",\"params\":{\"input\":\"go\"}}\n"); // may be refused
        let is_running = || {
            let reply = self.world.raw("main", b"{\"method\":\"status\"}\n"); // none where this very answer fails
            serde_json::from_str(&reply).map_or(true, |reply: Value| reply["ok"]["status"] == "running")
        };
        while is_running() {
            assert!(begin.elapsed() < Duration::from_secs(10), "{what}: hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
        // A child that could not be stopped is killed; whatever else the turn started ends by itself.
        let strace_pid = i32::try_from(strace.id()).unwrap();
        let ours = [self.main, self.pid("keeper").unwrap(), strace_pid];
        while self.world.processes().iter().any(|pid| !ours.contains(pid)) {
            assert!(begin.elapsed() < Duration::from_secs(20), "{what}: somebody stays");
            if let Some(pid) = self.pid("child").filter(|pid| *pid != self.main) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // dead already is fine
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // A thread that comes or goes while strace leaves may stay stopped.
        wait_until(&format!("{what}: the pod is at rest"), || is_at_rest(self.main));
        kill(Pid::from_raw(strace_pid), Signal::SIGTERM).unwrap();
        let _ = strace.wait(Instant::now() + Duration::from_secs(3)); // one that does not leave is killed
        Some(true)
    }

    fn end(&self, fault: Fault) -> Option<bool> {
        let what = format!("{:?}: {fault:?}", self.deed);
        self.world.start(&["--name", "x", "--scope", "s:write"]);
        let pid = self.world.pid("x");
        let mut strace = self.attach(fault, pid)?;
        let begin = Instant::now();
        // One that meets the fault before it hears the request is asked again.
        while lives(pid) {
            assert!(begin.elapsed() < Duration::from_secs(10), "{what}: hangs");
            let _ = self.world.insomnia(["stop", "x"]);
        }
        strace.wait(Instant::now() + PATIENCE).unwrap_or_else(|error| panic!("{what}: {error}"));
        Some(!self.is_killed())
    }

    /// Judges what is left: nobody hurt, nobody left, and the next start works.
    fn judge(&self, what: &str) {
        let world = &self.world;
        if self.deed == Deed::Repair {
            let ran = world.insomnia(["scope", "repair"]);
            assert_eq!(ran.code, Some(0), "{what}: {}", ran.stderr);
        }
        assert!(lives(self.main), "{what}: the pod is gone");
        self.end_x(what);
        // Whoever comes next reclaims the dead.
        let started = world.pod_command(["--name", "next", "--scope", "s:write"]);
        assert_eq!(started.code, Some(0), "{what}: {}", started.stderr);
        assert_eq!(world.entry("keeper").as_ref(), Some(&self.keeper), "{what}: a living pod is lost");
        wait_until(&format!("{what}: the table fits: {:?}", world.table()), || table_fits(world));
        let ids: BTreeSet<String> = world.table()["allocations"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["pod_id"].as_str().unwrap().to_owned())
            .collect();
        let said = || (world.results("main", "SpawnPod"), world.results("main", "StopPod"));
        assert!(ids.iter().eq(["keeper", "main", "next"]), "{what}: {ids:?}: {:?}", said());
        assert_eq!(world.status("keeper")["status"], "idle", "{what}");
        wait_until(&format!("{what}: main is quiet"), || world.status("main")["status"] != "running");
        world.kill("next");
        assert!(!world.path("outside/escaped").exists(), "{what}: a command was not confined");
        for pod_id in ["main", "x", "child"] {
            self.check_files(pod_id, what);
        }
    }

    /// Every whole line of a history is an item, and no log tells of a panic.
    fn check_files(&self, pod_id: &str, what: &str) {
        for folder in std::fs::read_dir(self.world.state().join(pod_id)).into_iter().flatten().flatten() {
            let log = std::fs::read_to_string(folder.path().join("pod.log")).unwrap_or_default();
            assert!(!log.contains("panicked"), "{what}: {log}");
            let text = std::fs::read_to_string(folder.path().join("history.jsonl")).unwrap_or_default();
            for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
                let item: Result<Value, _> = serde_json::from_str(line);
                assert!(item.is_ok(), "{what}: {line:?}");
            }
            if pod_id != "main" {
                std::fs::remove_dir_all(folder.path()).unwrap();
            }
        }
    }
}

const POD: &str = env!("CARGO_BIN_EXE_pod");
const INSOMNIA: &str = env!("CARGO_BIN_EXE_insomnia");

/// Plays these rounds, a stage for each deed and call, four at a time: most of each is waiting.
fn play(rounds: Vec<(Deed, Vec<Fault>)>) -> Seen {
    let (left, seen) = (Mutex::new(rounds), Seen::default());
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                while let Some((deed, faults)) = { left.lock().unwrap().pop() } {
                    let stage = Stage::new(deed);
                    let mut missed = ("", 0);
                    for fault in faults {
                        if fault.action != KILL && missed == (fault.action, 2) {
                            continue; // there are no more such calls
                        }
                        match stage.play(fault, &seen) {
                            None => return left.lock().unwrap().clear(),
                            Some(true) => missed = ("", 0),
                            Some(false) if missed.0 == fault.action => missed.1 += 1,
                            Some(false) => missed = (fault.action, 1),
                        }
                    }
                }
            });
        }
    });
    #[allow(clippy::print_stdout, reason = "how many were met is worth a look")]
    {
        println!("{seen:?}");
    }
    seen
}

/// For a look at one round: `FAULT="Spawn connect error=EACCES 1"`.
#[test]
#[ignore = "is one round of the others, for a closer look"]
fn one_round() {
    let Ok(text) = std::env::var("FAULT") else { return };
    let words: Vec<&'static str> = text.leak().split(' ').collect();
    let deed = DEEDS.into_iter().find(|deed| format!("{deed:?}") == words[0]).unwrap();
    let fault = Fault { calls: words[1], action: words[2], n: words[3].parse().unwrap() };
    play(vec![(deed, vec![fault])]);
}

#[test]
fn each_call_that_fails_breaks_nothing() {
    if !has_tool("strace") {
        return;
    }
    let actions = ERRORS.map(|error| &*format!("error={error}").leak());
    let mut rounds = Vec::new();
    for (at, deed) in DEEDS.into_iter().enumerate() {
        for (also, calls) in CALLS.into_iter().enumerate() {
            let of = |action, n| Fault { calls, action, n };
            let faults: Vec<Fault> = if is_long() {
                actions.iter().flat_map(|action| (1..=20).map(|n| of(*action, n))).collect()
            } else {
                let spread = at * 5 + also; // each error and number meets each call somewhere
                vec![of(actions[spread % 6], 1 + spread % 3)]
            };
            rounds.push((deed, faults));
        }
    }
    let seen = play(rounds);
    let (tried, met) = (seen.tried.into_inner(), seen.met.into_inner());
    assert!(tried == 0 || met * 4 > tried, "{met} of {tried} were met");
}

/// A kill at each call of a trace: strace counts each kind of call in each thread by itself.
fn kills_of(trace: &str) -> Vec<Fault> {
    let mut most: BTreeMap<&str, usize> = BTreeMap::new();
    let mut of_thread: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for line in trace.lines() {
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let Some((name, _)) = rest.trim_start().split_once('(') else { continue };
        if name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_') {
            let count = of_thread.entry((thread, name)).or_default();
            *count += 1;
            let most = most.entry(name).or_default();
            *most = (*most).max(*count);
        }
    }
    let kill = |name: &str, n| Fault { calls: name.to_owned().leak(), action: KILL, n };
    most.into_iter().flat_map(|(name, count)| (1..=count).map(move |n| kill(name, n))).collect()
}

#[test]
fn a_kill_at_each_call_of_a_start_a_stop_or_an_end_leaves_nobody() {
    if !has_tool("strace") {
        return;
    }
    let mut all = Vec::new();
    for deed in [Deed::Start, Deed::Launch, Deed::Stop, Deed::End] {
        let stage = Stage::new(deed);
        let harmless = Fault { calls: "all", action: "delay_enter=0", n: 1 };
        if stage.play(harmless, &Seen::default()).is_none() {
            return;
        }
        let kills = kills_of(&std::fs::read_to_string(stage.trace_path()).unwrap());
        let step = if is_long() { 1 } else { kills.len() / 13 };
        let kills: Vec<Fault> = kills.into_iter().step_by(step).collect();
        all.extend(kills.chunks(50).map(|some| (deed, some.to_vec())));
    }
    let seen = play(all);
    let (tried, met) = (seen.tried.into_inner(), seen.met.into_inner());
    assert!(tried == 0 || met * 3 > tried * 2, "{met} of {tried} were met");
}
