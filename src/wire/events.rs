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
use crate::words::error::{Error, Result};
use crate::words::identity::Life;
use crate::words::limits::{MAX_EVENTS_IN_FLIGHT, WIRE_TIMEOUT};
use crate::words::protocol::{Done, Method, PodEvent, Sender};

/// Where reports go: the spawner's socket and life at the time of the spawn.
#[derive(Debug, Clone)]
pub struct Callback {
    /// The socket.
    pub socket: PathBuf,
    /// The life that is meant, where the lock named it.
    pub life: Option<Life>,
}

/// Sends the reports of one pod.
#[derive(Debug, Clone)]
pub struct EventSender {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    own: Sender,
    callback: Option<Callback>,
    lock: ScopeLock,
    // A channel will not do: the end waits until the count is zero, whoever sends last.
    in_flight: Mutex<usize>,
    landed: Condvar,
}

impl EventSender {
    /// Reports as `own` to `callback`; without one nothing is ever sent.
    pub fn new(own: Sender, callback: Option<Callback>, lock: ScopeLock) -> EventSender {
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
            sender.deliver(event, || WIRE_TIMEOUT, |sender| sender.living_ancestor_now());
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
        self.deliver(event, left, |sender| sender.nearest_living(above));
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
        event: PodEvent,
        limit: impl Fn() -> Duration,
        ancestor: impl FnOnce(&EventSender) -> Option<Address>,
    ) {
        let Some(callback) = &self.inner.callback else { return };
        let spawner =
            Address { pod: "spawner".into(), socket: callback.socket.clone(), life: callback.life.clone() };
        let Err(first) = self.report(&spawner, event.clone(), limit()) else { return };
        let Some(ancestor) = ancestor(self) else {
            log::info!("nobody is there to hear that this pod {}: {first}", event.in_words()); // every ancestor is dead
            return;
        };
        if let Err(second) = self.report(&ancestor, event.clone(), limit()) {
            log::warn!("nobody heard that this pod {}: {first}; {second}", event.in_words()); // its watcher sees the end
        }
    }

    fn report(&self, address: &Address, event: PodEvent, limit: Duration) -> Result<()> {
        let method = Method::PodEvent(event);
        client::ask_within::<Done>(address, Some(&self.inner.own), method, limit).map(|_| ())
    }

    fn living_ancestor_now(&self) -> Option<Address> {
        let table = self.inner.lock.read().map_err(|error: Error| log::warn!("{error}")).ok()?;
        let above: Vec<Allocation> = table.ancestors(&self.inner.own.pod_id).into_iter().cloned().collect();
        self.nearest_living(&above)
    }

    /// The first of these that lives, unless it is the one that was tried already.
    fn nearest_living(&self, above: &[Allocation]) -> Option<Address> {
        let living = above.iter().find(|a| !life::is_dead(self.inner.lock.runtime(), a))?;
        let tried = self.inner.callback.as_ref().and_then(|callback| callback.life.as_ref());
        (tried != Some(&living.life)).then(|| Address {
            pod: living.pod_id.to_string(),
            socket: PathBuf::from(&living.socket),
            life: Some(living.life.clone()),
        })
    }
}
