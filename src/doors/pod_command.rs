//! The `pod` command: the launch contract from the pod's side.
//!
//! Without `--foreground` the command starts itself again in the background, waits for its one line, and returns;
//! the background process is in a session of its own and no child of the caller.

use std::ffi::OsString;
use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::doors::commands::{Command, read_table};
use crate::doors::terminal::{answer, talk_line};
use crate::heart::pod::{self, NotStarted, Pod, StartOptions};
use crate::sys::{confine, process, raw, signal, thread};
use crate::wire::sandbox;
use crate::words::error::{Error, Result};
use crate::words::identity::{Life, PodId, PodName};

/// The command and its options, in the form of the table of `insomnia`.
const TABLE: &str = "\
pod: one LLM agent in one process; people usually want \"insomnia run\"
  --name NAME         1 to 32 of a-z 0-9, after the first also _ - (default: main)
  --dir DIR           working directory (default: this one)
  --scope RULE        PATH:read|write[:recursive|:flat]; may be repeated
  --manifest FILE     settings over the user's and the project's
  --overlay FILE      settings over all manifests as JSON, - for standard input
  --callback SOCKET   where the spawner is told of turns and of the end
  --adopt NONCE       take over the entry that the spawner has reserved
  --resume            go on with the newest session of that name
  --foreground        stay in the foreground; a lost terminal does not end it
  --task TEXT         the first input
  --version           print the version
  Example: pod --name coder --dir ~/project --scope src:write --task 'go on'
";
const CONTRACT: &str = "
Prints {\"pod_id\",\"socket\",\"pid\"} once the pod accepts connections, else why not.
Exit: 0 ready (or ended, in the foreground), 1 not started, 2 usage.
";
/// The only argument before those of the person, for the background process that the launch has started.
const BACKGROUND: &str = "--background-of-launch";

/// The command `pod`.
pub static COMMAND: LazyLock<Command> = LazyLock::new(|| read_table(TABLE).swap_remove(0));

/// The whole launch takes at most this long, whatever the limits of the caller are.
const LAUNCH_DEADLINE: Duration = Duration::from_secs(60);
const OVERLAY_BYTES_MAX: u64 = 1 << 20;
const LOG_TAIL_BYTES: u64 = 4 << 10;

/// How the command was asked to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Start the background process and wait for its line.
    Launch,
    /// Be the pod, attached to the caller.
    Foreground,
    /// Be the background process that `Launch` has started.
    Background,
}

/// What the command was asked to start.
#[derive(Debug)]
pub struct Arguments {
    /// How.
    pub mode: Mode,
    /// What.
    pub options: StartOptions,
    /// Where the overlay is, `-` for standard input.
    pub overlay: Option<PathBuf>,
}

/// Why the background process is not ready, in its one line.
#[derive(Debug, Serialize, Deserialize)]
struct NotReady {
    error: String,
    log: Option<PathBuf>,
}

/// Runs the command.
pub fn main() -> ExitCode {
    let given: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(code) = sandbox::helper_main(&given) {
        return code;
    }
    raw::keep_heap_small();
    match parse(given.clone()) {
        Ok(Err(text)) => {
            answer(&text);
            ExitCode::SUCCESS
        }
        Ok(Ok(arguments)) => match arguments.mode {
            Mode::Launch => exit_code(launch(given)),
            Mode::Foreground => exit_code(foreground(arguments)),
            Mode::Background => background(arguments),
        },
        Err(error) => {
            talk_line(&format!("pod: {error}; see \"pod --help\""));
            ExitCode::from(2)
        }
    }
}

/// Reads a command line without the program's name: what is to be run, or else a text to be printed.
///
/// # Errors
/// `Error::Usage` with what is not understood.
pub fn parse(mut given: Vec<OsString>) -> Result<Result<Arguments, String>> {
    let is_background = given.first().is_some_and(|first| first == BACKGROUND);
    given.drain(..usize::from(is_background));
    let Some(given) = COMMAND.read(given)? else {
        return Ok(Err(COMMAND.help("") + CONTRACT));
    };
    if given.has("version") {
        return Ok(Err(format!("pod {}\n", env!("CARGO_PKG_VERSION"))));
    }
    let misnamed = |error: Error| Error::Usage(error.to_string());
    let path = |name: &str| given.value(name).map(PathBuf::from);
    // A pod that is there already may have a number behind its name.
    let (name, resume) = match (given.value("name"), given.has("resume")) {
        (name, true) => (None, Some(PodId::new(name.unwrap_or("main")).map_err(misnamed)?)),
        (name, false) => (name.map(PodName::new).transpose().map_err(misnamed)?, None),
    };
    let options = StartOptions {
        name,
        directory: path("dir"),
        scope: given.values("scope").map(str::to_owned).collect(),
        manifest: path("manifest"),
        overlay: None,
        callback: path("callback"),
        adopt: given.value("adopt").map(Life::new).transpose().map_err(misnamed)?,
        resume,
        task: given.value("task").map(str::to_owned),
    };
    let mode = match (is_background, given.has("foreground")) {
        (true, _) => Mode::Background,
        (false, true) => Mode::Foreground,
        (false, false) => Mode::Launch,
    };
    Ok(Ok(Arguments { mode, options, overlay: path("overlay") }))
}

/// Tells the caller's terminal why there is no pod.
fn exit_code(outcome: Result<(), NotStarted>) -> ExitCode {
    let Err(NotStarted { error, log }) = outcome else { return ExitCode::SUCCESS };
    talk_line(&format!("pod: {error}"));
    if let Some(path) = log {
        let end = Some(tail(&path)).filter(|end| !end.is_empty());
        let end = end.map_or(" and is empty".to_owned(), |end| format!(", which ends:\n{end}"));
        talk_line(&format!("its log is \"{}\"{end}", path.display()));
    }
    ExitCode::FAILURE
}

fn launch(given: Vec<OsString>) -> Result<(), NotStarted> {
    if let Err(error) = confine::keep_descriptors() {
        log::debug!("the pod keeps what its caller had open: {error}"); // an old kernel; it does no harm
    }
    let mut started = process::start_self(&[vec![BACKGROUND.into()], given].concat())
        .map_err(|source| Error::io("start itself in the background", source))?;
    let Some(line) = started.first_line(64 << 10, Instant::now() + LAUNCH_DEADLINE) else {
        return Err(Error::told(format!("it ended before it was ready ({})", started.kill())).into());
    };
    if let Ok(NotReady { error, log }) = serde_json::from_str(&line) {
        return Err(NotStarted { error: Error::told(error), log });
    }
    answer(&format!("{line}\n"));
    Ok(())
}

fn tail(path: &Path) -> String {
    let read = || {
        let mut file = std::fs::File::open(path)?;
        file.seek(SeekFrom::Start(file.metadata()?.len().saturating_sub(LOG_TAIL_BYTES)))?;
        let mut text = Vec::new();
        file.take(LOG_TAIL_BYTES).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    read().unwrap_or_else(|error: std::io::Error| format!("(it cannot be read: {error})"))
}

/// The one line of the launch contract. A caller that has gone does not hinder the pod.
fn say(line: &impl Serialize) {
    let text = serde_json::to_string(line).unwrap_or_default();
    if let Err(error) = writeln!(std::io::stdout(), "{text}") {
        log::warn!("nobody hears that this pod is ready: {error}"); // an adopted one ends itself then
    }
}

fn foreground(arguments: Arguments) -> Result<(), NotStarted> {
    let pod = start(arguments)?;
    say(&pod.ready());
    pod.live();
    Ok(())
}

fn background(arguments: Arguments) -> ExitCode {
    let is_ready = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&is_ready);
    // A start that hangs, whatever it waits for, ends: nobody would find its process in any list.
    let give_up = move || {
        std::thread::sleep(LAUNCH_DEADLINE);
        if !theirs.load(Ordering::SeqCst) {
            signal::exit_now(1);
        }
    };
    if let Err(error) = thread::detach("launch deadline", give_up) {
        log::warn!("nothing bounds the start: {error}"); // its caller still gives up
    }
    let left = process::leave_session().map_err(|source| Error::io("leave the session", source).into());
    let detached = left.and_then(|()| start(arguments)).and_then(|pod| {
        detach(&pod)?;
        Ok(pod)
    });
    match detached {
        Ok(pod) => {
            is_ready.store(true, Ordering::SeqCst);
            say(&pod.ready());
            if let Err(error) = process::silence_output() {
                log::warn!("cannot let go of the launch command's pipe: {error}"); // it has read its line
            }
            pod.live();
            ExitCode::SUCCESS
        }
        Err(NotStarted { error, log }) => {
            say(&NotReady { error: error.to_string(), log });
            ExitCode::FAILURE
        }
    }
}

/// From here on nothing of the caller's terminal is open; a crash report goes to the log.
fn detach(pod: &Pod) -> Result<()> {
    let path = pod.log_path();
    let log = std::fs::File::options().append(true).open(&path);
    let log = log.map_err(|source| Error::io(format!("open log \"{}\"", path.display()), source))?;
    process::redirect_errors(&log).map_err(|source| Error::io("redirect errors to the log", source))?;
    process::close_input().map_err(|source| Error::io("close the input", source))
}

fn start(Arguments { options, overlay, .. }: Arguments) -> Result<Pod, NotStarted> {
    let overlay = overlay.as_deref().map(read_overlay).transpose()?;
    pod::start(StartOptions { overlay, ..options })
}

fn read_overlay(path: &Path) -> Result<String> {
    if path == Path::new("-") && std::io::stdin().is_terminal() {
        return Err(Error::Usage("--overlay - reads JSON from standard input, which is a terminal".into()));
    }
    let read = || {
        let input: &mut dyn Read = match path.to_str() {
            Some("-") => &mut std::io::stdin(),
            _ => &mut std::fs::File::open(path)?,
        };
        std::io::read_to_string(input.take(OVERLAY_BYTES_MAX))
    };
    read().map_err(|source| Error::io(format!("read overlay \"{}\"", path.display()), source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_understood() {
        for flag in COMMAND.flags.iter() {
            let value = match flag.name {
                "name" => Some("a"),
                "adopt" => Some("0123456789abcdef0123456789abcdef"),
                _ => Some("x").filter(|_| !flag.value.is_empty()),
            };
            let name = std::iter::once(format!("--{}", flag.name));
            let given = name.chain(value.map(str::to_owned)).map(OsString::from);
            assert!(parse(given.collect()).is_ok(), "{}", flag.name);
        }
        for bad in [vec!["--fly"], vec!["--name", "../x"], vec!["--adopt", "1"], vec!["word"], vec!["--name"]]
        {
            assert!(parse(bad.iter().map(OsString::from).collect()).is_err(), "{bad:?}");
        }
    }
}
