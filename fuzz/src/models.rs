//! Checks of what models and their servers send, and of the script that stands for one.

use insomnia::wire::provider::Failure;
use insomnia::wire::provider::command::take_piece;
use insomnia::wire::provider::reply::{Progress, Reply, TOOL_CALLS_MAX, Trouble};
use insomnia::wire::provider::script::Script;
use insomnia::wire::provider::sse::Framer;
use insomnia::wire::provider::{anthropic as messages, openai as completions};
use insomnia::words::message::{AssistantMessage, Item, LoggedItem, Stop};
use insomnia::words::protocol::{self, HistoryReply, Status, StreamEvent};
use serde_json::Value;

use super::{comes_back, number, utf8};

/// What a stream comes to: the message and the text as it was passed on, nothing, or the trouble.
type Outcome<E> = Result<Option<(AssistantMessage, String)>, E>;

/// Pieces of any size give the same events as the whole, and a text put into data lines comes out.
pub fn sse(bytes: &[u8]) {
    let (length, stream) = number(bytes);
    let frame = |length: usize| {
        let mut framer = Framer::default();
        let mut events: Vec<String> =
            stream.chunks(length.max(1)).flat_map(|piece| framer.push(piece).unwrap()).collect();
        events.extend(framer.finish());
        events
    };
    let whole = frame(stream.len());
    assert_eq!(frame(length), whole);
    assert_eq!(frame(1), whole);
    let text = utf8(stream).replace('\r', "\n");
    let lines: String = text.split('\n').map(|line| format!("data: {line}\n")).collect();
    assert_eq!(Framer::default().push(format!("{lines}\n").as_bytes()), Ok(vec![text]));
}

/// The stream of Anthropic Messages.
pub fn anthropic(bytes: &[u8]) {
    streamed(bytes, messages::take);
}

/// The stream of OpenAI Chat Completions.
pub fn openai(bytes: &[u8]) {
    streamed(bytes, completions::take);
}

/// Pieces of any size come to the same as the whole.
fn streamed(bytes: &[u8], take: fn(&mut Reply, &str) -> Result<Progress, Trouble>) {
    let (length, stream) = number(bytes);
    let follow = |length: usize| -> Outcome<Trouble> {
        let (mut framer, mut reply, mut told) = (Framer::default(), Reply::default(), String::new());
        for piece in stream.chunks(length.max(1)) {
            for event in framer.push(piece).unwrap() {
                let progress = take(&mut reply, &event)?;
                reply.stream(&mut |text| told.push_str(text));
                if progress == Progress::Complete {
                    return Ok(Some((reply.finish(), told)));
                }
            }
        }
        Ok(None)
    };
    let whole = follow(stream.len());
    assert_eq!(follow(length), whole);
    is_sound(&whole);
}

/// The lines of a model program: pieces of any size come to the same as the whole.
pub fn command(bytes: &[u8]) {
    let (length, stream) = number(bytes);
    let follow = |length: usize| -> Outcome<Failure> {
        let (mut reply, mut line, mut told) = (Reply::default(), Vec::new(), String::new());
        for piece in stream.chunks(length.max(1)) {
            if take_piece(&mut reply, &mut line, piece, &mut |text| told.push_str(text))?
                == Progress::Complete
            {
                return Ok(Some((reply.finish(), told)));
            }
        }
        Ok(None)
    };
    let whole = follow(stream.len());
    assert_eq!(follow(length), whole);
    is_sound(&whole);
}

/// A whole reply passes on its text once, asks only for calls that a tool can be given, and can be read back from
/// wherever it is written: the history, an event line and the answer of `get_history`.
fn is_sound<E>(outcome: &Outcome<E>) {
    let Ok(Some((message, told))) = outcome else { return };
    assert_eq!(message.text, *told);
    assert!(message.tool_calls.len() <= TOOL_CALLS_MAX);
    assert!(message.tool_calls.iter().all(|call| call.input.is_object()));
    assert_ne!(message.stop, if message.tool_calls.is_empty() { Stop::ToolUse } else { Stop::Done });
    let logged = LoggedItem { at: 1, item: Item::Assistant(message.clone()) };
    comes_back(&logged);
    for call in &message.tool_calls {
        let (id, name, input) = (call.id.clone(), call.name.clone(), call.input.clone());
        comes_back(&StreamEvent::ToolCall { id, name, input });
    }
    comes_back(&StreamEvent::Item(logged.clone()));
    let history = HistoryReply { items: vec![logged], cursor: 1, more: false, status: Status::Idle };
    comes_back(&protocol::Reply::from(Ok(history)));
}

/// Whether a script can be read does not depend on what the directory is called, and the pod_id goes everywhere.
pub fn script(bytes: &[u8]) {
    let text = utf8(bytes);
    let plain = Script::parse(&text, "/d", "0");
    let odd = Script::parse(&text, "/\"},{\\ \u{1}", "0");
    assert_eq!(plain.is_ok(), odd.is_ok(), "{plain:?}, {odd:?}");
    assert_eq!(Script::parse(&text.replace("{{pod_id}}", "0"), "/d", "0"), plain);
    if let Ok(Value::Object(written)) = serde_json::from_str(&text) {
        assert!(plain.is_err() || written.keys().all(|key| key == "pods"));
    }
}
