//! A walk over a directory tree by descriptors, for `ListFiles` and `SearchFiles`.
//!
//! Each directory is opened in the one above it and no link is followed, so the walk ends and stays below its
//! start. What git would leave out by a plain name in a `.gitignore` is left out here too; git itself is never
//! asked. Runs on the turn thread.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::sys::file::{self, EntryKind};
use crate::sys::wait::Cancel;
use crate::tools::glob::Glob;
use crate::tools::place::{FileDesk, Found, Identity, identity, judged_text, require_regular};
use crate::words::error::{Error, Result};
use crate::words::scope::EffectiveScope;
use crate::words::text::escape_name;

/// Directory entries looked at in one call.
const ENTRIES_MAX: usize = 200_000;
/// Directories below each other: each holds a descriptor open.
const DEPTH_MAX: usize = 64;
/// A `.gitignore` is read up to here.
const IGNORE_BYTES_MAX: u64 = 64 << 10;
/// Larger files are not searched.
pub(crate) const SEARCH_BYTES_MAX: u64 = 16 << 20;

/// One thing that the walk came to.
pub(crate) struct Step {
    /// Its path for the model: relative to the pod's directory where it is below it, escaped.
    pub(crate) shown: String,
    /// What it is, as far as its directory says.
    pub(crate) kind: EntryKind,
    /// The open directory that holds it.
    pub(crate) directory: Rc<OwnedFd>,
    /// Its name in there.
    pub(crate) name: OsString,
}

/// What was not looked at, and how much of it.
#[derive(Default)]
pub(crate) struct Skipped {
    directories: usize,
    examples: Vec<String>,
    pub(crate) unreadable: usize,
    too_deep: usize,
    pub(crate) too_large: usize,
    pub(crate) binary: usize,
    out_of_entries: bool,
}

impl Skipped {
    fn directory(&mut self, shown: &str) {
        self.directories += 1;
        if self.examples.len() < 5 {
            self.examples.push(shown.to_owned());
        }
    }

    /// Adds a note for each.
    pub(crate) fn say(&self, text: &mut String) {
        let mut note = |sentence: String| text.push_str(&format!("[{sentence}]\n"));
        if self.directories > 0 {
            let more = if self.directories > self.examples.len() { ", ..." } else { "" };
            note(format!("skipped {} directories: {}{more}", self.directories, self.examples.join(", ")));
        }
        for (count, what) in [
            (self.unreadable, "could not be opened".to_owned()),
            (self.too_deep, format!("lie more than {DEPTH_MAX} directories deep and were left out")),
            (self.too_large, format!("files over {} MiB were not searched", SEARCH_BYTES_MAX >> 20)),
            (self.binary, "binary files were not searched".to_owned()),
        ] {
            if count > 0 {
                note(format!("{count} {what}"));
            }
        }
        if self.out_of_entries {
            note(format!("stopped after {ENTRIES_MAX} entries; narrow \"path\""));
        }
    }
}

/// One directory that is being walked.
struct Level {
    directory: Rc<OwnedFd>,
    device: u64,
    real: PathBuf,
    /// Its path below the start.
    below: PathBuf,
    entries: std::vec::IntoIter<(OsString, EntryKind)>,
    ignored: Rc<Ignored>,
    ignored_here: HashSet<Vec<u8>>,
}

/// Names of directories that a `.gitignore` above leaves out at any depth.
type Ignored = HashSet<Vec<u8>>;

/// A walk over a directory tree, names in order, links not followed.
pub(crate) struct Walk<'a> {
    desk: &'a FileDesk,
    scope: &'a EffectiveScope,
    cancel: &'a Cancel,
    glob: Option<Glob>,
    hidden: Vec<Identity>,
    /// What stands before a path below the start when it is shown.
    prefix: PathBuf,
    levels: Vec<Level>,
    single: Option<Step>,
    entries_left: usize,
    pub(crate) skipped: Skipped,
}

impl<'a> Walk<'a> {
    /// A walk that starts at a directory, or is over after the one file.
    ///
    /// # Errors
    /// When nothing is there, it may not be read, or it is neither a directory nor a regular file.
    pub(crate) fn start(
        desk: &'a FileDesk,
        scope: &'a EffectiveScope,
        found: &Found,
        glob: Option<Glob>,
        cancel: &'a Cancel,
    ) -> Result<Walk<'a>> {
        desk.judge_read(scope, found)?;
        let cannot = |error| Error::io(format!("list {}", found.named()), error);
        let home = file::open_place(&desk.directory).and_then(file::real_path).map_err(cannot)?;
        let place = found.place();
        let mut walk = Walk {
            desk,
            scope,
            cancel,
            glob,
            hidden: desk.hidden_identities(),
            prefix: place.strip_prefix(&home).unwrap_or(&place).to_owned(),
            levels: Vec::new(),
            single: None,
            entries_left: ENTRIES_MAX,
            skipped: Skipped::default(),
        };
        if !found.is_directory() {
            let Some((_, metadata)) = found.entry()?.filter(|_| !found.ends_as_directory) else {
                return Err(Error::told(format!(
                    "there is no file or directory {}; ListFiles shows what is there",
                    found.named()
                )));
            };
            require_regular(&metadata, &found.named())?;
            let directory = Rc::new(found.at.try_clone().map_err(cannot)?);
            let name = found.below.first().cloned().unwrap_or_default();
            let shown = walk.shown(Path::new(""));
            walk.single = Some(Step { shown, kind: EntryKind::File, directory, name });
            return Ok(walk);
        }
        if let Some(system) = file::kernel_file_system(&found.at).map_err(cannot)? {
            return Err(Error::told(format!(
                "cannot list {}: it is not stored but a view of the kernel ({system})",
                found.named()
            )));
        }
        let ignored = ignored_above(found, &home);
        let directory = file::open_directory_at(&found.at, Path::new(".")).map_err(cannot)?;
        walk.enter(directory, PathBuf::new(), &Rc::new(ignored)).map_err(cannot)?;
        Ok(walk)
    }

    /// The next file, link or other thing that matches; directories only if they are empty.
    ///
    /// # Errors
    /// `Cancelled`.
    pub(crate) fn next(&mut self) -> Result<Option<Step>> {
        if let Some(single) = self.single.take() {
            return Ok(Some(single));
        }
        loop {
            if self.cancel.is_set() {
                return Err(Error::Cancelled);
            }
            let Some(level) = self.levels.last_mut() else { return Ok(None) };
            let Some((name, kind)) = level.entries.next() else {
                self.levels.pop();
                continue;
            };
            if self.entries_left == 0 {
                self.skipped.out_of_entries = true;
                return Ok(None);
            }
            self.entries_left -= 1;
            let below = level.below.join(&name);
            let real = level.real.join(&name);
            let (directory, device) = (level.directory.clone(), level.device);
            let is_ignored = name == ".git"
                || level.ignored.contains(name.as_bytes())
                || level.ignored_here.contains(name.as_bytes());
            let ignored = level.ignored.clone();
            if self.desk.is_hidden(&real, true) || !self.may_read(&real) {
                continue;
            }
            if kind == EntryKind::Directory {
                if is_ignored {
                    let shown = self.shown(&below);
                    self.skipped.directory(&shown);
                    continue;
                }
                if let Some(step) = self.descend(&directory, device, name, below, &ignored) {
                    return Ok(Some(step));
                }
            } else if self.matches(&below) {
                return Ok(Some(Step { shown: self.shown(&below), kind, directory, name }));
            }
        }
    }

    /// Goes into a directory; an empty one is a step of its own.
    fn descend(
        &mut self,
        above: &Rc<OwnedFd>,
        device: u64,
        name: OsString,
        below: PathBuf,
        ignored: &Rc<Ignored>,
    ) -> Option<Step> {
        if self.levels.len() >= DEPTH_MAX {
            self.skipped.too_deep += 1;
            return None;
        }
        let entered = file::open_directory_at(above.as_ref(), Path::new(&name)).and_then(|directory| {
            let open = File::from(directory);
            let metadata = open.metadata()?;
            let real = file::real_path(&open)?;
            let is_view = metadata.dev() != device && file::kernel_file_system(&open)?.is_some();
            if is_view || self.hidden.contains(&identity(&metadata)) || self.desk.is_hidden(&real, true) {
                return Ok(false);
            }
            if !self.may_read(&real) {
                return Ok(false);
            }
            self.enter(open.into(), below.clone(), ignored)?;
            Ok(true)
        });
        match entered {
            Ok(true) => {
                let is_empty = self.levels.last().is_some_and(|level| level.entries.len() == 0);
                let shown = format!("{}/", self.shown(&below));
                (is_empty && self.matches(&below)).then(|| Step {
                    shown,
                    kind: EntryKind::Directory,
                    directory: above.clone(),
                    name,
                })
            }
            Ok(false) => None,
            Err(error) => {
                log::debug!("cannot list a directory: {error}"); // counted, and said at the end
                self.skipped.unreadable += 1;
                None
            }
        }
    }

    fn enter(&mut self, directory: OwnedFd, below: PathBuf, ignored: &Rc<Ignored>) -> io::Result<()> {
        let open = File::from(directory.try_clone()?);
        let device = open.metadata()?.dev();
        let real = file::real_path(&open)?;
        // One more than may be looked at, so that the walk notices the end of its allowance.
        let entries = file::first_entries(directory.try_clone()?, self.entries_left + 1)?;
        let mut ignored = ignored.clone();
        let mut ignored_here = HashSet::new();
        if entries.iter().any(|(name, _)| name == ".gitignore") {
            read_ignored(&directory, Rc::make_mut(&mut ignored), &mut ignored_here);
        }
        let (directory, entries) = (Rc::new(directory), entries.into_iter());
        self.levels.push(Level { directory, device, real, below, entries, ignored, ignored_here });
        Ok(())
    }

    fn may_read(&self, real: &Path) -> bool {
        self.scope.reads_everywhere() || self.scope.may_read(&judged_text(real))
    }

    fn matches(&self, below: &Path) -> bool {
        self.glob.as_ref().is_none_or(|glob| glob.matches(below.as_os_str().as_bytes()))
    }

    fn shown(&self, below: &Path) -> String {
        let path = if below.as_os_str().is_empty() { self.prefix.clone() } else { self.prefix.join(below) };
        escape_name(path.as_os_str().as_bytes())
    }
}

/// Names that the `.gitignore` files between the pod's directory and the start of a walk leave out at any depth.
fn ignored_above(found: &Found, home: &Path) -> Ignored {
    let mut ignored = Ignored::new();
    let Ok(below) = found.real.strip_prefix(home) else { return ignored };
    let mut at: OwnedFd = match found.at.try_clone() {
        Ok(at) => at,
        Err(_) => return ignored, // no descriptor left: the walk will say so
    };
    for _ in below.components().take(DEPTH_MAX) {
        let Ok(above) = file::open_parent(&at) else { break };
        read_ignored(&above, &mut ignored, &mut HashSet::new());
        at = above;
    }
    ignored
}

/// Adds the plain names of a `.gitignore`: those that hold at any depth, and those of this directory only.
///
/// Patterns are left to git; a name that a later line takes back is not left out.
fn read_ignored(directory: impl AsFd, everywhere: &mut Ignored, here: &mut HashSet<Vec<u8>>) {
    let Ok(open) = file::open_at(&directory, Path::new(".gitignore")) else { return };
    let is_file = open.metadata().is_ok_and(|metadata| metadata.is_file());
    let mut text = Vec::new();
    let mut start = io::Read::take(open, IGNORE_BYTES_MAX);
    if !is_file || io::Read::read_to_end(&mut start, &mut text).is_err() {
        return;
    }
    for line in text.split(|&byte| byte == b'\n') {
        let line = line.trim_ascii_end();
        let (line, taken_back) = match line.strip_prefix(b"!") {
            Some(line) => (line, true),
            None => (line, false),
        };
        let name = line.strip_suffix(b"/").unwrap_or(line);
        let (name, only_here) = match name.strip_prefix(b"/") {
            Some(name) => (name, true),
            None => (name, false),
        };
        let is_plain = !name.is_empty()
            && !name.starts_with(b"#")
            && !name.iter().any(|byte| b"/*?[\\".contains(byte))
            && name != b"."
            && name != b"..";
        match (is_plain, taken_back, only_here) {
            (false, _, _) => {}
            (true, true, _) => {
                everywhere.remove(name);
                here.remove(name);
            }
            (true, false, true) => {
                here.insert(name.to_owned());
            }
            (true, false, false) => {
                everywhere.insert(name.to_owned());
            }
        }
    }
}
