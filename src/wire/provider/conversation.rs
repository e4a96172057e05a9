//! The conversation as every provider wants it: user and assistant by turns, each call answered at once.
//!
//! Pure. History may have gaps: a crash between call and result, a summary in place of old items. Providers
//! refuse those, for ever, so they are closed here.

use std::borrow::Cow;

use serde_json::Value;

use crate::words::compaction::render_summary;
use crate::words::message::{AssistantMessage, Item};
use crate::words::text::without_marks;

/// The answer to one tool call.
#[derive(Debug, Clone, Copy)]
pub(super) struct ToolAnswer<'a> {
    pub(super) id: &'a str,
    pub(super) ok: bool,
    pub(super) text: &'a str,
}

/// What the model said, and what is said to it then: answers to its calls first, then texts of people, pods and
/// the system. Only the first round may lack replies; none lacks both answers and texts.
#[derive(Debug, Default)]
pub(super) struct Round<'a> {
    pub(super) replies: Vec<&'a AssistantMessage>,
    pub(super) answers: Vec<ToolAnswer<'a>>,
    pub(super) texts: Vec<Cow<'a, str>>,
}

/// The rounds of a history, every call answered in its own round.
pub(super) fn rounds(items: &[Item]) -> Vec<Round<'_>> {
    let mut rounds = Vec::new();
    let mut round = Round::default();
    let mut open: Vec<&str> = Vec::new();
    for item in items {
        match item {
            Item::Input { text, from: None } | Item::Notification { text } => round.add_text(text),
            Item::Input { text, from: Some(pod_id) } => {
                round.add_text(format!("[message from pod \"{pod_id}\"]\n{}", without_marks(text)));
            }
            // Providers refuse an empty message.
            Item::Assistant(message) if message.text.trim().is_empty() && message.tool_calls.is_empty() => {}
            Item::Assistant(message) => {
                round.close_calls(&mut open);
                open.extend(message.tool_calls.iter().map(|call| call.id.as_str()));
                if rounds.is_empty() && round.replies.is_empty() && round.is_open() {
                    round.add_text("[the beginning of the conversation is left out]");
                }
                if !round.is_open() {
                    rounds.push(std::mem::take(&mut round));
                }
                round.replies.push(message);
            }
            Item::ToolResult { id, name, ok, text } => match open.iter().position(|open| open == id) {
                Some(at) => {
                    open.remove(at);
                    // An empty answer is refused by some, and puzzles every model.
                    let text = if text.trim().is_empty() { "(no output)" } else { text };
                    round.answers.push(ToolAnswer { id, ok: *ok, text });
                }
                None => {
                    let (name, text) = (without_marks(name), without_marks(text));
                    round.add_text(format!("[result of an earlier call of {name}]\n{text}"));
                }
            },
            Item::Compaction { summary, .. } => round.add_text(render_summary(summary)),
            Item::Session { .. }
            | Item::TurnStarted { .. }
            | Item::ModelError { .. }
            | Item::ModelSet { .. }
            | Item::TurnEnded { .. } => {}
        }
    }
    round.close_calls(&mut open);
    if round.is_open() {
        round.add_text("[go on]");
    }
    rounds.push(round);
    rounds
}

impl<'a> Round<'a> {
    /// Whether nothing is said to the model yet.
    fn is_open(&self) -> bool {
        self.answers.is_empty() && self.texts.is_empty()
    }

    fn add_text(&mut self, text: impl Into<Cow<'a, str>>) {
        let text = text.into();
        self.texts.extend(Some(text).filter(|text| !text.trim().is_empty()));
    }

    fn close_calls(&mut self, open: &mut Vec<&'a str>) {
        let text = "no result was recorded: the call may or may not have been carried out";
        self.answers.extend(open.drain(..).map(|id| ToolAnswer { id, ok: false, text }));
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
    let is_earlier = |id: &String| {
        let has = |item: &Item| matches!(item, Item::Assistant(earlier) if earlier.tool_calls.iter().any(|call| call.id == *id));
        items.iter().any(has)
    };
    let mut own: Vec<String> = Vec::new();
    for (index, call) in message.tool_calls.iter_mut().enumerate() {
        let first = format!("call_{number}_{index}");
        let further = (1..).map(|again| format!("{first}_{again}"));
        let mut candidates = std::iter::once(first.clone()).chain(further);
        while call.id.is_empty() || own.contains(&call.id) || is_earlier(&call.id) {
            call.id = candidates.next().unwrap_or_default();
        }
        own.push(call.id.clone());
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
        let replies = |round: &Round<'_>| {
            let one = |reply: &&AssistantMessage| {
                let ids: Vec<_> = reply.tool_calls.iter().map(|call| call.id.as_str()).collect();
                format!("{}+{}", reply.text, ids.join("+"))
            };
            let replies: Vec<_> = round.replies.iter().map(one).collect();
            (!replies.is_empty()).then(|| format!("A[{}]", replies.join(",")))
        };
        let told = |round: &Round<'_>| {
            let answers = round.answers.iter().map(|a| format!("{}{}", a.id, if a.ok { "" } else { "!" }));
            let answers: Vec<_> = answers.collect();
            let texts: Vec<_> = round.texts.iter().map(|text| text.lines().last().unwrap_or("")).collect();
            format!("U[{}|{}]", answers.join(","), texts.join(","))
        };
        let parts = rounds(items).into_iter().flat_map(|round| [replies(&round), Some(told(&round))]);
        parts.flatten().collect::<Vec<_>>().join(" ")
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
        let list = rounds(&items);
        let [round] = list.as_slice() else { panic!() };
        assert_eq!(round.texts.as_slice(), ["[message from pod \"main\"]\ndo it"]);
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
