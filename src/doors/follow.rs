//! Showing a pod's events as they come, in plain lines or as JSON.

use std::io;

use crate::doors::terminal::{talk, talk_line, try_answer};
use crate::words::message::{Item, TurnResult};
use crate::words::protocol::StreamEvent;
use crate::words::text::{cut_end, harmless, harmless_line};

/// Tool arguments and results are cut at this length on a line.
const LINE_BYTES_MAX: usize = 200;

/// Where the model's text goes while it streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Events as JSON lines on standard output.
    Json,
    /// Text on standard output, the rest on standard error.
    Text,
    /// Everything on standard error; the caller prints the answer.
    Talk,
    /// Nothing.
    Quiet,
}

/// Shows events in one style, and remembers where the last line stands.
#[derive(Debug)]
pub struct Follower {
    style: Style,
    in_line: bool,
    /// Why standard output takes no more; nothing is written there from then on.
    pub unheard: Option<io::Error>,
    /// The text of the model's last reply that had any.
    pub last_text: String,
    /// How the last turn ended.
    pub last_end: Option<TurnEnd>,
}

/// How a turn ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnEnd {
    /// Its number.
    pub turn: u64,
    /// How it ended.
    pub result: TurnResult,
    /// Why, where it did not finish.
    pub message: Option<String>,
}

impl Follower {
    /// A follower of this style.
    #[must_use]
    pub fn new(style: Style) -> Follower {
        Follower { style, in_line: false, unheard: None, last_text: String::new(), last_end: None }
    }

    /// Shows one event.
    pub fn show(&mut self, event: &StreamEvent) {
        self.remember(event);
        match self.style {
            Style::Json => self.answer(&event.to_line()),
            Style::Text | Style::Talk => self.show_plainly(event),
            Style::Quiet => {}
        }
    }

    fn remember(&mut self, event: &StreamEvent) {
        match event {
            StreamEvent::Item(logged) => {
                if let Item::Assistant(message) = &logged.item {
                    if !message.text.is_empty() {
                        self.last_text.clone_from(&message.text);
                    }
                }
            }
            StreamEvent::TurnStarted { .. } => self.last_text.clear(),
            StreamEvent::TurnEnded { turn, result, message } => {
                self.last_end = Some(TurnEnd { turn: *turn, result: *result, message: message.clone() });
            }
            StreamEvent::TextDelta { .. }
            | StreamEvent::ToolCall { .. }
            | StreamEvent::ToolResult { .. }
            | StreamEvent::Notification { .. }
            | StreamEvent::Retry { .. }
            | StreamEvent::Compaction { .. }
            | StreamEvent::Status { .. }
            | StreamEvent::Dropped { .. } => {}
        }
    }

    fn show_plainly(&mut self, event: &StreamEvent) {
        match event {
            StreamEvent::TurnStarted { turn, cause } => {
                let cause = format!("{cause:?}").to_lowercase();
                self.line(&format!("-- turn {turn} ({cause})"));
            }
            StreamEvent::TextDelta { text } => self.text(text),
            StreamEvent::ToolCall { name, input, .. } => {
                self.line(&format!("-> {} {}", name, cut_end(&input.to_string(), LINE_BYTES_MAX)));
            }
            StreamEvent::ToolResult { ok, text, .. } => {
                let mark = if *ok { "<-" } else { "<- refused:" };
                self.line(&format!("{mark} {}", cut_end(&harmless_line(text), LINE_BYTES_MAX)));
            }
            StreamEvent::Notification { text } => {
                for line in text.lines().filter(|line| line.starts_with("- ")) {
                    self.line(&format!("** {}", line.trim_start_matches("- ")));
                }
            }
            StreamEvent::Retry { attempt, wait_seconds, reason } => {
                self.line(&format!("-- attempt {attempt} failed, again in {wait_seconds:.1} s: {reason}"));
            }
            StreamEvent::TurnEnded { turn, result, message } => {
                let result = format!("{result:?}").to_lowercase();
                let why = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
                self.line(&format!("-- turn {turn} {result}{why}"));
            }
            StreamEvent::Compaction { until, .. } => {
                self.line(&format!(
                    "-- a summary stands for the items before {until}; the history keeps them"
                ));
            }
            StreamEvent::Dropped { reason } => self.line(&format!("-- the stream ended: {reason}")),
            StreamEvent::Item(logged) => match &logged.item {
                Item::Assistant(_) => self.end_line(),
                Item::Input { text, from } => {
                    let from = from.as_ref().map_or("a person".to_owned(), |pod| format!("pod {pod}"));
                    self.line(&format!(">> {from}: {}", cut_end(&harmless_line(text), LINE_BYTES_MAX)));
                }
                Item::Session { .. }
                | Item::TurnStarted { .. }
                | Item::Notification { .. }
                | Item::ToolResult { .. }
                | Item::ModelError { .. }
                | Item::Compaction { .. }
                | Item::ModelSet { .. }
                | Item::TurnEnded { .. } => {}
            },
            StreamEvent::Status { .. } => {}
        }
    }

    /// Writes to standard output as long as that works.
    pub fn answer(&mut self, text: &str) {
        if self.unheard.is_none() {
            self.unheard = try_answer(text).err();
        }
    }

    fn text(&mut self, text: &str) {
        let shown = harmless(text);
        if self.style == Style::Text {
            self.answer(&shown);
        } else {
            talk(&shown);
        }
        self.in_line = !shown.ends_with('\n');
    }

    /// Ends a line of streaming text, so that what follows begins a new one.
    pub fn end_line(&mut self) {
        if std::mem::take(&mut self.in_line) {
            if self.style == Style::Text { self.answer("\n") } else { talk("\n") }
        }
    }

    fn line(&mut self, text: &str) {
        self.end_line();
        talk_line(text);
    }

    /// Says something that is no event, unless nothing is to be said.
    pub fn say(&mut self, text: &str) {
        if self.style != Style::Quiet {
            self.line(text);
        }
    }
}
