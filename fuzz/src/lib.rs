//! The checks that the fuzz targets run: one for each text, file or sequence that comes from outside. Each takes any
//! bytes and fails when an invariant does not hold.
//!
//! `tests/it/fuzz_replay.rs` runs the same checks over all kept inputs in plain `cargo test`.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub mod disk;
pub mod doors;
pub mod models;
pub mod words;

/// A check, by the name of its target and of its folders in `corpus` and `regressions`.
pub type Check = (&'static str, fn(&[u8]));

/// All checks.
pub const CHECKS: &[Check] = &[
    ("allocation", words::allocation),
    ("anthropic", models::anthropic),
    ("command", models::command),
    ("command_line", doors::command_line),
    ("edit", doors::edit),
    ("event_line", words::event_line),
    ("glob", doors::glob),
    ("history", disk::history),
    ("manifest", disk::manifest),
    ("openai", models::openai),
    ("path", disk::path),
    ("pod_event", words::pod_event),
    ("proc_stat", disk::proc_stat),
    ("reply", words::reply),
    ("request", words::request),
    ("rule", words::rule),
    ("scope_lock", words::scope_lock),
    ("script", models::script),
    ("sse", models::sse),
    ("text", words::text),
    ("tool_input", doors::tool_input),
];

/// The first byte as a number, and the rest; an empty input is a zero.
fn number(bytes: &[u8]) -> (usize, &[u8]) {
    bytes.split_first().map_or((0, bytes), |(&first, rest)| (usize::from(first), rest))
}

/// `N` fields, parted by a byte that no UTF-8 text has; missing ones are empty.
fn fields<const N: usize>(bytes: &[u8]) -> [&[u8]; N] {
    let mut parts = bytes.splitn(N, |&byte| byte == 0xff);
    [(); N].map(|()| parts.next().unwrap_or_default())
}

fn utf8(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Fails unless the value, written and read again, is the same; returns its text.
fn comes_back<T: Serialize + DeserializeOwned>(value: &T) -> String {
    let text = serde_json::to_string(value).unwrap();
    assert!(!text.contains('\n'), "one line: {text}");
    let again: T = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let (was, is) = (serde_json::to_value(value).unwrap(), serde_json::to_value(again).unwrap());
    assert!(is_same(&was, &is), "{was} became {is}");
    text
}

/// Whether two values are the same; fractions may differ in the last digit, which serde_json does not keep.
fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            (a - b).abs() <= a.abs() * 1e-14
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|((k, a), (l, b))| k == l && is_same(a, b))
        }
        (a, b) => a == b,
    }
}
