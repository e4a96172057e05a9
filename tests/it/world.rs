//! A world of its own for each test: runtime, state, configuration and project directories, pods as real
//! processes, and a look at everything a person could look at. Dropping it ends every pod of it.

#![allow(dead_code, reason = "each test uses what it needs")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::store::life;
use insomnia::store::paths::RuntimeDirectory;
use insomnia::sys::file;
use insomnia::sys::process::{self, ErrorOutput, Program};
use insomnia::words::identity::Life;

/// Nothing in the tests takes this long unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a command came to.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// The directories of one test and the pods in them.
#[derive(Debug)]
pub struct World {
    place: tempfile::TempDir,
    runtime: String,
}

impl World {
    pub fn new() -> World {
        let place = tempfile::Builder::new().prefix("ins").tempdir().unwrap();
        let world = World { place, runtime: "run".into() };
        for directory in ["config/insomnia", "project", "home"] {
            std::fs::create_dir_all(world.path(directory)).unwrap();
        }
        world
    }

    /// A world whose pods get these replies: an object of pod names and lists of replies.
    pub fn with_script(pods: Value) -> World {
        let world = World::new();
        world.script(pods);
        world
    }

    /// Writes the script and a user manifest that names it.
    pub fn script(&self, pods: Value) {
        std::fs::write(self.path("script.json"), json!({ "pods": pods }).to_string()).unwrap();
        self.manifest(json!({ "provider": { "kind": "script", "file": self.path("script.json") } }));
    }

    /// A world whose pods get these replies and, over the defaults, these settings.
    pub fn with_settings(pods: Value, settings: Value) -> World {
        let world = World::with_script(pods);
        let mut manifest = json!({ "provider": { "kind": "script", "file": world.path("script.json") } });
        for (key, value) in settings.as_object().unwrap() {
            manifest[key] = value.clone();
        }
        world.manifest(manifest);
        world
    }

    pub fn manifest(&self, manifest: Value) {
        std::fs::write(self.path("config/insomnia/manifest.json"), manifest.to_string()).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.place.path().canonicalize().unwrap().join(name)
    }

    pub fn project(&self) -> PathBuf {
        self.path("project")
    }

    pub fn runtime(&self) -> PathBuf {
        self.path(&self.runtime)
    }

    /// The same world with its runtime directory so deep that the sockets of pods with names of up to `letters`
    /// letters fit, and no others.
    pub fn deep(mut self, letters: usize) -> World {
        let bytes = 103 - "//sock".len() - letters - self.path("run").as_os_str().len() - 1;
        self.runtime = format!("run/{}", "d".repeat(bytes));
        std::fs::create_dir(self.path("run")).unwrap();
        self
    }

    pub fn state(&self) -> PathBuf {
        self.path("state/insomnia")
    }

    /// A program with this world's environment and nothing of the developer's own.
    pub fn program<A: AsRef<OsStr>>(&self, program: &str, args: impl IntoIterator<Item = A>) -> Program {
        let mut variables: Vec<(std::ffi::OsString, std::ffi::OsString)> = vec![
            ("PATH".into(), std::env::var_os("PATH").unwrap_or_default()),
            ("HOME".into(), self.path("home").into()),
            ("INSOMNIA_RUNTIME_DIR".into(), self.runtime().into()),
            ("XDG_STATE_HOME".into(), self.path("state").into()),
            ("XDG_CONFIG_HOME".into(), self.path("config").into()),
        ];
        variables.extend(std::env::var_os("RUST_LOG").map(|level| ("RUST_LOG".into(), level)));
        Program::new(program, args).only_env(variables).directory(&self.project())
    }

    fn run<A: AsRef<OsStr>>(&self, program: &str, args: impl IntoIterator<Item = A>) -> Ran {
        ran(self.program(program, args))
    }

    /// Runs the `pod` command.
    pub fn pod_command<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Ran {
        self.run(env!("CARGO_BIN_EXE_pod"), args)
    }

    /// Starts a pod that must start, with more variables in its environment; returns its ready line.
    pub fn start_with_env(&self, variables: &[(&str, &str)], args: &[&str]) -> Value {
        let mut program = self.program(env!("CARGO_BIN_EXE_pod"), args);
        for (name, value) in variables {
            program = program.env(name, value);
        }
        let ran = ran(program);
        assert_eq!(ran.code, Some(0), "pod {args:?}: {}", ran.stderr);
        serde_json::from_str(&ran.stdout).unwrap()
    }

    /// Runs the `insomnia` command.
    pub fn insomnia<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Ran {
        self.run(env!("CARGO_BIN_EXE_insomnia"), args)
    }

    /// Starts a pod that must start; returns its ready line.
    pub fn start(&self, args: &[&str]) -> Value {
        let ran = self.pod_command(args);
        assert_eq!(ran.code, Some(0), "pod {args:?}: {}", ran.stderr);
        serde_json::from_str(&ran.stdout).unwrap()
    }

    pub fn socket(&self, pod_id: &str) -> PathBuf {
        self.runtime().join(pod_id).join("sock")
    }

    /// Whether a pod can be asked: its socket is there a moment before it listens.
    pub fn listens(&self, pod_id: &str) -> bool {
        UnixStream::connect(self.socket(pod_id)).is_ok()
    }

    /// Sends one raw line and reads one raw line.
    pub fn raw(&self, pod_id: &str, line: &[u8]) -> String {
        let mut stream = UnixStream::connect(self.socket(pod_id)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(line); // one that is too long is cut before its end
        let mut reply = String::new();
        let _ = BufReader::new(stream).read_line(&mut reply); // a reset after the reply is fine
        reply
    }

    /// Sends a person's request and returns the whole reply.
    pub fn request(&self, pod_id: &str, method: &str, params: Value) -> Value {
        let line = format!("{}\n", json!({ "method": method, "params": params }));
        let reply = self.raw(pod_id, line.as_bytes());
        serde_json::from_str(&reply)
            .unwrap_or_else(|error| panic!("{method} of {pod_id}: {error}: {reply:?}"))
    }

    /// Sends a person's request that must succeed and returns its `ok`.
    pub fn ok(&self, pod_id: &str, method: &str, params: Value) -> Value {
        let reply = self.request(pod_id, method, params);
        reply.get("ok").cloned().unwrap_or_else(|| panic!("{method} of {pod_id}: {reply}"))
    }

    pub fn status(&self, pod_id: &str) -> Value {
        self.ok(pod_id, "status", Value::Null)
    }

    /// Sends input as a person and waits until that turn has ended; returns the `turn_ended` data.
    pub fn turn(&self, pod_id: &str, input: &str) -> Value {
        let mut events = self.subscribe(pod_id, None);
        let turn = self.ok(pod_id, "run", json!({ "input": input }))["turn"].clone();
        events.until(|event| event["event"] == "turn_ended" && event["data"]["turn"] == turn)["data"].clone()
    }

    pub fn subscribe(&self, pod_id: &str, since: Option<u64>) -> Events {
        let mut stream = UnixStream::connect(self.socket(pod_id)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let params = since.map_or(json!({}), |since| json!({ "since": since }));
        let line = format!("{}\n", json!({ "method": "subscribe", "params": params }));
        stream.write_all(line.as_bytes()).unwrap();
        let mut events = Events { lines: BufReader::new(stream), seen: Vec::new() };
        let opened = events.next().unwrap();
        assert!(opened.get("ok").is_some(), "subscribe to {pod_id}: {opened}");
        events
    }

    /// Every item of a pod's history, living or dead, as logged.
    pub fn history(&self, pod_id: &str) -> Vec<Value> {
        let mut folders: Vec<PathBuf> = std::fs::read_dir(self.state().join(pod_id))
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().path())
            .collect();
        folders.sort();
        let Some(newest) = folders.last() else { return Vec::new() };
        let text = std::fs::read_to_string(newest.join("history.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// The life of a living pod.
    pub fn life(&self, pod_id: &str) -> String {
        self.entry(pod_id).unwrap()["life"].as_str().unwrap().to_owned()
    }

    /// Waits until a pod is neither running nor about to be woken by something that it has taken already.
    pub fn wait_idle(&self, pod_id: &str) {
        wait_until("the pod is idle", || self.status(pod_id)["status"] != "running");
    }

    /// Waits until so many turns of a pod have ended.
    pub fn wait_turns(&self, pod_id: &str, turns: usize) {
        wait_until("the turns have ended", || self.count(pod_id, "turn_ended") >= turns);
    }

    /// How many items of this type a pod's history has.
    pub fn count(&self, pod_id: &str, kind: &str) -> usize {
        self.history(pod_id).iter().filter(|item| item["type"] == kind).count()
    }

    /// The result of the only call of this tool, which must have succeeded, as JSON.
    pub fn answer(&self, pod_id: &str, tool: &str) -> Value {
        let results = self.results(pod_id, tool);
        let (ok, text) = results.last().unwrap_or_else(|| panic!("{pod_id} has no result of {tool}"));
        assert!(ok, "{tool} of {pod_id}: {text}");
        serde_json::from_str(text).unwrap()
    }

    /// The results of this tool in a pod's history: whether each was ok, and its text.
    pub fn results(&self, pod_id: &str, tool: &str) -> Vec<(bool, String)> {
        let items = self.history(pod_id);
        let results = items.iter().filter(|item| item["type"] == "tool_result" && item["name"] == tool);
        results.map(|item| (item["ok"] == true, item["text"].as_str().unwrap().to_owned())).collect()
    }

    /// The blocks of notices in a pod's history, joined.
    pub fn notices(&self, pod_id: &str) -> String {
        let items = self.history(pod_id);
        let blocks = items.iter().filter(|item| item["type"] == "notification");
        blocks.filter_map(|item| item["text"].as_str()).collect::<Vec<_>>().join("\n")
    }

    /// `scope.lock` as it is now; an empty table where there is none.
    pub fn table(&self) -> Value {
        let text = std::fs::read_to_string(self.runtime().join("scope.lock")).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_else(|_| json!({ "allocations": [] }))
    }

    pub fn entry(&self, pod_id: &str) -> Option<Value> {
        self.table()["allocations"]
            .as_array()
            .unwrap()
            .iter()
            .find(|entry| entry["pod_id"] == pod_id)
            .cloned()
    }

    pub fn pid(&self, pod_id: &str) -> i32 {
        let entry = self.entry(pod_id).unwrap_or_else(|| panic!("no entry of {pod_id}"));
        i32::try_from(entry["pid"].as_i64().unwrap()).unwrap()
    }

    /// Kills a pod with SIGKILL and waits until its process is gone and its life is free, which may come a
    /// moment later: a process counts as a zombie once its first thread has ended.
    pub fn kill(&self, pod_id: &str) {
        let life = Life::new(self.entry(pod_id).unwrap()["life"].as_str().unwrap()).unwrap();
        self.kill_pid(self.pid(pod_id));
        let runtime = RuntimeDirectory::open(&self.runtime()).unwrap();
        wait_until("its life is free", || life::probe(&runtime, &life) != life::Holding::Held);
    }

    /// Kills this process with SIGKILL and waits until it is gone.
    pub fn kill_pid(&self, pid: i32) {
        let stat = process::process_stat(pid).expect("it lives");
        process::kill_exactly(pid, stat.start_time).unwrap();
        wait_until("the killed process is gone", || !lives(pid));
    }

    /// Sends a signal by name to a pod, such as `STOP`, `CONT` or `TERM`. One that is stopped does not hold the lock.
    pub fn signal(&self, pod_id: &str, signal: &str) {
        let pid = self.pid(pod_id);
        let send = |signal: &str| {
            let ran = self.run("kill", [format!("-{signal}"), pid.to_string()]);
            assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        };
        let stands_still = || {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            let mut stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
            stats.all(|stat| {
                stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['T', 't']))
            })
        };
        let is_locked = || {
            let opened = std::fs::File::open(self.runtime().join("scope.lock"));
            opened.is_ok_and(|opened| matches!(file::try_lock_exclusive(opened), Ok(Err(_))))
        };
        let stops_with_the_lock = || {
            wait_until("it stands still", stands_still);
            is_locked()
        };
        send(signal);
        while signal == "STOP" && stops_with_the_lock() {
            send("CONT");
            send("STOP");
        }
    }

    /// Every process whose environment names this world's runtime directory.
    pub fn processes(&self) -> Vec<i32> {
        let mark = format!("INSOMNIA_RUNTIME_DIR={}", self.runtime().display());
        let pids = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let is_ours = |pid: &i32| {
            let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environ.split(|&byte| byte == 0).any(|variable| variable == mark.as_bytes())
        };
        pids.filter(is_ours).filter(|pid| lives(*pid)).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = self.processes();
            if left.is_empty() || Instant::now() > deadline {
                return;
            }
            for pid in left {
                if let Some(stat) = process::process_stat(pid) {
                    let _ = process::kill_exactly(pid, stat.start_time);
                }
            }
        }
    }
}

/// A call of a tool, for a script.
pub fn call(name: &str, input: Value) -> Value {
    json!({ "name": name, "input": input })
}

/// A scripted reply of tool calls.
pub fn calls(calls: &[Value]) -> Value {
    json!({ "tool_calls": calls })
}

/// A call of SpawnPod, for a script.
pub fn spawn(name: &str, scope: &[&str]) -> Value {
    call("SpawnPod", json!({ "name": name, "task": format!("task of {name}"), "scope": scope }))
}

/// Field `name` of `/proc/PID/status` in KiB, such as `VmRSS`.
pub fn memory_kib(pid: i32, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs a program to its end.
pub fn ran(program: Program) -> Ran {
    let mut running = program.start(ErrorOutput::Separate).unwrap();
    let stdout = running.read_to_end(64 << 20, None, Instant::now() + PATIENCE).unwrap();
    let code = running.wait(Instant::now() + PATIENCE).unwrap().code();
    Ran { code, stdout: String::from_utf8_lossy(&stdout).into_owned(), stderr: running.error_text(1 << 20) }
}

/// Copies a program that is to be started. Another process does so: a file that is open for writing here would be so
/// in what another test's thread forks as well, for a moment, and such a file cannot be started (`ETXTBSY`).
pub fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let copied = ran(Program::new("cp", [from.as_ref(), to.as_ref()]));
    assert_eq!(copied.code, Some(0), "{}", copied.stderr);
}

/// Whether anything of this process is left. Its first thread can be a zombie while others still end, and with
/// them its open files.
pub fn lives(pid: i32) -> bool {
    let threads = || std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    process::process_stat(pid).is_some_and(|stat| !stat.is_zombie || threads() > 1)
}

/// Whether a process has a file open. Its life is free once it has none, which is a moment before it counts as gone:
/// the kernel closes files first (`do_exit`).
pub fn has_files(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut descriptors = tasks.filter_map(|task| std::fs::read_dir(task.path().join("fd")).ok());
    descriptors.any(|mut open| open.next().is_some())
}

/// Whether a pod has only the threads that it always has.
pub fn is_at_rest(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.all(|name| ["pod", "accept", "signals", "turn", "launch deadline"].contains(&name.trim_end()))
}

/// Waits until something holds that only looking can tell; fails after `PATIENCE`.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The event lines of a subscription.
#[derive(Debug)]
pub struct Events {
    lines: BufReader<UnixStream>,
    pub seen: Vec<Value>,
}

impl Events {
    /// The next line; `None` at the end of the stream. Fails after `PATIENCE` of silence.
    pub fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => {
                let event: Value = serde_json::from_str(&line).unwrap();
                self.seen.push(event.clone());
                Some(event)
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("no event for {} s: {error}; so far: {:#?}", PATIENCE.as_secs(), self.seen),
        }
    }

    /// Reads until an event for which `wanted` holds, and returns it.
    pub fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let event = self.next().unwrap_or_else(|| panic!("the stream ended; it said: {:#?}", self.seen));
            if wanted(&event) {
                return event;
            }
        }
    }

    /// Reads until a turn has ended and returns the data of that event.
    pub fn until_turn_ended(&mut self) -> Value {
        self.until(|event| event["event"] == "turn_ended")["data"].clone()
    }
}

/// Reads a whole file, for tests that compare.
pub fn read(path: impl AsRef<Path>) -> String {
    let mut text = String::new();
    std::fs::File::open(path.as_ref()).unwrap().read_to_string(&mut text).unwrap();
    text
}

/// Whether a tool that a test needs is there. Missing under `CI=true` is a failure.
pub fn has_tool(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|directory| directory.join(name).is_file());
    if !found {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "this test needs {name}");
        #[allow(clippy::print_stderr, reason = "a skipped test says so")]
        {
            eprintln!("skipped: needs {name}");
        }
    }
    found
}

/// Says why a test is not run here.
#[allow(clippy::print_stderr, reason = "a skipped test says so")]
pub fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
}

/// Whether the long form of a test is asked for.
pub fn is_long() -> bool {
    std::env::var_os("INSOMNIA_LONG").is_some()
}

/// A directory in memory where there is one, so that syncing does not set the pace.
pub fn memory_place() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let builder = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix("ins");
        builder
    };
    builder().tempdir_in(memory).or_else(|_| builder().tempdir()).unwrap()
}
