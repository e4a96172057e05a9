//! Scope rules and their algebra: which paths a pod may read and write, and what remains after lending.
//!
//! Pure. A `Rule` holds a path that is absolute and canonical already (`store::paths` makes it so); here paths
//! are compared by components, never by string prefix, so `/w/src` does not cover `/w/src-old`.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::words::error::{Error, Result};
use crate::words::identity::PodId;

/// What a rule allows. Write includes read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// Reading only; never in conflict with anyone.
    Read,
    /// Writing and reading; exclusive on this machine for this user.
    Write,
}

/// How far a rule reaches below its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// The directory and everything below it.
    Recursive,
    /// The directory itself and its direct children.
    Flat,
}

/// One scope rule with an absolute canonical path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rule {
    path: String,
    access: Access,
    reach: Reach,
}

impl Rule {
    /// The parts of a rule as somebody wrote it, `PATH:read|write[:recursive|:flat]`: split from the right because a
    /// path may contain `:`. The path may be relative and full of links, but is not empty.
    ///
    /// # Errors
    /// When the access is missing, a word is unknown, or the path is empty or contains NUL.
    pub fn parts(text: &str) -> Result<(&str, Access, Reach)> {
        let malformed = |reason: &str| {
            let shown: String = text.chars().take(200).flat_map(char::escape_debug).collect();
            Error::told(format!(
                "scope rule \"{shown}\" is not valid: {reason}; write PATH:read or PATH:write, with \":recursive\" (the default) or \":flat\" after it"
            ))
        };
        let (rest, reach) = match text.rsplit_once(':') {
            Some((rest, "recursive")) => (rest, Reach::Recursive),
            Some((rest, "flat")) => (rest, Reach::Flat),
            Some(_) => (text, Reach::Recursive),
            None => return Err(malformed("it has no access")),
        };
        let (path, access) = match rest.rsplit_once(':') {
            Some((path, "read")) => (path, Access::Read),
            Some((path, "write")) => (path, Access::Write),
            Some((access, _)) if access.ends_with(":read") || access.ends_with(":write") => {
                return Err(malformed("what follows the access must be \"recursive\" or \"flat\""));
            }
            Some(_) | None => return Err(malformed("the access must be \"read\" or \"write\"")),
        };
        if begins_at_home(path) {
            return Err(malformed(HOME_RULE));
        }
        if path.is_empty() {
            return Err(malformed("its path is empty"));
        }
        if path.contains('\0') {
            return Err(malformed("its path contains a NUL byte"));
        }
        Ok((path, access, reach))
    }

    /// Makes a rule from a path that is canonical already.
    ///
    /// # Errors
    /// When the path is not absolute or not in normal form: no `.`, `..`, `//`, trailing `/` or NUL.
    pub fn new(path: &str, access: Access, reach: Reach) -> Result<Rule> {
        if is_normal(path) {
            return Ok(Rule { path: path.to_owned(), access, reach });
        }
        let shown: String = path.chars().take(200).flat_map(char::escape_debug).collect();
        Err(Error::told(format!("scope path \"{shown}\" is not absolute and in normal form")))
    }

    /// The directory that the rule names.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// How far the rule reaches.
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// Whether the rule allows writing.
    pub fn writes(&self) -> bool {
        self.access == Access::Write
    }

    /// Whether `path`, absolute and in normal form, lies within the rule's reach.
    pub fn covers(&self, path: &str) -> bool {
        match self.reach {
            Reach::Recursive => is_within(path, &self.path),
            Reach::Flat => path == self.path || parent(path) == Some(self.path.as_str()),
        }
    }

    /// Whether every path that `other` covers is covered by this rule. Access does not matter here.
    pub fn contains(&self, other: &Rule) -> bool {
        match (self.reach, other.reach) {
            (Reach::Recursive, _) => is_within(&other.path, &self.path),
            (Reach::Flat, Reach::Flat) => self.path == other.path,
            (Reach::Flat, Reach::Recursive) => false,
        }
    }

    /// Whether some path is covered by both rules. Access does not matter here.
    ///
    /// Two rules meet exactly when one covers the directory of the other, flat rules included: the children of
    /// two different directories are never the same path.
    pub fn overlaps(&self, other: &Rule) -> bool {
        self.covers(&other.path) || other.covers(&self.path)
    }
}

impl TryFrom<String> for Rule {
    type Error = Error;
    fn try_from(text: String) -> Result<Rule> {
        let (path, access, reach) = Rule::parts(&text)?;
        Rule::new(path, access, reach)
    }
}

impl From<Rule> for String {
    fn from(rule: Rule) -> String {
        rule.to_string()
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access = if self.writes() { "write" } else { "read" };
        let reach = if self.reach == Reach::Flat { "flat" } else { "recursive" };
        write!(f, "{}:{access}:{reach}", self.path)
    }
}

/// A part of a scope that is lent, and to whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loan {
    /// The live child that holds it.
    pub holder: PodId,
    /// The write rule that the child holds.
    pub rule: Rule,
}

/// Whether a path may be written, and if not, why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Inside the effective write scope.
    Allowed,
    /// Lent to a child, which alone may write it now.
    Lent(Loan),
    /// Never in the scope.
    Outside,
}

/// What a pod may do right now: its own rules, minus what its live children hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EffectiveScope {
    /// The pod's own rules, as in its lock entry.
    pub allow: Vec<Rule>,
    /// Write rules of its live children.
    pub lent: Vec<Loan>,
}

impl EffectiveScope {
    /// Whether `path` may be written. What is lent is denied last, so that a deny always wins.
    pub fn judge_write(&self, path: &str) -> Verdict {
        if !self.allow.iter().any(|rule| rule.writes() && rule.covers(path)) {
            return Verdict::Outside;
        }
        self.unless_lent(|lent| lent.covers(path))
    }

    /// Whether `path` may be read. Reading what was lent stays allowed.
    pub fn may_read(&self, path: &str) -> bool {
        self.allow.iter().any(|rule| rule.covers(path))
    }

    /// Whether the whole of `rule` could be lent: one own rule contains it and no loan meets it.
    pub fn judge_loan(&self, rule: &Rule) -> Verdict {
        let inside = |own: &&Rule| own.contains(rule) && (own.writes() || !rule.writes());
        if !self.allow.iter().any(|own| inside(&own)) {
            return Verdict::Outside;
        }
        if !rule.writes() {
            return Verdict::Allowed;
        }
        self.unless_lent(|lent| lent.overlaps(rule))
    }

    fn unless_lent(&self, meets: impl Fn(&Rule) -> bool) -> Verdict {
        let loan = self.lent.iter().find(|loan| meets(&loan.rule));
        loan.cloned().map_or(Verdict::Allowed, Verdict::Lent)
    }

    /// Whether the pod may read everything, so that a shell that reads everywhere gives it nothing new.
    pub fn reads_everywhere(&self) -> bool {
        self.allow.iter().any(|rule| rule.path == "/" && rule.reach == Reach::Recursive)
    }
}

/// Why no path may begin with `~`.
pub const HOME_RULE: &str = "only a shell knows what \"~\" is; write the whole path";

/// Whether `path` begins with the home directory as a shell writes it.
pub fn begins_at_home(path: &str) -> bool {
    path == "~" || path.starts_with("~/")
}

/// Whether `path` is absolute and has no `.`, `..`, empty component or NUL.
pub fn is_normal(path: &str) -> bool {
    let Some(rest) = path.strip_prefix('/') else { return false };
    path == "/" || rest.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.contains('\0'))
}

/// Whether `path` is `directory` or lies below it, by components; both in normal form.
pub fn is_within(path: &str, directory: &str) -> bool {
    let rest = path.strip_prefix(directory);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || directory == "/")
}

/// The directory that holds `path`, `None` for the root itself.
pub fn parent(path: &str) -> Option<&str> {
    match path.rsplit_once('/') {
        Some(("", "")) | None => None,
        Some(("", _)) => Some("/"),
        Some((directory, _)) => Some(directory),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Rule {
        Rule::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn rule_texts_are_split_from_the_right() {
        let check = |text: &str, expected: &str| assert_eq!(rule(text).to_string(), expected);
        check("/a:write", "/a:write:recursive");
        check("/a:read:flat", "/a:read:flat");
        check("/a:write:write", "/a:write:write:recursive");
        check("/a:b c:write:recursive", "/a:b c:write:recursive");
        check("/日本:write", "/日本:write:recursive");
        check("/:read", "/:read:recursive");
        let flat = rule("/a/b:read:flat");
        assert_eq!((flat.path(), flat.access, flat.reach()), ("/a/b", Access::Read, Reach::Flat));
    }

    #[test]
    fn refuses_rules_that_say_nothing_clear() {
        for bad in
            ["", ":", "/a", "/a:", "/a:rw", ":write", "/a:write:deep", "/a\0:write", "recursive", "a:flat"]
        {
            assert!(Rule::parts(bad).is_err(), "{bad:?}");
        }
        for bad in ["a:write", "/a/:write", "/a//b:write", "/a/../b:write", "/./a:write", "//:read"] {
            assert!(Rule::try_from(bad.to_owned()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn p01_and_s04_a_sibling_with_the_same_beginning_is_outside() {
        let src = rule("/w/src:write");
        assert!(src.covers("/w/src") && src.covers("/w/src/a/b"));
        for outside in ["/w/src-old/a", "/w/srcx", "/w/src.bak/a", "/w", "/"] {
            assert!(!src.covers(outside), "{outside}");
        }
        for other in ["/w/src-2:write", "/w/sr:write", "/w/src.d:write"] {
            assert!(!src.overlaps(&rule(other)), "{other}");
        }
    }

    #[test]
    fn flat_reaches_the_direct_children_only() {
        let flat = rule("/w:write:flat");
        assert!(flat.covers("/w") && flat.covers("/w/a") && !flat.covers("/w/a/b"));
        assert!(flat.contains(&rule("/w:write:flat")));
        assert!(!flat.contains(&rule("/w:write:recursive")) && !flat.contains(&rule("/w/a:write:flat")));
        assert!(rule("/w:write").contains(&rule("/w/a:write:flat")));
        assert!(flat.overlaps(&rule("/w/a:write")) && !flat.overlaps(&rule("/w/a/b:write")));
        let root = rule("/:write:flat");
        assert!(root.covers("/a") && !root.covers("/a/b"));
    }

    #[test]
    fn s03_overlap_is_found_both_ways() {
        let lib = rule("/w/lib:write");
        for other in ["/w/lib/foo.ts:write", "/w:write", "/:write", "/w/lib:write"] {
            assert!(lib.overlaps(&rule(other)) && rule(other).overlaps(&lib), "{other}");
        }
    }

    #[test]
    fn what_is_lent_is_denied_and_still_readable() {
        let holder = PodId::new("coder").unwrap();
        let loan = Loan { holder, rule: rule("/w/core:write") };
        let scope =
            EffectiveScope { allow: vec![rule("/w:write"), rule("/:read")], lent: vec![loan.clone()] };
        assert_eq!(scope.judge_write("/w/a"), Verdict::Allowed);
        assert_eq!(scope.judge_write("/w/core/f"), Verdict::Lent(loan.clone()));
        assert_eq!(scope.judge_write("/etc"), Verdict::Outside);
        assert!(scope.may_read("/w/core/f") && scope.may_read("/etc/passwd"));
        assert_eq!(scope.judge_loan(&rule("/w:write")), Verdict::Lent(loan));
        assert_eq!(scope.judge_loan(&rule("/w/docs:write")), Verdict::Allowed);
        assert_eq!(scope.judge_loan(&rule("/etc:write")), Verdict::Outside);
        assert_eq!(scope.judge_loan(&rule("/etc:read")), Verdict::Allowed);
    }

    #[test]
    fn only_the_whole_tree_is_everything() {
        let check = |rules: &[&str], expected: bool| {
            let allow = rules.iter().map(|text| rule(text)).collect();
            assert_eq!(EffectiveScope { allow, lent: Vec::new() }.reads_everywhere(), expected, "{rules:?}");
        };
        check(&["/w:write", "/:read"], true);
        check(&["/:read:flat"], false);
        check(&["/usr:read", "/w:write"], false);
        check(&[], false);
    }

    #[test]
    fn s10_an_empty_scope_writes_nothing() {
        assert_eq!(EffectiveScope::default().judge_write("/w"), Verdict::Outside);
        assert!(!EffectiveScope::default().may_read("/w"));
    }
}
