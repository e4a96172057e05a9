//! What brings the world to the screen and back, on threads of its own: surveys, the stream of the chosen pod,
//! requests. Each sends events over the one bounded channel and waits when it is full; the screen never waits.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use serde_json::Value;

use crate::doors::find::Machine;
use crate::doors::tui::conversation::LINES_MAX;
use crate::doors::tui::state::{Effect, Event, News};
use crate::doors::tui::tree::Row;
use crate::store::life::{self, Holding};
use crate::store::registry::Origin;
use crate::store::session::{self, Session};
use crate::tools::survey;
use crate::wire::client::{self, Address, Next};
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};
use crate::words::identity::PodId;
use crate::words::protocol::{Method, PodsReply, StreamEvent};

/// Between two surveys, and between two tries to follow a pod.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a root pod may take to list its pods; it asks each of them for a second at most.
const LIST_LIMIT: Duration = Duration::from_secs(2);
/// How soon a thread sees that another pod was chosen.
const STEP: Duration = Duration::from_millis(100);

/// The threads' ends of everything.
#[derive(Debug)]
pub struct Feed {
    machine: Machine,
    events: Sender<Event>,
    roots: Sender<Option<PodId>>,
    choice: Arc<AtomicU64>,
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(|_| ()).map_err(|source| Error::io(format!("start the thread \"{name}\""), source))
}

impl Feed {
    /// Starts the surveys. They end when the feed is dropped.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn start(machine: &Machine, root: Option<PodId>, events: &Sender<Event>) -> Result<Feed> {
        let (roots, wanted) = bounded(16);
        let feed = Feed { machine: machine.clone(), events: events.clone(), roots, choice: Arc::default() };
        let (machine, events) = (machine.clone(), events.clone());
        spawn("survey", move || survey_forever(&machine, root, &wanted, &events))?;
        Ok(feed)
    }

    /// Does what the state wants done; whatever may take its time is done on a thread.
    pub fn perform(&self, effect: Effect) {
        let (machine, events) = (self.machine.clone(), self.events.clone());
        let told = self.events.clone(); // where nobody listens any more nobody is to be told
        let started = match effect {
            Effect::Survey(root) => {
                let _ = self.roots.try_send(root); // full: 16 choices within one survey; the next key says it again
                Ok(())
            }
            Effect::Follow(row, number) => {
                self.choice.store(number, Ordering::SeqCst);
                let choice = Arc::clone(&self.choice);
                let follower = Follower { machine, row: *row, number, choice, events, cursor: None };
                spawn("follow", move || drop(follower.follow())) // unwanted: its thread is over
            }
            Effect::Ask(row, method) => spawn("ask", move || {
                let _ = events.send(Event::Told(ask(&row, method)));
            }),
            Effect::Stop(row, tree) => spawn("stop", move || {
                let text = stop(&machine, &row, tree).unwrap_or_else(|error| error.to_string());
                let _ = events.send(Event::Told(text));
            }),
        };
        if let Err(error) = started {
            let _ = told.try_send(Event::Told(error.to_string()));
        }
    }
}

fn ask(row: &Row, method: Method) -> String {
    let (name, pod) = (method.name(), &row.pod.pod_id);
    let reply = match client::ask::<Value>(&address_of(row), None, method) {
        Ok(reply) => reply,
        Err(error) => return error.to_string(),
    };
    let has = |key: &str| reply.get(key) == Some(&Value::Bool(true));
    match (name, reply.get("turn")) {
        ("run", Some(turn)) if has("queued") => format!("queued for turn {turn} of {pod}"),
        ("run", Some(turn)) => format!("turn {turn} of {pod} has begun"),
        (_, Some(turn)) => format!("turn {turn} of {pod} goes on"),
        (_, None) if has("cancelled") => format!("the turn of {pod} is cancelled"),
        (_, None) => format!("no turn of {pod} is running"),
    }
}

fn stop(machine: &Machine, row: &Row, tree: bool) -> Result<String> {
    let target = machine.living(row.pod.pod_id.as_str())?;
    if row.life.as_ref().is_some_and(|life| *life != target.life) {
        return Err(Error::told(format!(
            "that pod has ended; another one is called \"{}\" now",
            target.pod_id
        )));
    }
    let outcome = machine.stop(&target, tree, true)?;
    match outcome.iter().find_map(|one| one.as_ref().err()) {
        Some((pod, error)) => Err(Error::told(format!("pod \"{pod}\" is not stopped: {error}"))),
        None => {
            let stopped: Vec<&str> = outcome.iter().flatten().map(|one| one.pod_id.as_str()).collect();
            Ok(format!("stopped: {}", stopped.join(", ")))
        }
    }
}

fn address_of(row: &Row) -> Address {
    let socket = PathBuf::from(&row.pod.socket);
    Address { pod: row.pod.pod_id.to_string(), socket, life: row.life.clone() }
}

fn survey_forever(
    machine: &Machine,
    mut root: Option<PodId>,
    wanted: &Receiver<Option<PodId>>,
    events: &Sender<Event>,
) {
    let mut seen: Vec<Row> = Vec::new();
    loop {
        let table = machine.lock.read();
        let rows = |table: &AllocationTable| survey(machine, table, root.as_ref(), &seen);
        let rows = match &table {
            Ok(table) => rows(table),
            Err(_) => machine.table().map_or_else(|_| seen.clone(), |living| rows(&living)),
        };
        seen.clone_from(&rows);
        let table = table.map_err(|error| error.to_string());
        if events.send(Event::Surveyed { rows, root: root.clone(), table }).is_err() {
            return;
        }
        match wanted.recv_timeout(PAUSE) {
            Ok(other) => {
                root = wanted.try_iter().last().unwrap_or(other);
                seen.clear();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// The living root pods; or a pod with those it knows, by its spawn records. When it cannot be asked the lock
/// tells who is below it, and who was there before.
fn survey(machine: &Machine, table: &AllocationTable, root: Option<&PodId>, seen: &[Row]) -> Vec<Row> {
    let Some(root) = root else {
        let is_root = |entry: &&Allocation| {
            entry.delegated_from.is_none() && !life::is_dead(machine.lock.runtime(), entry)
        };
        return described(machine, table, table.allocations().iter().filter(is_root).collect());
    };
    let own = table.get(root);
    let ask_list = |entry| {
        client::ask_within::<PodsReply>(&survey::address_of(entry), None, Method::ListPods, LIST_LIMIT).ok()
    };
    let listed = own.and_then(ask_list);
    let mut entries: Vec<&Allocation> = own.into_iter().collect();
    if listed.is_none() {
        let was_seen = |entry: &&Allocation| seen.iter().any(|row| row.life.as_ref() == Some(&entry.life));
        entries.extend(table.subtree(root));
        entries.extend(table.allocations().iter().filter(was_seen));
        entries.sort_by_key(|entry| &entry.pod_id);
        entries.dedup_by_key(|entry| &entry.pod_id);
    }
    let mut rows = described(machine, table, entries);
    let life_of = |pod_id: &PodId| {
        let now = table.get(pod_id).map(|entry| entry.life.clone());
        now.or_else(|| seen.iter().find(|row| row.pod.pod_id == *pod_id)?.life.clone())
    };
    let listed = listed.map(|reply| reply.pods).unwrap_or_default();
    rows.extend(listed.into_iter().map(|pod| Row { life: life_of(&pod.pod_id), pod }));
    rows
}

/// Rows of these entries, their pods asked at the same time.
pub(super) fn described(machine: &Machine, table: &AllocationTable, entries: Vec<&Allocation>) -> Vec<Row> {
    let addresses: Vec<Address> = entries.iter().map(|entry| survey::address_of(entry)).collect();
    let answers = survey::ask_all(&addresses, None);
    let row = |(entry, answer): (&Allocation, _)| {
        let record = survey::record_of(&machine.directories.state, entry, Origin::Descendant);
        Row { pod: survey::describe(&machine.lock, table, &record, answer), life: Some(entry.life.clone()) }
    };
    entries.into_iter().zip(answers).map(row).collect()
}

/// Brings the conversation of one pod, from its stream while it answers, else from its log.
struct Follower {
    machine: Machine,
    row: Row,
    number: u64,
    choice: Arc<AtomicU64>,
    events: Sender<Event>,
    /// The next item; `None` before the first.
    cursor: Option<u64>,
}

/// Why a follower goes no further.
enum Halt {
    /// Another pod was chosen, or the screen is gone.
    Unwanted,
    /// The pod cannot be followed now.
    Failed(Error),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Halt {
        Halt::Failed(error)
    }
}

impl Follower {
    fn say(&self, news: News) -> Result<(), Halt> {
        self.check()?;
        self.events.send(Event::News { choice: self.number, news }).map_err(|_| Halt::Unwanted)
    }

    fn check(&self) -> Result<(), Halt> {
        if self.choice.load(Ordering::SeqCst) == self.number { Ok(()) } else { Err(Halt::Unwanted) }
    }

    fn follow(mut self) -> Result<(), Halt> {
        let (mut was_heard, mut said_goodbye) = (false, false);
        loop {
            // Seen before the stream is tried: one that ended since then is tried once more.
            let lives = self.lives();
            let streamed = if lives { self.stream(&mut said_goodbye) } else { Ok(()) };
            let reason = match streamed {
                Ok(()) => None,
                Err(Halt::Failed(error)) => Some(error),
                Err(Halt::Unwanted) => return Err(Halt::Unwanted),
            };
            was_heard |= lives && reason.is_none();
            let interrupted = self.read_log()?;
            if !lives {
                let how = match (was_heard, said_goodbye, interrupted) {
                    (true, true, _) | (false, _, false) => "has ended",
                    (true, false, _) | (false, _, true) => "ended without saying so",
                };
                return self.say(News::Gone(how.to_owned()));
            }
            if let Some(reason) = reason {
                self.say(News::Silent(format!("not followed: {reason}")))?;
                let until = Instant::now() + PAUSE;
                while Instant::now() < until {
                    self.check()?;
                    std::thread::sleep(STEP);
                }
            }
        }
    }

    fn lives(&self) -> bool {
        let runtime = self.machine.lock.runtime();
        self.row.life.as_ref().is_some_and(|life| life::probe(runtime, life) == Holding::Held)
    }

    /// Follows the stream until it ends.
    fn stream(&mut self, said_goodbye: &mut bool) -> Result<(), Halt> {
        let address = address_of(&self.row);
        let since = match self.cursor {
            Some(cursor) => cursor,
            None => first_of(client::subscribe(&address, None)?.opened.cursor),
        };
        let mut events = client::subscribe(&address, Some(since))?;
        self.cursor = Some(events.opened.cursor);
        self.say(News::Listening)?;
        loop {
            self.check()?;
            match events.next(Instant::now() + STEP)? {
                Next::Event(event) => {
                    if let StreamEvent::Dropped { reason } = event.as_ref() {
                        *said_goodbye = reason.contains("ending");
                    } else {
                        self.tell(*event)?;
                    }
                }
                Next::Nothing => {}
                Next::Over => return Ok(()),
            }
        }
    }

    fn tell(&mut self, event: StreamEvent) -> Result<(), Halt> {
        if matches!(event, StreamEvent::Item(_)) {
            self.cursor = self.cursor.map(|cursor| cursor + 1);
        }
        self.say(News::Stream(Box::new(event)))
    }

    /// Tells what the log has beyond the cursor, and whether it ends in the middle of a turn.
    fn read_log(&mut self) -> Result<bool, Halt> {
        let state = &self.machine.directories.state;
        let folder = match &self.row.life {
            Some(life) => survey::session_folder(state, &self.row.pod.pod_id, life),
            None => session::folders_of(state, &self.row.pod.pod_id).into_iter().next(),
        };
        let Some(session) = folder.and_then(|folder| Session::open_to_read(&folder).ok()) else {
            return Ok(false);
        };
        let mut since = *self.cursor.get_or_insert(first_of(session.len()));
        while let Ok(page) = session.page(since) {
            for item in page.items {
                self.tell(StreamEvent::Item(item))?;
            }
            since = page.cursor;
            if !page.more {
                break;
            }
        }
        Ok(session.ask(|summary| summary.turn > 0 && summary.last_result.is_none()))
    }
}

/// The first item that is shown of so many: each is a line at least.
fn first_of(items: u64) -> u64 {
    items.saturating_sub(LINES_MAX as u64)
}
