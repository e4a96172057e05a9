//! Where a path leads, and whether a file tool may go there.
//!
//! A path is walked once, directory by directory, into an open descriptor. What is judged is the kernel's own
//! path of that descriptor, and all work goes on relative to it; no name is looked up a second time. So a link
//! swapped in between is never followed unjudged. Runs on the turn thread.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::sys::file::{self, Stamp};
use crate::words::error::{Error, Result};
use crate::words::limits::Limits;
use crate::words::scope::{EffectiveScope, Loan, Reach, Rule, Verdict, is_within};
use crate::words::text::{cut_end, escape_name, unescape_name};

/// Links followed in one path; the kernel's own bound. Source: path_resolution(7).
const MAX_LINKS: usize = 40;
/// The longest path in bytes. Source: `PATH_MAX` in limits.h.
const MAX_PATH_BYTES: usize = 4095;
/// Files whose state is remembered; past that the older half is forgotten.
const MAX_SEEN: usize = 16_384;

/// What tells one file or directory from every other: device and inode.
pub(crate) type Identity = (u64, u64);

/// The file tools of one pod: where they work, what they keep away from, and which files they have seen.
#[derive(Debug)]
pub struct FileDesk {
    /// The pod's working directory, absolute; relative paths start here.
    pub directory: PathBuf,
    /// Canonical paths, with all below them, that are never read, listed or written: the runtime, state and
    /// configuration directories, key files.
    pub hidden: Vec<PathBuf>,
    /// Canonical paths below hidden ones that may be read all the same, such as the session's `results`.
    pub shown: Vec<PathBuf>,
    /// Whether `.git/hooks`, `.git/config` and `.insomnia` are kept from being written, because other programs
    /// obey what is written there.
    pub protect_git: bool,
    /// The pod's limits.
    pub limits: Limits,
    seen: Seen,
}

impl FileDesk {
    /// A desk that has seen no file yet.
    #[must_use]
    pub fn new(
        directory: PathBuf,
        hidden: Vec<PathBuf>,
        shown: Vec<PathBuf>,
        protect_git: bool,
        limits: Limits,
    ) -> FileDesk {
        FileDesk { directory, hidden, shown, protect_git, limits, seen: Seen::default() }
    }

    /// Finds where `path` leads: the name as it is, or else the name that `escape_name` has shown like this.
    pub(crate) fn find(&self, path: &str) -> Result<Found> {
        let literal = self.walk(path, path.as_bytes());
        if !path.contains("\\x") || literal.as_ref().is_ok_and(|found| found.missing() == 0) {
            return literal;
        }
        let unescaped = unescape_name(path);
        if unescaped.contains(&0) {
            return literal;
        }
        match (literal, self.walk(path, &unescaped)) {
            (Ok(literal), Ok(other)) if other.missing() < literal.missing() => Ok(other),
            (Err(_), Ok(other)) => Ok(other),
            (literal, _) => literal,
        }
    }

    /// Walks a path into the deepest directory that exists.
    ///
    /// A `..` behind a name that does not exist takes that name away again; everywhere else it is the
    /// directory above the one really reached. Links are read and walked as text, the magic ones of `/proc` too,
    /// so that each ends at a descriptor which is judged like any other.
    fn walk(&self, asked: &str, path: &[u8]) -> Result<Found> {
        let asked = escape_name(asked.as_bytes());
        if path.is_empty() {
            return Err(Error::told("the path is empty; name a file or directory"));
        }
        if path.contains(&0) {
            return Err(Error::told(format!("path \"{asked}\" contains a NUL byte, which no name can")));
        }
        if path.len() > MAX_PATH_BYTES {
            let start = cut_end(&asked, 100);
            return Err(Error::told(format!("path \"{start}\" is longer than {MAX_PATH_BYTES} bytes")));
        }
        let cannot = |error: io::Error| Error::io(format!("follow path \"{asked}\""), error);
        let start = if path.starts_with(b"/") { Path::new("/") } else { self.directory.as_path() };
        let mut at = file::open_place(start).map_err(cannot)?;
        let mut rest: VecDeque<OsString> = components(path);
        let mut missing: Vec<OsString> = Vec::new();
        let mut exists = false;
        let mut ends_as_directory = false;
        let mut links = 0;
        while let Some(name) = rest.pop_front() {
            ends_as_directory = matches!(name.as_bytes(), b"" | b"." | b"..");
            match name.as_bytes() {
                b"" | b"." => continue,
                b".." if missing.pop().is_some() => {
                    exists = false;
                    continue;
                }
                b".." => {
                    at = file::open_parent(&at).map_err(cannot)?;
                    continue;
                }
                _ if !missing.is_empty() => {
                    missing.push(name);
                    exists = false;
                    continue;
                }
                _ => {}
            }
            let entry = match file::open_entry_at(&at, Path::new(&name)) {
                Ok(entry) => entry,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    missing.push(name);
                    exists = false;
                    continue;
                }
                Err(error) => return Err(cannot(error)),
            };
            let kind = entry.metadata().map_err(cannot)?.file_type();
            if kind.is_symlink() {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Error::told(format!(
                        "path \"{asked}\" goes through more than {MAX_LINKS} links"
                    )));
                }
                let target = file::link_target(&entry).map_err(cannot)?.into_os_string();
                if target.as_bytes().starts_with(b"/") {
                    at = file::open_place(Path::new("/")).map_err(cannot)?;
                }
                for name in components(target.as_bytes()).into_iter().rev() {
                    rest.push_front(name);
                }
            } else if kind.is_dir() {
                at = entry.into();
            } else {
                missing.push(name);
                exists = true;
            }
        }
        let real = file::real_path(&at).map_err(cannot)?;
        if !real.is_absolute() {
            return Err(Error::told(format!("path \"{asked}\" leads out of the visible file system")));
        }
        let exists = exists && missing.len() == 1;
        Ok(Found { asked, at, real, below: missing, exists, ends_as_directory })
    }

    /// Whether the place may be read; nothing has been read yet.
    pub(crate) fn judge_read(&self, scope: &EffectiveScope, found: &Found) -> Result<()> {
        let place = found.place();
        self.judge_hidden(found, &place, "read")?;
        if scope.may_read(&judged_text(&place)) {
            return Ok(());
        }
        let rules = rules_in_words(&scope.allow, |_| true);
        Err(Error::told(format!("cannot read {}: it is outside your read scope; {rules}", found.named())))
    }

    /// Whether the place and every directory that has to be created for it may be written; nothing has been
    /// changed yet.
    pub(crate) fn judge_write(&self, scope: &EffectiveScope, found: &Found) -> Result<()> {
        let mut place = found.real.clone();
        for name in &found.below {
            place.push(name);
            match scope.judge_write(&judged_text(&place)) {
                Verdict::Allowed => {}
                Verdict::Lent(loan) => return Err(lent(found, &loan)),
                Verdict::Outside => return Err(outside(scope, found)),
            }
        }
        if found.below.is_empty() {
            match scope.judge_write(&judged_text(&place)) {
                Verdict::Allowed => {}
                Verdict::Lent(loan) => return Err(lent(found, &loan)),
                Verdict::Outside => return Err(outside(scope, found)),
            }
        }
        self.judge_hidden(found, &place, "write")?;
        self.judge_protected(found, &place)?;
        match lent_by_identity(scope, found)? {
            Some(loan) => Err(lent(found, &loan)),
            None => Ok(()),
        }
    }

    /// Refuses Insomnia's own places: by their path, and by what the directories on the way really are, so that
    /// neither another spelling on a case-insensitive file system nor a bind mount leads around it.
    fn judge_hidden(&self, found: &Found, place: &Path, verb: &str) -> Result<()> {
        let by_path = self.is_hidden(place, verb == "read");
        let by_identity = || -> Result<bool> {
            let hidden = identities(&self.hidden);
            let shown = if verb == "read" { identities(&self.shown) } else { Vec::new() };
            let chain = found.lineage()?;
            let nearest = chain.iter().find(|id| hidden.contains(id) || shown.contains(id));
            Ok(nearest.is_some_and(|id| !shown.contains(id)))
        };
        if by_path || by_identity()? {
            return Err(Error::told(format!(
                "cannot {verb} {}: it belongs to Insomnia itself, which file tools keep away from",
                found.named()
            )));
        }
        Ok(())
    }

    /// Whether a real path lies in a hidden place, the shown ones excepted if `reading`.
    pub(crate) fn is_hidden(&self, place: &Path, reading: bool) -> bool {
        let deepest = |places: &[PathBuf]| {
            places.iter().filter(|hidden| place.starts_with(hidden)).map(|p| p.components().count()).max()
        };
        let shown = if reading { deepest(&self.shown) } else { None };
        deepest(&self.hidden).is_some_and(|hidden| shown.is_none_or(|shown| shown < hidden))
    }

    /// What is hidden, as what it really is, for comparison with opened files.
    pub(crate) fn hidden_identities(&self) -> Vec<Identity> {
        identities(&self.hidden)
    }

    fn judge_protected(&self, found: &Found, place: &Path) -> Result<()> {
        if !self.protect_git || !is_obeyed_by_others(place) {
            return Ok(());
        }
        Err(Error::told(format!(
            "cannot write {}: git hooks, git configuration and .insomnia are protected, because programs outside obey them; ask the person to change it",
            found.named()
        )))
    }

    /// Remembers the state in which the pod knows the file.
    pub(crate) fn remember(&mut self, place: PathBuf, stamp: Stamp) {
        self.seen.insert(place, stamp);
    }

    /// Whether the pod knows the file in another state than this.
    pub(crate) fn has_changed(&self, place: &Path, now: &Stamp) -> bool {
        self.seen.stamps.get(place).is_some_and(|(known, _)| known != now)
    }
}

/// Where a path leads, as far as it exists, held by a descriptor.
#[derive(Debug)]
pub(crate) struct Found {
    /// The path as asked, escaped.
    pub(crate) asked: String,
    /// The deepest directory that exists on the way, as a place.
    pub(crate) at: OwnedFd,
    /// The kernel's path of it.
    pub(crate) real: PathBuf,
    /// The names below it: none for a directory that exists, one for a file, more if directories are missing.
    pub(crate) below: Vec<OsString>,
    /// Whether the one name below exists; it is neither a directory nor a link.
    pub(crate) exists: bool,
    /// Whether the path is written like one of a directory: it ends in `/`, `.` or `..`.
    pub(crate) ends_as_directory: bool,
}

impl Found {
    /// The real path of the whole.
    pub(crate) fn place(&self) -> PathBuf {
        let mut place = self.real.clone();
        place.extend(&self.below);
        place
    }

    /// How many names do not exist.
    fn missing(&self) -> usize {
        self.below.len() - usize::from(self.exists)
    }

    /// Whether it is a directory that exists.
    pub(crate) fn is_directory(&self) -> bool {
        self.below.is_empty()
    }

    /// How an error calls it: as asked, and where that really is.
    pub(crate) fn named(&self) -> String {
        let place = escape_name(self.place().as_os_str().as_bytes());
        if place == self.asked {
            return format!("\"{place}\"");
        }
        format!("\"{}\" (really \"{place}\")", self.asked)
    }

    /// What is there, opened as a place only. `None` if nothing is.
    pub(crate) fn entry(&self) -> Result<Option<(File, Metadata)>> {
        let (Some(name), true) = (self.below.first(), self.exists) else { return Ok(None) };
        let cannot = |error| Error::io(format!("open {}", self.named()), error);
        let entry = match file::open_entry_at(&self.at, Path::new(name)) {
            Ok(entry) => entry,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(cannot(error)),
        };
        let metadata = entry.metadata().map_err(cannot)?;
        Ok(Some((entry, metadata)))
    }

    /// The directories from `at` up to the root, nearest first, with what is there itself before them.
    fn lineage(&self) -> Result<Vec<Identity>> {
        let cannot = |error| Error::io(format!("look at the directories above {}", self.named()), error);
        let mut chain: Vec<Identity> = Vec::new();
        chain.extend(self.entry()?.map(|(_, metadata)| identity(&metadata)));
        let mut at: File = self.at.try_clone().map_err(cannot)?.into();
        let mut this = identity(&at.metadata().map_err(cannot)?);
        // Bounded: a path of the kernel has at most half as many names as bytes.
        for _ in 0..MAX_PATH_BYTES {
            chain.push(this);
            at = file::open_parent(&at).map_err(cannot)?.into();
            let above = identity(&at.metadata().map_err(cannot)?);
            if above == this {
                break;
            }
            this = above;
        }
        Ok(chain)
    }
}

/// Device and inode of a file.
pub(crate) fn identity(metadata: &Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}

fn identities(places: &[PathBuf]) -> Vec<Identity> {
    places.iter().filter_map(|place| Some(identity(&std::fs::symlink_metadata(place).ok()?))).collect()
}

/// The file behind an opened directory entry, opened for reading if it is a regular one.
///
/// # Errors
/// "not a regular file" for everything else, before anything is opened that could block or wake a device.
pub(crate) fn open_regular(at: impl AsFd, name: &OsStr, named: &str) -> Result<(File, Metadata)> {
    let cannot = |error| Error::io(format!("open {named}"), error);
    let kind =
        file::open_entry_at(&at, Path::new(name)).and_then(|entry| entry.metadata()).map_err(cannot)?;
    require_regular(&kind, named)?;
    let open = file::open_at(&at, Path::new(name)).map_err(cannot)?;
    let metadata = open.metadata().map_err(cannot)?;
    require_regular(&metadata, named)?;
    if let Some(system) = file::kernel_file_system(&open).map_err(cannot)? {
        return Err(Error::told(format!(
            "cannot open {named}: it is not a stored file but a view of the kernel ({system})"
        )));
    }
    Ok((open, metadata))
}

/// # Errors
/// A sentence that says what it is instead.
pub(crate) fn require_regular(metadata: &Metadata, named: &str) -> Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_symlink() => "a link that was put there just now; try again",
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(Error::told(format!("{named} is not a regular file but {what}")))
}

/// A real path as text for the scope algebra.
///
/// Bytes that are not UTF-8 become NUL, which no rule and no path contains: so such a name is compared with
/// what lies around it and never taken for a name in a rule.
pub(crate) fn judged_text(place: &Path) -> String {
    let mut text = String::new();
    for chunk in place.as_os_str().as_bytes().utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| '\0'));
    }
    text
}

/// Whether programs outside obey what is written at this place: git its hooks and configuration, Insomnia its
/// project manifest. In any case of letters, because some file systems do not tell them apart.
fn is_obeyed_by_others(place: &Path) -> bool {
    let mut in_git = false;
    for name in place.components().map(|component| component.as_os_str()) {
        let is = |word: &str| name.eq_ignore_ascii_case(word);
        if is(".insomnia")
            || in_git && (is("hooks") || is("config") || is("config.worktree") || is("commondir"))
        {
            return true;
        }
        in_git = in_git || is(".git");
    }
    false
}

/// The loan whose directory really is one of those above the place, whatever name led there.
fn lent_by_identity(scope: &EffectiveScope, found: &Found) -> Result<Option<Loan>> {
    if scope.lent.is_empty() {
        return Ok(None);
    }
    let chain = found.lineage()?;
    let at_depth = usize::from(found.exists); // where `at` itself stands in the chain
    let covers = |loan: &&Loan| {
        let Ok(metadata) = std::fs::symlink_metadata(loan.rule.path()) else {
            // It is gone, so nothing is it; what would become it again under another spelling is refused too.
            return is_within(&judged_text(&found.place()).to_lowercase(), &loan.rule.path().to_lowercase());
        };
        let depth = chain.iter().position(|id| *id == identity(&metadata));
        match loan.rule.reach() {
            Reach::Recursive => depth.is_some(),
            Reach::Flat => depth.is_some_and(|depth| depth <= at_depth) && found.below.len() <= 1,
        }
    };
    Ok(scope.lent.iter().find(covers).cloned())
}

fn lent(found: &Found, loan: &Loan) -> Error {
    Error::told(format!(
        "path {} is lent to pod \"{}\" (rule {}); wait for it to end or send it the change",
        found.named(),
        loan.holder,
        loan.rule
    ))
}

fn outside(scope: &EffectiveScope, found: &Found) -> Error {
    let rules = rules_in_words(&scope.allow, Rule::writes);
    Error::told(format!("cannot write {}: it is outside your write scope; {rules}", found.named()))
}

fn rules_in_words(rules: &[Rule], counts: impl Fn(&Rule) -> bool) -> String {
    const SHOWN_MAX: usize = 20;
    let all: Vec<String> = rules.iter().filter(|rule| counts(rule)).map(Rule::to_string).collect();
    match all.len() {
        0 => "you have no such scope at all".to_owned(),
        count if count > SHOWN_MAX => {
            let first: Vec<String> = all.into_iter().take(SHOWN_MAX).collect();
            format!("yours is {} and {} more", first.join(", "), count - SHOWN_MAX)
        }
        _ => format!("yours is {}", all.join(", ")),
    }
}

fn components(path: &[u8]) -> VecDeque<OsString> {
    path.split(|&byte| byte == b'/').map(|name| OsString::from_vec(name.to_vec())).collect()
}

/// The states in which the pod knows files, by real path; bounded.
#[derive(Debug, Default)]
struct Seen {
    stamps: HashMap<PathBuf, (Stamp, u64)>,
    clock: u64,
}

impl Seen {
    fn insert(&mut self, place: PathBuf, stamp: Stamp) {
        self.clock += 1;
        self.stamps.insert(place, (stamp, self.clock));
        if self.stamps.len() > MAX_SEEN {
            let mut times: Vec<u64> = self.stamps.values().map(|(_, time)| *time).collect();
            let (_, &mut middle, _) = times.select_nth_unstable(MAX_SEEN / 2);
            self.stamps.retain(|_, (_, time)| *time > middle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desk(directory: &Path) -> FileDesk {
        FileDesk::new(directory.to_owned(), vec![], vec![], true, Limits::default())
    }

    #[test]
    fn a_path_is_walked_to_where_it_really_leads() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/f"), "x").unwrap();
        std::os::unix::fs::symlink("a/b", root.join("l")).unwrap();
        std::os::unix::fs::symlink(root.join("a/f"), root.join("absolute")).unwrap();
        std::os::unix::fs::symlink("gone/x", root.join("dangling")).unwrap();
        let desk = desk(&root);
        let check = |path: &str, expected: &str, exists: bool| {
            let found = desk.find(path).unwrap();
            let there = found.exists || found.is_directory();
            assert_eq!((found.place(), there), (root.join(expected), exists), "{path}");
        };
        check("a/f", "a/f", true);
        check("l/../f", "a/f", true);
        check("absolute", "a/f", true);
        check("none/../a/f", "a/f", true);
        check("none/more/../../a//./f", "a/f", true);
        check("a/f/../f", "a/f", true);
        check("dangling", "gone/x", false);
        check("a/f/x", "a/f/x", false);
        check(&format!("/proc/self/root/{}/a/f", root.display()), "a/f", true);
        assert!(desk.find("l").unwrap().is_directory() && desk.find("a/..").unwrap().is_directory());
        assert!(
            desk.find("").is_err() && desk.find("a\0").is_err() && desk.find(&"a/".repeat(3000)).is_err()
        );
        std::os::unix::fs::symlink("loop", root.join("loop")).unwrap();
        assert!(desk.find("loop").unwrap_err().to_string().contains("more than 40 links"));
    }

    #[test]
    fn the_hidden_stays_hidden_except_what_is_shown() {
        let mut desk = desk(Path::new("/"));
        desk.hidden = vec!["/state".into(), "/state/main/results/deep".into()];
        desk.shown = vec!["/state/main/results".into()];
        assert!(desk.is_hidden(Path::new("/state"), true) && desk.is_hidden(Path::new("/state/x/y"), true));
        assert!(!desk.is_hidden(Path::new("/state-2/x"), true));
        assert!(!desk.is_hidden(Path::new("/state/main/results/1"), true));
        assert!(desk.is_hidden(Path::new("/state/main/results/1"), false));
        assert!(desk.is_hidden(Path::new("/state/main/results/deep/1"), true));
    }

    #[test]
    fn s02_names_that_other_programs_obey_are_known() {
        for obeyed in
            ["/w/.git/hooks/pre-commit", "/w/.git/config", "/w/x/.GIT/Hooks", "/w/.insomnia/manifest.json"]
        {
            assert!(is_obeyed_by_others(Path::new(obeyed)), "{obeyed}");
        }
        for free in ["/w/.gitignore", "/w/hooks/x", "/w/.git/description", "/w/config", "/w/insomnia/x"] {
            assert!(!is_obeyed_by_others(Path::new(free)), "{free}");
        }
    }

    #[test]
    fn names_that_are_not_utf8_are_never_taken_for_others() {
        let text = judged_text(Path::new(OsStr::from_bytes(b"/w/a\xffz")));
        assert_eq!(text, "/w/a\0z");
    }

    #[test]
    fn what_was_seen_last_is_remembered_longest() {
        let place = tempfile::tempdir().unwrap();
        let stamp = Stamp::of(&std::fs::metadata(place.path()).unwrap());
        let mut desk = desk(place.path());
        for number in 0..=MAX_SEEN {
            desk.remember(PathBuf::from(number.to_string()), stamp);
        }
        assert!(desk.seen.stamps.len() <= MAX_SEEN / 2 + 1);
        assert!(desk.seen.stamps.contains_key(Path::new(&MAX_SEEN.to_string())));
        assert!(!desk.seen.stamps.contains_key(Path::new("0")));
    }
}
