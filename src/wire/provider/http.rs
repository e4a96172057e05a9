//! One request over HTTP: translate, post, follow the stream, translate back.
//!
//! Runs on the turn thread. The only file where a key meets a request; every sentence that leaves it has the
//! key masked.

use std::fmt;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::store::manifest::ProviderSettings;
use crate::sys::clock::now_seconds;
use crate::sys::wait::Cancel;
use crate::wire::provider::curl::{Curl, Exchange, Head, Post, check_header};
use crate::wire::provider::failure::{Asked, message_of_body, of_status, retry_after};
use crate::wire::provider::key::{KeySource, Secret};
use crate::wire::provider::sse::Framer;
use crate::wire::provider::{Failure, ModelRequest, Outcome, Progress, Trouble, anthropic, openai};
use crate::words::error::{Error, Result};
use crate::words::message::AssistantMessage;
use crate::words::text::harmless_line;

/// How much of an error's body is read.
const ERROR_BODY_BYTES_MAX: usize = 64 << 10;
/// The largest reply of a server that does not stream.
const WHOLE_BODY_BYTES_MAX: usize = 16 << 20;
/// Once the reply is whole, the server gets this long to close its side by itself.
const FAREWELL: Duration = Duration::from_millis(50);

/// Which protocol is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Anthropic Messages.
    Anthropic,
    /// OpenAI Chat Completions.
    Openai,
}

/// A model behind an HTTP server.
#[derive(Clone)]
pub struct Http {
    dialect: Dialect,
    url: String,
    /// The address without user, password and query, for sentences.
    shown_url: String,
    host: String,
    /// The headers that need no key: ours, and those of the settings.
    headers: Vec<(String, String)>,
    /// Values of those headers that may be keys themselves.
    secret_headers: Vec<Secret>,
    key: KeySource,
    model: String,
    max_tokens: u64,
    limit: openai::TokenLimit,
    curl: Curl,
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http")
            .field("dialect", &self.dialect)
            .field("url", &self.shown_url)
            .field("model", &self.model)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

impl Http {
    /// Checks the settings and makes everything ready that stays the same for each request.
    ///
    /// # Errors
    /// When the address or a header cannot be used.
    pub fn new(
        dialect: Dialect,
        settings: &ProviderSettings,
        model: &str,
        max_tokens: u64,
        key: KeySource,
        curl: Curl,
    ) -> Result<Http> {
        let default = match dialect {
            Dialect::Anthropic => anthropic::DEFAULT_BASE_URL,
            Dialect::Openai => openai::DEFAULT_BASE_URL,
        };
        let base_url = settings.base_url.as_deref().unwrap_or(default).trim();
        let Address { host, shown, is_local } = parse_address(base_url).map_err(Error::told)?;
        let url = match dialect {
            Dialect::Anthropic => anthropic::endpoint(base_url),
            Dialect::Openai => openai::endpoint(base_url),
        };
        if base_url.starts_with("http://") && !is_local {
            log::warn!("the connection to {host} is not encrypted, the key included; use https");
        }
        let (headers, secret_headers) = headers(dialect, &settings.headers).map_err(Error::told)?;
        let is_openai_itself =
            ["api.openai.com", ".openai.azure.com"].iter().any(|name| host.ends_with(name));
        let limit = match (is_openai_itself, settings.max_tokens) {
            (true, _) => openai::TokenLimit::Completion(max_tokens),
            (false, Some(tokens)) => openai::TokenLimit::Plain(tokens),
            (false, None) => openai::TokenLimit::Unsaid,
        };
        let model = model.to_owned();
        let http = Http {
            dialect,
            url,
            shown_url: shown,
            host,
            headers,
            secret_headers,
            key,
            model,
            max_tokens,
            limit,
            curl,
        };
        Ok(http)
    }

    /// How curl is run.
    pub fn curl_mut(&mut self) -> &mut Curl {
        &mut self.curl
    }

    /// One attempt.
    ///
    /// # Errors
    /// Why there is no reply; the key is masked in it.
    pub fn request(
        &self,
        request: &ModelRequest<'_>,
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str),
    ) -> Outcome {
        let key = self.key.read().map_err(|error| Failure::Final(error.to_string()))?;
        self.exchange(request, key.as_ref(), cancel, on_text).map_err(|failure| {
            let secrets = key.iter().chain(&self.secret_headers);
            secrets.fold(failure, masked)
        })
    }

    fn exchange(
        &self,
        request: &ModelRequest<'_>,
        key: Option<&Secret>,
        cancel: &Cancel,
        on_text: &mut dyn FnMut(&str),
    ) -> Outcome {
        let body = match self.dialect {
            Dialect::Anthropic => anthropic::request_body(&self.model, self.max_tokens, request),
            Dialect::Openai => openai::request_body(&self.model, self.limit, request),
        }
        .to_string();
        let headers = self.all_headers(key);
        let post = Post { url: &self.url, host: &self.host, headers: &headers, body: body.as_bytes() };
        log::debug!("model request {} to {}: {} bytes", request.number, self.shown_url, body.len());
        let mut exchange = Exchange::start(&self.curl, &post)?;
        drop((body, headers));
        let head = exchange.head(cancel)?;
        log::debug!("model request {}: HTTP {}", request.number, head.status);
        if head.status == 200 {
            self.follow(exchange, cancel, on_text)
        } else {
            Err(self.refusal(exchange, &head, key, cancel))
        }
    }

    fn all_headers(&self, key: Option<&Secret>) -> Vec<(String, String)> {
        let mut headers = self.headers.clone();
        let Some(key) = key else { return headers };
        let (name, value) = match self.dialect {
            Dialect::Anthropic => ("x-api-key", key.reveal().to_owned()),
            Dialect::Openai => ("authorization", format!("Bearer {}", key.reveal())),
        };
        // What the settings say goes before what we would say.
        if !headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name)) {
            headers.push((name.to_owned(), value));
        }
        headers
    }

    /// Reads the reply to its end.
    fn follow(&self, mut exchange: Exchange, cancel: &Cancel, on_text: &mut dyn FnMut(&str)) -> Outcome {
        let mut reply = Reply::new(self.dialect);
        let mut framer = Framer::default();
        let mut form = Form::Unknown;
        let broken = loop {
            let piece = match exchange.piece(cancel) {
                Ok(Some(piece)) => piece,
                Ok(None) => break None,
                Err(failure) => break Some(failure),
            };
            form = form.after(piece);
            let Form::Stream(bytes) = &mut form else { continue };
            let events =
                framer.push(&std::mem::take(bytes)).map_err(|error| Failure::Final(error.to_string()))?;
            for event in events {
                if self.judged(reply.take(&event.data, on_text))? == Progress::Complete {
                    exchange.farewell(cancel, FAREWELL);
                    return Ok(reply.finish());
                }
            }
        };
        match (form, broken) {
            (_, Some(Failure::Cancelled)) => return Err(Failure::Cancelled),
            (Form::Whole(body), None) => {
                self.judged(reply.take(&String::from_utf8_lossy(&body), on_text))?;
            }
            (Form::Page, None) => {
                return Err(Failure::Final(format!(
                    "{} answers with a web page, not as a model provider does; check \"base_url\"",
                    self.shown_url
                )));
            }
            (Form::Stream(_), None) => {
                if let Some(event) = framer.finish() {
                    self.judged(reply.take(&event.data, on_text))?;
                }
            }
            // A server that has said all and then closes badly has still said all.
            (_, Some(failure)) if !reply.is_complete() => return Err(failure),
            (Form::Unknown, None) | (_, Some(_)) => {}
        }
        if reply.is_complete() {
            return Ok(reply.finish());
        }
        Err(retry(format!("the stream of {} ended before the reply was complete", self.host)))
    }

    fn judged(&self, taken: Result<Progress, Trouble>) -> Result<Progress, Failure> {
        taken.map_err(|trouble| match trouble {
            Trouble::Broken(reason) => retry(reason),
            Trouble::Told { status, message } => self.judge(status, &message, None),
        })
    }

    fn judge(&self, status: u16, message: &str, wait: Option<Duration>) -> Failure {
        let asked = Asked { key: &self.key.to_string(), model: &self.model, address: &self.shown_url };
        of_status(status, message, wait, asked)
    }

    /// What an answer other than 200 means.
    fn refusal(&self, mut exchange: Exchange, head: &Head, key: Option<&Secret>, cancel: &Cancel) -> Failure {
        let mut body = Vec::new();
        while body.len() < ERROR_BODY_BYTES_MAX {
            match exchange.piece(cancel) {
                Ok(Some(piece)) => body.extend(piece),
                Err(Failure::Cancelled) => return Failure::Cancelled,
                // The status alone tells enough.
                Ok(None) | Err(Failure::Retry { .. } | Failure::Final(_) | Failure::ContextTooLong(_)) => {
                    break;
                }
            }
        }
        body.truncate(ERROR_BODY_BYTES_MAX);
        // Masked before it is cut: half a key at the end would not be found any more.
        let message = message_of_body(&body);
        let message =
            key.iter().copied().chain(&self.secret_headers).fold(message, |text, key| key.mask(&text));
        self.judge(head.status, &message, wanted_wait(head))
    }
}

fn wanted_wait(head: &Head) -> Option<Duration> {
    let millis =
        head.header("retry-after-ms").and_then(|value| value.parse().ok()).map(Duration::from_millis);
    millis.or_else(|| retry_after(head.header("retry-after")?, now_seconds()))
}

fn retry(reason: String) -> Failure {
    Failure::Retry { reason, wait: None }
}

fn masked(failure: Failure, secret: &Secret) -> Failure {
    match failure {
        Failure::Retry { reason, wait } => Failure::Retry { reason: secret.mask(&reason), wait },
        Failure::ContextTooLong(reason) => Failure::ContextTooLong(secret.mask(&reason)),
        Failure::Final(reason) => Failure::Final(secret.mask(&reason)),
        Failure::Cancelled => Failure::Cancelled,
    }
}

/// The reply of either protocol.
enum Reply {
    Anthropic(anthropic::Reply),
    Openai(openai::Reply),
}

impl Reply {
    fn new(dialect: Dialect) -> Reply {
        match dialect {
            Dialect::Anthropic => Reply::Anthropic(anthropic::Reply::default()),
            Dialect::Openai => Reply::Openai(openai::Reply::default()),
        }
    }

    fn take(&mut self, data: &str, on_text: &mut dyn FnMut(&str)) -> Result<Progress, Trouble> {
        match self {
            Reply::Anthropic(reply) => reply.take(data, on_text),
            Reply::Openai(reply) => reply.take(data, on_text),
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Reply::Anthropic(reply) => reply.is_complete(),
            Reply::Openai(reply) => reply.is_complete(),
        }
    }

    fn finish(self) -> AssistantMessage {
        match self {
            Reply::Anthropic(reply) => reply.finish(),
            Reply::Openai(reply) => reply.finish(),
        }
    }
}

/// What the body of an answer is, told by its first byte: content types are often wrong.
enum Form {
    /// Nothing but space has come.
    Unknown,
    /// Events; the bytes that were not framed yet.
    Stream(Vec<u8>),
    /// One JSON object.
    Whole(Vec<u8>),
    /// HTML: a captive portal, or a wrong address.
    Page,
}

impl Form {
    fn after(self, piece: Vec<u8>) -> Form {
        match self {
            Form::Unknown => match piece.iter().find(|byte| !byte.is_ascii_whitespace()) {
                None => Form::Unknown,
                Some(b'{') => Form::Whole(piece),
                Some(b'<') => Form::Page,
                Some(_) => Form::Stream(piece),
            },
            Form::Stream(mut bytes) => {
                bytes.extend(piece);
                Form::Stream(bytes)
            }
            Form::Whole(mut bytes) => {
                let room = WHOLE_BODY_BYTES_MAX.saturating_sub(bytes.len());
                bytes.extend(piece.into_iter().take(room));
                Form::Whole(bytes)
            }
            Form::Page => Form::Page,
        }
    }
}

/// Headers, name and value.
type Headers = Vec<(String, String)>;

/// Our headers and those of the settings; of these, the values that may be keys.
fn headers(dialect: Dialect, given: &Map<String, Value>) -> Result<(Headers, Vec<Secret>), String> {
    let mut headers = vec![
        ("content-type".to_owned(), "application/json".to_owned()),
        ("accept".to_owned(), "text/event-stream, application/json".to_owned()),
        ("user-agent".to_owned(), concat!("insomnia/", env!("CARGO_PKG_VERSION")).to_owned()),
    ];
    if dialect == Dialect::Anthropic {
        headers.push(("anthropic-version".to_owned(), anthropic::VERSION.to_owned()));
    }
    let mut secrets = Vec::new();
    for (name, value) in given {
        let value = value.as_str().ok_or_else(|| {
            format!("the header \"{}\" is no text; write its value in quotes", harmless_line(name))
        })?;
        check_header(name, value)?;
        headers.retain(|(ours, _)| !ours.eq_ignore_ascii_case(name));
        headers.push((name.clone(), value.to_owned()));
        let name = name.to_ascii_lowercase();
        if ["key", "auth", "token", "secret", "cookie"].iter().any(|sign| name.contains(sign)) {
            secrets.push(Secret::new(value));
        }
    }
    Ok((headers, secrets))
}

/// The parts of an address that sentences need.
#[derive(Debug, PartialEq, Eq)]
struct Address {
    /// Host and port.
    host: String,
    /// Without user, password and query.
    shown: String,
    /// Whether it never leaves this machine.
    is_local: bool,
}

fn parse_address(url: &str) -> Result<Address, String> {
    let fault = |what: &str| {
        // The address itself may hold a password, so only what is wrong is said.
        format!("\"base_url\" {what}; write it like \"https://host/v1\"")
    };
    let Some((scheme, rest)) =
        url.split_once("://").filter(|(scheme, _)| matches!(*scheme, "http" | "https"))
    else {
        return Err(fault("begins with neither http:// nor https://"));
    };
    if url.chars().any(|c| c.is_control() || c.is_whitespace() || c == '#') {
        return Err(fault("has a space, a control character or a \"#\""));
    }
    let rest = rest.split('?').next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit('@').next().unwrap_or_default();
    if host.is_empty() || host.starts_with(':') {
        return Err(fault("names no host"));
    }
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let is_local = name == "localhost" || name == "::1" || name.starts_with("127.");
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
        let check = |pieces: &[&str], expected: &str| {
            let form = pieces.iter().fold(Form::Unknown, |form, piece| form.after(piece.as_bytes().to_vec()));
            let found = match form {
                Form::Unknown => "unknown".to_owned(),
                Form::Stream(bytes) => format!("stream {}", String::from_utf8(bytes).unwrap()),
                Form::Whole(bytes) => format!("whole {}", String::from_utf8(bytes).unwrap()),
                Form::Page => "page".to_owned(),
            };
            assert_eq!(found, expected);
        };
        check(&[], "unknown");
        check(&["\n", "  {\"a\"", ":1}"], "whole   {\"a\":1}");
        check(&["data: x", "\n"], "stream data: x\n");
        check(&[": ping\n"], "stream : ping\n");
        check(&["<!doctype html>", "<p>"], "page");
    }
}
