//! What travels over a pod's socket: one JSON object a line, one request, one reply.
//!
//! Pure. Bytes become a typed `Request` in one function, `parse_request`; nothing past it sees JSON. The reply
//! types are those of the method table in the README.

use std::fmt;

use serde::de::value::MapDeserializer;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::words::identity::{Life, Pid, PodId, PodName};
use crate::words::limits::MAX_LINE_BYTES;
use crate::words::message::{Cause, Item, LoggedItem, TurnResult, Usage};
use crate::words::scope::Rule;
use crate::words::text::{cut_end, json_fault};

/// Version of this protocol, told by `status`.
pub const PROTOCOL_VERSION: u32 = 1;
/// The longest report, in bytes: sixty rules with the longest paths there are.
const EVENT_BYTES_MAX: usize = 256 << 10;
/// The longest reason of a refusal: it may repeat what was sent.
const REASON_BYTES_MAX: usize = 2 << 10;

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The line is no request of this protocol.
    BadRequest,
    /// There is no such method.
    UnknownMethod,
    /// The line is over 1 MiB.
    TooLarge,
    /// A bound is reached; try again later.
    Busy,
    /// The pod is ending.
    ShuttingDown,
    /// The asker may not do this.
    NotAllowed,
    /// The pod that is meant is not this one, or not known here.
    UnknownPod,
    /// The pod's state does not allow it now.
    Conflict,
    /// Something failed inside the pod.
    Internal,
}

/// A refusal as it goes over the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireError {
    /// What kind of refusal.
    pub code: ErrorCode,
    /// What happened, to what, and what to do.
    pub message: String,
}

impl WireError {
    /// A refusal with its sentence.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> WireError {
        WireError { code, message: message.into() }
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for WireError {}

/// The pod that asks, and the very life of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sender {
    /// Its id.
    pub pod_id: PodId,
    /// Its life.
    pub life: Life,
}

/// One request: what is asked, by whom, of which life. People's requests carry neither `from` nor `to`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Request {
    /// What is asked.
    #[serde(flatten)]
    pub method: Method,
    /// The pod that asks, `None` for a person.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Sender>,
    /// The life that is meant, `None` for whoever listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Life>,
}

/// What can be asked of a pod. `not_allowed` and `conflict` are decided in one place, the server's `admit`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", content = "params", rename_all = "snake_case", deny_unknown_fields)]
pub enum Method {
    /// Start a turn with this input, or queue it for the running one. Anyone who may send; not while ending.
    Run {
        /// The text.
        input: String,
    },
    /// Leave text for the next turn. Anyone who may send; not while ending.
    Notify {
        /// The text.
        message: String,
    },
    /// A life-cycle report. Only from a known child; also while ending.
    PodEvent(PodEvent),
    /// Go on after a failed or cancelled turn. Only while paused.
    #[serde(deserialize_with = "nothing")]
    Resume,
    /// Stop the running turn. Only while one runs.
    #[serde(deserialize_with = "nothing")]
    Cancel,
    /// End gracefully. From a person or the line of spawners; always.
    #[serde(deserialize_with = "nothing")]
    Shutdown,
    /// The session's log. Always.
    GetHistory {
        /// The first item wanted.
        #[serde(skip_serializing_if = "Option::is_none")]
        since: Option<u64>,
    },
    /// Health and state. Always.
    #[serde(deserialize_with = "nothing")]
    Status,
    /// The assistant's text. Always.
    ReadOutput {
        /// The first item wanted; without it the latest turn.
        #[serde(skip_serializing_if = "Option::is_none")]
        since: Option<u64>,
    },
    /// The pods this one knows. Always.
    #[serde(deserialize_with = "nothing")]
    ListPods,
    /// Know these pods from now on. From the line of spawners or a person; not while ending.
    Introduce {
        /// The pods.
        pods: Vec<Introduction>,
    },
    /// Ask another model from the next request on. From the line of spawners or a person; not while ending.
    Set {
        /// The model's name.
        model: String,
    },
    /// Event lines as they happen. People only.
    Subscribe {
        /// The first item wanted; without it only what comes.
        #[serde(skip_serializing_if = "Option::is_none")]
        since: Option<u64>,
    },
}

/// A pod as another one is introduced to it: who it will be when it sends.
pub type Introduction = Sender;

/// The names of all methods, so that an unknown one gets an error of its own.
const METHODS: [&str; 13] = [
    "run",
    "notify",
    "pod_event",
    "resume",
    "cancel",
    "shutdown",
    "get_history",
    "status",
    "read_output",
    "list_pods",
    "introduce",
    "set",
    "subscribe",
];

/// `params` stays text until the method says what belongs there: a line of a million small values would cost
/// many times its length as a tree, and a deeply nested one the stack.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<'a> {
    method: String,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    from: Option<Sender>,
    to: Option<Life>,
}

/// Methods without parameters accept an empty object.
fn nothing<'de, D: Deserializer<'de>>(params: D) -> Result<(), D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}
    Nothing::deserialize(params).map(|Nothing {}| ())
}

/// Reads one request line, without its newline.
///
/// # Errors
/// A `WireError` ready to be sent: `too_large`, `bad_request` with the fault, or `unknown_method`.
pub fn parse_request(line: &[u8]) -> Result<Request, WireError> {
    if line.len() >= MAX_LINE_BYTES {
        return Err(too_large());
    }
    let bad = |reason: String| WireError::new(ErrorCode::BadRequest, cut_end(&reason, REASON_BYTES_MAX));
    let text = std::str::from_utf8(line).map_err(|_| bad("the line is not UTF-8".into()))?;
    if !text.trim_start_matches([' ', '\t']).starts_with('{') {
        return Err(bad("the line is no JSON object".into())); // serde would also take a list for a struct
    }
    let Envelope { method: name, params, from, to } = serde_json::from_str(text).map_err(|error| {
        bad(format!("the line is no request: {} at column {}", json_fault(&error), error.column()))
    })?;
    if !METHODS.contains(&name.as_str()) {
        let shown: String = name.chars().take(64).flat_map(char::escape_default).collect();
        return Err(WireError::new(ErrorCode::UnknownMethod, format!("there is no method \"{shown}\"")));
    }
    let fault = |error: serde_json::Error| bad(format!("params of \"{name}\": {}", json_fault(&error)));
    let params = match params.filter(|params| params.get() != "null") {
        Some(params) => params,
        None => serde_json::from_str("{}").map_err(fault)?,
    };
    if !params.get().starts_with('{') {
        return Err(bad(format!("params of \"{name}\" must be an object")));
    }
    // Which report it is must be known before its fields, so it becomes a tree first; a small one.
    if name == "pod_event" && params.get().len() > EVENT_BYTES_MAX {
        let reason = format!("a report has at most {EVENT_BYTES_MAX} bytes");
        return Err(WireError::new(ErrorCode::TooLarge, reason));
    }
    // The name comes first, so the parameters are read as what belongs to it, straight from the text.
    let tag = to_raw_value(&name).map_err(fault)?;
    let parts = MapDeserializer::new([("method", &*tag), ("params", params)].into_iter());
    Ok(Request { method: Method::deserialize(parts).map_err(fault)?, from, to })
}

/// The refusal of a line that is too long.
pub fn too_large() -> WireError {
    WireError::new(ErrorCode::TooLarge, format!("a request line is at most {MAX_LINE_BYTES} bytes"))
}

impl Method {
    /// The method's name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Method::Run { .. } => "run",
            Method::Notify { .. } => "notify",
            Method::PodEvent(_) => "pod_event",
            Method::Resume => "resume",
            Method::Cancel => "cancel",
            Method::Shutdown => "shutdown",
            Method::GetHistory { .. } => "get_history",
            Method::Status => "status",
            Method::ReadOutput { .. } => "read_output",
            Method::ListPods => "list_pods",
            Method::Introduce { .. } => "introduce",
            Method::Set { .. } => "set",
            Method::Subscribe { .. } => "subscribe",
        }
    }
}

/// A request, reply or event as one line, newline included. None that is sent can fail to serialize.
pub fn to_line(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

/// A reply: the method's answer, or a refusal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Done; the answer is that of the method.
    Ok(Value),
    /// Refused.
    Error(WireError),
}

impl<T: Serialize> From<Result<T, WireError>> for Reply {
    fn from(result: Result<T, WireError>) -> Reply {
        match result.map(serde_json::to_value) {
            Ok(Ok(value)) => Reply::Ok(value),
            Ok(Err(error)) => Reply::Error(WireError::new(ErrorCode::Internal, error.to_string())),
            Err(error) => Reply::Error(error),
        }
    }
}

/// A life-cycle report of a pod to its spawner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case", deny_unknown_fields)]
pub enum PodEvent {
    /// A turn finished.
    TurnEnded {
        /// The pod that reports.
        pod_name: PodId,
        /// `person` where a person began the turn.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        started_by: Option<StartedBy>,
        /// The turn's number, so that a turn already read is not reported again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        turn: Option<u64>,
    },
    /// A turn ended in any other way: failed, cancelled, at a limit.
    Errored {
        /// The pod that reports.
        pod_name: PodId,
        /// Which way, and why; cut at 1 KiB.
        message: String,
        /// The turn's number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        turn: Option<u64>,
    },
    /// The pod ends; its last report.
    ShutDown {
        /// The pod that reports.
        pod_name: PodId,
    },
    /// The pod spawned another and lent it a part of its scope.
    ScopeSubDelegated {
        /// The pod that lent.
        parent_pod: PodId,
        /// The new pod.
        sub_pod: PodId,
        /// The new pod's socket.
        sub_socket: String,
        /// What it was lent.
        scope: Vec<Rule>,
    },
}

impl PodEvent {
    /// What happened, as "this pod ..." goes on.
    pub fn in_words(&self) -> &'static str {
        match self {
            PodEvent::TurnEnded { .. } => "finished a turn",
            PodEvent::Errored { .. } => "did not finish a turn",
            PodEvent::ShutDown { .. } => "ended",
            PodEvent::ScopeSubDelegated { .. } => "started another",
        }
    }

    /// The pod that reports.
    pub fn reporter(&self) -> &PodId {
        match self {
            PodEvent::TurnEnded { pod_name, .. }
            | PodEvent::Errored { pod_name, .. }
            | PodEvent::ShutDown { pod_name } => pod_name,
            PodEvent::ScopeSubDelegated { parent_pod, .. } => parent_pod,
        }
    }
}

/// Who began a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartedBy {
    /// A person.
    Person,
}

/// What a pod is doing, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// A turn runs.
    Running,
    /// Waiting for input.
    Idle,
    /// Waiting; the last turn failed or was cancelled.
    Paused,
    /// No process.
    Stopped,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// Answer of `run` and `resume`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReply {
    /// The turn that the input goes into.
    pub turn: u64,
    /// Whether the input waits for a running turn.
    #[serde(default)]
    pub queued: bool,
}

/// Answer of `cancel`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelReply {
    /// Whether a turn was running.
    pub cancelled: bool,
}

/// Answer of `get_history`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HistoryReply {
    /// The items from the cursor on.
    pub items: Vec<LoggedItem>,
    /// Where to go on.
    pub cursor: u64,
    /// Whether there is more already.
    pub more: bool,
    /// What the pod is doing.
    pub status: Status,
}

/// Answer of `read_output`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutputReply {
    /// What the pod is doing.
    pub status: Status,
    /// The assistant's text.
    pub text: String,
    /// Where to go on.
    pub cursor: u64,
    /// Whether there is more already.
    pub more: bool,
    /// Number of the running or last turn.
    #[serde(default)]
    pub turn: u64,
    /// How the last turn ended, `None` while one runs.
    pub last_result: Option<TurnResult>,
}

/// Answer of `status`, also a row of `insomnia list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusReply {
    /// Unique among live pods.
    pub pod_id: PodId,
    /// The name it was asked to have.
    pub name: PodName,
    /// Its process.
    pub pid: Pid,
    /// Its life.
    pub life: Life,
    /// What it is doing.
    pub status: Status,
    /// What exactly, or why it is silent.
    pub detail: String,
    /// Since when, in seconds since 1970.
    #[serde(default)]
    pub since: u64,
    /// `false` where the pod lives but did not answer; then the rest is what was known last.
    #[serde(default = "yes")]
    pub answers: bool,
    /// Version of the protocol.
    pub protocol: u32,
    /// Version of the program.
    pub version: String,
    /// Its own rules.
    pub scope: Vec<Rule>,
    /// The rules that its live children hold.
    pub lent: Vec<Rule>,
    /// How the shell is confined.
    pub sandbox: String,
    /// Number of the running or last turn.
    pub turn: u64,
    /// The last words of the model, cut.
    pub last_response: String,
    /// How the last turn ended, where one has ended since the pod last started one.
    pub last_result: Option<TurnResult>,
    /// Tokens so far.
    pub usage: Usage,
    /// The model that is asked; empty where it is not known.
    #[serde(default)]
    pub model: String,
    /// The pod whose scope its own was lent from.
    pub spawner: Option<PodId>,
    /// The session's folder.
    pub state_dir: String,
    /// The log file.
    pub log: String,
    /// Texts that wait for the running turn, or for the next one after a turn that did not finish.
    #[serde(default)]
    pub queued: usize,
    /// Reports on their way to the spawner.
    #[serde(default)]
    pub events_in_flight: usize,
}

fn yes() -> bool {
    true
}

impl StatusReply {
    /// Whether a turn runs, or is still to be started for texts that were accepted.
    pub fn is_at_work(&self) -> bool {
        self.status == Status::Running || self.status == Status::Idle && self.queued > 0
    }
}

/// A pod that another pod knows, in `list_pods` and the tool ListPods.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KnownPod {
    /// Its id.
    pub pod_id: PodId,
    /// The name it was asked to have.
    pub name: PodName,
    /// What it is doing, as far as known.
    pub status: Status,
    /// Whether it answered just now.
    pub answers: bool,
    /// What exactly it is doing.
    pub detail: String,
    /// Since when, in seconds since 1970; 0 where it did not say.
    #[serde(default)]
    pub since: u64,
    /// Its rules.
    pub scope: Vec<Rule>,
    /// The last words of its model, cut.
    pub last_response: String,
    /// Number of its running or last turn.
    #[serde(default)]
    pub turn: u64,
    /// Tokens so far.
    #[serde(default)]
    pub usage: Usage,
    /// Tokens so far, those of the pods below it included.
    #[serde(default)]
    pub usage_tree: Usage,
    /// The pod whose scope its own was lent from.
    pub spawner: Option<PodId>,
    /// Its socket.
    pub socket: String,
}

/// Answer of `list_pods`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodsReply {
    /// The pods, spawners before the spawned.
    pub pods: Vec<KnownPod>,
}

/// Answer of `subscribe`; event lines follow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SubscribeReply {
    /// The number of the first item that follows.
    pub cursor: u64,
    /// What the pod is doing.
    pub status: Status,
}

/// The empty answer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Done {}

/// One line of `subscribe`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", content = "data", rename_all = "snake_case")]
pub enum StreamEvent {
    /// A turn began.
    TurnStarted {
        /// Its number.
        turn: u64,
        /// Why.
        cause: Cause,
    },
    /// A piece of the model's text.
    TextDelta {
        /// The piece.
        text: String,
    },
    /// A tool is about to run.
    ToolCall {
        /// The call's id.
        id: String,
        /// Which tool.
        name: String,
        /// Its arguments.
        input: Value,
    },
    /// A tool has answered.
    ToolResult {
        /// The call's id.
        id: String,
        /// Whether it did what was asked.
        ok: bool,
        /// The answer.
        text: String,
    },
    /// Notices reached the model.
    Notification {
        /// The block as the model reads it.
        text: String,
    },
    /// A request to the model is tried again.
    Retry {
        /// Which attempt failed, from 1.
        attempt: u32,
        /// Seconds until the next.
        wait_seconds: f64,
        /// What went wrong.
        reason: String,
    },
    /// The model is sent a summary in place of old items from now on.
    Compaction {
        /// The number of the first item that it does not stand for.
        until: u64,
        /// The summary.
        summary: String,
    },
    /// A turn ended; exactly one per turn.
    TurnEnded {
        /// Its number.
        turn: u64,
        /// How it ended.
        result: TurnResult,
        /// Why, where it did not finish.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message: Option<String>,
    },
    /// The pod does something else now.
    Status {
        /// What, in one word.
        status: Status,
        /// What exactly.
        detail: String,
    },
    /// An item was logged.
    Item(LoggedItem),
    /// The last line: why the stream ends. Subscribe again from the cursor.
    Dropped {
        /// Why.
        reason: String,
    },
}

impl StreamEvent {
    /// The events that tell an item beside its own `item` event. A reply's text is not among them: it comes in
    /// pieces before the item is there.
    pub fn telling(item: &Item) -> Vec<StreamEvent> {
        match item.clone() {
            Item::TurnStarted { turn, cause } => vec![StreamEvent::TurnStarted { turn, cause }],
            Item::Notification { text } => vec![StreamEvent::Notification { text }],
            Item::ToolResult { id, ok, text, .. } => vec![StreamEvent::ToolResult { id, ok, text }],
            Item::Assistant(message) => {
                let calls = message.tool_calls.into_iter();
                calls
                    .map(|call| StreamEvent::ToolCall { id: call.id, name: call.name, input: call.input })
                    .collect()
            }
            Item::TurnEnded { turn, result, message } => {
                vec![StreamEvent::TurnEnded { turn, result, message }]
            }
            Item::Compaction { summary, until, .. } => vec![StreamEvent::Compaction { until, summary }],
            Item::Session { .. } | Item::Input { .. } | Item::ModelError { .. } | Item::ModelSet { .. } => {
                Vec::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life() -> Life {
        Life::new("0123456789abcdef0123456789abcdef").unwrap()
    }

    fn pod(text: &str) -> PodId {
        PodId::new(text).unwrap()
    }

    fn events() -> Vec<PodEvent> {
        let scope = vec![Rule::try_from("/w/a:write".to_owned()).unwrap()];
        vec![
            PodEvent::TurnEnded { pod_name: pod("a"), started_by: None, turn: None },
            PodEvent::TurnEnded { pod_name: pod("a"), started_by: Some(StartedBy::Person), turn: Some(2) },
            PodEvent::Errored { pod_name: pod("a"), message: "failed: no".into(), turn: Some(1) },
            PodEvent::ShutDown { pod_name: pod("a") },
            PodEvent::ScopeSubDelegated {
                parent_pod: pod("a"),
                sub_pod: pod("b"),
                sub_socket: "/run/b/sock".into(),
                scope,
            },
        ]
    }

    #[test]
    fn every_method_and_event_survives_a_round_trip() {
        let mut methods = vec![
            Method::Run { input: "日本 \n\"".into() },
            Method::Notify { message: String::new() },
            Method::Resume,
            Method::Cancel,
            Method::Shutdown,
            Method::GetHistory { since: None },
            Method::GetHistory { since: Some(7) },
            Method::Status,
            Method::ReadOutput { since: Some(0) },
            Method::ListPods,
            Method::Introduce { pods: vec![Introduction { pod_id: pod("b"), life: life() }] },
            Method::Subscribe { since: None },
        ];
        methods.extend(events().into_iter().map(Method::PodEvent));
        for method in methods {
            for from in [None, Some(Sender { pod_id: pod("x"), life: life() })] {
                let request = Request { method: method.clone(), to: from.as_ref().map(|_| life()), from };
                let line = to_line(&request);
                assert_eq!(parse_request(line.trim_end().as_bytes()).unwrap(), request);
            }
        }
    }

    #[test]
    fn the_documented_lines_are_understood() {
        parse_request(br#"{"method":"run","params":{"input":"..."}}"#).unwrap();
        parse_request(
            br#"{"method":"pod_event","params":{"event":"turn_ended","pod_name":"coder"},"from":{"pod_id":"coder","life":"0123456789abcdef0123456789abcdef"},"to":"0123456789abcdef0123456789abcdef"}"#,
        )
        .unwrap();
        for params in ["", r#","params":null"#, r#","params":{}"#] {
            let line = format!(r#"{{"method":"status"{params}}}"#);
            assert_eq!(parse_request(line.as_bytes()).unwrap().method, Method::Status);
        }
    }

    #[test]
    fn every_bad_line_gets_its_error() {
        let deep = format!("{{\"method\":\"run\",\"params\":{}", "[".repeat(100_000));
        let wide = "{\"a\":".repeat(100_000);
        let long = vec![b'x'; MAX_LINE_BYTES];
        let check = |line: &[u8], code: ErrorCode| {
            let error = parse_request(line).unwrap_err();
            assert_eq!(error.code, code, "{error}");
        };
        check(b"", ErrorCode::BadRequest);
        check(b"nonsense", ErrorCode::BadRequest);
        check(b"\xff\xfe", ErrorCode::BadRequest);
        check("\u{feff}{\"method\":\"status\"}".as_bytes(), ErrorCode::BadRequest);
        check(b"{\"method\":\"status\"}\0", ErrorCode::BadRequest);
        check(br#"{"method":"fly"}"#, ErrorCode::UnknownMethod);
        check(br#"{"method":"status","extra":1}"#, ErrorCode::BadRequest);
        check(br#"{"method":"status","params":{"x":1}}"#, ErrorCode::BadRequest);
        check(br#"{"method":"status","params":[]}"#, ErrorCode::BadRequest);
        check(br#"["status",null,null,null]"#, ErrorCode::BadRequest);
        check(br#"{"method":"run"}"#, ErrorCode::BadRequest);
        check(br#"{"method":"run","params":["x"]}"#, ErrorCode::BadRequest);
        check(br#"{"method":"run","params":{"input":5}}"#, ErrorCode::BadRequest);
        check(br#"{"method":"run","params":{"input":"a","more":1}}"#, ErrorCode::BadRequest);
        check(br#"{"method":"get_history","params":{"since":-1}}"#, ErrorCode::BadRequest);
        check(br#"{"method":"pod_event","params":{"event":"flew","pod_name":"a"}}"#, ErrorCode::BadRequest);
        check(
            br#"{"method":"pod_event","params":{"event":"shut_down","pod_name":"../a"}}"#,
            ErrorCode::BadRequest,
        );
        check(
            br#"{"method":"pod_event","params":{"event":"shut_down","pod_name":"a","x":1}}"#,
            ErrorCode::BadRequest,
        );
        for other_fields in
            [r#""event":"shut_down","pod_name":"a","turn":1"#, r#""event":"errored","pod_name":"a""#]
        {
            let line = format!("{{\"method\":\"pod_event\",\"params\":{{{other_fields}}}}}");
            check(line.as_bytes(), ErrorCode::BadRequest);
        }
        let large =
            format!(r#"{{"method":"pod_event","params":{{"event":["{}"]}}}}"#, "x".repeat(EVENT_BYTES_MAX));
        check(large.as_bytes(), ErrorCode::TooLarge);
        check(br#"{"method":"status","to":"short"}"#, ErrorCode::BadRequest);
        check(deep.as_bytes(), ErrorCode::BadRequest);
        check(wide.as_bytes(), ErrorCode::BadRequest);
        check(&long, ErrorCode::TooLarge);
    }

    #[test]
    fn replies_and_stream_events_survive_a_round_trip() {
        let reply = Reply::from(Ok::<_, WireError>(RunReply { turn: 3, queued: true }));
        assert_eq!(to_line(&reply), "{\"ok\":{\"queued\":true,\"turn\":3}}\n");
        let refused = Reply::from(Err::<Done, _>(WireError::new(ErrorCode::Busy, "later")));
        assert_eq!(to_line(&refused), "{\"error\":{\"code\":\"busy\",\"message\":\"later\"}}\n");
        assert_eq!(serde_json::from_str::<Reply>(&to_line(&refused)).unwrap(), refused);
        let item = LoggedItem { at: 1, item: Item::Input { text: "x".into(), from: None } };
        for event in [
            StreamEvent::TurnStarted { turn: 1, cause: Cause::Wake },
            StreamEvent::Retry { attempt: 1, wait_seconds: 0.5, reason: "429".into() },
            StreamEvent::TurnEnded { turn: 1, result: TurnResult::Limit, message: Some("200 steps".into()) },
            StreamEvent::Item(item),
        ] {
            assert_eq!(serde_json::from_str::<StreamEvent>(&to_line(&event)).unwrap(), event);
        }
        let started = to_line(&StreamEvent::TurnStarted { turn: 3, cause: Cause::Run });
        assert_eq!(started, "{\"event\":\"turn_started\",\"data\":{\"turn\":3,\"cause\":\"run\"}}\n");
    }
}
