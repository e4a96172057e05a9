//! One page of a text file: numbered lines, read as a stream with bounded memory and time.
//!
//! Knows an open file, not where it lies or who may read it. Runs on the turn thread.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use crate::sys::wait::Cancel;
use crate::tools::place::Why;
use crate::words::error::Error;

/// A file with a NUL in its first so many bytes is no text; the size that grep and git look at.
pub(crate) const SNIFF_BYTES: usize = 8 << 10;
/// Of a longer line only the beginning is shown, so that one line cannot fill a page.
const LINE_BYTES_MAX: usize = 8 << 10;
/// One call looks so long for a line or the end of one.
const SCAN_TIME_MAX: Duration = Duration::from_secs(2);

/// A page of a file that is being read.
pub(crate) struct Page<'a> {
    reader: BufReader<File>,
    size: u64,
    cancel: &'a Cancel,
    deadline: Instant,
    /// The number of the next line.
    next: u64,
    /// Bytes of the file that were looked at.
    scanned: u64,
}

impl<'a> Page<'a> {
    /// A page of an open file of this size.
    pub(crate) fn new(open: File, size: u64, cancel: &'a Cancel) -> Page<'a> {
        let reader = BufReader::with_capacity(64 << 10, open);
        Page { reader, size, cancel, deadline: Instant::now() + SCAN_TIME_MAX, next: 1, scanned: 0 }
    }

    /// Takes in `limit` lines from line `first` on, as far as about `bytes_max` bytes hold them, and says what was
    /// left out.
    ///
    /// # Errors
    /// When it is a binary file, has no such line, the line is too far away, or the turn was cancelled.
    pub(crate) fn read(mut self, first: u64, limit: u64, bytes_max: usize) -> Result<String, Why> {
        if self.reader.fill_buf()?.iter().take(SNIFF_BYTES).any(|&byte| byte == 0) {
            let size = self.size;
            return Err(format!(
                "it is a binary file; its {size} bytes are left out; use Shell to look into it"
            )
            .into());
        }
        self.skip_to(first)?;
        let mut text = String::new();
        let (mut crlf, mut lossy, mut stopped) = (false, false, None);
        let bytes_max = bytes_max.max(1); // a page of nothing would never end
        while self.next - first < limit && text.len() < bytes_max && !self.reader.fill_buf()?.is_empty() {
            let mut line = self.piece()?;
            if line.contains(&0) {
                self.scanned -= line.len() as u64;
                stopped = Some(format!("line {} is binary (it has NUL bytes)", self.next));
                break;
            }
            let (mut left_out, is_whole) = self.rest_of_line(&line)?;
            if left_out > 0 {
                let cut = cut_of_a_character(&line);
                line.truncate(line.len() - cut);
                left_out += cut as u64;
            }
            crlf |= line.ends_with(b"\r\n");
            let shown = line.strip_suffix(b"\r\n").or(line.strip_suffix(b"\n")).unwrap_or(&line);
            let shown = String::from_utf8_lossy(shown);
            lossy |= matches!(shown, Cow::Owned(_));
            text.push_str(&format!("{:>6}\t{shown}", self.next));
            if left_out > 0 {
                let at_least = if is_whole { "" } else { "at least " };
                text.push_str(&format!(" [... {at_least}{left_out} bytes of this line left out]"));
            }
            text.push('\n');
            self.next += 1;
            if !is_whole {
                stopped = Some("the end of that line is too far away".to_owned());
                break;
            }
        }
        let left = format!("{} of {} bytes left out", self.size.saturating_sub(self.scanned), self.size);
        let is_at_end = self.reader.fill_buf()?.is_empty();
        let end = match stopped {
            Some(why) => Some(format!("{why}; {left}; use Shell for the rest, for example tail -c")),
            None if !is_at_end => Some(format!("{left} after this; go on with \"offset\": {}", self.next)),
            None => text.is_empty().then(|| "the file is empty".to_owned()),
        };
        let crlf = crlf.then_some("lines end in CRLF; EditFile keeps that");
        let lossy = lossy.then_some(
            "bytes that are not UTF-8 are shown as \u{fffd}; EditFile keeps them but cannot match them",
        );
        for note in [end.as_deref(), crlf, lossy].into_iter().flatten() {
            text.push_str(&format!("[{note}]\n"));
        }
        Ok(text)
    }

    fn skip_to(&mut self, first: u64) -> Result<(), Why> {
        while self.next < first {
            let line = self.piece()?;
            let (_, is_whole) = self.rest_of_line(&line)?;
            let (scanned, size, next) = (self.scanned, self.size, self.next);
            if !is_whole || Instant::now() >= self.deadline {
                return Err(format!("line {first} is too far away: {scanned} of {size} bytes were looked at, up to line {next}; use Shell, for example sed -n").into());
            }
            self.next += u64::from(!line.is_empty());
            if self.reader.fill_buf()?.is_empty() {
                return Err(
                    format!("it has {} lines; \"offset\" {first} is beyond its end", self.next - 1).into()
                );
            }
        }
        Ok(())
    }

    /// Reads a line, or as much of it as one piece holds.
    fn piece(&mut self) -> Result<Vec<u8>, Why> {
        if self.cancel.is_set() {
            return Err(Error::Cancelled.into());
        }
        let mut piece = Vec::new();
        self.reader.by_ref().take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut piece)?;
        self.scanned += piece.len() as u64;
        Ok(piece)
    }

    /// Reads over what follows the first piece of a line: how many bytes, and whether its end came in time.
    fn rest_of_line(&mut self, start: &[u8]) -> Result<(u64, bool), Why> {
        let is_last = |piece: &[u8]| piece.ends_with(b"\n") || piece.len() < LINE_BYTES_MAX;
        let (mut left_out, mut is_over) = (0, is_last(start));
        while !is_over && Instant::now() < self.deadline {
            let piece = self.piece()?;
            left_out += piece.strip_suffix(b"\n").unwrap_or(&piece).len() as u64;
            is_over = is_last(&piece);
        }
        Ok((left_out, is_over))
    }
}

/// How many bytes at the end belong to a character that was cut off.
fn cut_of_a_character(text: &[u8]) -> usize {
    text.utf8_chunks().last().map_or(0, |chunk| chunk.invalid().len())
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
