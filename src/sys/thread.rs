//! Threads with a name and a small stack, and what they share under a lock.
//!
//! Knows nothing of what they do. Each caller's file says why a lock is there where a channel will not do.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// Stack of the small threads that only wait and pass things on: connections, watchers, signals, senders.
///
/// Untouched pages of a stack cost address space only; the deepest allowed request (128 levels of JSON) is
/// parsed on such a thread in the tests.
pub const STACK_BYTES: usize = 512 << 10;

/// A small thread of this name, to be started.
pub fn small(name: impl Into<String>) -> Builder {
    Builder::new().name(name.into()).stack_size(STACK_BYTES)
}

/// Starts a small thread that nobody waits for.
///
/// # Errors
/// As pthread_create(3): no memory, or too many threads.
pub fn detach(name: impl Into<String>, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    small(name).spawn(run).map(drop)
}

/// Locks, also after a panic of another thread: what is locked here is whole between any two of its changes.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits while `goes_on` holds; `false` when `limit` passes before.
#[must_use]
pub fn wait_while<T>(
    changed: &Condvar,
    locked: MutexGuard<'_, T>,
    limit: Duration,
    goes_on: impl FnMut(&mut T) -> bool,
) -> bool {
    let waited = changed.wait_timeout_while(locked, limit, goes_on);
    !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
}
