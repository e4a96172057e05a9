//! Ending other pods: a graceful request, a wait for the life lock, and a kill by identity for those that do
//! not obey. Used by the tool StopPod, by a failed spawn, and by people.

use std::collections::VecDeque;
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
pub fn stop(lock: &ScopeLock, target: &Allocation, manner: Manner<'_>) -> Result<Stopped> {
    if let Some(pod) = come_of(lock, target, manner)? {
        return stop(lock, &pod, manner);
    }
    let address = address_of(target);
    let last_words =
        || client::ask_within::<StatusReply>(&address, manner.from, Method::Status, STATUS_LIMIT).ok();
    let last_response = last_words().map(|status| cut_end(&status.last_response, MAX_LAST_RESPONSE_BYTES));
    let children = children_of(&living(lock), target);
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

/// The pod that a reservation becomes while it is waited for; `None` where it is none, or goes away.
fn come_of(lock: &ScopeLock, target: &Allocation, manner: Manner<'_>) -> Result<Option<Allocation>> {
    let deadline = Instant::now() + manner.limit;
    while target.state == AllocationState::Starting && Instant::now() < deadline {
        let table = living(lock);
        if table.by_life(&target.life).is_none() {
            return Ok(adopted(&table, target));
        }
        if life::is_dead(lock.runtime(), target) {
            return Ok(None);
        }
        if manner.cancel.sleep(NOT_YET) {
            return Err(Error::Cancelled);
        }
    }
    Ok(None)
}

/// Who lives, as far as that can be told.
fn living(lock: &ScopeLock) -> AllocationTable {
    repair::living(lock).unwrap_or_default()
}

fn children_of(table: &AllocationTable, target: &Allocation) -> Vec<Life> {
    table.children(&target.pod_id).map(|child| child.life.clone()).collect()
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
    let ended_within =
        |limit: Duration| life::ended_by(runtime, target, manner.cancel, Instant::now() + limit);
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
            let is_over = || ended_within(NOT_YET.min(left())) || left().is_zero() || manner.cancel.is_set();
            if is_gone || is_silent && is_over() {
                break;
            } else if !is_silent {
                return Err(error);
            }
        }
        if ended_within(left()) {
            return Ok(End::Graceful);
        }
        if manner.cancel.is_set() {
            return Err(Error::Cancelled);
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
    if ended_within(KILL_LIMIT) {
        return Ok(End::Killed);
    }
    if manner.cancel.is_set() {
        return Err(Error::Cancelled);
    }
    Err(Error::told(format!(
        "pod \"{}\" (pid {}) lives on although it was killed; its scope stays lent until it is gone",
        target.pod_id, target.pid
    )))
}

/// Stops a pod, with `tree` everything below it too; each outcome.
pub fn stop_all(lock: &ScopeLock, target: &Allocation, tree: bool, manner: Manner<'_>) -> Vec<Outcome> {
    if tree {
        return stop_tree(lock, target, manner);
    }
    vec![stop(lock, target, manner).map_err(|error| (target.pod_id.clone(), error))]
}

/// What stopping one pod came to; the pod that could not be stopped, and why.
pub type Outcome = Result<Stopped, (PodId, Error)>;

/// Stops a pod and everything below it, top down, so that nobody is woken to spawn more.
///
/// The set is taken from the lock before each stop, and what a pod lent in its last moments is found by its
/// `spawned_by` after it. One that cannot be stopped is told in `Err` and does not keep the others.
fn stop_tree(lock: &ScopeLock, root: &Allocation, manner: Manner<'_>) -> Vec<Outcome> {
    let mut queue = VecDeque::from([root.clone()]);
    let mut seen = vec![root.life.clone()];
    let mut outcome = Vec::new();
    while let Some(found) = queue.pop_front() {
        // Its spawner has ended by now, so a reservation that was found has become a pod, or never will.
        let target = adopted(&living(lock), &found).unwrap_or_else(|| found.clone());
        if target.life != found.life {
            if seen.contains(&target.life) {
                continue; // it is in the queue as the pod that it has become
            }
            seen.push(target.life.clone());
        }
        let mut add_children = |late: bool| {
            let table = living(lock);
            for allocation in table.allocations() {
                let is_child = allocation.delegated_from.as_ref() == Some(&target.pod_id);
                if (is_child || (late && was_spawned_by(allocation, &target)))
                    && !seen.contains(&allocation.life)
                {
                    seen.push(allocation.life.clone());
                    queue.push_back(allocation.clone());
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

/// The pod that a reservation has become. Adoption changes life and process, and nothing else that is compared.
fn adopted(table: &AllocationTable, reservation: &Allocation) -> Option<Allocation> {
    if reservation.state == AllocationState::Live || table.by_life(&reservation.life).is_some() {
        return None;
    }
    let entry = table.get(&reservation.pod_id)?;
    let is_same = entry.spawned_by == reservation.spawned_by && entry.since == reservation.since;
    is_same.then(|| entry.clone())
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
