//! Following a pod: its events as they come, in plain lines or as JSON, until something is reached or a person has
//! had enough. The one way in which `run`, `send --wait` and `attach` wait.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::doors::commands::Given;
use crate::doors::terminal::{Spinner, answers_to_a_person, json_line, talk, talk_line, try_answer};
use crate::sys::signal::{self, EndSignal};
use crate::sys::wait::is_unheard;
use crate::wire::client::{self, Address, Next, Subscription};
use crate::words::error::{Error, Result};
use crate::words::message::{Item, ToolCall, TurnResult, end_in_words};
use crate::words::protocol::{CancelReply, ErrorCode, Method, Status, StatusReply, StreamEvent};
use crate::words::text::{cut_end, harmless_line};

/// Inputs, tool calls and results are cut at this length on a line.
const LINE_BYTES_MAX: usize = 220;
/// A pod that cannot be followed again is tried so often.
const TRIES_MAX: usize = 5;
/// A stream that ends so often without a single item in between is over.
const DROPS_MAX: usize = 20;
/// How often signals and `is_over` are looked at while nothing comes.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Where the model's text goes while it streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Style {
    /// Events as JSON lines on standard output, and nothing else.
    Json,
    /// Text on standard output, the rest on standard error.
    Text,
    /// Text on standard output, nothing else.
    TextOnly,
    /// Everything on standard output.
    Show,
    /// Everything on standard error; the caller prints the answer.
    Talk,
    /// Nothing.
    #[default]
    Quiet,
}

impl Style {
    /// The style in which a command whose answer is the last text of the model follows.
    pub(super) fn of_answer(given: &Given) -> Style {
        match (given.has("json"), given.has("quiet"), answers_to_a_person()) {
            (true, _, _) => Style::Json,
            (false, true, _) => Style::Quiet,
            (false, false, true) => Style::Text,
            (false, false, false) => Style::Talk,
        }
    }
}

/// Shows events in one style, and remembers what they said last.
#[derive(Debug, Default)]
pub(super) struct Follower {
    style: Style,
    in_line: bool,
    is_on_terminal: bool,
    /// What has been shown of the reply that streams.
    partial: String,
    /// Whether the stream has begun again in the middle of it.
    is_again: bool,
    spinner: Spinner,
    /// A directory that is left out where lines name what lies in it.
    pub(super) within: String,
    /// What the pod is doing, and since when.
    doing: Option<(String, Instant)>,
    /// Why standard output takes no more; nothing is written there from then on.
    pub(super) unheard: Option<io::Error>,
    /// The text of the model's last reply that had any.
    pub(super) last_text: String,
    /// How the last turn ended.
    pub(super) last_end: Option<TurnEnd>,
}

/// How a turn ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TurnEnd {
    /// Its number.
    pub(super) turn: u64,
    /// How it ended.
    pub(super) result: TurnResult,
    /// Why, where it did not finish.
    pub(super) message: Option<String>,
    in_words: String,
}

impl Follower {
    /// A follower of this style.
    pub(super) fn new(style: Style) -> Follower {
        let spinner = Spinner::new(matches!(style, Style::Text | Style::Talk));
        Follower { style, is_on_terminal: answers_to_a_person(), spinner, ..Follower::default() }
    }

    /// Shows one event. An item is shown from itself, whether it is new or of before the subscription.
    pub(super) fn show(&mut self, event: &StreamEvent) {
        if self.style == Style::Json && !matches!(event, StreamEvent::TextDelta { .. }) {
            self.answer_json(event);
        }
        match event {
            StreamEvent::TextDelta { text } => self.text(text),
            StreamEvent::Retry { attempt, wait_seconds, reason } => {
                self.say(&format!("-- attempt {attempt} failed, again in {wait_seconds:.1} s: {reason}"));
                self.end_reply();
            }
            // It has no item where the history cannot be written.
            StreamEvent::TurnEnded { turn, result, message } => {
                self.show_end(*turn, *result, message.as_deref());
            }
            StreamEvent::Dropped { reason } => self.say(&format!("-- the stream ended: {reason}")),
            StreamEvent::Status { status, detail } => {
                self.does(if *status == Status::Running { detail } else { "" });
            }
            StreamEvent::Item(logged) => self.show_item(&logged.item),
            // Each comes with an item that tells the same.
            StreamEvent::TurnStarted { .. }
            | StreamEvent::ToolCall { .. }
            | StreamEvent::ToolResult { .. }
            | StreamEvent::Notification { .. }
            | StreamEvent::Compaction { .. } => {}
        }
    }

    /// What of a piece of the reply has not been shown: a stream that begins again sends it from its beginning.
    fn fresh<'t>(&mut self, text: &'t str) -> &'t str {
        if !std::mem::take(&mut self.is_again) {
            self.partial.push_str(text);
            return text;
        }
        let fresh = text.strip_prefix(self.partial.as_str());
        if fresh.is_none() {
            self.end_line();
        }
        text.clone_into(&mut self.partial);
        fresh.unwrap_or(text)
    }

    /// Notes what goes on, for the spinner.
    pub(super) fn does(&mut self, what: &str) {
        if self.doing.as_ref().is_none_or(|(before, _)| before != what) {
            self.doing = Some((what.to_owned(), Instant::now()));
        }
    }

    /// While nothing comes: lets the spinner turn, and looks whether anybody still reads.
    fn rest(&mut self) {
        if !self.is_on_terminal && is_unheard(io::stdout().as_fd()) {
            self.unheard.get_or_insert_with(|| io::ErrorKind::BrokenPipe.into());
        }
        if let Some((what, since)) = self.doing.as_ref().filter(|(what, _)| !self.in_line && !what.is_empty())
        {
            self.spinner.show(&format!("{what}, {} s", since.elapsed().as_secs()));
        }
    }

    fn show_item(&mut self, item: &Item) {
        match item {
            Item::TurnStarted { .. } => {
                self.last_text.clear();
                self.say(&in_words(item));
            }
            Item::Input { .. } | Item::ToolResult { .. } | Item::Compaction { .. } => {
                self.say_short(&in_words(item));
            }
            Item::Notification { text } => {
                for line in text.replace(&self.within, "").lines().filter_map(|line| line.strip_prefix("- "))
                {
                    self.say(&format!("** {line}"));
                }
            }
            Item::Assistant(message) => {
                if self.style != Style::Json {
                    self.is_again = true; // what has streamed of it is there already
                    self.text(&message.text);
                }
                message.tool_calls.iter().for_each(|call| self.say_short(&call_in_words(call)));
                self.end_reply();
                if let Some(text) = item.reply_text() {
                    text.clone_into(&mut self.last_text);
                }
            }
            Item::TurnEnded { turn, result, message } => {
                self.end_reply();
                if self.last_end.as_ref().is_none_or(|end| end.turn != *turn) {
                    self.show_end(*turn, *result, message.as_deref());
                }
            }
            Item::ModelError { .. } => self.end_reply(),
            Item::Session { .. } | Item::ModelSet { .. } => {}
        }
    }

    fn show_end(&mut self, turn: u64, result: TurnResult, message: Option<&str>) {
        let in_words = end_in_words(turn, result, message);
        self.say(&format!("-- {in_words}"));
        self.last_end = Some(TurnEnd { turn, result, message: message.map(str::to_owned), in_words });
    }

    /// The reply that streams is whole, or nothing becomes of it.
    fn end_reply(&mut self) {
        self.end_line();
        (self.partial, self.is_again) = (String::new(), false);
    }

    /// What comes next may tell again what was told.
    fn begin_again(&mut self) {
        if self.style == Style::Json {
            let reason = "the stream was lost and goes on behind the last item".to_owned();
            self.answer_json(&StreamEvent::Dropped { reason });
        }
        self.is_again = !self.partial.is_empty();
    }

    /// Writes to standard output as long as that works.
    pub(super) fn answer(&mut self, text: &str) {
        self.spinner.clear();
        if self.unheard.is_none() {
            self.unheard = try_answer(text).err();
        }
    }

    fn answer_json(&mut self, event: &StreamEvent) {
        self.answer(&(json_line(event) + "\n"));
    }

    /// Shows a piece of a reply.
    fn text(&mut self, text: &str) {
        let text = self.fresh(text);
        match self.style {
            _ if text.is_empty() => {}
            Style::Json => self.answer_json(&StreamEvent::TextDelta { text: text.to_owned() }),
            Style::Quiet => {}
            Style::Text | Style::TextOnly | Style::Show | Style::Talk => {
                self.put(text);
                self.in_line = !text.ends_with('\n');
            }
        }
    }

    fn put(&mut self, text: &str) {
        self.spinner.clear();
        if self.style == Style::Talk { talk(text) } else { self.answer(text) }
    }

    /// Says a text on one line that is not too long.
    fn say_short(&mut self, text: &str) {
        self.say(&cut_end(&harmless_line(&text.replace(&self.within, "")), LINE_BYTES_MAX));
    }

    /// Ends a line of streaming text, so that what follows begins a new one.
    pub(super) fn end_line(&mut self) {
        self.spinner.clear();
        if std::mem::take(&mut self.in_line) {
            self.put("\n");
        }
    }

    /// Whether there is anything but events or answers on the terminal.
    pub(super) fn talks(&self) -> bool {
        matches!(self.style, Style::Text | Style::Talk)
    }

    /// Says a line, where there is talk at all.
    pub(super) fn say(&mut self, text: &str) {
        self.end_line();
        if self.talks() {
            talk_line(text);
        } else if self.style == Style::Show {
            self.answer(&format!("{text}\n"));
        }
    }

    /// Whether the last turn finished, if one has ended.
    pub(super) fn finished(&self) -> bool {
        self.last_end.as_ref().is_none_or(|end| end.result == TurnResult::Finished)
    }

    /// Says why the last turn did not finish, where no event has said it and no JSON tells it.
    pub(super) fn say_failure(&self) {
        if let Some(end) = self.last_end.as_ref().filter(|_| self.style == Style::Quiet && !self.finished()) {
            talk_line(&end.in_words);
        }
    }

    /// Prints the last text as the answer, unless it has been streamed there already.
    pub(super) fn answer_last_text(&mut self) {
        if matches!(self.style, Style::Talk | Style::Quiet) && !self.last_text.is_empty() {
            let text = format!("{}\n", self.last_text);
            self.answer(&text);
        }
    }
}

/// An item of a history in words.
pub(super) fn in_words(item: &Item) -> String {
    match item {
        Item::Session { pod_id, program, .. } => format!("-- session of pod {pod_id} (insomnia {program})"),
        Item::TurnStarted { turn, cause } => format!("-- turn {turn} ({cause})"),
        Item::Input { text, from: None } => format!(">> a person: {text}"),
        Item::Input { text, from: Some(pod) } => format!(">> pod {pod}: {text}"),
        Item::Notification { text } => text.clone(),
        Item::Assistant(message) => {
            let calls = message.tool_calls.iter().map(|call| format!("\n{}", call_in_words(call)));
            format!("model: {}{}", message.text, calls.collect::<String>())
        }
        Item::ToolResult { name, ok, text, .. } => {
            format!("<- {name}{}: {text}", if *ok { "" } else { " failed" })
        }
        Item::ModelError { message } => format!("-- the model could not be asked: {message}"),
        Item::Compaction { summary, until, .. } => {
            format!("-- a summary stands for the items before {until}; the history keeps them: {summary}")
        }
        Item::ModelSet { model } => format!("-- the model is {model} from here on"),
        Item::TurnEnded { turn, result, message } => {
            format!("-- {}", end_in_words(*turn, *result, message.as_deref()))
        }
    }
}

fn call_in_words(call: &ToolCall) -> String {
    format!("-> {} {}", call.name, call.input)
}

/// Why following ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    /// What the caller waits for has come.
    Reached,
    /// A person has had enough.
    Interrupted,
    /// The terminal is gone.
    HungUp,
    /// Nobody reads standard output any more.
    Unheard,
    /// The pod has ended.
    Ended,
}

/// What the first Ctrl-C does.
#[derive(Debug, Clone, Copy)]
pub(super) enum First {
    /// It leaves.
    Leaves,
    /// It cancels the turn; "Ctrl-C again" goes on with these words. Without a turn it changes nothing.
    Cancels(&'static str),
    /// It cancels the turn; without one it leaves.
    CancelsOrLeaves(&'static str),
}

/// What a lost terminal and Ctrl-C have asked for since it was looked at, told by the signal thread.
#[derive(Debug, Clone, Default)]
pub(super) struct Presses {
    presses: Arc<AtomicUsize>,
    has_hung_up: Arc<AtomicBool>,
    /// Whether nothing runs and the main thread waits for a line, which a signal does not wake.
    at_prompt: Arc<AtomicBool>,
}

impl Presses {
    /// Begins to count. One that comes while a line is waited for calls `at_prompt`.
    pub(super) fn listen(at_prompt: impl Fn() + Send + 'static) -> Result<Presses> {
        let presses = Presses::default();
        let theirs = presses.clone();
        let count = move |signal| {
            let count = match signal {
                EndSignal::HangUp => return theirs.has_hung_up.store(true, Ordering::SeqCst),
                EndSignal::Interrupt => 1,
                EndSignal::Terminate => 2, // it means to leave at once, as the second Ctrl-C does
            };
            theirs.presses.fetch_add(count, Ordering::SeqCst);
            if theirs.at_prompt.load(Ordering::SeqCst) {
                at_prompt();
            }
        };
        signal::on_end_signals(count).map_err(|source| Error::io("listen for signals", source))?;
        Ok(presses)
    }

    /// Whether one has come that nobody has looked at.
    pub(super) fn have_come(&self) -> bool {
        self.presses.load(Ordering::SeqCst) > 0
    }
}

/// A pod that a person follows.
#[derive(Debug)]
pub(super) struct Followed {
    /// Where it is: this life of it, and no successor of that name.
    pub(super) address: Address,
    /// What has been shown.
    pub(super) follower: Follower,
    /// What `subscribe` answered, and what comes.
    pub(super) events: Subscription,
    /// The number of the next item of the history.
    next_item: u64,
    /// How often the stream has ended since the last item.
    drops: usize,
    first: First,
    presses: Presses,
    /// How many there were since the latest turn began: each turn has its own first one.
    presses_in_turn: usize,
}

impl Followed {
    /// Subscribes to a pod, from item `since` on.
    pub(super) fn begin(
        address: &Address,
        since: Option<u64>,
        style: Style,
        first: First,
        presses: Presses,
    ) -> Result<Followed> {
        let events = client::subscribe(address, since)?;
        let life = client::ask::<StatusReply>(address, None, Method::Status)?.life;
        Ok(Followed {
            address: Address { life: Some(life), ..address.clone() },
            follower: Follower::new(style),
            next_item: events.opened.cursor,
            drops: 0,
            events,
            first,
            presses,
            presses_in_turn: 0,
        })
    }

    /// Whether there is still a reader of standard output; when it cannot be written otherwise, that is an error.
    pub(super) fn is_heard(&mut self) -> Result<bool> {
        match self.follower.unheard.take() {
            Some(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Some(error) => Err(Error::io("write to standard output", error)),
            None => Ok(true),
        }
    }

    /// Reads with `at_prompt` armed.
    pub(super) fn at_prompt<T>(&mut self, read: impl FnOnce() -> T) -> T {
        self.follower.end_line();
        self.presses.at_prompt.store(true, Ordering::SeqCst);
        let read = read();
        self.presses.at_prompt.store(false, Ordering::SeqCst);
        read
    }

    /// Shows events until `is_over`, which is asked after each one, and with `None` whenever nothing comes.
    pub(super) fn follow(
        &mut self,
        mut is_over: impl FnMut(&mut Follower, Option<&StreamEvent>) -> Result<bool>,
    ) -> Result<Over> {
        loop {
            let event = match self.events.next(Instant::now() + LOOK_AGAIN)? {
                Next::Event(event) => Some(event),
                Next::Nothing => None,
                Next::Over if self.is_followed_again() => continue,
                Next::Over => return Ok(Over::Ended),
            };
            if let Some(StreamEvent::Item(logged)) = event.as_deref() {
                (self.next_item, self.drops) = (self.next_item + 1, 0);
                if let Item::TurnStarted { .. } = logged.item {
                    self.presses_in_turn = 0;
                }
            }
            match &event {
                Some(event) => self.follower.show(event),
                None => self.follower.rest(),
            }
            if let Some(over) = self.look_at_signals()? {
                return Ok(over);
            }
            if self.follower.unheard.is_some() {
                // A terminal that was lost may tell by a write before it does by a signal; it is none any more.
                if self.follower.is_on_terminal && !answers_to_a_person() {
                    self.follower.unheard = None;
                    return Ok(Over::HungUp);
                }
                return Ok(Over::Unheard);
            }
            if is_over(&mut self.follower, event.as_deref())? {
                return Ok(Over::Reached);
            }
        }
    }

    /// The pod drops one that does not keep up, as a terminal that was stopped; then it is still there.
    fn is_followed_again(&mut self) -> bool {
        self.drops += 1;
        if self.drops > DROPS_MAX {
            return false;
        }
        for _ in 0..TRIES_MAX {
            std::thread::sleep(LOOK_AGAIN);
            match client::subscribe(&self.address, Some(self.next_item)) {
                Ok(events) => {
                    self.events = events;
                    self.follower.begin_again();
                    return true;
                }
                Err(Error::Peer(refusal)) if refusal.code != ErrorCode::Busy => return false,
                Err(_) if !self.address.socket.exists() => return false,
                Err(_) => {} // busy, or slow: one that was killed has left its socket
            }
        }
        false
    }

    fn look_at_signals(&mut self) -> Result<Option<Over>> {
        if self.presses.has_hung_up.load(Ordering::SeqCst) {
            return Ok(Some(Over::HungUp));
        }
        let presses = self.presses.presses.swap(0, Ordering::SeqCst);
        if presses == 0 {
            return Ok(None);
        }
        self.presses_in_turn += presses;
        let (First::Cancels(again) | First::CancelsOrLeaves(again)) = self.first else {
            return Ok(Some(Over::Interrupted));
        };
        if self.presses_in_turn > 1 {
            return Ok(Some(Over::Interrupted));
        }
        let CancelReply { cancelled } = client::ask(&self.address, None, Method::Cancel)?;
        if !cancelled && matches!(self.first, First::CancelsOrLeaves(_)) {
            return Ok(Some(Over::Interrupted));
        }
        let said = if cancelled { "cancelling the turn" } else { "no turn is running" };
        self.follower.say(&format!("-- {said}; Ctrl-C again {again}"));
        Ok(None)
    }
}
