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
use crate::words::message::{Item, LoggedItem, TurnResult, end_in_words};
use crate::words::protocol::{CancelReply, ErrorCode, Method, Status, StatusReply, StreamEvent};
use crate::words::text::{cut_end, harmless_line};

/// Tool arguments and results are cut at this length on a line.
const LINE_BYTES_MAX: usize = 200;
/// A pod that cannot be followed again is tried so often.
const TRIES_MAX: usize = 5;
/// A stream that ends so often without a single item in between is over.
const DROPS_MAX: usize = 20;
/// How often signals and `is_over` are looked at while nothing comes.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Where the model's text goes while it streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug)]
pub(super) struct Follower {
    style: Style,
    in_line: bool,
    /// Whether live events have told the item that comes next.
    is_told: bool,
    is_on_terminal: bool,
    /// What has been shown of the reply that streams.
    partial: String,
    /// Whether the stream has begun again in the middle of it.
    is_again: bool,
    spinner: Spinner,
    /// A directory that is left out where lines name what lies in it.
    pub(super) within: String,
    /// What the pod is doing, and since when.
    doing: (String, Instant),
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
}

impl Follower {
    /// A follower of this style.
    pub(super) fn new(style: Style) -> Follower {
        Follower {
            style,
            in_line: false,
            is_told: false,
            is_on_terminal: answers_to_a_person(),
            partial: String::new(),
            is_again: false,
            spinner: Spinner::new(matches!(style, Style::Text | Style::Talk)),
            within: String::new(),
            doing: (String::new(), Instant::now()),
            unheard: None,
            last_text: String::new(),
            last_end: None,
        }
    }

    /// Shows one event.
    pub(super) fn show(&mut self, event: &StreamEvent) {
        self.remember(event);
        match self.style {
            Style::Json => self.show_json(event),
            Style::Text | Style::Talk | Style::TextOnly | Style::Show => self.show_plainly(event),
            Style::Quiet => {}
        }
        if let StreamEvent::Item(logged) = event {
            let is_dead = matches!(logged.item, Item::ModelError { .. });
            if is_dead && !self.partial.is_empty() {
                self.end_line();
            }
            if is_dead || matches!(logged.item, Item::Assistant(_) | Item::TurnEnded { .. }) {
                (self.partial, self.is_again) = (String::new(), false);
            }
        }
    }

    fn show_json(&mut self, event: &StreamEvent) {
        let mut line = json_line(event);
        if let StreamEvent::TextDelta { text } = event {
            line = json_line(&StreamEvent::TextDelta { text: self.fresh(text).to_owned() });
        }
        self.answer(&(line + "\n"));
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

    fn remember(&mut self, event: &StreamEvent) {
        if let StreamEvent::Item(logged) = event {
            if let Item::TurnStarted { .. } = logged.item {
                self.last_text.clear();
            }
            if let Some(text) = logged.item.reply_text() {
                text.clone_into(&mut self.last_text);
            } else if let Item::TurnEnded { turn, result, message } = &logged.item {
                self.last_end = Some(TurnEnd { turn: *turn, result: *result, message: message.clone() });
            }
        } else if let StreamEvent::TurnEnded { turn, result, message } = event {
            self.last_end = Some(TurnEnd { turn: *turn, result: *result, message: message.clone() });
        } else if let StreamEvent::Status { status, detail } = event {
            self.does(if *status == Status::Running { detail } else { "" });
        }
    }

    /// Notes what goes on, for the spinner.
    pub(super) fn does(&mut self, what: &str) {
        if self.doing.0 != what {
            self.doing = (what.to_owned(), Instant::now());
        }
    }

    /// While nothing comes: lets the spinner turn, and looks whether anybody still reads.
    fn rest(&mut self) {
        if !self.is_on_terminal && is_unheard(io::stdout().as_fd()) {
            self.unheard.get_or_insert_with(|| io::ErrorKind::BrokenPipe.into());
        }
        let (what, since) = &self.doing;
        if !self.in_line && !what.is_empty() {
            self.spinner.show(&format!("{what}, {} s", since.elapsed().as_secs()));
        }
    }

    fn show_plainly(&mut self, event: &StreamEvent) {
        let without = |text: &str| text.replace(&self.within, "");
        let short = |text: &str| cut_end(&harmless_line(&without(text)), LINE_BYTES_MAX);
        match event {
            StreamEvent::TurnStarted { turn, cause } => {
                self.say(&format!("-- turn {turn} ({cause})"));
            }
            StreamEvent::TextDelta { text } => self.text(text),
            StreamEvent::ToolCall { name, input, .. } => {
                self.say(&format!("-> {name} {}", short(&input.to_string())));
            }
            StreamEvent::ToolResult { ok, text, .. } => {
                let mark = if *ok { "<-" } else { "<- refused:" };
                self.say(&format!("{mark} {}", short(text)));
            }
            StreamEvent::Notification { text } => {
                for line in without(text).lines().filter_map(|line| line.strip_prefix("- ")) {
                    self.say(&format!("** {line}"));
                }
            }
            StreamEvent::Retry { attempt, wait_seconds, reason } => {
                self.say(&format!("-- attempt {attempt} failed, again in {wait_seconds:.1} s: {reason}"));
            }
            StreamEvent::TurnEnded { turn, result, message } => {
                self.say(&format!("-- {}", end_in_words(*turn, *result, message.as_deref())));
            }
            StreamEvent::Compaction { until, .. } => {
                self.say(&format!(
                    "-- a summary stands for the items before {until}; the history keeps them"
                ));
            }
            StreamEvent::Dropped { reason } => self.say(&format!("-- the stream ended: {reason}")),
            StreamEvent::Item(logged) => match &logged.item {
                Item::Input { text, from } => {
                    let from = from.as_ref().map_or("a person".to_owned(), |pod| format!("pod {pod}"));
                    self.say(&format!(">> {from}: {}", short(text)));
                }
                // They come while a reply streams, and no other event tells them.
                Item::Session { .. } | Item::ModelError { .. } | Item::ModelSet { .. } => {}
                item @ (Item::Assistant(_)
                | Item::TurnStarted { .. }
                | Item::Notification { .. }
                | Item::ToolResult { .. }
                | Item::Compaction { .. }
                | Item::TurnEnded { .. }) => self.show_item(item),
            },
            StreamEvent::Status { .. } => {}
        }
        let tells_no_item = matches!(
            event,
            StreamEvent::Item(_)
                | StreamEvent::Status { .. }
                | StreamEvent::Retry { .. }
                | StreamEvent::Dropped { .. }
        );
        self.is_told |= !tells_no_item;
    }

    /// An item of before the subscription has come alone and is shown from itself.
    fn show_item(&mut self, item: &Item) {
        if !self.is_told {
            if let Item::Assistant(message) = item {
                self.text(&message.text);
            }
            StreamEvent::telling(item).iter().for_each(|event| self.show_plainly(event));
        }
        self.end_line();
        self.is_told = false;
    }

    /// What comes next may tell again what was told, or tell by items alone what was not.
    fn begin_again(&mut self) {
        if self.style == Style::Json {
            let reason = "the stream was lost and goes on behind the last item".to_owned();
            self.answer(&format!("{}\n", json_line(&StreamEvent::Dropped { reason })));
        }
        (self.is_told, self.is_again) = (false, !self.partial.is_empty());
    }

    fn answers(&self) -> bool {
        matches!(self.style, Style::Text | Style::TextOnly | Style::Show)
    }

    /// Writes to standard output as long as that works.
    pub(super) fn answer(&mut self, text: &str) {
        self.spinner.clear();
        if self.unheard.is_none() {
            self.unheard = try_answer(text).err();
        }
    }

    fn text(&mut self, text: &str) {
        let text = self.fresh(text);
        if self.answers() {
            self.answer(text);
        } else {
            self.spinner.clear();
            talk(text);
        }
        if !text.is_empty() {
            self.in_line = !text.ends_with('\n');
        }
    }

    /// Ends a line of streaming text, so that what follows begins a new one.
    pub(super) fn end_line(&mut self) {
        self.spinner.clear();
        if std::mem::take(&mut self.in_line) {
            if self.answers() { self.answer("\n") } else { talk("\n") }
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

    /// Says why the last turn did not finish, where no event has said it and no JSON tells it.
    pub(super) fn say_failure(&self) {
        let failed = self.last_end.as_ref().filter(|end| end.result != TurnResult::Finished);
        if let Some(end) = failed.filter(|_| self.style == Style::Quiet) {
            talk_line(&end_in_words(end.turn, end.result, end.message.as_deref()));
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

/// What a lost terminal and Ctrl-C have asked for, counted by the signal thread.
#[derive(Debug, Clone, Default)]
pub(super) struct Presses {
    presses: Arc<AtomicUsize>,
    hang_ups: Arc<AtomicUsize>,
    /// Whether nothing runs and the main thread waits for a line, which a signal does not wake.
    at_prompt: Arc<AtomicBool>,
}

impl Presses {
    /// Begins to count. One that comes while a line is waited for calls `at_prompt`.
    pub(super) fn listen(at_prompt: impl Fn() + Send + 'static) -> Result<Presses> {
        let presses = Presses::default();
        let theirs = presses.clone();
        let count = move |signal| {
            // A polite kill means to leave at once, as the second Ctrl-C does.
            let (counter, count) = match signal {
                EndSignal::HangUp => (&theirs.hang_ups, 1),
                EndSignal::Interrupt => (&theirs.presses, 1),
                EndSignal::Terminate => (&theirs.presses, 2),
            };
            counter.fetch_add(count, Ordering::SeqCst);
            if signal != EndSignal::HangUp && theirs.at_prompt.load(Ordering::SeqCst) {
                at_prompt();
            }
        };
        signal::on_end_signals(count).map_err(|source| Error::io("listen for signals", source))?;
        Ok(presses)
    }
}

/// A pod that a person follows.
#[derive(Debug)]
pub(super) struct Followed {
    /// Where it is.
    pub(super) address: Address,
    /// What has been shown.
    pub(super) follower: Follower,
    /// What `subscribe` answered, and what comes.
    pub(super) events: Subscription,
    /// The same, and no successor of that name.
    this_life: Address,
    /// The number of the next item of the history.
    next_item: u64,
    /// How often the stream has ended since the last item.
    drops: usize,
    first: First,
    presses: Presses,
    presses_seen: usize,
    /// How many had been seen when the latest turn began: each turn has its own first one.
    presses_before: usize,
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
            address: address.clone(),
            this_life: Address { life: Some(life), ..address.clone() },
            follower: Follower::new(style),
            next_item: events.opened.cursor,
            drops: 0,
            events,
            first,
            presses,
            presses_seen: 0,
            presses_before: 0,
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
            if let Some(StreamEvent::Item(_)) = event.as_deref() {
                (self.next_item, self.drops) = (self.next_item + 1, 0);
            }
            match &event {
                Some(event) => self.follower.show(event),
                None => self.follower.rest(),
            }
            let is_start = |logged: &LoggedItem| matches!(logged.item, Item::TurnStarted { .. });
            if matches!(event.as_deref(), Some(StreamEvent::Item(logged)) if is_start(logged)) {
                self.presses_before = self.presses_seen;
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
            match client::subscribe(&self.this_life, Some(self.next_item)) {
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
        if self.presses.hang_ups.load(Ordering::SeqCst) > 0 {
            return Ok(Some(Over::HungUp));
        }
        let presses = self.presses.presses.load(Ordering::SeqCst);
        if presses == self.presses_seen {
            return Ok(None);
        }
        self.presses_seen = presses;
        let (First::Cancels(again) | First::CancelsOrLeaves(again)) = self.first else {
            return Ok(Some(Over::Interrupted));
        };
        if presses > self.presses_before + 1 {
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
