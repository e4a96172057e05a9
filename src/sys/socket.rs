//! Unix sockets with deadlines: listening, connecting, one line at a time, and who is at the other end.
//!
//! Knows streams and bytes, never requests. Every step on a stream has a deadline.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt::{PeerCredentials, SendTimeout};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr};
use nix::sys::time::{TimeVal, TimeValLike};

/// The longest path that a socket may have, in bytes: `sun_path` of unix(7) holds 108 with the final NUL; the
/// design keeps four in reserve.
pub const MAX_PATH_BYTES: usize = 103;

/// Listens at `path` with mode 0600 from the first moment. To be called before another thread makes files.
///
/// The umask is process-wide, so it is narrowed only around the call.
///
/// # Errors
/// As bind(2): `AddrInUse` when something has that name.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let before = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(path);
    nix::sys::stat::umask(before);
    listener
}

/// Connects to `path`; `timeout` also bounds the wait for a listener that does not accept.
///
/// Source: unix(7): `SO_SNDTIMEO` bounds connect() while the backlog is full.
///
/// # Errors
/// As connect(2): `NotFound`, `ConnectionRefused`, `WouldBlock` when the time is over.
pub fn connect(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket =
        nix::sys::socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let millis = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX).max(1);
    nix::sys::socket::setsockopt(&socket, SendTimeout, &TimeVal::milliseconds(millis))?;
    let address = UnixAddr::new(path)?;
    nix::sys::socket::connect(socket.as_raw_fd(), &address)?;
    Ok(UnixStream::from(socket))
}

/// The user at the other end, as the kernel recorded it at connect(2).
///
/// # Errors
/// As getsockopt(2).
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    Ok(nix::sys::socket::getsockopt(stream, PeerCredentials)?.uid())
}

/// What reading a line came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A line, without its newline.
    Complete(Vec<u8>),
    /// More bytes than allowed without a newline.
    TooLong,
    /// The other end closed, or vanished, before a newline.
    Closed,
    /// The deadline passed before a newline.
    TimedOut,
}

/// Reads lines from a stream; what follows a line is kept for the next.
#[derive(Debug)]
pub struct LineReader {
    stream: UnixStream,
    pending: Vec<u8>,
    scanned: usize,
}

impl LineReader {
    /// Reads from this stream.
    pub fn new(stream: UnixStream) -> LineReader {
        LineReader { stream, pending: Vec::new(), scanned: 0 }
    }

    /// Reads what a program writes that gets the other end.
    ///
    /// # Errors
    /// As socketpair(2).
    pub fn pair() -> io::Result<(LineReader, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((LineReader::new(ours), theirs.into()))
    }

    /// The next line of at most `bytes_max` bytes, newline included; the whole line is due by `deadline`, so a
    /// peer that drips bytes cannot hold us longer.
    pub fn read_line(&mut self, bytes_max: usize, deadline: Instant) -> Line {
        let mut buffer = [0; 8192];
        loop {
            let fresh = self.pending.get(self.scanned..).unwrap_or_default();
            if let Some(at) = fresh.iter().position(|&byte| byte == b'\n') {
                let end = self.scanned + at;
                if end >= bytes_max {
                    return Line::TooLong;
                }
                let rest = self.pending.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.pending, rest);
                line.pop();
                self.scanned = 0;
                return Line::Complete(line);
            }
            self.scanned = self.pending.len();
            if self.scanned >= bytes_max {
                return Line::TooLong;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stream.set_read_timeout(Some(left)).is_err() {
                return Line::TimedOut;
            }
            let room = bytes_max.saturating_sub(self.scanned).clamp(1, buffer.len());
            match self.stream.read(buffer.get_mut(..room).unwrap_or_default()) {
                Ok(0) => return Line::Closed,
                Ok(count) => {
                    let (length, capacity) = (self.pending.len(), self.pending.capacity());
                    if length + count > capacity {
                        // Four times, so that little of the old copy is there beside the new one.
                        self.pending
                            .reserve_exact((capacity * 4).clamp(count, bytes_max.max(count)) - length);
                    }
                    self.pending.extend_from_slice(buffer.get(..count).unwrap_or_default());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Line::TimedOut;
                }
                Err(_) => return Line::Closed, // reset, broken pipe: the peer is gone, which is no fault
            }
        }
    }
}

/// Writes everything by `deadline`.
///
/// # Errors
/// `TimedOut` when the peer does not read, `BrokenPipe` when it is gone.
pub fn write_by(stream: &mut UnixStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn lines_are_cut_at_newlines_and_bounded() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut reader = LineReader::new(theirs);
        ours.write_all(b"one\n\ntwo\nrest").unwrap();
        for expected in ["one", "", "two"] {
            assert_eq!(reader.read_line(100, soon()), Line::Complete(expected.into()));
        }
        assert_eq!(reader.read_line(100, Instant::now() + Duration::from_millis(1)), Line::TimedOut);
        assert_eq!(reader.read_line(4, soon()), Line::TooLong);
        drop(ours);
        assert_eq!(reader.read_line(100, soon()), Line::Closed);
    }

    #[test]
    fn u04_the_socket_is_private_and_knows_its_peer() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("sock");
        let listener = listen(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let _client = connect(&path, Duration::from_secs(1)).unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert_eq!(peer_uid(&stream).unwrap(), crate::sys::process::own_uid());
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_peer_that_does_not_read_is_given_up() {
        let (mut ours, _theirs) = UnixStream::pair().unwrap();
        let deadline = Instant::now() + Duration::from_millis(50);
        let error = write_by(&mut ours, &vec![0; 16 << 20], deadline).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
