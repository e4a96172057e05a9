//! The controller: one thread, one closed event enum, owner of the pod's state.
//!
//! It never waits for a peer, a child, the model or the lock: connections and the turn do that on threads of
//! their own, so status, cancel and events are answered in mid-turn.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use crate::heart::turn::{Opening, Worker};
use crate::heart::watcher;
use crate::store::session::Input;
use crate::sys::wait::Cancel;
use crate::sys::{clock, signal, thread};
use crate::tools::context::PodContext;
use crate::tools::mailbox::{Ending, Event, Heard, NewsKind, State, shutting_down};
use crate::words::error::{Error, Result};
use crate::words::identity::Life;
use crate::words::limits::{END_DEADLINE, MAX_EVENT_MESSAGE_BYTES, MAX_SUBSCRIBERS, SUBSCRIBER_QUEUE};
use crate::words::message::{Cause, Item, LoggedItem, TurnResult};
use crate::words::notification::{Kind, Notice, NoticeBuffer};
use crate::words::protocol::{
    CancelReply, ErrorCode, PodEvent, RunReply, StartedBy, Status, StreamEvent, SubscribeReply, WireError,
};
use crate::words::text::cut_end;

/// Stack of the thread for turns: tools and translations of the model's words run on it.
const TURN_STACK_BYTES: usize = 1 << 20;
/// Pods of which is remembered what the model has heard.
const HEARD_MAX: usize = 1024;
/// The model knows of the pod's end, or causes it.
const ALL_OF_IT: u64 = u64::MAX;
/// Texts that wait for the running turn.
const QUEUED_MAX: usize = 256;

/// What the pod is about.
#[derive(Debug, Clone, Copy)]
enum Phase {
    /// Nothing runs.
    Idle,
    /// Nothing runs, and nothing wakes it: the last turn did not finish.
    Paused,
    /// A turn runs.
    Running { turn: u64, by_person: bool },
}

impl Phase {
    fn status(self) -> Status {
        match self {
            Phase::Idle => Status::Idle,
            Phase::Paused => Status::Paused,
            Phase::Running { .. } => Status::Running,
        }
    }
}

/// The controller and all it owns.
#[derive(Debug)]
pub struct Controller {
    context: Arc<PodContext>,
    events: Receiver<Event>,
    /// The way to the thread for turns, which takes one at a time and says when it is over.
    turns: Sender<Opening>,
    /// Stops the running turn.
    cancel: Cancel,
    /// Whether the running turn takes no more texts.
    is_closed: bool,
    phase: Phase,
    /// What it is doing exactly, or why it does nothing, and since when.
    detail: String,
    since: u64,
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
}

impl Controller {
    /// The controller of a pod that has just started, and its thread for turns. `first_request_within` is for
    /// adopted pods.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        context: Arc<PodContext>,
        events: Receiver<Event>,
        worker: Worker,
        first_request_within: Option<Duration>,
    ) -> Result<Controller> {
        let (turns, openings) = bounded(1);
        let cancel = worker.cancel();
        let started = std::thread::Builder::new().name("turn".into()).stack_size(TURN_STACK_BYTES);
        started
            .spawn(move || worker.run_each(&openings))
            .map_err(|source| Error::io("start a thread", source))?;
        let (phase, detail) = match context.session.ask(|summary| summary.last_result) {
            None => (Phase::Idle, "no turn yet"),
            Some(TurnResult::Finished) => (Phase::Idle, "waiting for input"),
            Some(TurnResult::Failed | TurnResult::Cancelled | TurnResult::Limit) => {
                (Phase::Paused, "the last turn did not finish")
            }
        };
        let queued = context.session.unheard().unwrap_or_else(|error| {
            log::error!("inputs of before are not read: {error}"); // they stay in the file
            Vec::new()
        });
        Ok(Controller {
            events,
            turns,
            cancel,
            is_closed: false,
            phase,
            detail: detail.to_owned(),
            since: clock::now_seconds(),
            queued: queued.into(),
            notices: NoticeBuffer::new(context.manifest.limits.notices),
            heard: HashMap::new(),
            turns_in_a_row: 0,
            subscribers: Vec::new(),
            published: context.session.len(),
            in_flight_text: String::new(),
            news: None,
            first_request_due: first_request_within.map(|limit| Instant::now() + limit),
            context,
        })
    }

    /// Handles events until the pod is to end and no turn runs any more.
    pub fn run(&mut self) {
        self.start_queued(Cause::Resume); // also of a paused pod: an earlier life has accepted these
        while !self.is_over() {
            let next = match self.first_request_due {
                Some(due) => self.events.recv_deadline(due),
                None => self.events.recv().map_err(RecvTimeoutError::from),
            };
            match next {
                Ok(event) => self.handle(event),
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
            Event::Cancel(reply) => answer(&reply, Ok(CancelReply { cancelled: self.on_cancel() })),
            Event::Shutdown => self.on_shutdown(),
            Event::State(reply) => answer(&reply, self.state()),
            Event::Subscribe { since, sink, reply } => answer(&reply, self.on_subscribe(since, sink)),
            Event::Logged(logged) => self.on_logged(logged),
            Event::Show(shown) => self.on_show(shown),
            Event::Doing(detail) => self.enter(self.phase, &detail),
            Event::TakeQueued { is_last, reply } => {
                self.is_closed = is_last && self.queued.is_empty();
                answer(&reply, self.queued.drain(..).collect());
            }
            Event::AwaitNews(reply) => self.on_await_news(reply),
            Event::Heard(life, heard) => self.on_heard(life, heard),
            Event::Known(record) => watcher::watch(&self.context, record),
            Event::TurnOver { ending, notices: (notices, lost), inputs } => {
                let is_promised = !self.queued.is_empty(); // they came when the turn took no more
                // What the turn could not save waits for the next one, before what has come meanwhile.
                self.notices.put_back(notices, lost);
                inputs.into_iter().rev().for_each(|input| self.queued.push_front(input));
                self.on_turn_over(ending, is_promised);
            }
        }
    }

    /// Whether no turn runs and none will.
    fn is_over(&self) -> bool {
        self.context.is_ending() && !matches!(self.phase, Phase::Running { .. })
    }

    fn state(&self) -> State {
        let (status, detail, since) = (self.phase.status(), self.detail.clone(), self.since);
        State { status, detail, since, queued: self.queued.len() }
    }

    fn on_run(&mut self, input: Input, counts: bool) -> Result<RunReply, WireError> {
        if self.context.is_ending() {
            return Err(shutting_down());
        }
        self.first_request_due = None;
        let by_person = input.from.is_none();
        if by_person {
            self.turns_in_a_row = 0;
        }
        if let Phase::Running { turn, .. } = self.phase {
            if self.queued.len() >= QUEUED_MAX {
                let reason = format!("{QUEUED_MAX} texts wait for the running turn already; try again later");
                return Err(WireError::new(ErrorCode::Busy, reason));
            }
            self.accept(input)?;
            self.tell_news(NewsKind::Message);
            return Ok(RunReply { turn: turn + u64::from(self.is_closed), queued: true });
        }
        if counts && !self.may_go_on_alone() {
            return Err(WireError::new(ErrorCode::Conflict, self.alone_too_long()));
        }
        self.accept(input)?;
        Ok(self.start_turn(Cause::Run, by_person))
    }

    /// Starts a turn for the texts that wait, if there are any.
    fn start_queued(&mut self, cause: Cause) {
        if !self.queued.is_empty() {
            let by_person = self.queued.iter().any(|input| input.from.is_none());
            self.start_turn(cause, by_person);
        }
    }

    /// On disk before it is accepted; in the queue until the turn takes it.
    fn accept(&mut self, input: Input) -> Result<(), WireError> {
        self.context.session.accept(&input)?;
        self.queued.push_back(input);
        Ok(())
    }

    fn on_resume(&mut self) -> Result<RunReply, WireError> {
        if self.context.is_ending() {
            return Err(shutting_down());
        }
        self.turns_in_a_row = 0;
        let conflict = |reason: &str| Err(WireError::new(ErrorCode::Conflict, reason));
        match self.phase {
            Phase::Paused => Ok(self.start_turn(Cause::Resume, true)),
            Phase::Idle => conflict("there is no failed or cancelled turn to go on with"),
            Phase::Running { .. } => conflict("a turn is running already"),
        }
    }

    /// Whether a turn runs, which is stopped then.
    fn on_cancel(&mut self) -> bool {
        let is_running = matches!(self.phase, Phase::Running { .. });
        if is_running {
            self.cancel.set();
            self.tell_news(NewsKind::Message);
        }
        is_running
    }

    fn on_shutdown(&mut self) {
        if !self.context.ending.swap(true, Ordering::SeqCst) {
            exit_in_any_case();
        }
        self.on_cancel();
    }

    fn on_subscribe(
        &mut self,
        since: Option<u64>,
        sink: Sender<StreamEvent>,
    ) -> Result<(SubscribeReply, u64), WireError> {
        if self.is_over() {
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
        Ok((SubscribeReply { cursor, status: self.phase.status() }, self.published))
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
        if let StreamEvent::TextDelta { text } = &shown {
            self.in_flight_text.push_str(text);
        } else if let StreamEvent::Retry { .. } = &shown {
            self.in_flight_text.clear();
        }
        self.show(shown);
    }

    fn on_await_news(&mut self, reply: Sender<NewsKind>) {
        self.news = Some(reply);
        if !self.queued.is_empty() || self.cancel.is_set() {
            self.tell_news(NewsKind::Message);
        }
    }

    fn on_heard(&mut self, life: Life, heard: Heard) {
        let turn = match heard {
            Heard::Turn(turn) => turn,
            Heard::End => ALL_OF_IT,
            Heard::NotStopped => {
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

    /// A turn was promised to texts that wait: then it comes in any case.
    fn on_turn_over(&mut self, (result, message): Ending, is_promised: bool) {
        let Phase::Running { turn, by_person } = self.phase else { return };
        self.news = None;
        self.report(turn, by_person, result, message.as_deref());
        if self.context.is_ending() {
            self.enter(Phase::Idle, "ending");
        } else if result != TurnResult::Finished {
            let why = message.unwrap_or_default();
            self.enter(Phase::Paused, &format!("the last turn did not finish: {why}"));
            if is_promised {
                self.start_queued(Cause::Run);
            }
        } else {
            self.enter(Phase::Idle, "waiting for input");
            self.start_queued(Cause::Run);
            self.wake();
        }
    }

    /// Tells the spawner how the turn ended: exactly one report for each turn.
    fn report(&self, turn: u64, by_person: bool, result: TurnResult, message: Option<&str>) {
        let pod_name = self.context.own.pod_id.clone();
        self.context.events.send(if result == TurnResult::Finished {
            let started_by = by_person.then_some(StartedBy::Person);
            PodEvent::TurnEnded { pod_name, started_by, turn: Some(turn) }
        } else {
            let message = format!("{result}: {}", message.unwrap_or("no reason is known"));
            PodEvent::Errored {
                pod_name,
                message: cut_end(&message, MAX_EVENT_MESSAGE_BYTES),
                turn: Some(turn),
            }
        });
    }

    /// Starts a turn when something waits that wakes, nobody has paused the pod, and it is allowed to go on.
    fn wake(&mut self) {
        let is_ready = matches!(self.phase, Phase::Idle) && !self.context.is_ending();
        if !is_ready || !self.context.manifest.wake_on_events || !self.notices.wakes() {
            return;
        }
        if self.may_go_on_alone() {
            self.start_turn(Cause::Wake, false);
        } else {
            self.enter(Phase::Idle, &self.alone_too_long());
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

    /// Hands the thread for turns, which waits, what the next one begins with.
    fn start_turn(&mut self, cause: Cause, by_person: bool) -> RunReply {
        let turn = self.context.session.ask(|summary| summary.turn) + 1;
        let (notices, inputs) = (self.notices.drain(), std::mem::take(&mut self.queued));
        self.cancel.clear();
        self.is_closed = false;
        let opening = Opening { turn, cause, notices, inputs, is_closed: false };
        let _ = self.turns.send(opening); // there is room: no turn runs
        self.enter(Phase::Running { turn, by_person }, "starting a turn");
        RunReply { turn, queued: false }
    }

    /// Goes over to a phase, or says more exactly what it is about in this one.
    fn enter(&mut self, phase: Phase, detail: &str) {
        let is_news = self.phase.status() != phase.status() || self.detail != detail;
        self.phase = phase;
        if is_news {
            detail.clone_into(&mut self.detail);
            self.since = clock::now_seconds();
            self.show(self.status_event());
        }
    }

    fn status_event(&self) -> StreamEvent {
        StreamEvent::Status { status: self.phase.status(), detail: self.detail.clone() }
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
