//! The conversation of one pod as lines: what is kept of it, folded, searched and scrolled. Pure.
//!
//! Rows are counted once per line and width, in `settle`; a frame wraps only the lines that it shows.

use std::collections::VecDeque;
use std::ops::Range;

use ratatui::text::Line;

use crate::doors::tui::columns::{fit, shown, wrap};
use crate::doors::tui::paint::{Paint, Tone};
use crate::words::message::{Item, ToolCall, end_in_words};
use crate::words::protocol::StreamEvent;
use crate::words::text::{cut_end, harmless_line};

/// Lines that are kept; older ones are in the pod's history.
pub const LINES_MAX: usize = 20_000;
/// Bytes of text that are kept.
const BYTES_MAX: usize = 16 << 20;
/// A line that does not end is broken here, so that what streams is not wrapped again and again.
const LINE_BYTES_MAX: usize = 4096;
/// The arguments of a call and the first words of its result are cut at this length on its line.
const CALL_BYTES_MAX: usize = 60;
/// How far back the call of a result is looked for, in lines.
const CALL_LINES_BACK: usize = 1_000;

/// One line, or one tool call with what is folded away below it.
#[derive(Debug)]
struct Entry {
    tone: Tone,
    text: String,
    /// What unfolds: a call's arguments and result. Empty for what is no call.
    inner: String,
    /// The id of a call that has no result yet.
    open_call: Option<String>,
    is_folded: bool,
    rows: usize,
}

impl Entry {
    fn shown(&self, width: usize) -> String {
        match (self.inner.is_empty(), self.is_folded) {
            (true, _) => self.text.clone(),
            (false, true) => fit(&format!("+ {}", self.text), width),
            (false, false) => format!("- {}\n{}", self.text, self.inner),
        }
    }

    fn bytes(&self) -> usize {
        self.text.len() + self.inner.len() + std::mem::size_of::<Entry>()
    }
}

/// What a jump goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The beginning of a turn.
    Turn,
    /// A tool call.
    Call,
    /// A line with the text that is searched.
    Hit,
}

/// What is kept of a pod's conversation, and which part of it is looked at.
///
/// A line is named by its number since the beginning, which stays when older ones are dropped.
#[derive(Debug, Default)]
pub struct Conversation {
    entries: VecDeque<Entry>,
    dropped: usize,
    bytes: usize,
    rows: usize,
    /// The first line whose rows are not counted yet.
    stale: usize,
    /// The first line of the reply that is streaming; its logged item replaces it.
    streaming: Option<usize>,
    width: usize,
    height: usize,
    /// The first row shown; `None` follows the end.
    top: Option<usize>,
    marked: Option<usize>,
    unfolds: bool,
    /// What is searched, in lower case.
    pub needle: String,
}

impl Conversation {
    /// Takes one event of the pod's stream. The record is made of items; of the rest only what no item tells.
    pub fn add(&mut self, event: &StreamEvent) {
        match event {
            StreamEvent::TextDelta { text } => self.stream(text),
            StreamEvent::Item(logged) => self.add_item(&logged.item),
            StreamEvent::Retry { attempt, wait_seconds, reason } => {
                self.forget_streaming();
                let text = format!("attempt {attempt} failed, again in {wait_seconds:.1} s: {reason}");
                self.push_text(Tone::Bad, &text);
            }
            StreamEvent::TurnStarted { .. }
            | StreamEvent::ToolCall { .. }
            | StreamEvent::ToolResult { .. }
            | StreamEvent::Notification { .. }
            | StreamEvent::TurnEnded { .. }
            | StreamEvent::Compaction { .. }
            | StreamEvent::Status { .. }
            | StreamEvent::Dropped { .. } => {}
        }
    }

    fn add_item(&mut self, item: &Item) {
        let (tone, text) = match item {
            Item::Session { pod_id, program, directory, .. } => {
                (Tone::Quiet, format!("== session of pod {pod_id} in {directory} (insomnia {program})"))
            }
            Item::TurnStarted { turn, cause } => (Tone::Turn, format!("-- turn {turn} ({cause})")),
            Item::Input { text, from: None } => (Tone::Person, format!("> {text}")),
            Item::Input { text, from: Some(pod) } => (Tone::Person, format!("> pod {pod}: {text}")),
            Item::Notification { text } => {
                for line in text.lines().filter_map(|line| line.strip_prefix("- ")) {
                    self.push_text(Tone::Notice, &format!("** {line}"));
                }
                return;
            }
            Item::Assistant(message) => {
                self.forget_streaming();
                if !message.text.is_empty() {
                    self.push_text(Tone::Plain, &message.text);
                }
                return message.tool_calls.iter().for_each(|call| self.push_call(call));
            }
            Item::ToolResult { id, name, ok, text } => return self.add_result(id, name, *ok, text),
            Item::ModelError { message } => (Tone::Bad, format!("the model could not be asked: {message}")),
            Item::Compaction { until, .. } => {
                let what = format!("a summary stands for the items before {until}");
                (Tone::Quiet, format!("-- {what}; the history keeps them"))
            }
            Item::ModelSet { model } => (Tone::Quiet, format!("-- the model is {model} from here on")),
            Item::TurnEnded { turn, result, message } => {
                self.streaming = None; // a reply that was cut off stays as far as it came
                (Tone::Quiet, format!("-- {}", end_in_words(*turn, *result, message.as_deref())))
            }
        };
        self.push_text(tone, &text);
    }

    fn push_call(&mut self, call: &ToolCall) {
        let arguments = cut_end(&harmless_line(&call.input.to_string()), CALL_BYTES_MAX);
        let inner = serde_json::to_string_pretty(&call.input).unwrap_or_default();
        self.push(Entry {
            tone: Tone::Call,
            text: format!("{} {arguments}", harmless_line(&call.name)),
            inner: shown(&inner),
            open_call: Some(call.id.clone()),
            is_folded: !self.unfolds,
            rows: 0,
        });
    }

    fn add_result(&mut self, id: &str, name: &str, ok: bool, text: &str) {
        let recent = self.entries.iter().rev().take(CALL_LINES_BACK);
        let back = recent.enumerate().find(|(_, entry)| entry.open_call.as_deref() == Some(id));
        let Some((back, _)) = back else {
            let word = if ok { "answered" } else { "failed" };
            return self.push_text(Tone::Quiet, &format!("{name} {word}: {}", cut_end(text, CALL_BYTES_MAX)));
        };
        let at = self.entries.len() - 1 - back;
        let Some(entry) = self.entries.get_mut(at) else { return };
        let before = entry.bytes();
        entry.open_call = None;
        if !ok {
            entry.tone = Tone::Bad;
        }
        let word = if ok { "" } else { "failed: " };
        entry.text.push_str(&format!(" -> {word}{}", cut_end(&harmless_line(text), CALL_BYTES_MAX)));
        entry.inner.push_str(&format!("\n-> {word}{}", shown(text)));
        self.bytes += entry.bytes() - before;
        self.stale = self.stale.min(self.dropped + at);
    }

    /// Adds a piece of the reply that streams.
    fn stream(&mut self, text: &str) {
        for (at, piece) in shown(text).split('\n').enumerate() {
            let number = self.dropped + self.entries.len();
            let is_full = |entry: &Entry| entry.text.len() + piece.len() > LINE_BYTES_MAX;
            if at > 0 || self.streaming.is_none() || self.entries.back().is_none_or(is_full) {
                self.streaming.get_or_insert(number);
                self.push_lines(Tone::Plain, piece);
            } else if let Some(entry) = self.entries.back_mut() {
                entry.text.push_str(piece);
                self.bytes += piece.len();
                self.stale = self.stale.min(number - 1);
            }
        }
    }

    /// Takes away the reply that streams: it is logged, tried again, or comes once more from its beginning.
    pub fn forget_streaming(&mut self) {
        self.take_streaming();
    }

    fn take_streaming(&mut self) -> VecDeque<Entry> {
        let Some(first) = self.streaming.take() else { return VecDeque::new() };
        let at = first.saturating_sub(self.dropped).min(self.entries.len());
        let taken = self.entries.split_off(at);
        self.bytes -= taken.iter().map(Entry::bytes).sum::<usize>();
        self.rows -= taken.iter().map(|entry| entry.rows).sum::<usize>();
        self.stale = self.stale.min(self.dropped + at);
        taken
    }

    /// Adds a text of several lines, before the reply that streams.
    fn push_text(&mut self, tone: Tone, text: &str) {
        let streaming = self.take_streaming();
        self.push_lines(tone, &shown(text));
        if !streaming.is_empty() {
            self.streaming = Some(self.dropped + self.entries.len());
            streaming.into_iter().for_each(|entry| self.push(Entry { rows: 0, ..entry }));
        }
    }

    fn push_lines(&mut self, tone: Tone, text: &str) {
        for mut line in text.split('\n') {
            while line.len() > LINE_BYTES_MAX {
                let end = (0..=LINE_BYTES_MAX).rfind(|&at| line.is_char_boundary(at)).unwrap_or(line.len());
                let (head, rest) = line.split_at(end);
                self.push_line(tone, head);
                line = rest;
            }
            self.push_line(tone, line);
        }
    }

    fn push_line(&mut self, tone: Tone, text: &str) {
        let (inner, open_call) = (String::new(), None);
        self.push(Entry { tone, text: text.to_owned(), inner, open_call, is_folded: false, rows: 0 });
    }

    fn push(&mut self, entry: Entry) {
        self.bytes += entry.bytes();
        self.entries.push_back(entry);
        while self.entries.len() > LINES_MAX || (self.bytes > BYTES_MAX && self.entries.len() > 1) {
            let Some(oldest) = self.entries.pop_front() else { return };
            self.bytes -= oldest.bytes();
            self.rows -= oldest.rows;
            self.dropped += 1;
            self.top = self.top.map(|top| top.saturating_sub(oldest.rows));
        }
    }

    /// Counts the rows of what has changed, for a window of this size. To be called before a frame.
    pub fn settle(&mut self, width: usize, height: usize) {
        if self.width != width {
            self.stale = 0;
        }
        (self.width, self.height) = (width.max(1), height);
        for entry in self.entries.iter_mut().skip(self.stale.saturating_sub(self.dropped)) {
            let rows = wrap(&entry.shown(self.width), self.width).len();
            self.rows = self.rows + rows - entry.rows;
            entry.rows = rows;
        }
        self.stale = self.dropped + self.entries.len();
        self.scroll(0);
    }

    fn last_top(&self) -> usize {
        self.rows.saturating_sub(self.height)
    }

    /// Moves the window; at the end it follows what comes.
    pub fn scroll(&mut self, rows: isize) {
        let top = self.top.unwrap_or(self.last_top()).saturating_add_signed(rows);
        self.top = Some(top).filter(|&top| top < self.last_top());
    }

    /// Moves the window by so many of its heights.
    pub fn scroll_pages(&mut self, pages: isize) {
        self.scroll(pages * isize::try_from(self.height.saturating_sub(1)).unwrap_or(1));
    }

    /// Whether the window follows the end.
    pub fn follows(&self) -> bool {
        self.top.is_none()
    }

    /// How many lines are kept.
    pub fn lines(&self) -> usize {
        self.entries.len()
    }

    fn is_hit(&self, entry: &Entry) -> bool {
        let has = |text: &str| text.to_lowercase().contains(&self.needle);
        !self.needle.is_empty() && (has(&entry.text) || has(&entry.inner))
    }

    /// Which hit is marked, counted from the first, and how many there are.
    pub fn hits(&self) -> (usize, usize) {
        let end = self.marked.map_or(0, |marked| (marked + 1).saturating_sub(self.dropped));
        let count = |lines| self.entries.iter().take(lines).filter(|entry| self.is_hit(entry)).count();
        (count(end), count(self.entries.len()))
    }

    /// The lines in the window.
    fn seen(&self) -> Range<usize> {
        let top = self.top.unwrap_or(self.last_top());
        let ends = self.entries.iter().scan(0, |row, entry| {
            *row += entry.rows;
            Some(*row)
        });
        let start = ends.clone().take_while(|end| *end <= top).count();
        let begin_after = ends.take_while(|end| *end < top + self.height).count();
        start..(begin_after + 1).min(self.entries.len())
    }

    /// Marks the next or previous line of this kind, from the mark where that is seen, else from what is seen;
    /// shows it, and tells whether there is one.
    pub fn jump(&mut self, target: Target, forward: bool) -> bool {
        self.settle(self.width, self.height);
        let is_target = |entry: &Entry| match target {
            Target::Turn => entry.tone == Tone::Turn,
            Target::Call => !entry.inner.is_empty(),
            Target::Hit => self.is_hit(entry),
        };
        let seen = self.seen();
        let from = self.marked.and_then(|marked| marked.checked_sub(self.dropped));
        let from = from.filter(|from| seen.contains(from));
        let found = if forward {
            let first = from.map_or(seen.start, |from| from + 1);
            self.entries.iter().skip(first).position(is_target).map(|at| first + at)
        } else {
            let end = from.unwrap_or(seen.end);
            self.entries.iter().take(end).rposition(is_target)
        };
        if let Some(at) = found {
            self.marked = Some(self.dropped + at);
            if target == Target::Hit && self.entries.get(at).is_some_and(|entry| entry.is_folded) {
                self.fold_at(at);
            }
            self.show(at);
        }
        found.is_some()
    }

    fn show(&mut self, at: usize) {
        self.settle(self.width, self.height);
        let row: usize = self.entries.iter().take(at).map(|entry| entry.rows).sum();
        let top = self.top.unwrap_or(self.last_top());
        if row < top || row >= top + self.height {
            self.top = Some(row.saturating_sub(self.height / 3));
            self.scroll(0);
        }
    }

    /// Folds or unfolds the marked tool call, else the last one.
    pub fn fold(&mut self) {
        let marked = self.marked.map(|marked| marked.saturating_sub(self.dropped));
        let is_call = |at: &usize| self.entries.get(*at).is_some_and(|entry| !entry.inner.is_empty());
        let last = || self.entries.iter().rposition(|entry| !entry.inner.is_empty());
        if let Some(at) = marked.filter(is_call).or_else(last) {
            self.fold_at(at);
            self.marked = Some(self.dropped + at);
            self.show(at);
        }
    }

    fn fold_at(&mut self, at: usize) {
        if let Some(entry) = self.entries.get_mut(at) {
            entry.is_folded = !entry.is_folded;
            self.stale = self.stale.min(self.dropped + at);
        }
    }

    /// Folds or unfolds all tool calls, also those to come.
    pub fn fold_all(&mut self) {
        self.unfolds = !self.unfolds;
        for entry in self.entries.iter_mut().filter(|entry| !entry.inner.is_empty()) {
            entry.is_folded = !self.unfolds;
        }
        self.stale = 0;
    }

    /// The rows of the window.
    pub fn view(&self, paint: Paint) -> Vec<Line<'static>> {
        let mut skipped = self.top.unwrap_or(self.last_top());
        let mut lines: Vec<Line<'static>> = Vec::with_capacity(self.height);
        for (at, entry) in self.entries.iter().enumerate() {
            if lines.len() >= self.height {
                break;
            }
            if skipped >= entry.rows {
                skipped -= entry.rows;
                continue;
            }
            let is_marked = self.marked == Some(self.dropped + at);
            let style = paint.of(if is_marked { Tone::Marked } else { entry.tone });
            let text = entry.shown(self.width);
            let rows = wrap(&text, self.width).into_iter().skip(skipped).take(self.height - lines.len());
            lines.extend(rows.map(|row| Line::styled(row.to_owned(), style)));
            skipped = 0;
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::message::{AssistantMessage, Cause, LoggedItem, Stop, Usage};

    fn item(item: Item) -> StreamEvent {
        StreamEvent::Item(LoggedItem { at: 0, item })
    }

    fn said(text: &str, tool_calls: Vec<ToolCall>) -> StreamEvent {
        let (thinking, stop, usage) = (Vec::new(), Stop::Done, Usage::default());
        item(Item::Assistant(AssistantMessage { text: text.into(), tool_calls, thinking, stop, usage }))
    }

    fn delta(text: &str) -> StreamEvent {
        StreamEvent::TextDelta { text: text.into() }
    }

    fn rows(conversation: &mut Conversation, width: usize, height: usize) -> Vec<String> {
        conversation.settle(width, height);
        conversation.view(Paint { has_colours: false }).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_streams_is_replaced_by_its_item_and_stays_when_it_is_cut_off() {
        let mut conversation = Conversation::default();
        ["日本", "語\nzwei", "\n"].iter().for_each(|text| conversation.add(&delta(text)));
        assert_eq!(rows(&mut conversation, 20, 5), ["日本語", "zwei", ""]);
        conversation.add(&item(Item::Input { text: "between".into(), from: None }));
        assert_eq!(rows(&mut conversation, 20, 5), ["> between", "日本語", "zwei", ""]);
        conversation.add(&said("日本語\nzwei", vec![]));
        assert_eq!(rows(&mut conversation, 20, 5), ["> between", "日本語", "zwei"]);
        conversation.add(&delta("half"));
        let ended =
            Item::TurnEnded { turn: 1, result: crate::words::message::TurnResult::Cancelled, message: None };
        conversation.add(&item(ended));
        conversation.add(&delta("next"));
        assert_eq!(rows(&mut conversation, 20, 3), ["half", "-- turn 1 cancelled", "next"]);
        conversation.forget_streaming();
        assert_eq!(rows(&mut conversation, 20, 2), ["half", "-- turn 1 cancelled"]);
    }

    #[test]
    fn calls_are_folded_with_their_results() {
        let mut conversation = Conversation::default();
        let call = |id: &str| ToolCall {
            id: id.into(),
            name: "Read".into(),
            input: serde_json::json!({"path": id}),
        };
        conversation.add(&said("", vec![call("a"), call("b")]));
        for (id, ok) in [("b", false), ("a", true)] {
            let (id, name, text) = (id.to_owned(), "Read".to_owned(), "one\x1b\ntwo".to_owned());
            conversation.add(&item(Item::ToolResult { id, name, ok, text }));
        }
        let folded = [r#"+ Read {"path":"a"} -> one\x1b two"#, r#"+ Read {"path":"b"} -> failed: one\x1…"#];
        assert_eq!(rows(&mut conversation, 38, 9), folded);
        assert!(conversation.jump(Target::Call, false) && conversation.jump(Target::Call, false));
        conversation.fold();
        let open = ["{", "  \"path\": \"a\"", "}", "-> one\\x1b", "two"];
        assert_eq!(rows(&mut conversation, 38, 9)[1..6], open);
        conversation.fold_all();
        conversation.fold_all();
        assert_eq!(rows(&mut conversation, 38, 9), folded);
    }

    #[test]
    fn it_follows_the_end_until_it_is_scrolled_and_jumps_between_turns_and_hits() {
        let mut conversation = Conversation::default();
        for turn in 1..=50 {
            conversation.add(&item(Item::TurnStarted { turn, cause: Cause::Run }));
            conversation.add(&said(&format!("answer {turn}\nテキスト {turn}"), vec![]));
        }
        assert_eq!(rows(&mut conversation, 40, 2), ["answer 50", "テキスト 50"]);
        conversation.scroll(-3);
        conversation.add(&said("news", vec![]));
        assert_eq!(rows(&mut conversation, 40, 2), ["answer 49", "テキスト 49"]);
        assert!(!conversation.follows() && conversation.jump(Target::Turn, false));
        assert_eq!(
            rows(&mut conversation, 40, 1),
            ["-- turn 49 (run)"],
            "from what is seen, not from the end"
        );
        rows(&mut conversation, 40, 2);
        conversation.scroll(-60);
        assert!(conversation.jump(Target::Turn, true));
        let row = rows(&mut conversation, 40, 2).concat();
        assert!(row.contains("-- turn 29") || row.contains("-- turn 30"), "{row}");
        conversation.scroll(isize::MAX);
        conversation.needle = "テキスト 7".into();
        assert!(conversation.jump(Target::Hit, false) && conversation.hits() == (1, 1));
        assert!(!conversation.jump(Target::Hit, false));
        assert!(rows(&mut conversation, 40, 3).contains(&"テキスト 7".to_owned()));
        conversation.scroll(isize::MAX);
        assert_eq!(rows(&mut conversation, 40, 1), ["news"]);
    }

    #[test]
    fn what_is_kept_is_bounded_and_a_scrolled_window_stays() {
        let mut conversation = Conversation::default();
        for number in 0..LINES_MAX {
            conversation.add(&said(&format!("line {number}"), vec![]));
        }
        rows(&mut conversation, 40, 2);
        conversation.scroll(-100);
        let before = rows(&mut conversation, 40, 2);
        for number in 0..5_000 {
            conversation.add(&said(&format!("more {number}"), vec![]));
        }
        assert_eq!(rows(&mut conversation, 40, 2), before);
        assert_eq!((conversation.lines(), conversation.rows), (LINES_MAX, LINES_MAX));
        conversation.add(&said(&"日".repeat(BYTES_MAX / 3 + LINE_BYTES_MAX), vec![]));
        conversation.add(&delta(&"x".repeat(3 * LINE_BYTES_MAX)));
        rows(&mut conversation, 40, 2);
        let bytes: usize = conversation.entries.iter().map(Entry::bytes).sum();
        let counted: usize = conversation.entries.iter().map(|entry| entry.rows).sum();
        assert_eq!((bytes, counted), (conversation.bytes, conversation.rows));
        assert!(
            bytes <= BYTES_MAX && conversation.entries.iter().all(|entry| entry.text.len() <= LINE_BYTES_MAX)
        );
    }
}
