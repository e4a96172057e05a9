//! Waiting for a descriptor, with a deadline and a way to be cancelled.
//!
//! Knows descriptors only. A `Cancel` is shared by whoever may stop a turn and whatever that turn waits for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// A flag that also wakes whoever polls: once set, it stays set until it is cleared.
#[derive(Debug, Clone)]
pub struct Cancel {
    inner: Arc<(AtomicBool, EventFd)>,
}

impl Cancel {
    /// A flag that is not set.
    ///
    /// # Errors
    /// As eventfd(2): no descriptor is left.
    pub fn new() -> io::Result<Cancel> {
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Cancel { inner: Arc::new((AtomicBool::new(false), event)) })
    }

    /// Sets the flag and wakes everyone who waits with it.
    pub fn set(&self) {
        self.inner.0.store(true, Ordering::SeqCst);
        if let Err(error) = self.inner.1.write(1) {
            log::warn!("cannot wake a waiting thread: {error}"); // it sees the flag at its next look
        }
    }

    /// Takes the flag back, once nobody waits with it any more.
    pub fn clear(&self) {
        self.inner.0.store(false, Ordering::SeqCst);
        let _ = self.inner.1.read(); // it would block where nothing was written
    }

    /// Whether the flag is set.
    pub fn is_set(&self) -> bool {
        self.inner.0.load(Ordering::SeqCst)
    }

    /// Sleeps, but not beyond a cancel. Returns whether it was cancelled.
    #[must_use]
    pub fn sleep(&self, duration: Duration) -> bool {
        let deadline = Instant::now() + duration;
        let waited = wait_readable(self.inner.1.as_fd(), None, Some(self), deadline);
        waited.is_ok_and(|ready| ready != Ready::TimedOut)
    }
}

/// What a wait came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// There is something to read, or the other end is closed.
    Readable,
    /// The same, but only of the other descriptor.
    OtherReadable,
    /// The flag was set.
    Cancelled,
    /// The deadline passed.
    TimedOut,
}

/// Waits until `descriptor` or `other` can be read, `cancel` is set, or `deadline` passes. A cancel comes first,
/// `other` last.
///
/// # Errors
/// As poll(2), EINTR excepted, which is repeated.
pub fn wait_readable(
    descriptor: BorrowedFd<'_>,
    other: Option<BorrowedFd<'_>>,
    cancel: Option<&Cancel>,
    deadline: Instant,
) -> io::Result<Ready> {
    loop {
        if cancel.is_some_and(Cancel::is_set) {
            return Ok(Ready::Cancelled);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = vec![PollFd::new(descriptor, PollFlags::POLLIN)];
        fds.extend(other.map(|other| PollFd::new(other, PollFlags::POLLIN)));
        fds.extend(cancel.map(|cancel| PollFd::new(cancel.inner.1.as_fd(), PollFlags::POLLIN)));
        let answer = nix::poll::poll(&mut fds, poll_timeout(left));
        let is_ready = |at: usize| fds.get(at).and_then(PollFd::any).unwrap_or(false);
        match answer {
            Ok(0) if left.is_zero() => return Ok(Ready::TimedOut),
            Ok(_) if cancel.is_some_and(Cancel::is_set) => return Ok(Ready::Cancelled),
            Ok(_) if is_ready(0) => return Ok(Ready::Readable),
            Ok(_) if other.is_some() && is_ready(1) => return Ok(Ready::OtherReadable),
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Whether nobody can read any more what is written there: the other end of a pipe or socket is closed. Source:
/// poll(2): a pipe has `POLLERR` then, a socket `POLLHUP`, as has a terminal that was lost.
pub fn is_unheard(descriptor: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(descriptor, PollFlags::empty())];
    let is_ready = nix::poll::poll(&mut fds, PollTimeout::ZERO).is_ok();
    let events = fds.iter().filter_map(PollFd::revents).fold(PollFlags::empty(), |all, events| all | events);
    is_ready && events.intersects(PollFlags::POLLERR | PollFlags::POLLHUP)
}

/// A poll time-out that never ends before `left` has passed: milliseconds, rounded up.
fn poll_timeout(left: Duration) -> PollTimeout {
    let millis = left.as_micros().div_ceil(1000);
    u16::try_from(millis).map_or(PollTimeout::from(u16::MAX), PollTimeout::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_ends_a_sleep_and_a_wait() {
        let cancel = Cancel::new().unwrap();
        assert!(!cancel.sleep(Duration::from_millis(1)));
        let (quiet, _open) = std::os::unix::net::UnixStream::pair().unwrap();
        let soon = Instant::now() + Duration::from_millis(1);
        assert_eq!(wait_readable(quiet.as_fd(), None, Some(&cancel), soon).unwrap(), Ready::TimedOut);
        let other = cancel.clone();
        let setter = std::thread::Builder::new().spawn(move || other.set()).unwrap();
        let never = Instant::now() + Duration::from_secs(3600);
        assert_eq!(wait_readable(quiet.as_fd(), None, Some(&cancel), never).unwrap(), Ready::Cancelled);
        assert!(cancel.sleep(Duration::from_secs(3600)));
        setter.join().unwrap();
    }
}
