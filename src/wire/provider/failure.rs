//! What a refusal of a provider means: try again, make the conversation shorter, or tell a person.
//!
//! Pure. The one place that judges HTTP status codes, wherever they came from: a server, a stream, a script.

use std::time::Duration;

use serde_json::Value;

use crate::wire::provider::Failure;
use crate::wire::provider::reply::text_of;
use crate::words::text::{cut_end, harmless_line};

/// A provider's own words are cut at this length, in bytes.
pub(super) const MESSAGE_BYTES_MAX: usize = 1024;
/// Parts of words that say that the conversation does not fit into the model. Collected from the public
/// documentation and source of Anthropic, OpenAI, Azure, OpenRouter, LiteLLM, vLLM, llama.cpp and Ollama. A refused
/// `max_tokens` alone is none of these.
const CONTEXT_SIGNS: &str = "context_length_exceeded|exceed_context_size|prompt is too long|input is too long|\
    maximum context length|exceed context limit|exceeds the context|exceeds the available context|\
    context window|context size|reduce the length of the messages|request_too_large|\
    maximum model length|contextwindowexceeded|exceeds the maximum number of tokens";
/// Which status the code or type of an error stands for, by a part of it; the first that fits.
const STATUS_SIGNS: [(u16, &str); 11] = [
    (529, "overloaded"),
    (429, "rate_limit|insufficient_quota"),
    (504, "timeout"),
    (413, "request_too_large"),
    (401, "invalid_api_key|authentication"),
    (403, "permission"),
    (402, "billing"),
    (404, "not_found"),
    (503, "unavailable"),
    (500, "server_error|api_error"),
    (400, "context|invalid_request"),
];

/// Whom we asked, for the sentence that tells a person what to check.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    /// Where the key comes from.
    pub(super) key: &'a str,
    pub(super) model: &'a str,
    /// Without user, password and query.
    pub(super) address: &'a str,
}

/// What an answer of this HTTP status means. `message` is the provider's own explanation.
pub(super) fn of_status(status: u16, message: &str, wait: Option<Duration>, asked: Asked<'_>) -> Failure {
    let said = match cut_end(&harmless_line(message), MESSAGE_BYTES_MAX) {
        line if line.is_empty() => format!("(HTTP {status})"),
        line => format!("(HTTP {status}): {line}"),
    };
    let is_about_context = || has_sign(&message.to_ascii_lowercase(), CONTEXT_SIGNS);
    if status == 413 || matches!(status, 400 | 422 | 500) && is_about_context() {
        return Failure::ContextTooLong(format!("the conversation is too long for the model {said}"));
    }
    let again = |what: &str| Failure::Retry { reason: format!("the provider {what} {said}"), wait };
    let Asked { key, model, address } = asked;
    Failure::Final(match status {
        429 if message.contains("insufficient_quota") => format!("the account's quota is used up {said}"),
        429 => return again("asks us to slow down"),
        503 | 529 => return again("is overloaded"),
        408 | 409 | 425 | 500..=599 => return again("failed"),
        300..=399 => format!(
            "{address} redirects to another place (HTTP {status}), which is not followed; check \"base_url\""
        ),
        401 | 403 => format!("the key was refused {said}; check {key}"),
        407 => format!("the proxy wants a user and a password {said}; put them into the proxy variable"),
        402 => format!("the provider wants to be paid first {said}"),
        404 => format!(
            "the provider does not know the model \"{model}\" or the address {address} {said}; check \"model\" and \"base_url\""
        ),
        _ => format!("the provider did not accept the request {said}"),
    })
}

fn has_sign(text: &str, signs: &str) -> bool {
    signs.split('|').any(|sign| text.contains(sign))
}

/// What an error body says: the message of its JSON with its type and code, or the text itself.
pub(super) fn message_of_body(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let told = serde_json::from_str::<Value>(&text).map(|value| {
        // vLLM and others put the fields at the top; some proxies wrap the object in a list.
        let value = value.get(0).unwrap_or(&value);
        message_of_error(value.get("error").unwrap_or(value))
    });
    match told {
        Ok(told) if !told.is_empty() => told,
        Err(_) if text.trim_start().starts_with('<') => "the answer is a web page".to_owned(),
        Ok(_) | Err(_) => text.into_owned(),
    }
}

/// What an `error` object says: its message, and its code or type where that tells more.
pub(super) fn message_of_error(error: &Value) -> String {
    let first = |names: [&str; 2]| {
        names.map(|name| text_of(error, name)).into_iter().find(|text| !text.is_empty()).unwrap_or_default()
    };
    let message = error.as_str().unwrap_or_else(|| first(["message", "detail"]));
    match (message, first(["code", "type"])) {
        (message, "" | "error") => message.to_owned(),
        ("", kind) => kind.to_owned(),
        (message, kind) => format!("{message} ({kind})"),
    }
}

/// The status that an error object inside a stream stands for; 500 where it does not say.
pub(super) fn status_of_error(error: &Value) -> u16 {
    let number =
        |name| error.get(name).and_then(|code| code.as_u64().or_else(|| code.as_str()?.parse().ok()));
    let numbers = ["code", "status", "status_code"].into_iter().filter_map(number);
    let told = numbers.filter_map(|n| u16::try_from(n).ok()).find(|n| (400..600).contains(n));
    // The code tells more than the type: OpenAI's type of a wrong key is "invalid_request_error".
    let meant = ["code", "type"].into_iter().find_map(|name| {
        STATUS_SIGNS
            .iter()
            .find(|(_, signs)| has_sign(text_of(error, name), signs))
            .map(|(status, _)| *status)
    });
    told.or(meant).unwrap_or(500)
}

/// How long a `Retry-After` header wants us to wait, in seconds. A date, which no provider is known to send, counts
/// for nothing: our own pause serves.
pub(super) fn retry_after(value: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(value.trim().parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Asked<'_> = Asked { key: "the key in the variable K", model: "m", address: "http://h/v1" };

    #[test]
    fn a_status_decides_between_trying_again_and_telling_a_person() {
        let wait = Some(Duration::from_secs(3));
        let check = |status: u16, message: &str, kind: &str, expected: &str| {
            let (found, told) = match of_status(status, message, wait, ASKED) {
                Failure::Retry { reason, wait: kept } => {
                    assert_eq!(kept, wait);
                    ("retry", reason)
                }
                Failure::ContextTooLong(reason) => ("context", reason),
                Failure::Final(reason) => ("final", reason),
                Failure::Cancelled => ("cancelled", String::new()),
            };
            assert_eq!(found, kind, "{status} {message}");
            assert!(told.contains(expected), "{told}");
        };
        check(
            401,
            "invalid x-api-key",
            "final",
            "(HTTP 401): invalid x-api-key; check the key in the variable K",
        );
        check(403, "", "final", "the key was refused (HTTP 403); check");
        check(404, "model: m", "final", "model \"m\" or the address http://h/v1 (HTTP 404): model: m; check");
        check(400, "tools.0: bad", "final", "did not accept the request (HTTP 400): tools.0: bad");
        check(422, "bad", "final", "(HTTP 422)");
        check(400, "prompt is too long: 210000 tokens > 200000 maximum", "context", "too long for the model");
        check(400, "This model's maximum context length is 8192 tokens.", "context", "");
        check(
            400,
            "The decoder prompt (length 9) is longer than the maximum model length of 8.",
            "context",
            "",
        );
        check(400, "litellm.ContextWindowExceededError: x", "context", "");
        check(413, "", "context", "HTTP 413");
        check(500, "the request exceeds the available context size", "context", "");
        check(400, "max_tokens: 9000 > 8192, the maximum allowed for this model", "final", "");
        check(408, "", "retry", "HTTP 408");
        check(409, "", "retry", "HTTP 409");
        check(429, "slow down", "retry", "asks us to slow down (HTTP 429): slow down");
        check(429, "You exceeded your current quota (insufficient_quota)", "final", "quota is used up");
        check(500, "", "retry", "the provider failed (HTTP 500)");
        check(502, "bad gateway", "retry", "");
        check(529, "Overloaded", "retry", "the provider is overloaded (HTTP 529): Overloaded");
        check(402, "", "final", "paid");
        check(407, "", "final", "the proxy wants a user and a password (HTTP 407)");
        check(307, "", "final", "redirects");
        check(418, "\x1b[2Jteapot", "final", "\\x1b[2Jteapot");
    }

    #[test]
    fn a_long_message_is_cut() {
        let Failure::Final(told) = of_status(400, &"long ".repeat(10_000), None, ASKED) else { panic!() };
        assert!(told.len() < MESSAGE_BYTES_MAX + 100 && told.ends_with("..."));
    }

    #[test]
    fn an_error_body_is_understood_in_the_forms_that_servers_send() {
        let check = |body: &str, expected: &str| assert_eq!(message_of_body(body.as_bytes()), expected);
        check(
            r#"{"type":"error","error":{"type":"not_found_error","message":"model: x"}}"#,
            "model: x (not_found_error)",
        );
        check(
            r#"{"error":{"message":"no","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#,
            "no (invalid_api_key)",
        );
        check(r#"{"error":"model 'x' not found"}"#, "model 'x' not found");
        check(r#"{"object":"error","message":"too long","code":400}"#, "too long");
        check(r#"{"detail":"Not Found"}"#, "Not Found");
        check(r#"[{"error":{"code":400,"message":"bad"}}]"#, "bad");
        check(r#"{"odd":1}"#, r#"{"odd":1}"#);
        check("plain words", "plain words");
        check("<html><body>502</body></html>", "the answer is a web page");
        check("", "");
    }

    #[test]
    fn an_error_in_a_stream_has_a_status() {
        let check = |error: &str, expected: u16| {
            assert_eq!(status_of_error(&serde_json::from_str(error).unwrap()), expected, "{error}");
        };
        check(r#"{"type":"overloaded_error","message":"Overloaded"}"#, 529);
        check(r#"{"type":"api_error","message":"x"}"#, 500);
        check(r#"{"type":"invalid_request_error","message":"x"}"#, 400);
        check(r#"{"type":"invalid_request_error","code":"context_length_exceeded"}"#, 400);
        check(r#"{"type":"invalid_request_error","code":"invalid_api_key"}"#, 401);
        check(r#"{"code":429,"message":"x"}"#, 429);
        check(r#"{"code":"502","message":"x"}"#, 502);
        check(r#"{"type":"server_error"}"#, 500);
        check(r#"{"code":7}"#, 500);
        check(r#""words""#, 500);
    }

    #[test]
    fn a_wanted_wait_is_read_as_seconds() {
        let check = |value: &str, expected: Option<f64>| {
            assert_eq!(retry_after(value), expected.map(Duration::from_secs_f64), "{value}");
        };
        check("7", Some(7.0));
        check(" 0.5 ", Some(0.5));
        check("0", Some(0.0));
        check("Sun, 06 Nov 1994 08:49:37 GMT", None);
        check("soon", None);
        check("-3", None);
        check("inf", None);
        check("", None);
        check("1.2.3", None);
        check("99999999999999999999999999", None);
    }
}
