//! One reply of the model as far as it has come, whatever the provider speaks.
//!
//! Pure. The events of both protocols, of a model program and of a script are put together here.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::wire::provider::failure::{message_of_error, status_of_error};
use crate::words::message::{AssistantMessage, Stop, ToolCall, Usage};

/// The key under which arguments that are no JSON object reach the tool, which then says so.
pub const INVALID_ARGUMENTS: &str = "_invalid_arguments";
/// Most tool calls of one reply that are read.
pub const TOOL_CALLS_MAX: usize = 256;

/// How far a reply has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More is to come.
    More,
    /// The reply is whole; whatever follows does not count.
    Complete,
}

/// What is wrong with a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    /// The reply makes no sense; nothing of it counts, and another try may be better.
    Broken(String),
    /// The provider reports an error, as it would by an HTTP status.
    Told {
        /// The status that it stands for.
        status: u16,
        /// The provider's words.
        message: String,
    },
}

impl Trouble {
    pub(super) fn broken(reason: &str) -> Trouble {
        Trouble::Broken(reason.to_owned())
    }

    /// What this error object of a provider says.
    pub(super) fn told(error: &Value) -> Trouble {
        Trouble::Told { status: status_of_error(error), message: message_of_error(error) }
    }
}

/// A tool call as far as it has come.
#[derive(Debug, Default)]
pub(super) struct PartialCall {
    /// Its place in the reply, where the provider gives one.
    pub(super) index: Option<u64>,
    pub(super) id: String,
    pub(super) name: String,
    /// Its arguments as text.
    pub(super) arguments: String,
    /// Arguments that came in one piece and not as text; they count when there is no text.
    pub(super) given: Value,
}

/// A reply that is being put together.
#[derive(Debug, Default)]
pub struct Reply {
    pub(super) text: String,
    pub(super) calls: Vec<PartialCall>,
    /// Reasoning, to be passed back unchanged.
    pub(super) thinking: Vec<Value>,
    /// Blocks under way, by their index.
    pub(super) blocks: Vec<(u64, Value)>,
    pub(super) stop: Option<Stop>,
    pub(super) usage: Usage,
    /// Whether the provider said that the reply is whole.
    pub(super) is_complete: bool,
    counts: BTreeMap<String, u64>,
    streamed: usize,
}

impl Reply {
    /// Adds a call; too many are `Broken`.
    pub(super) fn add_call(&mut self, call: PartialCall) -> Result<(), Trouble> {
        if self.calls.len() >= TOOL_CALLS_MAX {
            return Err(Trouble::broken("the reply has more tool calls than any model makes"));
        }
        self.calls.push(call);
        Ok(())
    }

    /// Takes what a report of tokens says; a later one may leave out what an earlier one said.
    pub(super) fn report(&mut self, usage: &Value) {
        let fields = usage.as_object().into_iter().flatten();
        self.counts.extend(fields.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))));
    }

    /// The count of this name in the reports so far.
    pub(super) fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    /// Passes on the text that has come since the last time.
    pub fn stream(&mut self, on_text: &mut dyn FnMut(&str)) {
        if let Some(new) = self.text.get(self.streamed..).filter(|new| !new.is_empty()) {
            on_text(new);
        }
        self.streamed = self.text.len();
    }

    /// The reply, once it is whole.
    #[must_use]
    pub fn finish(self) -> AssistantMessage {
        let whole = |PartialCall { id, name, arguments, given, .. }: PartialCall| match arguments.trim() {
            "" => ToolCall { id, name, input: input_of_value(given) },
            _ => ToolCall { id, name, input: input_of_text(&arguments) },
        };
        let tool_calls: Vec<ToolCall> = self.calls.into_iter().map(whole).collect();
        let stop = match (self.stop.unwrap_or(Stop::Done), tool_calls.is_empty()) {
            (Stop::Done, false) => Stop::ToolUse,
            (Stop::ToolUse, true) => Stop::Done,
            (stop, _) => stop,
        };
        AssistantMessage { text: self.text, tool_calls, thinking: self.thinking, stop, usage: self.usage }
    }
}

/// The JSON of one event.
pub(super) fn event_of(data: &str) -> Result<Value, Trouble> {
    serde_json::from_str(data)
        .map_err(|error| Trouble::Broken(format!("the stream has an event that is no JSON: {error}")))
}

/// What is at this JSON pointer, null when nothing is.
pub(super) fn at<'v>(value: &'v Value, pointer: &str) -> &'v Value {
    value.pointer(pointer).unwrap_or(&Value::Null)
}

/// The text of a field, empty when there is none.
pub(super) fn text_of<'v>(value: &'v Value, name: &str) -> &'v str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Arguments as text: always an object, also when the model wrote something else.
fn input_of_text(text: &str) -> Value {
    let value = match serde_json::from_str(text) {
        // Some local models write the object as a string once more.
        Ok(Value::String(inner)) => serde_json::from_str(&inner).ok(),
        other => other.ok(),
    };
    match value {
        _ if text.trim().is_empty() || text.trim() == "null" => json!({}),
        Some(object @ Value::Object(_)) => object,
        _ => json!({ INVALID_ARGUMENTS: text }),
    }
}

/// Arguments as a value: an object stays, anything else is read as text.
fn input_of_value(value: Value) -> Value {
    if value.is_object() { value } else { input_of_text(&value.to_string()) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::wire::provider::sse::Framer;

    /// Runs a stream through framing and parsing; also checks that what was streamed is the text.
    pub(crate) fn play(
        take: impl Fn(&mut Reply, &str) -> Result<Progress, Trouble>,
        stream: &str,
    ) -> Result<Option<AssistantMessage>, Trouble> {
        let (mut framer, mut reply, mut heard) = (Framer::default(), Reply::default(), String::new());
        let mut events = framer.push(stream.as_bytes()).unwrap();
        events.extend(framer.finish());
        for event in events {
            let progress = take(&mut reply, &event)?;
            reply.stream(&mut |text| heard.push_str(text));
            if progress == Progress::Complete {
                break;
            }
        }
        if !reply.is_complete {
            return Ok(None);
        }
        let message = reply.finish();
        assert_eq!(message.text, heard);
        Ok(Some(message))
    }

    #[test]
    fn arguments_are_always_an_object() {
        let check = |text: &str, expected: Value| assert_eq!(input_of_text(text), expected);
        check("", json!({}));
        check("  ", json!({}));
        check("null", json!({}));
        check("{\"a\":1}", json!({"a": 1}));
        check("\"{\\\"a\\\":1}\"", json!({"a": 1}));
        check("{\"a\":", json!({"_invalid_arguments": "{\"a\":"}));
        check("[1]", json!({"_invalid_arguments": "[1]"}));
        check("\"words\"", json!({"_invalid_arguments": "\"words\""}));
        check(&"[".repeat(100_000), json!({"_invalid_arguments": "[".repeat(100_000)}));
        assert_eq!(input_of_value(json!({"a": 1})), json!({"a": 1}));
        assert_eq!(input_of_value(Value::Null), json!({}));
        assert_eq!(input_of_value(json!(3)), json!({"_invalid_arguments": "3"}));
    }
}
