//! Any program as the model: the request as JSON on its standard input, events as JSON lines on its output.
//!
//! Reading events is pure. The program runs once per request, in the pod's directory and with its environment,
//! and its process group ends with the request.

use std::fs::File;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::sys::process::Program;
use crate::sys::wait::Cancel;
use crate::wire::provider::child::{Child, Patience, RequestFile};
use crate::wire::provider::failure::MESSAGE_BYTES_MAX;
use crate::wire::provider::reply::{PartialCall, Progress, Reply, at, text_of};
use crate::wire::provider::{Failure, ModelRequest, OnText, Outcome};
use crate::words::text::{cut_end, harmless, harmless_line};

/// The version of the request that is written here.
const VERSION: u64 = 1;
/// The exit code of a failure that may pass. Source: `EX_TEMPFAIL` of sysexits.h(3head).
const EXIT_TEMPORARY: i32 = 75;

/// A program that stands for the model.
#[derive(Debug, Clone)]
pub(super) struct CommandModel {
    /// The program and its arguments; not empty.
    pub(super) command: Vec<String>,
    /// Where it runs.
    pub(super) directory: PathBuf,
    /// The 0700 directory for requests.
    pub(super) private_dir: PathBuf,
    pub(super) patience: Patience,
}

impl CommandModel {
    /// One request.
    pub(super) fn request(&self, request: &ModelRequest, cancel: &Cancel, on_text: OnText) -> Outcome {
        let mut child = self.start(request)?;
        let (mut reply, mut line) = (Reply::default(), Vec::new());
        while let Some(piece) = child.piece(cancel)? {
            if take_piece(&mut reply, &mut line, &piece, on_text)? == Progress::Complete {
                return Ok(reply.finish());
            }
        }
        // The last line may lack its newline.
        if take(&mut reply, &line)? == Progress::Complete {
            return Ok(reply.finish());
        }
        let (status, errors) = child.finish();
        let end = match status {
            Some(status) if status.success() => "ended without a \"done\" event".to_owned(),
            Some(status) => format!("failed ({status})"),
            None => "closed its output, did not end and was killed".to_owned(),
        };
        let said = match harmless(errors.trim()) {
            said if said.is_empty() => said,
            said => format!("; the end of what it said: {said}"),
        };
        let told = format!("the model program {end}{said}");
        let may_pass = status.and_then(|status| status.code()) == Some(EXIT_TEMPORARY);
        Err(if may_pass { Failure::retry(told) } else { Failure::Final(told) })
    }

    fn start(&self, request: &ModelRequest<'_>) -> Result<Child, Failure> {
        let name = self.command.first().map_or("", String::as_str);
        let failed = |error: std::io::Error| {
            let name = harmless_line(name);
            Failure::Final(format!("cannot run the model program \"{name}\": {error}; check \"command\""))
        };
        let ModelRequest { system, items, tools, .. } = request;
        let body = json!({"version": VERSION, "system": system, "tools": tools, "messages": items});
        // In a file: a pipe would hold 64 KiB only.
        let file = RequestFile::write(&self.private_dir, body.to_string().as_bytes())?;
        let program = Program::new(name, self.command.iter().skip(1))
            .directory(&self.directory)
            .input_file(File::open(&file.path).map_err(failed)?);
        Child::start(program, file, "the model program", self.patience).map_err(failed)
    }
}

/// Takes the next piece of the output; `line` keeps what has no newline yet.
///
/// # Errors
/// When a line is an error report, or no event of this protocol.
pub fn take_piece(
    reply: &mut Reply,
    line: &mut Vec<u8>,
    piece: &[u8],
    on_text: OnText,
) -> Result<Progress, Failure> {
    for part in piece.split_inclusive(|&byte| byte == b'\n') {
        line.extend_from_slice(part);
        if part.ends_with(b"\n") {
            let progress = take(reply, &std::mem::take(line))?;
            reply.stream(on_text);
            if progress == Progress::Complete {
                return Ok(progress);
            }
        }
    }
    Ok(Progress::More)
}

/// Takes one event line.
fn take(reply: &mut Reply, line: &[u8]) -> Result<Progress, Failure> {
    let line = String::from_utf8_lossy(line);
    if line.trim().is_empty() {
        return Ok(Progress::More);
    }
    let fault = |what: &str| {
        Failure::Final(format!("the model program {what}: {}", cut_end(&harmless_line(&line), 200)))
    };
    let event =
        &serde_json::from_str::<Value>(&line).map_err(|_| fault("wrote a line that is no JSON event"))?;
    match at(event, "/event").as_str() {
        Some("text") => reply.text.push_str(text_of(event, "text")),
        Some("tool_call") => {
            let (id, name) = (text_of(event, "id").to_owned(), text_of(event, "name").to_owned());
            if name.is_empty() {
                return Err(fault("calls a tool without a name"));
            }
            let call = PartialCall { id, name, given: at(event, "/input").clone(), ..PartialCall::default() };
            reply.add_call(call).map_err(|_| fault("calls too many tools at once"))?;
        }
        Some("usage") => reply.usage += serde_json::from_value(event.clone()).unwrap_or_default(),
        Some("done") => {
            reply.stop = serde_json::from_value(at(event, "/stop").clone()).ok();
            return Ok(Progress::Complete);
        }
        Some("error") => {
            let message = at(event, "/message").as_str().unwrap_or("it gave no reason");
            let message = cut_end(&harmless_line(message), MESSAGE_BYTES_MAX);
            let message = format!("the model program reports: {message}");
            return Err(match (at(event, "/context_too_long"), at(event, "/retry")) {
                (Value::Bool(true), _) => Failure::ContextTooLong(message),
                (_, Value::Bool(true)) => Failure::retry(message),
                _ => Failure::Final(message),
            });
        }
        Some(other) => log::debug!("the model program sent the unknown event \"{}\"", harmless_line(other)),
        None => return Err(fault("wrote a line without \"event\"")),
    }
    Ok(Progress::More)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::provider::conversation::tests::input;
    use crate::words::message::Stop;
    use std::time::Duration;

    /// Asks a shell script and returns what was heard and the outcome.
    fn ask(script: &str, text: &str) -> (String, Outcome) {
        let place = tempfile::tempdir().unwrap();
        let second = Duration::from_secs(10);
        let model = CommandModel {
            command: vec!["sh".into(), "-c".into(), script.into()],
            directory: place.path().to_owned(),
            private_dir: place.path().to_owned(),
            patience: Patience { connect: second, silence: second, total: second },
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
    fn every_event_line_of_the_readme_is_understood() {
        let lines = include_str!("../../../README.md").lines().filter_map(|line| line.strip_prefix("<- "));
        let events =
            lines.filter_map(|line| line.split("   ").next().filter(|line| line.contains("\"event\"")));
        let mut kinds = Vec::new();
        for event in events {
            match take(&mut Reply::default(), event.trim().as_bytes()) {
                Ok(progress) => kinds.push(if progress == Progress::Complete { "done" } else { "more" }),
                Err(Failure::Retry { reason, .. }) if reason.contains("reports: ...") => kinds.push("retry"),
                Err(failure) => panic!("{event}: {failure:?}"),
            }
        }
        assert_eq!(kinds, ["more", "more", "more", "done", "retry"]);
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
        check("echo busy >&2; exit 75", "Retry", "failed (exit status: 75); the end of what it said: busy");
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
            patience: Patience { connect: short, silence, total: silence * 1000 },
        };
        let request = ModelRequest { system: "", items: &[], tools: &[], number: 0 };
        let cancel = Cancel::new().unwrap();
        let outcome = model("sleep 1000", short).request(&request, &cancel, &mut |_| {});
        assert!(matches!(outcome, Err(Failure::Retry { reason, .. }) if reason.contains("sent nothing")));
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
