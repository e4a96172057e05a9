//! Any program as the model: the request as JSON on its standard input, events as JSON lines on its output.
//!
//! Reading events is pure. The program runs once per request, in the pod's directory and with its environment,
//! and its process group ends with the request.

use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::sys::clock::random_hex;
use crate::sys::file::{create_at, open_directory, remove_at};
use crate::sys::process::{ErrorOutput, Output, Program};
use crate::sys::wait::Cancel;
use crate::wire::provider::conversation::{TOOL_CALLS_MAX, input_of_value, settle_stop};
use crate::wire::provider::curl::Patience;
use crate::wire::provider::failure::MESSAGE_BYTES_MAX;
use crate::wire::provider::{Failure, ModelRequest, Outcome, Progress};
use crate::words::message::{AssistantMessage, Stop, ToolCall, Usage};
use crate::words::text::{cut_end, harmless, harmless_line};

/// The version of the request that is written here.
const VERSION: u64 = 1;
/// The longest event line, in bytes.
const LINE_BYTES_MAX: usize = 16 << 20;
/// The most bytes of one reply.
const REPLY_BYTES_MAX: usize = 64 << 20;
/// How long the program may take to exit after `done` or the end of its output.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// A program that stands for the model.
#[derive(Debug, Clone)]
pub struct CommandModel {
    /// The program and its arguments; not empty.
    pub command: Vec<String>,
    /// Where it runs.
    pub directory: PathBuf,
    /// The 0700 directory for requests.
    pub private_dir: PathBuf,
    /// How long to wait for its first and for each further line.
    pub patience: Patience,
}

impl CommandModel {
    /// One request.
    ///
    /// # Errors
    /// Why there is no reply.
    pub fn request(
        &self,
        request: &ModelRequest<'_>,
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str),
    ) -> Outcome {
        let name = self.command.first().map_or("", String::as_str);
        let failed = |error: std::io::Error| {
            let action = format!("cannot run the model program \"{}\"", harmless_line(name));
            Failure::Final(format!("{action}: {error}; check \"command\""))
        };
        let input = request_file(&self.private_dir, request).map_err(|error| {
            Failure::Final(format!(
                "cannot write the request into \"{}\": {error}",
                self.private_dir.display()
            ))
        })?;
        let mut running = Program::new(name, self.command.iter().skip(1))
            .directory(&self.directory)
            .input_file(input)
            .start(ErrorOutput::Separate)
            .map_err(failed)?;
        let end = Instant::now() + self.patience.total;
        let mut patience = self.patience.first_byte;
        let mut lines = Lines::default();
        let mut reply = Reply::default();
        let mut buffer = vec![0; 16 << 10];
        let mut bytes = 0;
        loop {
            let count = match running.read(&mut buffer, Some(cancel), (Instant::now() + patience).min(end)) {
                Ok(Output::Bytes(count)) => count,
                Ok(Output::End) => break,
                Ok(Output::Cancelled) => return Err(Failure::Cancelled),
                Ok(Output::TimedOut) => {
                    let reason = format!("the model program said nothing for {} s", patience.as_secs_f64());
                    return Err(Failure::Retry { reason, wait: None });
                }
                Err(error) => return Err(failed(error)),
            };
            bytes += count;
            lines.bytes.extend_from_slice(buffer.get(..count).unwrap_or_default());
            if lines.bytes.len() > LINE_BYTES_MAX || bytes > REPLY_BYTES_MAX {
                return Err(Failure::Final("the model program says more than any model does".to_owned()));
            }
            while let Some(line) = lines.next() {
                if reply.take(&line, on_text)? == Progress::Complete {
                    return Ok(reply.finish());
                }
            }
            patience = self.patience.silence;
        }
        // The last line may lack its newline.
        if reply.take(&lines.rest(), on_text)? == Progress::Complete {
            return Ok(reply.finish());
        }
        let status = running.wait(Instant::now() + EXIT_WAIT).ok();
        Err(Failure::Final(unfinished(status, &running.error_tail(MESSAGE_BYTES_MAX))))
    }
}

/// The request in a file without a name, to be read from its beginning: a pipe would hold 64 KiB only.
fn request_file(directory: &Path, request: &ModelRequest<'_>) -> std::io::Result<File> {
    let place = open_directory(directory)?;
    let name = format!("request-{}.json", random_hex(8)?);
    let mut file = create_at(&place, Path::new(&name), 0o600)?;
    remove_at(&place, Path::new(&name))?;
    file.write_all(request_body(request).to_string().as_bytes())?;
    file.rewind()?;
    Ok(file)
}

/// What the program reads: system, tools, and the items as they are in the history.
fn request_body(request: &ModelRequest<'_>) -> Value {
    let tools: Vec<Value> = request
        .tools
        .iter()
        .map(|tool| {
            json!({"name": tool.name, "description": tool.description, "input_schema": tool.input_schema})
        })
        .collect();
    json!({"version": VERSION, "system": request.system, "tools": tools, "messages": request.items})
}

fn unfinished(status: Option<ExitStatus>, errors: &str) -> String {
    let end = match status {
        Some(status) if status.success() => "ended without a \"done\" event".to_owned(),
        Some(status) => format!("failed ({status})"),
        None => "closed its output, did not end and was killed".to_owned(),
    };
    let errors = harmless(errors.trim());
    if errors.is_empty() {
        format!("the model program {end}")
    } else {
        format!("the model program {end}; the end of what it said: {errors}")
    }
}

/// Cuts output into lines.
#[derive(Debug, Default)]
struct Lines {
    bytes: Vec<u8>,
    /// How far was looked for a newline already.
    seen: usize,
}

impl Lines {
    fn next(&mut self) -> Option<String> {
        let Some(at) = self.bytes.iter().skip(self.seen).position(|&byte| byte == b'\n') else {
            self.seen = self.bytes.len();
            return None;
        };
        let rest = self.bytes.split_off(self.seen + at + 1);
        let line = std::mem::replace(&mut self.bytes, rest);
        self.seen = 0;
        Some(String::from_utf8_lossy(&line).into_owned())
    }

    fn rest(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned()
    }
}

/// A reply that is being put together from event lines.
#[derive(Debug, Default)]
struct Reply {
    text: String,
    calls: Vec<ToolCall>,
    stop: Option<Stop>,
    usage: Usage,
}

impl Reply {
    /// Takes one line.
    fn take(&mut self, line: &str, on_text: &mut dyn FnMut(&str)) -> Result<Progress, Failure> {
        if line.trim().is_empty() {
            return Ok(Progress::More);
        }
        let shown = || cut_end(&harmless_line(line), 200);
        let event: Value = serde_json::from_str(line).map_err(|_| {
            Failure::Final(format!("the model program wrote a line that is no JSON event: {}", shown()))
        })?;
        let text = |name: &str| event.get(name).and_then(Value::as_str);
        let flag = |name: &str| event.get(name).and_then(Value::as_bool).unwrap_or(false);
        match text("event") {
            Some("text") => {
                let text = text("text").unwrap_or_default();
                if !text.is_empty() {
                    self.text.push_str(text);
                    on_text(text);
                }
            }
            Some("tool_call") => {
                let name = text("name").filter(|name| !name.is_empty());
                let name = name.ok_or_else(|| {
                    Failure::Final(format!("the model program calls a tool without a name: {}", shown()))
                })?;
                if self.calls.len() >= TOOL_CALLS_MAX {
                    return Err(Failure::Final("the model program calls too many tools at once".to_owned()));
                }
                let input = input_of_value(event.get("input").unwrap_or(&Value::Null));
                let id = text("id").unwrap_or_default().to_owned();
                self.calls.push(ToolCall { id, name: name.to_owned(), input });
            }
            Some("usage") => {
                let count = |name: &str| event.get(name).and_then(Value::as_u64).unwrap_or(0);
                self.usage += Usage {
                    input_tokens: count("input_tokens"),
                    output_tokens: count("output_tokens"),
                    cached_tokens: count("cached_tokens"),
                };
            }
            Some("done") => {
                self.stop = event.get("stop").and_then(|stop| serde_json::from_value(stop.clone()).ok());
                return Ok(Progress::Complete);
            }
            Some("error") => {
                let message = cut_end(text("message").unwrap_or("it gave no reason"), MESSAGE_BYTES_MAX);
                let message = format!("the model program reports: {}", harmless_line(&message));
                return Err(match (flag("context_too_long"), flag("retry")) {
                    (true, _) => Failure::ContextTooLong(message),
                    (false, true) => Failure::Retry { reason: message, wait: None },
                    (false, false) => Failure::Final(message),
                });
            }
            Some(other) => {
                log::debug!("the model program sent the unknown event \"{}\"", harmless_line(other))
            }
            None => {
                let what = format!("the model program wrote a line without \"event\": {}", shown());
                return Err(Failure::Final(what));
            }
        }
        Ok(Progress::More)
    }

    fn finish(self) -> AssistantMessage {
        AssistantMessage {
            text: self.text,
            stop: settle_stop(self.stop.unwrap_or(Stop::Done), &self.calls),
            tool_calls: self.calls,
            thinking: Vec::new(),
            usage: self.usage,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::provider::conversation::tests::input;

    /// Asks a shell script and returns what was heard and the outcome.
    fn ask(script: &str, text: &str) -> (String, Outcome) {
        let place = tempfile::tempdir().unwrap();
        let second = Duration::from_secs(10);
        let model = CommandModel {
            command: vec!["sh".into(), "-c".into(), script.into()],
            directory: place.path().to_owned(),
            private_dir: place.path().to_owned(),
            patience: Patience { connect: second, first_byte: second, silence: second, total: second },
        };
        let items = [input(text)];
        let request = ModelRequest { system: "s", items: &items, tools: &[], number: 3 };
        let mut heard = String::new();
        let cancel = Cancel::new().unwrap();
        let outcome = model.request(&request, &cancel, &mut |text| heard.push_str(text));
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "no request is left");
        (heard, outcome)
    }

    #[test]
    fn a_program_answers_in_event_lines() {
        let script = r#"
            echo '{"event":"text","text":"hel"}'; echo; echo '{"event":"text","text":"lo"}'
            echo '{"event":"tool_call","name":"Shell","input":{"command":"ls"},"id":"x"}'
            echo '{"event":"tool_call","name":"ListPods"}'
            echo '{"event":"usage","input_tokens":3,"output_tokens":4}'; echo '{"event":"later"}'
            printf '{"event":"done"}'"#;
        let (heard, outcome) = ask(script, "hi");
        let message = outcome.unwrap();
        assert_eq!((heard.as_str(), message.text.as_str()), ("hello", "hello"));
        assert_eq!(message.stop, Stop::ToolUse);
        let calls: Vec<_> =
            message.tool_calls.iter().map(|call| (&*call.id, call.input.to_string())).collect();
        assert_eq!(calls, [("x", r#"{"command":"ls"}"#.to_owned()), ("", "{}".to_owned())]);
        assert_eq!(message.usage.output_tokens, 4);
    }

    #[test]
    fn a_large_request_reaches_the_program() {
        let count = r#"printf '{"event":"text","text":"%d"}\n{"event":"done","stop":"length"}\n' $(wc -c)"#;
        let message = ask(count, &"x".repeat(1 << 20)).1.unwrap();
        assert!(message.text.parse::<usize>().unwrap() > 1 << 20);
        assert_eq!(message.stop, Stop::Length);
        let echo = r#"grep -o '"messages":\[{.*}\],"system":"s","tools":\[\],"version":1' >/dev/null && echo '{"event":"done"}'"#;
        assert!(ask(echo, "hi").1.is_ok());
    }

    #[test]
    fn what_goes_wrong_is_told() {
        let check = |script: &str, kind: &str, expected: &str| {
            let told = format!("{:?}", ask(script, "hi").1.unwrap_err());
            assert!(told.starts_with(kind) && told.contains(expected), "{script}: {told}");
        };
        check("echo oh no >&2; exit 3", "Final", "failed (exit status: 3); the end of what it said: oh no");
        check("seq 50000 >&2; exit 3", "Final", "50000");
        check("exit 0", "Final", "ended without a \\\"done\\\" event");
        check("kill -9 $$", "Final", "signal: 9");
        check("echo words", "Final", "no JSON event: words");
        check("echo '{}'", "Final", "without \\\"event\\\"");
        check("echo '{\"event\":\"tool_call\"}'", "Final", "without a name");
        check("echo '{\"event\":\"error\",\"message\":\"m\"}'", "Final", "reports: m");
        check("echo '{\"event\":\"error\",\"message\":\"m\",\"retry\":true}'", "Retry", "reports: m");
        check("echo '{\"event\":\"error\",\"context_too_long\":true}'", "ContextTooLong", "no reason");
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let place = tempfile::tempdir().unwrap();
        let short = Duration::from_millis(50);
        let model = |script: &str, silence: Duration| CommandModel {
            command: vec!["sh".into(), "-c".into(), script.into()],
            directory: place.path().to_owned(),
            private_dir: place.path().to_owned(),
            patience: Patience { connect: short, first_byte: silence, silence, total: silence * 2 },
        };
        let request = ModelRequest { system: "", items: &[], tools: &[], number: 0 };
        let cancel = Cancel::new().unwrap();
        let outcome = model("sleep 1000", short).request(&request, &cancel, &mut |_| {});
        assert!(matches!(outcome, Err(Failure::Retry { reason, .. }) if reason.contains("said nothing")));
        let long = Duration::from_secs(1000);
        let script = r#"echo '{"event":"text","text":"x"}'; sleep 1000"#;
        let outcome = model(script, long).request(&request, &cancel, &mut |_| cancel.set());
        assert_eq!(outcome, Err(Failure::Cancelled));
        let gone = CommandModel { command: vec!["/nowhere".into()], ..model("", short) };
        let cancel = Cancel::new().unwrap();
        let outcome = gone.request(&request, &cancel, &mut |_| {});
        assert!(matches!(outcome, Err(Failure::Final(told)) if told.contains("check \"command\"")));
    }
}
