//! Where a path leads, and whether a file tool may go there.
//!
//! A path is walked once, directory by directory, into open descriptors. What is judged is the kernel's own path
//! of them, and all work goes on relative to them; no name is looked up a second time. So a link swapped in
//! between is never followed unjudged. Runs on the turn thread.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::sys::file::{self, Stamp};
use crate::sys::wait::Cancel;
use crate::words::error::{Error, Result};
use crate::words::scope::{EffectiveScope, Loan, Reach, Rule, Verdict};
use crate::words::text::{cut_end, escape_name, unescape_name};

/// Links followed in one path; the kernel's own bound. Source: path_resolution(7).
const MAX_LINKS: usize = 40;
/// The longest path in bytes. Source: `PATH_MAX` in limits.h.
const MAX_PATH_BYTES: usize = 4095;
/// Files whose state is remembered; one more, and all others are forgotten.
const MAX_SEEN: usize = 16_384;

const HIDDEN: &str = "it belongs to Insomnia itself, which file tools keep away from";
const PROTECTED: &str = "git hooks, git configuration and .insomnia are protected, because programs outside obey them; ask the person to change it";

/// Why something cannot be done with a place; `Found::attempt` says with which.
pub(crate) type Why = Box<dyn std::error::Error>;

/// What tells one file or directory from every other: device and inode.
pub(crate) type Identity = (u64, u64);

/// The file tools of one pod: where they work, what they keep away from, and which files they have seen.
#[derive(Debug, Default)]
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
    /// The bytes of a page.
    pub page_bytes_max: usize,
    /// The files that the pod knows, each in the state in which it does; none at first.
    pub seen: HashMap<PathBuf, Stamp>,
}

/// One call of a file tool.
#[derive(Debug)]
pub struct FileCall<'a> {
    /// The desk that it is done at.
    pub desk: &'a mut FileDesk,
    /// What the pod may do now.
    pub scope: EffectiveScope,
    /// What ends it early.
    pub cancel: &'a Cancel,
}

impl FileDesk {
    /// Finds where `path` leads: the name as it is, or else the name that `escape_name` has shown like this.
    pub(crate) fn find(&self, path: &str) -> Result<Found> {
        let asked = escape_name(path.as_bytes());
        let cannot = |why| Error::told(format!("cannot follow path \"{}\": {why}", cut_end(&asked, 100)));
        let literal = self.walk(&asked, path.as_bytes());
        if !path.contains("\\x") {
            return literal.map_err(cannot);
        }
        match (literal, self.walk(&asked, &unescape_name(path))) {
            (Ok(literal), Ok(other)) if literal.missing() <= other.missing() => Ok(literal),
            (_, Ok(other)) => Ok(other),
            (literal, Err(_)) => literal.map_err(cannot),
        }
    }

    /// Walks a path into the deepest directory that exists.
    ///
    /// A `..` behind a name that does not exist takes that name away again; everywhere else it is the
    /// directory above the one really reached. Links are read and walked as text, the magic ones of `/proc` too,
    /// so that each ends at a descriptor which is judged like any other.
    fn walk(&self, asked: &str, path: &[u8]) -> Result<Found, Why> {
        match path {
            b"" => return Err("the path is empty; name a file or directory".into()),
            _ if path.contains(&0) => return Err("no name can contain a NUL byte".into()),
            _ if path.len() > MAX_PATH_BYTES => return Err("it is longer than the system takes".into()),
            _ => {}
        }
        let start = if path.starts_with(b"/") { Path::new("/") } else { self.directory.as_path() };
        let mut at = file::open_place(start)?;
        let mut rest = components_backwards(path);
        let (mut below, mut entry) = (Vec::new(), None);
        let mut ends_as_directory = false;
        let mut links = 0;
        while let Some(name) = rest.pop() {
            ends_as_directory = matches!(name.as_bytes(), b"" | b"." | b"..");
            if matches!(name.as_bytes(), b"" | b".") {
                continue;
            }
            entry = None;
            if name == ".." {
                if below.pop().is_none() {
                    at = file::open_parent(&at)?;
                }
                continue;
            }
            if !below.is_empty() {
                below.push(name); // of what does not exist nothing is looked at
                continue;
            }
            let opened = match file::open_entry_at(&at, Path::new(&name)) {
                Ok(opened) => opened,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    below.push(name);
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let metadata = opened.metadata()?;
            if metadata.is_dir() {
                at = opened.into();
            } else if !metadata.is_symlink() {
                below.push(name);
                entry = Some((opened, metadata));
            } else if links == MAX_LINKS {
                return Err(format!("it goes through more than {MAX_LINKS} links").into());
            } else {
                links += 1;
                let target = file::link_target(&opened)?;
                if target.is_absolute() {
                    at = file::open_place(Path::new("/"))?;
                }
                rest.extend(components_backwards(target.as_os_str().as_bytes()));
            }
        }
        let real = file::real_path(&at)?;
        if !real.is_absolute() {
            return Err("it leads out of the visible file system".into());
        }
        Ok(Found { asked: asked.to_owned(), at, real, below, entry, ends_as_directory })
    }

    /// Whether the nearest of Insomnia's own places around a real path is a hidden one; shown ones count if
    /// `reading`. `lineage` is what the path and the directories above really are, as far as that matters.
    pub(crate) fn is_hidden(&self, place: &Path, lineage: &[Option<Identity>], reading: bool) -> bool {
        let nearest = |own: &[PathBuf]| own.iter().filter_map(|own| depth_below(own, place, lineage)).min();
        let shown = if reading { nearest(&self.shown) } else { None };
        nearest(&self.hidden).is_some_and(|hidden| shown.is_none_or(|shown| hidden < shown))
    }

    /// Remembers the state in which the pod knows the file.
    pub(crate) fn remember(&mut self, place: PathBuf, stamp: Stamp) {
        if self.seen.len() >= MAX_SEEN {
            self.seen.clear();
        }
        self.seen.insert(place, stamp);
    }

    /// Whether the pod knows the file in another state than this.
    pub(crate) fn has_changed(&self, place: &Path, now: &Stamp) -> bool {
        self.seen.get(place).is_some_and(|known| known != now)
    }
}

impl FileCall<'_> {
    /// # Errors
    /// When the turn was cancelled.
    pub(crate) fn go_on(&self) -> Result<(), Why> {
        if self.cancel.is_set() { Err(Error::Cancelled.into()) } else { Ok(()) }
    }

    /// Whether the place may be read; nothing has been read yet.
    pub(crate) fn judge_read(&self, found: &Found) -> Result<(), Why> {
        let place = found.place();
        if self.desk.is_hidden(&place, &found.lineage()?, true) {
            return Err(HIDDEN.into());
        }
        if self.scope.may_read(&judged_text(&place)) {
            Ok(())
        } else {
            Err(outside("read", self.scope.allow.iter()))
        }
    }

    /// Whether the place and every directory that has to be created for it may be written; nothing has been
    /// changed yet.
    pub(crate) fn judge_write(&self, found: &Found) -> Result<(), Why> {
        let (place, lineage) = (found.place(), found.lineage()?);
        for changed in place.ancestors().take(found.below.len().max(1)) {
            match self.scope.judge_write(&judged_text(changed)) {
                Verdict::Allowed => {}
                Verdict::Lent(loan) => return Err(lent(&loan)),
                Verdict::Outside => {
                    return Err(outside("write", self.scope.allow.iter().filter(|rule| rule.writes())));
                }
            }
        }
        if self.desk.is_hidden(&place, &lineage, false) {
            return Err(HIDDEN.into());
        }
        if self.desk.protect_git && is_obeyed_by_others(&place) {
            return Err(PROTECTED.into());
        }
        let holds = |loan: &&Loan| {
            let depth = depth_below(Path::new(loan.rule.path()), &place, &lineage);
            depth.is_some_and(|depth| loan.rule.reach() == Reach::Recursive || depth <= 1)
        };
        self.scope.lent.iter().find(holds).map_or(Ok(()), |loan| Err(lent(loan)))
    }

    /// Whether a real path, which really is `this`, is neither hidden nor outside the read self.scope.
    pub(crate) fn may_list(&self, place: &Path, this: Option<Identity>) -> bool {
        !self.desk.is_hidden(place, this.map(Some).as_slice(), true)
            && self.scope.may_read(&judged_text(place))
    }
}

/// Where a path leads, as far as it exists, held by descriptors.
#[derive(Debug)]
pub(crate) struct Found {
    /// The path as asked, escaped.
    asked: String,
    /// The deepest directory that exists on the way, as a place.
    pub(crate) at: OwnedFd,
    /// The kernel's path of it.
    pub(crate) real: PathBuf,
    /// The names below it: none for a directory that exists, one for a file, more if directories are missing.
    pub(crate) below: Vec<OsString>,
    /// What has the one name below, neither a directory nor a link, as a place; `None` if nothing has.
    entry: Option<(File, Metadata)>,
    /// Whether the path is written like one of a directory: it ends in `/`, `.` or `..`.
    ends_as_directory: bool,
}

impl Found {
    /// The real path of the whole.
    pub(crate) fn place(&self) -> PathBuf {
        self.below.iter().fold(self.real.clone(), |place, name| place.join(name))
    }

    /// Whether it is a directory that exists.
    pub(crate) fn is_directory(&self) -> bool {
        self.below.is_empty()
    }

    /// How answers and errors call it: as asked, and where that really is if links or `..` led elsewhere.
    pub(crate) fn named(&self) -> String {
        let place = escape_name(self.place().as_os_str().as_bytes());
        let is_as_asked = place == self.asked || place.ends_with(&format!("/{}", self.asked));
        let really = if is_as_asked { String::new() } else { format!(" (really \"{place}\")") };
        format!("\"{}\"{really}", self.asked)
    }

    /// Does something with the place; the error says what could not be done with which, and why.
    pub(crate) fn attempt<T>(&self, verb: &str, act: impl FnOnce() -> Result<T, Why>) -> Result<T> {
        act().map_err(|why| match why.downcast::<Error>() {
            Ok(error) => *error, // it says everything already
            Err(why) => Error::told(format!("cannot {verb} {}: {why}", self.named())),
        })
    }

    /// What is at the place of a file, as a place only, `None` if nothing is.
    ///
    /// # Errors
    /// "not a regular file" for everything else, before anything is opened that could block or wake a device.
    pub(crate) fn file(&self) -> Result<Option<&(File, Metadata)>, Why> {
        match &self.entry {
            _ if self.is_directory() || self.ends_as_directory => {
                Err("it is not a regular file but a directory".into())
            }
            Some((_, metadata)) if !metadata.is_file() => {
                Err("it is not a regular file but a pipe, socket or device".into())
            }
            entry => Ok(entry.as_ref()),
        }
    }

    /// Opens the file at the place for reading: the one that was judged, whatever has its name now.
    ///
    /// # Errors
    /// As `file`; also when nothing is there, or only a view of the kernel.
    pub(crate) fn open(&self) -> Result<(File, &Metadata), Why> {
        let (entry, metadata) = self.file()?.ok_or("there is no file; ListFiles shows what is there")?;
        self.refuse_kernel_view()?;
        Ok((file::reopen(entry)?, metadata))
    }

    /// # Errors
    /// When it lies in a file system that stores nothing.
    pub(crate) fn refuse_kernel_view(&self) -> Result<(), Why> {
        let this = self.entry.as_ref().map_or(self.at.as_fd(), |(entry, _)| entry.as_fd());
        if file::is_kernel_view(this)? {
            Err("it is not stored but a view of the kernel".into())
        } else {
            Ok(())
        }
    }

    /// How many names do not exist.
    fn missing(&self) -> usize {
        self.below.len() - usize::from(self.entry.is_some())
    }

    /// What the place and the directories above it really are, up to the root; `None` for what does not exist.
    fn lineage(&self) -> io::Result<Vec<Option<Identity>>> {
        let mut lineage = match &self.entry {
            Some((_, metadata)) => vec![Some(identity(metadata))],
            None => vec![None; self.below.len()],
        };
        let mut at = File::from(self.at.try_clone()?);
        for _ in self.real.components() {
            lineage.push(Some(identity(&at.metadata()?)));
            at = file::open_parent(&at)?.into();
        }
        Ok(lineage)
    }
}

fn lent(loan: &Loan) -> Why {
    format!(
        "it is lent to pod \"{}\" (rule {}); wait for it to end or send it the change",
        loan.holder, loan.rule
    )
    .into()
}

fn outside<'a>(verb: &str, rules: impl Iterator<Item = &'a Rule>) -> Why {
    let rules = rules.map(Rule::to_string).collect::<Vec<_>>().join(", ");
    let yours = if rules.is_empty() { "you have no such scope at all" } else { "yours is " };
    format!("it is outside your {verb} scope; {yours}{}", cut_end(&rules, 2000)).into()
}

/// Device and inode of a file.
pub(crate) fn identity(metadata: &Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}

/// How many names below `directory` a real path lies; `None` if it does not.
///
/// Judged by its names, and by what the directories on the way really are, so that neither another spelling on a
/// case-insensitive file system nor a bind mount leads around it.
fn depth_below(directory: &Path, place: &Path, lineage: &[Option<Identity>]) -> Option<usize> {
    if let Ok(rest) = place.strip_prefix(directory) {
        return Some(rest.components().count());
    }
    if lineage.is_empty() {
        return None;
    }
    if let Ok(metadata) = std::fs::symlink_metadata(directory) {
        return lineage.iter().position(|one| *one == Some(identity(&metadata)));
    }
    // It is gone, so nothing is it; what would become it again under another spelling counts too.
    let lower = |path: &Path| PathBuf::from(judged_text(path).to_lowercase());
    lower(place).strip_prefix(lower(directory)).ok().map(|rest| rest.components().count())
}

/// A real path as text for the scope algebra.
///
/// Bytes that are not UTF-8 become NUL, which no rule and no path contains: so such a name is compared with
/// what lies around it and never taken for a name in a rule.
pub(crate) fn judged_text(place: &Path) -> String {
    let chunks = place.as_os_str().as_bytes().utf8_chunks();
    chunks.fold(String::new(), |text, chunk| text + chunk.valid() + &"\0".repeat(chunk.invalid().len()))
}

/// Whether programs outside obey what is written at this place: git its hooks and configuration and the file that
/// leads there, Insomnia its project manifest. In any case of letters, because some file systems do not tell them apart.
fn is_obeyed_by_others(place: &Path) -> bool {
    // In a linked work tree or a submodule `.git` is a file that leads git to all of these.
    if place.file_name().is_some_and(|name| name.eq_ignore_ascii_case(".git")) {
        return true;
    }
    let mut in_git = false;
    place.iter().any(|name| {
        let is = |word: &str| name.eq_ignore_ascii_case(word);
        let is_setting = ["hooks", "config", "config.worktree", "commondir"].into_iter().any(is);
        let is_obeyed = is(".insomnia") || in_git && is_setting;
        in_git |= is(".git");
        is_obeyed
    })
}

/// The names of a path, the last one first.
fn components_backwards(path: &[u8]) -> Vec<OsString> {
    path.rsplit(|&byte| byte == b'/').map(|name| OsString::from_vec(name.to_vec())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desk(directory: &Path) -> FileDesk {
        FileDesk { directory: directory.to_owned(), protect_git: true, ..FileDesk::default() }
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
            let there = found.missing() == 0;
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
        assert!(
            desk.is_hidden(Path::new("/state"), &[], true)
                && desk.is_hidden(Path::new("/state/x/y"), &[], true)
        );
        assert!(!desk.is_hidden(Path::new("/state-2/x"), &[], true));
        assert!(!desk.is_hidden(Path::new("/state/main/results/1"), &[], true));
        assert!(desk.is_hidden(Path::new("/state/main/results/1"), &[], false));
        assert!(desk.is_hidden(Path::new("/state/main/results/deep/1"), &[], true));
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
        let text = judged_text(Path::new(std::ffi::OsStr::from_bytes(b"/w/a\xffz")));
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
        assert!(desk.seen.len() <= MAX_SEEN / 2 + 1);
        assert!(desk.seen.contains_key(Path::new(&MAX_SEEN.to_string())));
        assert!(!desk.seen.contains_key(Path::new("0")));
    }
}
