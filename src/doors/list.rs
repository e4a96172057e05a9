//! `insomnia list`, and what is kept of pods that have ended: `show` and `prune`.

use std::collections::HashSet;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::doors::find::Machine;
use crate::doors::terminal::{UNITS, ago, answers_to_a_person, listed, reply, table, talk_line, with};
use crate::store::life::{self, Holding};
use crate::store::manifest;
use crate::store::session::{self, Session};
use crate::sys::{clock, file};
use crate::tools::survey;
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};
use crate::words::identity::{Life, PodId};
use crate::words::limits::MAX_LAST_RESPONSE_BYTES;
use crate::words::message::Summary;
use crate::words::protocol::{Status, StatusReply};
use crate::words::text::{cut_end, harmless_line};

/// `insomnia list`: the pods of the lock, asked in parallel, and with `--all` the newest ended session of each
/// other pod_id.
pub(super) fn list(machine: &Machine, given: &Given) -> Result<bool> {
    let lock_table = machine.table()?;
    let entries = lock_table.allocations().iter().filter(|entry| machine.lives(entry));
    let entries: Vec<&Allocation> = entries.collect();
    let addresses: Vec<_> = entries.iter().map(|entry| survey::address_of(entry)).collect();
    let answers = survey::ask_all(&addresses, None);
    let usage = |status: &StatusReply| (status.pod_id.clone(), status.usage);
    let usages: Vec<_> = answers.iter().flatten().map(usage).collect();
    let mut pods: Vec<Value> = Vec::new();
    for (entry, asked) in entries.iter().zip(answers) {
        let row = match asked {
            // Who it belongs to now, which may not be the one that spawned it.
            Some(status) => json!(StatusReply { spawner: entry.delegated_from.clone(), ..status }),
            None => unanswered(machine, entry),
        };
        let tree = survey::usage_of_tree(&lock_table, &entry.pod_id, &usages);
        pods.push(with(&row, json!({ "usage_tree": tree })));
    }
    if given.has("all") {
        let living = |id: &PodId| entries.iter().any(|entry| entry.pod_id == *id);
        let ids = session::pod_ids(&machine.directories.state).into_iter().filter(|id| !living(id));
        pods.extend(ids.filter_map(|id| ended(machine, &id)));
    }
    if pods.is_empty() && !given.has("json") {
        talk_line("no pod lives; \"insomnia run\" starts one");
        return Ok(true);
    }
    let header = ["POD", "STATUS", "FOR", "SPAWNER", "SHELL", "WRITES", "LAST WORDS"];
    reply(given, &json!({ "pods": pods }), || table(&header, pods.iter().map(row)));
    Ok(true)
}

fn row(pod: &Value) -> Vec<String> {
    let text = |key: &str| pod.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let scope = pod.get("scope").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let writes = listed(scope.filter_map(|rule| Some(rule.split_once(":write")?.0)), " ");
    let since = pod.get("since").and_then(Value::as_u64);
    let answers = pod.get("answers").and_then(Value::as_bool).unwrap_or(true);
    let status = if answers { text("status") } else { format!("{}?", text("status")) };
    let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    vec![
        text("pod_id"),
        status,
        or_dash(since.map(|since| ago(since, clock::now_seconds())).unwrap_or_default()),
        or_dash(text("spawner")),
        or_dash(text("sandbox").chars().take(1).collect()),
        harmless_line(writes.as_deref().unwrap_or("-")),
        cut_end(&harmless_line(&text("last_response")), if answers_to_a_person() { 50 } else { 200 }),
    ]
}

/// A pod that lives but does not answer, as far as its session tells.
fn unanswered(machine: &Machine, entry: &Allocation) -> Value {
    let folder = survey::session_folder(&machine.directories.state, &entry.pod_id, &entry.life);
    let summary = survey::logged_summary(folder.as_deref());
    let known = json!({
        "pod_id": entry.pod_id, "name": entry.name, "pid": entry.pid, "life": entry.life, "since": entry.since,
        "scope": entry.scope_allow, "lent": [], "spawner": entry.delegated_from, "sandbox": "",
        "model": summary.model.as_deref().unwrap_or_default(), "status": survey::last_known(&summary),
        "detail": "lives but does not answer", "answers": false, "protocol": 0, "version": "", "queued": 0,
        "events_in_flight": 0
    });
    with(&logged(&folder.unwrap_or_default(), &summary), known)
}

/// What the log in a session folder tells, with the keys of `status`.
fn logged(folder: &Path, summary: &Summary) -> Value {
    json!({
        "state_dir": folder.to_string_lossy(), "log": session::log_path(folder).to_string_lossy(),
        "turn": summary.turn, "usage": summary.usage, "last_result": summary.last_result,
        "last_response": cut_end(&summary.last_response, MAX_LAST_RESPONSE_BYTES)
    })
}

/// When a session was written into last, in seconds since 1970: the last line of the log tells the pod's end.
fn written_last(folder: &Path) -> Option<u64> {
    let files = [session::history_path(folder), session::log_path(folder)];
    let times = files.iter().filter_map(|file| Some(std::fs::symlink_metadata(file).ok()?.mtime()));
    times.max().map(i64::unsigned_abs)
}

/// The newest session of a pod that has ended.
fn ended(machine: &Machine, id: &PodId) -> Option<Value> {
    let folder = session::folders_of(&machine.directories.state, id).into_iter().next()?;
    let (detail, summary) = match Session::open_to_read(&folder).map(|session| session.summary()) {
        Ok(cut) if cut.turn > 0 && cut.last_result.is_none() => ("ended in the middle of a turn".into(), cut),
        Ok(summary) => ("has ended".to_owned(), summary),
        Err(error) => (error.to_string(), Summary::default()),
    };
    let known = json!({
        "pod_id": id, "name": id, "status": Status::Stopped, "detail": detail, "scope": [],
        "since": written_last(&folder)
    });
    Some(with(&logged(&folder, &summary), known))
}

/// `insomnia show POD`: the settings of its session as resolved, each with where it comes from. Values of headers
/// may be secrets and are left out.
pub(super) fn show(machine: &Machine, given: &Given) -> Result<bool> {
    let folder = machine.folder(given.word(0, "POD")?)?;
    let mut settings = manifest::lay_over(&[manifest::saved(&folder)?])?;
    let set = survey::logged_summary(Some(&folder)).model;
    if let Some(model) = set.filter(|model| settings.provider.model.as_ref() != Some(model)) {
        settings.provider.model = Some(model);
        settings.sources.insert("provider.model".into(), "insomnia set".into());
    }
    if let Some(url) = settings.provider.base_url.as_mut() {
        if let Some(at) = url.find('?') {
            url.replace_range(at.., "?(not shown)");
        }
    }
    settings.provider.headers.values_mut().for_each(|value| *value = json!("(not shown)"));
    let (values, sources) = (json!(settings), &settings.sources);
    let source = |key: &str| sources.get(key).map_or("built in", String::as_str);
    let plain = || {
        let each = values.as_object().into_iter().flat_map(manifest::flatten);
        let rows = each.map(|(key, value)| vec![key.clone(), value.to_string(), source(&key).to_owned()]);
        table(&["KEY", "VALUE", "FROM"], rows)
    };
    reply(given, &json!({ "state_dir": folder, "settings": values, "sources": sources }), plain);
    Ok(true)
}

/// A session whose pod has ended.
#[derive(Debug, Clone, Serialize)]
pub(super) struct EndedSession {
    /// Its folder.
    pub(super) folder: PathBuf,
    /// Its pod.
    pub(super) pod_id: PodId,
    /// When something was written into its history or its log last, in seconds before now.
    pub(super) age_seconds: u64,
}

/// The sessions that ended at least so long ago. A pod lives when its life is held, whatever its entry says; of one
/// that lives, its own and the newest session stay, and so does each whose history some process has open, which
/// may be a pod with another runtime directory.
pub(super) fn ended_sessions(machine: &Machine, age_seconds_min: u64) -> Result<Vec<EndedSession>> {
    let runtime = machine.lock.runtime();
    let mut living: Vec<(PodId, Life)> = Vec::new();
    for life in life::all(runtime)?.into_iter().filter(|life| life::probe(runtime, life) == Holding::Held) {
        living.push((life::entry_of(runtime, &life)?.pod_id, life));
    }
    let table = machine.lock.read()?;
    let entries = table.allocations().iter().filter(|entry| machine.lives(entry));
    living.extend(entries.map(|entry| (entry.pod_id.clone(), entry.life.clone())));
    let (state, open) = (&machine.directories.state, open_files());
    let mut found = Vec::new();
    for pod_id in session::pod_ids(state) {
        for (at, folder) in session::folders_of(state, &pod_id).into_iter().enumerate() {
            let own = |(id, life): &(PodId, Life)| {
                *id == pod_id
                    && (at == 0 || survey::session_folder(state, id, life).as_ref() == Some(&folder))
            };
            // What a link leads to is not ours to remove.
            let is_ours =
                file::is_real_directory(&state.join(pod_id.as_str())) && file::is_real_directory(&folder);
            let history = std::fs::symlink_metadata(session::history_path(&folder));
            let Some(history) = history.ok().filter(|_| is_ours) else { continue };
            let age_seconds = clock::now_seconds().saturating_sub(written_last(&folder).unwrap_or_default());
            let is_open = open.contains(&(history.dev(), history.ino()));
            if age_seconds >= age_seconds_min && !is_open && !living.iter().any(own) {
                found.push(EndedSession { folder, pod_id: pod_id.clone(), age_seconds });
            }
        }
    }
    Ok(found)
}

/// Device and inode of every file that a process of this user has open. Source: proc_pid_fd(5).
fn open_files() -> HashSet<(u64, u64)> {
    let entries = |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().flatten();
    let descriptors = entries("/proc".into()).flat_map(|process| entries(process.path().join("fd")));
    let opened = descriptors.filter_map(|descriptor| std::fs::metadata(descriptor.path()).ok());
    opened.map(|file| (file.dev(), file.ino())).collect()
}

/// What a file or a directory with all in it takes, in bytes.
pub(super) fn size(path: &Path) -> u64 {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return 0 };
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten().filter(|_| metadata.is_dir());
    metadata.len() + inside.map(|entry| size(&entry.path())).sum::<u64>()
}

/// `insomnia prune`: removes sessions of pods that ended long ago. They are put aside under the lock, so that no
/// pod can come back to one meanwhile, and removed after it.
pub(super) fn prune(machine: &Machine, given: &Given) -> Result<bool> {
    let age = seconds(given.value("older-than").unwrap_or("30d"))?;
    let is_dry = given.has("dry-run");
    let aside = machine.directories.state.join(".pruned");
    let place = |session: &EndedSession| match is_dry {
        true => session.folder.clone(),
        false => aside.join(session::session_name(&session.folder).replace('/', "-")),
    };
    let mut failures: Vec<String> = Vec::new();
    let mut is_done = |path: &Path, done: std::io::Result<()>| {
        failures.extend(done.as_ref().err().map(|error| format!("{}: {error}", path.display())));
        done.is_ok()
    };
    let put_aside = |_: &mut AllocationTable| {
        let mut sessions = ended_sessions(machine, age)?;
        make_private(&aside)?;
        sessions.retain(|session| {
            let moved = std::fs::rename(&session.folder, place(session));
            let _ = session.folder.parent().map(std::fs::remove_dir); // stays while another session is in it
            is_done(&session.folder, moved)
        });
        Ok(sessions)
    };
    let sessions = match is_dry {
        true => ended_sessions(machine, age)?,
        false => machine.lock.edit(None, put_aside)?.value,
    };
    let (now, mut bytes) = (clock::now_seconds(), 0);
    let row = |session: &EndedSession| {
        let (age, size) = (ago(now.saturating_sub(session.age_seconds), now), size(&place(session)));
        bytes += size;
        vec![session::session_name(&session.folder), age, format!("{} KiB", size.div_ceil(1024))]
    };
    let rows: Vec<Vec<String>> = sessions.iter().map(row).collect();
    if !is_dry {
        is_done(&aside, std::fs::remove_dir_all(&aside));
    }
    let plain = || {
        let (lines, count) = (table(&["SESSION", "ENDED", "SIZE"], rows), sessions.len());
        let freed = if is_dry { "would free" } else { "freed" };
        format!("{lines}\n{freed} {} KiB of {count} sessions", bytes.div_ceil(1024))
    };
    let json = json!({ "dry_run": is_dry, "bytes": bytes, "sessions": sessions, "failures": failures });
    reply(given, &json, plain);
    if !given.has("json") {
        failures.iter().for_each(|failure| talk_line(&format!("cannot be removed: {failure}")));
    }
    Ok(failures.is_empty())
}

/// Makes a directory of this user's alone; a link or anything else in its place is refused.
fn make_private(path: &Path) -> Result<()> {
    let made = std::fs::DirBuilder::new().mode(0o700).create(path);
    made.or_else(|error| if file::is_real_directory(path) { Ok(()) } else { Err(error) })
        .map_err(|source| Error::io(format!("put sessions aside in \"{}\"", path.display()), source))
}

/// An age such as `12h` or `30d`.
fn seconds(age: &str) -> Result<u64> {
    let read =
        |(unit, seconds): (&str, u64)| age.strip_suffix(unit)?.parse::<u64>().ok()?.checked_mul(seconds);
    UNITS
        .into_iter()
        .find_map(read)
        .ok_or_else(|| Error::Usage(format!("--older-than needs an age such as 12h or 30d, not \"{age}\"")))
}
