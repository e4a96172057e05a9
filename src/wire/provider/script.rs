//! The scripted model: replies from a file, for tests, demonstrations and examples.
//!
//! Parsing is pure. Each request of a pod takes the next reply of the list of the pod's name, else of `*`; the
//! position is the number of the request, which survives a restart.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::sys::wait::Cancel;
use crate::wire::provider::conversation::settle_stop;
use crate::wire::provider::failure::{Asked, of_status};
use crate::wire::provider::{Failure, Outcome};
use crate::words::identity::PodName;
use crate::words::message::{AssistantMessage, Stop, ToolCall, Usage};
use crate::words::text::{cut_end, harmless_line};

/// What the model says when its replies are used up.
pub const END_OF_SCRIPT: &str = "(end of script)";
/// The list for pods that have none of their own.
const ANY_POD: &str = "*";
/// Texts longer than this, in characters, are streamed in pieces.
const PIECE_CHARS: usize = 8;

/// One reply.
#[derive(Debug, Clone, PartialEq)]
pub struct ScriptedReply {
    /// Waits so long first.
    pub delay: Duration,
    /// What comes then.
    pub outcome: ScriptedOutcome,
}

/// What a scripted request comes to.
#[derive(Debug, Clone, PartialEq)]
pub enum ScriptedOutcome {
    /// The model speaks.
    Says {
        /// Its text.
        text: String,
        /// Names and inputs of the tools it calls.
        calls: Vec<(String, Value)>,
    },
    /// The provider refuses, as an HTTP server would.
    Refuses {
        /// The HTTP status.
        status: u16,
        /// The provider's explanation.
        message: String,
        /// How long it wants us to wait.
        wait: Option<Duration>,
    },
}

/// The replies of all pods.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Script {
    pods: BTreeMap<String, Vec<ScriptedReply>>,
}

impl Script {
    /// Reads the text of a script file.
    ///
    /// # Errors
    /// A sentence that names the place, such as `pods.main[2]`, and what is wrong there.
    pub fn parse(text: &str) -> Result<Script, String> {
        Script::from_value(&parse_json(text)?)
    }

    /// As `parse`, with `{{dir}}` and `{{pod_id}}` in any text replaced.
    ///
    /// # Errors
    /// As `parse`.
    pub fn parse_for(text: &str, directory: &str, pod_id: &str) -> Result<Script, String> {
        let mut value = parse_json(text)?;
        substitute(&mut value, directory, pod_id);
        Script::from_value(&value)
    }

    fn from_value(value: &Value) -> Result<Script, String> {
        let top = object(value, "the script")?;
        only(top, &["pods"], "the script")?;
        let pods = object(top.get("pods").ok_or("the script has no \"pods\"")?, "pods")?;
        let mut script = Script::default();
        for (name, list) in pods {
            if name != ANY_POD {
                PodName::new(name.clone()).map_err(|error| format!("pods: {error}; or use \"*\""))?;
            }
            let place = format!("pods.{name}");
            let list = list.as_array().ok_or_else(|| format!("{place} is no list of replies"))?;
            let replies =
                list.iter().enumerate().map(|(at, value)| parse_reply(value, &format!("{place}[{at}]")));
            script.pods.insert(name.clone(), replies.collect::<Result<_, _>>()?);
        }
        Ok(script)
    }

    /// The reply at this position of the pod's list; `None` past the end.
    #[must_use]
    pub fn reply(&self, name: &str, number: u64) -> Option<&ScriptedReply> {
        let list = self.pods.get(name).or_else(|| self.pods.get(ANY_POD))?;
        list.get(usize::try_from(number).ok()?)
    }

    /// One request.
    ///
    /// # Errors
    /// What the script says, or `Cancelled`.
    pub fn request(
        &self,
        name: &str,
        number: u64,
        asked: Asked<'_>,
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str),
    ) -> Outcome {
        let end = ScriptedReply {
            delay: Duration::ZERO,
            outcome: ScriptedOutcome::Says { text: END_OF_SCRIPT.to_owned(), calls: Vec::new() },
        };
        let reply = self.reply(name, number).unwrap_or(&end);
        if cancel.sleep(reply.delay) {
            return Err(Failure::Cancelled);
        }
        match &reply.outcome {
            ScriptedOutcome::Says { text, calls } => {
                pieces(text).for_each(on_text);
                Ok(assistant_message(text, calls, number))
            }
            ScriptedOutcome::Refuses { status, message, wait } => {
                Err(of_status(*status, message, *wait, asked))
            }
        }
    }
}

fn assistant_message(text: &str, calls: &[(String, Value)], number: u64) -> AssistantMessage {
    let tool_calls: Vec<ToolCall> = calls
        .iter()
        .enumerate()
        .map(|(index, (name, input))| ToolCall {
            id: format!("call_{number}_{index}"),
            name: name.clone(),
            input: input.clone(),
        })
        .collect();
    AssistantMessage {
        text: text.to_owned(),
        stop: settle_stop(Stop::Done, &tool_calls),
        tool_calls,
        thinking: Vec::new(),
        usage: Usage::default(),
    }
}

/// A text in two pieces when it is long enough, so that streaming is always exercised.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let count = text.chars().count();
    let middle =
        if count > PIECE_CHARS { text.char_indices().nth(count / 2).map(|(at, _)| at) } else { None };
    let (head, tail) = text.split_at(middle.unwrap_or(text.len()));
    [head, tail].into_iter().filter(|piece| !piece.is_empty())
}

fn parse_json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("the script is no JSON: {error}"))
}

fn substitute(value: &mut Value, directory: &str, pod_id: &str) {
    match value {
        Value::String(text) if text.contains("{{") => {
            *text = text.replace("{{pod_id}}", pod_id).replace("{{dir}}", directory);
        }
        Value::Array(list) => list.iter_mut().for_each(|value| substitute(value, directory, pod_id)),
        Value::Object(map) => map.values_mut().for_each(|value| substitute(value, directory, pod_id)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn parse_reply(value: &Value, place: &str) -> Result<ScriptedReply, String> {
    let fields = object(value, place)?;
    only(fields, &["text", "tool_calls", "delay_ms", "error"], place)?;
    let delay = Duration::from_millis(
        optional(fields, "delay_ms", place, "a number of milliseconds", Value::as_u64)?.unwrap_or(0),
    );
    if let Some(error) = fields.get("error") {
        if fields.contains_key("text") || fields.contains_key("tool_calls") {
            return Err(format!("{place} has an error and a reply; keep one of them"));
        }
        return Ok(ScriptedReply { delay, outcome: parse_error(error, &format!("{place}.error"))? });
    }
    let text = optional(fields, "text", place, "a text", |value| value.as_str().map(str::to_owned))?;
    let calls = match fields.get("tool_calls") {
        None => Vec::new(),
        Some(list) => {
            let list = list.as_array().ok_or_else(|| format!("{place}.tool_calls is no list"))?;
            let calls = list.iter().enumerate();
            calls
                .map(|(at, call)| parse_call(call, &format!("{place}.tool_calls[{at}]")))
                .collect::<Result<_, _>>()?
        }
    };
    Ok(ScriptedReply { delay, outcome: ScriptedOutcome::Says { text: text.unwrap_or_default(), calls } })
}

fn parse_call(value: &Value, place: &str) -> Result<(String, Value), String> {
    let fields = object(value, place)?;
    only(fields, &["name", "input"], place)?;
    let name =
        fields.get("name").and_then(Value::as_str).ok_or_else(|| format!("{place} has no \"name\""))?;
    let input = match fields.get("input") {
        None => json!({}),
        Some(input) if input.is_object() => input.clone(),
        Some(_) => return Err(format!("{place}.input is no object")),
    };
    Ok((name.to_owned(), input))
}

fn parse_error(value: &Value, place: &str) -> Result<ScriptedOutcome, String> {
    let fields = object(value, place)?;
    only(fields, &["status", "message", "retry_after_seconds"], place)?;
    let status = fields.get("status").and_then(Value::as_u64).and_then(|status| u16::try_from(status).ok());
    let status = status
        .filter(|status| (300..600).contains(status))
        .ok_or_else(|| format!("{place}.status is no HTTP status from 300 to 599"))?;
    let message = optional(fields, "message", place, "a text", |value| value.as_str().map(str::to_owned))?;
    let wait = optional(fields, "retry_after_seconds", place, "a number of seconds", |value| {
        Duration::try_from_secs_f64(value.as_f64()?).ok()
    })?;
    Ok(ScriptedOutcome::Refuses { status, message: message.unwrap_or_default(), wait })
}

fn object<'v>(value: &'v Value, place: &str) -> Result<&'v Map<String, Value>, String> {
    value.as_object().ok_or_else(|| format!("{place} is no object"))
}

fn only(fields: &Map<String, Value>, known: &[&str], place: &str) -> Result<(), String> {
    match fields.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => Err(format!(
            "{place} has the unknown key \"{}\"; known are: {}",
            cut_end(&harmless_line(key), 80),
            known.join(", ")
        )),
    }
}

fn optional<T>(
    fields: &Map<String, Value>,
    name: &str,
    place: &str,
    what: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>, String> {
    match fields.get(name) {
        None => Ok(None),
        Some(value) => read(value).map(Some).ok_or_else(|| format!("{place}.{name} is not {what}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Asked<'_> = Asked { key: "the script", model: "script", address: "the script" };

    fn script() -> Script {
        let text = r#"{"pods": {
            "main": [
                {"text": "I start in {{dir}}", "tool_calls": [
                    {"name": "WriteFile", "input": {"path": "{{dir}}/a", "deep": [{"who": "{{pod_id}}"}]}},
                    {"name": "ListPods"}]},
                {"error": {"status": 429, "message": "slow", "retry_after_seconds": 1.5}},
                {"error": {"status": 400, "message": "prompt is too long"}},
                {"delay_ms": 3600000, "text": "late"}],
            "*": [{"text": "hi"}]}}"#;
        Script::parse_for(text, "/work", "main-2").unwrap()
    }

    fn ask(name: &str, number: u64) -> (Outcome, Vec<String>) {
        let mut heard = Vec::new();
        let cancel = Cancel::new().unwrap();
        let outcome = script().request(name, number, ASKED, &cancel, &mut |text| heard.push(text.to_owned()));
        (outcome, heard)
    }

    #[test]
    fn each_request_takes_the_next_reply_of_the_pods_list() {
        let (outcome, heard) = ask("main", 0);
        let message = outcome.unwrap();
        assert_eq!(message.text, "I start in /work");
        assert_eq!((heard.concat(), heard.len()), (message.text, 2));
        assert_eq!(message.stop, Stop::ToolUse);
        let calls: Vec<_> =
            message.tool_calls.iter().map(|call| (call.id.as_str(), call.input.to_string())).collect();
        let input = r#"{"deep":[{"who":"main-2"}],"path":"/work/a"}"#;
        assert_eq!(calls, [("call_0_0", input.to_owned()), ("call_0_1", "{}".to_owned())]);
        let check = |name: &str, number: u64, expected: &str| {
            assert_eq!(ask(name, number).0.unwrap().text, expected);
        };
        check("main", 4, END_OF_SCRIPT);
        check("coder", 0, "hi");
        check("coder", 1, END_OF_SCRIPT);
        check("coder", u64::MAX, END_OF_SCRIPT);
    }

    #[test]
    fn a_scripted_error_is_judged_as_a_servers() {
        let Err(Failure::Retry { reason, wait }) = ask("main", 1).0 else { panic!() };
        assert!(reason.contains("HTTP 429") && wait == Some(Duration::from_millis(1500)), "{reason}");
        assert!(matches!(ask("main", 2).0, Err(Failure::ContextTooLong(_))));
    }

    #[test]
    fn a_cancel_ends_a_scripted_delay() {
        let cancel = Cancel::new().unwrap();
        let other = cancel.clone();
        let setter = std::thread::Builder::new().spawn(move || other.set()).unwrap();
        let outcome = script().request("main", 3, ASKED, &cancel, &mut |_| {});
        assert_eq!(outcome, Err(Failure::Cancelled));
        setter.join().unwrap();
    }

    #[test]
    fn a_fault_in_a_script_names_its_place() {
        let check = |text: &str, expected: &str| {
            let told = Script::parse(text).unwrap_err();
            assert!(told.contains(expected), "{text}: {told}");
        };
        check("{", "no JSON: EOF while parsing an object at line 1");
        check("[]", "the script is no object");
        check("{}", "no \"pods\"");
        check(r#"{"pods":{},"x":1}"#, "the script has the unknown key \"x\"; known are: pods");
        check(r#"{"pods":{"main":{}}}"#, "pods.main is no list");
        check(r#"{"pods":{"../x":[]}}"#, "name \"../x\" is not allowed");
        check(r#"{"pods":{"a":[{},{"txt":"x"}]}}"#, "pods.a[1] has the unknown key \"txt\"");
        check(r#"{"pods":{"a":[{"text":1}]}}"#, "pods.a[0].text is not a text");
        check(r#"{"pods":{"a":[{"delay_ms":-1}]}}"#, "pods.a[0].delay_ms is not a number");
        check(r#"{"pods":{"a":[{"tool_calls":[{"input":{}}]}]}}"#, "pods.a[0].tool_calls[0] has no \"name\"");
        check(r#"{"pods":{"a":[{"tool_calls":[{"name":"X","input":3}]}]}}"#, "input is no object");
        check(r#"{"pods":{"a":[{"tool_calls":[{"name":"X","id":"1"}]}]}}"#, "unknown key \"id\"");
        check(r#"{"pods":{"a":[{"error":{"status":200}}]}}"#, "pods.a[0].error.status is no HTTP status");
        check(r#"{"pods":{"a":[{"error":{"status":500},"text":"x"}]}}"#, "an error and a reply");
        check(r#"{"pods":{"a":[{"error":{"status":500,"retry_after_seconds":-1}}]}}"#, "number of seconds");
        check(&format!("{{\"pods\":{}", "[".repeat(100_000)), "no JSON");
    }

    #[test]
    fn short_texts_come_whole_and_long_ones_in_pieces() {
        let check = |text: &str, expected: &[&str]| assert_eq!(pieces(text).collect::<Vec<_>>(), expected);
        check("", &[]);
        check("12345678", &["12345678"]);
        check("123456789", &["1234", "56789"]);
        check("日本語日本語日本語", &["日本語日", "本語日本語"]);
    }
}
