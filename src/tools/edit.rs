//! One text replaced by another in the bytes of a file: what `EditFile` does, without the file.
//!
//! Pure, and fuzzed. Knows line ends and bytes, no paths.

use std::fmt;

/// The largest file that `EditFile` takes, in bytes; what it makes of it may be four times as large.
pub const EDIT_BYTES_MAX: usize = 8 << 20;

/// Why a text was not edited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditError {
    /// The text to be replaced is empty.
    Empty,
    /// Old and new text are the same.
    Same,
    /// The old text does not occur.
    NotFound,
    /// The old text occurs more than once: how often, and the lines of the first occurrences.
    NotUnique {
        /// How often it occurs.
        count: usize,
        /// Lines of the first occurrences, from 1.
        lines: Vec<usize>,
    },
    /// The result would have so many bytes.
    TooLarge(usize),
}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EditError::Empty => f.write_str("\"old\" is empty; give the text to be replaced"),
            EditError::Same => f.write_str("\"old\" and \"new\" are the same"),
            EditError::NotFound => f.write_str(
                "\"old\" does not occur in it; read the file again and copy the text exactly, without line numbers",
            ),
            EditError::NotUnique { count, lines } => {
                let shown: Vec<String> = lines.iter().map(ToString::to_string).collect();
                let more = if *count > lines.len() { ", ..." } else { "" };
                write!(
                    f,
                    "\"old\" occurs {count} times (lines {}{more}); add text around it until it occurs once, or set \"all\"",
                    shown.join(", ")
                )
            }
            EditError::TooLarge(bytes) => {
                write!(f, "the result would have {bytes} bytes, more than {}", 4 * EDIT_BYTES_MAX)
            }
        }
    }
}

impl std::error::Error for EditError {}

/// Replaces `old` by `new` in `content`, once or, if `all`, everywhere; returns the result and how often.
///
/// `old` is looked for as it is; if it does not occur, with line ends LF and CRLF taken as the same. In a file
/// whose lines all end in CRLF, and wherever the replaced text had CRLF, the line ends of `new` become CRLF.
/// Every byte outside the replaced text stays. The cost is linear in the lengths.
///
/// # Errors
/// When `old` is empty, equal to `new`, does not occur, occurs more than once without `all`, or the result is too
/// large.
pub fn edit_text(content: &[u8], old: &str, new: &str, all: bool) -> Result<(Vec<u8>, usize), EditError> {
    if old.is_empty() {
        return Err(EditError::Empty);
    }
    if old == new {
        return Err(EditError::Same);
    }
    let crlf_file = has_only_crlf(content);
    let mut matches = literal_matches(content, old.as_bytes());
    if matches.is_empty() && (old.contains('\n') && content.contains(&b'\r') || old.contains("\r\n")) {
        matches = matches_of_any_line_end(content, &old.replace("\r\n", "\n"));
    }
    match matches.len() {
        0 => return Err(EditError::NotFound),
        1 => {}
        _ if all => {}
        count => {
            let starts: Vec<usize> = matches.iter().take(5).map(|span| span.start).collect();
            return Err(EditError::NotUnique { count, lines: lines_of(content, &starts) });
        }
    }
    let lf = new.replace("\r\n", "\n");
    let crlf = lf.replace('\n', "\r\n");
    let mut parts: Vec<(&[u8], &[u8])> = Vec::with_capacity(matches.len()); // what stays, what is put after it
    let mut done = 0;
    for span in matches {
        let Some(kept) = content.get(done..span.start) else { continue }; // it overlaps the one before
        let replaced = content.get(span.clone()).unwrap_or_default();
        let literally = replaced == old.as_bytes();
        let had_crlf = replaced.windows(2).any(|pair| pair == b"\r\n");
        let replacement = match () {
            () if crlf_file || (!literally && had_crlf) => crlf.as_bytes(),
            () if !literally && replaced.contains(&b'\n') => lf.as_bytes(),
            () => new.as_bytes(),
        };
        parts.push((kept, replacement));
        done = span.end;
    }
    let tail = content.get(done..).unwrap_or_default();
    let length = parts.iter().fold(tail.len(), |sum, (kept, put)| sum.saturating_add(kept.len() + put.len()));
    if length > 4 * EDIT_BYTES_MAX {
        return Err(EditError::TooLarge(length));
    }
    let count = parts.len();
    let mut result = Vec::with_capacity(length);
    for (kept, put) in parts {
        result.extend_from_slice(kept);
        result.extend_from_slice(put);
    }
    result.extend_from_slice(tail);
    Ok((result, count))
}

type Span = std::ops::Range<usize>;

fn has_only_crlf(content: &[u8]) -> bool {
    let mut before = 0;
    let mut any = false;
    for &byte in content {
        if byte == b'\n' {
            if before != b'\r' {
                return false;
            }
            any = true;
        }
        before = byte;
    }
    any
}

/// Where `old` stands in `content`, byte for byte, overlapping ones included. A match that begins with the LF of a
/// CRLF is none: replacing it would leave half a line end behind.
fn literal_matches(content: &[u8], old: &[u8]) -> Vec<Span> {
    let splits = |start: usize| {
        old.first() == Some(&b'\n')
            && start.checked_sub(1).and_then(|before| content.get(before)) == Some(&b'\r')
    };
    occurrences(content, old)
        .into_iter()
        .filter(|start| !splits(*start))
        .map(|start| start..start + old.len())
        .collect()
}

/// Where `old`, whose lines end in LF, stands in `content` when CRLF counts as LF.
fn matches_of_any_line_end(content: &[u8], old: &str) -> Vec<Span> {
    let mut plain = Vec::with_capacity(content.len());
    let mut removed = Vec::new(); // for each CR taken out: the place in `plain` where it was
    let mut bytes = content.iter().peekable();
    while let Some(&byte) = bytes.next() {
        if byte == b'\r' && bytes.peek() == Some(&&b'\n') {
            removed.push(plain.len());
        } else {
            plain.push(byte);
        }
    }
    // A CR stands before its LF: a span that begins with that LF begins with the CR, one that ends there does not
    // reach it.
    let original = |at: usize| at + removed.partition_point(|&cr| cr < at);
    occurrences(&plain, old.as_bytes())
        .into_iter()
        .map(|start| original(start)..original(start + old.len()))
        .collect()
}

/// All places of `needle`, overlapping ones included, in linear time (Knuth, Morris, Pratt).
fn occurrences(text: &[u8], needle: &[u8]) -> Vec<usize> {
    if needle.is_empty() || needle.len() > text.len() {
        return Vec::new();
    }
    let at = |index: usize| needle.get(index).copied();
    // fallback[i]: length of the longest proper prefix of needle[..=i] that is also its suffix.
    let mut fallback: Vec<usize> = vec![0];
    let back = |fallback: &[usize], length: usize| {
        length.checked_sub(1).and_then(|last| fallback.get(last)).copied().unwrap_or(0)
    };
    let mut length = 0;
    for &byte in needle.iter().skip(1) {
        while length > 0 && at(length) != Some(byte) {
            length = back(&fallback, length);
        }
        length += usize::from(at(length) == Some(byte));
        fallback.push(length);
    }
    let mut found = Vec::new();
    let mut length = 0;
    for (end, &byte) in text.iter().enumerate() {
        while length > 0 && at(length) != Some(byte) {
            length = back(&fallback, length);
        }
        length += usize::from(at(length) == Some(byte));
        if length == needle.len() {
            found.push(end + 1 - length);
            length = back(&fallback, length);
        }
    }
    found
}

/// The line numbers, from 1, of places in ascending order.
fn lines_of(content: &[u8], places: &[usize]) -> Vec<usize> {
    let mut line = 1;
    let mut done = 0;
    places
        .iter()
        .map(|&place| {
            let between = content.get(done..place).unwrap_or_default();
            line += between.iter().filter(|&&byte| byte == b'\n').count();
            done = place;
            line
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn edit(content: &str, old: &str, new: &str, all: bool) -> Result<String, EditError> {
        edit_text(content.as_bytes(), old, new, all).map(|(text, _)| String::from_utf8(text).unwrap())
    }

    #[test]
    fn p15_line_ends_are_kept() {
        let check = |content: &str, old: &str, new: &str, expected: &str| {
            assert_eq!(edit(content, old, new, false).unwrap(), expected, "{content:?} {old:?} {new:?}");
        };
        check("a\r\nb\r\nc\r\n", "b", "B", "a\r\nB\r\nc\r\n");
        check("a\r\nB\r\nc\r\n", "a\nB", "A\nB", "A\r\nB\r\nc\r\n");
        check("a\r\nb\r\n", "a\r\nb", "x\r\ny", "x\r\ny\r\n");
        check("a\r\nb\r\n", "b", "b\nc", "a\r\nb\r\nc\r\n");
        check("a\r\nb\r\n", "\nb", "\nc", "a\r\nc\r\n");
        check("a\r\nb\r\n", "a\n", "z\n", "z\r\nb\r\n");
        check("a\r\nb\r\n", "a", "z", "z\r\nb\r\n");
        check("a\nb\nc", "a\r\nb", "x\r\ny", "x\ny\nc");
        check("a\nb\r\nc\nd", "b\nc", "B\nC", "a\nB\r\nC\nd");
        check("a\nb\r\nc\nd", "c\nd", "C\nD", "a\nb\r\nC\nD");
        check("x\r\n\r\ny", "\n\n", "\n", "x\r\ny");
        check("no newline at the end", "end", "END", "no newline at the END");
    }

    #[test]
    fn old_must_occur_once_unless_all() {
        assert_eq!(edit("a b a", "a", "c", true).unwrap(), "c b c");
        let twice = EditError::NotUnique { count: 2, lines: vec![1, 3] };
        assert_eq!(edit("a\nb\na", "a", "c", false), Err(twice));
        assert_eq!(edit("aaa", "aa", "b", false), Err(EditError::NotUnique { count: 2, lines: vec![1, 1] }));
        assert_eq!(edit("aaa", "aa", "b", true).unwrap(), "ba");
        assert_eq!(edit("a", "b", "c", false), Err(EditError::NotFound));
        assert_eq!(edit("", "b", "c", false), Err(EditError::NotFound));
        assert_eq!(edit("a", "", "c", false), Err(EditError::Empty));
        assert_eq!(edit("a", "a", "a", false), Err(EditError::Same));
    }

    #[test]
    fn an_edit_keeps_bytes_that_are_no_text_and_stays_bounded() {
        assert_eq!(edit_text(b"\xff a \xfe", "a", "b", false).unwrap(), (b"\xff b \xfe".to_vec(), 1));
        let many = "a".repeat(1 << 20);
        assert!(matches!(edit(&many, "a", &many, true), Err(EditError::TooLarge(_))));
        let started = Instant::now();
        assert_eq!(edit(&many, &format!("{}b", &many[1000..]), "", false), Err(EditError::NotFound));
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn occurrences_are_found_like_by_the_slow_way() {
        for text in ["abababa", "aaaa", "abcabd", "xabcabcabx", "", "ab"] {
            for needle in ["a", "aba", "aa", "abd", "abcab", "b", "abab"] {
                let slow: Vec<usize> = (0..text.len()).filter(|&at| text[at..].starts_with(needle)).collect();
                assert_eq!(occurrences(text.as_bytes(), needle.as_bytes()), slow, "{needle} in {text}");
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn an_edit_is_a_plain_replacement_with_the_line_ends_of_the_file(
            content in "[ab\n]{0,12}", old in "[ab\n]{1,4}", new in "[ab\n]{0,4}", all: bool,
        ) {
            let places = (0..content.len()).filter(|&at| content[at..].starts_with(&old)).count();
            let expected = match places {
                _ if old == new => None,
                0 => None,
                1 => Some(content.replace(&old, &new)),
                _ => all.then(|| content.replace(&old, &new)),
            };
            proptest::prop_assert_eq!(edit(&content, &old, &new, all).ok(), expected.clone());
            let with_crlf = content.replace('\n', "\r\n");
            let result = edit(&with_crlf, &old, &new, all).ok();
            if content.contains('\n') {
                proptest::prop_assert_eq!(result, expected.map(|text| text.replace('\n', "\r\n")));
            }
        }

        #[test]
        fn any_bytes_are_edited_without_harm(
            content in proptest::collection::vec(proptest::sample::select(&b"ab\r\n\xff"[..]), 0..16),
            old in "[ab\r\n]{0,4}", new in "[ab\r\n]{0,4}", all: bool,
        ) {
            if let Ok((result, count)) = edit_text(&content, &old, &new, all) {
                proptest::prop_assert!(count >= 1 && (all || count == 1));
                let others = |text: &[u8]| text.iter().filter(|&&byte| byte == 0xff).count();
                proptest::prop_assert_eq!(others(&result), others(&content));
            }
        }
    }
}
