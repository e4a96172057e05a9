//! One HTTP POST through a `curl` child process.
//!
//! Address and headers, the key among them, go to curl's standard input; the body is a 0600 file that is gone
//! when the exchange ends, however it ends. TLS, proxies and CA bundles are curl's, from the environment that
//! it inherits from us. Knows nothing of models.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::sys::process::Program;
use crate::sys::wait::Cancel;
use crate::wire::provider::child::{Child, Patience, RequestFile};
use crate::wire::provider::key::Secret;
use crate::wire::provider::{Failure, Lookup};
use crate::words::error::{Error, Result};
use crate::words::text::{cut_end, harmless_line};

/// The longest status line and headers, in bytes; servers themselves stop at 8 to 64 KiB.
const HEAD_BYTES_MAX: usize = 128 << 10;
/// What curl is always told. `-q` must come first: it keeps a user's .curlrc from changing what we read.
const OPTIONS: &str = "-q --no-buffer --silent --show-error --include --suppress-connect-headers --globoff \
    --proto =http,https --config - --connect-timeout";

/// How to run curl.
#[derive(Debug, Clone)]
pub(super) struct Curl {
    pub(super) program: PathBuf,
    pub(super) url: Secret,
    /// Whom sentences speak of.
    pub(super) host: String,
    /// The 0700 directory for bodies.
    pub(super) private_dir: PathBuf,
    /// Variables of our environment that curl does not get: keys.
    pub(super) hidden_variables: Vec<String>,
    pub(super) patience: Patience,
}

/// Headers, name and value; one of them is the key.
pub(super) type Headers = Vec<(String, Secret)>;

/// What counts of an answer's status line and headers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) status: u16,
    pub(super) retry_after: Option<String>,
}

/// An exchange under way; dropping it ends curl and removes the body.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) child: Child,
    /// What came in one piece with the head.
    pending: Vec<u8>,
}

/// The program `curl` in one of the absolute places of PATH.
pub(super) fn find_curl(lookup: Lookup) -> Result<PathBuf> {
    let path = lookup("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".to_owned());
    let places = std::env::split_paths(&path).filter(|place| place.is_absolute());
    places.map(|place| place.join("curl")).find(|program| program.is_file()).ok_or_else(|| {
        Error::told("the program \"curl\", by which the model is reached, is not on PATH; install curl")
    })
}

impl Exchange {
    /// Starts curl.
    pub(super) fn start(curl: &Curl, headers: &Headers, body: &str) -> Result<Exchange, Failure> {
        let body = RequestFile::write(&curl.private_dir, body.as_bytes())?;
        let connect = format!("{:.3}", curl.patience.connect.as_secs_f64());
        let program = Program::new(&curl.program, OPTIONS.split(' ').chain([connect.as_str()]))
            .only_env(environment(&curl.hidden_variables))
            .input(config(&curl.url, headers, &body.path));
        Child::start(program, body, &curl.host, curl.patience)
            .map(|child| Exchange { child, pending: Vec::new() })
            .map_err(|error| Failure::Final(format!("cannot start curl: {error}; is it installed?")))
    }

    /// Waits for status and headers of the answer. To be called once, before `piece`.
    pub(super) fn head(&mut self, cancel: &Cancel) -> Result<Head, Failure> {
        let mut bytes = Vec::new();
        while let Some(piece) = self.piece(cancel)? {
            bytes.extend(piece);
            if let Some(head) = take_head(&mut bytes).map_err(Failure::Final)? {
                self.pending = bytes;
                return Ok(head);
            }
        }
        Err(Failure::retry(format!("{} closed the connection without an answer", self.child.name)))
    }

    /// The next piece of the answer's body; `None` at its proper end.
    pub(super) fn piece(&mut self, cancel: &Cancel) -> Result<Option<Vec<u8>>, Failure> {
        if !self.pending.is_empty() {
            return Ok(Some(std::mem::take(&mut self.pending)));
        }
        if let Some(piece) = self.child.piece(cancel)? {
            return Ok(Some(piece));
        }
        match self.child.finish() {
            (Some(status), _) if status.success() => Ok(None),
            (status, said) => {
                let code = status.and_then(|status| status.code());
                Err(curl_failure(code, &said, &self.child.name, self.child.patience.connect))
            }
        }
    }
}

fn environment(hidden: &[String]) -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(move |(name, _)| !hidden.iter().any(|hidden| name == hidden.as_str()))
}

/// The configuration that curl reads from its standard input.
fn config(url: &Secret, headers: &Headers, body: &Path) -> String {
    let mut text = String::new();
    // Quotes, backslashes and line breaks are written as JSON does it. Source: curl(1), --config.
    let mut option = |name: &str, value: &str| text += &format!("{name} = {}\n", Value::from(value));
    option("url", url.reveal());
    for (name, value) in headers {
        // An empty value would make curl leave the header out; a semicolon sends it empty.
        let value = value.reveal();
        option("header", &if value.is_empty() { format!("{name};") } else { format!("{name}: {value}") });
    }
    // Without this, curl waits a second for a leave to send a body over 1 MiB.
    option("header", "Expect:");
    option("data-binary", &format!("@{}", body.display()));
    text
}

/// Checks that a header is one line and its name a token; the sentence never has the value.
pub(super) fn check_header(name: &str, value: &str) -> Result<(), String> {
    // Source: RFC 9110, section 5.6.2.
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let shown = harmless_line(name);
    if name.is_empty() || !name.bytes().all(token) {
        return Err(format!("\"{shown}\" is no name of an HTTP header; correct \"headers\""));
    }
    if value.chars().any(|c| c.is_control() && c != '\t') {
        return Err(format!(
            "the header \"{shown}\" has a line break or control character; correct \"headers\""
        ));
    }
    Ok(())
}

/// What a failure of curl means. `code` is its exit code, none when a signal ended it.
///
/// Source: curl(1), "EXIT CODES".
fn curl_failure(code: Option<i32>, said: &str, host: &str, connect: Duration) -> Failure {
    // The first line tells what happened; advice for people at a command line follows.
    let said = cut_end(&harmless_line(said.trim().lines().next().unwrap_or("no further words")), 512);
    let is_of_proxy = said.to_ascii_lowercase().contains("proxy") || said.contains("CONNECT");
    let is_refused_by_proxy = said.contains(" 407") || said.contains(" 403");
    // "Failed to connect to HOST port N", or "... HOST port N via PROXY": of the proxy unless it names our host alone.
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name).trim_matches(['[', ']']);
    let other_end = said.contains("connect to") && (!said.contains(name) || said.contains(" via "));
    let (is_final, sentence) = match code {
        None => (false, "curl was ended by a signal".to_owned()),
        Some(1) if said.contains("HTTP/0.9") => {
            (true, format!("{host} does not answer in HTTP; check \"base_url\""))
        }
        Some(1 | 3) => (true, format!("curl does not understand the address of {host}; check \"base_url\"")),
        Some(2) => (true, "curl cannot do what is needed; install version 7.54 or newer".to_owned()),
        Some(5) => (false, "cannot find the proxy: check HTTPS_PROXY and the network".to_owned()),
        Some(6) => (false, format!("cannot find the host {host}: check \"base_url\" and the network")),
        Some(7) if other_end => (false, "the proxy refuses the connection; check HTTPS_PROXY".to_owned()),
        Some(7) => (false, format!("{host} refuses the connection: is the server running?")),
        Some(28) => (false, format!("no connection to {host} within {} s", connect.as_secs_f64())),
        Some(35) if said.contains("wrong version number") => {
            (true, format!("{host} does not speak TLS; check \"base_url\", http:// or https://"))
        }
        Some(35) => (false, format!("{host} and curl do not agree on TLS")),
        Some(51 | 60) => (true, format!("the certificate of {host} is not trusted; check CURL_CA_BUNDLE")),
        Some(58 | 59 | 77 | 83) => (true, format!("TLS to {host} cannot be set up; check CURL_CA_BUNDLE")),
        Some(code @ (56 | 97)) if code == 97 || is_of_proxy => {
            (is_refused_by_proxy, "the proxy does not let us through; check HTTPS_PROXY".to_owned())
        }
        Some(18 | 52 | 55 | 56 | 92 | 95) => (false, format!("the connection to {host} was dropped")),
        Some(code) => (false, format!("curl failed with exit code {code}")),
    };
    let told = format!("{sentence} ({said})");
    if is_final { Failure::Final(told) } else { Failure::retry(told) }
}

/// Takes status and headers off the front of `bytes`, once they are complete; answers 1xx are skipped.
fn take_head(bytes: &mut Vec<u8>) -> Result<Option<Head>, String> {
    while let Some(end) = end_of_head(bytes) {
        let rest = bytes.split_off(end);
        let head = parse_head(&String::from_utf8_lossy(&std::mem::replace(bytes, rest)))?;
        if head.status >= 200 {
            return Ok(Some(head));
        }
    }
    if bytes.len() > HEAD_BYTES_MAX {
        return Err("the answer has more headers than any server sends; check \"base_url\"".to_owned());
    }
    Ok(None)
}

/// Where the first empty line ends.
fn end_of_head(bytes: &[u8]) -> Option<usize> {
    let after = |end: &[u8]| bytes.windows(end.len()).position(|part| part == end).map(|at| at + end.len());
    [after(b"\n\n"), after(b"\n\r\n")].into_iter().flatten().min()
}

fn parse_head(text: &str) -> Result<Head, String> {
    let (first, fields) = text.split_once('\n').unwrap_or((text, ""));
    let status =
        first.strip_prefix("HTTP/").and_then(|rest| rest.split_ascii_whitespace().nth(1)?.parse().ok());
    let shown = cut_end(&harmless_line(first), 80);
    let status = status.ok_or_else(|| format!("the answer is not HTTP: it begins with \"{shown}\""))?;
    let mut fields = fields.lines().filter_map(|line| line.split_once(':'));
    let wait = fields.find(|(name, _)| name.trim().eq_ignore_ascii_case("retry-after"));
    Ok(Head { status, retry_after: wait.map(|(_, value)| value.trim().to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_in_a_value_stays_in_its_line() {
        let header = |name: &str, value: &str| (name.to_owned(), Secret::new(value));
        let headers = vec![header("x-api-key", r#"a"b\c"#), header("x-empty", "")];
        let url = Secret::new("http://h/?a=\"\nurl = \"http://evil");
        let text = config(&url, &headers, Path::new("/d/a\nb"));
        let expected = concat!(
            "url = \"http://h/?a=\\\"\\nurl = \\\"http://evil\"\n",
            "header = \"x-api-key: a\\\"b\\\\c\"\n",
            "header = \"x-empty;\"\n",
            "header = \"Expect:\"\n",
            "data-binary = \"@/d/a\\nb\"\n",
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn a_header_cannot_smuggle_in_another() {
        let check = |name: &str, value: &str, good: bool| {
            let checked = check_header(name, value);
            assert_eq!(checked.is_ok(), good, "{name:?} {value:?}");
            assert!(checked.err().is_none_or(|told| value.is_empty() || !told.contains(value)));
        };
        check("x-a", "b", true);
        check("x-a", "", true);
        check("x-a", "b\r\nx-evil: 1", false);
        check("x-a", "b\nx-evil: 1", false);
        check("x-a", "b\0", false);
        check("x a", "b", false);
        check("@file", "", false);
        check("x:", "b", false);
        check("", "b", false);
    }

    /// Status, wanted wait and the beginning of the body.
    type Parts<'a> = (u16, Option<&'a str>, &'a str);

    #[test]
    fn a_head_is_read_from_pieces_of_any_size() {
        let check = |text: &str, expected: Result<Parts<'_>, &str>| {
            for size in 1..=text.len() {
                let mut bytes = Vec::new();
                let mut found = Ok(None);
                let mut rest = String::new();
                for piece in text.as_bytes().chunks(size) {
                    match &found {
                        Ok(None) => {
                            bytes.extend_from_slice(piece);
                            found = take_head(&mut bytes);
                        }
                        Ok(Some(_)) | Err(_) => rest.push_str(std::str::from_utf8(piece).unwrap()),
                    }
                }
                match (found, &expected) {
                    (Ok(Some(head)), Ok((status, wait, body))) => {
                        assert_eq!((head.status, head.retry_after.as_deref()), (*status, *wait));
                        assert_eq!(String::from_utf8(bytes).unwrap() + &rest, *body);
                    }
                    (Ok(None), Err("incomplete")) => {}
                    (Err(told), Err(expected)) => assert!(told.contains(expected), "{told}"),
                    (found, expected) => panic!("{found:?} is not {expected:?}"),
                }
            }
        };
        check("HTTP/1.1 200 OK\r\nA: b\r\n\r\nbody", Ok((200, None, "body")));
        check("HTTP/2 429 \r\nretry-after:7\r\n\r\n", Ok((429, Some("7"), "")));
        check("HTTP/1.0 500 x\nRETRY-AFTER : b: c\n\n", Ok((500, Some("b: c"), "")));
        check(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nL: x\r\n\r\nHTTP/1.1 200\r\n\r\nx",
            Ok((200, None, "x")),
        );
        check("HTTP/1.1 200 OK\r\nA: b\r\n", Err("incomplete"));
        check("SSH-2.0-x\r\n\r\n", Err("not HTTP: it begins with \"SSH-2.0-x\""));
        check("HTTP/1.1 soon\r\n\r\n", Err("not HTTP"));
        let mut bytes = b"HTTP/1.1 200 OK\n".to_vec();
        assert_eq!(take_head(&mut bytes), Ok(None));
        bytes.extend(vec![b'x'; HEAD_BYTES_MAX + 1]);
        assert!(take_head(&mut bytes).is_err());
    }

    #[test]
    fn a_failure_of_curl_becomes_a_sentence() {
        let check = |code: Option<i32>, said: &str, is_final: bool, expected: &str| {
            let (found, told) = match curl_failure(code, said, "h:1", Duration::from_secs(30)) {
                Failure::Final(told) => (true, told),
                Failure::Retry { reason, .. } => (false, reason),
                Failure::ContextTooLong(_) | Failure::Cancelled => panic!(),
            };
            assert!(told.contains(expected) && found == is_final, "{code:?}: {told}");
        };
        check(Some(6), "curl: (6) Could not resolve host: h", false, "cannot find the host h:1");
        check(Some(7), "curl: (7) Failed to connect", false, "h:1 refuses the connection");
        check(Some(1), "curl: (1) Received HTTP/0.9 when not allowed", true, "does not answer in HTTP");
        check(Some(3), "", true, "check \"base_url\" (no further words)");
        check(Some(28), "", false, "no connection to h:1 within 30 s");
        check(Some(7), "curl: (7) Failed to connect to h port 1 after 0 ms: x", false, "h:1 refuses");
        check(Some(7), "curl: (7) Failed to connect to p port 1 after 0 ms: x", false, "the proxy refuses");
        check(
            Some(7),
            "curl: (7) Failed to connect to h port 1 via p after 0 ms: x",
            false,
            "the proxy refuses",
        );
        check(Some(35), "curl: (35) error:SSL routines::wrong version number", true, "does not speak TLS");
        check(Some(35), "", false, "TLS");
        check(
            Some(60),
            "curl: (60) SSL certificate problem\nMore at",
            true,
            "(curl: (60) SSL certificate problem)",
        );
        check(Some(18), "", false, "was dropped");
        check(Some(52), "", false, "was dropped");
        check(Some(56), "curl: (56) Recv failure: Connection reset by peer", false, "was dropped");
        check(Some(56), "curl: (56) CONNECT tunnel failed, response 407", true, "the proxy does not let us");
        check(Some(56), "curl: (56) CONNECT tunnel failed, response 502", false, "the proxy does not let us");
        check(Some(99), "x", false, "exit code 99 (x)");
        check(None, "", false, "ended by a signal");
    }

    #[test]
    fn r05_hidden_variables_do_not_reach_curl() {
        let names = |hidden: &[String]| environment(hidden).map(|(name, _)| name).collect::<Vec<_>>();
        assert!(names(&[]).contains(&"PATH".into()));
        let hidden = names(&["PATH".to_owned()]);
        assert!(!hidden.contains(&"PATH".into()) && hidden.len() + 1 == names(&[]).len());
    }
}
