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
/// Deepest nesting of arguments and reasoning that is kept: serde_json reads 128 levels, and the history and the
/// answers that hold them add some of their own.
const NESTING_MAX: usize = 100;

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
            return Err(Trouble::Broken("the reply has more tool calls than any model makes".into()));
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
    pub fn finish(self) -> AssistantMessage {
        let whole = |PartialCall { id, name, arguments, given, .. }: PartialCall| {
            let input =
                if arguments.trim().is_empty() { input_of_value(given) } else { input_of_text(&arguments) };
            let is_shallow = is_within(&input, NESTING_MAX);
            let input = if is_shallow { input } else { json!({ INVALID_ARGUMENTS: input.to_string() }) };
            ToolCall { id, name, input }
        };
        let tool_calls: Vec<ToolCall> = self.calls.into_iter().map(whole).collect();
        let stop = match (self.stop.unwrap_or(Stop::Done), tool_calls.is_empty()) {
            (Stop::Done, false) => Stop::ToolUse,
            (Stop::ToolUse, true) => Stop::Done,
            (stop, _) => stop,
        };
        let thinking = self.thinking.into_iter().filter(|block| is_within(block, NESTING_MAX)).collect();
        AssistantMessage { text: self.text, tool_calls, thinking, stop, usage: self.usage }
    }
}

/// The JSON of one event, unless it is an error report of any server.
pub(super) fn event_of(data: &str) -> Result<Value, Trouble> {
    let event: Value = serde_json::from_str(data)
        .map_err(|error| Trouble::Broken(format!("the stream has an event that is no JSON: {error}")))?;
    let error = event.get("error").filter(|error| !error.is_null());
    if error.is_some() || [text_of(&event, "type"), text_of(&event, "object")].contains(&"error") {
        return Err(Trouble::told(error.unwrap_or(&event)));
    }
    Ok(event)
}

/// What is at this JSON pointer, null when nothing is.
pub(super) fn at<'v>(value: &'v Value, pointer: &str) -> &'v Value {
    value.pointer(pointer).unwrap_or(&Value::Null)
}

/// The text of a field, empty when there is none.
pub(super) fn text_of<'v>(value: &'v Value, name: &str) -> &'v str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Whether no value in this one lies deeper than so many levels.
fn is_within(value: &Value, levels: usize) -> bool {
    let within = |value: &Value| levels > 0 && is_within(value, levels - 1);
    match value {
        Value::Array(items) => items.iter().all(within),
        Value::Object(fields) => fields.values().all(within),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    }
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
    use crate::wire::provider::{anthropic, openai};

    type Take = fn(&mut Reply, &str) -> Result<Progress, Trouble>;

    /// Runs a stream, which comes in pieces of this size, through framing and parsing; also checks that what was
    /// streamed is the text.
    fn play_pieces(take: Take, stream: &[u8], size: usize) -> Result<Option<AssistantMessage>, Trouble> {
        let (mut framer, mut reply, mut heard) = (Framer::default(), Reply::default(), String::new());
        let mut events = Vec::new();
        stream.chunks(size).for_each(|piece| events.extend(framer.push(piece).unwrap()));
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

    pub(crate) fn play(take: Take, stream: &str) -> Result<Option<AssistantMessage>, Trouble> {
        play_pieces(take, stream.as_bytes(), stream.len().max(1))
    }

    /// `text | calls | stop, input+output/cached tokens | reasoning`, for short rows.
    fn sketch(played: Result<Option<AssistantMessage>, Trouble>) -> String {
        let message = match played {
            Ok(Some(message)) => message,
            Ok(None) => return "cut off".to_owned(),
            Err(Trouble::Broken(reason)) => return format!("broken: {reason}"),
            Err(Trouble::Told { status, message }) => return format!("{status}: {message}"),
        };
        let AssistantMessage {
            text,
            tool_calls,
            thinking,
            stop,
            usage: Usage { input_tokens, output_tokens, cached_tokens },
        } = message;
        let calls = tool_calls.iter().map(|call| format!("{} {} {}", call.id, call.name, call.input));
        let thinking: Vec<_> = thinking.iter().map(Value::to_string).collect();
        [
            text.as_str(),
            &calls.collect::<Vec<_>>().join("; "),
            &format!("{stop:?}, {input_tokens}+{output_tokens}/{cached_tokens}"),
            &thinking.join("; "),
        ]
        .join(" | ")
    }

    /// Written by us from the public documentation of each server's API, and from what its users report.
    #[test]
    fn every_recorded_reply_is_read_as_its_server_means_it() {
        let place = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/replies");
        let mut unread: Vec<_> =
            std::fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().path()).collect();
        let mut check = |name: &str, expected: &str| {
            let path = place.join(format!("{name}.sse"));
            let stream = std::fs::read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
            let take = if name.starts_with("anthropic-") { anthropic::take } else { openai::take };
            for size in [1, 7, 64, stream.len()] {
                let told = sketch(play_pieces(take, &stream, size));
                let is_same = if expected.ends_with("...") {
                    told.starts_with(expected.trim_end_matches("..."))
                } else {
                    told == expected
                };
                assert!(is_same, "{name} in pieces of {size}: {told}");
            }
            unread.retain(|other| *other != path);
        };
        check("anthropic-arguments-at-start", r#" | toolu_1 Shell {"command":"ls"} | ToolUse, 10+5/0 | "#);
        check(
            "anthropic-calls-interleaved",
            r#" | toolu_1 ReadFile {"path":"a"}; toolu_2 ReadFile {"path":"b"} | ToolUse, 10+5/0 | "#,
        );
        check("anthropic-context-window", "And so |  | Length, 10+5/0 | ");
        check("anthropic-crlf", "line |  | Done, 10+5/0 | ");
        check("anthropic-cut", "cut off");
        check(
            "anthropic-max-tokens",
            r#" | toolu_1 WriteFile {"_invalid_arguments":"{\"path\": \"a\", \"con"} | Length, 10+5/0 | "#,
        );
        check("anthropic-newer", "See. |  | Done, 10+5/0 | ");
        check("anthropic-overloaded", "529: Overloaded (overloaded_error)");
        check("anthropic-pause-turn", "So far. |  | Done, 10+5/0 | ");
        check("anthropic-refusal", "I can |  | Refusal, 10+5/0 | ");
        check("anthropic-text", "Hello, 日本. |  | Done, 60+7/20 | ");
        check(
            "anthropic-thinking-between",
            r#"I look. | toolu_1 ReadFile {"path":"a"} | ToolUse, 10+5/0 | {"signature":"s1==","thinking":"First.","type":"thinking"}; {"text":"I look.","type":"text"}; {"signature":"s2==","thinking":"Then.","type":"thinking"}; {"type":"tool_use"}"#,
        );
        check(
            "anthropic-too-long",
            "400: prompt is too long: 210000 tokens > 200000 maximum (invalid_request_error)",
        );
        check(
            "anthropic-tools",
            r#"I'll look at both files. | toolu_01A ReadFile {"path":"src/lib.rs"}; toolu_01B ListFiles {} | ToolUse, 2612+89/2000 | {"signature":"EqoBCkgIARABGAIi==","thinking":"Two files, then.","type":"thinking"}; {"data":"EmwKAhgBEgy3va3pzix=","type":"redacted_thinking"}"#,
        );
        check("anthropic-two-texts", "one\n\ntwo |  | Done, 10+5/0 | ");
        check("anthropic-unknown-event", "hi |  | Done, 10+5/0 | ");
        check("openai-content-filter", "Take |  | Refusal, 0+0/0 | ");
        check("openai-crlf", "line |  | Done, 0+0/0 | ");
        check("openai-cut", "cut off");
        check(
            "openai-cut-arguments",
            r#" | call_a WriteFile {"_invalid_arguments":"{\"path\":\"a\",\"con"} | Length, 0+0/0 | "#,
        );
        check("openai-error", "500: The server had an error (server_error)");
        check("openai-later-choice", "ours |  | Done, 0+0/0 | ");
        check("openai-length", "And so |  | Length, 9+4/0 | ");
        check("openai-no-done", "Whole. |  | Done, 0+0/0 | ");
        check("openai-no-reason", "broken: the stream ended without saying why the model stopped");
        check(
            "openai-parallel",
            r#" | call_a ReadFile {"path":"a"}; call_b ReadFile {"path":"b"} | ToolUse, 0+0/0 | "#,
        );
        check("openai-refusal", "I cannot do that. |  | Refusal, 9+4/0 | ");
        check("openai-text", "Hello, 日本. |  | Done, 9+4/6 | ");
        check(
            "openai-tools",
            r#"Let me see. | call_a1 ReadFile {"path":"a.txt"}; call_b2 ListFiles {} | ToolUse, 82+17/64 | "#,
        );
        check("azure-content-filter", "Take |  | Refusal, 0+0/0 | ");
        check("azure-text", "Hi |  | Done, 9+4/0 | ");
        check("lax-argument-string", r#" | 1 ReadFile {"path":"a"} | ToolUse, 0+0/0 | "#);
        check("lax-arguments-object", r#" | 1 ReadFile {"path":"a"} | ToolUse, 0+0/0 | "#);
        check("lax-content-parts", "part |  | Done, 0+0/0 | ");
        check("lax-half-json", "broken: the stream has an event that is no JSON...");
        check("lax-no-index", r#" | 1 ReadFile {"path":"a"}; 2 ListFiles {} | ToolUse, 0+0/0 | "#);
        check("lax-one-chunk", "so | 1 ListFiles {} | ToolUse, 9+4/0 | ");
        check("lax-same-index", r#" | 1 ReadFile {"path":"a"}; 2 ListFiles {} | ToolUse, 0+0/0 | "#);
        check("litellm-error", "529: litellm.InternalServerError: AnthropicException - Overloaded (529)");
        check("litellm-null-arguments", " | toolu_1 ListFiles {} | ToolUse, 0+0/0 | ");
        check(
            "litellm-thinking",
            r#" | toolu_1 ReadFile {"path":"a"} | ToolUse, 0+0/0 | {"thinking_blocks":..."#,
        );
        check("litellm-tools", r#"I look. | toolu_1 ReadFile {"path":"a"} | ToolUse, 0+0/0 | "#);
        check(
            "llamacpp-error",
            "400: the request exceeds the available context size, try increasing it (exceed_context_size_error)",
        );
        check("llamacpp-reasoning", "42 |  | Done, 9+4/0 | ");
        check("llamacpp-tools", r#" | kq3 ReadFile {"path":"a"} | ToolUse, 0+0/0 | "#);
        check("ollama-no-ids", r#" |  ReadFile {"path":"a"};  ReadFile {"path":"b"} | ToolUse, 0+0/0 | "#);
        check(
            "ollama-tools",
            r#" | call_x1 ReadFile {"path":"a"}; call_x2 ListFiles {} | ToolUse, 9+4/0 | "#,
        );
        check("openrouter-error", "502: Provider disconnected");
        check("openrouter-error-word", "500: Provider disconnected unexpectedly (server_error)");
        check("openrouter-finish-error", "broken: the server behind the provider failed in mid-reply");
        check(
            "openrouter-reasoning",
            r#" | toolu_1 ReadFile {"path":"a"} | ToolUse, 9+4/0 | {"reasoning_details":..."#,
        );
        check("openrouter-text", "Hi |  | Done, 9+4/2 | ");
        check("vllm-error", "400: This model's maximum context length is 8192 tokens. (BadRequestError)");
        check("vllm-repeated-names", r#" | chatcmpl-tool-1 ReadFile {"path":"a"} | ToolUse, 0+0/0 | "#);
        check("vllm-tools", r#" | chatcmpl-tool-1 ReadFile {"path":"a"} | ToolUse, 9+4/0 | "#);
        assert_eq!(unread, Vec::<std::path::PathBuf>::new(), "files without a row");
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

    #[test]
    fn what_is_kept_of_a_reply_can_be_read_wherever_it_is_written() {
        let nested = |levels: usize| format!("{{\"a\":{}{}}}", "[".repeat(levels), "]".repeat(levels));
        let finish = |levels: usize| {
            let mut reply = Reply::default();
            reply.calls.push(PartialCall { arguments: nested(levels), ..PartialCall::default() });
            reply.thinking.push(serde_json::from_str(&nested(levels)).unwrap());
            reply.finish()
        };
        let kept = finish(NESTING_MAX);
        assert_eq!((kept.tool_calls[0].input.to_string(), kept.thinking.len()), (nested(NESTING_MAX), 1));
        let refused = finish(NESTING_MAX + 1);
        assert_eq!(refused.tool_calls[0].input, json!({"_invalid_arguments": nested(NESTING_MAX + 1)}));
        assert!(refused.thinking.is_empty());
    }
}
