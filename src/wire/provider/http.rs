//! One request over HTTP: translate, post, follow the stream, translate back.
//!
//! Runs on the turn thread. The only file where a key meets a request; every sentence that leaves it has the
//! key masked.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::store::manifest::{ProviderSettings, may_be_secret};
use crate::sys::wait::Cancel;
use crate::wire::provider::child::Patience;
use crate::wire::provider::curl::{Curl, Exchange, Head, Headers, check_header, find_curl};
use crate::wire::provider::failure::{Asked, message_of_body, of_status, retry_after};
use crate::wire::provider::key::{KeySource, Secret};
use crate::wire::provider::reply::{Progress, Reply, Trouble};
use crate::wire::provider::sse::Framer;
use crate::wire::provider::{Failure, Lookup, ModelRequest, OnText, Outcome, anthropic, openai};
use crate::words::error::{Error, Result};
use crate::words::text::harmless_line;

/// Tokens of one reply when the settings say nothing.
const DEFAULT_MAX_TOKENS: u64 = 8192;
/// How much of an error's body is read.
const ERROR_BODY_BYTES_MAX: usize = 64 << 10;
/// Once the reply is whole, the server gets this long to close its side by itself.
const FAREWELL: Duration = Duration::from_millis(50);
/// Once the model has stopped, counts of tokens and the mark of the end follow within this time, or never.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Takes every key out of a text.
type Mask<'a> = &'a dyn Fn(String) -> String;

/// Which protocol is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Anthropic,
    Openai,
}

/// A model behind an HTTP server.
#[derive(Debug, Clone)]
pub(super) struct Http {
    dialect: Dialect,
    /// The address without its query.
    shown: String,
    /// Headers of the settings.
    given: Headers,
    key: KeySource,
    pub(super) model: String,
    max_tokens: Option<u64>,
    pub(super) curl: Curl,
}

impl std::fmt::Display for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = format!("{:?}", self.dialect).to_lowercase();
        write!(f, "{kind}: model \"{}\" at {}, with {}", self.model, self.shown, self.key)
    }
}

impl Http {
    /// Checks the settings and makes everything ready that stays the same for each request.
    pub(super) fn new(
        dialect: Dialect,
        settings: &ProviderSettings,
        model: String,
        private_dir: PathBuf,
        lookup: Lookup,
    ) -> Result<Http> {
        let (default_url, variable) = match dialect {
            Dialect::Anthropic => (anthropic::DEFAULT_BASE_URL, "ANTHROPIC_API_KEY"),
            Dialect::Openai => (openai::DEFAULT_BASE_URL, "OPENAI_API_KEY"),
        };
        // A local server wants none; but who names a variable means it.
        let is_key_optional =
            dialect == Dialect::Openai && settings.base_url.is_some() && settings.api_key_env.is_none();
        let key = KeySource::find(settings, variable, is_key_optional, lookup)?;
        let base_url = settings.base_url.as_deref().unwrap_or(default_url).trim();
        let (host, shown) = parse_address(base_url).map_err(Error::told)?;
        // Only the program that needs a key gets its variable, and curl needs none.
        let keys = ["ANTHROPIC_API_KEY", "OPENAI_API_KEY"].into_iter().chain(settings.api_key_env.as_deref());
        Ok(Http {
            dialect,
            given: given_headers(&settings.headers).map_err(Error::told)?,
            key,
            model,
            max_tokens: settings.max_tokens,
            curl: Curl {
                program: find_curl(lookup)?,
                url: Secret::new(endpoint(dialect, base_url)),
                host,
                private_dir,
                hidden_variables: keys.map(str::to_owned).collect(),
                patience: Patience::of(settings.silence_seconds),
            },
            shown,
        })
    }

    /// One attempt.
    pub(super) fn request(&self, request: &ModelRequest, cancel: &Cancel, on_text: OnText) -> Outcome {
        let key = self.key.read().map_err(|error| Failure::Final(error.to_string()))?;
        let secrets = self.given.iter().filter(|(name, _)| may_be_secret(name)).map(|(_, value)| value);
        let secrets: Vec<&Secret> = key.iter().chain(secrets).collect();
        let mask = |text: String| secrets.iter().fold(text, |text, secret| secret.mask(&text));
        let headers = all_headers(self.dialect, self.is_azure(), &self.given, key.as_ref());
        let body = self.body(request).to_string();
        log::debug!("model request {} to {}: {} bytes", request.number, self.shown, body.len());
        Exchange::start(&self.curl, &headers, &body)
            .and_then(|exchange| self.follow(exchange, &mask, cancel, on_text))
            .map_err(|failure| failure.map(mask))
    }

    fn is_azure(&self) -> bool {
        self.curl.host.ends_with(".openai.azure.com")
    }

    fn body(&self, request: &ModelRequest<'_>) -> Value {
        let tokens = self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        // OpenAI's and Azure's newer models refuse `max_tokens`, which every other server knows.
        let limit = match self.curl.host.ends_with("api.openai.com") || self.is_azure() {
            true => Some(("max_completion_tokens", tokens)),
            // Unsaid, the server decides: a local one with a small context would refuse a large limit.
            false => self.max_tokens.map(|tokens| ("max_tokens", tokens)),
        };
        match self.dialect {
            Dialect::Anthropic => anthropic::request_body(&self.model, tokens, request),
            Dialect::Openai => openai::request_body(&self.model, limit, request),
        }
    }

    /// Reads the answer to its end.
    fn follow(&self, mut exchange: Exchange, mask: Mask, cancel: &Cancel, on_text: OnText) -> Outcome {
        let head = exchange.head(cancel)?;
        if head.status != 200 {
            return Err(self.refusal(exchange, &head, mask, cancel));
        }
        let (mut reply, mut framer) = (Reply::default(), Framer::default());
        let (mut first, mut unread) = (None, Vec::new());
        let mut take = |reply: &mut Reply, data: &str| {
            let taken = match self.dialect {
                Dialect::Anthropic => anthropic::take(reply, data),
                Dialect::Openai => openai::take(reply, data),
            };
            reply.stream(on_text);
            taken.map_err(|trouble| match trouble {
                Trouble::Broken(reason) => Failure::retry(reason),
                Trouble::Told { status, message } => self.judge(status, &mask(message), None),
            })
        };
        let broken = loop {
            match exchange.piece(cancel) {
                Ok(Some(piece)) => unread.extend(piece),
                Ok(None) => break None,
                Err(Failure::Cancelled) => return Err(Failure::Cancelled),
                Err(failure) => break Some(failure),
            }
            // The first byte tells what comes, as content types are often wrong: events, one object, or a page of a
            // captive portal or wrong address.
            first = first.or(unread.trim_ascii_start().first().copied());
            if matches!(first, None | Some(b'{' | b'<')) {
                continue;
            }
            for data in framer.push(&std::mem::take(&mut unread))? {
                if take(&mut reply, &data)? == Progress::Complete {
                    exchange.child.drain(cancel, FAREWELL);
                    return Ok(reply.finish());
                }
            }
            if reply.is_complete {
                exchange.child.hurry(LAST_WORDS);
            }
        };
        let last = match first {
            Some(b'<') => {
                let shown = &self.shown;
                let told =
                    format!("{shown} answers with a web page, not as a model provider; check \"base_url\"");
                return Err(Failure::Final(told));
            }
            Some(b'{') => Some(String::from_utf8_lossy(&unread).into_owned()),
            _ => framer.finish(),
        };
        if let Some(data) = last.filter(|_| broken.is_none()) {
            take(&mut reply, &data)?;
        }
        if reply.is_complete {
            return Ok(reply.finish()); // also when the server then closed badly: it had said all
        }
        let reason = format!("the stream of {} ended before the reply was complete", self.curl.host);
        Err(broken.unwrap_or_else(|| Failure::retry(reason)))
    }

    /// What an answer other than 200 means; the status alone tells enough where the body breaks off.
    fn refusal(&self, mut exchange: Exchange, head: &Head, mask: Mask<'_>, cancel: &Cancel) -> Failure {
        let mut body = Vec::new();
        while let (Ok(Some(piece)), true) = (exchange.piece(cancel), body.len() < ERROR_BODY_BYTES_MAX) {
            body.extend(piece);
        }
        if cancel.is_set() {
            return Failure::Cancelled;
        }
        let wait = head.retry_after.as_deref().and_then(retry_after);
        // Masked before it is cut: half a key at the end would not be found any more.
        self.judge(head.status, &mask(message_of_body(&body)), wait)
    }

    fn judge(&self, status: u16, message: &str, wait: Option<Duration>) -> Failure {
        let asked = Asked { key: &self.key.to_string(), model: &self.model, address: &self.shown };
        of_status(status, message, wait, asked)
    }
}

fn given_headers(given: &Map<String, Value>) -> Result<Headers, String> {
    let checked = given.iter().map(|(name, value)| {
        let shown = harmless_line(name);
        let fault = || format!("the header \"{shown}\" is no text; write its value in quotes");
        if value.is_null() {
            return Err(format!("the header \"{shown}\" has no value, as no session keeps one that may be a secret; give it in the user manifest, or the one named by --manifest"));
        }
        let value = value.as_str().ok_or_else(fault)?;
        check_header(name, value).map(|()| (name.clone(), Secret::new(value)))
    });
    checked.collect()
}

/// The headers of the settings and ours; what the settings say goes before what we would say.
fn all_headers(dialect: Dialect, is_azure: bool, given: &Headers, key: Option<&Secret>) -> Headers {
    let mut headers = given.clone();
    let mut add = |name: &str, value: &str| {
        if !given.iter().any(|(given, _)| given.eq_ignore_ascii_case(name)) {
            headers.push((name.to_owned(), Secret::new(value)));
        }
    };
    add("content-type", "application/json");
    add("accept", "text/event-stream, application/json");
    add("user-agent", concat!("insomnia/", env!("CARGO_PKG_VERSION")));
    if dialect == Dialect::Anthropic {
        add("anthropic-version", anthropic::VERSION);
    }
    match (dialect, key.map(Secret::reveal)) {
        (_, None) => {}
        (Dialect::Anthropic, Some(key)) => add("x-api-key", key),
        (Dialect::Openai, Some(key)) if is_azure => add("api-key", key),
        (Dialect::Openai, Some(key)) => add("authorization", &format!("Bearer {key}")),
    }
    headers
}

/// Where to post, for a base address with or without a path; a query such as Azure's `api-version` stays.
fn endpoint(dialect: Dialect, base_url: &str) -> String {
    let (base, query) = base_url.split_at(base_url.find('?').unwrap_or(base_url.len()));
    let base = base.trim_end_matches('/');
    let has_path = base.split_once("://").is_some_and(|(_, rest)| rest.contains('/'));
    let (path, has_version) = match dialect {
        Dialect::Anthropic => ("/messages", base.ends_with("/v1")),
        Dialect::Openai => ("/chat/completions", has_path),
    };
    if base.ends_with(path) {
        return format!("{base}{query}");
    }
    let version = if has_version { "" } else { "/v1" };
    format!("{base}{version}{path}{query}")
}

/// The host with its port, and the address without its query: what sentences need.
fn parse_address(url: &str) -> Result<(String, String), String> {
    // The address itself may hold a password, so only what is wrong is said.
    let fault = |what: &str| Err(format!("\"base_url\" {what}; write it like \"https://host/v1\""));
    let Some((scheme @ ("http" | "https"), rest)) = url.split_once("://") else {
        return fault("begins with neither http:// nor https://");
    };
    if url.chars().any(|c| c.is_control() || c.is_whitespace() || c == '#') {
        return fault("has a space, a control character or a \"#\"");
    }
    let rest = rest.split('?').next().unwrap_or_default();
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if host.contains('@') {
        return fault(
            "has a user or a password, which sessions would keep; give them as a header, or as the key",
        );
    }
    if host.is_empty() || host.starts_with(':') {
        return fault("names no host");
    }
    Ok((host.to_owned(), format!("{scheme}://{host}{path}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_checked_and_shown_without_its_secrets() {
        let check = |url: &str, expected: Result<(&str, &str), &str>| match (parse_address(url), expected) {
            (Ok(found), Ok((host, shown))) => {
                assert_eq!(found, (host.to_owned(), shown.to_owned()));
            }
            (Err(told), Err(expected)) => assert!(told.contains(expected), "{told}"),
            (found, expected) => panic!("{url}: {found:?} is not {expected:?}"),
        };
        check("https://api.anthropic.com", Ok(("api.anthropic.com", "https://api.anthropic.com")));
        check("http://127.0.0.1:8/v1", Ok(("127.0.0.1:8", "http://127.0.0.1:8/v1")));
        check("http://[::1]:8", Ok(("[::1]:8", "http://[::1]:8")));
        check("https://h/v1?key=secret", Ok(("h", "https://h/v1")));
        check("https://u:secret@h/v1", Err("a user or a password"));
        check("ftp://h", Err("neither http:// nor https://"));
        check("api.openai.com", Err("neither"));
        check("http://", Err("names no host"));
        check("http://:80/", Err("names no host"));
        check("http://h/a b", Err("a space"));
        check("http://h/\nurl=x", Err("control character"));
    }

    #[test]
    fn the_address_of_anthropic_may_have_a_path_or_none() {
        let check = |base: &str, expected: &str| assert_eq!(endpoint(Dialect::Anthropic, base), expected);
        check("https://api.anthropic.com", "https://api.anthropic.com/v1/messages");
        check("https://api.anthropic.com/", "https://api.anthropic.com/v1/messages");
        check("http://h:1/v1", "http://h:1/v1/messages");
        check("http://h:1/v1/", "http://h:1/v1/messages");
        check("http://h/anthropic", "http://h/anthropic/v1/messages");
        check("http://h/odd/messages", "http://h/odd/messages");
        check("http://h/v1?beta=true", "http://h/v1/messages?beta=true");
    }

    #[test]
    fn the_address_of_openai_may_have_a_path_or_none() {
        let check = |base: &str, expected: &str| assert_eq!(endpoint(Dialect::Openai, base), expected);
        check(openai::DEFAULT_BASE_URL, "https://api.openai.com/v1/chat/completions");
        check("http://localhost:11434", "http://localhost:11434/v1/chat/completions");
        check("http://localhost:11434/", "http://localhost:11434/v1/chat/completions");
        check("http://h/v1/", "http://h/v1/chat/completions");
        check("https://openrouter.ai/api/v1", "https://openrouter.ai/api/v1/chat/completions");
        check("http://h/v1/chat/completions", "http://h/v1/chat/completions");
        check(
            "https://r.openai.azure.com/openai/deployments/d?api-version=2024-10-21",
            "https://r.openai.azure.com/openai/deployments/d/chat/completions?api-version=2024-10-21",
        );
    }

    #[test]
    fn headers_of_the_settings_replace_ours_and_may_be_secret() {
        let given = serde_json::json!({"User-Agent": "x", "api-key": "topsecret", "anthropic-beta": "b"});
        let given = given_headers(given.as_object().unwrap()).unwrap();
        let headers = all_headers(Dialect::Anthropic, false, &given, None);
        let names: Vec<_> = headers.iter().map(|(name, _)| name.as_str()).collect();
        let expected =
            ["content-type", "accept", "anthropic-version", "User-Agent", "anthropic-beta", "api-key"];
        let (mut names, mut expected) = (names, expected.to_vec());
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected);
        let secrets: Vec<_> = given.iter().filter(|(name, _)| may_be_secret(name)).collect();
        assert_eq!(secrets, [&("api-key".to_owned(), Secret::new("topsecret"))]);
        let key = |is_azure| {
            let headers = all_headers(Dialect::Openai, is_azure, &Headers::new(), Some(&Secret::new("k")));
            headers.into_iter().next_back().map(|(name, value)| format!("{name}: {}", value.reveal()))
        };
        assert_eq!(key(false).as_deref(), Some("authorization: Bearer k"));
        assert_eq!(key(true).as_deref(), Some("api-key: k"));
        let bad = serde_json::json!({"x": 1});
        let told = given_headers(bad.as_object().unwrap()).unwrap_err();
        assert!(told.contains("header \"x\" is no text"), "{told}");
    }
}
