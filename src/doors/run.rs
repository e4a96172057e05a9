//! `insomnia run`: a root pod here, followed until its whole tree is quiet, then ended.

use std::io::{BufRead, IsTerminal};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde_json::json;

use crate::doors::commands::Given;
use crate::doors::find::Machine;
use crate::doors::follow::{First, Followed, Follower, Over, Presses, Style};
use crate::doors::terminal::{answer, json_line, listed, talk, talk_line, with};
use crate::store::manifest::{self, Layer};
use crate::store::paths::canonical;
use crate::sys::signal;
use crate::tools::survey;
use crate::wire::client::{self, Address};
use crate::wire::launch::Ready;
use crate::words::allocation::Allocation;
use crate::words::error::{Error, Result};
use crate::words::limits::MAX_LINE_BYTES;
use crate::words::protocol::{ErrorCode, Method, RunReply, Status, StatusReply, StreamEvent};
use crate::words::text::escape_name;

/// Runs the command. The answer is whether the root's last turn finished.
pub(super) fn run(machine: &Machine, given: &Given) -> Result<bool> {
    if given.words.first().is_some_and(|task| task.trim().is_empty()) {
        return Err(Error::Usage("the task is empty".into()));
    }
    let (theirs, keeps, started) = (machine.clone(), given.has("keep"), Arc::new(OnceLock::<Address>::new()));
    let its_address = Arc::clone(&started);
    let at_prompt = move || {
        let Some(root) = its_address.get() else { return };
        let done = match keeps {
            true => theirs.who_lives_on(&root.pod).map(|text| talk_line(&format!("\n{text}"))),
            false => stop_tree(&theirs, root),
        };
        signal::exit_now(i32::from(done.is_err()));
    };
    // Before the start, so that nobody who presses Ctrl-C in it leaves a pod behind.
    let presses = Presses::listen(at_prompt)?;
    let ready = launch_root(machine, given)?;
    // From here on this life of it is meant, and no later pod of its name.
    let entry = machine.living(ready.pod_id.as_str()).ok().filter(|entry| entry.pid == ready.pid);
    let root = entry.map(|entry| survey::address_of(&entry));
    let root = root.ok_or_else(|| Error::told(format!("pod \"{}\" has ended already", ready.pod_id)))?;
    let _ = started.set(root.clone());
    let outcome = if presses.have_come() {
        Err(Error::told("interrupted before the pod had anything to do"))
    } else if given.has("detach") {
        let accepted = given.words.first().map_or(Ok(()), |task| give_task(&root, task));
        accepted.map(|()| {
            answer(&format!("{}\n", json_line(&ready)));
            true
        })
    } else {
        follow_root(machine, given, &root, presses)
    };
    if outcome.is_err() {
        end_or_keep(machine, &root, keeps)?;
    }
    outcome
}

fn follow_root(machine: &Machine, given: &Given, root: &Address, presses: Presses) -> Result<bool> {
    let keeps = given.has("keep");
    let first = First::Cancels(if keeps { "leaves it running" } else { "ends the pod and all below it" });
    let mut followed = Followed::begin(root, None, Style::of_answer(given), first, presses)?;
    let status: StatusReply = client::ask(root, None, Method::Status)?;
    let writes = listed(status.scope.iter().filter(|rule| rule.writes()), ", ");
    let writes = writes.as_deref().unwrap_or("nothing");
    followed.follower.say(&format!("-- pod {} (pid {}) may write {writes}", root.pod, status.pid));
    if !status.sandbox.starts_with('1') {
        followed.follower.say(&format!("-- shell {}", status.sandbox));
    }
    let over = match given.words.first() {
        Some(task) => one_task(machine, &mut followed, task)?,
        None => lines_from_input(machine, &mut followed)?,
    };
    let follower = &mut followed.follower;
    let finished = follower.finished();
    match over {
        Over::HungUp => return Ok(true), // as --detach: the pods live on and nobody listens
        Over::Reached | Over::Interrupted if keeps => follower.say(&machine.who_lives_on(&root.pod)?),
        Over::Unheard if keeps => {}
        Over::Reached | Over::Interrupted | Over::Unheard => stop_tree(machine, root)?,
        Over::Ended => say_who_is_left(machine, &root.pod)?,
    }
    Ok(!followed.is_heard()? || finished && over == Over::Reached)
}

fn give_task(root: &Address, task: &str) -> Result<()> {
    let given = client::ask::<RunReply>(root, None, Method::Run { input: task.to_owned() });
    if matches!(&given, Err(Error::Peer(refusal)) if refusal.code == ErrorCode::TooLarge) {
        return Err(Error::told(format!(
            "the task has {} bytes, more than a request line may have ({MAX_LINE_BYTES}); put it into a file and name the file",
            task.len()
        )));
    }
    given.map(|_| ())
}

/// The entry of the root while it lives.
fn entry_of(machine: &Machine, root: &Address) -> Option<Allocation> {
    machine.living(&root.pod).ok().filter(|entry| root.life.as_ref() == Some(&entry.life))
}

/// After a failure: the tree ends, unless it was to be kept.
fn end_or_keep(machine: &Machine, root: &Address, keeps: bool) -> Result<()> {
    if !keeps {
        return stop_tree(machine, root);
    }
    if entry_of(machine, root).is_some() {
        talk_line(&format!("-- {}", machine.who_lives_on(&root.pod)?));
    }
    Ok(())
}

/// Ends the pod and all below it; one that cannot be ended is named.
fn stop_tree(machine: &Machine, root: &Address) -> Result<()> {
    let Some(root) = entry_of(machine, root) else { return Ok(()) };
    for (pod_id, error) in machine.stop(&root, true, true)?.into_iter().filter_map(Result::err) {
        talk_line(&format!("pod \"{pod_id}\" lives on: {error}"));
    }
    Ok(())
}

fn launch_root(machine: &Machine, given: &Given) -> Result<Ready> {
    let current = machine.current()?.to_owned();
    let directory = canonical(Path::new(given.value("dir").unwrap_or(".")), &current)?;
    if !directory.is_dir() {
        return Err(Error::told(format!("working directory \"{}\" is no directory", directory.display())));
    }
    let text = directory.to_str().ok_or_else(|| {
        let shown = escape_name(directory.as_os_str().as_encoded_bytes());
        Error::told(format!(
            "working directory \"{shown}\" is not UTF-8, which scopes must be; work in another one"
        ))
    })?;
    let provider = json!({ "model": given.value("model"), "kind": given.value("provider") });
    let mut overlay = json!({ "provider": provider });
    if let Some(name) = given.value("instruction") {
        let name = if name.starts_with('$') { name.into() } else { current.join(name) };
        let name = name.to_str().ok_or_else(|| Error::told("the path of the instruction is not UTF-8"))?;
        overlay = with(&overlay, json!({ "instruction": name }));
    }
    let mut layers = Vec::new();
    let name = given.value("name").unwrap_or("main");
    let mut args = ["--name", name, "--dir", text, "--overlay", "-"].map(str::to_owned).to_vec();
    if let Some(path) = given.value("manifest") {
        layers.push(manifest::named(Path::new(path))?);
        args.extend(["--manifest".to_owned(), current.join(path).to_string_lossy().into_owned()]);
    }
    let flags = Layer::overlay(&overlay, "command line");
    layers.push(flags.map_err(|error| Error::Usage(error.to_string()))?);
    let settings = manifest::gather(&machine.directories.config, &directory, layers)?;
    let mut rules: Vec<String> = given.values("scope").map(str::to_owned).collect();
    if given.has("read-only") {
        if !rules.is_empty() {
            return Err(Error::Usage("--read-only and --scope contradict each other".into()));
        }
        overlay = with(&overlay, json!({ "scope": [] }));
    } else if rules.is_empty() && settings.scope.is_empty() {
        rules.push(format!("{text}:write:recursive"));
    }
    args.extend(rules.into_iter().flat_map(|rule| ["--scope".to_owned(), rule]));
    machine.launch(&settings, &args, &overlay.to_string()).map_err(|error| match error.to_string() {
        text if text.contains("is held by pod") => Error::told(format!("{text}; or start with --read-only")),
        _ => error,
    })
}

fn one_task(machine: &Machine, followed: &mut Followed, task: &str) -> Result<Over> {
    give_task(&followed.address, task)?;
    let root = followed.address.clone();
    // Looked at when the root has become quiet, and while nothing comes. Two looks in a row must say so: a report
    // may be on its way from a pod that is quiet already to one that is about to wake.
    let mut said = String::new();
    let over = followed.follow(move |follower, event| {
        let may_be_quiet = event.is_none_or(
            |event| matches!(event, StreamEvent::Status { status, .. } if *status != Status::Running),
        );
        if !may_be_quiet {
            return Ok(false);
        }
        let first = look_at_tree(machine, &root, follower, &mut said)?;
        Ok(first.is_some() && first == look_at_tree(machine, &root, follower, &mut said)?)
    })?;
    let follower = &mut followed.follower;
    follower.end_line();
    if over == Over::Reached {
        follower.say_failure();
    }
    if follower.finished() && over != Over::Ended {
        follower.answer_last_text();
    }
    Ok(over)
}

/// Each line is a task; the next one is read when the tree is quiet.
fn lines_from_input(machine: &Machine, followed: &mut Followed) -> Result<Over> {
    let input = std::io::stdin();
    let is_terminal = input.is_terminal();
    let mut lines = input.lock().lines();
    loop {
        let prompt = if is_terminal && followed.follower.talks() { "> " } else { "" };
        let next = followed.at_prompt(|| {
            talk(prompt);
            lines.next()
        });
        // One that has hung up gives no line either, and is no terminal any more.
        if is_terminal && !input.is_terminal() {
            return Ok(Over::HungUp);
        }
        let Some(line) = next else { return Ok(Over::Reached) };
        let line = line.map_err(|source| Error::io("read a line from standard input", source))?;
        if line.trim().is_empty() {
            continue;
        }
        let over = one_task(machine, followed, &line)?;
        if over != Over::Reached {
            return Ok(over);
        }
    }
}

/// The pods of the tree with their turns when all are quiet; otherwise says whom it waits for, unless it was said.
fn look_at_tree(
    machine: &Machine,
    root: &Address,
    follower: &mut Follower,
    said: &mut String,
) -> Result<Option<Vec<(String, u64)>>> {
    let table = machine.table()?;
    let Some(root) = entry_of(machine, root) else { return Ok(Some(Vec::new())) };
    let entries: Vec<_> = [&root].into_iter().chain(table.subtree(&root.pod_id)).collect();
    let addresses: Vec<_> = entries.iter().map(|entry| survey::address_of(entry)).collect();
    let answers = survey::ask_all(&addresses, None);
    let is_quiet = |answer: &Option<StatusReply>| {
        answer.as_ref().is_some_and(|status| !status.is_at_work() && status.events_in_flight == 0)
    };
    let busy = entries.iter().zip(&answers).filter(|(_, answer)| !is_quiet(answer)).map(|(entry, answer)| {
        let detail = answer.as_ref().map_or("does not answer", |answer| answer.detail.as_str());
        format!("{} ({detail})", entry.pod_id)
    });
    if let Some(busy) = listed(busy, ", ") {
        let waiting = format!("waiting for {busy}");
        if answers.first().is_some_and(is_quiet) {
            follower.does(&waiting);
            if waiting != *said {
                follower.say(&format!("-- {waiting}"));
                *said = waiting;
            }
        }
        return Ok(None);
    }
    // What the root's last turn has said is shown before following ends.
    let shown = follower.last_end.as_ref().map_or(0, |end| end.turn);
    if answers.iter().flatten().next().is_some_and(|root| root.turn != shown) {
        return Ok(None);
    }
    let turns = answers.iter().flatten().map(|answer| (answer.pod_id.to_string(), answer.turn));
    Ok(Some(turns.collect()))
}

fn say_who_is_left(machine: &Machine, pod: &str) -> Result<()> {
    let table = machine.table()?;
    let mine = format!("{pod}/");
    let is_mine = |by: &String| by.starts_with(&mine);
    let orphans = table.allocations().iter().filter(|entry| entry.spawned_by.as_ref().is_some_and(is_mine));
    let orphans = listed(orphans.map(|entry| &entry.pod_id), ", ");
    let orphans = orphans.map_or(String::new(), |ids| format!("; these live on: {ids}"));
    talk_line(&format!(
        "pod {pod} has ended before its work did{orphans}; \"insomnia resume {pod}\" goes on with it"
    ));
    Ok(())
}
