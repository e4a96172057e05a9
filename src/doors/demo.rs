//! `insomnia demo`: the main job without a key or network. Real processes, sockets and lock in a directory of
//! its own; only the model's replies come from a script. It checks what it shows and leaves nothing behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::doors::find::{Machine, new_cancel};
use crate::doors::follow::{First, Followed, Over, Presses, Style};
use crate::doors::scope;
use crate::store::life;
use crate::store::paths::Directories;
use crate::sys::clock::random_hex;
use crate::sys::process;
use crate::wire::client::{self, Address};
use crate::wire::launch::{Launch, launch, pod_command};
use crate::words::error::{Error, Result};
use crate::words::protocol::{Method, RunReply, StreamEvent};

/// No step of the demo takes this long unless something hangs.
const STEP_LIMIT: Duration = Duration::from_secs(15);

/// What the models say, one reply after the other. Each list belongs to the pod of that name.
const SCRIPT: &str = r##"{"pods": {
"lead": [
  {"tool_calls": [
    {"name": "SpawnPod", "input": {"name": "coder", "task": "Write the API.", "scope": ["api:write"]}},
    {"name": "SpawnPod", "input": {"name": "writer", "task": "Write the guide.", "scope": ["docs:write"]}},
    {"name": "WaitPods", "input": {}}]},
  {"text": "Both parts are written."},
  {"tool_calls": [{"name": "WriteFile", "input": {"path": "api/main.rs", "content": "// mine?"}}]},
  {"text": "I may not write there now: I have lent it."},
  {"tool_calls": [{"name": "SpawnPod", "input": {"name": "rival", "task": "Rewrite the API.", "scope": ["api:write"]}}]},
  {"text": "Nobody else gets a path that is held."},
  {"tool_calls": [
    {"name": "SendToPod", "input": {"pod_id": "coder", "message": "Delegate the tests."}},
    {"name": "WaitPods", "input": {"pod_ids": ["coder"]}}]},
  {"text": "The coder has lent a part of its part."},
  {"tool_calls": [
    {"name": "WriteFile", "input": {"path": "api/fix.rs", "content": "// mine again"}},
    {"name": "WriteFile", "input": {"path": "api/tests/x.rs", "content": "// still lent"}}]},
  {"text": "The crashed coder's scope is back, except what its tester still holds."},
  {"tool_calls": [
    {"name": "StopPod", "input": {"pod_id": "writer"}},
    {"name": "WriteFile", "input": {"path": "docs/index.md", "content": "# Index\n"}}]},
  {"text": "The writer ended when asked, and its scope is back."}],
"coder": [
  {"tool_calls": [{"name": "WriteFile", "input": {"path": "api/main.rs", "content": "fn main() {}\n"}}]},
  {"text": "The API is written."},
  {"tool_calls": [
    {"name": "SpawnPod", "input": {"name": "tester", "task": "Write a test.", "scope": ["api/tests:write"]}},
    {"name": "WaitPods", "input": {}}]},
  {"text": "A tester of my own writes the tests."}],
"writer": [
  {"tool_calls": [{"name": "WriteFile", "input": {"path": "docs/guide.md", "content": "# Guide\n"}}]},
  {"text": "The guide is written."}],
"tester": [
  {"tool_calls": [{"name": "WriteFile", "input": {"path": "api/tests/api.rs", "content": "#[test] fn works() {}\n"}}]},
  {"text": "A test is written."}]
}}"##;

/// The demo's own directory, removed when it is over.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            log::error!("\"{}\" stays behind: {error}", self.0.display());
        }
    }
}

/// A running demo.
struct Demo {
    machine: Machine,
    project: PathBuf,
    root: Followed,
    step: usize,
    surprises: usize,
}

/// Runs the demo. The answer is whether everything came out as it must.
pub(super) fn run() -> Result<bool> {
    let presses = Presses::listen(|| {})?;
    let place = make_place()?;
    let mut demo = Demo::start(&place.0, presses)?;
    let played = demo.play();
    let ended = demo.end_all();
    drop(place);
    if !demo.root.is_heard()? {
        return Ok(true); // a closed pipe is a quiet end
    }
    played.and(ended)?;
    let follower = &mut demo.root.follower;
    if demo.surprises > 0 {
        follower
            .say(&format!("\n{} step(s) did not come out as they must; please report this", demo.surprises));
        return Ok(false);
    }
    follower.say("\nEvery pod has ended, and the demo's directory is gone.");
    follower.say("Next: set ANTHROPIC_API_KEY or OPENAI_API_KEY and try: insomnia run 'your task'");
    Ok(true)
}

fn make_place() -> Result<Place> {
    let failed = |source| Error::io("make a directory for the demo in /tmp", source);
    let path = Path::new("/tmp").join(format!("insomnia-demo-{}", random_hex(4).map_err(failed)?));
    let place = Place(path.clone());
    for directory in ["project/api", "project/docs", "state", "config/insomnia"] {
        fs::create_dir_all(path.join(directory)).map_err(failed)?;
    }
    fs::write(path.join("script.json"), SCRIPT).map_err(failed)?;
    Ok(place)
}

impl Demo {
    fn start(place: &Path, presses: Presses) -> Result<Demo> {
        let (run, state, config) = (place.join("run"), place.join("state"), place.join("config"));
        let machine = Machine::of(Directories {
            runtime: run.clone(),
            runtime_reason: "the demo's own",
            state: state.join("insomnia"),
            config: config.join("insomnia"),
            home: place.to_owned(),
        })?;
        let project = place.join("project");
        let rule = format!("{}:write", project.display());
        let overlay = json!({ "provider": { "kind": "script", "file": place.join("script.json") } });
        let wanted = Launch {
            command: &pod_command(&[]),
            args: &["--name", "lead", "--scope", &rule, "--overlay", "-"].map(str::to_owned),
            directory: &project,
            overlay: &overlay.to_string(),
            variables: &[
                ("INSOMNIA_RUNTIME_DIR", &run),
                ("XDG_STATE_HOME", &state),
                ("XDG_CONFIG_HOME", &config),
                ("HOME", place),
            ],
            limit: STEP_LIMIT,
        };
        let ready = launch(wanted, &new_cancel()?)?;
        let address = Address { pod: ready.pod_id.to_string(), socket: ready.socket, life: None };
        let mut root = Followed::begin(&address, None, Style::Show, First::Leaves, presses)?;
        root.follower.within = format!("{}/", project.display());
        root.follower.say(&format!(
            "A root pod \"lead\" starts in {}. It may write everything there.\nThe models' replies are scripted; processes, sockets, files and scope.lock are real.",
            project.display()
        ));
        Ok(Demo { machine, project, root, step: 0, surprises: 0 })
    }

    fn play(&mut self) -> Result<()> {
        self.title("lead starts two pods and lends each a part of its scope; they write at the same time");
        self.turn("Split the work.")?;
        self.check(self.has("api/main.rs") && self.has("docs/guide.md"), "both files are written");

        self.title("lead tries to write into what it has lent: refused, with the holder's name");
        let refused = self.turn("Write into api yourself.")?;
        self.check(refused.contains("\"coder\""), "the refusal names coder");

        self.title("lead asks for a third pod on a path that is held: refused, with the holder's name");
        let refused = self.turn("Start a rival on the same path.")?;
        self.check(refused.contains("held by pod \"coder\""), "the refusal names coder");
        self.check(self.machine.lock.read()?.allocations().len() == 3, "nothing was started");

        self.title("coder lends a part of its part to a pod of its own");
        self.turn("Let coder delegate the tests.")?;
        self.check(self.has("api/tests/api.rs"), "the tester has written its file");
        self.show_scope()?;

        self.title("coder is killed with SIGKILL; lead is told, and the scope comes back by itself");
        self.kill("coder")?;
        let refused = self.until_turn_ends()?;
        self.check(self.has("api/fix.rs"), "lead writes where coder was");
        self.check(refused.contains("\"tester\""), "what the tester holds is still its own");

        self.title("writer is stopped gracefully, and its scope comes back");
        self.turn("Stop the writer and index its docs.")?;
        self.check(self.has("docs/index.md"), "lead writes where writer was");

        self.title("the final scope list");
        self.show_scope()
    }

    fn title(&mut self, text: &str) {
        self.step += 1;
        self.root.follower.say(&format!("\n{}. {text}", self.step));
    }

    fn check(&mut self, holds: bool, what: &str) {
        let mark = if holds { "ok" } else { "NOT SO" };
        self.root.follower.say(&format!("[{mark}] {what}"));
        self.surprises += usize::from(!holds);
    }

    fn show_scope(&mut self) -> Result<()> {
        self.root.follower.say(&scope::render(&self.machine, &self.machine.lock.read()?));
        Ok(())
    }

    fn has(&self, file: &str) -> bool {
        self.project.join(file).is_file()
    }

    fn turn(&mut self, input: &str) -> Result<String> {
        client::ask::<RunReply>(&self.root.address, None, Method::Run { input: input.to_owned() })?;
        self.until_turn_ends()
    }

    /// Shows the root's events until its turn ends; returns what its tools have refused.
    fn until_turn_ends(&mut self) -> Result<String> {
        let (deadline, mut refused) = (Instant::now() + STEP_LIMIT, String::new());
        let over = self.root.follow(|_, event| {
            if let Some(StreamEvent::ToolResult { ok: false, text, .. }) = event {
                refused.push_str(text);
            } else if Instant::now() > deadline {
                return Err(Error::told("the demo hangs: a turn took more than 15 s"));
            }
            Ok(matches!(event, Some(StreamEvent::TurnEnded { .. })))
        })?;
        match over {
            Over::Reached => Ok(refused),
            Over::Ended => Err(Error::told("the demo's root pod ended too early")),
            Over::Interrupted | Over::HungUp | Over::Unheard => Err(Error::Cancelled),
        }
    }

    fn kill(&mut self, pod: &str) -> Result<()> {
        let entry = self.machine.living(pod)?;
        if life::probe(self.machine.lock.runtime(), &entry.life) != life::Holding::Held {
            return Err(Error::told(format!("pod \"{pod}\" is dead already")));
        }
        self.root.follower.say(&format!("kill -9 {}", entry.pid));
        process::kill_exactly(entry.pid.get(), entry.start_time)
            .map_err(|source| Error::io(format!("kill pod \"{pod}\""), source))
    }

    fn end_all(&mut self) -> Result<()> {
        let table = self.machine.lock.read()?;
        for root in table.allocations().iter().filter(|entry| entry.delegated_from.is_none()) {
            for outcome in self.machine.stop(root, true, true)? {
                outcome
                    .map_err(|(pod_id, error)| Error::told(format!("pod \"{pod_id}\" lives on: {error}")))?;
            }
        }
        self.title("everything is stopped");
        let is_empty = self.machine.lock.read()?.allocations().is_empty();
        self.check(is_empty, "nobody is left");
        Ok(())
    }
}
