//! The scripted model: replies from a file, for tests, demonstrations and examples.
//!
//! Parsing is pure. Each request of a pod takes the next reply of the list of the pod's name, else of `*`; the
//! position is the number of the request, which survives a restart.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::sys::wait::Cancel;
use crate::wire::provider::failure::{Asked, of_status};
use crate::wire::provider::reply::{PartialCall, Reply};
use crate::wire::provider::{Failure, OnText, Outcome};
use crate::words::identity::PodName;
use crate::words::text::json_fault;

/// What the model says when its replies are used up.
pub const END_OF_SCRIPT: &str = "(end of script)";
/// The list for pods that have none of their own.
const ANY_POD: &str = "*";
/// Texts longer than this, in characters, are streamed in pieces.
const PIECE_CHARS: usize = 8;

/// The replies of all pods.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    pods: BTreeMap<String, Vec<ScriptedReply>>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ScriptedReply {
    text: String,
    tool_calls: Vec<ScriptedCall>,
    delay_ms: u64,
    error: Option<ScriptedError>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScriptedCall {
    name: String,
    #[serde(default)]
    input: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScriptedError {
    status: u16,
    #[serde(default)]
    message: String,
    retry_after_seconds: Option<f64>,
}

impl Script {
    /// Reads the text of a script file, with `{{dir}}` and `{{pod_id}}` in any string replaced.
    ///
    /// # Errors
    /// A sentence that names the place, as line and column or as `pods.main[2]`, and what is wrong there.
    pub fn parse(text: &str, directory: &str, pod_id: &str) -> Result<Script, String> {
        let quoted = Value::from(directory).to_string();
        let inner = quoted.get(1..quoted.len() - 1).unwrap_or_default();
        let text = text.replace("{{pod_id}}", pod_id).replace("{{dir}}", inner);
        let script: Script = serde_json::from_str(&text).map_err(|error| {
            format!("{} at line {} column {}", json_fault(&error), error.line(), error.column())
        })?;
        for (name, list) in &script.pods {
            if name != ANY_POD {
                PodName::new(name.clone()).map_err(|error| format!("pods: {error}; or use \"*\""))?;
            }
            for (at, reply) in list.iter().enumerate() {
                reply.check().map_err(|fault| format!("pods.{name}[{at}]{fault}"))?;
            }
        }
        Ok(script)
    }

    /// One request: what the script says, or `Cancelled`.
    pub(super) fn request(
        &self,
        name: &str,
        number: u64,
        asked: Asked<'_>,
        cancel: &Cancel,
        on_text: OnText<'_>,
    ) -> Outcome {
        let end = ScriptedReply { text: END_OF_SCRIPT.to_owned(), ..ScriptedReply::default() };
        let list = self.pods.get(name).or_else(|| self.pods.get(ANY_POD));
        let scripted = list.and_then(|list| list.get(usize::try_from(number).ok()?)).unwrap_or(&end);
        if cancel.sleep(Duration::from_millis(scripted.delay_ms)) {
            return Err(Failure::Cancelled);
        }
        if let Some(error) = &scripted.error {
            let wait = error.retry_after_seconds.map(Duration::from_secs_f64);
            return Err(of_status(error.status, &error.message, wait, asked));
        }
        pieces(&scripted.text).for_each(on_text);
        let calls = scripted.tool_calls.iter().enumerate().map(|(index, call)| PartialCall {
            id: format!("call_{number}_{index}"),
            name: call.name.clone(),
            given: Value::Object(call.input.clone()),
            ..PartialCall::default()
        });
        let mut reply = Reply::default();
        reply.text.clone_from(&scripted.text);
        reply.calls.extend(calls);
        Ok(reply.finish())
    }
}

impl ScriptedReply {
    fn check(&self) -> Result<(), &'static str> {
        let Some(error) = &self.error else { return Ok(()) };
        if !self.text.is_empty() || !self.tool_calls.is_empty() {
            return Err(" has an error and a reply; keep one of them");
        }
        if !(300..600).contains(&error.status) {
            return Err(".error.status is no HTTP status from 300 to 599");
        }
        let fault = ".error.retry_after_seconds is not a number of seconds";
        Duration::try_from_secs_f64(error.retry_after_seconds.unwrap_or(0.0)).map(drop).map_err(|_| fault)
    }
}

/// A text in two pieces when it is long enough, so that streaming is always exercised.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let count = text.chars().count();
    let middle = text.char_indices().nth(count / 2).filter(|_| count > PIECE_CHARS);
    let (head, tail) = text.split_at(middle.map_or(0, |(at, _)| at));
    [head, tail].into_iter().filter(|piece| !piece.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::message::Stop;

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
        Script::parse(text, "/home/w", "main-2").unwrap()
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
        assert_eq!(message.text, "I start in /home/w");
        assert_eq!((heard.concat(), heard.len()), (message.text, 2));
        assert_eq!(message.stop, Stop::ToolUse);
        let calls: Vec<_> =
            message.tool_calls.iter().map(|call| (call.id.as_str(), call.input.to_string())).collect();
        let input = r#"{"deep":[{"who":"main-2"}],"path":"/home/w/a"}"#;
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
            let told = Script::parse(text, "/home/w", "main-2").unwrap_err();
            assert!(told.contains(expected), "{text}: {told}");
        };
        check("{", "EOF while parsing an object at line 1");
        check("[]", "expected an object at line 1");
        check("{}", "missing field `pods` at line 1");
        check(r#"{"pods":{},"x":1}"#, "unknown field `x`, expected `pods` at line 1 column 14");
        check(r#"{"pods":{"main":{}}}"#, "invalid type: an object, expected a list at line 1");
        check(r#"{"pods":{"../x":[]}}"#, "name \"../x\" is not allowed");
        check(
            r#"{"pods":{"a":[{},{"txt":"x"}]}}"#,
            "unknown field `txt`, expected one of `text`, `tool_calls`, `delay_ms`, `error` at line 1 column 23",
        );
        check(r#"{"pods":{"a":[{"text":1}]}}"#, "invalid type: integer `1`, expected a string at line 1");
        check(
            r#"{"pods":{"a":[{"delay_ms":-1}]}}"#,
            "invalid value: integer `-1`, expected a whole number, not negative at line 1",
        );
        check(r#"{"pods":{"a":[{"tool_calls":[{"input":{}}]}]}}"#, "missing field `name` at line 1");
        check(
            r#"{"pods":{"a":[{"tool_calls":[{"name":"X","input":3}]}]}}"#,
            "invalid type: integer `3`, expected an object at line 1",
        );
        check(r#"{"pods":{"a":[{"tool_calls":[{"name":"X","id":"1"}]}]}}"#, "unknown field `id`");
        check(r#"{"pods":{"a":[{"error":{"status":200}}]}}"#, "pods.a[0].error.status is no HTTP status");
        check(r#"{"pods":{"a":[{"error":{"status":500},"text":"x"}]}}"#, "an error and a reply");
        check(r#"{"pods":{"a":[{"error":{"status":500,"retry_after_seconds":-1}}]}}"#, "number of seconds");
        check(&format!("{{\"pods\":{}", "[".repeat(100_000)), "expected an object at line 1");
        let deep = format!(r#"{{"pods":{{"a":[{{"tool_calls":[{{"input":{{"a":{}"#, "[".repeat(100_000));
        check(&deep, "recursion limit exceeded at line 1");
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
