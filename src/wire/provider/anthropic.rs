//! Anthropic Messages: our words to a request body, its events to a reply.
//!
//! Pure. Source: the public reference of the Messages API, version 2023-06-01, and its page on streaming.

use serde_json::{Map, Value, json};

use crate::wire::provider::conversation::{
    Message, TOOL_CALLS_MAX, clean_name, input_of_text, messages, settle_stop,
};
use crate::wire::provider::failure::{message_of_error, status_of_error};
use crate::wire::provider::{ModelRequest, Progress, Trouble};
use crate::words::message::{AssistantMessage, Stop, ToolCall, Usage};

/// The model when the settings name none.
pub const DEFAULT_MODEL: &str = "claude-sonnet-4-5";
/// The address when the settings name none.
pub const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";
/// The version of the protocol that is spoken here.
pub const VERSION: &str = "2023-06-01";
/// Longest name and id that the API takes.
const NAME_BYTES_MAX: usize = 64;

/// Where to post, for a base address with or without a path.
#[must_use]
pub fn endpoint(base_url: &str) -> String {
    let (base, query) = base_url.split_at(base_url.find('?').unwrap_or(base_url.len()));
    let base = base.trim_end_matches('/');
    let rest = if base.ends_with("/messages") {
        ""
    } else if base.ends_with("/v1") {
        "/messages"
    } else {
        "/v1/messages"
    };
    format!("{base}{rest}{query}")
}

/// The body of a request.
///
/// Tools, instruction and the conversation up to its last block are marked for the provider's cache: all of it
/// comes again, unchanged, in the next request.
#[must_use]
pub fn request_body(model: &str, max_tokens: u64, request: &ModelRequest<'_>) -> Value {
    let mut list: Vec<Value> = messages(request.items).iter().map(message).collect();
    let last_block = list.last_mut().and_then(|last| last.get_mut("content")?.as_array_mut()?.last_mut());
    if let Some(block) = last_block.and_then(Value::as_object_mut) {
        block.insert("cache_control".to_owned(), json!({"type": "ephemeral"}));
    }
    let mut body = json!({ "model": model, "max_tokens": max_tokens, "stream": true, "messages": list });
    let Some(fields) = body.as_object_mut() else { return body };
    if !request.system.trim().is_empty() {
        let system =
            json!([{"type": "text", "text": request.system, "cache_control": {"type": "ephemeral"}}]);
        fields.insert("system".to_owned(), system);
    }
    if !request.tools.is_empty() {
        let tools = request.tools.iter().map(|tool| {
            json!({"name": tool.name, "description": tool.description, "input_schema": tool.input_schema})
        });
        fields.insert("tools".to_owned(), tools.collect());
    }
    body
}

fn message(message: &Message<'_>) -> Value {
    let mut content: Vec<Value> = Vec::new();
    match message {
        Message::User { answers, texts } => {
            for answer in answers {
                let id = clean_name(answer.id, NAME_BYTES_MAX);
                let mut block = json!({"type": "tool_result", "tool_use_id": id, "content": answer.text});
                if let Some(fields) = block.as_object_mut().filter(|_| !answer.ok) {
                    fields.insert("is_error".to_owned(), true.into());
                }
                content.push(block);
            }
            content.extend(texts.iter().map(|text| json!({"type": "text", "text": text})));
            json!({"role": "user", "content": content})
        }
        Message::Assistant(replies) => {
            for reply in replies {
                // Reasoning of another provider stays in the log: this one would refuse it.
                let kind = |block: &Value| block.get("type").and_then(Value::as_str).map(str::to_owned);
                let ours =
                    |block: &&Value| matches!(kind(block).as_deref(), Some("thinking" | "redacted_thinking"));
                content.extend(reply.thinking.iter().filter(ours).cloned());
                if !reply.text.trim().is_empty() {
                    content.push(json!({"type": "text", "text": reply.text}));
                }
                content.extend(reply.tool_calls.iter().map(|call| {
                    let (id, name) =
                        (clean_name(&call.id, NAME_BYTES_MAX), clean_name(&call.name, NAME_BYTES_MAX));
                    json!({"type": "tool_use", "id": id, "name": name, "input": call.input})
                }));
            }
            json!({"role": "assistant", "content": content})
        }
    }
}

/// One block of a reply as far as it has come.
#[derive(Debug)]
enum Block {
    Text,
    /// `thinking` or `redacted_thinking`, kept as it is to be passed back.
    Thinking(Map<String, Value>),
    Tool {
        id: String,
        name: String,
        given: Value,
        json: String,
    },
    /// A kind that we did not ask for.
    Other,
}

/// A reply that is being put together from events.
#[derive(Debug, Default)]
pub struct Reply {
    text: String,
    blocks: Vec<(u64, Block)>,
    stop: Option<Stop>,
    usage: RawUsage,
    is_complete: bool,
}

#[derive(Debug, Default)]
struct RawUsage {
    fresh: u64,
    written_to_cache: u64,
    read_from_cache: u64,
    output: u64,
}

impl RawUsage {
    /// Takes what this report says; a later report may leave out what an earlier one said.
    fn update(&mut self, usage: &Value) {
        let mut set = |name: &str, field: fn(&mut RawUsage) -> &mut u64| {
            if let Some(count) = usage.get(name).and_then(Value::as_u64) {
                *field(self) = count;
            }
        };
        set("input_tokens", |usage| &mut usage.fresh);
        set("cache_creation_input_tokens", |usage| &mut usage.written_to_cache);
        set("cache_read_input_tokens", |usage| &mut usage.read_from_cache);
        set("output_tokens", |usage| &mut usage.output);
    }
}

fn text_of<'v>(value: &'v Value, name: &str) -> &'v str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}

impl Reply {
    /// Takes the data of one event.
    ///
    /// # Errors
    /// When it is an error report, or nothing that this protocol knows.
    pub fn take(&mut self, data: &str, on_text: &mut dyn FnMut(&str)) -> Result<Progress, Trouble> {
        let event: Value = serde_json::from_str(data)
            .map_err(|error| Trouble::Broken(format!("the stream has an event that is no JSON: {error}")))?;
        let index = event.get("index").and_then(Value::as_u64).unwrap_or(0);
        match text_of(&event, "type") {
            "message_start" => {
                if let Some(usage) = event.pointer("/message/usage") {
                    self.usage.update(usage);
                }
            }
            "content_block_start" => {
                let block = event.get("content_block").unwrap_or(&Value::Null);
                self.start_block(index, block, on_text)?;
            }
            "content_block_delta" => {
                self.add_to_block(index, event.get("delta").unwrap_or(&Value::Null), on_text)?;
            }
            "message_delta" => {
                if let Some(reason) = event.pointer("/delta/stop_reason").and_then(Value::as_str) {
                    self.stop = Some(stop_of(reason));
                }
                if let Some(usage) = event.get("usage") {
                    self.usage.update(usage);
                }
            }
            "message_stop" => {
                self.is_complete = true;
                return Ok(Progress::Complete);
            }
            "error" => return Err(trouble_of(&event)),
            "message" => return self.take_whole(&event, on_text),
            "" if event.get("error").is_some() => return Err(trouble_of(&event)),
            _ => {} // ping, content_block_stop, and what newer versions add
        }
        Ok(Progress::More)
    }

    /// The reply of a server that does not stream.
    fn take_whole(&mut self, message: &Value, on_text: &mut dyn FnMut(&str)) -> Result<Progress, Trouble> {
        for (index, block) in
            (0..).zip(message.get("content").and_then(Value::as_array).into_iter().flatten())
        {
            self.start_block(index, block, on_text)?;
        }
        self.stop = message.get("stop_reason").and_then(Value::as_str).map(stop_of);
        self.usage.update(message.get("usage").unwrap_or(&Value::Null));
        self.is_complete = true;
        Ok(Progress::Complete)
    }

    fn start_block(
        &mut self,
        index: u64,
        block: &Value,
        on_text: &mut dyn FnMut(&str),
    ) -> Result<(), Trouble> {
        let new = match text_of(block, "type") {
            "text" => {
                if !self.text.is_empty() {
                    self.add_text("\n\n", on_text);
                }
                self.add_text(text_of(block, "text"), on_text);
                Block::Text
            }
            "thinking" | "redacted_thinking" => {
                Block::Thinking(block.as_object().cloned().unwrap_or_default())
            }
            "tool_use" => Block::Tool {
                id: text_of(block, "id").to_owned(),
                name: text_of(block, "name").to_owned(),
                given: block.get("input").cloned().unwrap_or_default(),
                json: String::new(),
            },
            _ => Block::Other,
        };
        if self.blocks.len() >= 2 * TOOL_CALLS_MAX {
            return Err(Trouble::Broken("the reply has more blocks than any model writes".to_owned()));
        }
        self.blocks.push((index, new));
        Ok(())
    }

    fn add_to_block(
        &mut self,
        index: u64,
        delta: &Value,
        on_text: &mut dyn FnMut(&str),
    ) -> Result<(), Trouble> {
        let kind = text_of(delta, "type");
        if kind == "text_delta" {
            self.add_text(text_of(delta, "text"), on_text);
            return Ok(());
        }
        let block = self.blocks.iter_mut().rev().find(|(at, _)| *at == index).map(|(_, block)| block);
        match (block, kind) {
            (Some(Block::Tool { json, .. }), "input_json_delta") => {
                json.push_str(text_of(delta, "partial_json"));
            }
            (Some(Block::Thinking(fields)), "thinking_delta") => append(fields, "thinking", delta),
            (Some(Block::Thinking(fields)), "signature_delta") => append(fields, "signature", delta),
            (None, _) => {
                return Err(Trouble::Broken(format!(
                    "the stream goes on with block {index}, which never began"
                )));
            }
            (Some(_), _) => {} // citations and the like
        }
        Ok(())
    }

    fn add_text(&mut self, text: &str, on_text: &mut dyn FnMut(&str)) {
        if !text.is_empty() {
            self.text.push_str(text);
            on_text(text);
        }
    }

    /// Whether the provider said that the reply is whole.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The reply, once it is whole.
    #[must_use]
    pub fn finish(self) -> AssistantMessage {
        let mut tool_calls = Vec::new();
        let mut thinking = Vec::new();
        for (_, block) in self.blocks {
            match block {
                Block::Text | Block::Other => {}
                Block::Thinking(fields) => thinking.push(Value::Object(fields)),
                Block::Tool { id, name, given, json } => {
                    // A server that does not stream arguments gives them at the start.
                    let text = if json.trim().is_empty() { given.to_string() } else { json };
                    tool_calls.push(ToolCall { id, name, input: input_of_text(&text) });
                }
            }
        }
        let usage = self.usage;
        AssistantMessage {
            text: self.text,
            stop: settle_stop(self.stop.unwrap_or(Stop::Done), &tool_calls),
            tool_calls,
            thinking,
            usage: Usage {
                input_tokens: usage
                    .fresh
                    .saturating_add(usage.written_to_cache)
                    .saturating_add(usage.read_from_cache),
                output_tokens: usage.output,
                cached_tokens: usage.read_from_cache,
            },
        }
    }
}

fn append(fields: &mut Map<String, Value>, name: &str, delta: &Value) {
    match fields.get_mut(name) {
        Some(Value::String(before)) => before.push_str(text_of(delta, name)),
        Some(_) | None => drop(fields.insert(name.to_owned(), text_of(delta, name).into())),
    }
}

fn stop_of(reason: &str) -> Stop {
    match reason {
        "tool_use" => Stop::ToolUse,
        "max_tokens" | "model_context_window_exceeded" => Stop::Length,
        "refusal" => Stop::Refusal,
        _ => Stop::Done, // end_turn, stop_sequence, pause_turn
    }
}

fn trouble_of(event: &Value) -> Trouble {
    let error = event.get("error").unwrap_or(event);
    Trouble::Told { status: status_of_error(error), message: message_of_error(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::provider::ToolSpec;
    use crate::wire::provider::conversation::tests::{input, reply, result};
    use crate::wire::provider::sse::Framer;
    use crate::words::message::Item;

    #[test]
    fn the_address_may_have_a_path_or_none() {
        let check = |base: &str, expected: &str| assert_eq!(endpoint(base), expected);
        check("https://api.anthropic.com", "https://api.anthropic.com/v1/messages");
        check("https://api.anthropic.com/", "https://api.anthropic.com/v1/messages");
        check("http://h:1/v1", "http://h:1/v1/messages");
        check("http://h:1/v1/", "http://h:1/v1/messages");
        check("http://h/anthropic", "http://h/anthropic/v1/messages");
        check("http://h/odd/messages", "http://h/odd/messages");
        check("http://h/v1?beta=true", "http://h/v1/messages?beta=true");
    }

    fn body(items: &[Item], tools: &[ToolSpec]) -> Value {
        request_body("m", 100, &ModelRequest { system: "be good", items, tools, number: 0 })
    }

    #[test]
    fn a_request_has_its_parts_in_the_form_of_the_reference() {
        let tools = [ToolSpec {
            name: "ReadFile",
            description: "reads".into(),
            input_schema: json!({"type": "object"}),
        }];
        let items = [input("hello"), reply("I read", &["c/1"]), result("c/1"), input("and?")];
        let expected = json!({
            "model": "m", "max_tokens": 100, "stream": true,
            "system": [{"type": "text", "text": "be good", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "ReadFile", "description": "reads", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "I read"},
                    {"type": "tool_use", "id": "c_1", "name": "ReadFile", "input": {"path": "a"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c_1", "content": "r-c/1"},
                    {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}]},
            ]
        });
        assert_eq!(body(&items, &tools), expected);
    }

    #[test]
    fn reasoning_is_passed_back_unchanged_and_only_ours() {
        let ours = json!({"type": "thinking", "thinking": "hm", "signature": "s=="});
        let Item::Assistant(mut message) = reply("", &["1"]) else { panic!() };
        message.thinking = vec![ours.clone(), json!({"type": "reasoning", "text": "x"})];
        let body = body(&[input("a"), Item::Assistant(message)], &[]);
        let content = body.pointer("/messages/1/content").unwrap().as_array().unwrap();
        assert_eq!((content.len(), &content[0]), (2, &ours));
        let answer = body.pointer("/messages/2/content/0").unwrap();
        assert_eq!(answer.get("is_error"), Some(&json!(true)), "a call without a result is answered");
        assert_eq!(body.get("tools"), None);
    }

    /// Runs a recorded stream through framing and parsing; also checks that what was streamed is the text.
    fn play(stream: &str) -> Result<Option<AssistantMessage>, Trouble> {
        let (mut framer, mut reply, mut heard) = (Framer::default(), Reply::default(), String::new());
        let mut events = framer.push(stream.as_bytes()).unwrap();
        events.extend(framer.finish());
        for event in events {
            if reply.take(&event.data, &mut |text| heard.push_str(text))? == Progress::Complete {
                break;
            }
        }
        if !reply.is_complete() {
            return Ok(None);
        }
        let message = reply.finish();
        assert_eq!(message.text, heard);
        Ok(Some(message))
    }

    #[test]
    fn a_streamed_reply_with_tools_and_reasoning_is_put_together() {
        let message = play(include_str!("../../../tests/replies/anthropic-tools.sse")).unwrap().unwrap();
        assert_eq!(message.text, "I'll look at both files.");
        let calls: Vec<_> = message
            .tool_calls
            .iter()
            .map(|c| (c.id.as_str(), c.name.as_str(), c.input.to_string()))
            .collect();
        assert_eq!(
            calls,
            [
                ("toolu_01A", "ReadFile", r#"{"path":"src/lib.rs"}"#.to_owned()),
                ("toolu_01B", "ListFiles", "{}".to_owned()),
            ]
        );
        assert_eq!(
            message.thinking,
            [
                json!({"type": "thinking", "thinking": "Two files, then.", "signature": "EqoBCkgIARABGAIi=="}),
                json!({"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix="}),
            ]
        );
        assert_eq!(message.stop, Stop::ToolUse);
        assert_eq!(message.usage, Usage { input_tokens: 2612, output_tokens: 89, cached_tokens: 2000 });
    }

    #[test]
    fn short_streams_end_as_they_should() {
        let text = |text: &str| {
            format!(
                "data: {{\"type\":\"content_block_delta\",\"index\":0,\"delta\":{{\"type\":\"text_delta\",\"text\":\"{text}\"}}}}\n\n"
            )
        };
        let start = "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":1}}}\n\n\
                     data: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n";
        let stop = |reason: &str| {
            format!(
                "data: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":\"{reason}\"}},\"usage\":{{\"output_tokens\":5}}}}\n\n\
                 data: {{\"type\":\"message_stop\"}}\n\n"
            )
        };
        let check = |reason: &str, expected: Stop| {
            let stream = format!("{start}{}{}", text("hi"), stop(reason));
            let message = play(&stream).unwrap().unwrap();
            assert_eq!((message.text.as_str(), message.stop), ("hi", expected));
        };
        check("end_turn", Stop::Done);
        check("stop_sequence", Stop::Done);
        check("max_tokens", Stop::Length);
        check("refusal", Stop::Refusal);
        check("tool_use", Stop::Done); // it says so, but calls none
        let half = format!("{start}{}", text("hal"));
        assert_eq!(play(&half), Ok(None), "a stream that ends early is no reply");
        assert_eq!(play(""), Ok(None));
        let two = format!(
            "{start}{}data: {{\"type\":\"content_block_start\",\"index\":1,\"content_block\":{{\"type\":\"text\",\"text\":\"\"}}}}\n\n{}{}",
            text("one"),
            text("two"),
            stop("end_turn")
        );
        assert_eq!(play(&two).unwrap().unwrap().text, "one\n\ntwo");
    }

    #[test]
    fn bad_events_are_trouble_and_never_a_panic() {
        let check = |data: &str, expected: &str| {
            let told = format!("{:?}", play(&format!("data: {data}\n\n")));
            assert!(told.contains(expected), "{data}: {told}");
        };
        check("{\"type\":\"content_block_de", "Broken");
        check("not json", "Broken");
        check(
            r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#,
            "Told { status: 529",
        );
        check(r#"{"error":{"type":"rate_limit_error","message":"x"}}"#, "Told { status: 429");
        check(
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 1"}}"#,
            "Told { status: 400, message: \"prompt is too long: 1 (invalid_request_error)\"",
        );
        check(
            r#"{"type":"content_block_delta","index":4,"delta":{"type":"input_json_delta","partial_json":"x"}}"#,
            "never began",
        );
        for odd in ["null", "[]", "3", "{}", r#"{"type":7}"#, r#"{"type":"ping"}"#, r#"{"type":"new"}"#] {
            check(odd, "Ok(None)");
        }
    }

    #[test]
    fn a_reply_that_is_not_streamed_is_understood() {
        let whole = json!({"type": "message", "role": "assistant", "stop_reason": "tool_use",
            "content": [{"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t", "name": "Shell", "input": {"command": "ls"}}],
            "usage": {"input_tokens": 3, "output_tokens": 4}});
        let message = play(&format!("data: {whole}\n\n")).unwrap().unwrap();
        assert_eq!((message.text.as_str(), message.stop), ("so", Stop::ToolUse));
        assert_eq!(message.tool_calls.first().unwrap().input, json!({"command": "ls"}));
    }

    #[test]
    fn arguments_that_are_cut_off_are_kept_for_the_tool_to_refuse() {
        let stream = r#"data: {"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"Shell","input":{}}}

data: {"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{\"command\": \"l"}}

data: {"type":"message_delta","delta":{"stop_reason":"max_tokens"}}

data: {"type":"message_stop"}

"#;
        let message = play(stream).unwrap().unwrap();
        assert_eq!(message.stop, Stop::Length);
        assert_eq!(
            message.tool_calls.first().unwrap().input,
            json!({"_invalid_arguments": "{\"command\": \"l"})
        );
    }
}
