//! A program that answers one request: its output in pieces, with limits on waiting and size, and the private
//! file that holds the request.
//!
//! Knows nothing of models. Runs on the turn thread.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use crate::sys::clock::random_hex;
use crate::sys::process::{ErrorOutput, Output, Program, Running};
use crate::sys::wait::Cancel;
use crate::wire::provider::Failure;

/// The most bytes of one answer; a reply of 100,000 tokens, one event each, has about 20 MiB.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// How much is read at once.
const PIECE_BYTES: usize = 16 << 10;
/// How much of the end of the error output is told.
const ERROR_BYTES_MAX: usize = 2048;
/// How long a program may take to exit after its output has ended.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// How long each part of an exchange may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Until the connection stands: name look-up, TCP, proxy and TLS.
    pub connect: Duration,
    /// From the start until the first byte of the answer, and between two pieces of it.
    pub silence: Duration,
    /// For all of it.
    pub total: Duration,
}

impl Patience {
    /// The usual patience, with these seconds of silence where a person knows better.
    ///
    /// Most servers send a sign of life every few seconds; OpenAI's says nothing while a model thinks, and a local
    /// one nothing while it reads a long prompt, for minutes. One hour is more than any reply takes.
    pub(super) fn of(silence_seconds: Option<u64>) -> Patience {
        let [connect, usual, total] = [30, 300, 3600].map(Duration::from_secs);
        let silence = silence_seconds.map_or(usual, Duration::from_secs).min(total);
        Patience { connect, silence, total }
    }
}

/// A program under way; dropping it ends its process group and removes the request.
#[derive(Debug)]
pub(super) struct Child {
    running: Running,
    /// Declared behind `running`, so that the program is gone before the file.
    _request: RequestFile,
    /// Whom sentences speak of.
    pub(super) name: String,
    pub(super) patience: Patience,
    end: Instant,
    bytes: usize,
}

impl Child {
    /// Starts it.
    pub(super) fn start(
        program: Program,
        request: RequestFile,
        name: &str,
        patience: Patience,
    ) -> std::io::Result<Child> {
        let (name, end) = (name.to_owned(), Instant::now() + patience.total);
        let running = program.start(ErrorOutput::Separate)?;
        Ok(Child { running, _request: request, name, patience, end, bytes: 0 })
    }

    /// The next piece of its output; `None` at the end.
    pub(super) fn piece(&mut self, cancel: &Cancel) -> Result<Option<Vec<u8>>, Failure> {
        let Patience { silence, total, .. } = self.patience;
        let deadline = (Instant::now() + silence).min(self.end);
        let (name, mut piece) = (&self.name, vec![0; PIECE_BYTES]);
        let failure = match self.running.read(&mut piece, Some(cancel), deadline) {
            Ok(Output::Bytes(count)) if self.bytes + count <= ANSWER_BYTES_MAX => {
                self.bytes += count;
                piece.truncate(count);
                return Ok(Some(piece));
            }
            Ok(Output::Bytes(_)) => Failure::Final(format!("{name} sent more than {ANSWER_BYTES_MAX} bytes")),
            Ok(Output::End) => return Ok(None),
            Ok(Output::Cancelled) => Failure::Cancelled,
            Ok(Output::TimedOut) if Instant::now() >= self.end => {
                Failure::retry(format!("the answer of {name} was not whole after {} s", total.as_secs_f64()))
            }
            Ok(Output::TimedOut) => {
                Failure::retry(format!("{name} sent nothing for {} s", silence.as_secs_f64()))
            }
            Err(error) => Failure::retry(format!("cannot read the answer of {name}: {error}")),
        };
        Err(failure)
    }

    /// Gives it no more than `grace` from now on.
    pub(super) fn hurry(&mut self, grace: Duration) {
        self.end = self.end.min(Instant::now() + grace);
    }

    /// Gives it `grace` to end its output by itself.
    pub(super) fn drain(&mut self, cancel: &Cancel, grace: Duration) {
        self.hurry(grace);
        while let Ok(Some(_)) = self.piece(cancel) {}
    }

    /// How it ended, once its output has, and the end of its error output; no status when it was killed for that.
    pub(super) fn finish(&mut self) -> (Option<ExitStatus>, String) {
        let status = self.running.wait(Instant::now() + EXIT_WAIT).ok();
        (status, self.running.error_text(ERROR_BYTES_MAX))
    }
}

/// The request in a file that only we can read; dropping it removes it.
#[derive(Debug)]
pub(super) struct RequestFile {
    pub(super) path: PathBuf,
}

impl RequestFile {
    /// Writes it into this 0700 directory.
    pub(super) fn write(directory: &Path, content: &[u8]) -> Result<RequestFile, Failure> {
        let write = || {
            let path = directory.join(format!("request-{}.json", random_hex(8)?));
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
            let request = RequestFile { path };
            file.write_all(content).map(|()| request)
        };
        write().map_err(|error: std::io::Error| {
            Failure::Final(format!("cannot write the request into \"{}\": {error}", directory.display()))
        })
    }
}

impl Drop for RequestFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            log::warn!("cannot remove \"{}\": {error}", self.path.display()); // it holds no key
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_is_private_and_goes_with_its_guard() {
        use std::os::unix::fs::MetadataExt;
        let place = tempfile::tempdir().unwrap();
        let body = RequestFile::write(place.path(), b"hello").unwrap();
        let metadata = std::fs::metadata(&body.path).unwrap();
        assert_eq!((metadata.mode() & 0o777, metadata.len()), (0o600, 5));
        drop(body);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        let gone = RequestFile::write(&place.path().join("nowhere"), b"");
        assert!(matches!(gone, Err(Failure::Final(told)) if told.contains("cannot write the request")));
    }
}
