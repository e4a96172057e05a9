//! Text cut and wrapped by the columns it takes in a terminal. Pure.

use ratatui::text::Span;

use crate::words::text::harmless;

/// The bytes of one character with what combines with it, at most; a pile of marks is cut there.
const CLUSTER_BYTES_MAX: usize = 64;

/// Text of a pod made fit for a line of the screen: control characters visible, tabs as spaces.
pub fn shown(text: &str) -> String {
    harmless(text).replace('\t', "    ")
}

/// The characters of a line, each with all that combines with it: where it begins, its bytes and its columns.
pub fn clusters(line: &str) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
    let mut end = 0;
    std::iter::from_fn(move || {
        let begin = end;
        let (bytes, columns) = cluster(line.get(begin..).filter(|rest| !rest.is_empty())?);
        end += bytes;
        Some((begin, bytes, columns))
    })
}

/// The first character of a line with all that combines with it: its bytes and its columns.
pub fn cluster(text: &str) -> (usize, usize) {
    let bytes = text.as_bytes();
    if bytes.first().is_some_and(u8::is_ascii) && bytes.get(1).is_none_or(u8::is_ascii) {
        return (1, if bytes.first() == Some(&b'\t') { 4 } else { 1 });
    }
    let (mut end, mut is_joined) = (0, true);
    for c in text.chars() {
        let combines = is_joined || Span::raw(c.encode_utf8(&mut [0; 4]) as &str).width() == 0;
        if !combines || end >= CLUSTER_BYTES_MAX {
            break;
        }
        is_joined = c == '\u{200d}';
        end += c.len_utf8();
    }
    (end, text.get(..end).map_or(0, |cluster| Span::raw(cluster).width()))
}

/// The columns that a line takes.
pub fn columns(line: &str) -> usize {
    clusters(line).map(|(.., columns)| columns).sum()
}

/// The lines of a text as rows of at most `width` columns, broken after the last space where that leaves them
/// half full, else between characters.
pub fn wrap(text: &str, width: usize) -> Vec<&str> {
    let mut rows = Vec::new();
    for line in text.split('\n') {
        if line.len() <= width && !line.contains('\t') {
            rows.push(line); // no character takes more columns than bytes
            continue;
        }
        let (mut begin, mut at, mut used, mut space) = (0, 0, 0, 0);
        while let Some(rest) = line.get(at..).filter(|rest| !rest.is_empty()) {
            let (bytes, columns) = cluster(rest);
            if used + columns > width && at > begin {
                let cut = if space > begin + (at - begin) / 2 { space } else { at };
                rows.push(line.get(begin..cut).unwrap_or_default());
                (begin, at, used) = (cut, cut, 0);
                continue;
            }
            (at, used) = (at + bytes, used + columns);
            if rest.starts_with(' ') {
                space = at;
            }
        }
        rows.push(line.get(begin..).unwrap_or_default());
    }
    rows
}

/// A line of at most `width` columns; `…` says that it was longer.
pub fn fit(line: &str, width: usize) -> String {
    if columns(line) <= width {
        return line.to_owned();
    }
    let mut used = 1;
    let fits = |(.., columns): &(usize, usize, usize)| {
        used += columns;
        used <= width
    };
    let end = clusters(line).take_while(fits).last().map_or(0, |(begin, bytes, _)| begin + bytes);
    format!("{}…", line.get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_end_after_spaces_and_never_inside_a_character() {
        let check = |text: &str, width: usize, expected: &[&str]| assert_eq!(wrap(text, width), expected);
        check("", 5, &[""]);
        check("one two three", 8, &["one two ", "three"]);
        check("a 日本語日本語", 8, &["a 日本語", "日本語"]);
        check("abcdefgh", 3, &["abc", "def", "gh"]);
        check("a\n\nb", 9, &["a", "", "b"]);
        check("日本語テキスト", 5, &["日本", "語テ", "キス", "ト"]);
        check("e\u{301}e\u{301}e\u{301}", 2, &["e\u{301}e\u{301}", "e\u{301}"]);
        check("日", 1, &["日"]);
        let pile = format!("a{}", "\u{301}".repeat(5_000));
        assert_eq!(wrap(&pile, 10).concat(), pile);
    }

    #[test]
    fn a_line_is_cut_by_columns() {
        let check = |text: &str, width: usize, expected: &str| assert_eq!(fit(text, width), expected);
        check("short", 5, "short");
        check("longer", 5, "long…");
        check("日本語", 5, "日本…");
        check("e\u{301}xyz", 3, "e\u{301}x…");
        assert_eq!(columns("👩\u{200d}👧a日"), 5);
    }
}
