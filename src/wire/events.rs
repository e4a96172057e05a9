//! Reports to the spawner: one connection each, on detached threads, counted so that the end can wait for them.
//!
//! A report is tried once at the callback and, when that does not answer, once at the nearest living ancestor
//! that `scope.lock` names. Failure is a log line, never a retry: the spawner's watcher sees the end anyway.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::store::life;
use crate::store::scope_lock::ScopeLock;
use crate::sys::thread;
use crate::wire::client::{self, Address};
use crate::words::allocation::Allocation;
use crate::words::limits::{MAX_EVENTS_IN_FLIGHT, WIRE_TIMEOUT};
use crate::words::protocol::{Done, Method, PodEvent, Sender};

/// Sends the reports of one pod.
#[derive(Debug, Clone)]
pub struct EventSender {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    own: Sender,
    /// The spawner's socket, and its life at the time of the spawn, where the lock named it.
    callback: Option<Address>,
    lock: ScopeLock,
    // A channel will not do: the end waits until the count is zero, whoever sends last.
    in_flight: Mutex<usize>,
    landed: Condvar,
}

impl EventSender {
    /// Reports as `own` to `callback`; without one nothing is ever sent.
    pub fn new(own: Sender, callback: Option<Address>, lock: ScopeLock) -> EventSender {
        let inner = Inner { own, callback, lock, in_flight: Mutex::new(0), landed: Condvar::new() };
        EventSender { inner: Arc::new(inner) }
    }

    /// Sends a report on a thread of its own and returns at once.
    ///
    /// When `MAX_EVENTS_IN_FLIGHT` are on their way it is dropped with a log line: the spawner has not answered
    /// sixteen others either, and sees the pod's state by asking.
    pub fn send(&self, event: PodEvent) {
        if self.inner.callback.is_none() {
            return;
        }
        {
            let mut in_flight = self.in_flight();
            if *in_flight >= MAX_EVENTS_IN_FLIGHT {
                log::warn!("dropped a report, {MAX_EVENTS_IN_FLIGHT} are on their way: {event:?}");
                return;
            }
            *in_flight += 1;
        }
        let sender = self.clone();
        let run = move || {
            sender.deliver(&event, || WIRE_TIMEOUT, || sender.ancestors());
            sender.land();
        };
        if let Err(error) = thread::detach("report", run) {
            log::warn!("cannot start a thread for a report: {error}"); // the watcher and ListPods cover it
            self.land();
        }
    }

    /// Sends the last report before returning, within `limit`: a thread would not survive the process.
    ///
    /// The pod's entry is gone from the lock by then, so `above` says who stood above it: its entry's ancestors,
    /// the nearest first.
    pub fn send_inline(&self, event: PodEvent, limit: Duration, above: &[Allocation]) {
        let deadline = Instant::now() + limit;
        let left = || deadline.saturating_duration_since(Instant::now());
        self.deliver(&event, left, || above.to_vec());
    }

    /// How many reports are on their way.
    pub fn count_in_flight(&self) -> usize {
        *self.in_flight()
    }

    /// Waits until no report is on its way; `false` when `limit` passes before.
    #[must_use]
    pub fn wait_landed(&self, limit: Duration) -> bool {
        thread::wait_while(&self.inner.landed, self.in_flight(), limit, |count| *count > 0)
    }

    fn in_flight(&self) -> MutexGuard<'_, usize> {
        thread::lock(&self.inner.in_flight)
    }

    fn land(&self) {
        let mut in_flight = self.in_flight();
        *in_flight = in_flight.saturating_sub(1);
        self.inner.landed.notify_all();
    }

    fn deliver(
        &self,
        event: &PodEvent,
        limit: impl Fn() -> Duration,
        above: impl FnOnce() -> Vec<Allocation>,
    ) {
        let Some(spawner) = &self.inner.callback else { return };
        let report = |address: &Address| {
            let method = Method::PodEvent(event.clone());
            client::ask_within::<Done>(address, Some(&self.inner.own), method, limit())
        };
        let Err(first) = report(spawner) else { return };
        let living = above().into_iter().find(|a| !life::is_dead(self.inner.lock.runtime(), a));
        // Unless it is the one that was tried already.
        let Some(ancestor) = living.filter(|living| spawner.life.as_ref() != Some(&living.life)) else {
            log::info!("nobody is there to hear that this pod {}: {first}", event.in_words()); // every ancestor is dead
            return;
        };
        let (pod, socket) = (ancestor.pod_id.to_string(), PathBuf::from(ancestor.socket));
        if let Err(second) = report(&Address { pod, socket, life: Some(ancestor.life) }) {
            log::warn!("nobody heard that this pod {}: {first}; {second}", event.in_words()); // its watcher sees the end
        }
    }

    /// Who stands above this pod now, the nearest first.
    fn ancestors(&self) -> Vec<Allocation> {
        let table = self.inner.lock.read().inspect_err(|error| log::warn!("{error}")).unwrap_or_default();
        table.ancestors(&self.inner.own.pod_id).into_iter().cloned().collect()
    }
}
