//! OpenAI Chat Completions: our words to a request body, its chunks to a reply.
//!
//! Pure. Source: the public reference of the API; where servers that copy it differ (Ollama, llama.cpp, vLLM,
//! LiteLLM, OpenRouter, Azure, Gemini), the laxer reading is taken.

use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::wire::provider::ModelRequest;
use crate::wire::provider::conversation::{Round, clean_name, rounds, set};
use crate::wire::provider::reply::{PartialCall, Progress, Reply, Trouble, at, event_of, text_of};
use crate::words::message::{Stop, ToolCall, Usage};

/// The model when the settings name none.
pub const DEFAULT_MODEL: &str = "gpt-5-mini";
/// The address when the settings name none.
pub const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
/// Longest name of a tool that the API takes.
const NAME_BYTES_MAX: usize = 64;
/// Longest id of a call that the API takes.
const ID_BYTES_MAX: usize = 40;
/// The fields in which OpenRouter and LiteLLM send reasoning that they want back.
const REASONING: [&str; 2] = ["reasoning_details", "thinking_blocks"];

/// The body of a request. `limit` is the limit of a reply's tokens, with the name that the server has for it.
pub(super) fn request_body(model: &str, limit: Option<(&str, u64)>, request: &ModelRequest<'_>) -> Value {
    let mut list = Vec::new();
    if !request.system.trim().is_empty() {
        list.push(json!({"role": "system", "content": request.system}));
    }
    rounds(request.items).iter().for_each(|round| add_messages(&mut list, round));
    let mut body = json!({
        "model": model, "messages": list, "stream": true, "stream_options": {"include_usage": true}
    });
    if let Some((name, tokens)) = limit {
        set(&mut body, name, tokens.into());
    }
    if !request.tools.is_empty() {
        let tools = request.tools.iter().map(|tool| {
            json!({"type": "function", "function": {
                "name": tool.name, "description": tool.description, "parameters": tool.input_schema}})
        });
        set(&mut body, "tools", tools.collect());
    }
    body
}

fn add_messages(list: &mut Vec<Value>, round: &Round<'_>) {
    if !round.replies.is_empty() {
        let texts = round.replies.iter().map(|reply| reply.text.as_str());
        let texts: Vec<&str> = texts.filter(|text| !text.trim().is_empty()).collect();
        let content = if texts.is_empty() { Value::Null } else { texts.join("\n\n").into() };
        let mut message = json!({"role": "assistant", "content": content});
        let calls: Vec<Value> = round.replies.iter().flat_map(|reply| &reply.tool_calls).map(call).collect();
        if !calls.is_empty() {
            set(&mut message, "tool_calls", calls.into());
        }
        for name in REASONING {
            let thinking = round.replies.iter().flat_map(|reply| &reply.thinking);
            let parts: Vec<&Value> = thinking.filter_map(|part| part.get(name)).collect();
            if !parts.is_empty() {
                set(&mut message, name, json!(parts));
            }
        }
        list.push(message);
    }
    list.extend(round.answers.iter().map(|answer| {
        let id = clean_name(answer.id, ID_BYTES_MAX);
        json!({"role": "tool", "tool_call_id": id, "content": answer.text})
    }));
    if !round.texts.is_empty() {
        list.push(json!({"role": "user", "content": round.texts.join("\n\n")}));
    }
}

fn call(call: &ToolCall) -> Value {
    let (id, name) = (clean_name(&call.id, ID_BYTES_MAX), clean_name(&call.name, NAME_BYTES_MAX));
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": call.input.to_string()}})
}

/// Takes the data of one event.
///
/// A reply counts as whole once it has a finish reason, because some servers leave out `[DONE]`.
///
/// # Errors
/// When it is an error report, or nothing that this protocol knows.
pub fn take(reply: &mut Reply, data: &str) -> Result<Progress, Trouble> {
    if data.trim() == "[DONE]" {
        // Without any finish reason the server gave up; half a reply counts for nothing.
        let gave_up = || Trouble::Broken("the stream ended without saying why the model stopped".into());
        return reply.is_complete.then_some(Progress::Complete).ok_or_else(gave_up);
    }
    let chunk = &event_of(data)?;
    take_usage(reply, at(chunk, "/usage"));
    let is_first = |choice: &&Value| at(choice, "/index").as_u64().unwrap_or(0) == 0;
    let Some(choice) = at(chunk, "/choices").as_array().and_then(|choices| choices.iter().find(is_first))
    else {
        return Ok(Progress::More);
    };
    let whole = choice.get("message"); // of a server that does not stream
    if let Some(delta) = choice.get("delta").or(whole) {
        take_delta(reply, delta)?;
    }
    let reason = text_of(choice, "finish_reason");
    if !reason.is_empty() {
        let told = stop_of(reason)?;
        reply.stop = reply.stop.or(Some(told)); // a refusal before it tells more
    }
    reply.is_complete |= whole.is_some() || !reason.is_empty();
    Ok(if whole.is_some() { Progress::Complete } else { Progress::More })
}

fn take_usage(reply: &mut Reply, report: &Value) {
    reply.report(report);
    reply.report(at(report, "/prompt_tokens_details"));
    let [input_tokens, output_tokens, cached_tokens] =
        ["prompt_tokens", "completion_tokens", "cached_tokens"].map(|name| reply.count(name));
    reply.usage = Usage { input_tokens, output_tokens, cached_tokens };
}

fn take_delta(reply: &mut Reply, delta: &Value) -> Result<(), Trouble> {
    // Reasoning as text (`reasoning`, `reasoning_content`) is not kept: the servers that send it want none back.
    for name in REASONING {
        for piece in delta.get(name).and_then(Value::as_array).into_iter().flatten() {
            take_reasoning(reply, name, piece);
        }
    }
    reply.stop = Some(Stop::Refusal).filter(|_| !text_of(delta, "refusal").is_empty()).or(reply.stop);
    for content in [at(delta, "/content"), at(delta, "/refusal")] {
        let parts = content.as_array().into_iter().flatten().filter_map(|part| at(part, "/text").as_str());
        content.as_str().into_iter().chain(parts).for_each(|text| reply.text.push_str(text));
    }
    for call in at(delta, "/tool_calls").as_array().into_iter().flatten() {
        take_call(reply, call)?;
    }
    Ok(())
}

/// Reasoning that its server wants back unchanged. A part of it may come in pieces, the signature in the last.
fn take_reasoning(reply: &mut Reply, name: &str, piece: &Value) {
    let is_same = |part: &&mut Value| {
        ["type", "index"].iter().all(|field| part.get(field) == piece.get(field))
            && text_of(part, "signature").is_empty()
    };
    let last = reply.thinking.last_mut().and_then(|last| last.get_mut(name));
    let Some(part) = last.filter(is_same) else {
        return reply.thinking.push(json!({ name: piece }));
    };
    for (field, value) in piece.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let is_pieced = ["text", "summary", "data", "thinking"].contains(&&**field);
        match (part.get_mut(field), value) {
            (Some(Value::String(before)), Value::String(more)) if is_pieced => before.push_str(more),
            _ => set(part, field, value.clone()),
        }
    }
}

fn take_call(reply: &mut Reply, piece: &Value) -> Result<(), Trouble> {
    let (index, id, function) = (at(piece, "/index").as_u64(), text_of(piece, "id"), at(piece, "/function"));
    let name = text_of(function, "name");
    let place = slot(&reply.calls, index, id, name);
    if place == reply.calls.len() {
        reply.add_call(PartialCall { index, ..PartialCall::default() })?;
    }
    let Some(call) = reply.calls.get_mut(place) else { return Ok(()) };
    if call.id.is_empty() {
        id.clone_into(&mut call.id);
    }
    if call.name != name && call.arguments.is_empty() {
        call.name.push_str(name); // some servers repeat the name in each piece, others send it in pieces
    }
    match at(function, "/arguments") {
        Value::String(piece) => call.arguments.push_str(piece),
        Value::Null => {}
        value @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
            call.given = value.clone();
        }
    }
    Ok(())
}

/// Which call a piece belongs to: its index, or its id, or the call before; the length for a new one.
fn slot(calls: &[PartialCall], index: Option<u64>, id: &str, name: &str) -> usize {
    // Some servers give every call the index 0, or none; then another id begins another call,
    // or, where there are no ids either, a name after arguments that are whole.
    let is_whole = |call: &PartialCall| serde_json::from_str::<IgnoredAny>(&call.arguments).is_ok();
    let fits = |call: &PartialCall| match (id, call.id.as_str()) {
        ("", "") => name.is_empty() || !is_whole(call),
        (id, before) => id.is_empty() || before.is_empty() || before == id,
    };
    let found = match index {
        Some(_) => calls.iter().rposition(|call| call.index == index),
        None if !id.is_empty() => calls.iter().rposition(|call| call.id == id),
        None if !name.is_empty() => None,
        None => calls.len().checked_sub(1),
    };
    found.filter(|&at| calls.get(at).is_some_and(fits)).unwrap_or(calls.len())
}

fn stop_of(reason: &str) -> Result<Stop, Trouble> {
    match reason {
        "tool_calls" => Ok(Stop::ToolUse),
        "length" => Ok(Stop::Length),
        "content_filter" => Ok(Stop::Refusal),
        "error" => Err(Trouble::Broken("the server behind the provider failed in mid-reply".into())),
        _ => Ok(Stop::Done), // stop, and the words of servers that copy the API
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::provider::ToolSpec;
    use crate::wire::provider::conversation::tests::{input, reply, result};
    use crate::words::message::{AssistantMessage, Item};

    fn body(items: &[Item], tools: &[ToolSpec], limit: Option<(&str, u64)>) -> Value {
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
        assert_eq!(body(&items, &tools, Some(("max_tokens", 9))), expected);
        let plain = body(&[input("a")], &[], None);
        assert!(plain.get("tools").is_none() && plain.get("max_tokens").is_none());
        let newer = body(&[input("a")], &[], Some(("max_completion_tokens", 9)));
        assert_eq!(newer.get("max_completion_tokens"), Some(&json!(9)));
    }

    #[test]
    fn reasoning_is_passed_back_to_the_servers_that_want_it() {
        let check = |stream: &str, name: &str, expected: Value| {
            let mut message = play(stream).unwrap().unwrap();
            message
                .thinking
                .push(json!({"type": "thinking", "thinking": "of Anthropic's", "signature": "s"}));
            let body = body(&[input("a"), Item::Assistant(message)], &[], None);
            let fields = body.pointer("/messages/2").unwrap().as_object().unwrap();
            assert_eq!((fields.get(name), fields.len()), (Some(&expected), 4), "{fields:?}");
        };
        check(
            include_str!("../../../tests/replies/openrouter-reasoning.sse"),
            "reasoning_details",
            json!([
                {"type": "reasoning.text", "text": "Two files.", "signature": "sig==", "format": "anthropic-claude-v1", "index": 0},
                {"type": "reasoning.encrypted", "data": "gAAA", "id": "rs_1", "index": 1}]),
        );
        check(
            include_str!("../../../tests/replies/litellm-thinking.sse"),
            "thinking_blocks",
            json!([
                {"type": "thinking", "thinking": "Two files.", "signature": "s1=="},
                {"type": "thinking", "thinking": "Then.", "signature": "s2=="}]),
        );
    }

    fn play(stream: &str) -> Result<Option<AssistantMessage>, Trouble> {
        crate::wire::provider::reply::tests::play(take, stream)
    }

    #[test]
    fn odd_chunks_are_skipped_and_errors_have_many_forms() {
        let check = |data: &str, expected: &str| {
            let told = format!("{:?}", play(&format!("data: {data}\n\n")));
            assert!(told.contains(expected), "{data}: {told}");
        };
        check(r#"{"error":{"message":"slow","code":429}}"#, "Told { status: 429, message: \"slow\"");
        check(r#"{"error":"words"}"#, "Told { status: 500, message: \"words\"");
        for odd in ["null", "[]", "3", "{}", r#"{"choices":[null]}"#, r#"{"choices":[{"delta":7}]}"#] {
            check(odd, "Ok(None)");
        }
    }
}
