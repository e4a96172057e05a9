//! The input of a tool call: checked against the tool's schema, so that a wrong one is answered by its field.
//!
//! Pure. serde alone says what type it expected, but not where.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::words::error::{Error, Result};
use crate::words::text::cut_end;

/// Turns the input of a call of `tool` into its typed form.
///
/// `schema` is the tool's JSON schema: an object of `string`, `integer`, `boolean` and `array` (of strings)
/// properties. `null` counts as absent.
///
/// # Errors
/// A sentence that names the field that is missing, unknown or of the wrong type.
pub fn parse<T: DeserializeOwned>(tool: &str, schema: &Value, input: Value) -> Result<T> {
    check(schema, &input).map_err(|fault| Error::told(format!("{tool}: {fault}")))?;
    serde_json::from_value(input).map_err(|error| Error::told(format!("{tool}: the input is wrong: {error}")))
}

fn check(schema: &Value, input: &Value) -> Result<(), String> {
    let Some(fields) = input.as_object() else {
        return Err("the input must be a JSON object".to_owned());
    };
    let properties = schema.get("properties").and_then(Value::as_object);
    let known = |name: &str| properties.and_then(|properties| properties.get(name));
    for (name, value) in fields {
        let Some(property) = known(name) else {
            let names = properties.map(|all| all.keys().map(String::as_str).collect::<Vec<_>>().join(", "));
            let name = cut_end(name, 100);
            return Err(format!("unknown field \"{name}\"; its fields are {}", names.unwrap_or_default()));
        };
        if let Some(wanted) = unmet(property, value) {
            return Err(format!("field \"{name}\" must be {wanted}"));
        }
    }
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    for name in required.filter_map(Value::as_str) {
        if fields.get(name).is_none_or(Value::is_null) {
            return Err(format!("field \"{name}\" is missing"));
        }
    }
    Ok(())
}

/// What a value must be by its property, when it is something else.
fn unmet(property: &Value, value: &Value) -> Option<&'static str> {
    let (fits, wanted) = match property.get("type").and_then(Value::as_str) {
        Some("string") => (value.is_string(), "a string"),
        Some("integer") => (value.is_u64(), "a whole number, not negative"),
        Some("boolean") => (value.is_boolean(), "true or false"),
        _ => (value.as_array().is_some_and(|items| items.iter().all(Value::is_string)), "a list of strings"),
    };
    (!fits && !value.is_null()).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(Debug, serde::Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        path: String,
        limit: Option<u64>,
        all: Option<bool>,
    }

    #[test]
    fn a_wrong_input_is_answered_by_its_field() {
        let schema = json!({"type": "object", "required": ["path"], "properties": {
            "path": {"type": "string"}, "limit": {"type": "integer"}, "all": {"type": "boolean"}}});
        let check = |input: Value, expected: &str| {
            let error = parse::<Sample>("T", &schema, input).unwrap_err().to_string();
            assert_eq!(error, format!("T: {expected}"));
        };
        check(json!([]), "the input must be a JSON object");
        check(json!({}), "field \"path\" is missing");
        check(json!({"path": null}), "field \"path\" is missing");
        check(json!({"path": 3}), "field \"path\" must be a string");
        check(json!({"path": "a", "limit": -1}), "field \"limit\" must be a whole number, not negative");
        check(json!({"path": "a", "all": "yes"}), "field \"all\" must be true or false");
        check(json!({"path": "a", "pth": 1}), "unknown field \"pth\"; its fields are all, limit, path");
        let good: Sample = parse("T", &schema, json!({"path": "a", "limit": null, "all": true})).unwrap();
        assert_eq!(good, Sample { path: "a".into(), limit: None, all: Some(true) });
    }
}
