//! Asking another pod: one connection, one request, one reply.
//!
//! Any thread but the controller's may call it; every step has a deadline.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use crate::sys::socket::{self, Line, LineReader};
use crate::words::error::{Error, Result};
use crate::words::identity::Life;
use crate::words::limits::{MAX_LINE_BYTES, WIRE_TIMEOUT};
use crate::words::protocol::{
    Method, Reply, Request, Sender, StreamEvent, SubscribeReply, to_line, too_large,
};

/// The longest reply or event line that is read: a page, or one huge item.
const REPLY_BYTES_MAX: usize = 64 << 20;

/// Where a pod is reached, and which life of it is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// What the pod is called in sentences: its pod_id, or its socket where only that is known.
    pub pod: String,
    /// Its socket.
    pub socket: PathBuf,
    /// The life that is meant; `None` for whoever listens, as people mean it.
    pub life: Option<Life>,
}

/// Who asks: `None` for a person.
pub type Asker<'a> = Option<&'a Sender>;

/// Asks with the usual time limit, and reads the answer as `T`.
///
/// # Errors
/// `Error::Unreachable` if nobody answers there, `Error::Peer` with the pod's own refusal.
pub fn ask<T: DeserializeOwned>(address: &Address, from: Asker<'_>, method: Method) -> Result<T> {
    ask_within(address, from, method, WIRE_TIMEOUT)
}

/// Asks, with a limit for the whole exchange: each step gets what is left of it.
///
/// # Errors
/// As `ask`.
pub fn ask_within<T: DeserializeOwned>(
    address: &Address,
    from: Asker<'_>,
    method: Method,
    limit: Duration,
) -> Result<T> {
    exchange(address, from, method, limit).map(|(answer, _)| answer)
}

/// A running stream of events.
#[derive(Debug)]
pub struct Subscription {
    address: Address,
    lines: LineReader,
    /// What `subscribe` answered.
    pub opened: SubscribeReply,
}

/// What the next line of a subscription is.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// An event.
    Event(Box<StreamEvent>),
    /// Nothing came until the deadline.
    Nothing,
    /// The stream is over: the pod ended, or dropped us.
    Over,
}

/// Subscribes to a pod's events, from item `since` on.
///
/// # Errors
/// As `ask`.
pub fn subscribe(address: &Address, since: Option<u64>) -> Result<Subscription> {
    let (opened, lines) = exchange(address, None, Method::Subscribe { since }, WIRE_TIMEOUT)?;
    Ok(Subscription { address: address.clone(), lines, opened })
}

impl Subscription {
    /// Waits for the next event.
    ///
    /// # Errors
    /// `Error::Unreachable` when a line is no event of this protocol.
    pub fn next(&mut self, deadline: Instant) -> Result<Next> {
        match self.lines.read_line(REPLY_BYTES_MAX, deadline) {
            Line::Complete(line) => {
                serde_json::from_slice(&line).map(|event| Next::Event(Box::new(event))).map_err(|error| {
                    unreachable(&self.address, format!("it sent an event that is not valid: {error}"))
                })
            }
            Line::TimedOut => Ok(Next::Nothing),
            Line::Closed => Ok(Next::Over),
            Line::TooLong => Err(unreachable(&self.address, "it sent an event without an end".into())),
        }
    }
}

/// Asks, and gives the answer with the connection, on which more may come.
fn exchange<T: DeserializeOwned>(
    address: &Address,
    from: Asker<'_>,
    method: Method,
    limit: Duration,
) -> Result<(T, LineReader)> {
    let deadline = Instant::now() + limit;
    let name = method.name();
    let line = to_line(&Request { method, from: from.cloned(), to: address.life.clone() });
    if line.len() > MAX_LINE_BYTES {
        return Err(Error::Peer(too_large()));
    }
    let mut stream = socket::connect(&address.socket, limit)
        .map_err(|error| unreachable(address, connect_reason(&error)))?;
    socket::write_by(&mut stream, line.as_bytes(), deadline)
        .map_err(|error| unreachable(address, format!("it does not read ({error})")))?;
    let mut lines = LineReader::new(stream);
    let reason = match lines.read_line(REPLY_BYTES_MAX, deadline) {
        Line::Complete(line) => match serde_json::from_slice(&line) {
            Ok(Reply::Error(error)) => return Err(Error::Peer(error)),
            Ok(Reply::Ok(value)) => match serde_json::from_value(value) {
                Ok(answer) => return Ok((answer, lines)),
                Err(error) => format!("its answer to {name} is not valid: {error}"),
            },
            Err(error) => format!("its answer is not valid: {error}"),
        },
        Line::TimedOut => "it gave no answer in time; it may be stopped or hang".into(),
        Line::Closed => "it closed the connection without an answer; it may have ended".into(),
        Line::TooLong => "its answer has no end".into(),
    };
    Err(unreachable(address, reason))
}

fn connect_reason(error: &std::io::Error) -> String {
    let kind = error.kind();
    if kind == ErrorKind::NotFound {
        "it has no socket, so it does not run".into()
    } else if kind == ErrorKind::ConnectionRefused {
        "nobody listens on its socket, so it does not run".into()
    } else if kind == ErrorKind::WouldBlock || kind == ErrorKind::TimedOut {
        "it accepts no connection".into()
    } else {
        format!("its socket cannot be reached ({error})")
    }
}

fn unreachable(address: &Address, reason: String) -> Error {
    Error::Unreachable { pod: address.pod.clone(), reason }
}
