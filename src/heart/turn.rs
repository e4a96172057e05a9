//! One turn: the model and its tools until the model is done, at most so many requests.
//!
//! Runs on a thread of its own and owns the conversation meanwhile. Everything is appended to the history before
//! it is sent or run, and told to the controller after that. What could not be appended is given back.

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::sync::Arc;

use crossbeam_channel::Receiver;
use serde_json::json;

use crate::store::manifest::ProviderKind;
use crate::store::session::Input;
use crate::sys::wait::Cancel;
use crate::tools::context::PodContext;
use crate::tools::mailbox::{Ending, Event};
use crate::tools::toolbox::Toolbox;
use crate::wire::provider::{Failure, ModelRequest, Provider, backoff};
use crate::words::compaction::{self, BYTES_PER_TOKEN, Conversation};
use crate::words::error::{Error, Result};
use crate::words::message::{AssistantMessage, Cause, Item, Stop, TurnResult, open_calls};
use crate::words::notification::{Notice, render_block};
use crate::words::protocol::StreamEvent;

/// What a turn needs and the next turn needs again.
#[derive(Debug)]
pub struct Worker {
    context: Arc<PodContext>,
    provider: Provider,
    toolbox: Toolbox,
    instruction: String,
    conversation: Conversation,
    /// Stops the running turn.
    cancel: Cancel,
    /// What instruction and tools take in each request; counted once, at the first need.
    other_bytes: OnceCell<usize>,
}

/// Tokens of a context where the settings do not say.
const CONTEXT_TOKENS: u64 = 200_000;
/// More than any model has; in bytes it is still a number of any machine.
const CONTEXT_TOKENS_MAX: u64 = 1 << 28;
/// Tokens kept free for a reply where the settings do not say, and never more than a quarter of the context.
const REPLY_TOKENS: u64 = 8192;
/// Less than this of old items, in bytes, is not worth a summary where only an estimate asks for one, nor if the
/// provider takes no more.
const TRANSCRIPT_BYTES_MIN: usize = 4096;
/// What to do when no summary helps.
const NO_ROOM: &str = "the conversation is too long for the model, and a summary of its old part makes no room: set a \
    model with a larger context (\"insomnia set POD model NAME\"), give the rest to a new pod, or end this one and \
    correct \"provider.max_tokens\" or \"provider.context_tokens\" (\"insomnia resume POD --manifest FILE\")";

/// What a turn begins with. Notices and inputs leave it as they reach the history.
#[derive(Debug)]
pub struct Opening {
    /// Its number.
    pub turn: u64,
    /// Why it begins.
    pub cause: Cause,
    /// The notices that waited, and how many more did not fit.
    pub notices: (Vec<Notice>, usize),
    /// The texts that started it, and those that were queued meanwhile.
    pub inputs: VecDeque<Input>,
    /// Whether it takes no more texts: the next turn answers what comes.
    pub is_closed: bool,
}

/// Why a turn is not finished.
enum Halt {
    Failed(String),
    /// The provider says that the request does not fit into the model's context, or no summary makes room in it.
    TooLong,
    Cancelled,
    Limit(String),
}

impl Worker {
    /// A worker that goes on with the items that are in the session.
    ///
    /// # Errors
    /// When the history cannot be read, or no descriptor is left.
    pub fn new(context: Arc<PodContext>, provider: Provider, instruction: String) -> Result<Worker> {
        let conversation = context.session.conversation()?;
        let toolbox = Toolbox::new(Arc::clone(&context));
        let cancel = Cancel::new().map_err(|source| Error::io("make an event descriptor", source))?;
        let other_bytes = OnceCell::new();
        Ok(Worker { context, provider, toolbox, instruction, conversation, cancel, other_bytes })
    }

    /// Stops the running turn, each time it is set.
    pub fn cancel(&self) -> Cancel {
        self.cancel.clone()
    }

    /// Runs turns as they come and tells the controller how each ended. It gets back what was not heard.
    pub fn run_each(mut self, openings: &Receiver<Opening>) {
        for mut opening in openings {
            let ending = self.run(&mut opening);
            let Opening { notices, inputs, .. } = opening;
            self.context.mailbox.post(Event::TurnOver { ending, notices, inputs });
        }
    }

    /// Runs one turn to its end, and logs the end. What is still in `opening` then has not been heard.
    fn run(&mut self, opening: &mut Opening) -> Ending {
        let turn = opening.turn;
        let (result, message) = match self.begin(opening).and_then(|()| self.work(opening)) {
            Ok(()) => (TurnResult::Finished, None),
            Err(Halt::Failed(message)) => (TurnResult::Failed, Some(message)),
            Err(Halt::TooLong) => (TurnResult::Failed, Some(NO_ROOM.into())),
            Err(Halt::Limit(message)) => (TurnResult::Limit, Some(message)),
            Err(Halt::Cancelled) if self.context.is_ending() => {
                (TurnResult::Cancelled, Some("the pod is ending".into()))
            }
            Err(Halt::Cancelled) => (TurnResult::Cancelled, Some("somebody cancelled the turn".into())),
        };
        while !opening.is_closed {
            self.take_queued(opening, true); // before the end is told, so that nobody waits for this turn in vain
        }
        if let Err(Halt::Failed(error)) = self.log(Item::TurnEnded { turn, result, message: message.clone() })
        {
            log::error!("the end of turn {turn} is not in the history: {error}"); // it is told all the same
            let message = message.clone();
            self.context.mailbox.post(Event::Show(StreamEvent::TurnEnded { turn, result, message }));
        }
        (result, message)
    }

    fn begin(&mut self, opening: &mut Opening) -> Result<(), Halt> {
        self.log(Item::TurnStarted { turn: opening.turn, cause: opening.cause })?;
        for call in open_calls(self.conversation.items()) {
            let text =
                "this call has no result: the pod was interrupted while it ran; look before you repeat it"
                    .into();
            self.log(Item::ToolResult { id: call.id, name: call.name, ok: false, text })?;
        }
        let (notices, lost) = &opening.notices;
        if !notices.is_empty() || *lost > 0 {
            self.log(Item::Notification { text: render_block(notices, *lost) })?;
            opening.notices = (Vec::new(), 0);
        }
        self.log_inputs(opening)
    }

    fn work(&mut self, opening: &mut Opening) -> Result<(), Halt> {
        let room = self.room();
        let (mut is_too_long, mut enough, mut transcript_max) = (false, room, room * BYTES_PER_TOKEN);
        for _ in 0..self.context.manifest.limits.steps {
            self.take_queued(opening, false);
            self.log_inputs(opening)?;
            if is_too_long || self.is_full(room, enough) {
                match self.compact(room, &mut transcript_max) {
                    // The provider judges better than an estimate; another try when a quarter has come to it.
                    Err(Halt::TooLong) if !is_too_long => enough = self.tokens() / 4 * 5,
                    compacted => is_too_long &= !compacted?,
                }
                continue;
            }
            let message = match self.ask_model(None) {
                Err(Halt::TooLong) => {
                    is_too_long = true;
                    continue;
                }
                asked => asked?,
            };
            self.log(Item::Assistant(message.clone()))?;
            if message.tool_calls.is_empty() {
                self.take_queued(opening, true);
                if opening.is_closed {
                    return self.judge_end(&message);
                }
                self.log_inputs(opening)?;
            }
            self.run_tools(&message)?;
        }
        let steps = self.context.manifest.limits.steps;
        Err(Halt::Limit(format!(
            "the turn made {steps} requests to the model (manifest setting \"limits.steps\")"
        )))
    }

    fn take_queued(&self, opening: &mut Opening, is_last: bool) {
        let texts = self.context.mailbox.take_queued(is_last);
        opening.is_closed = is_last && texts.is_empty();
        opening.inputs.extend(texts);
    }

    fn judge_end(&self, message: &AssistantMessage) -> Result<(), Halt> {
        match message.stop {
            Stop::Length => Err(Halt::Limit(
                "the reply was cut: it reached the setting \"provider.max_tokens\" or the end of the model's context"
                    .into(),
            )),
            Stop::Refusal => Err(Halt::Failed("the model, or a filter before it, refused to answer".into())),
            Stop::Done | Stop::ToolUse => {
                let has_answered = self.context.session.ask(|summary| !summary.last_response.is_empty());
                let after_tools =
                    matches!(self.conversation.items().iter().rev().nth(1), Some(Item::ToolResult { .. }));
                if has_answered || after_tools {
                    Ok(())
                } else {
                    Err(Halt::Failed("the model gave an empty answer".into()))
                }
            }
        }
    }

    /// Tokens that a request may have so that a reply fits beside it.
    fn room(&self) -> usize {
        let provider = &self.context.manifest.provider;
        // A script has no context of its own.
        let is_script = provider.kind == Some(ProviderKind::Script);
        let usual = if is_script { CONTEXT_TOKENS_MAX } else { CONTEXT_TOKENS };
        let context = provider.context_tokens.unwrap_or(usual).min(CONTEXT_TOKENS_MAX);
        let reply = provider.max_tokens.unwrap_or(REPLY_TOKENS).min(context / 4);
        usize::try_from(context - reply).unwrap_or_default()
    }

    /// Bytes of what every request has beside the conversation.
    fn other_bytes(&self) -> usize {
        *self.other_bytes.get_or_init(|| {
            let specs = self.toolbox.specs().iter().map(|spec| json!(spec).to_string().len());
            self.instruction.len() + specs.sum::<usize>()
        })
    }

    fn tokens(&self) -> usize {
        self.conversation.tokens(|| self.other_bytes())
    }

    /// Bytes that a compaction leaves word for word, if the last reply and what follows it allow that.
    fn stays(&self, room: usize) -> usize {
        (room * BYTES_PER_TOKEN).saturating_sub(self.other_bytes()) / 4
    }

    /// Whether the next request has more than `enough` tokens by an estimate, and a summary is worth its request.
    fn is_full(&self, room: usize, enough: usize) -> bool {
        let is_worth = |(old, _): (&[Item], u64)| compaction::savings(old) >= TRANSCRIPT_BYTES_MIN;
        self.tokens() > enough && self.conversation.old(self.stays(room)).is_some_and(is_worth)
    }

    /// Puts a summary of the model in the place of the old items, as far as that makes room. `false` where even the
    /// text to summarise is too long: the true context is smaller than the settings say. Half of it is next.
    /// `Halt::TooLong` where no summary makes room.
    fn compact(&mut self, room: usize, transcript_max: &mut usize) -> Result<bool, Halt> {
        let (old, until) = self.conversation.old(self.stays(room)).ok_or(Halt::TooLong)?;
        let text = compaction::transcript(old, *transcript_max);
        let half = text.len() / 2;
        let reply = match self.ask_model(Some(&[Item::Input { text, from: None }])) {
            Err(Halt::TooLong) if half > TRANSCRIPT_BYTES_MIN => {
                *transcript_max = half;
                return Ok(false);
            }
            asked => asked?,
        };
        let is_summary = reply.stop != Stop::Refusal && !reply.text.trim().is_empty();
        let item = Item::Compaction { summary: reply.text, until, usage: reply.usage };
        let Some(conversation) = self.conversation.compacted(&item).filter(|_| is_summary) else {
            self.log(Item::ModelError { message: "the model's summary is empty or makes no room".into() })?;
            return Err(Halt::TooLong);
        };
        self.save(item)?;
        self.conversation = conversation;
        Ok(true)
    }

    /// Asks about the conversation, or `aside` from it: without tools, and unseen by those who watch.
    fn ask_model(&mut self, aside: Option<&[Item]>) -> Result<AssistantMessage, Halt> {
        let mut attempt: u32 = 0;
        loop {
            if self.cancel.is_set() {
                return Err(Halt::Cancelled);
            }
            let doing =
                aside.map_or("waiting for the model", |_| "waiting for the model to summarise what is old");
            self.context.mailbox.post(Event::Doing(doing.into()));
            let mailbox = &self.context.mailbox;
            let mut show = |text: &str| {
                if aside.is_none() {
                    mailbox.post(Event::Show(StreamEvent::TextDelta { text: text.to_owned() }));
                }
            };
            if let Some(model) = self.context.model() {
                self.provider.set_model(model);
            }
            let (system, items, tools) = match aside {
                None => (self.instruction.as_str(), self.conversation.items(), self.toolbox.specs()),
                Some(items) => (compaction::SUMMARY_INSTRUCTION, items, &[][..]),
            };
            let number = self.context.session.ask(|summary| summary.requests);
            let request = ModelRequest { system, items, tools, number };
            let failure = match self.provider.request(&request, &self.cancel, &mut show) {
                Ok(message) => return Ok(message),
                Err(failure) => failure,
            };
            let (reason, wanted) = match failure {
                Failure::Cancelled => {
                    ("cancelled before the reply was whole".to_owned(), Err(Halt::Cancelled))
                }
                Failure::Final(message) => (message.clone(), Err(Halt::Failed(message))),
                Failure::ContextTooLong(message) => (message, Err(Halt::TooLong)),
                Failure::Retry { reason, wait } => (reason, Ok(wait)),
            };
            // Every request counts, so that a script goes on behind the reply that was not wanted.
            self.log(Item::ModelError { message: reason.clone() })?;
            let wanted = wanted?;
            attempt += 1;
            if attempt > self.context.manifest.limits.retries {
                return Err(Halt::Failed(format!(
                    "{reason} (tried {attempt} times, manifest setting \"limits.retries\")"
                )));
            }
            let wait = backoff(attempt, wanted, jitter());
            let wait_seconds = wait.as_secs_f64();
            self.context
                .mailbox
                .post(Event::Doing(format!("trying the model again in {wait_seconds:.1} s: {reason}")));
            self.context.mailbox.post(Event::Show(StreamEvent::Retry { attempt, wait_seconds, reason }));
            if self.cancel.sleep(wait) {
                return Err(Halt::Cancelled);
            }
        }
    }

    fn run_tools(&mut self, message: &AssistantMessage) -> Result<(), Halt> {
        for call in &message.tool_calls {
            let (id, name) = (call.id.clone(), call.name.clone());
            if self.cancel.is_set() {
                let text = "not run: the turn was cancelled before".into();
                self.log(Item::ToolResult { id, name, ok: false, text })?;
                continue;
            }
            self.context.mailbox.post(Event::Doing(format!("tool {name}")));
            let (ok, text) = self.toolbox.run(call, &self.cancel);
            self.log(Item::ToolResult { id, name, ok, text })?;
        }
        if self.cancel.is_set() { Err(Halt::Cancelled) } else { Ok(()) }
    }

    /// In the order in which they were accepted: the session counts how many of them were heard.
    fn log_inputs(&mut self, opening: &mut Opening) -> Result<(), Halt> {
        while let Some(Input { text, from }) = opening.inputs.front().cloned() {
            self.log(Item::Input { text, from })?;
            opening.inputs.pop_front();
        }
        Ok(())
    }

    /// Appends first; what cannot be saved is neither sent nor run.
    fn log(&mut self, item: Item) -> Result<(), Halt> {
        let number = self.save(item.clone())?;
        self.conversation.push(number, item);
        Ok(())
    }

    fn save(&self, item: Item) -> Result<u64, Halt> {
        self.context.log(item).map_err(|error| Halt::Failed(error.to_string()))
    }
}

/// A fraction from the system's randomness, so that many pods do not retry in step.
fn jitter() -> f64 {
    let digits = crate::sys::clock::random_hex(2).unwrap_or_default();
    f64::from(u16::from_str_radix(&digits, 16).unwrap_or(0)) / f64::from(u16::MAX)
}
