//! The input of a tool call: checked against the tool's schema, so that a wrong one is answered by its field, then
//! typed.
//!
//! Pure. serde alone says what type it expected, but not where.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::wire::provider::ToolSpec;
use crate::words::error::{Error, Result};
use crate::words::text::cut_end;

/// What a tool is given, by its name. What each field is stands in `specs`.
#[derive(Debug, Deserialize)]
#[allow(missing_docs, reason = "the fields are described where the model reads of them")]
pub enum Input {
    SpawnPod(SpawnInput),
    SendToPod { pod_id: String, message: String },
    ReadPodOutput { pod_id: String, since: Option<u64> },
    StopPod { pod_id: String, tree: Option<bool> },
    ListPods {},
    WaitPods { pod_ids: Option<Vec<String>>, until: Option<Until>, timeout_seconds: Option<u64> },
    IntroducePod { to: String, pod_id: String },
    ReadFile { path: String, offset: Option<u64>, limit: Option<u64> },
    WriteFile { path: String, content: String },
    EditFile { path: String, old: String, new: String, all: Option<bool> },
    ListFiles { path: Option<String>, pattern: Option<String> },
    SearchFiles { pattern: String, path: Option<String>, glob: Option<String>, plain: Option<bool> },
    Shell { command: String, timeout_seconds: Option<u64>, dir: Option<PathBuf> },
}

/// What SpawnPod is given.
#[derive(Debug, Deserialize)]
#[allow(missing_docs, reason = "as above")]
pub struct SpawnInput {
    pub name: String,
    pub task: String,
    pub scope: Option<Vec<String>>,
    pub instruction: Option<String>,
    pub model: Option<String>,
    pub dir: Option<PathBuf>,
    pub tools_deny: Option<Vec<String>>,
}

/// How many of the pods that are waited for must be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Until {
    /// One.
    Any,
    /// Each.
    All,
}

/// The typed input of a call of this tool, once it was checked. `null` counts as absent.
///
/// # Errors
/// A sentence that names the field that is missing, unknown or of the wrong type.
pub fn parse(spec: &ToolSpec, input: &Value) -> Result<Input> {
    let wrong = |fault: String| Error::told(format!("{}: {fault}", spec.name));
    check(&spec.input_schema, input).map_err(wrong)?;
    serde_json::from_value(json!({ spec.name: input }))
        .map_err(|error| wrong(format!("the input is wrong: {error}")))
}

fn check(schema: &Value, input: &Value) -> Result<(), String> {
    let fields = input.as_object().ok_or("the input must be a JSON object")?;
    let properties = schema.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
    for (name, value) in fields.iter() {
        let Some(property) = properties.get(name) else {
            let names = properties.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(format!("unknown field \"{}\"; its fields are {names}", cut_end(name, 100)));
        };
        if let Some(wanted) = unmet(property, value) {
            return Err(format!("field \"{name}\" must be {wanted}"));
        }
    }
    let mut required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    let is_missing =
        |name: &&Value| name.as_str().and_then(|name| fields.get(name)).is_none_or(Value::is_null);
    required.find(is_missing).map_or(Ok(()), |name| Err(format!("field {name} is missing")))
}

/// What a value must be by its property, when it is something else.
fn unmet(property: &Value, value: &Value) -> Option<&'static str> {
    let minimum = property.get("minimum").and_then(Value::as_u64).unwrap_or(0);
    let (fits, wanted) = match property.get("type").and_then(Value::as_str) {
        Some("string") => (value.is_string(), "a string"),
        Some("integer") if minimum == 0 => (value.is_u64(), "a whole number, not negative"),
        Some("integer") => (value.as_u64() >= Some(minimum), "a whole number, counted from 1"),
        Some("boolean") => (value.is_boolean(), "true or false"),
        _ => (value.as_array().is_some_and(|items| items.iter().all(Value::is_string)), "a list of strings"),
    };
    (!fits && !value.is_null()).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::specs;
    use crate::words::limits::Limits;

    #[test]
    fn a_wrong_input_is_answered_by_its_field() {
        let mut specs = specs::all(&Limits::default(), None);
        specs.retain(|spec| spec.name == "ReadFile" || spec.name == "EditFile");
        let [read, edit] = specs.as_slice() else { panic!("{specs:?}") };
        let wrong = |spec: &ToolSpec, input: Value, expected: &str| {
            let error = parse(spec, &input).unwrap_err().to_string();
            assert_eq!(error, format!("{}: {expected}", spec.name));
        };
        wrong(read, json!([]), "the input must be a JSON object");
        wrong(read, json!({}), "field \"path\" is missing");
        wrong(read, json!({"path": null}), "field \"path\" is missing");
        wrong(read, json!({"path": 3}), "field \"path\" must be a string");
        for limit in [json!(-1), json!(0), json!(1.5), json!("1")] {
            let input = json!({"path": "a", "limit": limit});
            wrong(read, input, "field \"limit\" must be a whole number, counted from 1");
        }
        let input = json!({"path": "a", "old": "", "new": "", "all": "yes"});
        wrong(edit, input, "field \"all\" must be true or false");
        wrong(
            read,
            json!({"path": "a", "pth": 1}),
            "unknown field \"pth\"; its fields are limit, offset, path",
        );
        let good = parse(read, &json!({"path": "a", "offset": null, "limit": 1})).unwrap();
        assert!(matches!(good, Input::ReadFile { path, offset: None, limit: Some(1) } if path == "a"));
        let number = json!({"properties": {"since": {"type": "integer", "minimum": 0}}});
        let fault = check(&number, &json!({"since": -1})).unwrap_err();
        assert_eq!(fault, "field \"since\" must be a whole number, not negative");
        check(&number, &json!({"since": 0})).unwrap();
    }
}
