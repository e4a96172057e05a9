//! One text replaced by another in the bytes of a file: what `EditFile` does, without the file.
//!
//! Pure, and fuzzed. Knows line ends and bytes, no paths.

/// The largest file that `EditFile` takes, in bytes; what it makes of it may be four times as large.
pub const EDIT_BYTES_MAX: usize = 8 << 20;

/// Replaces `old` by `new` in `content`, once or, if `all`, everywhere; returns the result and how often.
///
/// The line ends LF and CRLF count as the same. Those of `new` become what the replaced text had; if it had none,
/// what the first line of the file has. Every byte outside the replaced text stays. The cost is linear.
///
/// # Errors
/// With the sentence that says why, when `old` is empty, equal to `new`, does not occur, occurs more than once without `all`, or the result is too
/// large.
pub fn edit_text(content: &[u8], old: &str, new: &str, all: bool) -> Result<(Vec<u8>, usize), String> {
    let (old, lf) = (old.replace("\r\n", "\n"), new.replace("\r\n", "\n"));
    if old.is_empty() {
        return Err("\"old\" is empty; give the text to be replaced".into());
    }
    if old == lf {
        return Err("\"old\" and \"new\" are the same".into());
    }
    let (plain, removed) = without_cr(content);
    let mut places = occurrences(&plain, &old);
    if let (&[only], false) = (places.as_slice(), all) {
        let after = plain.get(only + 1..).unwrap_or_default(); // one that overlaps it counts too
        places.extend(occurrences(after, &old).iter().map(|place| only + 1 + place));
    }
    let count = places.len();
    if count == 0 {
        return Err("\"old\" does not occur in it; read the file again and copy the text exactly, without line numbers".into());
    }
    let line_of = |place: &usize| 1 + line_ends(plain.get(..*place));
    if count > 1 && !all {
        let lines: Vec<usize> = places.iter().take(5).map(line_of).collect();
        return Err(format!(
            "\"old\" occurs {count} times (first on lines {lines:?}); add text around it until it occurs once, or set \"all\""
        ));
    }
    let crlf = lf.replace('\n', "\r\n");
    let length_max = content.len().saturating_add(count.saturating_mul(crlf.len()));
    if length_max > 4 * EDIT_BYTES_MAX {
        return Err(format!("the result could have {length_max} bytes, more than {}", 4 * EDIT_BYTES_MAX));
    }
    let first_is_crlf = removed.first().is_some_and(|&first| line_ends(plain.get(..first)) == 0);
    // A CR stands before its LF: a span that begins with that LF begins with the CR, one that ends there does not
    // reach it.
    let original = |at: usize| at + removed.partition_point(|&cr| cr < at);
    let mut result = Vec::with_capacity(length_max);
    let mut done = 0;
    for place in places {
        let (start, end) = (original(place), original(place + old.len()));
        let replaced = content.get(start..end).unwrap_or_default();
        let has_crlf = replaced.windows(2).any(|pair| pair == b"\r\n");
        let is_crlf = has_crlf || first_is_crlf && !replaced.contains(&b'\n');
        result.extend_from_slice(content.get(done..start).unwrap_or_default());
        result.extend_from_slice(if is_crlf { crlf.as_bytes() } else { lf.as_bytes() });
        done = end;
    }
    result.extend_from_slice(content.get(done..).unwrap_or_default());
    Ok((result, count))
}

/// The text with LF for each CRLF, and the places in it where a CR was taken out.
fn without_cr(content: &[u8]) -> (Vec<u8>, Vec<usize>) {
    let (mut plain, mut removed) = (Vec::with_capacity(content.len()), Vec::new());
    let mut bytes = content.iter().peekable();
    while let Some(&byte) = bytes.next() {
        if byte == b'\r' && bytes.peek() == Some(&&b'\n') {
            removed.push(plain.len());
        } else {
            plain.push(byte);
        }
    }
    (plain, removed)
}

/// All places of `needle`, one after the other. It is UTF-8, so it never reaches into bytes that are not.
fn occurrences(text: &[u8], needle: &str) -> Vec<usize> {
    let mut start = 0;
    let mut found = Vec::new();
    for chunk in text.utf8_chunks() {
        found.extend(chunk.valid().match_indices(needle).map(|(place, _)| start + place));
        start += chunk.valid().len() + chunk.invalid().len();
    }
    found
}

fn line_ends(text: Option<&[u8]>) -> usize {
    text.unwrap_or_default().iter().filter(|&&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn edit(content: &str, old: &str, new: &str, all: bool) -> Result<String, String> {
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
        let refused = |content: &str, old: &str, new: &str, why: &str| {
            let said = edit(content, old, new, false).unwrap_err();
            assert!(said.contains(why), "{said}");
        };
        refused("a\nb\na", "a", "c", "occurs 2 times (first on lines [1, 3])");
        refused("aaa", "aa", "b", "occurs 2 times (first on lines [1, 1])");
        assert_eq!(edit("aaa", "aa", "b", true).unwrap(), "ba");
        refused("a", "b", "c", "does not occur");
        refused("", "b", "c", "does not occur");
        refused("a", "", "c", "is empty");
        refused("a", "a", "a", "are the same");
    }

    #[test]
    fn an_edit_keeps_bytes_that_are_no_text_and_stays_bounded() {
        assert_eq!(edit_text(b"\xff a \xfe", "a", "b", false).unwrap(), (b"\xff b \xfe".to_vec(), 1));
        let many = "a".repeat(1 << 20);
        assert!(edit(&many, "a", &many, true).unwrap_err().starts_with("the result could have"));
        let started = Instant::now();
        let absent = edit(&many, &format!("{}b", &many[1000..]), "", false).unwrap_err();
        assert!(absent.contains("does not occur"), "{absent}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn occurrences_are_found_like_by_the_slow_way() {
        for text in ["abababa", "aaaa", "abcabd", "xabcabcabx", "", "ab"] {
            for needle in ["a", "aba", "aa", "abd", "abcab", "b", "abab"] {
                let mut slow: Vec<usize> = Vec::new();
                for at in (0..text.len()).filter(|&at| text[at..].starts_with(needle)) {
                    if slow.last().is_none_or(|last| last + needle.len() <= at) {
                        slow.push(at);
                    }
                }
                assert_eq!(occurrences(text.as_bytes(), needle), slow, "{needle} in {text}");
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
