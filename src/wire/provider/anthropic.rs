//! Anthropic Messages: our words to a request body, its events to a reply.
//!
//! Pure. Source: the public reference of the Messages API, version 2023-06-01, and its page on streaming.

use serde_json::{Value, json};

use crate::wire::provider::ModelRequest;
use crate::wire::provider::conversation::{Round, ToolAnswer, clean_name, rounds, set};
use crate::wire::provider::reply::{PartialCall, Progress, Reply, Trouble, at, event_of, text_of};
use crate::words::message::{Stop, Usage};

/// The model when the settings name none.
pub const DEFAULT_MODEL: &str = "claude-sonnet-4-5";
/// The address when the settings name none.
pub const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";
/// The version of the protocol that is spoken here.
pub const VERSION: &str = "2023-06-01";
/// Longest name and id that the API takes.
const NAME_BYTES_MAX: usize = 64;

/// The body of a request.
///
/// Tools, instruction and the conversation up to its last block are marked for the provider's cache: all of it
/// comes again, unchanged, in the next request. What was marked last time is marked once more, because the
/// provider looks back only 20 blocks from a mark, which a reply of ten calls exceeds.
pub(super) fn request_body(model: &str, max_tokens: u64, request: &ModelRequest<'_>) -> Value {
    let mark = json!({"type": "ephemeral"});
    let mut list: Vec<Value> = rounds(request.items).iter().flat_map(messages).collect();
    for message in list.iter_mut().rev().step_by(2).take(2) {
        let blocks = message.get_mut("content").and_then(Value::as_array_mut);
        if let Some(block) = blocks.and_then(|blocks| blocks.last_mut()) {
            set(block, "cache_control", mark.clone());
        }
    }
    let mut body = json!({ "model": model, "max_tokens": max_tokens, "stream": true, "messages": list });
    if !request.system.trim().is_empty() {
        set(&mut body, "system", json!([{"type": "text", "text": request.system, "cache_control": mark}]));
    }
    if !request.tools.is_empty() {
        set(&mut body, "tools", json!(request.tools));
    }
    body
}

/// What the model said, if anything, and what was said to it.
fn messages(round: &Round<'_>) -> Vec<Value> {
    let clean = |name| clean_name(name, NAME_BYTES_MAX);
    let mut said: Vec<Value> = Vec::new();
    for reply in &round.replies {
        let mut text = Some(&*reply.text).filter(|text| !text.trim().is_empty());
        let mut calls = reply.tool_calls.iter().map(|call| {
            let (id, name) = (clean(&call.id), clean(&call.name));
            json!({"type": "tool_use", "id": id, "name": name, "input": call.input})
        });
        for block in &reply.thinking {
            match text_of(block, "type") {
                "thinking" | "redacted_thinking" => said.push(block.clone()),
                "text" => {
                    text = None; // it is all among the reasoning
                    said.push(block.clone());
                }
                "tool_use" => said.extend(calls.next()),
                _ => {} // reasoning of another provider stays in the log: this one would refuse it
            }
        }
        said.extend(text.map(text_block));
        said.extend(calls);
    }
    let answers = round.answers.iter().map(|ToolAnswer { id, ok, text }| {
        let mut block = json!({"type": "tool_result", "tool_use_id": clean(id), "content": text});
        if !ok {
            set(&mut block, "is_error", true.into());
        }
        block
    });
    let told: Vec<Value> = answers.chain(round.texts.iter().map(|text| text_block(text))).collect();
    let said = Some(said).filter(|said| !said.is_empty());
    let said = said.map(|said| json!({"role": "assistant", "content": said}));
    said.into_iter().chain([json!({"role": "user", "content": told})]).collect()
}

fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn is_reasoning(block: &Value) -> bool {
    matches!(text_of(block, "type"), "thinking" | "redacted_thinking")
}

/// Takes the data of one event.
///
/// # Errors
/// When it is an error report, or nothing that this protocol knows.
pub fn take(reply: &mut Reply, data: &str) -> Result<Progress, Trouble> {
    let event = &event_of(data)?;
    let index = at(event, "/index").as_u64().unwrap_or(0);
    match text_of(event, "type") {
        "message_start" => take_usage(reply, at(event, "/message/usage")),
        "content_block_start" => start_block(reply, index, at(event, "/content_block")),
        "content_block_delta" => add_to_block(reply, index, at(event, "/delta"))?,
        "message_delta" => {
            reply.stop = at(event, "/delta/stop_reason").as_str().map(stop_of).or(reply.stop);
            take_usage(reply, at(event, "/usage"));
        }
        "message_stop" => return end(reply),
        _ => {} // ping, content_block_stop, and what newer versions add
    }
    Ok(Progress::More)
}

fn take_usage(reply: &mut Reply, report: &Value) {
    reply.report(report);
    let cached_tokens = reply.count("cache_read_input_tokens");
    let uncached = reply.count("input_tokens").saturating_add(reply.count("cache_creation_input_tokens"));
    let input_tokens = uncached.saturating_add(cached_tokens);
    reply.usage = Usage { input_tokens, output_tokens: reply.count("output_tokens"), cached_tokens };
}

fn start_block(reply: &mut Reply, index: u64, block: &Value) {
    if text_of(block, "type") == "text" {
        if !reply.text.is_empty() {
            reply.text.push_str("\n\n");
        }
        reply.text.push_str(text_of(block, "text"));
    }
    reply.blocks.push((index, block.clone()));
}

fn add_to_block(reply: &mut Reply, index: u64, delta: &Value) -> Result<(), Trouble> {
    let field = match text_of(delta, "type") {
        "text_delta" => "text",
        "input_json_delta" => "partial_json",
        "thinking_delta" => "thinking",
        "signature_delta" => "signature",
        _ => return Ok(()), // citations and the like
    };
    if field == "text" {
        reply.text.push_str(text_of(delta, field));
    }
    let Some((_, block)) = reply.blocks.iter_mut().rev().find(|(at, _)| *at == index) else {
        return Err(Trouble::Broken(format!("the stream goes on with block {index}, which never began")));
    };
    match block.get_mut(field) {
        Some(Value::String(before)) => before.push_str(text_of(delta, field)),
        Some(_) | None => set(block, field, text_of(delta, field).into()),
    }
    Ok(())
}

/// Turns the blocks, which are whole now, into calls and reasoning.
///
/// The API wants reasoning back where it was. Mostly it comes first; where it does not, texts and the places of
/// calls are kept among it.
fn end(reply: &mut Reply) -> Result<Progress, Trouble> {
    let blocks = std::mem::take(&mut reply.blocks);
    let is_interleaved =
        !blocks.iter().map(|(_, block)| block).skip_while(|b| is_reasoning(b)).all(|b| !is_reasoning(b));
    for (_, block) in blocks {
        let text = text_of(&block, "text");
        match text_of(&block, "type") {
            "text" if is_interleaved && !text.trim().is_empty() => reply.thinking.push(text_block(text)),
            "tool_use" => {
                let [id, name, arguments] =
                    ["id", "name", "partial_json"].map(|name| text_of(&block, name).to_owned());
                // A server that does not stream arguments gives them at the start.
                let given = at(&block, "/input").clone();
                reply.add_call(PartialCall { index: None, id, name, arguments, given })?;
                reply.thinking.extend(is_interleaved.then(|| json!({"type": "tool_use"})));
            }
            _ if is_reasoning(&block) => reply.thinking.push(block),
            _ => {}
        }
    }
    reply.is_complete = true;
    Ok(Progress::Complete)
}

fn stop_of(reason: &str) -> Stop {
    match reason {
        "tool_use" => Stop::ToolUse,
        "max_tokens" | "model_context_window_exceeded" => Stop::Length,
        "refusal" => Stop::Refusal,
        _ => Stop::Done, // end_turn, stop_sequence, pause_turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::provider::ToolSpec;
    use crate::wire::provider::conversation::tests::{input, reply, result};
    use crate::words::message::{AssistantMessage, Item, ToolCall};

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
                {"role": "user", "content": [
                    {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
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

    #[test]
    fn reasoning_between_other_blocks_goes_back_to_where_it_was() {
        let stream = include_str!("../../../tests/replies/anthropic-thinking-between.sse");
        let mut message = play(stream).unwrap().unwrap();
        message.tool_calls.push(ToolCall { id: "2".into(), name: "ListFiles".into(), input: json!({}) });
        let body = body(&[input("a"), Item::Assistant(message)], &[]);
        let expected = json!([
            {"type": "thinking", "thinking": "First.", "signature": "s1=="},
            {"type": "text", "text": "I look."},
            {"type": "thinking", "thinking": "Then.", "signature": "s2=="},
            {"type": "tool_use", "id": "toolu_1", "name": "ReadFile", "input": {"path": "a"}},
            {"type": "tool_use", "id": "2", "name": "ListFiles", "input": {}}]);
        assert_eq!(body.pointer("/messages/1/content"), Some(&expected));
    }

    fn play(stream: &str) -> Result<Option<AssistantMessage>, Trouble> {
        crate::wire::provider::reply::tests::play(take, stream)
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
}
