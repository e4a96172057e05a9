//! Speaking to a person or a script: the answer on standard output, the talk on standard error.
//!
//! What pods, files and names say is data, and made harmless here, on its only way out. A closed pipe is a quiet
//! end, never a panic.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;
use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::sys::signal::exit_now;
use crate::words::text::{harmless, harmless_line};

/// Writes a piece of the answer to standard output. A reader that has gone ends the program quietly, as
/// `insomnia scope list | head -1` expects.
pub(super) fn answer(text: &str) {
    let Err(error) = try_answer(text) else { return };
    if error.kind() == io::ErrorKind::BrokenPipe {
        exit_now(0);
    }
    talk_line(&format!("insomnia: cannot write to standard output: {error}"));
    exit_now(1);
}

/// Writes a piece of the answer, for those who have something to tidy up when nobody reads it.
pub(super) fn try_answer(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(harmless(text).as_bytes()).and_then(|()| out.flush())
}

/// Answers with a line: of JSON when that was asked for, else a plain one.
pub(super) fn reply(given: &Given, value: &impl Serialize, plain: impl FnOnce() -> String) {
    answer(&format!("{}\n", if given.has("json") { json_line(value) } else { plain() }));
}

/// A value as JSON on one line, in which whatever could drive a terminal is escaped.
pub(super) fn json_line(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value).unwrap_or_default();
    // Such a character stands in a string only.
    text.chars().fold(String::with_capacity(text.len()), |mut shown, c| {
        if c.is_ascii_graphic() || c == ' ' || harmless(c.encode_utf8(&mut [0; 4])) == c.to_string() {
            shown.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(shown, "\\u{unit:04x}"); // a String takes every write
            }
        }
        shown
    })
}

/// These in one line, with `between` between them; `None` when there are none.
pub(super) fn listed<T: ToString>(items: impl IntoIterator<Item = T>, between: &str) -> Option<String> {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    (!items.is_empty()).then(|| items.join(between))
}

/// A value as a JSON object with more keys.
pub(super) fn with(value: &impl Serialize, more: Value) -> Value {
    let mut object = json!(value);
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}

/// Writes a piece of the talk to standard error; nobody listening there is fine.
pub(super) fn talk(text: &str) {
    let _ = io::stderr().lock().write_all(harmless(text).as_bytes()); // the answer is what counts
}

/// Writes a line of the talk.
pub(super) fn talk_line(text: &str) {
    talk(&format!("{text}\n"));
}

/// Whether a person looks at standard output.
pub(super) fn answers_to_a_person() -> bool {
    io::stdout().is_terminal()
}

/// One line on standard error that tells what goes on and is written over by the next; nothing where no terminal
/// is, or one that cannot do that.
#[derive(Debug, Default)]
pub(super) struct Spinner {
    is_wanted: bool,
    is_shown: bool,
    turns: usize,
}

impl Spinner {
    /// A spinner that is silent unless it is wanted.
    pub(super) fn new(is_wanted: bool) -> Spinner {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Spinner { is_wanted: is_wanted && !is_dumb && io::stderr().is_terminal(), ..Spinner::default() }
    }

    /// Shows this, at most one line of 78 columns.
    pub(super) fn show(&mut self, text: &str) {
        if !self.is_wanted {
            return;
        }
        self.turns += 1;
        let wheel = ["|", "/", "-", "\\"].get(self.turns % 4).unwrap_or(&"|");
        let mut columns = 0;
        let fits = |c: &char| {
            columns += char_width(*c);
            columns <= 76
        };
        let text: String = harmless_line(text).chars().take_while(fits).collect();
        self.is_shown = true;
        let _ = write!(io::stderr().lock(), "\r\x1b[K{wheel} {text}"); // nobody looks, then
    }

    /// Takes the line away, before another one is written.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.is_shown) {
            let _ = write!(io::stderr().lock(), "\r\x1b[K"); // as above
        }
    }
}

/// A table as lines, without the last newline: columns padded to their widest cell, two spaces between, the last one unpadded.
///
/// Width is counted in characters, wide ones as two, combining ones as none, so that most of the world's
/// writing lines up.
pub(super) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let header = Some(header.iter().map(ToString::to_string).collect()).filter(|_| !header.is_empty());
    let rows: Vec<Vec<String>> = header.into_iter().chain(rows).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widest = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| width(cell)).max();
    let widths: Vec<usize> = (0..columns).map(|column| widest(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let pad = |(cell, wide): (&String, &usize)| format!("{cell}{}", " ".repeat(wide + 2 - width(cell)));
        row.iter().zip(&widths).map(pad).collect::<String>().trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The columns that a text takes in a terminal, by the common ranges of wide and combining characters.
pub(super) fn width(text: &str) -> usize {
    text.chars().map(char_width).sum()
}

/// The columns that a character takes.
pub(super) fn char_width(c: char) -> usize {
    match u32::from(c) {
        0x0300..=0x036f | 0x200b..=0x200f | 0x20d0..=0x20ff | 0xfe00..=0xfe0f | 0xfe20..=0xfe2f => 0,
        0x1100..=0x115f
        | 0x2e80..=0xa4cf
        | 0xac00..=0xd7a3
        | 0xf900..=0xfaff
        | 0xfe30..=0xfe6f
        | 0xff00..=0xff60
        | 0xffe0..=0xffe6
        | 0x1f300..=0x1f64f
        | 0x1f900..=0x1f9ff
        | 0x20000..=0x3fffd => 2,
        _ => 1,
    }
}

/// The units of times in the past, in seconds.
pub(super) const UNITS: [(&str, u64); 4] = [("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)];

/// How long ago a time was, as `12s`, `3m`, `2h` or `5d`.
pub(super) fn ago(since_seconds: u64, now_seconds: u64) -> String {
    let ago = now_seconds.saturating_sub(since_seconds);
    let (unit, seconds) = UNITS.into_iter().find(|(_, seconds)| ago >= *seconds).unwrap_or(("s", 1));
    format!("{}{unit}", ago / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_with_wide_characters() {
        let rows = [["a", "b"], ["日本", "c"], ["e\u{301}", "d"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&[], rows), "a     b\n日本  c\ne\u{301}     d");
    }

    #[test]
    fn json_drives_no_terminal_and_means_the_same() {
        let text = "\u{1b}[2J \u{7f}\u{9b}2J \u{202e}日本\u{e0041}\n\t\"";
        let line = json_line(&text);
        assert_eq!(harmless(&line), line);
        assert!(line.contains("\\u009b") && line.contains("日本"), "{line}");
        assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
    }

    #[test]
    fn times_are_short() {
        let check = |seconds: u64, expected: &str| assert_eq!(ago(1000, 1000 + seconds), expected);
        check(0, "0s");
        check(61, "1m");
        check(7200, "2h");
        check(200_000, "2d");
    }
}
