//! A walk over a directory tree by descriptors, for `ListFiles` and `SearchFiles`.
//!
//! Each directory is opened in the one above it and no link is followed, so the walk ends and stays below its
//! start. What git would leave out by a plain name in a `.gitignore` is left out here too; git itself is never
//! asked. Runs on the turn thread.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::sys::file::{self, EntryKind};
use crate::tools::glob::Glob;
use crate::tools::place::{FileCall, Found, Why, identity};
use crate::words::text::escape_name;

/// Directory entries looked at in one call.
const ENTRIES_MAX: usize = 200_000;
const TOO_MANY: &str = "entries were looked at, the most there can be; narrow \"path\"";
/// Directories below each other: each holds a descriptor open.
const DEPTH_MAX: usize = 64;
const TOO_DEEP: &str = "directories lie too deep";
/// A `.gitignore` is read up to here.
const IGNORE_BYTES_MAX: u64 = 64 << 10;

/// Why something is skipped that the system did not let us open.
pub(crate) const UNREADABLE: &str = "could not be opened";

/// One file, link or other thing that the walk came to; directories only if they are empty.
pub(crate) struct Step<'a> {
    /// Its path for the model: relative to the pod's directory where it is below it, escaped.
    pub(crate) shown: String,
    /// What it is, as far as its directory says.
    kind: EntryKind,
    directory: &'a OwnedFd,
    place: &'a Path,
}

impl Step<'_> {
    /// Opens it for reading if it is still a regular file that may be read.
    ///
    /// # Errors
    /// As openat(2).
    pub(crate) fn open(&self, call: &FileCall<'_>) -> io::Result<Option<File>> {
        if self.kind != EntryKind::File {
            return Ok(None);
        }
        // The kind is what the directory said; what has the name now is looked at before it is opened for real.
        let entry =
            file::open_entry_at(self.directory, Path::new(self.place.file_name().unwrap_or_default()))?;
        let metadata = entry.metadata()?;
        let may_read = call.may_list(self.place, Some(identity(&metadata)));
        if metadata.is_file() && may_read { file::reopen(&entry).map(Some) } else { Ok(None) }
    }
}

/// Takes in one step, and says whether to go on.
pub(crate) type Each<'a> = dyn FnMut(Step<'_>, &mut Skipped) -> Result<bool, Why> + 'a;

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

type Entries = Vec<(OsString, EntryKind)>;
/// Directories that a `.gitignore` leaves out: plain names at any depth, and whole paths.
type Ignored = HashSet<PathBuf>;

/// A walk over a directory tree, names in order, links not followed.
pub(crate) struct Walk<'a, 'b> {
    call: &'a FileCall<'b>,
    glob: Option<Glob>,
    /// The real path of the pod's directory.
    home: PathBuf,
    /// The real path of the directory that the glob is relative to.
    start: PathBuf,
    entries_left: usize,
    skipped: Skipped,
    each: &'a mut Each<'a>,
}

impl<'a, 'b> Walk<'a, 'b> {
    /// Gives `each` what matches below a directory, or the one file, until it has enough; returns what was skipped.
    ///
    /// # Errors
    /// When nothing is there, it may not be read, it is neither a directory nor a regular file, or the turn was
    /// cancelled; and those of `each`.
    pub(crate) fn run(
        call: &'a FileCall<'b>,
        found: &Found,
        glob: Option<Glob>,
        each: &'a mut Each<'a>,
    ) -> Result<Skipped, Why> {
        call.judge_read(found)?;
        found.refuse_kernel_view()?;
        let home = file::real_path(file::open_place(&call.desk.directory)?)?;
        let (start, skipped) = (found.real.clone(), Skipped::default());
        let mut walk = Walk { call, glob, home, start, entries_left: ENTRIES_MAX, skipped, each };
        if found.is_directory() {
            walk.visit(&found.at, OsStr::new("."), 0, &ignored_above(found, &walk.home)?)?;
        } else {
            found.file()?.ok_or("there is no file or directory")?;
            walk.offer(&found.at, &found.place(), EntryKind::File)?;
        }
        Ok(walk.skipped)
    }

    /// Walks one directory; whether to go on.
    fn visit(&mut self, above: &OwnedFd, name: &OsStr, depth: usize, ignored: &Ignored) -> Result<bool, Why> {
        let (directory, real, entries) = match self.list(above, name) {
            Ok(Some(listed)) if depth <= DEPTH_MAX => listed,
            Ok(None) => return Ok(true),
            Err(error) if depth == 0 => return Err(error.into()),
            Ok(Some(_)) | Err(_) => {
                self.skipped.count(if depth > DEPTH_MAX { TOO_DEEP } else { UNREADABLE });
                return Ok(true);
            }
        };
        if entries.is_empty() && depth > 0 {
            return self.offer(above, &real, EntryKind::Directory);
        }
        let mut ignored = Cow::Borrowed(ignored);
        if entries.iter().any(|(name, _)| name == ".gitignore") {
            read_ignored(&directory, &real, ignored.to_mut());
        }
        for (name, kind) in entries {
            self.call.go_on()?;
            if self.entries_left == 0 {
                self.skipped.counts.insert(TOO_MANY, ENTRIES_MAX);
                return Ok(false);
            }
            self.entries_left -= 1;
            let place = real.join(&name);
            let is_ignored = name == ".git" || ignored.contains(Path::new(&name)) || ignored.contains(&place);
            let is_directory = kind == EntryKind::Directory;
            let goes_on = if !self.call.may_list(&place, None) {
                true
            } else if is_directory && is_ignored {
                self.skipped.directories += 1;
                if self.skipped.directories <= 5 {
                    self.skipped.examples.push(self.shown(&place));
                }
                true
            } else if is_directory {
                self.visit(&directory, &name, depth + 1, &ignored)?
            } else {
                self.offer(&directory, &place, kind)?
            };
            if !goes_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Opens a directory: its real path and its entries; `None` if it may not be read.
    fn list(&self, above: &OwnedFd, name: &OsStr) -> io::Result<Option<(OwnedFd, PathBuf, Entries)>> {
        let directory = file::open_directory_at(above, Path::new(name))?;
        let real = file::real_path(&directory)?;
        let this = identity(&File::from(directory.try_clone()?).metadata()?);
        if file::is_kernel_view(&directory)? || !self.call.may_list(&real, Some(this)) {
            return Ok(None);
        }
        // One more than may be looked at, so that the walk notices the end of its allowance.
        let entries = file::entries(directory.try_clone()?, self.entries_left + 1)?;
        Ok(Some((directory, real, entries)))
    }

    fn offer(&mut self, directory: &OwnedFd, place: &Path, kind: EntryKind) -> Result<bool, Why> {
        let below = place.strip_prefix(&self.start).unwrap_or(place).as_os_str();
        if self.glob.as_ref().is_some_and(|glob| !glob.matches(below.as_bytes())) {
            return Ok(true);
        }
        let shown = self.shown(place) + if kind == EntryKind::Directory { "/" } else { "" };
        (self.each)(Step { shown, kind, directory, place }, &mut self.skipped)
    }

    fn shown(&self, place: &Path) -> String {
        escape_name(place.strip_prefix(&self.home).unwrap_or(place).as_os_str().as_bytes())
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

/// Adds the plain names of a `.gitignore`. Patterns are left to git; a name that a later line takes back is not left
/// out.
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
