//! Patterns for paths: `*`, `**`, `?`, `[..]`, `[!..]`.
//!
//! Pure. Never recursive: a failed match goes back to the last star only, which is enough for both stars inside
//! a name and `**` across names, so the cost is at most pattern length times path length.

use std::fmt;

/// The longest pattern, in bytes: longer ones are no patterns that somebody wrote.
pub const MAX_PATTERN_BYTES: usize = 1024;

/// Why a text is no pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobError(pub String);

impl fmt::Display for GlobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for GlobError {}

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
    Is(u32),
    Among { negated: bool, ranges: Vec<(u32, u32)> },
}

impl Glob {
    /// Reads a pattern. A leading `/` or `./` does not matter: what it is compared with is relative.
    ///
    /// # Errors
    /// When it is empty, too long, has an unclosed `[`, a range that runs backwards, `..` as a name, or the
    /// braces of other tools, which would silently match nothing.
    pub fn new(pattern: &str) -> Result<Glob, GlobError> {
        let refuse = |why: &str| {
            let shown: String = pattern.chars().take(100).flat_map(char::escape_debug).collect();
            Err(GlobError(format!("pattern \"{shown}\" is not valid: {why}")))
        };
        if pattern.len() > MAX_PATTERN_BYTES {
            return refuse(&format!("it is longer than {MAX_PATTERN_BYTES} bytes"));
        }
        if pattern.contains('{') && pattern.contains(',') && pattern.contains('}') {
            return refuse("braces are not known here; use one call for each alternative");
        }
        let mut parts = Vec::new();
        for name in pattern.split('/') {
            match name {
                "" | "." => {}
                ".." => return refuse("it goes up with \"..\"; give the directory as \"path\""),
                "**" if parts.last() == Some(&Part::AnyDepth) => {}
                "**" => parts.push(Part::AnyDepth),
                name => match tokens(name) {
                    Ok(tokens) => parts.push(Part::Name(tokens)),
                    Err(why) => return refuse(why),
                },
            }
        }
        if parts.is_empty() {
            return refuse("it is empty");
        }
        if !pattern.contains('/') && !matches!(parts.first(), Some(Part::AnyDepth)) {
            parts.insert(0, Part::AnyDepth);
        }
        Ok(Glob { parts })
    }

    /// Whether `path`, relative and separated by `/`, matches. Any bytes are fine: one that is not part of
    /// UTF-8 text counts as one character.
    #[must_use]
    pub fn matches(&self, path: &[u8]) -> bool {
        let names: Vec<Vec<u32>> =
            path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()).map(characters).collect();
        let (mut part, mut name) = (0, 0);
        let mut back_to = None; // after the last `**`, and the name it has swallowed up to
        while let Some(this) = names.get(name) {
            match self.parts.get(part) {
                Some(Part::AnyDepth) => {
                    // At the end of the pattern it needs one name at least, and there is one.
                    part += 1;
                    if part == self.parts.len() {
                        return true;
                    }
                    back_to = Some((part, name));
                    continue;
                }
                Some(Part::Name(tokens)) if name_matches(tokens, this) => {
                    part += 1;
                    name += 1;
                    continue;
                }
                Some(Part::Name(_)) | None => {}
            }
            let Some((after_stars, swallowed)) = back_to else { return false };
            back_to = Some((after_stars, swallowed + 1));
            (part, name) = (after_stars, swallowed + 1);
        }
        part == self.parts.len() && !names.is_empty()
    }
}

fn tokens(name: &str) -> Result<Vec<Token>, &'static str> {
    let mut found = Vec::new();
    let mut rest = name.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '*' if found.last() == Some(&Token::Star) => {}
            '*' => found.push(Token::Star),
            '?' => found.push(Token::One),
            '[' => found.push(among(&mut rest)?),
            '\\' if matches!(rest.peek(), Some('*' | '?' | '[' | ']' | '\\')) => {
                found.extend(rest.next().map(|c| Token::Is(u32::from(c))));
            }
            c => found.push(Token::Is(u32::from(c))),
        }
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
        let mut last = first;
        if rest.peek() == Some(&'-') {
            let mut ahead = rest.clone();
            ahead.next();
            if let Some(end) = ahead.next().filter(|&c| c != ']') {
                last = end;
                *rest = ahead;
            }
        }
        if last < first {
            return Err("a range in \"[..]\" runs backwards");
        }
        ranges.push((u32::from(first), u32::from(last)));
    }
}

/// The characters of a name; bytes that are not UTF-8 are numbered beyond the last character.
fn characters(name: &[u8]) -> Vec<u32> {
    let mut found = Vec::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        found.extend(chunk.valid().chars().map(u32::from));
        found.extend(chunk.invalid().iter().map(|&byte| 0x11_0000 + u32::from(byte)));
    }
    found
}

fn name_matches(tokens: &[Token], name: &[u32]) -> bool {
    let (mut token, mut at) = (0, 0);
    let mut back_to = None;
    while let Some(&c) = name.get(at) {
        match tokens.get(token) {
            Some(Token::Star) => {
                token += 1;
                back_to = Some((token, at));
                continue;
            }
            Some(one) if takes(one, c) => {
                token += 1;
                at += 1;
                continue;
            }
            Some(_) | None => {}
        }
        let Some((after_star, swallowed)) = back_to else { return false };
        back_to = Some((after_star, swallowed + 1));
        (token, at) = (after_star, swallowed + 1);
    }
    tokens.get(token..).is_some_and(|rest| rest.iter().all(|token| *token == Token::Star))
}

fn takes(token: &Token, c: u32) -> bool {
    match token {
        Token::Star | Token::One => true,
        Token::Is(wanted) => *wanted == c,
        Token::Among { negated, ranges } => {
            ranges.iter().any(|&(first, last)| (first..=last).contains(&c)) != *negated
        }
    }
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
                name_slowly(tokens, &characters(name.as_bytes())) && slowly(rest, below)
            }
            _ => false,
        }
    }

    fn name_slowly(tokens: &[Token], name: &[u32]) -> bool {
        match (tokens, name) {
            ([], []) => true,
            ([Token::Star, rest @ ..], name) => (0..=name.len()).any(|at| name_slowly(rest, &name[at..])),
            ([one, rest @ ..], [c, after @ ..]) => takes(one, *c) && name_slowly(rest, after),
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
