//! OpenAI Chat Completions: our words to a request body, its chunks to a reply.
//!
//! Pure. Source: the public reference of the API; where servers that copy it differ (Ollama, llama.cpp, vLLM,
//! LiteLLM, OpenRouter, Azure, Gemini), the laxer reading is taken.

use serde_json::{Value, json};

use crate::wire::provider::conversation::{
    Message, TOOL_CALLS_MAX, clean_name, input_of_text, input_of_value, messages, settle_stop,
};
use crate::wire::provider::failure::{message_of_error, status_of_error};
use crate::wire::provider::{ModelRequest, Progress, Trouble};
use crate::words::message::{AssistantMessage, Stop, ToolCall, Usage};

/// The model when the settings name none.
pub const DEFAULT_MODEL: &str = "gpt-5-mini";
/// The address when the settings name none.
pub const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
/// Longest name of a tool that the API takes.
const NAME_BYTES_MAX: usize = 64;
/// Longest id of a call that the API takes.
const ID_BYTES_MAX: usize = 40;

/// How the limit of a reply's tokens is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenLimit {
    /// As `max_completion_tokens`: OpenAI and Azure, whose newer models refuse the other one.
    Completion(u64),
    /// As `max_tokens`, which every other server knows.
    Plain(u64),
    /// Not at all: the server decides. A local server with a small context would refuse a large limit.
    Unsaid,
}

/// Where to post, for a base address with or without a path; a query such as Azure's `api-version` stays.
#[must_use]
pub fn endpoint(base_url: &str) -> String {
    let (base, query) = base_url.split_at(base_url.find('?').unwrap_or(base_url.len()));
    let base = base.trim_end_matches('/');
    let has_path = base.split_once("://").is_some_and(|(_, rest)| rest.contains('/'));
    let rest = if base.ends_with("/chat/completions") {
        ""
    } else if has_path {
        "/chat/completions"
    } else {
        "/v1/chat/completions"
    };
    format!("{base}{rest}{query}")
}

/// The body of a request.
#[must_use]
pub fn request_body(model: &str, limit: TokenLimit, request: &ModelRequest<'_>) -> Value {
    let mut list = Vec::new();
    if !request.system.trim().is_empty() {
        list.push(json!({"role": "system", "content": request.system}));
    }
    for message in messages(request.items) {
        add_message(&mut list, &message);
    }
    let mut body = json!({
        "model": model, "messages": list, "stream": true, "stream_options": {"include_usage": true}
    });
    let Some(fields) = body.as_object_mut() else { return body };
    match limit {
        TokenLimit::Completion(tokens) => {
            drop(fields.insert("max_completion_tokens".to_owned(), tokens.into()))
        }
        TokenLimit::Plain(tokens) => drop(fields.insert("max_tokens".to_owned(), tokens.into())),
        TokenLimit::Unsaid => {}
    }
    if !request.tools.is_empty() {
        let tools = request.tools.iter().map(|tool| {
            json!({"type": "function", "function": {
                "name": tool.name, "description": tool.description, "parameters": tool.input_schema}})
        });
        fields.insert("tools".to_owned(), tools.collect());
    }
    body
}

fn add_message(list: &mut Vec<Value>, message: &Message<'_>) {
    match message {
        Message::User { answers, texts } => {
            list.extend(answers.iter().map(|answer| {
                let id = clean_name(answer.id, ID_BYTES_MAX);
                json!({"role": "tool", "tool_call_id": id, "content": answer.text})
            }));
            if !texts.is_empty() {
                list.push(json!({"role": "user", "content": texts.join("\n\n")}));
            }
        }
        Message::Assistant(replies) => {
            let texts: Vec<&str> = replies
                .iter()
                .map(|reply| reply.text.as_str())
                .filter(|text| !text.trim().is_empty())
                .collect();
            let calls: Vec<Value> = replies.iter().flat_map(|reply| &reply.tool_calls).map(call).collect();
            let content = if texts.is_empty() { Value::Null } else { texts.join("\n\n").into() };
            let mut message = json!({"role": "assistant", "content": content});
            if let Some(fields) = message.as_object_mut().filter(|_| !calls.is_empty()) {
                fields.insert("tool_calls".to_owned(), calls.into());
            }
            list.push(message);
        }
    }
}

fn call(call: &ToolCall) -> Value {
    let (id, name) = (clean_name(&call.id, ID_BYTES_MAX), clean_name(&call.name, NAME_BYTES_MAX));
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": call.input.to_string()}})
}

/// A tool call as far as it has come.
#[derive(Debug, Default)]
struct PartialCall {
    index: Option<u64>,
    id: String,
    name: String,
    arguments: String,
    /// Arguments that came as an object and not as text.
    object: Option<Value>,
}

/// A reply that is being put together from chunks.
#[derive(Debug, Default)]
pub struct Reply {
    text: String,
    calls: Vec<PartialCall>,
    stop: Option<Stop>,
    usage: Usage,
    is_complete: bool,
}

impl Reply {
    /// Takes the data of one event.
    ///
    /// # Errors
    /// When it is an error report, or nothing that this protocol knows.
    pub fn take(&mut self, data: &str, on_text: &mut dyn FnMut(&str)) -> Result<Progress, Trouble> {
        if data.trim() == "[DONE]" {
            // Without any finish reason the server gave up; half a reply counts for nothing.
            self.is_complete = self.stop.is_some();
            return match self.is_complete {
                true => Ok(Progress::Complete),
                false => {
                    Err(Trouble::Broken("the stream ended without saying why the model stopped".to_owned()))
                }
            };
        }
        let chunk: Value = serde_json::from_str(data)
            .map_err(|error| Trouble::Broken(format!("the stream has a chunk that is no JSON: {error}")))?;
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            return Err(Trouble::Told { status: status_of_error(error), message: message_of_error(error) });
        }
        let field = |value: &Value, name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
        if field(&chunk, "object").as_deref() == Some("error") {
            return Err(Trouble::Told { status: status_of_error(&chunk), message: message_of_error(&chunk) });
        }
        for usage in [chunk.get("usage"), chunk.pointer("/x_groq/usage")].into_iter().flatten() {
            self.take_usage(usage);
        }
        let choices = chunk.get("choices").and_then(Value::as_array);
        let is_first = |choice: &&Value| choice.get("index").and_then(Value::as_u64).unwrap_or(0) == 0;
        if let Some(choice) = choices.and_then(|choices| choices.iter().find(is_first)) {
            let whole = choice.get("message");
            if let Some(delta) = choice.get("delta").or(whole) {
                self.take_delta(delta, on_text)?;
            }
            if let Some(reason) = field(choice, "finish_reason") {
                self.stop = Some(stop_of(&reason)?);
            }
            if whole.is_some() {
                // The reply of a server that does not stream.
                self.stop = self.stop.or(Some(Stop::Done));
                self.is_complete = true;
                return Ok(Progress::Complete);
            }
        }
        Ok(Progress::More)
    }

    fn take_usage(&mut self, usage: &Value) {
        let count = |path: &str| usage.pointer(path).and_then(Value::as_u64);
        if let Some(tokens) = count("/prompt_tokens") {
            self.usage.input_tokens = tokens;
        }
        if let Some(tokens) = count("/completion_tokens") {
            self.usage.output_tokens = tokens;
        }
        if let Some(tokens) = count("/prompt_tokens_details/cached_tokens") {
            self.usage.cached_tokens = tokens;
        }
    }

    fn take_delta(&mut self, delta: &Value, on_text: &mut dyn FnMut(&str)) -> Result<(), Trouble> {
        // Reasoning (`reasoning`, `reasoning_content`) is not kept: it must not be sent back.
        for name in ["content", "refusal"] {
            match delta.get(name) {
                Some(Value::String(text)) => self.add_text(text, on_text),
                Some(Value::Array(parts)) => {
                    for text in parts.iter().filter_map(|part| part.get("text")?.as_str()) {
                        self.add_text(text, on_text);
                    }
                }
                Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) | None => {}
            }
        }
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let text = |name: &str| call.get(name).and_then(Value::as_str).unwrap_or_default();
            let index = call.get("index").and_then(Value::as_u64);
            self.add_call(index, text("id"), call.get("function").unwrap_or(call))?;
        }
        if let Some(function) = delta.get("function_call").filter(|function| function.is_object()) {
            self.add_call(Some(0), "", function)?;
        }
        Ok(())
    }

    fn add_text(&mut self, text: &str, on_text: &mut dyn FnMut(&str)) {
        if !text.is_empty() {
            self.text.push_str(text);
            on_text(text);
        }
    }

    fn add_call(&mut self, index: Option<u64>, id: &str, function: &Value) -> Result<(), Trouble> {
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
        let at = self.slot(index, id, name);
        if at >= TOOL_CALLS_MAX {
            return Err(Trouble::Broken("the reply has more tool calls than any model makes".to_owned()));
        }
        if at == self.calls.len() {
            self.calls.push(PartialCall { index, ..PartialCall::default() });
        }
        let Some(call) = self.calls.get_mut(at) else { return Ok(()) };
        if call.id.is_empty() {
            id.clone_into(&mut call.id);
        }
        if call.name != name && call.arguments.is_empty() {
            call.name.push_str(name); // some servers repeat the name in each piece, others send it in pieces
        }
        match function.get("arguments") {
            None | Some(Value::Null) => {}
            Some(Value::String(piece)) => call.arguments.push_str(piece),
            Some(value) => call.object = Some(input_of_value(value)),
        }
        Ok(())
    }

    /// Which call a piece belongs to: its index, or its id, or the call before; the length for a new one.
    fn slot(&self, index: Option<u64>, id: &str, name: &str) -> usize {
        // Some servers give every call the index 0, or none; then another id begins another call.
        let fits = |call: &PartialCall| id.is_empty() || call.id.is_empty() || call.id == id;
        let found = match index {
            Some(_) => self.calls.iter().rposition(|call| call.index == index),
            None if !id.is_empty() => self.calls.iter().rposition(|call| call.id == id),
            None if !name.is_empty() => None,
            None => self.calls.len().checked_sub(1),
        };
        found.filter(|&at| self.calls.get(at).is_some_and(fits)).unwrap_or(self.calls.len())
    }

    /// Whether the model said that it is done. Some servers leave out `[DONE]`.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete || self.stop.is_some()
    }

    /// The reply, once it is whole.
    #[must_use]
    pub fn finish(self) -> AssistantMessage {
        let tool_calls: Vec<ToolCall> = self
            .calls
            .into_iter()
            .map(|call| ToolCall {
                input: call.object.unwrap_or_else(|| input_of_text(&call.arguments)),
                id: call.id,
                name: call.name,
            })
            .collect();
        AssistantMessage {
            text: self.text,
            stop: settle_stop(self.stop.unwrap_or(Stop::Done), &tool_calls),
            tool_calls,
            thinking: Vec::new(),
            usage: self.usage,
        }
    }
}

fn stop_of(reason: &str) -> Result<Stop, Trouble> {
    Ok(match reason {
        "tool_calls" | "function_call" => Stop::ToolUse,
        "length" => Stop::Length,
        "content_filter" => Stop::Refusal,
        "error" => {
            return Err(Trouble::Broken("the server behind the provider failed in mid-reply".to_owned()));
        }
        _ => Stop::Done, // stop, and the words of servers that copy the API
    })
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
        check(DEFAULT_BASE_URL, "https://api.openai.com/v1/chat/completions");
        check("http://localhost:11434", "http://localhost:11434/v1/chat/completions");
        check("http://localhost:11434/", "http://localhost:11434/v1/chat/completions");
        check("http://h/v1/", "http://h/v1/chat/completions");
        check("https://openrouter.ai/api/v1", "https://openrouter.ai/api/v1/chat/completions");
        check("http://h/v1/chat/completions", "http://h/v1/chat/completions");
        check(
            "https://r.openai.azure.com/openai/deployments/d?api-version=2024-10-21",
            "https://r.openai.azure.com/openai/deployments/d/chat/completions?api-version=2024-10-21",
        );
    }

    fn body(items: &[Item], tools: &[ToolSpec], limit: TokenLimit) -> Value {
        request_body("m", limit, &ModelRequest { system: "be good", items, tools, number: 0 })
    }

    #[test]
    fn a_request_has_its_parts_in_the_form_of_the_reference() {
        let tools = [ToolSpec {
            name: "ReadFile",
            description: "reads".into(),
            input_schema: json!({"type": "object"}),
        }];
        let notice = Item::Notification { text: "<notices/>".into() };
        let items = [input("hello"), reply("", &["c1"]), result("c1"), notice, input("and?")];
        let expected = json!({
            "model": "m", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 9,
            "tools": [{"type": "function", "function": {
                "name": "ReadFile", "description": "reads", "parameters": {"type": "object"}}}],
            "messages": [
                {"role": "system", "content": "be good"},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "c1", "type": "function",
                     "function": {"name": "ReadFile", "arguments": "{\"path\":\"a\"}"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "r-c1"},
                {"role": "user", "content": "<notices/>\n\nand?"},
            ]
        });
        assert_eq!(body(&items, &tools, TokenLimit::Plain(9)), expected);
        let plain = body(&[input("a")], &[], TokenLimit::Unsaid);
        assert!(plain.get("tools").is_none() && plain.get("max_tokens").is_none());
        let newer = body(&[input("a")], &[], TokenLimit::Completion(9));
        assert_eq!(newer.get("max_completion_tokens"), Some(&json!(9)));
    }

    /// Runs a stream through framing and parsing; also checks that what was streamed is the text.
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

    /// Text, calls as `id name arguments`, stop: of a stream of these deltas and this finish reason.
    fn play_deltas(deltas: &[Value], finish: &str) -> (String, Vec<String>, Stop) {
        let mut stream = String::new();
        for delta in deltas {
            let chunk = json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
            stream.push_str(&format!("data: {chunk}\n\n"));
        }
        let last = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]});
        let message = play(&format!("{stream}data: {last}\n\ndata: [DONE]\n\n")).unwrap().unwrap();
        let calls = message
            .tool_calls
            .iter()
            .map(|call| format!("{} {} {}", call.id, call.name, call.input))
            .collect();
        (message.text, calls, message.stop)
    }

    #[test]
    fn a_streamed_reply_with_tools_and_usage_is_put_together() {
        let message = play(include_str!("../../../tests/replies/openai-tools.sse")).unwrap().unwrap();
        assert_eq!(message.text, "Let me see.");
        let calls: Vec<_> = message
            .tool_calls
            .iter()
            .map(|c| (c.id.as_str(), c.name.as_str(), c.input.to_string()))
            .collect();
        assert_eq!(
            calls,
            [
                ("call_a1", "ReadFile", r#"{"path":"a.txt"}"#.to_owned()),
                ("call_b2", "ListFiles", "{}".to_owned()),
            ]
        );
        assert_eq!(message.stop, Stop::ToolUse);
        assert_eq!(message.usage, Usage { input_tokens: 82, output_tokens: 17, cached_tokens: 64 });
    }

    #[test]
    fn tool_calls_come_in_many_forms() {
        let check = |deltas: &[Value], expected: &[&str]| {
            let (_, calls, stop) = play_deltas(deltas, "tool_calls");
            assert_eq!(calls, expected);
            assert_eq!(stop, Stop::ToolUse);
        };
        let f = |name: &str, arguments: Value| json!({"name": name, "arguments": arguments});
        // In one piece, without an index; two of them without an id either.
        check(
            &[json!({"tool_calls": [{"function": f("A", json!("{}"))}, {"function": f("B", json!("{}"))}]})],
            &[" A {}", " B {}"],
        );
        // Arguments as an object.
        check(
            &[json!({"tool_calls": [{"id": "1", "function": f("A", json!({"x": 1}))}]})],
            &["1 A {\"x\":1}"],
        );
        // Every call at index 0, told apart by its id.
        check(
            &[
                json!({"tool_calls": [{"index": 0, "id": "1", "function": f("A", json!("{\"x\":1}"))}]}),
                json!({"tool_calls": [{"index": 0, "id": "2", "function": f("B", json!("{}"))}]}),
            ],
            &["1 A {\"x\":1}", "2 B {}"],
        );
        // The id and name again in every piece; the pieces interleaved.
        check(
            &[
                json!({"tool_calls": [{"index": 0, "id": "1", "function": f("A", json!("{\"x\""))}]}),
                json!({"tool_calls": [{"index": 1, "id": "2", "function": f("B", json!("{\"y\""))}]}),
                json!({"tool_calls": [{"index": 0, "id": "1", "function": f("A", json!(":1}"))}]}),
                json!({"tool_calls": [{"index": 1, "id": "2", "function": f("B", json!(":2}"))}]}),
            ],
            &["1 A {\"x\":1}", "2 B {\"y\":2}"],
        );
        // No index, pieces go on with the call before.
        check(
            &[
                json!({"tool_calls": [{"id": "1", "function": f("A", json!("{\"x\""))}]}),
                json!({"tool_calls": [{"function": {"arguments": ":1}"}}]}),
            ],
            &["1 A {\"x\":1}"],
        );
        // The old form.
        check(
            &[
                json!({"function_call": f("A", json!("{\"x\""))}),
                json!({"function_call": {"arguments": ":1}"}}),
            ],
            &[" A {\"x\":1}"],
        );
        // No arguments, null arguments, arguments that are none.
        check(&[json!({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "A"}}]})], &["1 A {}"]);
        check(&[json!({"tool_calls": [{"id": "1", "function": f("A", Value::Null)}]})], &["1 A {}"]);
        check(
            &[json!({"tool_calls": [{"id": "1", "function": f("A", json!("{oops"))}]})],
            &["1 A {\"_invalid_arguments\":\"{oops\"}"],
        );
    }

    #[test]
    fn text_and_reasons_come_in_many_forms() {
        let check = |delta: Value, finish: &str, text: &str, stop: Stop| {
            assert_eq!(play_deltas(&[delta], finish), (text.to_owned(), Vec::new(), stop));
        };
        check(json!({"content": "hi"}), "stop", "hi", Stop::Done);
        check(json!({"content": null, "reasoning_content": "hm"}), "stop", "", Stop::Done);
        check(json!({"content": [{"type": "text", "text": "part"}]}), "stop", "part", Stop::Done);
        check(json!({"refusal": "no"}), "stop", "no", Stop::Done);
        check(json!({"content": "x"}), "length", "x", Stop::Length);
        check(json!({"content": "x"}), "content_filter", "x", Stop::Refusal);
        check(json!({"content": "x"}), "eos", "x", Stop::Done);
        check(json!({"content": "x"}), "tool_calls", "x", Stop::Done);
    }

    #[test]
    fn a_stream_counts_only_when_the_model_said_why_it_stopped() {
        let check = |stream: &str, expected: &str| {
            let told = format!("{:?}", play(stream).map(|reply| reply.map(|reply| reply.text)));
            assert!(told.contains(expected), "{stream}: {told}");
        };
        let text = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}]}\n\n";
        let finish = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
        check(&format!("{text}{finish}"), "Ok(Some(\"hi\"))");
        check(text, "Ok(None)");
        check("", "Ok(None)");
        check(&format!("{text}data: [DONE]\n\n"), "Broken");
        check(&format!("{text}data: {{\"choi\n\n"), "Broken");
        check(
            "data: {\"error\":{\"message\":\"slow\",\"code\":429}}\n\n",
            "Told { status: 429, message: \"slow\"",
        );
        check("data: {\"error\":{\"message\":\"x\",\"type\":\"server_error\"}}\n\n", "Told { status: 500");
        check("data: {\"error\":\"words\"}\n\n", "Told { status: 500, message: \"words\"");
        check("data: {\"object\":\"error\",\"message\":\"x\",\"code\":400}\n\n", "Told { status: 400");
        check("data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"error\"}]}\n\n", "Broken");
        for odd in [
            "null",
            "[]",
            "3",
            "{}",
            "{\"choices\":[]}",
            "{\"choices\":[null]}",
            "{\"choices\":[{\"delta\":7}]}",
        ] {
            check(&format!("data: {odd}\n\n"), "Ok(None)");
        }
    }

    #[test]
    fn a_reply_that_is_not_streamed_is_understood() {
        let whole = json!({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": {
            "role": "assistant", "content": "so", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "A", "arguments": "{}"}}]}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 4}});
        let message = play(&format!("data: {whole}\n\n")).unwrap().unwrap();
        assert_eq!((message.text.as_str(), message.stop, message.tool_calls.len()), ("so", Stop::ToolUse, 1));
        assert_eq!(message.usage.output_tokens, 4);
    }
}
