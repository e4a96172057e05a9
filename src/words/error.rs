//! What can go wrong outside the pure words, with the path, pod or command it happened to.
//!
//! Pure: it only holds what others found out. The same sentence helps a person and a model.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::words::allocation::Refusal;
use crate::words::protocol::{ErrorCode, WireError};

/// Everything that can go wrong outside the pure words.
#[derive(Debug)]
pub enum Error {
    /// A command line that makes no sense; exit code 2.
    Usage(String),
    /// The system refused something: what was tried, and its words.
    Io {
        /// What was tried, as "cannot ..." goes on: `open "/path"`.
        action: String,
        /// The system's words.
        source: io::Error,
    },
    /// `scope.lock` cannot be used until a person repairs it.
    LockUnusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        fault: String,
    },
    /// Somebody held `scope.lock` for too long.
    LockBusy {
        /// The file.
        path: PathBuf,
        /// Who holds it, as far as the system tells.
        holder: String,
    },
    /// A start or a loan is refused.
    Refused(Refusal),
    /// Nobody answers at this pod's address.
    Unreachable {
        /// The pod or socket.
        pod: String,
        /// Why.
        reason: String,
    },
    /// A pod answered with a refusal, in its own words.
    Peer(WireError),
    /// A setting is wrong; the text names file, line and key.
    Manifest(String),
    /// Somebody stopped what was going on.
    Cancelled,
    /// Any other clear sentence: what happened, to what, what to do.
    Told(String),
}

/// The result of everything outside the pure words.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of the system with what was tried, such as `open "/path"`.
    pub fn io(action: impl Into<String>, source: impl Into<io::Error>) -> Error {
        Error::Io { action: action.into(), source: source.into() }
    }

    /// What makes an error of the system's words when `action` on this path has failed: `cannot open "/path": ...`.
    pub fn on(action: &str, path: &Path) -> impl Fn(io::Error) -> Error + Copy {
        move |source| Error::io(format!("{action} \"{}\"", path.display()), source)
    }

    /// A clear sentence.
    pub fn told(sentence: impl Into<String>) -> Error {
        Error::Told(sentence.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Usage(text) | Error::Manifest(text) | Error::Told(text) => f.write_str(text),
            Error::Io { action, source } => write!(f, "cannot {action}: {source}"),
            Error::LockUnusable { path, fault } => write!(
                f,
                "\"{}\" is not usable: {fault}; nothing is started or lent until \"insomnia scope repair\" has rebuilt it from the pods that live",
                path.display()
            ),
            Error::LockBusy { path, holder } => write!(
                f,
                "\"{}\" is locked by {holder} for more than 5 s; look at that process, then try again",
                path.display()
            ),
            Error::Refused(refusal) => refusal.fmt(f),
            Error::Unreachable { pod, reason } => write!(f, "pod \"{pod}\" does not answer: {reason}"),
            Error::Peer(error) => f.write_str(&error.message),
            Error::Cancelled => f.write_str("cancelled"),
        }
    }
}

impl std::error::Error for Error {}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        Error::Refused(refusal)
    }
}

/// What failed inside a pod, as it goes over the wire.
impl From<Error> for WireError {
    fn from(error: Error) -> WireError {
        WireError::new(ErrorCode::Internal, error.to_string())
    }
}

impl From<WireError> for Error {
    fn from(error: WireError) -> Error {
        Error::Peer(error)
    }
}
