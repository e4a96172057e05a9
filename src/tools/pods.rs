//! The tools about other pods that run already: send, read, list, wait, stop.
//!
//! A pod knows only those that it spawned, that were spawned below it, or that were introduced to it.

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::store::life;
use crate::store::registry::{Origin, PodRecord};
use crate::store::session::Session;
use crate::sys::wait::Cancel;
use crate::tools::context::PodContext;
use crate::tools::mailbox::{Event, Heard, NewsKind};
use crate::tools::stop::{self, Manner, Stopped};
use crate::tools::survey::{self, address_of_record};
use crate::wire::client;
use crate::words::allocation::AllocationTable;
use crate::words::error::{Error, Result};
use crate::words::identity::{Life, PodId};
use crate::words::message::Summary;
use crate::words::protocol::{Done, Introduction, Method, OutputReply, RunReply, Status, StatusReply};

/// How long WaitPods waits when the model does not say, in seconds.
const WAIT_SECONDS: u64 = 300;
/// How long it may be told to wait, in seconds.
const WAIT_SECONDS_MAX: u64 = 3600;
/// A pod whose report was lost is noticed by asking again after this time.
const WAIT_AGAIN: Duration = Duration::from_secs(5);

/// What SendToPod is given.
#[derive(Debug, Deserialize)]
pub(crate) struct SendInput {
    pod_id: String,
    message: String,
}

/// What ReadPodOutput is given.
#[derive(Debug, Deserialize)]
pub(crate) struct ReadInput {
    pod_id: String,
    since: Option<u64>,
}

/// What StopPod is given.
#[derive(Debug, Deserialize)]
pub(crate) struct StopInput {
    pod_id: String,
    #[serde(default)]
    tree: bool,
}

/// What IntroducePod is given.
#[derive(Debug, Deserialize)]
pub(crate) struct IntroduceInput {
    to: String,
    pod_id: String,
}

/// What WaitPods is given.
#[derive(Debug, Deserialize)]
pub(crate) struct WaitInput {
    pod_ids: Option<Vec<String>>,
    #[serde(default)]
    until: Until,
    timeout_seconds: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
enum Until {
    Any,
    #[default]
    All,
}

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
pub(crate) fn send(context: &PodContext, input: SendInput) -> Result<Value> {
    let record = known(context, &input.pod_id)?;
    let method = Method::Run { input: input.message };
    let reply: RunReply = client::ask(&address_of_record(&record), Some(&context.own), method)?;
    Ok(json!({ "pod_id": record.pod_id, "delivered": true, "turn": reply.turn, "queued": reply.queued }))
}

/// Runs ReadPodOutput; an ended pod is read from its history.
///
/// # Errors
/// When the pod was never known, or lives but does not answer.
pub(crate) fn read(context: &PodContext, input: ReadInput) -> Result<Value> {
    let record = known_or_ended(context, &input.pod_id)?;
    let asked = client::ask(
        &address_of_record(&record),
        Some(&context.own),
        Method::ReadOutput { since: input.since },
    );
    let output: OutputReply = match asked {
        Ok(output) => output,
        Err(error) if life::probe(context.lock.runtime(), &record.life) == life::Holding::Held => {
            return Err(error);
        }
        Err(_) => from_history(context, &record, input.since)?,
    };
    let turn_over =
        if output.status == Status::Running { output.turn.saturating_sub(1) } else { output.turn };
    if !output.more {
        context.mailbox.post(Event::Heard(Heard::Output { life: record.life.clone(), turn: turn_over }));
    }
    Ok(json!({
        "pod_id": record.pod_id, "status": output.status, "turn": output.turn, "last_result": output.last_result,
        "text": output.text, "cursor": output.cursor, "more": output.more
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

/// Runs ListPods.
///
/// # Errors
/// When `scope.lock` cannot be used.
pub fn list(context: &PodContext) -> Result<Value> {
    Ok(json!({ "pods": survey::known_pods(context)? }))
}

/// Runs StopPod.
///
/// # Errors
/// When the pod is not known or was only introduced, does not end, or the wait is cancelled.
pub(crate) fn stop_pod(context: &PodContext, input: &StopInput, cancel: &Cancel) -> Result<Value> {
    let record = known(context, &input.pod_id)?;
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
    let manner =
        Manner { from: Some(&context.own), limit: context.manifest.limits.stop(), ask: true, cancel };
    let lives: Vec<Life> = if input.tree {
        table
            .subtree(&target.pod_id)
            .iter()
            .map(|below| below.life.clone())
            .chain([target.life.clone()])
            .collect()
    } else {
        vec![target.life.clone()]
    };
    lives.iter().for_each(|life| context.mailbox.post(Event::Heard(Heard::Stopping(life.clone()))));
    let outcome = stop::stop_all(&context.lock, &target, input.tree, manner);
    let still_there = context.lock.read()?;
    for life in lives.iter().filter(|life| still_there.by_life(life).is_some()) {
        context.mailbox.post(Event::Heard(Heard::NotStopped(life.clone()))); // its end will be news
    }
    lives.iter().try_for_each(|life| forget_if_dead(context, &table, life))?;
    survey::add_descendants(context, &context.lock.read()?)?;
    let (stopped, failed): (Vec<_>, Vec<_>) = outcome.into_iter().partition(Result::is_ok);
    let stopped: Vec<Stopped> = stopped.into_iter().flatten().collect();
    if let Some(Err((pod_id, error))) = failed.into_iter().next() {
        return Err(Error::told(format!("pod \"{pod_id}\" is not stopped: {error}")));
    }
    Ok(if input.tree { json!({ "stopped": stopped }) } else { json!(stopped.first()) })
}

/// Runs IntroducePod.
///
/// # Errors
/// When one of the two is not known, or `to` does not take introductions from this pod.
pub(crate) fn introduce(context: &PodContext, input: &IntroduceInput) -> Result<Value> {
    let to = known(context, &input.to)?;
    let other = known(context, &input.pod_id)?;
    let pods = vec![Introduction { pod_id: other.pod_id.clone(), life: other.life }];
    client::ask::<Done>(&address_of_record(&to), Some(&context.own), Method::Introduce { pods })?;
    Ok(json!({ "to": to.pod_id, "knows": other.pod_id }))
}

fn forget_if_dead(context: &PodContext, table: &AllocationTable, life: &Life) -> Result<()> {
    let is_dead = table.by_life(life).is_none_or(|entry| life::is_dead(context.lock.runtime(), entry));
    if is_dead { context.registry.end(life).map(|_| ()) } else { Ok(()) }
}

/// A pod that WaitPods found to be done.
struct Finished {
    record: PodRecord,
    status: Status,
    answer: Option<StatusReply>,
}

/// Runs WaitPods: asks at the start, at each piece of news and every 5 s, and makes no model request meanwhile.
///
/// # Errors
/// When a pod is not known or the turn is cancelled.
pub(crate) fn wait(context: &PodContext, input: &WaitInput, cancel: &Cancel) -> Result<Value> {
    let records = match &input.pod_ids {
        Some(ids) => ids.iter().map(|id| known_or_ended(context, id)).collect::<Result<Vec<_>>>()?,
        None => context.registry.pods(),
    };
    if records.is_empty() {
        return Err(Error::told("there is no pod to wait for"));
    }
    let seconds = input.timeout_seconds.unwrap_or(WAIT_SECONDS).min(WAIT_SECONDS_MAX);
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
        let why = match input.until {
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

fn look(context: &PodContext, records: &[PodRecord]) -> (Vec<Finished>, Vec<PodId>) {
    let addresses: Vec<_> = records.iter().map(address_of_record).collect();
    let answers = survey::ask_all(&addresses, Some(&context.own));
    let (mut done, mut running) = (Vec::new(), Vec::new());
    for (record, answer) in records.iter().zip(answers) {
        let lives = || life::probe(context.lock.runtime(), &record.life) == life::Holding::Held;
        let status = match &answer {
            Some(answer) if answer.is_at_work() => Status::Running,
            Some(answer) => answer.status,
            None if lives() => Status::Running, // it does not answer, so nobody knows that it is done
            None => Status::Stopped,
        };
        if status == Status::Running {
            running.push(record.pod_id.clone());
        } else {
            done.push(Finished { record: record.clone(), status, answer });
        }
    }
    (done, running)
}

fn report(context: &PodContext, done: &[Finished], running: &[PodId], why: &str) -> Value {
    let rows: Vec<Value> = done
        .iter()
        .map(|finished| {
            let ended = finished.status == Status::Stopped;
            let turn = finished.answer.as_ref().map_or(u64::MAX, |answer| answer.turn);
            let life = finished.record.life.clone();
            context.mailbox.post(Event::Heard(Heard::Reported { life, turn, ended }));
            let mut row = json!({ "pod_id": finished.record.pod_id, "status": finished.status });
            if let (Some(answer), Some(row)) = (&finished.answer, row.as_object_mut()) {
                row.insert("turn".into(), json!(answer.turn));
                row.insert("last_result".into(), json!(answer.last_result));
                row.insert("last_response".into(), json!(answer.last_response));
            }
            row
        })
        .collect();
    if done.iter().any(|finished| finished.status == Status::Stopped) {
        // What they held is to be seen by the next call already, and nobody may have opened the lock since.
        if let Err(error) = context.lock.edit(None, |_| Ok(())) {
            log::warn!("cannot take back what ended pods held: {error}"); // their watchers do
        }
    }
    json!({ "why": why, "done": rows, "still_running": running })
}
