//! One HTTP POST through a `curl` child process.
//!
//! Address and headers, the key among them, go to curl's standard input; the body is a 0600 file that is gone
//! when the exchange ends, however it ends. TLS, proxies and CA bundles are curl's, from the environment that
//! it inherits from us. Knows nothing of models.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::sys::clock::random_hex;
use crate::sys::file::{create_at, open_directory, set_mode};
use crate::sys::process::{ErrorOutput, Output, Program, Running};
use crate::sys::wait::Cancel;
use crate::wire::provider::Failure;
use crate::words::text::{cut_end, harmless_line};

/// The longest status line and headers, in bytes; servers themselves stop at 8 to 64 KiB.
const HEAD_BYTES_MAX: usize = 128 << 10;
/// The most bytes of one answer; a reply of 100,000 tokens, one event each, has about 20 MiB.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// How long curl may take to exit after its output has ended.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// How long each part of an exchange may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Until the connection stands: name look-up, TCP, proxy and TLS.
    pub connect: Duration,
    /// From the start until the first byte of the answer.
    pub first_byte: Duration,
    /// Between two pieces of the answer.
    pub silence: Duration,
    /// For all of it.
    pub total: Duration,
}

impl Default for Patience {
    /// Servers send a sign of life every few seconds while a model thinks; two minutes without any is a dead
    /// line. One hour is more than any reply takes.
    fn default() -> Self {
        Patience {
            connect: Duration::from_secs(30),
            first_byte: Duration::from_secs(120),
            silence: Duration::from_secs(120),
            total: Duration::from_secs(3600),
        }
    }
}

/// How to run curl.
#[derive(Debug, Clone)]
pub struct Curl {
    /// The program.
    pub program: PathBuf,
    /// The 0700 directory for bodies.
    pub private_dir: PathBuf,
    /// Variables of our environment that curl does not get: keys.
    pub hidden_variables: Vec<String>,
    /// How long to wait.
    pub patience: Patience,
}

/// What to send.
#[derive(Clone, Copy)]
pub struct Post<'a> {
    /// The whole address.
    pub url: &'a str,
    /// The host, for sentences.
    pub host: &'a str,
    /// Headers, name and value; no `Debug`, because the key is here.
    pub headers: &'a [(String, String)],
    /// The body.
    pub body: &'a [u8],
}

impl std::fmt::Debug for Post<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Post").field("host", &self.host).finish_non_exhaustive()
    }
}

/// Status and headers of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Head {
    /// The HTTP status.
    pub status: u16,
    /// Header names in lower case, and their values.
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// The value of the first header of this lower-case name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// An exchange under way; dropping it ends curl and removes the body.
#[derive(Debug)]
pub struct Exchange {
    running: Running,
    /// Declared behind `running`, so that curl is gone before the file.
    _body: BodyFile,
    host: String,
    patience: Patience,
    end: Instant,
    /// What came in one piece with the head.
    pending: Vec<u8>,
    answer_bytes: usize,
}

impl Exchange {
    /// Starts curl.
    ///
    /// # Errors
    /// `Final` when curl cannot be started, the body cannot be written, or a header cannot be sent.
    pub fn start(curl: &Curl, post: &Post<'_>) -> Result<Exchange, Failure> {
        let body = BodyFile::write(&curl.private_dir, post.body)?;
        let config = config(post.url, post.headers, &body.path).map_err(Failure::Final)?;
        let connect = format!("{:.3}", curl.patience.connect.as_secs_f64());
        // -q must come first: it keeps a user's .curlrc from changing what we read.
        let args = [
            "-q",
            "--no-buffer",
            "--silent",
            "--show-error",
            "--include",
            "--suppress-connect-headers",
            "--globoff",
            "--proto",
            "=http,https",
            "--connect-timeout",
            connect.as_str(),
            "--config",
            "-",
        ];
        let running = Program::new(&curl.program, args)
            .only_env(environment(&curl.hidden_variables))
            .input(config)
            .start(ErrorOutput::Separate)
            .map_err(|error| {
                Failure::Final(format!(
                    "cannot start \"{}\": {error}; is curl installed?",
                    curl.program.display()
                ))
            })?;
        Ok(Exchange {
            running,
            _body: body,
            host: post.host.to_owned(),
            patience: curl.patience,
            end: Instant::now() + curl.patience.total,
            pending: Vec::new(),
            answer_bytes: 0,
        })
    }

    /// Waits for status and headers of the answer. To be called once, before `piece`.
    ///
    /// # Errors
    /// `Cancelled`; otherwise what kept the answer from coming.
    pub fn head(&mut self, cancel: &Cancel) -> Result<Head, Failure> {
        let mut reader = HeadReader::default();
        let mut patience = self.patience.first_byte;
        let mut buffer = vec![0; 16 << 10];
        loop {
            let count = self.read(&mut buffer, cancel, patience)?;
            if count == 0 {
                return Err(self.failure().unwrap_or_else(|| Failure::Retry {
                    reason: format!("{} closed the connection without an answer", self.host),
                    wait: None,
                }));
            }
            let piece = buffer.get(..count).unwrap_or_default();
            if let Some((head, rest)) = reader.push(piece).map_err(Failure::Final)? {
                self.pending = rest;
                return Ok(head);
            }
            patience = self.patience.silence;
        }
    }

    /// The next piece of the answer's body; `None` at its proper end.
    ///
    /// # Errors
    /// `Cancelled`; `Retry` when the connection broke or fell silent.
    pub fn piece(&mut self, cancel: &Cancel) -> Result<Option<Vec<u8>>, Failure> {
        let mut piece = std::mem::take(&mut self.pending);
        if piece.is_empty() {
            piece = vec![0; 16 << 10];
            let count = self.read(&mut piece, cancel, self.patience.silence)?;
            piece.truncate(count);
        }
        if piece.is_empty() {
            return self.failure().map_or(Ok(None), Err);
        }
        self.answer_bytes += piece.len();
        if self.answer_bytes > ANSWER_BYTES_MAX {
            return Err(Failure::Final(format!("{} sent more than {ANSWER_BYTES_MAX} bytes", self.host)));
        }
        Ok(Some(piece))
    }

    /// Gives the server, which has said all, `grace` to close by itself, then ends curl.
    pub fn farewell(mut self, cancel: &Cancel, grace: Duration) {
        self.end = self.end.min(Instant::now() + grace);
        let mut buffer = [0; 4096];
        while self.read(&mut buffer, cancel, grace).is_ok_and(|count| count > 0) {}
    }

    /// One read; 0 is the end of the output.
    fn read(&mut self, buffer: &mut [u8], cancel: &Cancel, patience: Duration) -> Result<usize, Failure> {
        let deadline = (Instant::now() + patience).min(self.end);
        match self.running.read(buffer, Some(cancel), deadline) {
            Ok(Output::Bytes(count)) => Ok(count),
            Ok(Output::End) => Ok(0),
            Ok(Output::Cancelled) => Err(Failure::Cancelled),
            Ok(Output::TimedOut) if Instant::now() >= self.end => Err(retry(format!(
                "the answer of {} was not complete after {} s",
                self.host,
                self.patience.total.as_secs_f64()
            ))),
            Ok(Output::TimedOut) => {
                Err(retry(format!("{} sent nothing for {} s", self.host, patience.as_secs_f64())))
            }
            Err(error) => Err(retry(format!("cannot read what curl prints: {error}"))),
        }
    }

    /// Why curl failed; `None` when it did not.
    fn failure(&mut self) -> Option<Failure> {
        let code = match self.running.wait(Instant::now() + EXIT_WAIT) {
            Ok(status) if status.success() => return None,
            Ok(status) => status.code(),
            Err(_) => None,
        };
        let said = self.running.error_text(4096);
        Some(curl_failure(code, &said, &self.host, self.patience.connect))
    }
}

fn retry(reason: String) -> Failure {
    Failure::Retry { reason, wait: None }
}

fn environment(hidden: &[String]) -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(move |(name, _)| !hidden.iter().any(|hidden| name == hidden.as_str()))
}

/// The configuration that curl reads from its standard input.
///
/// # Errors
/// When a header could smuggle in another one.
fn config(url: &str, headers: &[(String, String)], body: &Path) -> Result<Vec<u8>, String> {
    let mut text = Vec::new();
    let mut option = |name: &str, value: &[u8]| {
        text.extend_from_slice(name.as_bytes());
        text.extend_from_slice(b" = \"");
        for &byte in value {
            // Source: curl(1), --config: these escapes, and no others, are known inside quotes.
            match byte {
                b'"' => text.extend_from_slice(b"\\\""),
                b'\\' => text.extend_from_slice(b"\\\\"),
                b'\n' => text.extend_from_slice(b"\\n"),
                b'\r' => text.extend_from_slice(b"\\r"),
                b'\t' => text.extend_from_slice(b"\\t"),
                0x0b => text.extend_from_slice(b"\\v"),
                byte => text.push(byte),
            }
        }
        text.extend_from_slice(b"\"\n");
    };
    option("url", url.as_bytes());
    for (name, value) in headers {
        check_header(name, value)?;
        // An empty value would make curl leave the header out; a semicolon sends it empty.
        let line = if value.is_empty() { format!("{name};") } else { format!("{name}: {value}") };
        option("header", line.as_bytes());
    }
    // Without this, curl waits a second for a leave to send a body over 1 MiB.
    option("header", b"Expect:");
    option("data-binary", &[b"@", body.as_os_str().as_bytes()].concat());
    Ok(text)
}

/// Checks that a header is one line and its name a token. The value is never part of the sentence.
///
/// # Errors
/// When it is not; the sentence names the header.
pub fn check_header(name: &str, value: &str) -> Result<(), String> {
    // Source: RFC 9110, section 5.6.2.
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if name.is_empty() || !name.bytes().all(token) {
        return Err(format!("\"{}\" is no name of an HTTP header; correct \"headers\"", harmless_line(name)));
    }
    if value.chars().any(|c| c.is_control() && c != '\t') {
        return Err(format!(
            "the value of the header \"{name}\" has a line break or control character; correct \"headers\""
        ));
    }
    Ok(())
}

/// What a failure of curl means. `code` is its exit code, none when a signal ended it.
///
/// Source: curl(1), "EXIT CODES".
fn curl_failure(code: Option<i32>, said: &str, host: &str, connect: Duration) -> Failure {
    // The first line tells what happened; advice for people at a command line follows.
    let said = cut_end(&harmless_line(said.trim().lines().next().unwrap_or_default()), 512);
    let said = if said.is_empty() { "no further words".to_owned() } else { said };
    let fail = |sentence: String| Failure::Final(format!("{sentence} ({said})"));
    let again = |sentence: String| retry(format!("{sentence} ({said})"));
    let Some(code) = code else { return again("curl was ended by a signal".to_owned()) };
    let refused_by_proxy = [" 407", " 403"].iter().any(|status| said.contains(status));
    match code {
        1 if said.contains("HTTP/0.9") => fail(format!("{host} does not answer in HTTP; check \"base_url\"")),
        1 | 3 => fail(format!("the address of {host} is not one that curl understands; check \"base_url\"")),
        2 => fail("curl cannot do what is needed; install version 7.54 or newer".to_owned()),
        5 => again("cannot find the proxy: check HTTPS_PROXY and the network".to_owned()),
        6 => again(format!("cannot find the host {host}: check \"base_url\" and the network")),
        7 => again(format!("{host} refuses the connection: is the server running?")),
        18 | 52 | 55 | 92 | 95 => again(format!("the connection to {host} was dropped")),
        26 => fail("curl cannot read the request's body".to_owned()),
        28 => again(format!("no connection to {host} within {} s", connect.as_secs_f64())),
        35 => again(format!("{host} and curl do not agree on TLS")),
        51 | 60 => fail(format!(
            "the certificate of {host} is not trusted; name the right CA bundle in CURL_CA_BUNDLE"
        )),
        53 | 54 | 58 | 59 | 66 | 77 | 80 | 82 | 83 | 90 | 91 => {
            fail(format!("TLS to {host} cannot be set up; check CURL_CA_BUNDLE"))
        }
        56 if said.to_ascii_lowercase().contains("proxy") || said.contains("CONNECT") => {
            let sentence = "the proxy does not let us through; check HTTPS_PROXY".to_owned();
            if refused_by_proxy { fail(sentence) } else { again(sentence) }
        }
        56 => again(format!("the connection to {host} was dropped")),
        97 => again("the proxy does not let us through; check HTTPS_PROXY".to_owned()),
        code => again(format!("curl failed with exit code {code}")),
    }
}

/// Puts status line and headers together; answers 1xx are skipped.
#[derive(Debug, Default)]
struct HeadReader {
    bytes: Vec<u8>,
}

impl HeadReader {
    /// Takes a piece; gives the head and what follows it, once it is complete.
    fn push(&mut self, piece: &[u8]) -> Result<Option<(Head, Vec<u8>)>, String> {
        self.bytes.extend_from_slice(piece);
        loop {
            let Some(end) = end_of_head(&self.bytes) else {
                return match self.bytes.len() > HEAD_BYTES_MAX {
                    true => {
                        Err("the answer has more headers than any server sends; check \"base_url\""
                            .to_owned())
                    }
                    false => Ok(None),
                };
            };
            let rest = self.bytes.split_off(end);
            let head = parse_head(&std::mem::replace(&mut self.bytes, rest))?;
            if head.status >= 200 {
                return Ok(Some((head, std::mem::take(&mut self.bytes))));
            }
        }
    }
}

/// Where the first empty line ends.
fn end_of_head(bytes: &[u8]) -> Option<usize> {
    let mut start = 0;
    while let Some(length) = bytes.get(start..)?.iter().position(|&byte| byte == b'\n') {
        let line = bytes.get(start..start + length)?;
        start += length + 1;
        if matches!(line, b"" | b"\r") {
            return Some(start);
        }
    }
    None
}

fn parse_head(bytes: &[u8]) -> Result<Head, String> {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    let status = first
        .strip_prefix("HTTP/")
        .and_then(|rest| rest.split_ascii_whitespace().nth(1)?.parse().ok())
        .ok_or_else(|| {
            format!("the answer is not HTTP: it begins with \"{}\"", cut_end(&harmless_line(first), 80))
        })?;
    let headers = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    Ok(Head { status, headers })
}

/// The body of a request in a file that only we can read; dropping it removes it.
#[derive(Debug)]
struct BodyFile {
    path: PathBuf,
}

impl BodyFile {
    fn write(directory: &Path, body: &[u8]) -> Result<BodyFile, Failure> {
        let failed = |error: std::io::Error| {
            Failure::Final(format!("cannot write the request into \"{}\": {error}", directory.display()))
        };
        let name = format!("request-{}.json", random_hex(8).map_err(failed)?);
        let place = open_directory(directory).map_err(failed)?;
        let mut file = create_at(&place, Path::new(&name), 0o600).map_err(failed)?;
        let guard = BodyFile { path: directory.join(name) };
        set_mode(&file, 0o600).and_then(|()| file.write_all(body)).map_err(failed)?;
        Ok(guard)
    }
}

impl Drop for BodyFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            log::warn!("cannot remove \"{}\": {error}", self.path.display()); // it holds no key
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(headers: &[(&str, &str)]) -> Vec<(String, String)> {
        headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn whatever_is_in_a_value_stays_in_its_line() {
        let headers = pairs(&[("x-api-key", r#"a"b\c"#), ("x-empty", "")]);
        let text = config("http://h/?a=\"\nurl = \"http://evil", &headers, Path::new("/d/a\nb")).unwrap();
        let expected = concat!(
            "url = \"http://h/?a=\\\"\\nurl = \\\"http://evil\"\n",
            "header = \"x-api-key: a\\\"b\\\\c\"\n",
            "header = \"x-empty;\"\n",
            "header = \"Expect:\"\n",
            "data-binary = \"@/d/a\\nb\"\n",
        );
        assert_eq!(String::from_utf8(text).unwrap(), expected);
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

    /// Status, headers and the beginning of the body.
    type Parts<'a> = (u16, &'a [(&'a str, &'a str)], &'a str);

    #[test]
    fn a_head_is_read_from_pieces_of_any_size() {
        let check = |text: &str, expected: Result<Parts<'_>, &str>| {
            for size in 1..=text.len() {
                let mut reader = HeadReader::default();
                let mut found = Ok(None);
                let mut rest = String::new();
                for piece in text.as_bytes().chunks(size) {
                    match &found {
                        Ok(None) => found = reader.push(piece),
                        Ok(Some(_)) | Err(_) => rest.push_str(std::str::from_utf8(piece).unwrap()),
                    }
                }
                match (found, &expected) {
                    (Ok(Some((head, first))), Ok((status, headers, body))) => {
                        assert_eq!((head.status, head.headers), (*status, pairs(headers)));
                        assert_eq!(String::from_utf8(first).unwrap() + &rest, *body);
                    }
                    (Ok(None), Err("incomplete")) => {}
                    (Err(told), Err(expected)) => assert!(told.contains(expected), "{told}"),
                    (found, expected) => panic!("{found:?} is not {expected:?}"),
                }
            }
        };
        check("HTTP/1.1 200 OK\r\nA: b\r\n\r\nbody", Ok((200, &[("a", "b")], "body")));
        check("HTTP/2 429 \r\nretry-after:7\r\n\r\n", Ok((429, &[("retry-after", "7")], "")));
        check("HTTP/1.0 500 x\nA: b: c\n\n", Ok((500, &[("a", "b: c")], "")));
        check(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nL: x\r\n\r\nHTTP/1.1 200\r\n\r\nx",
            Ok((200, &[], "x")),
        );
        check("HTTP/1.1 200 OK\r\nA: b\r\n", Err("incomplete"));
        check("SSH-2.0-x\r\n\r\n", Err("not HTTP: it begins with \"SSH-2.0-x\""));
        check("HTTP/1.1 soon\r\n\r\n", Err("not HTTP"));
        let mut reader = HeadReader::default();
        assert!(reader.push("HTTP/1.1 200 OK\n".as_bytes()).unwrap().is_none());
        assert!(reader.push(&vec![b'x'; HEAD_BYTES_MAX + 1]).is_err());
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

    #[test]
    fn the_body_is_private_and_goes_with_its_guard() {
        use std::os::unix::fs::MetadataExt;
        let place = tempfile::tempdir().unwrap();
        let body = BodyFile::write(place.path(), b"hello").unwrap();
        let metadata = std::fs::metadata(&body.path).unwrap();
        assert_eq!((metadata.mode() & 0o777, metadata.len()), (0o600, 5));
        drop(body);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        let gone = BodyFile::write(&place.path().join("nowhere"), b"");
        assert!(matches!(gone, Err(Failure::Final(told)) if told.contains("cannot write the request")));
    }
}
