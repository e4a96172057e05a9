//! Running one command confined: the plan, the levels, and the helper that is this same program again.
//!
//! The helper gets the life file as its input, a socket as its output and the command's pipe as its error output.
//! The plan comes over the socket, never as arguments; the socket is the lifeline too: when its other end is closed,
//! everything inside is killed. The helper makes the namespaces and forks; its child is process 1 in them and runs the
//! command. Both have the life file open, so that the pod counts as alive until the last process is gone.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::sys::confine::{self, View};
use crate::sys::process::{self, Program};
use crate::sys::supervise::{self, Ended};
use crate::sys::wait::{Cancel, Ready, wait_readable};
use crate::words::error::{Error, Result};

/// The only argument of the helper.
const HELPER: &str = "--confined";
/// Half of the output that is kept: the beginning, and as much of the end.
const HALF_KEPT_BYTES: usize = 512 << 10;
/// Killed processes are gone long before this; what is not is stopped from outside or hangs in the kernel.
const END_DEADLINE: Duration = Duration::from_secs(10);
/// A full pipe is empty after so many reads, as a piece is as large as a pipe. Source: pipe(7).
const PIPE_READS: usize = 2;
const PLAN_BYTES_MAX: u64 = 4 << 20;

/// How commands are confined. The numbers are those people see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// 1: namespaces of their own.
    Namespaces,
    /// 3: Landlock alone.
    Landlock,
    /// 4: there are no commands, for this reason.
    Off(String),
    /// 0: not at all, because a person wrote so.
    Unconfined,
}

impl Level {
    /// Its number.
    pub fn number(&self) -> u8 {
        match self {
            Level::Namespaces => 1,
            Level::Landlock => 3,
            Level::Off(_) => 4,
            Level::Unconfined => 0,
        }
    }

    /// Whether it confines less than the level of this number does.
    pub fn is_weaker_than(&self, number: u8) -> bool {
        let strength = |number: u8| [0, 3, 1, 4].iter().position(|known| *known == number);
        strength(self.number()) < strength(number)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Level::Namespaces if confine::hides_abstract_sockets() => f.write_str("1: own namespaces"),
            Level::Namespaces => f.write_str("1: own namespaces; abstract sockets are not confined by this kernel"),
            Level::Landlock => f.write_str(
                "3: reduced to Landlock; sockets, file modes, git hooks and left-over processes are not confined",
            ),
            Level::Off(reason) => write!(f, "4: off: {reason}"),
            Level::Unconfined => f.write_str("0: unconfined, by the user's manifest"),
        }
    }
}

/// Everything the helper needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// How to confine.
    pub level: Level,
    /// What there is to see and to write.
    pub view: View,
    /// The program that runs the command, and its arguments.
    pub command: Vec<String>,
    /// Where it runs.
    pub directory: PathBuf,
    /// Its whole environment.
    pub variables: Vec<(String, String)>,
}

/// What the helper says: how the command ended, or why it could not be run.
type Report = std::result::Result<Ended, String>;

/// How a command's time ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It ended.
    Ended(Ended),
    /// It was killed at the deadline.
    TimedOut,
    /// It was killed because somebody cancelled.
    Cancelled,
}

/// What one pod runs its commands with.
#[derive(Debug)]
pub struct Sandbox {
    program: PathBuf,
    life: File,
    probed: OnceLock<Level>,
}

impl Sandbox {
    /// A sandbox whose helpers are this same program and share the life file.
    pub fn new(life: File) -> Sandbox {
        Sandbox::with_program("/proc/self/exe".into(), life)
    }

    /// A sandbox whose helper is this program, which must be `pod`.
    pub fn with_program(program: PathBuf, life: File) -> Sandbox {
        Sandbox { program, life, probed: OnceLock::new() }
    }

    /// The strongest level that works here, found once by really running a command with this view.
    pub fn probe(&self, view: impl FnOnce() -> View) -> &Level {
        self.probed.get_or_init(|| {
            let view = view();
            let attempt = |level| {
                let command = vec!["/bin/sh".into(), "-c".into(), ":".into()];
                let plan = Plan { level, view: view.clone(), command, directory: "/".into(), variables: vec![] };
                match self.run(&plan, &mut Kept::default(), None, Instant::now() + END_DEADLINE) {
                    Ok(Outcome::Ended(Ended::Code(0))) => Ok(()),
                    Ok(other) => Err(format!("a first command came to {other:?}")),
                    Err(error) => Err(error.to_string()),
                }
            };
            let Err(refused) = attempt(Level::Namespaces) else { return Level::Namespaces };
            log::warn!("commands cannot have namespaces of their own: {refused}");
            // A root keeps its power over files that Landlock does not govern, and the network cannot be cut.
            if process::own_uid() != 0 && view.network && attempt(Level::Landlock).is_ok() {
                return Level::Landlock;
            }
            Level::Off(format!(
                "the system refuses to confine commands ({refused}); allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns), or start the pod outside of the container or sandbox it is in, or let a person set \"shell\": {{\"sandbox\": \"off\"}} in the user manifest"
            ))
        })
    }

    /// Runs one command to its end and the end of all it started. What it says goes to `kept`.
    ///
    /// # Errors
    /// When it could not be confined, started or watched: nothing of it is left then.
    pub fn run(
        &self,
        plan: &Plan,
        kept: &mut Kept,
        cancel: Option<&Cancel>,
        deadline: Instant,
    ) -> Result<Outcome> {
        let failed = |source: io::Error| Error::io("run the command", source);
        let mut line = serde_json::to_vec(plan).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        let (mut ours, theirs) = UnixStream::pair().map_err(failed)?;
        ours.set_write_timeout(Some(END_DEADLINE)).map_err(failed)?;
        ours.set_read_timeout(Some(END_DEADLINE)).map_err(failed)?;
        let (output, write_end) = process::pipe().map_err(failed)?;
        let life = self.life.try_clone().map_err(failed)?;
        let helper = Program::new(&self.program, [HELPER]).shown_as("pod").input_file(life).only_env([]);
        let mut helper = helper
            .start_onto(theirs.into(), write_end)
            .map_err(|source| Error::io("start the helper that confines commands", source))?;
        let mut output = File::from(output);
        let _ = ours.write_all(&line); // a helper that has ended too early says why below
        let killed = kept.follow(&mut output, &ours, cancel, deadline);
        let _ = ours.shutdown(Shutdown::Write); // the lifeline: everything inside ends now
        // However long that takes: what still runs could write into what the next call lends.
        let mut report = Vec::new();
        while ours.read_to_end(&mut report).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            log::error!("a command was killed but has not ended; nothing else runs until it has");
        }
        helper.wait().map_err(failed)?;
        // What escaped at a weaker level may hold the pipe and go on, so only what it holds by now is read.
        for _ in 0..PIPE_READS {
            kept.read(&mut output, Instant::now()).map_err(failed)?;
        }
        match (killed.map_err(failed)?, serde_json::from_slice::<Report>(&report)) {
            (Some(outcome), _) => Ok(outcome),
            (None, Ok(Ok(ended))) => Ok(Outcome::Ended(ended)),
            (None, Ok(Err(reason))) => Err(Error::told(format!("the command could not be run: {reason}"))),
            (None, Err(_)) => Err(Error::told("the helper that confines commands was killed")),
        }
    }
}

/// The beginning and the end of what a command has said.
#[derive(Debug, Default)]
pub struct Kept {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Kept {
    fn add(&mut self, piece: &[u8]) {
        self.total += piece.len() as u64;
        let (head, rest) = piece.split_at(piece.len().min(HALF_KEPT_BYTES - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        self.tail.drain(..self.tail.len().saturating_sub(HALF_KEPT_BYTES));
    }

    /// Reads one piece, if one comes in time; `false` at the end of the output.
    fn read(&mut self, output: &mut File, deadline: Instant) -> io::Result<bool> {
        if wait_readable(output.as_fd(), None, None, deadline)? != Ready::Readable {
            return Ok(true);
        }
        let mut buffer = [0; 64 << 10];
        let count = output.read(&mut buffer)?;
        self.add(buffer.get(..count).unwrap_or_default());
        Ok(count > 0)
    }

    /// Reads until the helper says something or is gone; tells why the command must be killed instead.
    fn follow(
        &mut self,
        output: &mut File,
        helper: &UnixStream,
        cancel: Option<&Cancel>,
        deadline: Instant,
    ) -> io::Result<Option<Outcome>> {
        loop {
            match wait_readable(output.as_fd(), Some(helper.as_fd()), cancel, deadline)? {
                Ready::Readable if Instant::now() >= deadline => return Ok(Some(Outcome::TimedOut)),
                Ready::Readable if self.read(output, deadline)? => {}
                Ready::Readable | Ready::OtherReadable => return Ok(None),
                Ready::Cancelled => return Ok(Some(Outcome::Cancelled)),
                Ready::TimedOut => return Ok(Some(Outcome::TimedOut)),
            }
        }
    }

    /// All of it as text, with a line in place of what was not kept.
    pub fn into_text(self) -> String {
        let left_out = self.total - (self.head.len() + self.tail.len()) as u64;
        let mut bytes = self.head;
        if left_out > 0 {
            bytes.extend_from_slice(
                format!("\n[... {left_out} bytes of output were not kept ...]\n").as_bytes(),
            );
        }
        bytes.extend(self.tail);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Is the helper, if that is what the hidden argument asks for.
#[must_use]
pub fn helper_main(given: &[OsString]) -> Option<ExitCode> {
    if given != [HELPER] {
        return None;
    }
    let sent = io::stdout().as_fd().try_clone_to_owned().and_then(|control| {
        let mut control = UnixStream::from(control);
        let report: Report = helper(&control).map_err(|error| error.to_string());
        control.write_all(&serde_json::to_vec(&report)?)
    });
    Some(if sent.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }) // nobody listens: the pod is gone
}

fn helper(control: &UnixStream) -> Result<Ended> {
    let failed = |source| Error::io("set up the sandbox", source);
    let mut line = String::new();
    BufReader::new(control.take(PLAN_BYTES_MAX)).read_line(&mut line).map_err(failed)?;
    let plan: Plan = serde_json::from_str(&line).map_err(|error| failed(error.into()))?;
    confine::keep_descriptors().map_err(failed)?;
    let (uid, gid) = (process::own_uid(), process::own_gid());
    if plan.level == Level::Namespaces {
        confine::enter_outer(&plan.view, uid, gid).map_err(failed)?;
    }
    // Its parent until the end: the kernel reports its end only when all processes of its namespace are gone.
    let ended = supervise::in_child(|| inner(&plan, uid, gid, control)).map_err(failed)?;
    ended.unwrap_or_else(|| Err(Error::told("its supervisor was killed")))
}

fn inner(plan: &Plan, uid: u32, gid: u32, control: &UnixStream) -> Result<Ended> {
    let failed = |source| Error::io("set up the sandbox", source);
    process::leave_session().map_err(failed)?;
    match &plan.level {
        Level::Namespaces => confine::enter_inner(uid, gid).map_err(failed)?,
        Level::Landlock => confine::restrict(&plan.view).map_err(failed)?,
        Level::Off(reason) => return Err(Error::told(reason)),
        Level::Unconfined => {}
    }
    let [shell, arguments @ ..] = plan.command.as_slice() else {
        return Err(Error::told("there is no command"));
    };
    let variables = plan.variables.iter().map(|(name, value)| (name.into(), value.into()));
    let program = Program::new(shell, arguments).directory(&plan.directory).only_env(variables);
    supervise::supervise(program, control)
        .map_err(|source| Error::io(format!("run \"{shell}\" in \"{}\"", plan.directory.display()), source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t02_head_and_tail_of_the_output_are_kept() {
        let mut kept = Kept::default();
        for number in 0..300_000 {
            kept.add(format!("line {number}\n").as_bytes());
        }
        let text = kept.into_text();
        assert!(text.starts_with("line 0\n") && text.ends_with("line 299999\n"));
        assert!(text.len() < (2 * HALF_KEPT_BYTES) + 100 && text.contains("bytes of output were not kept"));
        let mut short = Kept::default();
        short.add(b"\xff short");
        assert_eq!(short.into_text(), "\u{fffd} short");
    }

    #[test]
    fn off_is_stronger_than_everything_and_unconfined_weaker() {
        let order = [Level::Unconfined, Level::Landlock, Level::Namespaces, Level::Off(String::new())];
        for (place, level) in order.iter().enumerate() {
            for (other, against) in order.iter().enumerate() {
                assert_eq!(level.is_weaker_than(against.number()), place < other, "{level} {against}");
            }
        }
    }
}
