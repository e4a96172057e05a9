//! Running one program so that nothing it started is left when it has ended.
//!
//! Knows processes and descriptors, never pods. Runs in a process with one thread, which starts, waits, collects and
//! watches the lifeline. A signal at the parent's death would not do: it is sent when the *thread* that started us ends.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::sys::process::Program;
use crate::sys::raw;
use crate::sys::wait::{Ready, wait_readable};

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// By itself, with this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Code(code) => write!(f, "exit code {code}"),
            Ended::Signal(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}

/// Runs `work` in a child process and returns what it came to once that process has ended; `None` when it was killed.
///
/// # Errors
/// As clone(2); `EINVAL` when this process has several threads.
pub fn in_child<T>(mut work: impl FnMut() -> T) -> io::Result<Option<T>> {
    let mut result = None;
    let child = raw::run_in_child(|| {
        result = Some(work());
        0
    })?;
    loop {
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, 0)) => return Ok(result),
            Ok(_) => return Ok(None),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Killing is repeated so often: at a weaker level what is just being started may have escaped it.
const KILL_PAUSE: Duration = Duration::from_millis(5);

/// Runs `program`, its output and errors both into our standard error output, and returns once it and every
/// process that came from it is gone. When the other end of `lifeline` is closed, all of them are killed.
///
/// # Errors
/// When it cannot be started.
pub fn supervise(program: Program, lifeline: &UnixStream) -> io::Result<Ended> {
    nix::sys::prctl::set_child_subreaper(true)?; // what loses its parent becomes ours
    // Our memory is that of the process that started us, which may be confined less, and one of our descriptors is the
    // life file: no program may take or look into them. An exec ends it.
    nix::sys::prctl::set_dumpable(false)?;
    let ends = SigSet::from(Signal::SIGCHLD);
    ends.thread_block()?; // the program gets an empty mask again
    let ends = SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let output = io::stderr().as_fd().try_clone_to_owned()?;
    let child = program.start_onto(output.try_clone()?, output)?;
    let child = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    let (mut ended, mut is_cut) = (None, false);
    loop {
        while ends.read_signal()?.is_some() {} // before the look, so that no end is missed
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == child => ended = Some(Ended::Code(code)),
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => {
                    ended = Some(Ended::Signal(signal as i32));
                }
                Ok(WaitStatus::StillAlive) => break,
                Err(Errno::ECHILD) => return ended.ok_or_else(|| Errno::ECHILD.into()),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        if is_cut || ended.is_some() {
            kill_all();
            wait_readable(ends.as_fd(), None, None, Instant::now() + KILL_PAUSE)?;
        } else {
            let never = Instant::now() + Duration::from_secs(3600);
            is_cut =
                wait_readable(ends.as_fd(), Some(lifeline.as_fd()), None, never)? == Ready::OtherReadable;
        }
    }
}

/// Kills everything that is ours: in a PID namespace of our own all but ourselves, else our children, to whom the
/// children of the killed are added. None of them can be collected meanwhile, so no number is given away.
fn kill_all() {
    if nix::unistd::getpid() == Pid::from_raw(1) {
        let _ = kill(Pid::from_raw(-1), Signal::SIGKILL); // nobody left is fine
        return;
    }
    let children = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    for pid in children.split_whitespace().filter_map(|pid| pid.parse().ok()) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}
