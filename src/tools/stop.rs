//! Ending other pods: a graceful request, a wait for the life lock, and a kill by identity for those that do
//! not obey. Used by the tool StopPod, by a failed spawn, and by people.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::store::scope_lock::ScopeLock;
use crate::store::{life, repair};
use crate::sys::process;
use crate::sys::wait::Cancel;
use crate::tools::survey::{STATUS_LIMIT, address_of};
use crate::wire::client::{self, Asker};
use crate::words::allocation::{Allocation, AllocationState, AllocationTable};
use crate::words::error::{Error, Result};
use crate::words::identity::{Life, PodId};
use crate::words::limits::MAX_LAST_RESPONSE_BYTES;
use crate::words::protocol::{Done, ErrorCode, Method, StatusReply};
use crate::words::text::cut_end;

/// After a kill the kernel needs moments to free the life lock; a supervisor may need longer.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// How often a pod is looked at that does not listen yet.
const NOT_YET: Duration = Duration::from_millis(20);

/// How a pod came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// It obeyed.
    Graceful,
    /// It did not obey in time and was killed.
    Killed,
    /// It was dead already.
    AlreadyEnded,
}

/// A pod that was stopped.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stopped {
    /// Which pod.
    pub pod_id: PodId,
    /// How it ended.
    pub how: End,
    /// The write rules that went back to its spawner.
    pub scope_returned: Vec<String>,
    /// The last words of its model, cut.
    pub last_response: String,
    /// Pods below it that live on, and what they keep.
    pub survivors: Vec<Survivor>,
}

/// A pod that outlives the one that was stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Survivor {
    /// Which pod.
    pub pod_id: PodId,
    /// The write rules it keeps.
    pub keeps: Vec<String>,
}

/// How to stop.
#[derive(Debug, Clone, Copy)]
pub struct Manner<'a> {
    /// Who asks.
    pub from: Asker<'a>,
    /// How long a pod may take to obey.
    pub limit: Duration,
    /// Whether it is asked at all before it is killed.
    pub ask: bool,
    /// Ends the waiting; the pod ends nevertheless.
    pub cancel: &'a Cancel,
}

/// Stops the pod of this entry and waits until no process of it can write any more.
///
/// # Errors
/// `Error::Cancelled`, or a sentence when it lives on even after a kill.
fn stop(lock: &ScopeLock, found: &Allocation, manner: Manner<'_>) -> Result<Stopped> {
    let target = &come_of(lock, found, manner)?;
    let address = address_of(target);
    let asked = client::ask_within::<StatusReply>(&address, manner.from, Method::Status, STATUS_LIMIT);
    let last_response = asked.map(|status| cut_end(&status.last_response, MAX_LAST_RESPONSE_BYTES));
    let children: Vec<Life> = living(lock).children(&target.pod_id).map(|child| child.life.clone()).collect();
    let how = end(lock, target, manner)?;
    let released = lock.edit(Some(manner.cancel), |table| {
        lock.release(table, &target.life);
        Ok(table.clone())
    });
    let table = match released {
        Ok(edited) => edited.value,
        // It has ended all the same, and a repair finds only who lives.
        Err(Error::LockUnusable { .. }) => living(lock),
        Err(error) => return Err(error),
    };
    Ok(Stopped {
        pod_id: target.pod_id.clone(),
        how,
        scope_returned: target.write_rules().map(ToString::to_string).collect(),
        last_response: last_response.unwrap_or_default(),
        survivors: survivors(&table, target, &children),
    })
}

/// The pod that a reservation becomes while it is waited for; the entry itself where it is none, or goes away.
fn come_of(lock: &ScopeLock, target: &Allocation, manner: Manner<'_>) -> Result<Allocation> {
    let deadline = Instant::now() + manner.limit;
    while target.state == AllocationState::Starting && Instant::now() < deadline {
        let table = living(lock);
        if table.by_life(&target.life).is_none() {
            return Ok(adopted(&table, target));
        }
        if life::is_dead(lock.runtime(), target) {
            break;
        }
        if manner.cancel.sleep(NOT_YET) {
            return Err(Error::Cancelled);
        }
    }
    Ok(target.clone())
}

/// Who lives, as far as that can be told.
fn living(lock: &ScopeLock) -> AllocationTable {
    repair::living(lock).unwrap_or_default()
}

/// Who goes on below the spawner of the pod that ended: the children it had when it was asked, and whoever it
/// lent something to in its last moments, which shows in the scope.
fn survivors(table: &AllocationTable, ended: &Allocation, children: &[Life]) -> Vec<Survivor> {
    let within =
        |a: &Allocation| a.write_rules().any(|rule| ended.write_rules().any(|own| own.contains(rule)));
    let is_orphan = |a: &&Allocation| {
        children.contains(&a.life) || (a.delegated_from == ended.delegated_from && within(a))
    };
    let survivor = |a: &Allocation| Survivor {
        pod_id: a.pod_id.clone(),
        keeps: a.write_rules().map(ToString::to_string).collect(),
    };
    table.allocations().iter().filter(is_orphan).map(survivor).collect()
}

fn end(lock: &ScopeLock, target: &Allocation, manner: Manner<'_>) -> Result<End> {
    let runtime = lock.runtime();
    let ended_within = |limit: Duration| {
        let is_over = life::ended_by(runtime, target, manner.cancel, Instant::now() + limit);
        if !is_over && manner.cancel.is_set() { Err(Error::Cancelled) } else { Ok(is_over) }
    };
    if life::is_dead(runtime, target) {
        return Ok(End::AlreadyEnded);
    }
    if manner.ask {
        let address = address_of(target);
        let deadline = Instant::now() + manner.limit; // for the answer and the end together
        let left = || deadline.saturating_duration_since(Instant::now());
        while let Err(error) = client::ask_within::<Done>(&address, manner.from, Method::Shutdown, left()) {
            // It is ending, or another life answers in its place: then the one that is meant is as good as gone.
            let is_gone = matches!(&error, Error::Peer(refusal)
                if matches!(refusal.code, ErrorCode::ShuttingDown | ErrorCode::UnknownPod));
            // It does not listen yet, or no longer, or hangs; the lock tells.
            let is_silent = matches!(error, Error::Unreachable { .. });
            if is_gone || is_silent && (ended_within(NOT_YET.min(left()))? || left().is_zero()) {
                break;
            } else if !is_silent {
                return Err(error);
            }
        }
        if ended_within(left())? {
            return Ok(End::Graceful);
        }
    }
    // The number in the file is never trusted: its process must have the life file open, and the start time be
    // equal right before. A reservation names its spawner's process, which is not the one to be stopped.
    let is_own = target.state == AllocationState::Live;
    if is_own && life::is_open_in(runtime, &target.life, target.pid) {
        if let Err(error) = process::kill_exactly(target.pid.get(), target.start_time) {
            log::warn!("cannot kill pod \"{}\" (pid {}): {error}", target.pod_id, target.pid); // its life decides
        }
    }
    if ended_within(KILL_LIMIT)? {
        return Ok(End::Killed);
    }
    Err(Error::told(format!(
        "pod \"{}\" (pid {}) lives on although it was killed; its scope stays lent until it is gone",
        target.pod_id, target.pid
    )))
}

/// What stopping one pod came to; the pod that could not be stopped, and why.
pub type Outcome = Result<Stopped, (PodId, Error)>;

/// Stops a pod, with `tree` everything below it too; each outcome. Top down, so that nobody is woken to spawn more.
///
/// The set is taken from the lock before each stop, and what a pod lent in its last moments is found by its
/// `spawned_by` after it. One that cannot be stopped is told in `Err` and does not keep the others.
pub fn stop_all(lock: &ScopeLock, root: &Allocation, tree: bool, manner: Manner<'_>) -> Vec<Outcome> {
    let mut queue = VecDeque::from([root.clone()]);
    let mut seen = HashSet::from([root.life.clone()]);
    let mut outcome = Vec::new();
    while let Some(found) = queue.pop_front() {
        // Its spawner has ended by now, so a reservation that was found has become a pod, or never will.
        let target = match found.state {
            AllocationState::Starting => adopted(&living(lock), &found),
            AllocationState::Live => found.clone(),
        };
        if target.life != found.life && !seen.insert(target.life.clone()) {
            continue; // it is in the queue as the pod that it has become
        }
        let mut add_children = |late: bool| {
            let table = if tree { living(lock) } else { AllocationTable::default() };
            for entry in table.allocations() {
                let is_child = entry.delegated_from.as_ref() == Some(&target.pod_id);
                if (is_child || late && was_spawned_by(entry, &target)) && seen.insert(entry.life.clone()) {
                    queue.push_back(entry.clone());
                }
            }
        };
        add_children(false);
        let stopped = stop(lock, &target, manner);
        add_children(true);
        outcome.push(stopped.map_err(|error| (target.pod_id.clone(), error)));
    }
    outcome
}

/// The pod that a reservation has become, or the reservation itself where it has become none or is still there.
/// Adoption changes life and process, and nothing else that is compared.
fn adopted(table: &AllocationTable, found: &Allocation) -> Allocation {
    let is_same = |entry: &&Allocation| entry.spawned_by == found.spawned_by && entry.since == found.since;
    let is_gone = table.by_life(&found.life).is_none();
    let pod = table.get(&found.pod_id).filter(|_| is_gone).filter(is_same);
    pod.unwrap_or(found).clone()
}

/// Whether this very life of `spawner` spawned the pod, whoever has it now. An earlier life of the same pod_id has
/// a session with the same beginning, and its pods live on.
fn was_spawned_by(allocation: &Allocation, spawner: &Allocation) -> bool {
    let short = spawner.life.as_str().get(..8).unwrap_or_default();
    allocation.spawned_by.as_deref().is_some_and(|session| {
        let is_of_name = session.split_once('/').is_some_and(|(pod_id, _)| pod_id == spawner.pod_id.as_str());
        // A resumed session keeps the name that its first life gave it.
        is_of_name && (session.ends_with(short) || allocation.since > spawner.since)
    })
}
