//! The tools about other pods that run already: send, read, list, wait, stop.
//!
//! A pod knows only those that it spawned, that were spawned below it, or that were introduced to it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::store::registry::{Origin, PodRecord};
use crate::store::session::Session;
use crate::store::{life, repair};
use crate::sys::wait::Cancel;
use crate::tools::context::PodContext;
use crate::tools::input::Until;
use crate::tools::mailbox::{Event, Heard, NewsKind};
use crate::tools::stop::{self, Manner, Outcome, Stopped};
use crate::tools::survey::{self, address_of_record};
use crate::words::allocation::Allocation;
use crate::words::error::{Error, Result};
use crate::words::identity::PodId;
use crate::words::message::Summary;
use crate::words::protocol::{Done, Introduction, Method, OutputReply, RunReply, Status, StatusReply};

/// How long WaitPods waits when the model does not say, in seconds.
const WAIT_SECONDS: u64 = 300;
/// How long it may be told to wait, in seconds.
const WAIT_SECONDS_MAX: u64 = 3600;
/// A pod whose report was lost is noticed by asking again after this time.
const WAIT_AGAIN: Duration = Duration::from_secs(5);

/// A known pod that lives, or the sentence that says which pods there are. The lock is the truth about who is
/// below this pod, so one that is not known yet is looked for there.
fn known(context: &PodContext, pod_id: &str) -> Result<PodRecord> {
    let find = || PodId::new(pod_id).ok().and_then(|id| context.registry.get(&id));
    if let Some(record) = find() {
        return Ok(record);
    }
    survey::add_descendants(context, &context.lock.read()?)?;
    find().ok_or_else(|| {
        let names: Vec<String> =
            context.registry.pods().iter().map(|record| record.pod_id.to_string()).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let shown = crate::words::text::harmless_line(&crate::words::text::cut_end(pod_id, 64));
        Error::told(format!("there is no living pod \"{shown}\" that you know; you know: {names}"))
    })
}

/// Runs SendToPod.
///
/// # Errors
/// When the pod is not known, does not answer, or refuses.
pub(crate) fn send(context: &PodContext, pod_id: &str, message: String) -> Result<Value> {
    let record = known(context, pod_id)?;
    let reply: RunReply = context.ask(&record, Method::Run { input: message })?;
    Ok(json!({ "pod_id": record.pod_id, "delivered": true, "turn": reply.turn, "queued": reply.queued }))
}

/// Runs ReadPodOutput; an ended pod is read from its history.
///
/// # Errors
/// When the pod was never known, or lives but does not answer.
pub(crate) fn read(context: &PodContext, pod_id: &str, since: Option<u64>) -> Result<Value> {
    let record = known_or_ended(context, pod_id)?;
    let output = match context.ask(&record, Method::ReadOutput { since }) {
        Err(error) if context.lives(&record.life) => return Err(error),
        asked => asked.or_else(|_| from_history(context, &record, since))?,
    };
    if !output.more {
        let turn = output.turn.saturating_sub(u64::from(output.status == Status::Running)); // the last that is over
        context.mailbox.post(Event::Heard(record.life, Heard::Turn(turn)));
    }
    let OutputReply { status, text, cursor, more, turn, last_result } = output;
    Ok(json!({
        "pod_id": record.pod_id, "status": status, "turn": turn, "last_result": last_result, "text": text,
        "cursor": cursor, "more": more
    }))
}

fn from_history(context: &PodContext, record: &PodRecord, since: Option<u64>) -> Result<OutputReply> {
    let found = || survey::session_folder(&context.directories.state, &record.pod_id, &record.life);
    let folder = record.state_dir.clone().or_else(found);
    let folder = folder
        .ok_or_else(|| Error::told(format!("pod \"{}\" has ended and left no history", record.pod_id)))?;
    let session = Session::open_to_read(&folder)?;
    let (text, cursor, more) = session.output(since)?;
    let Summary { turn, last_result, .. } = session.summary();
    Ok(OutputReply { status: Status::Stopped, text, cursor, more, turn, last_result })
}

/// Runs StopPod.
///
/// # Errors
/// When the pod is not known or was only introduced, does not end, or the wait is cancelled.
pub(crate) fn stop_pod(context: &PodContext, pod_id: &str, tree: bool, cancel: &Cancel) -> Result<Value> {
    let record = known(context, pod_id)?;
    if record.origin == Origin::Introduced {
        return Err(Error::told(format!(
            "pod \"{}\" was only introduced to you: you may send to it and read it, not stop it",
            record.pod_id
        )));
    }
    let table = context.lock.read()?;
    let Some(target) = table.by_life(&record.life).cloned() else {
        context.registry.end(&record.life)?;
        return Ok(json!({ "pod_id": record.pod_id, "how": stop::End::AlreadyEnded, "scope_returned": [] }));
    };
    let outcome = end(context, &target, tree, cancel)?;
    let stopped = outcome.into_iter().map(|one| {
        one.map_err(|(pod_id, error)| Error::told(format!("pod \"{pod_id}\" is not stopped: {error}")))
    });
    let stopped = stopped.collect::<Result<Vec<Stopped>>>()?;
    Ok(if tree { json!({ "stopped": stopped }) } else { json!(stopped.first()) })
}

/// Runs IntroducePod.
///
/// # Errors
/// When one of the two is not known, or `to` does not take introductions from this pod.
pub(crate) fn introduce(context: &PodContext, to: &str, pod_id: &str) -> Result<Value> {
    let to = known(context, to)?;
    let other = known(context, pod_id)?;
    let pods = vec![Introduction { pod_id: other.pod_id.clone(), life: other.life }];
    context.ask::<Done>(&to, Method::Introduce { pods })?;
    Ok(json!({ "to": to.pod_id, "knows": other.pod_id }))
}

/// Ends a pod of this one's, with `tree` all below it too; each outcome. The ends that it causes are no news.
pub(crate) fn end(
    context: &PodContext,
    target: &Allocation,
    tree: bool,
    cancel: &Cancel,
) -> Result<Vec<Outcome>> {
    // A pod is stopped even where the lock cannot be read; then nobody is known below it.
    let table = repair::living(&context.lock).unwrap_or_default();
    let below = table.subtree(&target.pod_id).into_iter().filter(|_| tree);
    let ending: Vec<&Allocation> = below.chain([target]).collect();
    let hear = |heard: Heard, entry: &Allocation| {
        context.mailbox.post(Event::Heard(entry.life.clone(), heard));
    };
    ending.iter().for_each(|entry| hear(Heard::End, entry));
    let limit = context.manifest.limits.stop();
    let manner = Manner { from: Some(&context.own), limit, ask: true, cancel };
    let outcome = stop::stop_all(&context.lock, target, tree, manner);
    let table = repair::living(&context.lock).unwrap_or_default();
    for entry in ending.iter().filter(|entry| table.by_life(&entry.life).is_some()) {
        hear(Heard::NotStopped, entry); // its end will be news
    }
    for entry in ending.iter().filter(|entry| life::is_dead(context.lock.runtime(), entry)) {
        context.registry.end(&entry.life)?;
    }
    survey::add_descendants(context, &table)?;
    Ok(outcome)
}

/// Runs WaitPods: asks at the start, at each piece of news and every 5 s, and makes no model request meanwhile.
///
/// # Errors
/// When a pod is not known or the turn is cancelled.
pub(crate) fn wait(
    context: &PodContext,
    pod_ids: Option<Vec<String>>,
    until: Until,
    timeout_seconds: Option<u64>,
    cancel: &Cancel,
) -> Result<Value> {
    let records = match pod_ids {
        Some(ids) => ids.iter().map(|id| known_or_ended(context, id)).collect::<Result<Vec<_>>>()?,
        None => context.registry.pods(),
    };
    if records.is_empty() {
        return Err(Error::told("there is no pod to wait for"));
    }
    let seconds = timeout_seconds.unwrap_or(WAIT_SECONDS).min(WAIT_SECONDS_MAX);
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let names: Vec<String> = records.iter().map(|record| record.pod_id.to_string()).collect();
    context.mailbox.post(Event::Doing(format!("waiting for {}", names.join(", "))));
    let mut message = false;
    loop {
        let news = context.mailbox.await_news(); // before asking, so that nothing falls between
        if cancel.is_set() {
            return Err(Error::Cancelled);
        }
        let (done, running) = look(context, &records);
        let left = deadline.saturating_duration_since(Instant::now());
        let why = match until {
            Until::All if running.is_empty() => Some("all are done"),
            Until::Any if !done.is_empty() => Some("at least one is done"),
            Until::All | Until::Any if message => Some("a message for you has arrived"),
            Until::All | Until::Any if left.is_zero() => Some("the time is over"),
            Until::All | Until::Any => None,
        };
        if let Some(why) = why {
            return Ok(report(context, &done, &running, why));
        }
        message = news.recv_timeout(left.min(WAIT_AGAIN)) == Ok(NewsKind::Message);
    }
}

fn known_or_ended(context: &PodContext, pod_id: &str) -> Result<PodRecord> {
    known(context, pod_id).or_else(|unknown| {
        let ended = PodId::new(pod_id).ok().and_then(|id| context.registry.get_ended(&id));
        ended.ok_or(unknown)
    })
}

/// A pod that WaitPods has asked, with its answer.
type Asked<'a> = (&'a PodRecord, Option<StatusReply>);

/// Who is done, and who is at work.
fn look<'a>(context: &PodContext, records: &'a [PodRecord]) -> (Vec<Asked<'a>>, Vec<Asked<'a>>) {
    let addresses: Vec<_> = records.iter().map(address_of_record).collect();
    let asked = records.iter().zip(survey::ask_all(&addresses, Some(&context.own)));
    asked.partition(|(record, answer)| match answer {
        Some(answer) => !answer.is_at_work(),
        None => !context.lives(&record.life), // while it lives without an answer, nobody knows that it is done
    })
}

fn report(context: &PodContext, done: &[Asked<'_>], running: &[Asked<'_>], why: &str) -> Value {
    let row = |(PodRecord { pod_id, life, .. }, answer): &Asked<'_>| {
        let heard = answer.as_ref().map_or(Heard::End, |answer| Heard::Turn(answer.turn));
        context.mailbox.post(Event::Heard(life.clone(), heard));
        match answer {
            Some(StatusReply { status, turn, last_result, last_response, .. }) => json!({
                "pod_id": pod_id, "status": status, "turn": turn, "last_result": last_result,
                "last_response": last_response
            }),
            None => json!({ "pod_id": pod_id, "status": Status::Stopped }),
        }
    };
    let rows: Vec<Value> = done.iter().map(row).collect();
    if done.iter().any(|(_, answer)| answer.is_none()) {
        // What they held is to be seen by the next call already, and nobody may have opened the lock since.
        if let Err(error) = context.lock.edit(None, |_| Ok(())) {
            log::warn!("cannot take back what ended pods held: {error}"); // their watchers do
        }
    }
    let running: Vec<&PodId> = running.iter().map(|(record, _)| &record.pod_id).collect();
    json!({ "why": why, "done": rows, "still_running": running })
}
