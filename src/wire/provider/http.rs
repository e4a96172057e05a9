//! One request over HTTP: translate, post, follow the stream, translate back.
//!
//! Runs on the turn thread. The only file where a key meets a request; every sentence that leaves it has the
//! key masked.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::store::manifest::ProviderSettings;
use crate::sys::clock::now_seconds;
use crate::sys::wait::Cancel;
use crate::wire::provider::child::Patience;
use crate::wire::provider::curl::{Curl, Exchange, Head, Headers, check_header, find_curl};
use crate::wire::provider::failure::{Asked, message_of_body, of_status, retry_after};
use crate::wire::provider::key::{KeySource, Secret};
use crate::wire::provider::reply::{Progress, Reply, Trouble};
use crate::wire::provider::sse::{Framer, MAX_EVENT_BYTES};
use crate::wire::provider::{Failure, ModelRequest, Outcome, anthropic, openai};
use crate::words::error::{Error, Result};
use crate::words::text::harmless_line;

/// Tokens of one reply when the settings say nothing.
const DEFAULT_MAX_TOKENS: u64 = 8192;
/// How much of an error's body is read.
const ERROR_BODY_BYTES_MAX: usize = 64 << 10;
/// Once the reply is whole, the server gets this long to close its side by itself.
const FAREWELL: Duration = Duration::from_millis(50);
/// Variables that hold keys by convention. Only the program that needs one gets it, and curl needs none.
const KEY_VARIABLES: [&str; 2] = ["ANTHROPIC_API_KEY", "OPENAI_API_KEY"];

/// Which protocol is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Anthropic Messages.
    Anthropic,
    /// OpenAI Chat Completions.
    Openai,
}

/// A model behind an HTTP server.
#[derive(Debug, Clone)]
pub(super) struct Http {
    dialect: Dialect,
    url: Secret,
    address: Address,
    /// The headers that need no key: ours, and those of the settings.
    headers: Headers,
    /// Values of those headers that may be keys themselves.
    secret_headers: Vec<Secret>,
    key: KeySource,
    model: String,
    max_tokens: Option<u64>,
    curl: Curl,
}

impl Http {
    /// Checks the settings and makes everything ready that stays the same for each request.
    pub(super) fn new(
        dialect: Dialect,
        settings: &ProviderSettings,
        model: String,
        private_dir: PathBuf,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Http> {
        let (default_url, key_variable) = match dialect {
            Dialect::Anthropic => (anthropic::DEFAULT_BASE_URL, "ANTHROPIC_API_KEY"),
            Dialect::Openai => (openai::DEFAULT_BASE_URL, "OPENAI_API_KEY"),
        };
        let is_key_optional = dialect == Dialect::Openai && settings.base_url.is_some();
        let key = KeySource::find(settings, key_variable, is_key_optional, lookup)?;
        let program = find_curl(lookup).ok_or_else(|| {
            Error::told("the program \"curl\", by which the model is reached, is not on PATH; install curl")
        })?;
        let hidden_variables = KEY_VARIABLES.into_iter().chain(key.variable()).map(str::to_owned).collect();
        let base_url = settings.base_url.as_deref().unwrap_or(default_url).trim();
        let address = parse_address(base_url).map_err(Error::told)?;
        if base_url.starts_with("http://") && !address.is_local {
            log::warn!("the connection to {} is not encrypted, the key included; use https", address.host);
        }
        let (headers, secret_headers) = headers(dialect, &settings.headers).map_err(Error::told)?;
        Ok(Http {
            dialect,
            url: Secret::new(endpoint(dialect, base_url)),
            address,
            headers,
            secret_headers,
            key,
            model,
            max_tokens: settings.max_tokens,
            curl: Curl { program, private_dir, hidden_variables, patience: Patience::default() },
        })
    }

    /// The same with other limits of waiting.
    pub(super) fn set_patience(&mut self, patience: Patience) {
        self.curl.patience = patience;
    }

    /// One attempt.
    pub(super) fn request(
        &self,
        request: &ModelRequest<'_>,
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str),
    ) -> Outcome {
        let key = self.key.read().map_err(|error| Failure::Final(error.to_string()))?;
        let mask = |text: String| {
            key.iter().chain(&self.secret_headers).fold(text, |text, secret| secret.mask(&text))
        };
        let mut attempt = || {
            let body = self.body(request).to_string();
            let (host, count) = (&self.address.host, body.len());
            log::debug!("model request {} to {}: {count} bytes", request.number, self.address.shown);
            let headers = self.all_headers(key.as_ref());
            let mut exchange = Exchange::start(&self.curl, &self.url, host, &headers, &body)?;
            let head = exchange.head(cancel)?;
            log::debug!("model request {}: HTTP {}", request.number, head.status);
            match head.status {
                200 => self.follow(exchange, cancel, on_text),
                // Masked before it is cut: half a key at the end would not be found any more.
                _ => Err(self.refusal(exchange, &head, &mask, cancel)),
            }
        };
        attempt().map_err(|failure| failure.map(mask))
    }

    fn body(&self, request: &ModelRequest<'_>) -> Value {
        let Http { model, max_tokens, .. } = self;
        let tokens = max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        // OpenAI's and Azure's newer models refuse `max_tokens`, which every other server knows.
        let is_openai_itself =
            ["api.openai.com", ".openai.azure.com"].iter().any(|name| self.address.host.ends_with(name));
        match self.dialect {
            Dialect::Anthropic => anthropic::request_body(model, tokens, request),
            Dialect::Openai if is_openai_itself => {
                openai::request_body(model, Some(("max_completion_tokens", tokens)), request)
            }
            // Unsaid, the server decides: a local one with a small context would refuse a large limit.
            Dialect::Openai => {
                openai::request_body(model, max_tokens.map(|tokens| ("max_tokens", tokens)), request)
            }
        }
    }

    fn all_headers(&self, key: Option<&Secret>) -> Headers {
        let mut headers = self.headers.clone();
        let Some(key) = key else { return headers };
        let (name, value) = match self.dialect {
            Dialect::Anthropic => ("x-api-key", key.clone()),
            Dialect::Openai => ("authorization", Secret::new(format!("Bearer {}", key.reveal()))),
        };
        // What the settings say goes before what we would say.
        if !headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name)) {
            headers.push((name.to_owned(), value));
        }
        headers
    }

    /// Reads the reply to its end.
    fn follow(&self, mut exchange: Exchange, cancel: &Cancel, on_text: &mut dyn FnMut(&str)) -> Outcome {
        let (mut reply, mut framer) = (Reply::default(), Framer::default());
        let (mut form, mut unread) = (Form::Unknown, Vec::new());
        let mut take = |reply: &mut Reply, data: &str| {
            let taken = match self.dialect {
                Dialect::Anthropic => anthropic::take(reply, data),
                Dialect::Openai => openai::take(reply, data),
            };
            reply.stream(on_text);
            taken.map_err(|trouble| match trouble {
                Trouble::Broken(reason) => Failure::retry(reason),
                Trouble::Told { status, message } => self.judge(status, &message, None),
            })
        };
        let broken = loop {
            match exchange.piece(cancel) {
                Ok(Some(piece)) => unread.extend(piece),
                Ok(None) => break None,
                Err(Failure::Cancelled) => return Err(Failure::Cancelled),
                Err(failure) => break Some(failure),
            }
            if form == Form::Unknown {
                form = Form::of(&unread);
            }
            if form == Form::Page {
                let shown = &self.address.shown;
                return Err(Failure::Final(format!(
                    "{shown} answers with a web page, not as a model provider does; check \"base_url\""
                )));
            }
            if form == Form::Stream {
                let events = framer.push(&std::mem::take(&mut unread)).map_err(|_| {
                    Failure::Final(format!("one event of the stream has more than {MAX_EVENT_BYTES} bytes"))
                })?;
                for data in events {
                    if take(&mut reply, &data)? == Progress::Complete {
                        exchange.farewell(cancel, FAREWELL);
                        return Ok(reply.finish());
                    }
                }
            }
        };
        let last = match form {
            _ if broken.is_some() => None,
            Form::Stream => framer.finish(),
            Form::Whole => Some(String::from_utf8_lossy(&unread).into_owned()),
            Form::Unknown | Form::Page => None,
        };
        if let Some(data) = last {
            take(&mut reply, &data)?;
        }
        if reply.is_complete {
            return Ok(reply.finish()); // also when the server then closed badly: it had said all
        }
        let reason = format!("the stream of {} ended before the reply was complete", self.address.host);
        Err(broken.unwrap_or_else(|| Failure::retry(reason)))
    }

    fn judge(&self, status: u16, message: &str, wait: Option<Duration>) -> Failure {
        let asked = Asked { key: &self.key.to_string(), model: &self.model, address: &self.address.shown };
        of_status(status, message, wait, asked)
    }

    /// What an answer other than 200 means.
    fn refusal(
        &self,
        mut exchange: Exchange,
        head: &Head,
        mask: &dyn Fn(String) -> String,
        cancel: &Cancel,
    ) -> Failure {
        let mut body = Vec::new();
        while body.len() < ERROR_BODY_BYTES_MAX {
            match exchange.piece(cancel) {
                Ok(Some(piece)) => body.extend(piece),
                Err(Failure::Cancelled) => return Failure::Cancelled,
                Ok(None) | Err(_) => break, // the status alone tells enough
            }
        }
        let wait = head.headers.iter().find(|(name, _)| name == "retry-after");
        let wait = wait.and_then(|(_, value)| retry_after(value, now_seconds()));
        self.judge(head.status, &mask(message_of_body(&body)), wait)
    }
}

/// What the body of an answer is, told by its first byte: content types are often wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Nothing but space has come.
    Unknown,
    /// Events.
    Stream,
    /// One JSON object.
    Whole,
    /// HTML: a captive portal, or a wrong address.
    Page,
}

impl Form {
    fn of(start: &[u8]) -> Form {
        match start.trim_ascii_start().first() {
            None => Form::Unknown,
            Some(b'{') => Form::Whole,
            Some(b'<') => Form::Page,
            Some(_) => Form::Stream,
        }
    }
}

/// Our headers and those of the settings; of these, the values that may be keys.
fn headers(dialect: Dialect, given: &Map<String, Value>) -> Result<(Headers, Vec<Secret>), String> {
    let mut headers = vec![
        ("content-type".to_owned(), Secret::new("application/json")),
        ("accept".to_owned(), Secret::new("text/event-stream, application/json")),
        ("user-agent".to_owned(), Secret::new(concat!("insomnia/", env!("CARGO_PKG_VERSION")))),
    ];
    if dialect == Dialect::Anthropic {
        headers.push(("anthropic-version".to_owned(), Secret::new(anthropic::VERSION)));
    }
    let mut secrets = Vec::new();
    for (name, value) in given {
        let value = value.as_str().ok_or_else(|| {
            format!("the header \"{}\" is no text; write its value in quotes", harmless_line(name))
        })?;
        check_header(name, value)?;
        headers.retain(|(ours, _)| !ours.eq_ignore_ascii_case(name));
        headers.push((name.clone(), Secret::new(value)));
        let name = name.to_ascii_lowercase();
        if ["key", "auth", "token", "secret", "cookie"].iter().any(|sign| name.contains(sign)) {
            secrets.push(Secret::new(value));
        }
    }
    Ok((headers, secrets))
}

/// Where to post, for a base address with or without a path; a query such as Azure's `api-version` stays.
fn endpoint(dialect: Dialect, base_url: &str) -> String {
    let (base, query) = base_url.split_at(base_url.find('?').unwrap_or(base_url.len()));
    let base = base.trim_end_matches('/');
    let path = match dialect {
        Dialect::Anthropic => anthropic::path_behind(base),
        Dialect::Openai => openai::path_behind(base),
    };
    format!("{base}{path}{query}")
}

/// The parts of an address that sentences need.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Address {
    /// Host and port.
    host: String,
    /// Without user, password and query.
    shown: String,
    /// Whether it never leaves this machine.
    is_local: bool,
}

fn parse_address(url: &str) -> Result<Address, String> {
    // The address itself may hold a password, so only what is wrong is said.
    let fault = |what: &str| format!("\"base_url\" {what}; write it like \"https://host/v1\"");
    let (scheme, rest) = url
        .split_once("://")
        .filter(|(scheme, _)| matches!(*scheme, "http" | "https"))
        .ok_or_else(|| fault("begins with neither http:// nor https://"))?;
    if url.chars().any(|c| c.is_control() || c.is_whitespace() || c == '#') {
        return Err(fault("has a space, a control character or a \"#\""));
    }
    let rest = rest.split('?').next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit('@').next().unwrap_or_default();
    if host.is_empty() || host.starts_with(':') {
        return Err(fault("names no host"));
    }
    let name = host.trim_end_matches(|c: char| c == ':' || c.is_ascii_digit());
    let is_local = name == "localhost" || name == "[::1]" || name.starts_with("127.");
    Ok(Address { host: host.to_owned(), shown: format!("{scheme}://{host}{path}"), is_local })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_checked_and_shown_without_its_secrets() {
        let check =
            |url: &str, expected: Result<(&str, &str, bool), &str>| match (parse_address(url), expected) {
                (Ok(found), Ok((host, shown, is_local))) => {
                    assert_eq!(found, Address { host: host.into(), shown: shown.into(), is_local });
                }
                (Err(told), Err(expected)) => assert!(told.contains(expected), "{told}"),
                (found, expected) => panic!("{url}: {found:?} is not {expected:?}"),
            };
        check("https://api.anthropic.com", Ok(("api.anthropic.com", "https://api.anthropic.com", false)));
        check("http://127.0.0.1:8/v1", Ok(("127.0.0.1:8", "http://127.0.0.1:8/v1", true)));
        check("http://[::1]:8", Ok(("[::1]:8", "http://[::1]:8", true)));
        check("https://u:secret@h/v1?key=secret", Ok(("h", "https://h/v1", false)));
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
        let (headers, secrets) = headers(Dialect::Anthropic, given.as_object().unwrap()).unwrap();
        let names: Vec<_> = headers.iter().map(|(name, _)| name.as_str()).collect();
        let expected =
            ["content-type", "accept", "anthropic-version", "User-Agent", "anthropic-beta", "api-key"];
        let (mut names, mut expected) = (names, expected.to_vec());
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected);
        assert_eq!(secrets, [Secret::new("topsecret")]);
        let bad = serde_json::json!({"x": 1});
        let told = super::headers(Dialect::Openai, bad.as_object().unwrap()).unwrap_err();
        assert!(told.contains("header \"x\" is no text"), "{told}");
    }

    #[test]
    fn the_first_byte_tells_a_stream_from_an_object() {
        let check = |start: &str, expected: Form| assert_eq!(Form::of(start.as_bytes()), expected);
        check("", Form::Unknown);
        check("\n", Form::Unknown);
        check("\n  {\"a\"", Form::Whole);
        check("data: x", Form::Stream);
        check(": ping\n", Form::Stream);
        check("<!doctype html>", Form::Page);
    }
}
