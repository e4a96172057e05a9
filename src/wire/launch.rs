//! The launch contract from the caller's side: run a command, read one ready line, or learn why not.
//!
//! Any command that keeps the contract can start pods; the default is `pod` beside the running program.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::sys::process::{ErrorOutput, Program, own_program};
use crate::sys::wait::Cancel;
use crate::words::error::{Error, Result};
use crate::words::identity::{Pid, PodId};
use crate::words::text::cut_end;

/// What a started pod says in its one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Its id.
    pub pod_id: PodId,
    /// Its socket, accepting connections.
    pub socket: PathBuf,
    /// Its process.
    pub pid: Pid,
}

const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// What a pipe takes at once (pipe(7)): a command that does not read its input must not hold us up.
const OVERLAY_BYTES_MAX: usize = 64 << 10;
const REASON_BYTES_MAX: usize = 4 << 10;

/// The command that starts a pod: `INSOMNIA_POD_COMMAND`, then the manifest's, then `pod` beside this program,
/// then `pod` on PATH.
pub fn pod_command(from_manifest: &[String]) -> Vec<String> {
    let variable = std::env::var("INSOMNIA_POD_COMMAND").unwrap_or_default();
    let from_variable: Vec<String> = variable.split_whitespace().map(str::to_owned).collect();
    let given = [from_variable, from_manifest.to_vec()].into_iter().find(|words| !words.is_empty());
    let own = || own_pod().map_or_else(|| "pod".to_owned(), |path| path.to_string_lossy().into_owned());
    given.unwrap_or_else(|| vec![own()])
}

/// The program `pod` beside this one, unless this one was replaced or deleted since it started.
pub fn own_pod() -> Option<PathBuf> {
    own_program().map(|program| program.with_file_name("pod")).filter(|path| path.is_file())
}

/// What a pod is launched with.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The pod command, a program and its first arguments.
    pub command: &'a [String],
    /// The arguments of this pod.
    pub args: &'a [String],
    /// The directory in which the command runs.
    pub directory: &'a Path,
    /// Settings over the manifests, given on standard input.
    pub overlay: &'a str,
    /// Variables besides those of this process.
    pub variables: &'a [(&'a str, &'a Path)],
    /// How long it may take.
    pub limit: Duration,
}

/// Starts a pod.
///
/// # Errors
/// `Error::Cancelled`, or a sentence with the reason in the pod's own words: it could not be started, it said
/// why it will not run, or it was not ready within `limit`.
pub fn launch(wanted: Launch<'_>, cancel: &Cancel) -> Result<Ready> {
    let Launch { command, args, directory, overlay, variables, limit } = wanted;
    let (program, first) = command.split_first().ok_or_else(|| Error::told("the pod command is empty"))?;
    if overlay.len() > OVERLAY_BYTES_MAX {
        let size = overlay.len();
        return Err(Error::told(format!(
            "its settings have {size} bytes, {OVERLAY_BYTES_MAX} are allowed; deny fewer tools"
        )));
    }
    let deadline = Instant::now() + limit;
    let started = Program::new(program, first.iter().chain(args)).directory(directory).input(overlay);
    let started = variables.iter().fold(started, |started, (name, value)| started.env(name, value));
    let mut running = started.start(ErrorOutput::Separate).map_err(|error| {
        let what = if error.kind() == io::ErrorKind::NotFound && directory.is_dir() {
            "there is no such program; set INSOMNIA_POD_COMMAND or \"pod_command\" in your manifest"
                .to_owned()
        } else {
            error.to_string()
        };
        Error::told(format!("cannot start a pod with \"{program}\" in \"{}\": {what}", directory.display()))
    })?;
    let output = match running.read_to_end(OUTPUT_BYTES_MAX, Some(cancel), deadline) {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(Error::Cancelled),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            return Err(Error::told(format!(
                "the pod was not ready within {} s (manifest setting \"limits.launch_seconds\")",
                limit.as_secs()
            )));
        }
        Err(source) => return Err(Error::io("read the pod's ready line", source)),
    };
    let status = running.wait(deadline);
    if status.as_ref().is_ok_and(std::process::ExitStatus::success) {
        if let Ok(ready) = serde_json::from_slice(&output) {
            return Ok(ready);
        }
    }
    let said = running.error_text(OUTPUT_BYTES_MAX);
    let reason = match said.trim() {
        "" if output.is_empty() => "it said nothing",
        "" => "what it printed is no ready line",
        said => said,
    };
    let reason = cut_end(reason, REASON_BYTES_MAX);
    // A pod of ours says itself that it could not start, and why.
    let Some(own_words) = reason.strip_prefix("pod: ") else {
        let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        return Err(Error::told(format!("the pod did not start ({how}): {reason}")));
    };
    Err(match status.ok().and_then(|status| status.code()) {
        Some(2) => Error::Usage(own_words.replace("; see \"pod --help\"", "")),
        _ => Error::told(own_words),
    })
}
