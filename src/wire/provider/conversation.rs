//! The conversation as every provider wants it: user and assistant by turns, each call answered at once.
//!
//! Pure. History may have gaps: a crash between call and result, a summary in place of old items. Providers
//! refuse those, for ever, so they are closed here.

use std::borrow::Cow;
use std::collections::HashSet;

use serde_json::Value;

use crate::words::message::{AssistantMessage, Item};
use crate::words::text::without_marks;

/// The answer to one tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ToolAnswer<'a> {
    /// The call.
    pub(super) id: &'a str,
    /// Whether the tool did what was asked.
    pub(super) ok: bool,
    /// What it said.
    pub(super) text: &'a str,
}

/// One message of the conversation.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Message<'a> {
    /// To the model.
    User {
        /// Answers to the calls of the message before.
        answers: Vec<ToolAnswer<'a>>,
        /// Texts of people, pods and the system, in order.
        texts: Vec<Cow<'a, str>>,
    },
    /// From the model: one reply, or several in a row.
    Assistant(Vec<&'a AssistantMessage>),
}

/// The messages of a history: first and last to the model, never two in a row from one side, and every call
/// answered in the message after it.
pub(super) fn messages(items: &[Item]) -> Vec<Message<'_>> {
    let mut list = Vec::new();
    let mut open: Vec<&str> = Vec::new();
    for item in items {
        match item {
            Item::Input { text, from: None } | Item::Notification { text } => {
                add_text(&mut list, text.into())
            }
            Item::Input { text, from: Some(pod_id) } => {
                add_text(
                    &mut list,
                    format!("[message from pod \"{pod_id}\"]\n{}", without_marks(text)).into(),
                );
            }
            Item::Assistant(message) => {
                if message.text.trim().is_empty() && message.tool_calls.is_empty() {
                    continue; // providers refuse an empty message
                }
                close_calls(&mut list, &mut open);
                open.extend(message.tool_calls.iter().map(|call| call.id.as_str()));
                if list.is_empty() {
                    add_text(&mut list, "[the beginning of the conversation is left out]".into());
                }
                match list.last_mut() {
                    Some(Message::Assistant(replies)) => replies.push(message),
                    Some(Message::User { .. }) | None => list.push(Message::Assistant(vec![message])),
                }
            }
            Item::ToolResult { id, name, ok, text } => match open.iter().position(|open| open == id) {
                Some(at) => {
                    open.remove(at);
                    add_answer(&mut list, ToolAnswer { id, ok: *ok, text });
                }
                None => add_text(&mut list, format!("[result of an earlier call of {name}]\n{text}").into()),
            },
            Item::Session { .. }
            | Item::TurnStarted { .. }
            | Item::ModelError { .. }
            | Item::TurnEnded { .. } => {}
        }
    }
    close_calls(&mut list, &mut open);
    if !matches!(list.last(), Some(Message::User { .. })) {
        add_text(&mut list, "[go on]".into());
    }
    list
}

fn add_text<'a>(list: &mut Vec<Message<'a>>, text: Cow<'a, str>) {
    match list.last_mut() {
        _ if text.trim().is_empty() => {}
        Some(Message::User { texts, .. }) => texts.push(text),
        Some(Message::Assistant(_)) | None => {
            list.push(Message::User { answers: Vec::new(), texts: vec![text] });
        }
    }
}

fn add_answer<'a>(list: &mut Vec<Message<'a>>, mut answer: ToolAnswer<'a>) {
    if answer.text.trim().is_empty() {
        answer.text = "(no output)"; // an empty answer is refused by some, and puzzles every model
    }
    match list.last_mut() {
        Some(Message::User { answers, .. }) => answers.push(answer),
        Some(Message::Assistant(_)) | None => {
            list.push(Message::User { answers: vec![answer], texts: Vec::new() });
        }
    }
}

fn close_calls<'a>(list: &mut Vec<Message<'a>>, open: &mut Vec<&'a str>) {
    for id in open.drain(..) {
        let text = "no result was recorded: the call may or may not have been carried out";
        add_answer(list, ToolAnswer { id, ok: false, text });
    }
}

/// Sets a field of an object.
pub(super) fn set(object: &mut Value, name: &str, value: Value) {
    if let Some(fields) = object.as_object_mut() {
        fields.insert(name.to_owned(), value);
    }
}

/// A name or id with everything replaced that providers refuse; a model may have made it up.
pub(super) fn clean_name(name: &str, bytes_max: usize) -> String {
    let clean = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let name = if name.is_empty() { "_" } else { name };
    name.chars().map(clean).take(bytes_max).collect()
}

/// Gives each call an id that no other call of the conversation has: some servers send none, or count from
/// zero in each reply. `number` is that of the request.
pub(super) fn make_ids_unique(message: &mut AssistantMessage, items: &[Item], number: u64) {
    let mut taken: HashSet<String> = HashSet::new();
    for item in items {
        if let Item::Assistant(earlier) = item {
            taken.extend(earlier.tool_calls.iter().map(|call| call.id.clone()));
        }
    }
    for (index, call) in message.tool_calls.iter_mut().enumerate() {
        let first = format!("call_{number}_{index}");
        let further = (1..).map(|again| format!("{first}_{again}"));
        let mut candidates = std::iter::once(first.clone()).chain(further);
        while call.id.is_empty() || !taken.insert(call.id.clone()) {
            call.id = candidates.next().unwrap_or_default();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::words::identity::PodId;
    use crate::words::message::{Cause, Stop, ToolCall, Usage};
    use serde_json::json;

    pub(crate) fn input(text: &str) -> Item {
        Item::Input { text: text.into(), from: None }
    }

    pub(crate) fn reply(text: &str, calls: &[&str]) -> Item {
        let call =
            |id: &&str| ToolCall { id: (*id).into(), name: "ReadFile".into(), input: json!({"path": "a"}) };
        Item::Assistant(AssistantMessage {
            text: text.into(),
            tool_calls: calls.iter().map(call).collect(),
            thinking: vec![],
            stop: Stop::Done,
            usage: Usage::default(),
        })
    }

    pub(crate) fn result(id: &str) -> Item {
        Item::ToolResult { id: id.into(), name: "ReadFile".into(), ok: true, text: format!("r-{id}") }
    }

    /// `U[answers|texts]` and `A[texts+calls]`, for short rows.
    fn sketch(items: &[Item]) -> String {
        let one = |message: &Message<'_>| match message {
            Message::User { answers, texts } => {
                let answers: Vec<_> =
                    answers.iter().map(|a| format!("{}{}", a.id, if a.ok { "" } else { "!" })).collect();
                let texts: Vec<_> = texts.iter().map(|text| text.lines().last().unwrap_or("")).collect();
                format!("U[{}|{}]", answers.join(","), texts.join(","))
            }
            Message::Assistant(replies) => {
                let replies: Vec<_> = replies
                    .iter()
                    .map(|reply| {
                        let ids: Vec<_> = reply.tool_calls.iter().map(|call| call.id.as_str()).collect();
                        format!("{}+{}", reply.text, ids.join("+"))
                    })
                    .collect();
                format!("A[{}]", replies.join(","))
            }
        };
        messages(items).iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_sides_speak_by_turns_and_every_call_is_answered() {
        let check = |items: &[Item], expected: &str| assert_eq!(sketch(items), expected);
        let mark = Item::TurnStarted { turn: 1, cause: Cause::Run };
        let notice = Item::Notification { text: "notice".into() };
        check(&[], "U[|[go on]]");
        check(&[mark.clone(), input("a")], "U[|a]");
        check(&[notice.clone(), input("a"), input("b")], "U[|notice,a,b]");
        check(
            &[input("a"), reply("x", &["1", "2"]), result("1"), result("2"), input("b")],
            "U[|a] A[x+1+2] U[1,2|b]",
        );
        // A text that came in between call and result goes behind the results.
        check(&[input("a"), reply("", &["1"]), notice, result("1")], "U[|a] A[+1] U[1|notice]");
        // A crash between call and result.
        check(&[input("a"), reply("", &["1", "2"]), result("2")], "U[|a] A[+1+2] U[2,1!|]");
        check(
            &[input("a"), reply("", &["1"]), reply("x", &[]), input("b")],
            "U[|a] A[+1] U[1!|] A[x+] U[|b]",
        );
        // A result whose call is gone, and one that comes twice.
        check(&[result("1"), input("b")], "U[|r-1,b]");
        check(&[input("a"), reply("", &["1"]), result("1"), result("1")], "U[|a] A[+1] U[1|r-1]");
        check(&[input("a"), reply("x", &[]), reply("y", &[])], "U[|a] A[x+,y+] U[|[go on]]");
        check(&[input("a"), reply(" \n", &[]), mark, input("b")], "U[|a,b]");
        check(&[reply("x", &[])], "U[|[the beginning of the conversation is left out]] A[x+] U[|[go on]]");
        check(&[input(" "), input("b")], "U[|b]");
    }

    #[test]
    fn a_message_of_a_pod_names_the_pod() {
        let from = Some(PodId::new("main").unwrap());
        let items = [Item::Input { text: "do it".into(), from }];
        let list = messages(&items);
        let [Message::User { texts, .. }] = list.as_slice() else { panic!() };
        assert_eq!(texts.as_slice(), ["[message from pod \"main\"]\ndo it"]);
    }

    #[test]
    fn ids_are_unique_in_the_conversation() {
        let check = |taken: &[&str], ids: &[&str], expected: &[&str]| {
            let Item::Assistant(mut message) = reply("", ids) else { panic!() };
            make_ids_unique(&mut message, &[reply("", taken)], 7);
            let ids: Vec<_> = message.tool_calls.iter().map(|call| call.id.as_str()).collect();
            assert_eq!(ids, expected);
        };
        check(&["x"], &["a", "b"], &["a", "b"]);
        check(&[], &["", ""], &["call_7_0", "call_7_1"]);
        check(&["call_0"], &["call_0", "call_1"], &["call_7_0", "call_1"]);
        check(&["call_7_0"], &[""], &["call_7_0_1"]);
        check(&[], &["a", "a"], &["a", "call_7_1"]);
    }

    #[test]
    fn names_that_providers_refuse_are_cleaned() {
        let check = |name: &str, expected: &str| assert_eq!(clean_name(name, 8), expected);
        check("ReadFile", "ReadFile");
        check("a b/c", "a_b_c");
        check("日", "_");
        check("", "_");
        check("much too long", "much_too");
    }
}
