//! A walk over a directory tree by descriptors, for `ListFiles` and `SearchFiles`.
//!
//! Each directory is opened in the one above it and no link is followed, so the walk ends and stays below its
//! start. What git would leave out by a plain name in a `.gitignore` is left out here too; git itself is never
//! asked. Runs on the turn thread.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::sys::file::{self, EntryKind};
use crate::sys::wait::Cancel;
use crate::tools::glob::Glob;
use crate::tools::place::{FileDesk, Found, Identity, Why, identity, judged_text};
use crate::words::error::{Error, Result};
use crate::words::scope::EffectiveScope;
use crate::words::text::escape_name;

/// Directory entries looked at in one call.
const ENTRIES_MAX: usize = 200_000;
const TOO_MANY: &str = "entries were looked at, the most there can be; narrow \"path\"";
/// Directories below each other: each holds a descriptor open.
const DEPTH_MAX: usize = 64;
const TOO_DEEP: &str = "lie more than 64 directories deep and were left out";
/// A `.gitignore` is read up to here.
const IGNORE_BYTES_MAX: u64 = 64 << 10;

/// One thing that the walk came to.
pub(crate) struct Step {
    /// Its path for the model: relative to the pod's directory where it is below it, escaped.
    pub(crate) shown: String,
    /// What it is, as far as its directory says.
    pub(crate) kind: EntryKind,
    name: OsString,
}

/// What was not looked at, and how much of it.
#[derive(Default)]
pub(crate) struct Skipped {
    counts: BTreeMap<&'static str, usize>,
    directories: usize,
    examples: Vec<String>,
}

impl Skipped {
    /// Counts one more that was skipped for this reason.
    pub(crate) fn count(&mut self, why: &'static str) {
        *self.counts.entry(why).or_default() += 1;
    }

    fn directory(&mut self, shown: String) {
        self.directories += 1;
        if self.examples.len() < 5 {
            self.examples.push(shown);
        }
    }

    /// Adds a note for each reason.
    pub(crate) fn say(&self, text: &mut String) {
        if self.directories > 0 {
            let more = if self.directories > self.examples.len() { ", ..." } else { "" };
            let examples = self.examples.join(", ");
            text.push_str(&format!("[skipped {} directories: {examples}{more}]\n", self.directories));
        }
        for (why, count) in &self.counts {
            text.push_str(&format!("[{count} {why}]\n"));
        }
    }
}

/// Directories that a `.gitignore` leaves out: plain names at any depth, and whole paths.
type Ignored = HashSet<PathBuf>;

/// One directory that is being walked.
struct Level {
    directory: OwnedFd,
    real: PathBuf,
    entries: std::vec::IntoIter<(OsString, EntryKind)>,
    ignored: Rc<Ignored>,
}

/// A walk over a directory tree, names in order, links not followed.
pub(crate) struct Walk<'a> {
    desk: &'a FileDesk,
    scope: &'a EffectiveScope,
    cancel: &'a Cancel,
    glob: Option<Glob>,
    /// The real path of the pod's directory.
    home: PathBuf,
    /// The real path of the directory that the glob is relative to.
    start: PathBuf,
    levels: Vec<Level>,
    entries_left: usize,
    pub(crate) skipped: Skipped,
}

impl<'a> Walk<'a> {
    /// A walk that starts at a directory, or comes to the one file only.
    ///
    /// # Errors
    /// When nothing is there, it may not be read, or it is neither a directory nor a regular file.
    pub(crate) fn start(
        desk: &'a FileDesk,
        scope: &'a EffectiveScope,
        found: &Found,
        glob: Option<Glob>,
        cancel: &'a Cancel,
    ) -> Result<Walk<'a>, Why> {
        desk.judge_read(scope, found)?;
        found.refuse_kernel_view()?;
        let home = file::real_path(file::open_place(&desk.directory)?)?;
        let ignored = Rc::new(ignored_above(found, &home)?);
        let (start, levels, skipped) = (found.real.clone(), Vec::new(), Skipped::default());
        let mut walk =
            Walk { desk, scope, cancel, glob, home, start, levels, entries_left: ENTRIES_MAX, skipped };
        if found.is_directory() {
            walk.enter(file::open_directory_at(&found.at, Path::new("."))?, ignored)?;
        } else {
            found.file()?.ok_or("there is no file or directory")?;
            let entries: Vec<_> = found.below.iter().map(|name| (name.clone(), EntryKind::File)).collect();
            let (directory, real) = (found.at.try_clone()?, found.real.clone());
            walk.levels.push(Level { directory, real, entries: entries.into_iter(), ignored });
        }
        Ok(walk)
    }

    /// The next file, link or other thing that matches; directories only if they are empty.
    ///
    /// # Errors
    /// `Cancelled`.
    pub(crate) fn next(&mut self) -> Result<Option<Step>> {
        while let Some(level) = self.levels.last_mut() {
            if self.cancel.is_set() {
                return Err(Error::Cancelled);
            }
            let Some((name, kind)) = level.entries.next() else {
                self.levels.pop();
                continue;
            };
            if self.entries_left == 0 {
                self.skipped.counts.insert(TOO_MANY, ENTRIES_MAX);
                return Ok(None);
            }
            self.entries_left -= 1;
            let real = level.real.join(&name);
            let is_ignored =
                name == ".git" || level.ignored.contains(Path::new(&name)) || level.ignored.contains(&real);
            if !self.may_show(&real, None) {
                continue;
            }
            if kind != EntryKind::Directory {
                if self.matches(&real) {
                    return Ok(Some(Step { shown: self.shown(&real), kind, name }));
                }
            } else if is_ignored {
                self.skipped.directory(self.shown(&real));
            } else if self.levels.len() >= DEPTH_MAX {
                self.skipped.count(TOO_DEEP);
            } else if self.descend(&name) && self.matches(&real) {
                return Ok(Some(Step { shown: format!("{}/", self.shown(&real)), kind, name }));
            }
        }
        Ok(None)
    }

    /// Opens the file that the walk has just come to; `None` if it is none any more, or may not be read.
    ///
    /// # Errors
    /// As openat(2).
    pub(crate) fn open(&self, step: &Step) -> io::Result<Option<File>> {
        let Some(level) = self.levels.last().filter(|_| step.kind == EntryKind::File) else {
            return Ok(None);
        };
        // The kind is what the directory said; what has the name now is looked at before it is opened for real.
        let entry = file::open_entry_at(&level.directory, Path::new(&step.name))?;
        let metadata = entry.metadata()?;
        let is_readable = self.may_show(&level.real.join(&step.name), Some(identity(&metadata)));
        if metadata.is_file() && is_readable { file::reopen(&entry).map(Some) } else { Ok(None) }
    }

    /// Goes into a directory; whether it is one that may be read, and empty.
    fn descend(&mut self, name: &OsStr) -> bool {
        let Some(level) = self.levels.last() else { return false };
        let ignored = level.ignored.clone();
        let entered = file::open_directory_at(&level.directory, Path::new(name))
            .and_then(|directory| self.enter(directory, ignored));
        if let Err(error) = &entered {
            log::debug!("cannot list a directory: {error}"); // counted, and said at the end
            self.skipped.count("could not be opened");
        }
        entered.is_ok_and(|is_empty| is_empty)
    }

    /// Adds a level for an opened directory, unless it may not be read; whether there is nothing in it.
    fn enter(&mut self, directory: OwnedFd, mut ignored: Rc<Ignored>) -> io::Result<bool> {
        let open = File::from(directory.try_clone()?);
        let real = file::real_path(&directory)?;
        let is_view = file::kernel_file_system(&directory)?.is_some();
        if is_view || !self.may_show(&real, Some(identity(&open.metadata()?))) {
            return Ok(false);
        }
        // One more than may be looked at, so that the walk notices the end of its allowance.
        let entries = file::first_entries(directory.try_clone()?, self.entries_left + 1)?;
        if entries.iter().any(|(name, _)| name == ".gitignore") {
            read_ignored(&directory, &real, Rc::make_mut(&mut ignored));
        }
        let is_empty = entries.is_empty();
        self.levels.push(Level { directory, real, entries: entries.into_iter(), ignored });
        Ok(is_empty)
    }

    /// Whether a real path, which really is this, is neither hidden nor outside the read scope.
    fn may_show(&self, real: &Path, this: Option<Identity>) -> bool {
        let lineage: Vec<_> = this.into_iter().map(Some).collect();
        !self.desk.is_hidden(real, &lineage, true) && self.scope.may_read(&judged_text(real))
    }

    fn matches(&self, real: &Path) -> bool {
        let below = real.strip_prefix(&self.start).unwrap_or(real);
        self.glob.as_ref().is_none_or(|glob| glob.matches(below.as_os_str().as_bytes()))
    }

    fn shown(&self, real: &Path) -> String {
        escape_name(real.strip_prefix(&self.home).unwrap_or(real).as_os_str().as_bytes())
    }
}

/// What the `.gitignore` files between the pod's directory and the start of a walk leave out.
fn ignored_above(found: &Found, home: &Path) -> io::Result<Ignored> {
    let mut ignored = Ignored::new();
    let mut at = found.at.try_clone()?;
    for above in found.real.ancestors().skip(1).take_while(|above| above.starts_with(home)) {
        at = file::open_parent(&at)?;
        read_ignored(&at, above, &mut ignored);
    }
    Ok(ignored)
}

/// Adds the plain names of a `.gitignore`, to which git would add all below.
///
/// Patterns are left to git; a name that a later line takes back is not left out.
fn read_ignored(directory: &OwnedFd, real: &Path, ignored: &mut Ignored) {
    let Ok(open) = file::open_at(directory, Path::new(".gitignore")) else { return };
    let is_file = open.metadata().is_ok_and(|metadata| metadata.is_file());
    let mut text = Vec::new();
    if !is_file || open.take(IGNORE_BYTES_MAX).read_to_end(&mut text).is_err() {
        return;
    }
    for line in text.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii_end) {
        let name = line.strip_prefix(b"!").unwrap_or(line);
        let name = name.strip_suffix(b"/").unwrap_or(name);
        let plain = name.strip_prefix(b"/").unwrap_or(name);
        if plain.is_empty() || plain.starts_with(b"#") || plain.iter().any(|byte| b"/*?[\\".contains(byte)) {
            continue;
        }
        let anywhere = Path::new(OsStr::from_bytes(plain));
        let here = real.join(anywhere);
        if line.starts_with(b"!") {
            ignored.remove(anywhere);
            ignored.remove(&here);
        } else {
            ignored.insert(if name == plain { anywhere.to_owned() } else { here });
        }
    }
}
