//! One page of a text file: numbered lines, read as a stream with bounded memory and time.
//!
//! Knows an open file, not where it lies or who may read it. Runs on the turn thread.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use crate::sys::wait::Cancel;
use crate::words::error::{Error, Result};

/// A file with a NUL in its first so many bytes is no text; the size that grep and git look at.
pub(crate) const SNIFF_BYTES: usize = 8 << 10;
/// Of a longer line only the beginning is shown, so that one line cannot fill a page.
const LINE_BYTES_MAX: usize = 8 << 10;
/// One call looks at so much of a file, to find a line or the end of one, and for so long.
const SCAN_BYTES_MAX: u64 = 1 << 30;
const SCAN_TIME_MAX: Duration = Duration::from_secs(2);
/// Between two looks at the clock and the cancel flag.
const SCAN_STEP_BYTES: u64 = 8 << 20;

/// A page of a file that is being read.
pub(crate) struct Page {
    reader: BufReader<File>,
    size: u64,
    bytes_max: usize,
    text: String,
    line: Vec<u8>,
    /// The number of the next line.
    next: u64,
    /// Bytes of the file that were looked at.
    scanned: u64,
    deadline: Instant,
    crlf: bool,
    lossy: bool,
    /// Why the page ends before it is full.
    stopped: Option<String>,
    at_end: bool,
    /// Whether the last line of the file has no newline, as far as that was seen.
    last_is_open: bool,
}

/// How far a line was followed.
enum LineEnd {
    Newline,
    EndOfFile,
    GaveUp,
}

impl Page {
    /// A page of an open file of this size, to be filled with about so many bytes.
    pub(crate) fn new(open: File, size: u64, bytes_max: usize) -> Page {
        Page {
            reader: BufReader::with_capacity(64 << 10, open),
            size,
            bytes_max: bytes_max.max(1), // a page of nothing would never end
            text: String::new(),
            line: Vec::new(),
            next: 1,
            scanned: 0,
            deadline: Instant::now() + SCAN_TIME_MAX,
            crlf: false,
            lossy: false,
            stopped: None,
            at_end: false,
            last_is_open: false,
        }
    }

    /// Takes in `limit` lines from line `first` on, as far as they fit.
    ///
    /// # Errors
    /// When it is a binary file, has no such line, the line is too far away, or the turn was cancelled.
    pub(crate) fn fill(&mut self, first: u64, limit: u64, cancel: &Cancel, named: &str) -> Result<()> {
        let cannot = |error| Error::io(format!("read {}", named), error);
        let head = self.reader.fill_buf().map_err(cannot)?;
        if head.get(..SNIFF_BYTES.min(head.len())).is_some_and(|head| head.contains(&0)) {
            return Err(Error::told(format!(
                "{} is a binary file; its {} bytes are left out; use Shell to look into it",
                named, self.size
            )));
        }
        while self.next < first {
            match self.skip_line(cancel).map_err(cannot)? {
                LineEnd::Newline => self.next += 1,
                LineEnd::EndOfFile => {
                    let lines = if self.last_is_open { self.next } else { self.next - 1 };
                    return Err(Error::told(format!(
                        "{} has {lines} lines; \"offset\" {first} is beyond its end",
                        named
                    )));
                }
                LineEnd::GaveUp if cancel.is_set() => return Err(Error::Cancelled),
                LineEnd::GaveUp => {
                    return Err(Error::told(format!(
                        "line {first} of {} is too far away: {} of {} bytes were looked at, up to line {}; use Shell, for example sed -n",
                        named, self.scanned, self.size, self.next
                    )));
                }
            }
        }
        while self.next - first < limit && self.text.len() < self.bytes_max {
            if !self.add_line(cancel).map_err(cannot)? {
                break;
            }
        }
        if cancel.is_set() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Reads over one line, from where the reader stands.
    fn skip_line(&mut self, cancel: &Cancel) -> io::Result<LineEnd> {
        loop {
            if self.scanned >= SCAN_BYTES_MAX || cancel.is_set() || Instant::now() >= self.deadline {
                return Ok(LineEnd::GaveUp);
            }
            let mut step = self.reader.by_ref().take(SCAN_STEP_BYTES);
            let count = step.skip_until(b'\n')? as u64;
            let left = step.limit();
            self.scanned += count;
            if count == 0 {
                return Ok(LineEnd::EndOfFile);
            }
            // `skip_until` says how much it read, not whether it found the newline. Less than it was allowed to
            // read means a newline or the end of the file.
            let at_end = self.reader.fill_buf()?.is_empty();
            if (left > 0 && !at_end) || ((left == 0 || at_end) && self.last_was_newline()?) {
                return Ok(LineEnd::Newline);
            }
            if at_end {
                self.last_is_open = true;
                return Ok(LineEnd::EndOfFile);
            }
        }
    }

    /// Whether the last byte looked at is a newline.
    fn last_was_newline(&mut self) -> io::Result<bool> {
        use std::os::unix::fs::FileExt;
        let mut last = [0];
        let Some(at) = self.scanned.checked_sub(1) else { return Ok(false) };
        Ok(self.reader.get_ref().read_at(&mut last, at)? == 1 && last == [b'\n'])
    }

    /// Adds the next line to the page; `false` when there is none or the page must end here.
    fn add_line(&mut self, cancel: &Cancel) -> io::Result<bool> {
        self.line.clear();
        let mut start = self.reader.by_ref().take(LINE_BYTES_MAX as u64);
        let count = start.read_until(b'\n', &mut self.line)?;
        self.scanned += count as u64;
        if count == 0 {
            self.at_end = true;
            return Ok(false);
        }
        if self.line.contains(&0) {
            self.scanned -= count as u64;
            self.stopped = Some(format!("line {} is binary (it has NUL bytes)", self.next));
            return Ok(false);
        }
        let is_whole = self.line.ends_with(b"\n") || count < LINE_BYTES_MAX;
        if self.line.ends_with(b"\n") {
            self.line.pop();
            if self.line.ends_with(b"\r") {
                self.line.pop();
                self.crlf = true;
            }
        }
        let cut = if is_whole { 0 } else { cut_of_a_character(&self.line) };
        self.line.truncate(self.line.len() - cut);
        let shown = String::from_utf8_lossy(&self.line);
        self.lossy = self.lossy || matches!(shown, std::borrow::Cow::Owned(_));
        self.text.push_str(&format!("{:>6}\t{shown}", self.next));
        if !is_whole {
            let before = self.scanned;
            let end = self.skip_line(cancel)?;
            let newline = u64::from(matches!(end, LineEnd::Newline));
            let left_out = (self.scanned - before + cut as u64).saturating_sub(newline);
            if matches!(end, LineEnd::GaveUp) {
                self.text.push_str(&format!(" [... at least {left_out} bytes of this line left out]\n"));
                self.stopped =
                    Some(format!("the end of line {} was not found in {} bytes", self.next, self.scanned));
                self.next += 1;
                return Ok(false);
            }
            if left_out > 0 {
                self.text.push_str(&format!(" [... {left_out} bytes of this line left out]"));
            }
        }
        self.text.push('\n');
        self.next += 1;
        Ok(true)
    }

    /// The page as text, with what was left out.
    ///
    /// # Errors
    /// As read(2).
    pub(crate) fn finish(mut self, first: u64) -> Result<String> {
        let more = !self.at_end
            && !self.reader.fill_buf().map_err(|error| Error::io("read the file on", error))?.is_empty();
        if self.next == first && self.stopped.is_none() && !more {
            let what = if self.size == 0 { "the file is empty" } else { "there are no more lines" };
            return Ok(format!("[{what}]\n"));
        }
        let left = format!("{} of {} bytes left out", self.size.saturating_sub(self.scanned), self.size);
        let mut notes: Vec<String> = Vec::new();
        match self.stopped.take() {
            Some(why) => notes.push(format!("{why}; {left}; use Shell for the rest, for example tail -c")),
            None if more => {
                notes.push(format!("{left} after this; go on with \"offset\": {}", self.next));
            }
            None => {}
        }
        if self.crlf {
            notes.push("lines end in CRLF; EditFile keeps that".to_owned());
        }
        if self.lossy {
            notes.push(
                "bytes that are not UTF-8 are shown as \u{fffd}; EditFile keeps them but cannot match them"
                    .to_owned(),
            );
        }
        for note in &notes {
            self.text.push_str(&format!("[{note}]\n"));
        }
        Ok(self.text)
    }
}

/// How many bytes at the end belong to a character that was cut off.
fn cut_of_a_character(text: &[u8]) -> usize {
    (1..4)
        .take_while(|back| *back <= text.len())
        .find_map(|back| {
            let byte = *text.get(text.len() - back)?;
            let length = match byte {
                0xc0..=0xdf => 2,
                0xe0..=0xef => 3,
                0xf0..=0xf7 => 4,
                0x80..=0xbf => return None,
                _ => return Some(0),
            };
            Some(if length > back { back } else { 0 })
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_between_characters() {
        for (text, cut) in
            [(&b"ab"[..], 0), ("日".as_bytes(), 0), (&"日".as_bytes()[..2], 2), (b"a\xf0\x9f", 2)]
        {
            assert_eq!(cut_of_a_character(text), cut, "{text:?}");
        }
    }
}
