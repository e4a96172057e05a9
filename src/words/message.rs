//! The conversation in our own words: what is logged, sent to people, and translated at a provider's edge.
//!
//! Pure. `history.jsonl` holds one `LoggedItem` a line; `get_history` and the `item` event send the same.

use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::words::identity::{PodId, PodName};
use crate::words::limits::MAX_PAGE_BYTES;
use crate::words::scope::Rule;
use crate::words::text::cut_begin;

/// Why a turn began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Somebody sent input.
    Run,
    /// A notice woke the idle pod.
    Wake,
    /// A failed, cancelled or interrupted turn goes on.
    Resume,
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnResult {
    /// The model was done.
    Finished,
    /// The model could not be asked any more.
    Failed,
    /// Somebody cancelled it, or the pod was stopped.
    Cancelled,
    /// It reached the limit of model requests.
    Limit,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

impl fmt::Display for TurnResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// How a turn ended, in words: `turn 3 failed: why`.
pub fn end_in_words(turn: u64, result: TurnResult, message: Option<&str>) -> String {
    message.map_or_else(|| format!("turn {turn} {result}"), |why| format!("turn {turn} {result}: {why}"))
}

/// Why the model stopped speaking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// It was done.
    Done,
    /// It wants tools to run.
    ToolUse,
    /// It reached the limit of tokens of one reply.
    Length,
    /// It refused, or a content filter did.
    Refusal,
}

/// Tokens as the provider counted them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Tokens read, cached ones included.
    pub input_tokens: u64,
    /// Tokens written.
    pub output_tokens: u64,
    /// Of the tokens read, those that came from the provider's cache.
    pub cached_tokens: u64,
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Usage) {
        self.input_tokens = self.input_tokens.saturating_add(other.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(other.output_tokens);
        self.cached_tokens = self.cached_tokens.saturating_add(other.cached_tokens);
    }
}

/// One tool call of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Ties the call to its result; unique in the conversation.
    pub id: String,
    /// Which tool.
    pub name: String,
    /// Its arguments: always an object, `{}` when the model gave none.
    pub input: Value,
}

/// One reply of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AssistantMessage {
    /// What it said.
    pub text: String,
    /// The tools it wants run, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Reasoning blocks as the provider sent them, to be passed back unchanged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub thinking: Vec<Value>,
    /// Why it stopped.
    pub stop: Stop,
    /// Tokens of this request.
    #[serde(default)]
    pub usage: Usage,
}

/// One line of the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Item {
    /// The first line of a session, and one more each time it is continued.
    Session {
        /// The pod whose history this is.
        pod_id: PodId,
        /// The name it was asked to have.
        name: PodName,
        /// Version of the program that wrote it.
        program: String,
        /// Its working directory.
        directory: String,
        /// Its own rules at that time.
        scope: Vec<Rule>,
    },
    /// A turn began.
    TurnStarted {
        /// Its number, from 1.
        turn: u64,
        /// Why it began.
        cause: Cause,
    },
    /// Text from a person or another pod.
    Input {
        /// The text.
        text: String,
        /// The pod that sent it; absent for a person.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<PodId>,
    },
    /// A block of notices, marked as from the system.
    Notification {
        /// The whole block as the model reads it.
        text: String,
    },
    /// A reply of the model.
    Assistant(AssistantMessage),
    /// What a tool answered.
    ToolResult {
        /// The call it answers.
        id: String,
        /// Which tool.
        name: String,
        /// Whether it did what was asked.
        ok: bool,
        /// The answer, or the sentence that says what went wrong.
        text: String,
    },
    /// A request to the model failed; tried again or not.
    ModelError {
        /// What went wrong.
        message: String,
    },
    /// A summary that the model is sent from now on in place of old items.
    Compaction {
        /// What it made of them.
        summary: String,
        /// The number of the first item that it does not stand for. The first and the latest input stay beside it.
        until: u64,
        /// Tokens of the request for it.
        #[serde(default)]
        usage: Usage,
    },
    /// Another model is asked from now on.
    ModelSet {
        /// Its name.
        model: String,
    },
    /// A turn ended.
    TurnEnded {
        /// Its number.
        turn: u64,
        /// How it ended.
        result: TurnResult,
        /// Why, where it did not finish.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message: Option<String>,
    },
}

impl Item {
    /// What the model has said, where this is a reply with a text.
    pub fn reply_text(&self) -> Option<&str> {
        let Item::Assistant(message) = self else { return None };
        Some(message.text.as_str()).filter(|text| !text.is_empty())
    }
}

/// An item and when it was logged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoggedItem {
    /// Milliseconds since 1970.
    pub at: u64,
    /// The item itself.
    #[serde(flatten)]
    pub item: Item,
}

/// What a session's items say about the pod, kept up to date item by item so that no answer reads the log.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Summary {
    /// Number of the running or last turn; 0 before the first.
    pub turn: u64,
    /// The assistant's text in that turn so far, its replies joined by a blank line; of a long one the end.
    pub last_response: String,
    /// Tokens of all requests.
    pub usage: Usage,
    /// Requests to the model so far, the failed ones and those for summaries included.
    pub requests: u64,
    /// The model that was set last, if one was.
    pub model: Option<String>,
    /// Texts from people and pods that have reached the conversation.
    pub inputs: u64,
    /// How the last turn ended; `None` before the first end and while a turn runs.
    pub last_result: Option<TurnResult>,
}

impl Summary {
    /// Takes one more item into account.
    pub fn add(&mut self, item: &Item) {
        match item {
            Item::TurnStarted { turn, .. } => {
                self.turn = *turn;
                self.last_response.clear();
                self.last_result = None;
            }
            Item::Assistant(message) => {
                self.requests += 1;
                self.usage += message.usage;
                if !message.text.is_empty() {
                    if !self.last_response.is_empty() {
                        self.last_response.push_str("\n\n");
                    }
                    self.last_response.push_str(&message.text);
                    if self.last_response.len() > 2 * MAX_PAGE_BYTES {
                        self.last_response = cut_begin(&self.last_response, MAX_PAGE_BYTES);
                    }
                }
            }
            Item::ModelError { .. } => self.requests += 1,
            Item::Compaction { usage, .. } => {
                self.requests += 1;
                self.usage += *usage;
            }
            Item::ModelSet { model } => self.model = Some(model.clone()),
            Item::TurnEnded { result, .. } => self.last_result = Some(*result),
            Item::Input { .. } => self.inputs += 1,
            Item::Session { .. } | Item::Notification { .. } | Item::ToolResult { .. } => {}
        }
    }
}

/// The tool calls that have no result yet, oldest first.
pub fn open_calls(items: &[Item]) -> Vec<ToolCall> {
    let mut open: Vec<&ToolCall> = Vec::new();
    for item in items {
        if let Item::Assistant(message) = item {
            open.extend(&message.tool_calls);
        } else if let Item::ToolResult { id, .. } = item {
            open.retain(|call| call.id != *id);
        }
    }
    open.into_iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One item of each kind, as README documents them.
    fn samples() -> Vec<Item> {
        let call =
            ToolCall { id: "c1".into(), name: "ReadFile".into(), input: serde_json::json!({"path": "a"}) };
        vec![
            Item::Session {
                pod_id: PodId::new("main").unwrap(),
                name: PodName::new("main").unwrap(),
                program: "0.1.0".into(),
                directory: "/w".into(),
                scope: vec![],
            },
            Item::TurnStarted { turn: 1, cause: Cause::Run },
            Item::Input { text: "do it".into(), from: None },
            Item::Notification { text: "<notices/>".into() },
            Item::Assistant(AssistantMessage {
                text: "I read".into(),
                tool_calls: vec![call],
                thinking: vec![],
                stop: Stop::ToolUse,
                usage: Usage { input_tokens: 3, output_tokens: 2, cached_tokens: 1 },
            }),
            Item::ToolResult { id: "c1".into(), name: "ReadFile".into(), ok: true, text: "x".into() },
            Item::ModelError { message: "overloaded".into() },
            Item::Compaction {
                summary: "a is read".into(),
                until: 4,
                usage: Usage { input_tokens: 5, output_tokens: 4, cached_tokens: 0 },
            },
            Item::ModelSet { model: "other".into() },
            Item::TurnEnded { turn: 1, result: TurnResult::Finished, message: None },
        ]
    }

    #[test]
    fn every_item_survives_a_round_trip_as_one_line() {
        for item in samples() {
            let logged = LoggedItem { at: 5, item };
            let line = serde_json::to_string(&logged).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<LoggedItem>(&line).unwrap(), logged);
        }
    }

    #[test]
    fn the_summary_follows_the_items() {
        let mut summary = Summary::default();
        samples().iter().for_each(|item| summary.add(item));
        assert_eq!((summary.turn, summary.requests, summary.model.as_deref()), (1, 3, Some("other")));
        assert_eq!(summary.usage, Usage { input_tokens: 8, output_tokens: 6, cached_tokens: 1 });
        assert_eq!(summary.last_response, "I read");
        assert_eq!(summary.last_result, Some(TurnResult::Finished));
    }

    #[test]
    fn the_text_of_a_turn_without_end_is_bounded_and_says_so() {
        let mut summary = Summary::default();
        for n in 0..3000 {
            let Item::Assistant(message) = samples().remove(4) else { panic!() };
            let text = format!("{n}: {}", "日".repeat(300));
            summary.add(&Item::Assistant(AssistantMessage { text, ..message }));
            assert!(summary.last_response.len() < 3 * MAX_PAGE_BYTES);
        }
        assert!(summary.last_response.starts_with("[the beginning is left out]\n日"));
        assert!(summary.last_response.contains("\n\n2999: 日"));
    }

    #[test]
    fn a_call_without_a_result_is_open() {
        let items = samples();
        assert_eq!(open_calls(items.get(..5).unwrap()).len(), 1);
        assert!(open_calls(&items).is_empty());
    }
}
