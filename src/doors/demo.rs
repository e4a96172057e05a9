//! `insomnia demo`: the main job without a key or network. Real processes, sockets and lock in a directory of
//! its own; only the model's replies come from a script. It checks what it shows and leaves nothing behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::doors::find::Machine;
use crate::doors::scope;
use crate::doors::terminal::try_answer;
use crate::store::life;
use crate::store::paths::Directories;
use crate::sys::clock::random_hex;
use crate::sys::wait::Cancel;
use crate::sys::{process, signal};
use crate::tools::stop::{self, Manner};
use crate::tools::survey;
use crate::wire::client::{self, Address, Next, Subscription};
use crate::wire::launch::{self, Launch};
use crate::words::error::{Error, Result};
use crate::words::protocol::{Method, RunReply, StreamEvent};
use crate::words::text::{cut_end, harmless, harmless_line};

/// How often the demo looks whether somebody wants it to end.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// No step of the demo takes this long unless something hangs.
const STEP_LIMIT: Duration = Duration::from_secs(15);
const SHOWN_BYTES_MAX: usize = 230;

/// The demo's own directory, removed when it is over.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            log::error!("\"{}\" stays behind: {error}", self.0.display());
        }
    }
}

/// Set by Ctrl-C, a polite kill, a lost terminal or a reader that has gone: the demo ends, and tidies up.
#[derive(Debug, Clone, Default)]
struct Stopped(Arc<AtomicBool>);

impl Stopped {
    fn listen() -> Result<Stopped> {
        let stopped = Stopped::default();
        let theirs = stopped.clone();
        signal::on_end_signals(move |_| theirs.0.store(true, Ordering::SeqCst))
            .map_err(|source| Error::io("listen for signals", source))?;
        Ok(stopped)
    }

    fn say(&self, line: &str) {
        if try_answer(&format!("{line}\n")).is_err() {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn check(&self) -> Result<()> {
        if self.0.load(Ordering::SeqCst) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// A running demo: the root pod and its events.
struct Demo {
    stopped: Stopped,
    machine: Machine,
    project: PathBuf,
    root: Address,
    events: Subscription,
    step: usize,
    surprises: usize,
}

/// Runs the demo. The answer is whether everything came out as it must.
///
/// # Errors
/// When something cannot be done at all.
pub fn run() -> Result<bool> {
    let stopped = Stopped::listen()?;
    let place = make_place()?;
    let outcome = Demo::start(&place.0, &stopped).and_then(|mut demo| {
        let played = demo.play();
        let ended = demo.end_all();
        played.and(ended).map(|()| demo.surprises)
    });
    drop(place);
    let surprises = outcome?;
    if surprises > 0 {
        stopped.say(&format!("\n{surprises} step(s) did not come out as they must; please report this"));
        return Ok(false);
    }
    stopped.say("\nEvery pod has ended, and the demo's directory is gone.");
    stopped.say("Next: set ANTHROPIC_API_KEY or OPENAI_API_KEY and try: insomnia run 'your task'");
    Ok(true)
}

fn make_place() -> Result<Place> {
    let failed = |source| Error::io("make a directory for the demo in /tmp", source);
    let path = Path::new("/tmp").join(format!("insomnia-demo-{}", random_hex(4).map_err(failed)?));
    let place = Place(path.clone());
    for directory in ["project/api", "project/docs", "state", "config/insomnia"] {
        fs::create_dir_all(path.join(directory)).map_err(failed)?;
    }
    fs::write(path.join("script.json"), script().to_string()).map_err(failed)?;
    Ok(place)
}

fn call(name: &str, input: Value) -> Value {
    json!({ "name": name, "input": input })
}

fn calls(calls: &[Value]) -> Value {
    json!({ "tool_calls": calls })
}

/// What the models say, one reply after the other. Each list belongs to the pod of that name.
fn script() -> Value {
    let write = |path: &str, content: &str| call("WriteFile", json!({ "path": path, "content": content }));
    let say = |text: &str| json!({ "text": text });
    json!({ "pods": {
        "lead": [
            calls(&[
                call("SpawnPod", json!({ "name": "coder", "task": "Write the API.", "scope": ["api:write"] })),
                call("SpawnPod", json!({ "name": "writer", "task": "Write the guide.", "scope": ["docs:write"] })),
                call("WaitPods", json!({})),
            ]),
            say("Both parts are written."),
            calls(&[write("api/main.rs", "// mine?")]),
            say("I may not write there now: I have lent it."),
            calls(&[call("SpawnPod", json!({ "name": "rival", "task": "Rewrite the API.", "scope": ["api:write"] }))]),
            say("Nobody else gets a path that is held."),
            calls(&[
                call("SendToPod", json!({ "pod_id": "coder", "message": "Delegate the tests." })),
                call("WaitPods", json!({ "pod_ids": ["coder"] })),
            ]),
            say("The coder has lent a part of its part."),
            calls(&[write("api/fix.rs", "// mine again"), write("api/tests/x.rs", "// still lent")]),
            say("The crashed coder's scope is back, except what its tester still holds."),
            calls(&[
                call("StopPod", json!({ "pod_id": "writer" })),
                write("docs/index.md", "# Index\n"),
            ]),
            say("The writer ended when asked, and its scope is back."),
        ],
        "coder": [
            calls(&[write("api/main.rs", "fn main() {}\n")]),
            say("The API is written."),
            calls(&[
                call("SpawnPod", json!({ "name": "tester", "task": "Write a test.", "scope": ["api/tests:write"] })),
                call("WaitPods", json!({})),
            ]),
            say("A tester of my own writes the tests."),
        ],
        "writer": [calls(&[write("docs/guide.md", "# Guide\n")]), say("The guide is written.")],
        "tester": [calls(&[write("api/tests/api.rs", "#[test] fn works() {}\n")]), say("A test is written.")],
    }})
}

impl Demo {
    fn start(place: &Path, stopped: &Stopped) -> Result<Demo> {
        let directories = Directories {
            runtime: place.join("run"),
            runtime_reason: "the demo's own",
            state: place.join("state/insomnia"),
            config: place.join("config/insomnia"),
            home: place.to_owned(),
        };
        let project = place.join("project");
        stopped.say(&format!(
            "A root pod \"lead\" starts in {}. It may write everything there.\nThe models' replies are scripted; processes, sockets, files and scope.lock are real.",
            project.display()
        ));
        let (run, state, config) = (place.join("run"), place.join("state"), place.join("config"));
        let variables: [(&str, &Path); 4] = [
            ("INSOMNIA_RUNTIME_DIR", &run),
            ("XDG_STATE_HOME", &state),
            ("XDG_CONFIG_HOME", &config),
            ("HOME", place),
        ];
        let rule = format!("{}:write", project.display());
        let args = ["--name", "lead", "--scope", &rule, "--overlay", "-"].map(str::to_owned);
        let overlay =
            json!({ "provider": { "kind": "script", "file": place.join("script.json") } }).to_string();
        let wanted = Launch {
            command: &launch::pod_command(&[]),
            args: &args,
            directory: &project,
            overlay: &overlay,
            variables: &variables,
            limit: STEP_LIMIT,
        };
        let ready = launch::launch(wanted, &new_cancel()?)?;
        let root = Address { pod: ready.pod_id.to_string(), socket: ready.socket, life: None };
        let events = client::subscribe(&root, None)?;
        Ok(Demo {
            machine: Machine::of(directories)?,
            project,
            root,
            events,
            stopped: stopped.clone(),
            step: 0,
            surprises: 0,
        })
    }

    fn play(&mut self) -> Result<()> {
        self.title("lead starts two pods and lends each a part of its scope; they write at the same time");
        self.turn("Split the work.")?;
        self.check(self.has("api/main.rs") && self.has("docs/guide.md"), "both files are written");

        self.title("lead tries to write into what it has lent: refused, with the holder's name");
        let results = self.turn("Write into api yourself.")?;
        self.check(refused_with(&results, "\"coder\""), "the refusal names coder");

        self.title("lead asks for a third pod on a path that is held: refused, with the holder's name");
        let results = self.turn("Start a rival on the same path.")?;
        self.check(refused_with(&results, "held by pod \"coder\""), "the refusal names coder");
        self.check(self.machine.lock.read()?.allocations().len() == 3, "nothing was started");

        self.title("coder lends a part of its part to a pod of its own");
        self.turn("Let coder delegate the tests.")?;
        self.check(self.has("api/tests/api.rs"), "the tester has written its file");
        self.stopped.say(&indent(&scope::render(&self.machine, &self.machine.lock.read()?)));

        self.title("coder is killed with SIGKILL; lead is told, and the scope comes back by itself");
        self.kill("coder")?;
        let results = self.until_turn_ends()?;
        self.check(self.has("api/fix.rs"), "lead writes where coder was");
        self.check(refused_with(&results, "\"tester\""), "what the tester holds is still its own");

        self.title("writer is stopped gracefully, and its scope comes back");
        self.turn("Stop the writer and index its docs.")?;
        self.check(self.has("docs/index.md"), "lead writes where writer was");

        self.title("the final scope list");
        self.stopped.say(&indent(&scope::render(&self.machine, &self.machine.lock.read()?)));
        Ok(())
    }

    fn title(&mut self, text: &str) {
        self.step += 1;
        self.stopped.say(&format!("\n{}. {text}", self.step));
    }

    fn check(&mut self, holds: bool, what: &str) {
        let mark = if holds { "ok" } else { "NOT SO" };
        self.stopped.say(&format!("   [{mark}] {what}"));
        self.surprises += usize::from(!holds);
    }

    fn has(&self, file: &str) -> bool {
        self.project.join(file).is_file()
    }

    fn turn(&mut self, input: &str) -> Result<Vec<(bool, String)>> {
        client::ask::<RunReply>(&self.root, None, Method::Run { input: input.to_owned() })?;
        self.until_turn_ends()
    }

    /// Shows the root's events until its turn ends; returns the results of its tools.
    fn until_turn_ends(&mut self) -> Result<Vec<(bool, String)>> {
        let deadline = Instant::now() + STEP_LIMIT;
        let mut results = Vec::new();
        loop {
            self.stopped.check()?;
            let event = match self.events.next(deadline.min(Instant::now() + LOOK_AGAIN))? {
                Next::Event(event) => event,
                Next::Nothing if Instant::now() < deadline => continue,
                Next::Nothing => return Err(Error::told("the demo hangs: no event came for 15 s")),
                Next::Over => return Err(Error::told("the demo's root pod ended too early")),
            };
            match *event {
                StreamEvent::Notification { text } => {
                    for line in text.lines().filter(|line| line.starts_with("- ")) {
                        self.show("lead is told:", line.trim_start_matches("- "));
                    }
                }
                StreamEvent::ToolCall { name, input, .. } => {
                    self.show("lead calls", &format!("{name} {input}"))
                }
                StreamEvent::ToolResult { ok, text, .. } => {
                    self.show(if ok { "     done:" } else { "     REFUSED:" }, &text);
                    results.push((ok, text));
                }
                StreamEvent::TextDelta { .. } => {}
                StreamEvent::Item(logged) => {
                    if let crate::words::message::Item::Assistant(message) = logged.item {
                        if !message.text.is_empty() {
                            self.show("lead says:", &message.text);
                        }
                    }
                }
                StreamEvent::TurnEnded { .. } => return Ok(results),
                StreamEvent::TurnStarted { .. }
                | StreamEvent::Retry { .. }
                | StreamEvent::Compaction { .. }
                | StreamEvent::Status { .. }
                | StreamEvent::Dropped { .. } => {}
            }
        }
    }

    fn show(&self, who: &str, text: &str) {
        let project = format!("{}/", self.project.display());
        let text = cut_end(&harmless_line(&text.replace(&project, "")), SHOWN_BYTES_MAX);
        self.stopped.say(&format!("   {who} {text}"));
    }

    fn kill(&self, pod: &str) -> Result<()> {
        let entry = self.machine.living(pod)?;
        if life::probe(self.machine.lock.runtime(), &entry.life) != life::Holding::Held {
            return Err(Error::told(format!("pod \"{pod}\" is dead already")));
        }
        self.stopped.say(&format!("   kill -9 {}", entry.pid));
        process::kill_exactly(entry.pid.get(), entry.start_time)
            .map_err(|source| Error::io(format!("kill pod \"{pod}\""), source))
    }

    fn end_all(&mut self) -> Result<()> {
        let cancel = new_cancel()?;
        let manner = Manner { from: None, limit: STEP_LIMIT, ask: true, cancel: &cancel };
        let table = self.machine.lock.read()?;
        for root in table.allocations().iter().filter(|entry| entry.delegated_from.is_none()) {
            for outcome in stop::stop_tree(&self.machine.lock, root, manner) {
                outcome
                    .map_err(|(pod_id, error)| Error::told(format!("pod \"{pod_id}\" lives on: {error}")))?;
            }
        }
        self.title("everything is stopped");
        let left = self.machine.lock.read()?;
        let addresses: Vec<_> = left.allocations().iter().map(survey::address_of).collect();
        self.check(addresses.is_empty(), "nobody is left");
        Ok(())
    }
}

fn refused_with(results: &[(bool, String)], words: &str) -> bool {
    results.iter().any(|(ok, text)| !ok && text.contains(words))
}

fn new_cancel() -> Result<Cancel> {
    Cancel::new().map_err(|source| Error::io("make an event descriptor", source))
}

fn indent(text: &str) -> String {
    harmless(text).lines().map(|line| format!("   {line}")).collect::<Vec<_>>().join("\n")
}
