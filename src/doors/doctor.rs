//! `insomnia doctor`: whether pods can run here, found out by really doing it, and what to do where not.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

use crate::doors::commands::Given;
use crate::doors::find::Machine;
use crate::doors::list;
use crate::doors::terminal::{listed, reply, table};
use crate::store::manifest::{self, Manifest, ProviderKind, SandboxSetting, Source};
use crate::store::paths::Directories;
use crate::store::{instruction, session};
use crate::sys::confine::View;
use crate::sys::process::{ErrorOutput, Program};
use crate::wire::launch::{own_pod, pod_command};
use crate::wire::provider::{Provider, ProviderPlace};
use crate::wire::sandbox::{Level, Sandbox};
use crate::words::error::{Error, Result};
use crate::words::identity::{PodId, PodName};
use crate::words::text::cut_end;

/// A program that does not tell its version by then hangs.
const VERSION_LIMIT: Duration = Duration::from_secs(5);
const VERSION_BYTES_MAX: usize = 64 << 10;
/// Sessions that ended longer ago are worth a word.
const STALE_SECONDS: u64 = 30 * 86_400;

/// What one look has shown.
#[derive(Debug, Serialize)]
struct Finding {
    what: &'static str,
    /// `ok`, `note`, or `fault`: no pod can run.
    state: &'static str,
    finding: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    todo: Option<&'static str>,
}

/// A look whose bad outcome is a fault.
fn fault(what: &'static str, found: Result<String, impl ToString>, todo: &'static str) -> Finding {
    match found {
        Ok(finding) => Finding { what, state: "ok", finding, todo: None },
        Err(error) => Finding { what, state: "fault", finding: error.to_string(), todo: Some(todo) },
    }
}

/// A look whose bad outcome is worth a word.
fn note(what: &'static str, found: Result<String>, todo: &'static str) -> Finding {
    let finding = fault(what, found, todo);
    Finding { state: if finding.todo.is_some() { "note" } else { "ok" }, ..finding }
}

/// Runs the command. The answer is whether a pod could do its work here.
pub(super) fn run(given: &Given) -> Result<bool> {
    let current =
        std::env::current_dir().map_err(|source| Error::io("find the current directory", source))?;
    let findings = match Directories::from_environment() {
        Ok(directories) => look(&directories, &current),
        Err(error) => vec![fault("directories", Err(error), "set HOME to an absolute path")],
    };
    let can_run = findings.iter().all(|finding| finding.state != "fault");
    let plain = || {
        let rows = findings.iter().flat_map(|Finding { what, state, finding, todo }| {
            let todo = todo.map(|todo| vec![String::new(), String::new(), format!("-> {todo}")]);
            [vec![(*state).to_owned(), (*what).to_owned(), finding.clone()]].into_iter().chain(todo)
        });
        let end =
            if can_run { "pods can run here" } else { "no pod can run here until the faults are mended" };
        format!("{}\n{end}", table(&[], rows))
    };
    reply(given, &json!({ "can_run": can_run, "findings": findings }), plain);
    Ok(can_run)
}

fn look(directories: &Directories, current: &Path) -> Vec<Finding> {
    // The shortest socket tells whether any fits, before the directory is made.
    let shortest = PodId::new("p");
    let fits = shortest.and_then(|shortest| directories.socket(&shortest));
    let machine = fits.and_then(|_| Machine::of(directories.clone()));
    let runtime = format!("\"{}\": {}", directories.runtime.display(), directories.runtime_reason);
    let own = "give INSOMNIA_RUNTIME_DIR a directory of your own with mode 0700 on a local disk";
    let state = writable(&directories.state);
    let mut findings = vec![
        fault("runtime directory", machine.as_ref().map(|_| runtime), own),
        fault("state directory", state, "make it writable, or set XDG_STATE_HOME"),
    ];
    if let Ok(machine) = &machine {
        let repair = "look at the process that is named, or run \"insomnia scope repair\"";
        let prune = "\"insomnia prune --dry-run\" shows them, without --dry-run it removes them";
        findings.extend([
            fault("scope.lock", lock(machine), repair),
            note("dead entries", dead(machine), "nothing: the next start or loan takes them out"),
            note("old sessions", stale(machine), prune),
        ]);
    }
    let gathered = manifest::gather(&directories.config, current, Vec::new());
    let manifests = gathered.as_ref().map_err(ToString::to_string).and_then(|settings| {
        let files = manifest::files(&directories.config, current).map_err(|error| error.to_string())?;
        Ok([vec![names(&files)], settings.warnings.clone()].concat().join("; "))
    });
    let (is_known, settings) = (gathered.is_ok(), gathered.unwrap_or_default());
    let provider = Provider::choose(&settings.provider);
    let kind = provider.as_ref().ok().and_then(|settings| settings.kind);
    let needs_curl = matches!(kind, None | Some(ProviderKind::Anthropic | ProviderKind::Openai));
    let provider = provider.and_then(|chosen| {
        let (pod_id, name) = (PodId::new("doctor")?, PodName::new("doctor")?);
        let (directory, private_dir) = (current.to_owned(), directories.runtime.clone());
        let place = ProviderPlace { pod_id, name, directory, private_dir };
        Provider::new(&chosen, place).map(|provider| provider.to_string())
    });
    let build = "put \"pod\" beside \"insomnia\", or correct INSOMNIA_POD_COMMAND or \"pod_command\"";
    let allow = match settings.shell.sandbox {
        SandboxSetting::Off => {
            "delete \"shell.sandbox\" from your manifest to confine what the tool Shell runs"
        }
        _ => {
            "Shell is reduced or off, all else works; README says under \"What the model can do\" what it needs"
        }
    };
    let choose = match kind {
        None => "set what is missing; \"insomnia demo\" runs without it",
        Some(ProviderKind::Anthropic | ProviderKind::Openai) => {
            "set the variable with the key, or correct \"provider\" in your manifest"
        }
        Some(ProviderKind::Script) => "correct the file of replies, or \"provider.file\" in your manifest",
        Some(ProviderKind::Command) => "correct \"provider.command\" in your manifest",
    };
    let (name, hidden) = (&settings.instruction, directories.hidden(settings.provider.api_key_file.as_ref()));
    let mut left_aside = Vec::new();
    let instruction = instruction::resolve(name, &directories.config, current, &hidden, &mut left_aside)
        .map(|_| [vec![format!("\"{name}\"")], left_aside].concat().join("; "));
    let curl = if needs_curl { fault } else { note };
    findings.extend([
        fault("manifests", manifests, "correct that file; README lists the keys under \"Settings\""),
        fault("pod command", pod(&settings), build),
        note("sandbox", sandbox(&settings), allow),
        curl("curl", version("curl"), "install curl"),
        note("grep", version("grep"), "install grep, or the tool SearchFiles fails"),
    ]);
    if is_known {
        let write = "write that file, or correct \"instruction\" in the manifest";
        findings.extend([fault("instruction", instruction, write), fault("provider", provider, choose)]);
    }
    findings
}

fn lock(machine: &Machine) -> Result<String> {
    let (path, entries) = (machine.lock.path(), machine.lock.read()?.allocations().len());
    if !path.exists() {
        return Ok("there is none yet: no pod has run here".into());
    }
    machine.lock.lock(None)?;
    Ok(format!("\"{}\" is sound, free, and has {entries} entries", path.display()))
}

fn dead(machine: &Machine) -> Result<String> {
    let table = machine.lock.read().unwrap_or_default();
    let dead = table.allocations().iter().filter(|entry| !machine.lives(entry));
    match listed(dead.map(|entry| &entry.pod_id), ", ") {
        None => Ok("none".into()),
        Some(ids) => Err(Error::told(format!("these pods ended without saying so: {ids}"))),
    }
}

fn writable(state: &Path) -> Result<String> {
    let probe = state.join(".doctor");
    std::fs::create_dir_all(state)
        .and_then(|()| std::fs::write(&probe, "x"))
        .and_then(|()| std::fs::remove_file(&probe))
        .map_err(|source| Error::io(format!("write in \"{}\"", state.display()), source))?;
    Ok(format!("\"{}\" has sessions of {} pods", state.display(), session::pod_ids(state).len()))
}

fn stale(machine: &Machine) -> Result<String> {
    let old = list::ended_sessions(machine, STALE_SECONDS)?;
    if old.is_empty() {
        return Ok("none ended more than 30 days ago".into());
    }
    let bytes: u64 = old.iter().map(|session| list::size(&session.folder)).sum();
    Err(Error::told(format!("{} ended more than 30 days ago and take {} KiB", old.len(), bytes >> 10)))
}

fn names(files: &[(Source, std::path::PathBuf)]) -> String {
    let name = |(source, path): &(Source, std::path::PathBuf)| {
        let kind = match source {
            Source::User => "yours",
            Source::Project => "the project's, which may not widen rights",
            Source::TrustedProject => "the project's, which you trust",
            Source::Overlay => "given along",
        };
        let missing = if path.exists() { "" } else { ", which does not exist" };
        format!("\"{}\" ({kind}{missing})", path.display())
    };
    listed(files.iter().map(name), ", then ").unwrap_or_default()
}

/// Our own command is run; one of a person's may do anything, so it is only looked for.
fn pod(settings: &Manifest) -> Result<String> {
    let command = pod_command(&settings.pod_command);
    let program = command.first().map(String::as_str).unwrap_or_default();
    if own_pod().map_or(command == ["pod"], |own| own == Path::new(program)) {
        return version(program);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    match std::env::split_paths(&path).any(|directory| directory.join(program).is_file()) {
        true => Ok(command.join(" ")),
        false => Err(Error::told(format!("there is no program \"{program}\""))),
    }
}

/// The first line of what a program says to `--version`.
fn version(program: &str) -> Result<String> {
    let failed = |source| Error::io(format!("run \"{program} --version\""), source);
    let mut running = Program::new(program, ["--version"]).start(ErrorOutput::Separate).map_err(failed)?;
    let by = Instant::now() + VERSION_LIMIT;
    let text = running.read_to_end(VERSION_BYTES_MAX, None, by).map_err(failed)?;
    let ended = running.wait(by).map_err(failed)?;
    match String::from_utf8_lossy(&text).lines().next().filter(|_| ended.success()) {
        Some(line) => Ok(format!("{} ({program})", cut_end(line, 40))),
        None => Err(Error::told(format!("\"{program} --version\" fails ({ended})"))),
    }
}

fn sandbox(settings: &Manifest) -> Result<String> {
    let failed = |source| Error::io("open \"/dev/null\"", source);
    if settings.shell.sandbox == SandboxSetting::Off {
        return Err(Error::told(format!("level {}", Level::Unconfined)));
    }
    let command = pod_command(&settings.pod_command);
    let pod = own_pod().unwrap_or_else(|| "pod".into());
    if command != [pod.to_string_lossy()] {
        return Ok(format!(
            "not tried, as \"{}\" starts pods; \"insomnia list\" shows each one's level",
            command.join(" ")
        ));
    }
    let sandbox = Sandbox::with_program(pod, File::open("/dev/null").map_err(failed)?);
    let view = || View { network: settings.shell.network, ..View::default() };
    let level = sandbox.probe(view);
    let told = format!("level {level}");
    if *level == Level::Namespaces { Ok(told) } else { Err(Error::told(told)) }
}
