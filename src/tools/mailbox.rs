//! The controller's mailbox: one closed enum of everything that can happen to a pod, and the handle that
//! connections, the turn, tools and watchers put it in with.
//!
//! The channel is bounded; when it is full, whoever posts waits. The controller never posts to itself.

use std::collections::VecDeque;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::store::registry::PodRecord;
use crate::store::session::Input;
use crate::words::identity::Life;
use crate::words::message::{LoggedItem, TurnResult};
use crate::words::notification::Notice;
use crate::words::protocol::{
    CancelReply, ErrorCode, RunReply, Status, StreamEvent, SubscribeReply, WireError,
};

/// Events that wait for the controller: twice the connections. The channel takes the memory of all at once, 180 bytes
/// each, in every idle pod.
const MAILBOX_EVENTS_MAX: usize = 128;

/// What the controller knows of the pod's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// In one word.
    pub status: Status,
    /// What exactly.
    pub detail: String,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// Texts that wait for a turn.
    pub queued: usize,
}

/// What the model has heard of another pod without a notice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// How this turn ended, and what was before: it has read the output, or was told by WaitPods.
    Turn(u64),
    /// That it has ended, or ends now: it was told by WaitPods, or is stopping it itself.
    End,
    /// It could not stop it after all.
    NotStopped,
}

/// Everything that can happen to a pod.
#[derive(Debug)]
pub enum Event {
    /// Somebody sent input. Refused while ending.
    Run {
        /// The input.
        input: Input,
        /// Whether a turn that it starts counts as one in a row without a person.
        counts: bool,
        /// Which turn it goes into.
        reply: Sender<Result<RunReply, WireError>>,
    },
    /// Something to tell the model at its next turn; may wake it.
    Notice(Notice),
    /// Somebody wants a failed or cancelled turn to go on. Refused unless paused.
    Resume(Sender<Result<RunReply, WireError>>),
    /// Somebody wants the running turn stopped.
    Cancel(Sender<Result<CancelReply, WireError>>),
    /// Somebody wants the pod to end.
    Shutdown,
    /// Somebody asks how the pod is.
    State(Sender<State>),
    /// Somebody wants the events from now on, after the items from `since`.
    Subscribe {
        /// The first item wanted; `None` for only what comes.
        since: Option<u64>,
        /// Where the events go; one that is full is dropped.
        sink: Sender<StreamEvent>,
        /// Where the items that are logged already end, as `cursor` of the second part.
        reply: Sender<Result<(SubscribeReply, u64), WireError>>,
    },
    /// The turn logged an item.
    Logged(LoggedItem),
    /// The turn has something to show that is no item.
    Show(StreamEvent),
    /// The turn does something else now.
    Doing(String),
    /// The turn wants the texts that wait.
    TakeQueued {
        /// Whether it takes no more if there are none.
        is_last: bool,
        /// Where they go.
        reply: Sender<Vec<Input>>,
    },
    /// The turn waits for any news: a notice, a text, a cancel.
    AwaitNews(Sender<NewsKind>),
    /// The model has heard something of the pod of this life without a notice.
    Heard(Life, Heard),
    /// A pod is known from now on and must be watched.
    Known(PodRecord),
    /// The turn is over.
    TurnOver {
        /// How it ended.
        ending: Ending,
        /// The notices that could not be saved, and how many more there were.
        notices: (Vec<Notice>, usize),
        /// The texts that could not be saved.
        inputs: VecDeque<Input>,
    },
}

/// How a turn ended, and why where it did not finish.
pub type Ending = (TurnResult, Option<String>);

/// A way to put events into the mailbox.
#[derive(Debug, Clone)]
pub struct Mailbox {
    sender: Sender<Event>,
}

/// The refusal of a pod that is ending.
pub fn shutting_down() -> WireError {
    WireError::new(ErrorCode::ShuttingDown, "the pod is ending; start another one or wait until it has ended")
}

impl Mailbox {
    /// A mailbox and its reading end, which is the controller's.
    pub fn new() -> (Mailbox, Receiver<Event>) {
        let (sender, receiver) = bounded(MAILBOX_EVENTS_MAX);
        (Mailbox { sender }, receiver)
    }

    /// Puts an event in; waits while the mailbox is full.
    pub fn post(&self, event: Event) {
        if self.sender.send(event).is_err() {
            log::debug!("an event came after the controller's end"); // the pod is about to exit
        }
    }

    /// Puts in an event that wants an answer; where it will come.
    fn want<T>(&self, make: impl FnOnce(Sender<T>) -> Event) -> Receiver<T> {
        let (reply, answer) = bounded(1);
        self.post(make(reply));
        answer
    }

    /// Puts in an event that has a refusal for an answer, and waits for the answer.
    ///
    /// # Errors
    /// The controller's refusal; `shutting_down` when it has ended.
    pub fn ask<T>(&self, make: impl FnOnce(Sender<Result<T, WireError>>) -> Event) -> Result<T, WireError> {
        self.want(make).recv().unwrap_or_else(|_| Err(shutting_down()))
    }

    /// How the pod is; `None` when the controller has ended.
    pub fn state(&self) -> Option<State> {
        self.want(Event::State).recv().ok()
    }

    /// Takes the texts that wait for the turn. When it `is_last` and there are none, the next turn answers what comes.
    pub fn take_queued(&self, is_last: bool) -> Vec<Input> {
        self.want(|reply| Event::TakeQueued { is_last, reply }).recv().unwrap_or_default()
    }

    /// Begins to listen for news; everything after this call counts.
    pub fn await_news(&self) -> Receiver<NewsKind> {
        self.want(Event::AwaitNews)
    }
}

/// What kind of news came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewsKind {
    /// A text for the model waits, or the turn is to end: the model should hear of it.
    Message,
    /// Something happened to another pod.
    Notice,
}
