//! Patterns for paths: `*`, `**`, `?`, `[..]`, `[!..]`.
//!
//! Pure. Never recursive: a failed match goes back to the last star only, which is enough for both stars inside
//! a name and `**` across names, so the cost is at most pattern length times path length.

use crate::words::error::{Error, Result};
use crate::words::text::{cut_end, escape_name};

/// The longest pattern, in bytes: longer ones are no patterns that somebody wrote.
pub const MAX_PATTERN_BYTES: usize = 1024;

/// A pattern, ready to be compared with paths.
///
/// Without `/` it is compared with the last name of a path, at any depth; with `/` with the whole path.
/// `**` as a whole name stands for any number of names; at the end for at least one. `*` and `?` never match
/// `/`, but do match a leading dot. A backslash makes the next of `*?[]\` literal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    AnyDepth,
    Name(Vec<Token>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Star,
    One,
    Is(char),
    Among { negated: bool, ranges: Vec<(char, char)> },
}

impl Glob {
    /// Reads a pattern. A leading `/` or `./` does not matter: what it is compared with is relative.
    ///
    /// # Errors
    /// When it is empty, too long, has an unclosed `[`, a range that runs backwards, `..` as a name, or the
    /// braces of other tools, which would silently match nothing.
    pub fn new(pattern: &str) -> Result<Glob> {
        let parts = parts(pattern).map_err(|why| {
            let shown = cut_end(&escape_name(pattern.as_bytes()), 100);
            Error::told(format!("pattern \"{shown}\" is not valid: {why}"))
        })?;
        Ok(Glob { parts })
    }

    /// Whether `path`, relative and separated by `/`, matches. Any bytes are fine: those that are not UTF-8
    /// count as U+FFFD.
    pub fn matches(&self, path: &[u8]) -> bool {
        let path = String::from_utf8_lossy(path);
        let names = path.split('/').filter(|name| !name.is_empty());
        let names: Vec<Vec<char>> = names.map(|name| name.chars().collect()).collect();
        let takes = |part: &Part, name: &Vec<char>| match part {
            Part::AnyDepth => true,
            Part::Name(tokens) => all_match(tokens, name, |token| *token == Token::Star, takes),
        };
        all_match(&self.parts, &names, |part| *part == Part::AnyDepth, takes)
    }
}

fn parts(pattern: &str) -> Result<Vec<Part>, &'static str> {
    if pattern.len() > MAX_PATTERN_BYTES {
        return Err("it is too long");
    }
    if pattern.contains('{') && pattern.contains(',') && pattern.contains('}') {
        return Err("braces are not known here; use one call for each alternative");
    }
    let mut parts = Vec::new();
    for name in pattern.split('/') {
        match name {
            "" | "." => {}
            ".." => return Err("it goes up with \"..\"; give the directory as \"path\""),
            "**" => parts.push(Part::AnyDepth),
            name => parts.push(Part::Name(tokens(name)?)),
        }
    }
    let last = parts.last().ok_or("it is empty")?;
    if *last == Part::AnyDepth {
        parts.push(Part::Name(vec![Token::Star])); // at the end it needs one name at least
    }
    if !pattern.contains('/') {
        parts.insert(0, Part::AnyDepth);
    }
    Ok(parts)
}

fn tokens(name: &str) -> Result<Vec<Token>, &'static str> {
    let mut found = Vec::new();
    let mut rest = name.chars().peekable();
    while let Some(c) = rest.next() {
        found.push(match c {
            '*' => Token::Star,
            '?' => Token::One,
            '[' => among(&mut rest)?,
            '\\' => Token::Is(rest.next_if(|next| "*?[]\\".contains(*next)).unwrap_or(c)),
            c => Token::Is(c),
        });
    }
    Ok(found)
}

/// Reads a set after its `[`. A `]` right at its beginning is a member.
fn among(rest: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Result<Token, &'static str> {
    const UNCLOSED: &str = "a \"[\" is not closed within its name";
    let negated = rest.next_if(|&c| c == '!' || c == '^').is_some();
    let mut ranges = Vec::new();
    loop {
        let first = rest.next().ok_or(UNCLOSED)?;
        if first == ']' && !ranges.is_empty() {
            return Ok(Token::Among { negated, ranges });
        }
        let mut ahead = rest.clone();
        let last = match (ahead.next(), ahead.next()) {
            (Some('-'), Some(last)) if last != ']' => {
                *rest = ahead;
                last
            }
            _ => first,
        };
        if last < first {
            return Err("a range in \"[..]\" runs backwards");
        }
        ranges.push((first, last));
    }
}

fn takes(token: &Token, c: &char) -> bool {
    match token {
        Token::Star | Token::One => true,
        Token::Is(wanted) => wanted == c,
        Token::Among { negated, ranges } => {
            ranges.iter().any(|(first, last)| (first..=last).contains(&c)) != *negated
        }
    }
}

/// Whether a pattern, in which stars stand for any number of items, takes the whole text.
fn all_match<P, T>(pattern: &[P], text: &[T], is_star: fn(&P) -> bool, takes: fn(&P, &T) -> bool) -> bool {
    let (mut at, mut next) = (0, 0);
    let mut back_to = None; // after the last star, and what it has swallowed up to
    while let Some(item) = text.get(next) {
        match pattern.get(at) {
            Some(part) if is_star(part) => {
                at += 1;
                back_to = Some((at, next));
            }
            Some(part) if takes(part, item) => (at, next) = (at + 1, next + 1),
            Some(_) | None => {
                let Some((after_star, swallowed)) = back_to else { return false };
                (at, next) = (after_star, swallowed + 1);
                back_to = Some((at, next));
            }
        }
    }
    pattern.get(at..).is_some_and(|rest| rest.iter().all(is_star))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pattern: &str, path: &str, expected: bool) {
        assert_eq!(Glob::new(pattern).unwrap().matches(path.as_bytes()), expected, "{pattern} on {path}");
    }

    #[test]
    fn names_match_at_any_depth_and_paths_as_a_whole() {
        check("*.rs", "a.rs", true);
        check("*.rs", "src/deep/a.rs", true);
        check("*.rs", "src/a.rsx", false);
        check("src/*.rs", "src/a.rs", true);
        check("src/*.rs", "src/deep/a.rs", false);
        check("src/*.rs", "x/src/a.rs", false);
        check("./src/*.rs", "src/a.rs", true);
        check("*", ".hidden", true);
    }

    #[test]
    fn two_stars_cross_directories() {
        check("**", "a/b/c", true);
        check("**/*", "a", true);
        check("src/**", "src/a/b", true);
        check("src/**", "src", false);
        check("src/**/a.rs", "src/a.rs", true);
        check("src/**/a.rs", "src/x/y/a.rs", true);
        check("**/b/**/d", "a/b/c/b/e/d", true);
        check("**/b/c", "a/b/b/c", true);
        check("**/b/c", "a/b/c/d", false);
        check("a**z", "abcz", true);
        check("a/**/b/**/c/d", "a/b/c/c/d", true);
    }

    #[test]
    fn sets_and_single_characters() {
        check("?.txt", "日.txt", true);
        check("?.txt", "ab.txt", false);
        check("[a-c]1", "b1", true);
        check("[!a-c]1", "b1", false);
        check("[!a-c]1", "d1", true);
        check("[]x]", "]", true);
        check("[a-]", "-", true);
        check("\\*", "*", true);
        check("\\*", "a", false);
        check("a\\xff", "a\\xff", true);
    }

    #[test]
    fn a_name_that_is_not_utf8_can_match() {
        assert!(Glob::new("a?z.*").unwrap().matches(b"d\xff/a\xffz.txt"));
        assert!(!Glob::new("a[a-z]z.*").unwrap().matches(b"a\xffz.txt"));
    }

    #[test]
    fn refuses_what_would_silently_match_nothing() {
        for bad in ["", "/", "[a", "[z-a]", "../x", "*.{rs,md}", "a[/]b", &"a".repeat(1025)] {
            assert!(Glob::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_hostile_pattern_answers_at_once() {
        let started = std::time::Instant::now();
        check(&"*a".repeat(512), &format!("{}b", "a".repeat(4000)), false);
        check(&"**/a/".repeat(200), &"a/".repeat(2000), true);
        check(&format!("{}b", "**/a/".repeat(200)), &"a/".repeat(2000), false);
        assert!(started.elapsed() < std::time::Duration::from_secs(5));
    }

    /// The same by trying everything, for short texts.
    fn slowly(parts: &[Part], names: &[&str]) -> bool {
        match (parts, names) {
            ([], []) => true,
            ([Part::AnyDepth], names) => !names.is_empty(),
            ([Part::AnyDepth, rest @ ..], names) => {
                (0..=names.len()).any(|swallowed| slowly(rest, &names[swallowed..]))
            }
            ([Part::Name(tokens), rest @ ..], [name, below @ ..]) => {
                name_slowly(tokens, &name.chars().collect::<Vec<_>>()) && slowly(rest, below)
            }
            _ => false,
        }
    }

    fn name_slowly(tokens: &[Token], name: &[char]) -> bool {
        match (tokens, name) {
            ([], []) => true,
            ([Token::Star, rest @ ..], name) => (0..=name.len()).any(|at| name_slowly(rest, &name[at..])),
            ([one, rest @ ..], [c, after @ ..]) => takes(one, c) && name_slowly(rest, after),
            _ => false,
        }
    }

    proptest::proptest! {
        #[test]
        fn matches_like_by_the_slow_way(pattern in "([ab*?/]|\\[a\\]|\\[!a\\]|\\*\\*/){1,8}", path in "[ab]{1,3}(/[ab]{1,3}){0,4}") {
            if let Ok(glob) = Glob::new(&pattern) {
                let names: Vec<&str> = path.split('/').collect();
                proptest::prop_assert_eq!(glob.matches(path.as_bytes()), slowly(&glob.parts, &names));
            }
        }

        #[test]
        fn any_pattern_and_any_bytes_are_answered(pattern: String, path: Vec<u8>) {
            if let Ok(glob) = Glob::new(&pattern) {
                let _ = glob.matches(&path);
            }
        }
    }
}
