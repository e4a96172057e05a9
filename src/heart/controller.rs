//! The controller: one thread, one closed event enum, owner of the pod's state.
//!
//! It never waits for a peer, a child, the model or the lock: connections and the turn do that on threads of
//! their own, so status, cancel and events are answered in mid-turn.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use crate::heart::turn::{Opening, Worker};
use crate::heart::watcher;
use crate::store::session::Input;
use crate::sys::wait::Cancel;
use crate::sys::{clock, signal, thread};
use crate::tools::context::PodContext;
use crate::tools::mailbox::{Event, Heard, NewsKind, State, shutting_down};
use crate::words::identity::Life;
use crate::words::limits::{END_DEADLINE, MAX_SUBSCRIBERS, SUBSCRIBER_QUEUE};
use crate::words::message::{Cause, Item, LoggedItem, TurnResult};
use crate::words::notification::{Kind, Notice, NoticeBuffer};
use crate::words::protocol::{
    CancelReply, ErrorCode, PodEvent, RunReply, StartedBy, Status, StreamEvent, SubscribeReply, WireError,
};

/// Stack of the turn's thread: tools and translations of the model's words run on it.
const TURN_STACK_BYTES: usize = 1 << 20;
/// Pods of which is remembered what the model has heard.
const HEARD_MAX: usize = 1024;
/// The model knows of the pod's end, or causes it.
const ALL_OF_IT: u64 = u64::MAX;
/// How soon a turn is tried again that could not be started.
const START_AGAIN: Duration = Duration::from_secs(1);
/// Texts that wait for the running turn.
const QUEUED_MAX: usize = 256;

/// What the pod is about.
enum Phase {
    /// Nothing runs; after a turn that did not finish nothing wakes it.
    Idle { worker: Box<Worker>, is_paused: bool },
    /// A turn runs.
    Running(RunningTurn),
    /// It is over: no turn runs and none will.
    Over,
}

struct RunningTurn {
    /// Gives back the worker, and what it could not save.
    thread: JoinHandle<(Box<Worker>, Opening)>,
    cancel: Cancel,
    turn: u64,
    by_person: bool,
}

/// The controller and all it owns.
pub struct Controller {
    context: Arc<PodContext>,
    events: Receiver<Event>,
    phase: Phase,
    state: State,
    queued: VecDeque<Input>,
    notices: NoticeBuffer,
    /// The newest turn of each pod that the model has heard of without a notice; `ALL_OF_IT` where that is its end.
    heard: HashMap<Life, u64>,
    /// Turns in a row that no person and no spawner began.
    turns_in_a_row: u64,
    subscribers: Vec<Sender<StreamEvent>>,
    /// Items that the subscribers have been sent.
    published: u64,
    /// The model's text since the last item, for those who subscribe in the middle of it.
    in_flight_text: String,
    news: Option<Sender<NewsKind>>,
    /// An adopted pod that hears nothing until then ends itself.
    first_request_due: Option<Instant>,
    /// When a turn is tried again that could not be started.
    start_again_due: Option<Instant>,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Controller {
    /// The controller of a pod that has just started. `first_request_within` is for adopted pods.
    pub fn new(
        context: Arc<PodContext>,
        events: Receiver<Event>,
        worker: Worker,
        first_request_within: Option<Duration>,
    ) -> Controller {
        let notices = NoticeBuffer::new(context.manifest.limits.notices);
        let published = context.session.len();
        let (status, detail) = match context.session.ask(|summary| summary.last_result) {
            None => (Status::Idle, "no turn yet"),
            Some(TurnResult::Finished) => (Status::Idle, "waiting for input"),
            Some(TurnResult::Failed | TurnResult::Cancelled | TurnResult::Limit) => {
                (Status::Paused, "the last turn did not finish")
            }
        };
        let is_paused = status == Status::Paused;
        let state = State { status, detail: detail.to_owned(), since: clock::now_seconds(), queued: 0 };
        let queued = context.session.unheard().unwrap_or_else(|error| {
            log::error!("inputs of before are not read: {error}"); // they stay in the file
            Vec::new()
        });
        Controller {
            context,
            events,
            phase: Phase::Idle { worker: Box::new(worker), is_paused },
            state,
            queued: queued.into(),
            notices,
            heard: HashMap::new(),
            turns_in_a_row: 0,
            subscribers: Vec::new(),
            published,
            in_flight_text: String::new(),
            news: None,
            first_request_due: first_request_within.map(|limit| Instant::now() + limit),
            start_again_due: None,
        }
    }

    /// Handles events until the pod is to end and no turn runs any more.
    pub fn run(&mut self) {
        self.start_queued(Cause::Resume, true);
        while !matches!(self.phase, Phase::Over) {
            let next = match self.first_request_due.or(self.start_again_due) {
                Some(due) => self.events.recv_deadline(due),
                None => self.events.recv().map_err(RecvTimeoutError::from),
            };
            match next {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) if self.first_request_due.is_none() => {
                    self.start_queued(Cause::Run, false);
                }
                Err(RecvTimeoutError::Timeout) => {
                    log::error!("adopted, but nobody has asked anything within the launch limit: ending");
                    self.first_request_due = None;
                    self.handle(Event::Shutdown);
                }
                Err(RecvTimeoutError::Disconnected) => return, // every handle is gone, which cannot be asked to end
            }
        }
    }

    /// Goes on answering, mostly with refusals, until the process exits.
    ///
    /// An event that is in the channel when its reading end goes is kept by crossbeam with the way back to its
    /// asker, who would wait for ever; so the reading end never goes.
    pub fn refuse_until_exit(mut self) {
        self.subscribers.clear(); // their connections say that the pod is ending
        while let Ok(event) = self.events.recv() {
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Run { input, counts, reply } => answer(&reply, self.on_run(input, counts)),
            Event::Notice(notice) => self.on_notice(notice),
            Event::Resume(reply) => answer(&reply, self.on_resume()),
            Event::Cancel(reply) => answer(&reply, self.on_cancel()),
            Event::Shutdown => self.on_shutdown(),
            Event::State(reply) => answer(&reply, State { queued: self.queued.len(), ..self.state.clone() }),
            Event::Subscribe { since, sink, reply } => answer(&reply, self.on_subscribe(since, sink)),
            Event::Logged(logged) => self.on_logged(logged),
            Event::Show(shown) => self.on_show(shown),
            Event::Doing(detail) => self.set_state(Status::Running, detail),
            Event::TakeQueued(reply) => answer(&reply, self.queued.drain(..).collect()),
            Event::AwaitNews(reply) => self.on_await_news(reply),
            Event::Heard(heard) => self.on_heard(heard),
            Event::Known(record) => watcher::watch(&self.context, record),
            Event::TurnOver { result, message } => self.on_turn_over(result, message),
        }
    }

    fn on_run(&mut self, input: Input, counts: bool) -> Result<RunReply, WireError> {
        if self.context.is_ending() {
            return Err(shutting_down());
        }
        self.first_request_due = None;
        if input.from.is_none() {
            self.turns_in_a_row = 0;
        }
        if let Phase::Running(running) = &self.phase {
            if self.queued.len() >= QUEUED_MAX {
                let reason = format!("{QUEUED_MAX} texts wait for the running turn already; try again later");
                return Err(WireError::new(ErrorCode::Busy, reason));
            }
            // A turn whose end is saved takes no more texts: the next turn answers this one.
            let turn = running.turn;
            let is_over =
                self.context.session.ask(|summary| summary.turn == turn && summary.last_result.is_some());
            let turn = turn + u64::from(is_over);
            self.accept(input)?;
            self.tell_news(NewsKind::Message);
            return Ok(RunReply { turn, queued: true });
        }
        if counts && !self.may_go_on_alone() {
            return Err(WireError::new(ErrorCode::Conflict, self.alone_too_long()));
        }
        let by_person = input.from.is_none();
        self.accept(input)?;
        self.start_turn(Cause::Run, by_person).or_else(|error| {
            self.start_later(&error);
            let turn = self.context.session.ask(|summary| summary.turn) + 1;
            Ok(RunReply { turn, queued: true })
        })
    }

    /// Starts a turn for the texts that wait; also of a paused pod, where these were accepted by an earlier life.
    fn start_queued(&mut self, cause: Cause, also_paused: bool) {
        let is_free = matches!(self.phase, Phase::Idle { is_paused, .. } if also_paused || !is_paused);
        if !is_free || self.queued.is_empty() || self.context.is_ending() {
            return;
        }
        let by_person = self.queued.iter().any(|input| input.from.is_none());
        if let Err(error) = self.start_turn(cause, by_person) {
            self.start_later(&error);
        }
    }

    /// What was accepted is not given up: its turn is tried again in a second.
    fn start_later(&mut self, error: &WireError) {
        if self.start_again_due.is_none() {
            log::error!("cannot start a turn for the texts that wait: {error}");
        }
        self.start_again_due = Some(Instant::now() + START_AGAIN);
        if let Phase::Idle { is_paused, .. } = &mut self.phase {
            *is_paused = false;
            self.set_state(Status::Idle, "a turn cannot be started yet".into());
        }
    }

    /// On disk before it is accepted; in the queue until the turn takes it.
    fn accept(&mut self, input: Input) -> Result<(), WireError> {
        let kept = self.context.session.accept(&input);
        kept.map_err(|error| WireError::new(ErrorCode::Internal, error.to_string()))?;
        self.queued.push_back(input);
        Ok(())
    }

    fn on_resume(&mut self) -> Result<RunReply, WireError> {
        if self.context.is_ending() {
            return Err(shutting_down());
        }
        self.turns_in_a_row = 0;
        match &self.phase {
            Phase::Idle { is_paused: true, .. } => self.start_turn(Cause::Resume, true),
            Phase::Idle { is_paused: false, .. } => {
                Err(WireError::new(ErrorCode::Conflict, "there is no failed or cancelled turn to go on with"))
            }
            Phase::Running(_) => Err(WireError::new(ErrorCode::Conflict, "a turn is running already")),
            Phase::Over => Err(shutting_down()),
        }
    }

    fn on_cancel(&mut self) -> Result<CancelReply, WireError> {
        let Phase::Running(running) = &self.phase else { return Ok(CancelReply { cancelled: false }) };
        running.cancel.set();
        self.tell_news(NewsKind::Message);
        Ok(CancelReply { cancelled: true })
    }

    fn on_shutdown(&mut self) {
        if !self.context.ending.swap(true, Ordering::SeqCst) {
            exit_in_any_case();
        }
        match &self.phase {
            Phase::Running(running) => {
                running.cancel.set();
                self.tell_news(NewsKind::Message);
            }
            Phase::Idle { .. } | Phase::Over => self.phase = Phase::Over,
        }
    }

    fn on_subscribe(
        &mut self,
        since: Option<u64>,
        sink: Sender<StreamEvent>,
    ) -> Result<(SubscribeReply, u64), WireError> {
        if matches!(self.phase, Phase::Over) {
            return Err(shutting_down());
        }
        self.show(self.status_event()); // finds out which subscribers are gone
        if self.subscribers.len() >= MAX_SUBSCRIBERS {
            let reason =
                format!("{MAX_SUBSCRIBERS} clients watch this pod already; close one, or read its history");
            return Err(WireError::new(ErrorCode::Busy, reason));
        }
        if !self.in_flight_text.is_empty() {
            let text = self.in_flight_text.clone();
            let _ = sink.try_send(StreamEvent::TextDelta { text }); // a fresh queue has room
        }
        self.subscribers.push(sink);
        let cursor = since.unwrap_or(self.published).min(self.published);
        Ok((SubscribeReply { cursor, status: self.state.status }, self.published))
    }

    fn on_logged(&mut self, logged: LoggedItem) {
        if matches!(logged.item, Item::Assistant(_) | Item::TurnEnded { .. }) {
            self.in_flight_text.clear();
        }
        StreamEvent::telling(&logged.item).into_iter().for_each(|event| self.show(event));
        self.published += 1;
        self.show(StreamEvent::Item(logged));
    }

    fn on_show(&mut self, shown: StreamEvent) {
        match &shown {
            StreamEvent::TextDelta { text } => self.in_flight_text.push_str(text),
            StreamEvent::Retry { .. } => self.in_flight_text.clear(),
            StreamEvent::TurnStarted { .. }
            | StreamEvent::ToolCall { .. }
            | StreamEvent::ToolResult { .. }
            | StreamEvent::Notification { .. }
            | StreamEvent::Compaction { .. }
            | StreamEvent::TurnEnded { .. }
            | StreamEvent::Status { .. }
            | StreamEvent::Item(_)
            | StreamEvent::Dropped { .. } => {}
        }
        self.show(shown);
    }

    fn on_await_news(&mut self, reply: Sender<NewsKind>) {
        let is_cancelled = matches!(&self.phase, Phase::Running(running) if running.cancel.is_set());
        self.news = Some(reply);
        if !self.queued.is_empty() || is_cancelled {
            self.tell_news(NewsKind::Message);
        }
    }

    fn on_heard(&mut self, heard: Heard) {
        let (life, turn) = match heard {
            Heard::Output { life, turn } | Heard::Reported { life, turn, ended: false } => (life, turn),
            Heard::Reported { life, ended: true, .. } | Heard::Stopping(life) => (life, ALL_OF_IT),
            Heard::NotStopped(life) => {
                self.heard.remove(&life);
                return;
            }
        };
        if self.heard.len() >= HEARD_MAX {
            self.heard.clear(); // the worst that follows is a notice of something that the model knows
        }
        let newest = self.heard.entry(life).or_default();
        *newest = turn.max(*newest);
        let heard = &self.heard;
        self.notices.drop_heard(|notice| is_heard(heard, notice));
    }

    fn on_notice(&mut self, notice: Notice) {
        let is_news = !is_heard(&self.heard, &notice);
        if is_news {
            self.notices.push(notice);
        }
        self.tell_news(NewsKind::Notice); // whoever waits should look in any case
        if is_news {
            self.wake();
        }
    }

    fn on_turn_over(&mut self, result: TurnResult, message: Option<String>) {
        let Phase::Running(running) = std::mem::replace(&mut self.phase, Phase::Over) else { return };
        self.news = None;
        let Ok((worker, opening)) = running.thread.join() else {
            log::error!("the turn's thread is lost; ending"); // a panic, which the tests look for
            self.context.ending.store(true, Ordering::SeqCst);
            return;
        };
        self.put_back(opening);
        self.report(running.turn, running.by_person, result, message.as_deref());
        if self.context.is_ending() {
            self.set_state(Status::Idle, "ending".into());
            return;
        }
        let is_paused = result != TurnResult::Finished;
        let (status, detail) = match is_paused {
            false => (Status::Idle, "waiting for input".to_owned()),
            true => {
                let why = message.unwrap_or_default();
                (Status::Paused, format!("the last turn did not finish: {why}"))
            }
        };
        let goes_on = !is_paused && !self.queued.is_empty();
        self.phase = Phase::Idle { worker, is_paused };
        self.set_state(status, detail);
        if goes_on {
            self.start_queued(Cause::Run, false);
        } else {
            self.wake();
        }
    }

    /// What a turn could not save waits for the next one, before what has come meanwhile.
    fn put_back(&mut self, opening: Opening) {
        let (notices, lost) = opening.notices;
        self.notices.put_back(notices, lost);
        opening.inputs.into_iter().rev().for_each(|input| self.queued.push_front(input));
    }

    /// Tells the spawner how the turn ended: exactly one report for each turn.
    fn report(&self, turn: u64, by_person: bool, result: TurnResult, message: Option<&str>) {
        let pod_name = self.context.own.pod_id.clone();
        let way = match result {
            TurnResult::Finished => {
                let started_by = by_person.then_some(StartedBy::Person);
                self.context.events.send(PodEvent::TurnEnded { pod_name, started_by, turn: Some(turn) });
                return;
            }
            TurnResult::Failed => "failed",
            TurnResult::Cancelled => "cancelled",
            TurnResult::Limit => "limit",
        };
        let message = format!("{way}: {}", message.unwrap_or("no reason is known"));
        let message = crate::words::text::cut_end(&message, crate::words::limits::MAX_EVENT_MESSAGE_BYTES);
        self.context.events.send(PodEvent::Errored { pod_name, message, turn: Some(turn) });
    }

    /// Starts a turn when something waits that wakes, nobody has paused the pod, and it is allowed to go on.
    fn wake(&mut self) {
        let is_ready = matches!(self.phase, Phase::Idle { is_paused: false, .. });
        if !is_ready
            || !self.context.manifest.wake_on_events
            || !self.notices.wakes()
            || self.context.is_ending()
        {
            return;
        }
        if !self.may_go_on_alone() {
            let reason = self.alone_too_long();
            self.set_state(Status::Idle, reason);
            return;
        }
        if let Err(error) = self.start_turn(Cause::Wake, false) {
            log::error!("cannot wake up: {error}"); // the notices wait for the next turn
        }
    }

    /// Counts one more turn without a person, if that is allowed.
    fn may_go_on_alone(&mut self) -> bool {
        let allowed = self.turns_in_a_row < self.context.manifest.limits.wake_turns;
        self.turns_in_a_row += u64::from(allowed);
        allowed
    }

    fn alone_too_long(&self) -> String {
        format!(
            "pod \"{}\" has made {} turns in a row that no person began (manifest setting \"limits.wake_turns\"); what comes waits until a person sends it something",
            self.context.own.pod_id, self.turns_in_a_row
        )
    }

    fn start_turn(&mut self, cause: Cause, by_person: bool) -> Result<RunReply, WireError> {
        let internal = |error: std::io::Error| {
            WireError::new(ErrorCode::Internal, format!("cannot start a turn: {error}; try again later"))
        };
        let cancel = Cancel::new().map_err(internal)?;
        let Phase::Idle { worker, is_paused } = std::mem::replace(&mut self.phase, Phase::Over) else {
            return Err(shutting_down());
        };
        let turn = self.context.session.ask(|summary| summary.turn) + 1;
        let (notices, inputs) = (self.notices.drain(), std::mem::take(&mut self.queued));
        let opening = Opening { turn, cause, notices, inputs, cancel: cancel.clone() };
        // The worker goes through a slot, so that it is not lost with a thread that could not be started.
        let slot = Arc::new(std::sync::Mutex::new(Some((worker, opening))));
        let (theirs, mailbox) = (Arc::clone(&slot), self.context.mailbox.clone());
        let run = move || {
            let taken = thread::lock(&theirs).take();
            let (mut worker, mut opening) = taken.expect("the slot is filled before the thread starts");
            let (result, message) = worker.run(&mut opening);
            mailbox.post(Event::TurnOver { result, message });
            (worker, opening)
        };
        match std::thread::Builder::new().name("turn".into()).stack_size(TURN_STACK_BYTES).spawn(run) {
            Ok(thread) => {
                self.phase = Phase::Running(RunningTurn { thread, cancel, turn, by_person });
                self.start_again_due = None;
                self.set_state(Status::Running, "starting a turn".into());
                Ok(RunReply { turn, queued: false })
            }
            Err(error) => {
                let taken = thread::lock(&slot).take();
                if let Some((worker, opening)) = taken {
                    self.put_back(opening);
                    self.phase = Phase::Idle { worker, is_paused };
                }
                Err(internal(error))
            }
        }
    }

    fn set_state(&mut self, status: Status, detail: String) {
        if self.state.status == status && self.state.detail == detail {
            return;
        }
        self.state = State { status, detail, since: clock::now_seconds(), queued: 0 };
        self.show(self.status_event());
    }

    fn status_event(&self) -> StreamEvent {
        StreamEvent::Status { status: self.state.status, detail: self.state.detail.clone() }
    }

    /// Sends an event to every subscriber. One whose queue is full is dropped; its connection says so.
    fn show(&mut self, event: StreamEvent) {
        self.subscribers.retain(|sink| {
            let has_room = sink.len() < SUBSCRIBER_QUEUE; // only we fill it
            if !has_room {
                log::warn!("dropped a subscriber that does not keep up");
            }
            has_room && sink.send(event.clone()).is_ok()
        });
    }

    fn tell_news(&mut self, kind: NewsKind) {
        if let Some(waiting) = self.news.take() {
            let _ = waiting.try_send(kind); // a fresh channel of one has room; nobody waiting is fine
        }
    }
}

/// Whatever hangs, the process is gone when the end has taken too long; the next opener of the lock reclaims.
fn exit_in_any_case() {
    let run = || {
        std::thread::sleep(END_DEADLINE);
        log::error!("the end took more than {} s: exiting without it", END_DEADLINE.as_secs());
        signal::exit_now(1);
    };
    if let Err(error) = thread::detach("end deadline", run) {
        log::warn!("nothing bounds the end: {error}"); // each of its steps has a deadline of its own
    }
}

fn answer<T>(reply: &Sender<T>, value: T) {
    let _ = reply.try_send(value); // the asker made room for one; one that has gone needs no answer
}

/// Whether the model has heard of this another way.
fn is_heard(heard: &HashMap<Life, u64>, notice: &Notice) -> bool {
    let newest = notice.about.as_ref().and_then(|(_, life)| heard.get(life)).copied().unwrap_or(0);
    match notice.kind {
        Kind::Turn(Some(turn)) => turn <= newest,
        Kind::Turn(None) | Kind::End | Kind::News => newest == ALL_OF_IT,
    }
}
