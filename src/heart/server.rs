//! The pod's socket: one thread for each connection, one request, one reply; `subscribe` alone streams.
//!
//! Connections wait for the disk, the lock and other pods, so that the controller never does.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};

use crate::heart::reports;
use crate::store::registry::Origin;
use crate::store::session::{self, Input};
use crate::sys::process::own_uid;
use crate::sys::socket::{self, Line, LineReader};
use crate::sys::thread::{self, lock, wait_while};
use crate::tools::context::PodContext;
use crate::tools::mailbox::{Event, shutting_down};
use crate::tools::{shell, survey};
use crate::words::allocation::AllocationTable;
use crate::words::identity::{Life, MODEL_NAME_RULE, is_model_name};
use crate::words::limits::{
    MAX_CONNECTIONS, MAX_LAST_RESPONSE_BYTES, MAX_LINE_BYTES, SUBSCRIBER_QUEUE, WIRE_TIMEOUT,
};
use crate::words::message::Item;
use crate::words::notification::render_message;
use crate::words::protocol::{
    Done, ErrorCode, HistoryReply, Introduction, Method, OutputReply, PROTOCOL_VERSION, PodsReply, Reply,
    Request, Sender, StatusReply, StreamEvent, WireError, parse_request, to_line, too_large,
};
use crate::words::scope::{Reach, Rule};
use crate::words::text::cut_end;

/// How often a stream with nothing to say looks whether its client is still there.
const CLIENT_CHECK: Duration = Duration::from_secs(2);

/// How long a client may let us wait before it may be cut for another: one that behaves takes far less.
const GRACE: Duration = Duration::from_millis(250);

/// How long a new client waits for the slot of a silent one that was cut.
const EVICTION_LIMIT: Duration = Duration::from_millis(100);

/// How often one that waits for its share looks whether it was cut, or another may be.
const SHARE_CHECK: Duration = Duration::from_millis(20);

/// A line up to this length is read at once; longer ones, up to `MAX_LINE_BYTES`, wait for their share.
const SHORT_LINE_BYTES: usize = 64 << 10;

/// Accepts connections on a thread of its own until the process ends.
///
/// # Errors
/// When the thread cannot be started.
pub fn serve(listener: UnixListener, context: Arc<PodContext>) -> std::io::Result<()> {
    let run = move || {
        let slots = Arc::new(Slots::default());
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => accept(stream, &context, &slots),
                Err(error) => {
                    log::warn!("cannot accept a connection: {error}"); // no descriptors; they come back
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    };
    thread::detach("accept", run)
}

/// The places for connections. When all are taken, a client that has let us wait for `GRACE` makes room, the oldest
/// first, so that clients which connect and say nothing, or do not read their answer, keep nobody out for long.
#[derive(Default)]
struct Slots {
    // A channel will not do: each connection takes itself out, from the middle, at its end.
    open: Mutex<Vec<Connection>>,
    /// Told when a connection ends, or has read its long line.
    freed: Condvar,
}

/// An open connection, as others see it.
struct Connection {
    number: u64,
    stream: UnixStream,
    /// Since when its client lets us wait, and what of the stream a cut closes. One that was to say something still
    /// hears `busy`, and what it said has not been done.
    awaited: Option<(Instant, Shutdown)>,
    is_cut: bool,
    share: Option<Share>,
}

/// What takes so much memory that only so many connections may do it at a time.
#[derive(Clone, Copy, PartialEq)]
enum Share {
    /// Reading a line that is not short.
    LongLine = 4,
    /// Making and sending a page of a history or an output.
    Page = 8,
}

/// One place, held by a connection for as long as it lives.
struct Slot {
    number: u64,
    slots: Arc<Slots>,
}

impl Slots {
    /// A place for this connection; `None` when all are taken by clients that are being served.
    fn take(self: &Arc<Slots>, stream: &UnixStream) -> Option<Slot> {
        let is_full = |open: &mut Vec<Connection>| open.len() >= MAX_CONNECTIONS;
        let mut open = lock(&self.open);
        if is_full(&mut open) {
            cut(&mut open, |_| true)?; // its thread sees that and gives its place back
            if !wait_while(&self.freed, open, EVICTION_LIMIT, is_full) {
                return None;
            }
            open = lock(&self.open); // nobody but us adds to it
        }
        let number = open.last().map_or(0, |last| last.number + 1);
        let stream = stream.try_clone().ok()?;
        open.push(Connection { number, stream, awaited: None, is_cut: false, share: None });
        Some(Slot { number, slots: Arc::clone(self) })
    }
}

/// Cuts the oldest of these that has let us wait for too long.
fn cut(open: &mut [Connection], which: impl Fn(&Connection) -> bool) -> Option<()> {
    let is_late = |one: &Connection| one.awaited.is_some_and(|(since, _)| since.elapsed() >= GRACE);
    let one = open.iter_mut().find(|one| which(one) && is_late(one))?;
    let (_, how) = one.awaited.take()?;
    one.is_cut = true;
    let _ = one.stream.shutdown(how);
    Some(())
}

impl Slot {
    /// Its own connection; `busy` when it was cut.
    fn own<'a>(&self, open: &'a mut [Connection]) -> Result<&'a mut Connection, WireError> {
        let own = open.iter_mut().find(|one| one.number == self.number);
        own.filter(|own| !own.is_cut).ok_or_else(busy)
    }

    /// Notes whether the client is to do something from now on, and what a cut closes then.
    fn note(&self, awaited: Option<Shutdown>) -> Result<(), WireError> {
        let awaited = awaited.map(|how| (Instant::now(), how));
        self.own(&mut lock(&self.slots.open)).map(|own| own.awaited = awaited)
    }

    /// The client's line. A few at a time may have a long one, so that many clients do not fill the memory.
    ///
    /// # Errors
    /// `busy` when it did not come while others waited, or others went on all the time.
    fn read_line(&self, lines: &mut LineReader) -> Result<Line, WireError> {
        self.note(Some(Shutdown::Read))?;
        let mut line = lines.read_line(SHORT_LINE_BYTES, Instant::now() + WIRE_TIMEOUT);
        if line == Line::TooLong {
            self.begin(Share::LongLine)?;
            self.note(Some(Shutdown::Read))?;
            line = lines.read_line(MAX_LINE_BYTES, Instant::now() + WIRE_TIMEOUT);
        }
        let mut open = lock(&self.slots.open);
        let own = self.own(&mut open)?;
        (own.awaited, own.share) = (None, None);
        self.slots.freed.notify_all();
        Ok(line)
    }

    /// Waits for a share of the memory. One of those that have theirs is cut when it lets us wait.
    fn begin(&self, share: Share) -> Result<(), WireError> {
        let has_one = |one: &Connection| one.share == Some(share);
        let is_full =
            |open: &mut Vec<Connection>| open.iter().filter(|one| has_one(one)).count() >= share as usize;
        let since = Instant::now();
        loop {
            let mut open = lock(&self.slots.open);
            let must_wait = is_full(&mut open);
            let own = self.own(&mut open)?;
            if !must_wait {
                (own.awaited, own.share) = (None, Some(share));
                return Ok(());
            }
            if since.elapsed() > WIRE_TIMEOUT {
                return Err(busy());
            }
            own.awaited = Some((since, Shutdown::Read));
            cut(&mut open, has_one);
            let _ = wait_while(&self.slots.freed, open, SHARE_CHECK, is_full); // the loop looks again
        }
    }

    /// Sends a reply. A client that does not read counts as one that lets us wait.
    fn write_reply(&self, stream: &mut UnixStream, reply: Reply) {
        let line = to_line(&reply);
        drop(reply); // it may be as long again
        let rest = line.as_bytes().get(write_at_once(stream, &line)..).unwrap_or_default();
        if rest.is_empty() {
            return;
        }
        let _ = self.note(Some(Shutdown::Both)); // one that was cut may still take it
        if let Err(error) = socket::write_by(stream, rest, Instant::now() + WIRE_TIMEOUT) {
            log::debug!("a reply did not arrive: {error}"); // the peer is gone or does not read
        }
        let _ = self.note(None);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.slots.open).retain(|one| one.number != self.number);
        self.slots.freed.notify_all();
    }
}

fn busy() -> WireError {
    let reason = format!(
        "{MAX_CONNECTIONS} connections, {} that say much or {} that read much are open already; try again later",
        Share::LongLine as usize,
        Share::Page as usize
    );
    WireError::new(ErrorCode::Busy, reason)
}

/// Writes what the socket takes without a wait; returns how many bytes that were.
fn write_at_once(stream: &mut UnixStream, line: &str) -> usize {
    let _ = stream.set_nonblocking(true);
    let written = stream.write(line.as_bytes()).unwrap_or(0);
    let _ = stream.set_nonblocking(false);
    written
}

fn accept(mut stream: UnixStream, context: &Arc<PodContext>, slots: &Arc<Slots>) {
    let Some(slot) = slots.take(&stream) else {
        write_at_once(&mut stream, &to_line(&Reply::Error(busy()))); // a fresh socket takes a short line
        return;
    };
    let context = Arc::clone(context);
    if let Err(error) = thread::detach("connection", move || connection(stream, &context, &slot)) {
        log::warn!("cannot serve a connection: {error}"); // its client sees a close and may come again
    }
}

fn connection(mut stream: UnixStream, context: &PodContext, slot: &Slot) {
    let Ok(reading) = stream.try_clone() else { return };
    // Who calls is checked before anything is read. Root may do so anyway by other means.
    match socket::peer_uid(&stream) {
        Ok(uid) if uid == own_uid() || uid == 0 => {}
        Ok(uid) => {
            log::warn!("refused a connection of user {uid}");
            let refusal = WireError::new(ErrorCode::NotAllowed, "this pod belongs to another user");
            return slot.write_reply(&mut stream, Reply::Error(refusal));
        }
        Err(error) => return log::warn!("cannot see who connects: {error}"), // then nobody is served
    }
    let mut lines = LineReader::new(reading);
    let request = match slot.read_line(&mut lines) {
        Ok(Line::Complete(line)) => parse_request(&line),
        Ok(Line::TooLong) => Err(too_large()),
        Ok(Line::Closed) => return, // a peer that vanishes is no fault
        Err(busy) => Err(busy),
        Ok(Line::TimedOut) => {
            let reason = format!("no request line came within {} s", WIRE_TIMEOUT.as_secs());
            Err(WireError::new(ErrorCode::BadRequest, reason))
        }
    };
    // From here on the end of the pod waits for us: who asks it to end is told that it will.
    context.answering.fetch_add(1, Ordering::SeqCst);
    match request.and_then(|request| admit(context, request)) {
        Ok(Request { method: Method::Subscribe { since }, .. }) => {
            stream_events(stream, lines, context, slot, since)
        }
        Ok(request) => slot.write_reply(&mut stream, answer(context, slot, request)),
        Err(refusal) => slot.write_reply(&mut stream, Reply::Error(refusal)),
    }
    context.answering.fetch_sub(1, Ordering::SeqCst);
}

/// The one place that decides whether a request is for this life, and whether its sender may ask it.
fn admit(context: &PodContext, request: Request) -> Result<Request, WireError> {
    if request.to.as_ref().is_some_and(|life| *life != context.own.life) {
        let reason =
            format!("the pod that is meant has ended; \"{}\" here is another one", context.own.pod_id);
        return Err(WireError::new(ErrorCode::UnknownPod, reason));
    }
    if let Some(from) = &request.from {
        admit_pod(context, from, &request.method)?;
    }
    let is_work = matches!(
        request.method,
        Method::Run { .. }
            | Method::Notify { .. }
            | Method::Resume
            | Method::Introduce { .. }
            | Method::Set { .. }
    );
    if is_work && context.is_ending() { Err(shutting_down()) } else { Ok(request) }
}

fn admit_pod(context: &PodContext, from: &Sender, method: &Method) -> Result<(), WireError> {
    let refusal = match method {
        Method::PodEvent(_) => None, // reports have their own rule, which also fits one that is ending
        Method::Subscribe { .. } => Some("pods do not subscribe; they get reports"),
        Method::Shutdown
        | Method::Cancel
        | Method::Resume
        | Method::Introduce { .. }
        | Method::Set { .. } => {
            (!is_above(context, &from.life)).then_some("only a pod's own spawners, or a person, may do this")
        }
        Method::Run { .. }
        | Method::Notify { .. }
        | Method::GetHistory { .. }
        | Method::Status
        | Method::ReadOutput { .. }
        | Method::ListPods => {
            if !is_sender_alive(context, from) {
                let reason = format!("the sender \"{}\" with that life is not registered", from.pod_id);
                return Err(WireError::new(ErrorCode::UnknownPod, reason));
            }
            None
        }
    };
    refusal.map_or(Ok(()), |reason| Err(WireError::new(ErrorCode::NotAllowed, reason)))
}

/// Whether the pod of this life stands above this one in the lock.
fn is_above(context: &PodContext, life: &Life) -> bool {
    match context.lock.read() {
        Ok(table) => table.ancestors(&context.own.pod_id).iter().any(|above| above.life == *life),
        Err(error) => {
            log::warn!("cannot see who stands above: {error}"); // the spawner at the start still may
            context.spawner.as_ref().is_some_and(|spawner| spawner.life == *life)
        }
    }
}

/// Nothing may speak for a successor of the same name. A damaged lock is no reason to stop talking.
fn is_sender_alive(context: &PodContext, from: &Sender) -> bool {
    let is_entry =
        |table: AllocationTable| table.by_life(&from.life).is_some_and(|entry| entry.pod_id == from.pod_id);
    context.spawner.as_ref() == Some(from) || context.lock.read().map_or(true, is_entry)
}

fn answer(context: &PodContext, slot: &Slot, request: Request) -> Reply {
    let done = || Reply::from(Ok::<_, WireError>(Done {}));
    let from = request.from;
    match request.method {
        Method::Run { input } => {
            let counts = from.is_some() && from != context.spawner;
            let input = Input { text: input, from: from.map(|from| from.pod_id) };
            Reply::from(context.mailbox.ask(|reply| Event::Run { input, counts, reply }))
        }
        Method::Notify { message } => {
            let notice = render_message(from.as_ref().map(|from| &from.pod_id), &message);
            context.mailbox.post(Event::Notice(notice));
            done()
        }
        Method::PodEvent(event) => Reply::from(reports::receive(context, from.as_ref(), &event)),
        Method::Resume => Reply::from(context.mailbox.ask(Event::Resume)),
        Method::Cancel => Reply::from(context.mailbox.ask(Event::Cancel)),
        Method::Shutdown => {
            let by = from.map_or("a person".to_owned(), |from| format!("pod {}", from.pod_id));
            log::info!("asked to end by {by}");
            context.mailbox.post(Event::Shutdown);
            done()
        }
        Method::GetHistory { since } => Reply::from(history(context, slot, since)),
        Method::Status => Reply::from(status(context)),
        Method::ReadOutput { since } => Reply::from(output(context, slot, since)),
        Method::ListPods => {
            Reply::from(survey::known_pods(context).map(|pods| PodsReply { pods }).map_err(WireError::from))
        }
        Method::Introduce { pods } => Reply::from(introduce(context, &pods)),
        Method::Set { model } => Reply::from(set(context, model)),
        Method::Subscribe { .. } => Reply::Error(WireError::new(ErrorCode::Internal, "subscribe streams")),
    }
}

/// Makes these pods known, as far as the lock has that very life of them. What is known already stays as it is.
fn introduce(context: &PodContext, pods: &[Introduction]) -> Result<Done, WireError> {
    let table = context.lock.read()?;
    for pod in pods {
        let entry = table.by_life(&pod.life).filter(|entry| entry.pod_id == pod.pod_id);
        let Some(entry) = entry.filter(|entry| entry.life != context.own.life) else {
            let reason =
                format!("pod \"{}\" with that life does not live, or is this pod itself", pod.pod_id);
            return Err(WireError::new(ErrorCode::UnknownPod, reason));
        };
        if context.registry.by_life(&entry.life).is_none() {
            survey::know(context, entry, Origin::Introduced)?;
        }
    }
    Ok(Done {})
}

fn set(context: &PodContext, model: String) -> Result<Done, WireError> {
    if !is_model_name(&model) {
        return Err(WireError::new(ErrorCode::BadRequest, MODEL_NAME_RULE));
    }
    context.log(Item::ModelSet { model })?;
    Ok(Done {})
}

fn history(context: &PodContext, slot: &Slot, since: Option<u64>) -> Result<HistoryReply, WireError> {
    slot.begin(Share::Page)?;
    let state = context.mailbox.state().ok_or_else(shutting_down)?;
    let page = context.session.page(since.unwrap_or(0))?;
    Ok(HistoryReply { items: page.items, cursor: page.cursor, more: page.more, status: state.status })
}

fn output(context: &PodContext, slot: &Slot, since: Option<u64>) -> Result<OutputReply, WireError> {
    slot.begin(Share::Page)?;
    let state = context.mailbox.state().ok_or_else(shutting_down)?;
    let (text, cursor, more) = context.session.output(since)?;
    let (turn, last_result) = context.session.ask(|summary| (summary.turn, summary.last_result));
    Ok(OutputReply { status: state.status, text, cursor, more, turn, last_result })
}

fn status(context: &PodContext) -> Result<StatusReply, WireError> {
    let events_in_flight = context.events.count_in_flight(); // before the state: a report is counted, then idle
    let state = context.mailbox.state().ok_or_else(shutting_down)?;
    // A copy of what is told only: the text of a turn can be long.
    let (turn, last_result, usage, last_response) = context.session.ask(|summary| {
        let last_response = cut_end(&summary.last_response, MAX_LAST_RESPONSE_BYTES);
        (summary.turn, summary.last_result, summary.usage, last_response)
    });
    let (scope, lent, detail) = match context.view.effective() {
        Ok(effective) => (effective.allow, effective.lent, state.detail),
        Err(error) => (Vec::new(), Vec::new(), format!("{}; {error}", state.detail)),
    };
    let is_implied = |rule: &Rule| !rule.writes() && rule.path() == "/" && rule.reach() == Reach::Recursive;
    Ok(StatusReply {
        pod_id: context.own.pod_id.clone(),
        name: context.name.clone(),
        pid: context.pid,
        life: context.own.life.clone(),
        status: state.status,
        detail,
        since: state.since,
        answers: true,
        protocol: PROTOCOL_VERSION,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        scope: scope.into_iter().filter(|rule| !is_implied(rule)).collect(),
        lent: lent.into_iter().map(|loan| loan.rule).collect(),
        sandbox: shell::level(context).to_string(),
        turn,
        last_response,
        last_result,
        usage,
        model: context.model().unwrap_or_default(),
        spawner: context.spawner.as_ref().map(|spawner| spawner.pod_id.clone()),
        state_dir: context.session.directory().to_string_lossy().into_owned(),
        log: session::log_path(context.session.directory()).to_string_lossy().into_owned(),
        queued: state.queued,
        events_in_flight,
    })
}

fn stream_events(
    mut stream: UnixStream,
    lines: LineReader,
    context: &PodContext,
    slot: &Slot,
    since: Option<u64>,
) {
    let (sink, events) = unbounded(); // the controller puts no more than `SUBSCRIBER_QUEUE` in; a bounded one takes all its memory at once
    let opened = context.mailbox.ask(|reply| Event::Subscribe { since, sink, reply });
    let (reply, logged_until) = match opened {
        Ok(opened) => opened,
        Err(refusal) => return slot.write_reply(&mut stream, Reply::Error(refusal)),
    };
    let cursor = reply.cursor;
    slot.write_reply(&mut stream, Reply::from(Ok::<_, WireError>(reply)));
    let reason = replay(&mut stream, context, cursor, logged_until)
        .and_then(|()| follow(&mut stream, lines, context, &events));
    if let Err(Some(reason)) = reason {
        let line = to_line(&StreamEvent::Dropped { reason });
        let _ = socket::write_by(&mut stream, line.as_bytes(), Instant::now() + WIRE_TIMEOUT); // the last word
    }
}

/// Why a stream ends: a reason for the client, or nothing because the client is gone.
type StreamEnd = Option<String>;

fn write_event(stream: &mut UnixStream, event: &StreamEvent) -> Result<(), StreamEnd> {
    socket::write_by(stream, to_line(event).as_bytes(), Instant::now() + WIRE_TIMEOUT).map_err(|error| {
        log::debug!("a subscriber is gone: {error}");
        None
    })
}

fn replay(
    stream: &mut UnixStream,
    context: &PodContext,
    mut cursor: u64,
    until: u64,
) -> Result<(), StreamEnd> {
    while cursor < until {
        let page = context.session.page(cursor).map_err(|error| Some(error.to_string()))?;
        if page.items.is_empty() {
            return Err(Some("the history ends before its cursor".into()));
        }
        for (_, item) in (cursor..until).zip(page.items) {
            write_event(stream, &StreamEvent::Item(item))?;
        }
        cursor = page.cursor;
    }
    Ok(())
}

fn follow(
    stream: &mut UnixStream,
    mut lines: LineReader,
    context: &PodContext,
    events: &Receiver<StreamEvent>,
) -> Result<(), StreamEnd> {
    loop {
        match events.recv_timeout(CLIENT_CHECK) {
            Ok(event) => write_event(stream, &event)?,
            Err(RecvTimeoutError::Timeout) => {
                // A client sends nothing more; if the read ends with a close it has gone.
                if lines.read_line(MAX_LINE_BYTES, Instant::now() + Duration::from_millis(1)) == Line::Closed
                {
                    return Err(None);
                }
            }
            Err(RecvTimeoutError::Disconnected) if context.is_ending() => {
                return Err(Some("the pod is ending".into()));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Some(format!(
                    "more than {SUBSCRIBER_QUEUE} events were waiting; subscribe again from the last cursor"
                )));
            }
        }
    }
}
