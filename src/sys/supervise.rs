//! Running one program so that nothing it started is left when it has ended.
//!
//! Knows processes and descriptors, never pods. The main thread starts, waits and collects; a second one watches the
//! lifeline. A signal at the parent's death would not do: it is sent when the *thread* that started us ends.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

use crate::sys::STACK_BYTES;
use crate::sys::process::Program;

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// By itself, with this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// Runs `program`, its output and errors both into our standard error output, and returns once it and every
/// process that came from it is gone. When the other end of `lifeline` is closed, all of them are killed.
///
/// # Errors
/// When it cannot be started.
pub fn supervise(program: Program, mut lifeline: UnixStream) -> io::Result<Ended> {
    nix::sys::prctl::set_child_subreaper(true)?; // what loses its parent becomes ours
    let output = std::io::stderr().as_fd().try_clone_to_owned()?;
    thread::Builder::new().name("lifeline".into()).stack_size(STACK_BYTES).spawn(move || {
        let mut byte = [0];
        while lifeline.read(&mut byte).is_ok_and(|count| count > 0) {}
        loop {
            kill_all(); // more than once: the program may be about to start
            thread::sleep(Duration::from_millis(5));
        }
    })?;
    let child =
        i32::try_from(program.start_onto(output.try_clone()?, output)?.id()).map_err(io::Error::other)?;
    let mut ended = None;
    loop {
        if ended.is_some() {
            kill_all();
        }
        match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(Errno::ECHILD) if ended.is_some() => return Ok(ended.unwrap_or(Ended::Code(0))),
            Err(errno) => return Err(errno.into()),
        }
        let _collecting = COLLECTING.lock().unwrap_or_else(PoisonError::into_inner);
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, code)) if pid.as_raw() == child => ended = Some(Ended::Code(code)),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid.as_raw() == child => {
                ended = Some(Ended::Signal(signal as i32));
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// Held while a child is collected or killed, so that a number is never signalled after it was given away. A
/// channel will not do: the main thread waits in the kernel.
static COLLECTING: Mutex<()> = Mutex::new(());

/// Kills everything that is ours: in a PID namespace of our own all but ourselves, else our children, to whom the
/// children of the killed are added.
fn kill_all() {
    if nix::unistd::getpid() == Pid::from_raw(1) {
        let _ = kill(Pid::from_raw(-1), Signal::SIGKILL); // nobody left is fine
        return;
    }
    let _collecting = COLLECTING.lock().unwrap_or_else(PoisonError::into_inner);
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    for pid in children.flat_map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()) {
        if let Ok(pid) = pid.parse::<i32>() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// A second handle on our standard output, which for a helper is the way to whoever started it.
///
/// # Errors
/// As dup(2).
pub fn own_output() -> io::Result<OwnedFd> {
    std::io::stdout().as_fd().try_clone_to_owned()
}
