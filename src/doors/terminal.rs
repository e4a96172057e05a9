//! Speaking to a person or a script: the answer on standard output, the talk on standard error.
//!
//! What pods have said is made harmless here, on its way out. A closed pipe is a quiet end, never a panic.

use std::io::{self, IsTerminal, Write};

use crate::sys::signal::exit_now;
use crate::words::text::harmless;

/// Writes a piece of the answer to standard output. A reader that has gone ends the program quietly, as
/// `insomnia scope list | head -1` expects.
pub fn answer(text: &str) {
    let Err(error) = try_answer(text) else { return };
    if error.kind() == io::ErrorKind::BrokenPipe {
        exit_now(0);
    }
    talk_line(&format!("insomnia: cannot write to standard output: {error}"));
    exit_now(1);
}

/// Writes a piece of the answer, for those who have something to tidy up when nobody reads it.
///
/// # Errors
/// `BrokenPipe` when the reader has gone, else as write(2).
pub fn try_answer(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Writes a line of the answer.
pub fn answer_line(text: &str) {
    answer(&format!("{text}\n"));
}

/// Writes a piece of the talk to standard error; nobody listening there is fine.
pub fn talk(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes()); // the answer is what counts
}

/// Writes a line of the talk, made harmless.
pub fn talk_line(text: &str) {
    talk(&format!("{}\n", harmless(text)));
}

/// Whether a person looks at standard output.
#[must_use]
pub fn answers_to_a_person() -> bool {
    io::stdout().is_terminal()
}

/// A table as lines: columns padded to their widest cell, two spaces between, the last one unpadded.
///
/// Width is counted in characters, wide ones as two, combining ones as none, so that most of the world's
/// writing lines up.
#[must_use]
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widest = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| width(cell)).max();
    let widths: Vec<usize> = (0..columns).map(|column| widest(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, column_width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(column_width.saturating_sub(width(cell)) + 2));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// The columns that a text takes in a terminal, by the common ranges of wide and combining characters.
#[must_use]
pub fn width(text: &str) -> usize {
    text.chars().map(char_width).sum()
}

/// The columns that a character takes.
#[must_use]
pub fn char_width(c: char) -> usize {
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

/// How long ago a time was, as `12s`, `3m`, `2h` or `5d`.
#[must_use]
pub fn ago(since_seconds: u64, now_seconds: u64) -> String {
    match now_seconds.saturating_sub(since_seconds) {
        seconds @ 0..=59 => format!("{seconds}s"),
        seconds @ 60..=3599 => format!("{}m", seconds / 60),
        seconds @ 3600..=86_399 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_with_wide_characters() {
        let rows = [["a", "b"], ["日本", "c"], ["e\u{301}", "d"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows), "a     b\n日本  c\ne\u{301}     d\n");
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
