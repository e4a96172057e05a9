//! SpawnPod: reserve under the lock, launch, check, record, give the task, tell the spawner.
//!
//! Runs on the turn thread. Whatever fails is undone: afterwards there is no entry, no process, no record and
//! no empty directory, and the error carries the child's own words.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::store::life::{self, HeldLife};
use crate::store::paths::{canonical, canonical_rules};
use crate::store::registry::{Origin, PodRecord};
use crate::store::session;
use crate::sys::wait::Cancel;
use crate::sys::{clock, process};
use crate::tools::context::PodContext;
use crate::tools::input::SpawnInput;
use crate::tools::{pods, survey};
use crate::wire::launch::{self, Launch, Ready};
use crate::words::allocation::{Allocation, AllocationState};
use crate::words::error::{Error, Result};
use crate::words::identity::PodName;
use crate::words::protocol::{Method, PodEvent, RunReply};
use crate::words::scope::Rule;

/// A spawn that was begun, with everything that has to be undone when it fails.
struct Begun<'a> {
    context: &'a PodContext,
    entry: Allocation,
    reservation: HeldLife,
    made: Vec<PathBuf>,
}

/// Runs the tool.
///
/// # Errors
/// With the reason, after everything has been undone.
pub(crate) fn run(context: &PodContext, input: &SpawnInput, cancel: &Cancel) -> Result<Value> {
    let directory = working_directory(context, input.dir.as_deref())?;
    let overlay = overlay(context, input, instruction(context, input.instruction.as_deref())?);
    let mut begun = reserve(context, input, cancel)?;
    let spawned = begun
        .make_lent_directories()
        .and_then(|()| begun.launch(&directory, &overlay, cancel))
        .and_then(|ready| begun.record(&ready))
        .and_then(|record| begun.give_task(&record, &input.task, cancel).map(|()| record));
    match spawned {
        Ok(record) => Ok(begun.tell(&record)),
        Err(error) => {
            begun.undo();
            let name = crate::words::text::harmless_line(&input.name);
            Err(Error::told(format!("cannot start pod \"{name}\": {error}")))
        }
    }
}

/// The real path of what the child is to have as `what`, if this pod itself may read there.
fn readable(context: &PodContext, what: &str, path: &Path, hidden: &[PathBuf]) -> Result<PathBuf> {
    let path = canonical(path, &context.directory)?;
    let is_hidden = hidden.iter().any(|hidden| path.starts_with(hidden));
    if is_hidden || !context.view.effective()?.may_read(&path.to_string_lossy()) {
        return Err(Error::told(format!("{what} \"{}\" is outside your read scope", path.display())));
    }
    Ok(path)
}

fn working_directory(context: &PodContext, wanted: Option<&Path>) -> Result<PathBuf> {
    let directory = readable(context, "working directory", wanted.unwrap_or(Path::new(".")), &[])?;
    if !directory.is_dir() {
        return Err(Error::told(format!("working directory \"{}\" is no directory", directory.display())));
    }
    Ok(directory)
}

/// The instruction that the child is to have. One that is a path must be readable by this pod itself, because
/// the child's model can repeat what stands in it.
fn instruction(context: &PodContext, wanted: Option<&str>) -> Result<Option<String>> {
    let Some(path) = wanted.filter(|wanted| !wanted.starts_with('$')) else {
        return Ok(wanted.map(str::to_owned));
    };
    let path = readable(context, "instruction", Path::new(path), &context.hidden())?;
    Ok(Some(path.to_string_lossy().into_owned()))
}

/// The child's settings over its manifest files: the resolved provider, never its key, and nothing looser.
fn overlay(context: &PodContext, input: &SpawnInput, instruction: Option<String>) -> String {
    let manifest = &context.manifest;
    let mut provider = manifest.provider.clone();
    provider.model = input.model.clone().or_else(|| context.model());
    let mut shell = manifest.shell.clone();
    shell.spawner_level = Some(crate::tools::shell::level(context).number());
    let denied: Vec<&String> = manifest.tools.deny.iter().chain(input.tools_deny.iter().flatten()).collect();
    let mut overlay = json!({
        "provider": provider,
        "tools": { "deny": denied },
        "shell": shell,
        "limits": manifest.limits,
        "protect_git": manifest.protect_git,
        "pod_command": manifest.pod_command,
    });
    if let (Some(instruction), Some(object)) = (instruction, overlay.as_object_mut()) {
        object.insert("instruction".into(), json!(instruction));
    }
    overlay.to_string()
}

fn reserve<'a>(context: &'a PodContext, input: &SpawnInput, cancel: &Cancel) -> Result<Begun<'a>> {
    let name = PodName::new(input.name.clone())?;
    let mut rules = canonical_rules(input.scope.iter().flatten(), &context.directory)?;
    for rule in &rules {
        context.directories.check_scope(rule)?;
    }
    if rules.iter().all(Rule::writes) {
        let own = context.lock.read()?.get(&context.own.pod_id).cloned();
        rules.extend(own.into_iter().flat_map(|own| own.scope_allow).filter(|rule| !rule.writes()));
    }
    let life = life::new_life()?;
    let stat =
        process::process_stat(context.pid.get()).ok_or_else(|| Error::told("cannot read /proc/self/stat"))?;
    let reserved = context.lock.edit(Some(cancel), |table| {
        let own =
            table.by_life(&context.own.life).ok_or_else(|| Error::told("this pod has no entry any more"))?;
        let spawner = own.pod_id.clone();
        let pod_id = table.free_id(&name);
        let entry = Allocation {
            socket: context.directories.socket(&pod_id)?.to_string_lossy().into_owned(),
            pod_id,
            name: name.clone(),
            pid: context.pid,
            start_time: stat.start_time,
            life,
            state: AllocationState::Starting,
            spawned_by: Some(session::session_name(context.session.directory())),
            scope_allow: rules,
            delegated_from: Some(spawner),
            since: clock::now_seconds(),
            extra: BTreeMap::new(),
        };
        table.lend(entry.clone(), &context.manifest.limits)?;
        let reservation = HeldLife::create(context.lock.runtime(), &entry)?;
        Ok((entry, reservation))
    });
    let (entry, reservation) =
        reserved.map_err(|error| Error::told(format!("cannot start pod \"{name}\": {error}")))?.value;
    Ok(Begun { context, entry, reservation, made: Vec::new() })
}

impl Begun<'_> {
    /// Makes what is lent and missing. A link that appeared meanwhile would move the scope, so each path is
    /// made canonical once more.
    fn make_lent_directories(&mut self) -> Result<()> {
        for rule in self.entry.write_rules() {
            let path = Path::new(rule.path());
            let missing: Vec<&Path> = path.ancestors().take_while(|place| !place.exists()).collect();
            for place in missing.into_iter().rev() {
                std::fs::create_dir(place).map_err(|source| {
                    Error::io(format!("create lent directory \"{}\"", place.display()), source)
                })?;
                self.made.push(place.to_owned());
            }
            if canonical(path, Path::new("/"))? != path {
                return Err(Error::told(format!(
                    "lent directory \"{}\" was replaced by a link meanwhile",
                    path.display()
                )));
            }
        }
        Ok(())
    }

    fn launch(&self, directory: &Path, overlay: &str, cancel: &Cancel) -> Result<Ready> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let args = [
            ("--name", self.entry.name.to_string()),
            ("--dir", text(directory)),
            ("--adopt", self.entry.life.to_string()),
            ("--overlay", "-".into()),
            ("--callback", text(&self.context.socket)),
        ];
        let args: Vec<String> = args.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        let command = launch::pod_command(&self.context.manifest.pod_command);
        let limit = self.context.manifest.limits.launch();
        launch::launch(
            Launch { command: &command, args: &args, directory, overlay, variables: &[], limit },
            cancel,
        )
    }

    /// The child is what the lock says it is, not what it says itself.
    fn record(&self, ready: &Ready) -> Result<PodRecord> {
        let table = self.context.lock.read()?;
        let entry = table.get(&self.entry.pod_id).filter(|entry| {
            entry.state == AllocationState::Live
                && entry.delegated_from.as_ref() == Some(&self.context.own.pod_id)
        });
        let Some(entry) = entry.filter(|entry| entry.pod_id == ready.pod_id) else {
            return Err(Error::told("it said that it was ready, but it has no entry in scope.lock"));
        };
        survey::know(self.context, entry, Origin::Spawned)
    }

    fn give_task(&self, record: &PodRecord, task: &str, cancel: &Cancel) -> Result<()> {
        if cancel.is_set() {
            return Err(Error::Cancelled);
        }
        self.context.ask::<RunReply>(record, Method::Run { input: task.to_owned() }).map(drop)
    }

    fn tell(self, record: &PodRecord) -> Value {
        self.context.events.send(PodEvent::ScopeSubDelegated {
            parent_pod: self.context.own.pod_id.clone(),
            sub_pod: record.pod_id.clone(),
            sub_socket: record.socket.to_string_lossy().into_owned(),
            scope: record.scope.clone(),
        });
        drop(self.reservation);
        life::remove(self.context.lock.runtime(), &self.entry.life);
        json!({ "pod_id": record.pod_id, "address": record.socket, "scope": record.scope })
    }

    fn undo(self) {
        let context = self.context;
        let adopted = context.lock.edit(None, |table| {
            table.release(&self.entry.life);
            // What the child has put in its place is a live entry of that id under this pod.
            Ok(table
                .get(&self.entry.pod_id)
                .filter(|entry| entry.delegated_from == self.entry.delegated_from)
                .cloned())
        });
        match adopted {
            Ok(edited) => {
                life::remove(context.lock.runtime(), &self.entry.life);
                if let Some(child) = edited.value {
                    stop_child(context, &child);
                }
            }
            Err(error) => {
                log::error!("cannot take back the reservation of \"{}\": {error}", self.entry.pod_id)
            } // the next opener reclaims it
        }
        for place in self.made.iter().rev() {
            let _ = std::fs::remove_dir(place); // a directory that is no longer empty stays
        }
        // Dropped with us, not removed: if the entry stayed, a free life file is the proof that it is dead. A
        // missing one would leave our own process as the proof that it lives. A later start sweeps the file.
    }
}

/// Stops a child that came too far, as StopPod would, and forgets it.
fn stop_child(context: &PodContext, child: &Allocation) {
    let Ok(cancel) = Cancel::new() else { return };
    let failed = match pods::end(context, child, false, &cancel) {
        Ok(outcome) => outcome.into_iter().find_map(Result::err).map(|(_, error)| error),
        Err(error) => Some(error),
    };
    if let Some(error) = failed {
        log::error!("cannot stop pod \"{}\" after its failed start: {error}", child.pod_id); // the lock shows it
    }
}
