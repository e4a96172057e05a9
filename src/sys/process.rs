//! Processes: starting a program with bounds, telling one process from another, ending what we started.
//!
//! Knows programs and pids, never pods. The only file that names `process::Command`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid as NixPid;

use crate::sys::socket::{Line, LineReader};
use crate::sys::wait::{Cancel, Ready, wait_readable};

/// A program to be started in a process group of its own.
#[derive(Debug)]
pub struct Program {
    command: Command,
    input: Vec<u8>,
}

/// Where the standard error output of a program goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorOutput {
    /// Into the same pipe as the output, in order.
    WithOutput,
    /// Into a pipe of its own.
    Separate,
}

impl Program {
    /// A program and its arguments. It gets no standard input and the environment of this process.
    pub fn new<A: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = A>) -> Program {
        #[allow(clippy::disallowed_methods, reason = "the one place that starts processes")]
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).process_group(0);
        Program { command, input: Vec::new() }
    }

    /// Gives it this text on its standard input: at most 64 KiB, which a pipe takes without a reader (pipe(7)).
    #[must_use]
    pub fn input(mut self, input: impl Into<Vec<u8>>) -> Program {
        self.input = input.into();
        self.command.stdin(Stdio::piped());
        self
    }

    /// Gives it this open file as its standard input, from the file's present position on: for input of any size.
    #[must_use]
    pub fn input_file(mut self, file: File) -> Program {
        self.command.stdin(Stdio::from(file));
        self
    }

    /// Lets lists of processes show it under this name.
    #[must_use]
    pub fn shown_as(mut self, name: &str) -> Program {
        self.command.arg0(name);
        self
    }

    /// Runs it in this directory.
    #[must_use]
    pub fn directory(mut self, directory: &Path) -> Program {
        self.command.current_dir(directory);
        self
    }

    /// Sets one variable of its environment.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Program {
        self.command.env(name, value);
        self
    }

    /// Gives it exactly this environment.
    #[must_use]
    pub fn only_env(mut self, variables: impl IntoIterator<Item = (OsString, OsString)>) -> Program {
        self.command.env_clear().envs(variables);
        self
    }

    /// Starts it with these as its standard output and error output.
    ///
    /// # Errors
    /// As execve(2): `NotFound` when there is no such program.
    pub fn start_onto(mut self, output: OwnedFd, errors: OwnedFd) -> io::Result<Child> {
        self.command.stdout(Stdio::from(output)).stderr(Stdio::from(errors)).spawn()
    }

    /// Starts it.
    ///
    /// # Errors
    /// As execve(2): `NotFound` when there is no such program.
    pub fn start(mut self, errors: ErrorOutput) -> io::Result<Running> {
        let (output, write_end) = pipe()?;
        let (errors, stderr) = match errors {
            ErrorOutput::WithOutput => (None, write_end.try_clone()?),
            ErrorOutput::Separate => pipe().map(|(read, write)| (Some(File::from(read)), write))?,
        };
        self.command.stdout(Stdio::from(write_end)).stderr(Stdio::from(stderr));
        let mut child = self.command.spawn()?;
        drop(self.command); // it holds our copies of the write ends
        if let Some(mut stdin) = child.stdin.take() {
            if let Err(error) = stdin.write_all(&self.input) {
                log::debug!("a program did not read its input: {error}"); // its exit code says why
            }
        }
        Ok(Running { child, output: File::from(output), errors, error_bytes: Vec::new(), ended: None })
    }
}

/// A pipe, its reading end first. No program that is started gets either end unless it is given one.
///
/// # Errors
/// As pipe(2).
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?)
}

/// A program that runs; dropping it kills its process group and collects it.
#[derive(Debug)]
pub struct Running {
    child: Child,
    output: File,
    errors: Option<File>,
    /// The last bytes of the separate error output that were read while waiting for output.
    error_bytes: Vec<u8>,
    ended: Option<ExitStatus>,
}

/// How much of the end of a separate error output is kept.
const ERROR_BYTES_KEPT: usize = 64 << 10;

/// What one read of a program's output came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// So many bytes.
    Bytes(usize),
    /// The output is closed.
    End,
    /// Somebody set the flag.
    Cancelled,
    /// Nothing came until the deadline.
    TimedOut,
}

impl Running {
    /// Reads a piece of the output. Error output of its own is collected meanwhile, so that a program which
    /// says much there never blocks on a full pipe.
    ///
    /// # Errors
    /// As read(2) and poll(2).
    pub fn read(
        &mut self,
        buffer: &mut [u8],
        cancel: Option<&Cancel>,
        deadline: Instant,
    ) -> io::Result<Output> {
        loop {
            let errors = self.errors.as_ref().map(AsFd::as_fd);
            match wait_readable(self.output.as_fd(), errors, cancel, deadline)? {
                Ready::Readable => break,
                Ready::OtherReadable => self.read_errors(),
                Ready::Cancelled => return Ok(Output::Cancelled),
                Ready::TimedOut => return Ok(Output::TimedOut),
            }
        }
        Ok(match self.output.read(buffer)? {
            0 => Output::End,
            count => Output::Bytes(count),
        })
    }

    /// Reads the output to its end, keeping at most `bytes_max` of it; the rest is read and dropped.
    ///
    /// # Errors
    /// `Interrupted` when cancelled, `TimedOut` at the deadline, else as read(2).
    pub fn read_to_end(
        &mut self,
        bytes_max: usize,
        cancel: Option<&Cancel>,
        deadline: Instant,
    ) -> io::Result<Vec<u8>> {
        let mut kept = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            match self.read(&mut buffer, cancel, deadline)? {
                Output::Bytes(count) => {
                    let room = bytes_max.saturating_sub(kept.len());
                    kept.extend_from_slice(buffer.get(..count.min(room)).unwrap_or_default());
                }
                Output::End => return Ok(kept),
                Output::Cancelled => return Err(io::ErrorKind::Interrupted.into()),
                Output::TimedOut => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }

    /// The end of what it has said on its separate error output, at most `bytes_max` and 64 KiB, without waiting for
    /// more than 200 ms. Call it after its end.
    pub fn error_text(&mut self, bytes_max: usize) -> String {
        let deadline = Instant::now() + Duration::from_millis(200);
        while let Some(errors) = &self.errors {
            match wait_readable(errors.as_fd(), None, None, deadline) {
                Ok(Ready::Readable) => self.read_errors(),
                Ok(Ready::OtherReadable | Ready::Cancelled | Ready::TimedOut) | Err(_) => break,
            }
        }
        let start = self.error_bytes.len().saturating_sub(bytes_max);
        String::from_utf8_lossy(self.error_bytes.get(start..).unwrap_or_default()).into_owned()
    }

    /// Reads one piece of the error output, which must be ready; closes it at its end.
    fn read_errors(&mut self) {
        let mut buffer = [0; 4096];
        match self.errors.as_mut().map_or(Ok(0), |errors| errors.read(&mut buffer)) {
            Ok(0) | Err(_) => self.errors = None,
            Ok(count) => {
                self.error_bytes.extend_from_slice(buffer.get(..count).unwrap_or_default());
                self.error_bytes.drain(..self.error_bytes.len().saturating_sub(ERROR_BYTES_KEPT));
            }
        }
    }

    /// Its process number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end; kills its group at the deadline.
    ///
    /// # Errors
    /// `TimedOut` when it had to be killed, else as waitpid(2).
    pub fn wait(&mut self, deadline: Instant) -> io::Result<ExitStatus> {
        let mut pause = Duration::from_micros(200);
        loop {
            if let Some(status) = self.ended {
                return Ok(status);
            }
            self.ended = self.child.try_wait()?;
            if self.ended.is_none() {
                if Instant::now() >= deadline {
                    self.kill();
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
        }
    }

    /// Kills its process group and collects it; one that has ended is left alone.
    pub fn kill(&mut self) {
        if self.ended.is_some() {
            return;
        }
        // Not collected yet, so the number is still ours and cannot have been given to another process.
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = nix::sys::signal::killpg(NixPid::from_raw(pid), Signal::SIGKILL); // gone already is fine
        }
        self.ended = self.child.wait().ok();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What `/proc/PID/stat` says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStat {
    /// Whether it has ended and only waits to be collected.
    pub is_zombie: bool,
    /// Its start in clock ticks since boot.
    pub start_time: u64,
}

/// Reads the text of `/proc/PID/stat`.
///
/// Fields are counted after the last `)`, because the program's name may contain anything.
/// Source: proc_pid_stat(5), fields 3 (state) and 22 (starttime).
pub fn parse_stat(text: &[u8]) -> Option<ProcessStat> {
    let close = text.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(text.get(close + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    let start_time = fields.nth(18)?.parse().ok()?;
    Some(ProcessStat { is_zombie: matches!(state, "Z" | "X" | "x"), start_time })
}

/// What the system says of this process number now; `None` when no process has it.
pub fn process_stat(pid: i32) -> Option<ProcessStat> {
    parse_stat(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// The number of this process.
pub fn own_pid() -> i32 {
    nix::unistd::getpid().as_raw()
}

/// The real user id of this process.
pub fn own_uid() -> u32 {
    nix::unistd::getuid().as_raw()
}

/// Who holds a flock(2) on the file of this inode, in words. Source: proc_locks(5).
pub fn holder_of_lock(inode: u64) -> String {
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let suffix = format!(":{inode}");
    let pid = locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_it = fields.get(1) == Some(&"FLOCK") && fields.get(5).is_some_and(|id| id.ends_with(&suffix));
        is_it.then(|| fields.get(4).map(|pid| (*pid).to_owned())).flatten()
    });
    match pid {
        Some(pid) => {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid} ({})", crate::words::text::harmless_line(&name))
        }
        None => "another process".to_owned(),
    }
}

/// The effective group id of this process.
pub fn own_gid() -> u32 {
    nix::unistd::getegid().as_raw()
}

/// Kills the process that has this number and this start time, looked up right before.
///
/// # Errors
/// `NotFound` when the number belongs to nobody, to a zombie or to another process; else as kill(2).
pub fn kill_exactly(pid: i32, start_time: u64) -> io::Result<()> {
    let same = |stat: &ProcessStat| stat.start_time == start_time && !stat.is_zombie;
    if pid < 2 || process_stat(pid).filter(same).is_none() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(nix::sys::signal::kill(NixPid::from_raw(pid), Signal::SIGKILL)?)
}

/// Makes this process the leader of a session of its own, without a terminal.
///
/// # Errors
/// `EPERM` when it leads a process group already.
pub fn leave_session() -> io::Result<()> {
    nix::unistd::setsid()?;
    Ok(())
}

/// Lets the standard input of this process come from the null device from now on.
///
/// # Errors
/// As open(2) and dup2(2).
pub fn close_input() -> io::Result<()> {
    Ok(nix::unistd::dup2_stdin(File::open("/dev/null")?)?)
}

/// Lets the standard output of this process go to the null device from now on.
///
/// # Errors
/// As open(2) and dup2(2).
pub fn silence_output() -> io::Result<()> {
    let null = File::options().write(true).open("/dev/null")?;
    Ok(nix::unistd::dup2_stdout(null)?)
}

/// Lets the standard error output of this process go to `file` from now on.
///
/// # Errors
/// As dup2(2).
pub fn redirect_errors(file: &File) -> io::Result<()> {
    Ok(nix::unistd::dup2_stderr(file)?)
}

/// Starts this same program again in the background: standard input and errors as ours, output for us to read.
///
/// The new process is a child until this one ends, then a child of process 1; it leaves the session itself.
///
/// # Errors
/// As execve(2).
pub fn start_self(args: &[OsString]) -> io::Result<DetachedSelf> {
    let (output, write_end) = LineReader::pair()?;
    #[allow(clippy::disallowed_methods, reason = "the one place that starts processes")]
    let mut command = Command::new(own_program().unwrap_or_else(|| OWN_IMAGE.into()));
    let name = std::env::args_os().next().unwrap_or_else(|| "pod".into());
    let child = command.arg0(name).args(args).stdout(Stdio::from(write_end)).spawn()?;
    Ok(DetachedSelf { child, output })
}

/// This very program, also after its file was replaced or hidden. Source: proc_pid_exe(5).
const OWN_IMAGE: &str = "/proc/self/exe";

/// A background copy of this program that has not said yet whether it is ready.
#[derive(Debug)]
pub struct DetachedSelf {
    child: Child,
    output: LineReader,
}

impl DetachedSelf {
    /// Its first line of output, without the newline; `None` when it ended or the deadline passed before.
    pub fn first_line(&mut self, bytes_max: usize, deadline: Instant) -> Option<String> {
        let Line::Complete(line) = self.output.read_line(bytes_max, deadline) else { return None };
        String::from_utf8(line).ok()
    }

    /// Ends it at once and says how it ended.
    pub fn kill(mut self) -> String {
        // Its own end comes first: a process that has closed its output is about to exit by itself.
        for _ in 0..50 {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.to_string();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill(); // gone already is fine
        let _ = self.child.wait();
        "it did not get ready in time and was killed".to_owned()
    }
}

/// The path of this program, unless it was replaced or deleted since it started.
pub fn own_program() -> Option<PathBuf> {
    std::env::current_exe().ok().filter(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn r11_the_process_table_is_read_after_the_last_bracket() {
        let tail = "0 1 1 0 -1 4194560 100 0 0 0 1 2 3 4 20 0 1 0 987654 1000 10";
        let check = |name: &str, state: &str| {
            let text = format!("42 ({name}) {state} {tail}");
            let stat = parse_stat(text.as_bytes()).unwrap();
            assert_eq!(stat, ProcessStat { is_zombie: state == "Z", start_time: 987_654 });
        };
        check("pod", "S");
        check("a) R 1 (b", "Z");
        check("two\nlines )", "T");
        for bad in ["", "1 (x", "1 (x) S", "1 (x) S 1 2 3"] {
            assert_eq!(parse_stat(bad.as_bytes()), None);
        }
    }

    #[test]
    fn tells_itself_from_a_process_that_is_not_there() {
        assert!(process_stat(own_pid()).is_some_and(|stat| !stat.is_zombie && stat.start_time > 0));
        assert_eq!(process_stat(i32::MAX), None);
        assert!(kill_exactly(own_pid(), 1).is_err(), "another start time is another process");
        assert!(kill_exactly(1, 0).is_err() && kill_exactly(-1, 0).is_err());
    }

    #[test]
    fn a_program_gets_its_input_and_its_output_is_capped() {
        let mut cat = Program::new("cat", [""; 0]).input("hello").start(ErrorOutput::Separate).unwrap();
        assert_eq!(cat.read_to_end(100, None, soon()).unwrap(), b"hello");
        assert!(cat.wait(soon()).unwrap().success());
        let mut many = Program::new("seq", ["100000"]).start(ErrorOutput::WithOutput).unwrap();
        assert_eq!(many.read_to_end(10, None, soon()).unwrap().len(), 10);
        let mut fails =
            Program::new("sh", ["-c", "echo no >&2; exit 3"]).start(ErrorOutput::Separate).unwrap();
        assert_eq!(fails.wait(soon()).unwrap().code(), Some(3));
        assert_eq!(fails.error_text(100), "no\n");
    }

    #[test]
    fn a_program_that_complains_at_length_does_not_block() {
        let script = "cat; seq 100000 >&2; echo last >&2";
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![b'x'; 300_000]).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        let program = Program::new("sh", ["-c", script]).input_file(file);
        let mut shell = program.start(ErrorOutput::Separate).unwrap();
        assert_eq!(shell.read_to_end(1 << 20, None, soon()).unwrap().len(), 300_000);
        assert!(shell.wait(soon()).unwrap().success());
        assert_eq!(shell.error_text(10), "00000\nlast\n".get(1..).unwrap());
    }

    #[test]
    fn a_dropped_program_takes_its_group_along() {
        let script = "sleep 1000 & echo $!; wait";
        let mut shell = Program::new("sh", ["-c", script]).start(ErrorOutput::WithOutput).unwrap();
        let mut buffer = [0; 64];
        let Output::Bytes(count) = shell.read(&mut buffer, None, soon()).unwrap() else {
            panic!("no output")
        };
        let pid: i32 = std::str::from_utf8(&buffer[..count]).unwrap().trim().parse().unwrap();
        drop(shell);
        while process_stat(pid).is_some_and(|stat| !stat.is_zombie) {
            std::thread::yield_now();
        }
    }
}
