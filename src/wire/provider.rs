//! The model behind a pod: one request in our own words, one reply, whatever the provider speaks.
//!
//! Translation is in pure functions of `anthropic` and `openai`; bytes come over `curl`. Runs on the turn thread.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use crate::store::manifest::{ProviderKind, ProviderSettings};
use crate::sys::file::read_regular;
use crate::sys::wait::Cancel;
use crate::wire::provider::child::Patience;
use crate::wire::provider::command::CommandModel;
use crate::wire::provider::failure::Asked;
use crate::wire::provider::http::{Dialect, Http};
use crate::wire::provider::script::Script;
use crate::words::error::{Error, Result};
use crate::words::identity::{PodId, PodName};
use crate::words::message::{AssistantMessage, Item};
use crate::words::text::harmless_line;

pub mod anthropic;
pub mod child;
pub mod command;
mod conversation;
mod curl;
pub mod failure;
mod http;
mod key;
pub mod openai;
pub mod reply;
pub mod script;
pub mod sse;

/// The first pause before a request is tried again.
const BACKOFF_START: Duration = Duration::from_millis(500);
/// The longest pause that we choose.
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// The longest pause that a provider may ask for; beyond that, trying again tells more than waiting.
const WANTED_WAIT_MAX: Duration = Duration::from_secs(600);
/// The largest script file, in bytes.
const SCRIPT_BYTES_MAX: usize = 16 << 20;

/// A tool as the model is told about it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolSpec {
    /// Its name.
    pub name: &'static str,
    /// What it does and how to use it, for the model.
    pub description: String,
    /// JSON schema of its input: an object.
    pub input_schema: Value,
}

/// One request to the model.
#[derive(Debug, Clone, Copy)]
pub struct ModelRequest<'a> {
    /// The instruction text.
    pub system: &'a str,
    /// The conversation; marks of turns and errors are skipped in translation.
    pub items: &'a [Item],
    /// The tools it may call.
    pub tools: &'a [ToolSpec],
    /// How many requests this session has made before, the failed ones included.
    pub number: u64,
}

/// Why there is no reply.
#[derive(Debug, Clone, PartialEq)]
pub enum Failure {
    /// It may work later: overload, a broken stream, a server error.
    Retry {
        /// What happened.
        reason: String,
        /// How long the provider wants us to wait.
        wait: Option<Duration>,
    },
    /// The conversation does not fit into the model's context any more.
    ContextTooLong(String),
    /// It will not work without a person: a wrong key, an unknown model.
    Final(String),
    /// Somebody cancelled the turn.
    Cancelled,
}

impl Failure {
    fn retry(reason: impl Into<String>) -> Failure {
        Failure::Retry { reason: reason.into(), wait: None }
    }

    /// The same with its words changed.
    fn map(self, change: impl Fn(String) -> String) -> Failure {
        match self {
            Failure::Retry { reason, wait } => Failure::Retry { reason: change(reason), wait },
            Failure::ContextTooLong(reason) => Failure::ContextTooLong(change(reason)),
            Failure::Final(reason) => Failure::Final(change(reason)),
            Failure::Cancelled => Failure::Cancelled,
        }
    }
}

/// Hears each piece of text as it comes.
pub type OnText<'a> = &'a mut dyn FnMut(&str);
/// The environment, by the names of its variables.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;
/// The outcome of one request.
pub type Outcome = Result<AssistantMessage, Failure>;

/// Where the pod that asks is.
#[derive(Debug, Clone)]
pub struct ProviderPlace {
    /// Its id.
    pub pod_id: PodId,
    /// Its name, by which a script file knows it.
    pub name: PodName,
    /// Its working directory.
    pub directory: PathBuf,
    /// A 0700 directory, which exists, for the bodies of requests.
    pub private_dir: PathBuf,
}

/// The model behind a pod, ready to be asked.
#[derive(Debug, Clone)]
pub struct Provider {
    backend: Backend,
}

#[derive(Debug, Clone)]
enum Backend {
    Http(Box<Http>),
    Script { script: Script, name: PodName, file: String },
    Command(CommandModel),
}

impl Provider {
    /// Checks the settings as far as that goes without asking the model, and gets everything ready.
    ///
    /// # Errors
    /// A missing key, a key file that others can read, no curl, no script, a bad address: a sentence that says
    /// what to do.
    pub fn new(settings: &ProviderSettings, pod: ProviderPlace) -> Result<Provider> {
        Provider::with_lookup(settings, pod, &|name| std::env::var(name).ok())
    }

    fn with_lookup(settings: &ProviderSettings, pod: ProviderPlace, lookup: Lookup) -> Result<Provider> {
        let kind = settings.kind.ok_or_else(no_provider)?;
        let model = settings.model.clone().unwrap_or_else(|| default_model(kind).to_owned());
        let http = |dialect, place| Http::new(dialect, settings, model, place, lookup).map(Box::new);
        let backend = match kind {
            ProviderKind::Anthropic => Backend::Http(http(Dialect::Anthropic, pod.private_dir)?),
            ProviderKind::Openai => Backend::Http(http(Dialect::Openai, pod.private_dir)?),
            ProviderKind::Script => {
                let path = settings.file.as_deref().ok_or_else(|| {
                    Error::told("the provider kind \"script\" needs \"file\", the path of a script file")
                })?;
                let script = read_script(path, &pod)?;
                Backend::Script { script, name: pod.name, file: path.display().to_string() }
            }
            ProviderKind::Command => Backend::Command(CommandModel {
                command: check_command(&settings.command)?,
                directory: pod.directory,
                private_dir: pod.private_dir,
                patience: Patience::of(settings.silence_seconds),
            }),
        };
        Ok(Provider { backend })
    }

    /// Fills in what the settings leave open from the environment: the kind, its address and its model.
    ///
    /// # Errors
    /// When nothing says which model to use; the sentence names the ways to say it.
    pub fn choose(settings: &ProviderSettings) -> Result<ProviderSettings> {
        Provider::choose_from(settings, &|name| std::env::var(name).ok())
    }

    fn choose_from(settings: &ProviderSettings, lookup: Lookup) -> Result<ProviderSettings> {
        let set =
            |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let anthropic = || set("ANTHROPIC_API_KEY").map(|_| ProviderKind::Anthropic);
        let openai =
            || set("OPENAI_API_KEY").or_else(|| set("OPENAI_BASE_URL")).map(|_| ProviderKind::Openai);
        let kind = settings.kind.or_else(anthropic).or_else(openai).ok_or_else(no_provider)?;
        let base_url = match kind {
            ProviderKind::Anthropic => set("ANTHROPIC_BASE_URL"),
            ProviderKind::Openai => set("OPENAI_BASE_URL"),
            ProviderKind::Script | ProviderKind::Command => None,
        };
        Ok(ProviderSettings {
            kind: Some(kind),
            base_url: settings.base_url.clone().or(base_url),
            model: settings.model.clone().or_else(|| Some(default_model(kind).to_owned())),
            ..settings.clone()
        })
    }

    /// Asks the model once. Runs until the reply is whole; each piece of text goes to `on_text` as it comes.
    ///
    /// Nothing of a half reply counts. Trying again is the caller's business: see `backoff`.
    ///
    /// # Errors
    /// Why there is no reply, and whether another try makes sense. No key is ever in it.
    pub fn request(&self, request: &ModelRequest<'_>, cancel: &Cancel, on_text: OnText<'_>) -> Outcome {
        if cancel.is_set() {
            return Err(Failure::Cancelled);
        }
        let mut message = match &self.backend {
            Backend::Http(http) => http.request(request, cancel, on_text)?,
            Backend::Script { script, name, file } => {
                let asked = Asked { key: "the script", model: "script", address: file };
                script.request(name.as_str(), request.number, asked, cancel, on_text)?
            }
            Backend::Command(command) => command.request(request, cancel, on_text)?,
        };
        conversation::make_ids_unique(&mut message, request.items, request.number);
        Ok(message)
    }

    /// Asks another model from the next request on. A script and a program know none.
    pub fn set_model(&mut self, model: String) {
        if let Backend::Http(http) = &mut self.backend {
            http.model = model;
        }
    }

    /// The same provider with other limits of waiting.
    #[must_use]
    pub fn with_patience(mut self, patience: Patience) -> Provider {
        match &mut self.backend {
            Backend::Http(http) => http.curl.patience = patience,
            Backend::Command(command) => command.patience = patience,
            Backend::Script { .. } => {}
        }
        self
    }
}

/// What a person is told about it: never a key, but where it comes from.
impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.backend {
            Backend::Http(http) => http.fmt(f),
            Backend::Script { file, .. } => write!(f, "script: the replies in \"{file}\""),
            Backend::Command(model) => write!(f, "command: \"{}\"", model.command.join(" ")),
        }
    }
}

/// How long to wait before the next try, after this many failures in a row.
///
/// Doubles from half a second to a minute. `jitter` from 0 to 1 spreads pods that failed together: it takes up
/// to half of our own pause away, and adds up to a quarter to a wanted one, which is never cut short unless it
/// is over 10 minutes.
pub fn backoff(attempt: u32, wanted: Option<Duration>, jitter: f64) -> Duration {
    let jitter = if jitter.is_finite() { jitter.clamp(0.0, 1.0) } else { 0.0 };
    let doublings = attempt.saturating_sub(1).min(16);
    let own = (BACKOFF_START * (1 << doublings)).min(BACKOFF_MAX);
    match wanted.filter(|wanted| !wanted.is_zero()) {
        None => own.mul_f64(1.0 - jitter / 2.0),
        Some(wanted) => wanted.min(WANTED_WAIT_MAX).mul_f64(1.0 + jitter / 4.0).min(WANTED_WAIT_MAX),
    }
}

fn default_model(kind: ProviderKind) -> &'static str {
    match kind {
        ProviderKind::Anthropic => anthropic::DEFAULT_MODEL,
        ProviderKind::Openai => openai::DEFAULT_MODEL,
        ProviderKind::Script => "script",
        ProviderKind::Command => "command",
    }
}

fn no_provider() -> Error {
    Error::told(
        "no model provider is set: set ANTHROPIC_API_KEY, OPENAI_API_KEY or OPENAI_BASE_URL, or \"provider\" in the user manifest (~/.config/insomnia/manifest.json); \"insomnia demo\" works without any",
    )
}

fn read_script(path: &Path, pod: &ProviderPlace) -> Result<Script> {
    let shown = path.display();
    let text = read_regular(path, SCRIPT_BYTES_MAX)
        .map_err(|source| Error::io(format!("read the script file \"{shown}\""), source))?;
    Script::parse(&text, &pod.directory.to_string_lossy(), pod.pod_id.as_str())
        .map_err(|fault| Error::told(format!("the script file \"{shown}\" cannot be used: {fault}")))
}

fn check_command(command: &[String]) -> Result<Vec<String>> {
    let fault = match command.first().map_or("", String::as_str) {
        "" => "the provider kind \"command\" needs \"command\", a list of the program and its arguments"
            .to_owned(),
        program if program.starts_with('/') && !Path::new(program).is_file() => {
            format!("the model program \"{}\" does not exist; correct \"command\"", harmless_line(program))
        }
        _ => return Ok(command.to_vec()),
    };
    Err(Error::told(fault))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(directory: &Path) -> ProviderPlace {
        ProviderPlace {
            pod_id: PodId::new("main-2").unwrap(),
            name: PodName::new("main").unwrap(),
            directory: directory.to_owned(),
            private_dir: directory.to_owned(),
        }
    }

    fn settings(json: &str) -> ProviderSettings {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn the_environment_fills_in_what_the_settings_leave_open() {
        let check = |given: &str, environment: &[(&str, &str)], expected: Result<&str, &str>| {
            let lookup = |name: &str| {
                environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            match (Provider::choose_from(&settings(given), &lookup), expected) {
                (Ok(chosen), Ok(expected)) => assert_eq!(chosen, settings(expected)),
                (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
                (chosen, expected) => panic!("{chosen:?} is not {expected:?}"),
            }
        };
        let anthropic = r#"{"kind":"anthropic","model":"claude-sonnet-4-5"}"#;
        let openai = r#"{"kind":"openai","model":"gpt-5-mini"}"#;
        check("{}", &[], Err("OPENAI_BASE_URL, or \"provider\" in the user manifest"));
        check("{}", &[("ANTHROPIC_API_KEY", " ")], Err("insomnia demo"));
        check("{}", &[("ANTHROPIC_API_KEY", "k"), ("OPENAI_API_KEY", "k")], Ok(anthropic));
        check("{}", &[("OPENAI_API_KEY", "k")], Ok(openai));
        check(
            r#"{"model":"qwen"}"#,
            &[("OPENAI_BASE_URL", "http://h")],
            Ok(r#"{"kind":"openai","model":"qwen","base_url":"http://h"}"#),
        );
        check(
            r#"{"kind":"anthropic","model":"m"}"#,
            &[("ANTHROPIC_BASE_URL", "http://a"), ("OPENAI_BASE_URL", "http://o")],
            Ok(r#"{"kind":"anthropic","model":"m","base_url":"http://a"}"#),
        );
        check(
            r#"{"kind":"openai","model":"m","base_url":"http://mine"}"#,
            &[("OPENAI_BASE_URL", "http://o")],
            Ok(r#"{"kind":"openai","model":"m","base_url":"http://mine"}"#),
        );
        let script = r#"{"kind":"script","file":"/f","model":"script"}"#;
        check(script, &[("OPENAI_BASE_URL", "http://o")], Ok(script));
    }

    #[test]
    fn wrong_settings_are_told_before_the_first_request() {
        let directory = tempfile::tempdir().unwrap();
        let bad_script = directory.path().join("bad.json");
        std::fs::write(&bad_script, "{\"pods\":{\"main\":[{\"txt\":1}]}}").unwrap();
        let check = |given: &str, key: Option<&str>, path: &str, expected: &str| {
            let given = given.replace("DIR", directory.path().to_str().unwrap());
            let lookup = |name: &str| match name {
                "PATH" => Some(path.to_owned()),
                "ANTHROPIC_API_KEY" => key.map(str::to_owned),
                _ => None,
            };
            let told = match Provider::with_lookup(&settings(&given), place(directory.path()), &lookup) {
                Ok(provider) => format!("{provider:?}"),
                Err(error) => error.to_string(),
            };
            assert!(told.contains(expected), "{given}: {told}");
            assert!(key.is_none_or(|key| !told.contains(key)), "{told}");
        };
        let (key, path) = (Some("sk-secret-0123456789"), "/usr/local/bin:/usr/bin:/bin");
        check("{}", key, path, "no model provider is set");
        check(r#"{"kind":"anthropic"}"#, None, path, "ANTHROPIC_API_KEY, which should hold");
        check(r#"{"kind":"anthropic"}"#, key, path, "claude-sonnet-4-5");
        check(r#"{"kind":"anthropic"}"#, key, "/nowhere:relative", "\"curl\", by which the model is reached");
        check(r#"{"kind":"anthropic","base_url":"h"}"#, key, path, "neither http:// nor https://");
        check(r#"{"kind":"anthropic","headers":{"x":"a\nb"}}"#, key, path, "line break");
        check(r#"{"kind":"openai"}"#, None, path, "OPENAI_API_KEY, which should hold");
        check(r#"{"kind":"openai","base_url":"http://localhost:1"}"#, None, path, "gpt-5-mini");
        let named = r#"{"kind":"openai","base_url":"http://localhost:1","api_key_env":"MINE"}"#;
        check(named, None, path, "the variable MINE, which should hold");
        let patient = r#"{"kind":"openai","base_url":"http://localhost:1","silence_seconds":900}"#;
        check(patient, None, path, "silence: 900s");
        check(r#"{"kind":"script"}"#, None, path, "needs \"file\"");
        check(r#"{"kind":"script","file":"DIR/nowhere"}"#, None, path, "cannot read the script file");
        check(r#"{"kind":"script","file":"DIR/bad.json"}"#, None, path, "unknown field `txt`");
        check(r#"{"kind":"command"}"#, None, path, "needs \"command\"");
        check(r#"{"kind":"command","command":["/nowhere/x"]}"#, None, path, "does not exist");
    }

    #[test]
    fn a_script_answers_through_the_same_door() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("s.json");
        std::fs::write(&file, r#"{"pods":{"main":[{"text":"{{pod_id}} here"}]}}"#).unwrap();
        let given = ProviderSettings {
            kind: Some(ProviderKind::Script),
            file: Some(file.clone()),
            ..ProviderSettings::default()
        };
        let provider = Provider::new(&given, place(directory.path())).unwrap();
        std::fs::remove_file(file).unwrap(); // it is read once
        let request = ModelRequest { system: "", items: &[], tools: &[], number: 0 };
        let cancel = Cancel::new().unwrap();
        assert_eq!(provider.request(&request, &cancel, &mut |_| {}).unwrap().text, "main-2 here");
        cancel.set();
        assert_eq!(provider.request(&request, &cancel, &mut |_| {}), Err(Failure::Cancelled));
    }

    /// JSON made of the words that the parsers look for, in every wrong place.
    fn any_event() -> impl proptest::strategy::Strategy<Value = Value> {
        use proptest::prelude::*;
        const WORDS: [&str; 30] = [
            "type",
            "index",
            "delta",
            "content_block",
            "content_block_start",
            "content_block_delta",
            "message_delta",
            "message",
            "text",
            "text_delta",
            "thinking",
            "thinking_delta",
            "tool_use",
            "input_json_delta",
            "partial_json",
            "input",
            "id",
            "name",
            "choices",
            "content",
            "tool_calls",
            "function",
            "arguments",
            "function_call",
            "finish_reason",
            "stop_reason",
            "usage",
            "error",
            "code",
            "prompt_tokens",
        ];
        let word = proptest::sample::select(WORDS.to_vec());
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (0_u64..3).prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            word.clone().prop_map(Value::from),
            "[{}\"a]{0,4}".prop_map(Value::from),
        ];
        leaf.prop_recursive(5, 40, 5, move |inner| {
            let fields = proptest::collection::vec((word.clone(), inner.clone()), 0..6);
            prop_oneof![
                proptest::collection::vec(inner, 0..4).prop_map(Value::from),
                fields.prop_map(|fields| {
                    Value::Object(fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
                }),
            ]
        })
    }

    proptest::proptest! {
        #[test]
        fn no_event_makes_a_parser_panic_and_inputs_stay_objects(
            events in proptest::collection::vec(any_event(), 0..8)
        ) {
            for take in [anthropic::take, openai::take] {
                let (mut reply, mut heard) = (reply::Reply::default(), String::new());
                for event in &events {
                    let _ = take(&mut reply, &event.to_string()); // refusals are fine
                    reply.stream(&mut |text| heard.push_str(text));
                }
                let message = reply.finish();
                proptest::prop_assert_eq!(message.text, heard);
                proptest::prop_assert!(message.tool_calls.iter().all(|call| call.input.is_object()));
            }
        }
    }

    #[test]
    fn pauses_grow_and_a_wanted_one_is_kept() {
        let check = |attempt: u32, wanted: Option<u64>, jitter: f64, expected: f64| {
            let wait = backoff(attempt, wanted.map(Duration::from_secs), jitter);
            assert!((wait.as_secs_f64() - expected).abs() < 1e-6, "{attempt} {wanted:?} {jitter}: {wait:?}");
        };
        check(0, None, 0.0, 0.5);
        check(1, None, 0.0, 0.5);
        check(2, None, 0.0, 1.0);
        check(2, None, 1.0, 0.5);
        check(5, None, 0.0, 8.0);
        check(8, None, 0.0, 60.0);
        check(u32::MAX, None, 0.0, 60.0);
        check(1, Some(7), 0.0, 7.0);
        check(1, Some(8), 1.0, 10.0);
        check(9, Some(2), 0.0, 2.0);
        check(1, Some(90_000), 0.0, 600.0);
        check(1, Some(u64::MAX), 1.0, 600.0);
        check(3, Some(0), 0.0, 2.0);
        check(1, None, f64::NAN, 0.5);
    }
}
