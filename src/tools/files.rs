//! `ReadFile`, `WriteFile` and `EditFile`: single files, read in pages and replaced whole.
//!
//! A file is never truncated or changed in place: new content goes into a new file of the same directory, which
//! then takes the name. So a refusal leaves everything as it was, and of a file with several hard links only
//! this name gets the new content; the other names keep the old one. Mode and owner are copied, set-user-id bits
//! excepted. Runs on the turn thread.

use std::fs::Metadata;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use crate::sys::clock::random_hex;
use crate::sys::file::{self, Stamp};
use crate::tools::edit::{EDIT_BYTES_MAX, edit_text};
use crate::tools::page::Page;
use crate::tools::place::{FileCall, Found, Why, judged_text};
use crate::words::error::Result;
use crate::words::scope::{EffectiveScope, Verdict};

impl FileCall<'_> {
    /// `ReadFile`: one page of numbered lines, and what was left out.
    ///
    /// Memory and time are bounded whatever the file: long lines are cut, and a call that has looked for 2 s stops
    /// and says so.
    ///
    /// # Errors
    /// When the place may not be read, or it is no text file.
    pub fn read_file(&mut self, path: &str, offset: Option<u64>, limit: Option<u64>) -> Result<String> {
        let (first, limit) = (offset.unwrap_or(1), limit.unwrap_or(u64::MAX));
        let found = self.desk.find(path)?;
        found.attempt("read", || {
            self.judge_read(&found)?;
            let (open, metadata) = found.open()?;
            let page =
                Page::new(open, metadata.len(), self.cancel).read(first, limit, self.desk.page_bytes_max)?;
            self.desk.remember(found.place(), Stamp::of(metadata));
            Ok(page)
        })
    }

    /// `WriteFile`: the whole new content of a file.
    ///
    /// # Errors
    /// When the place may not be written, something else than a file is there, or the file
    /// changed since the pod last read or wrote it. Nothing is changed then.
    pub fn write_file(&mut self, path: &str, content: &str) -> Result<String> {
        let found = self.desk.find(path)?;
        found.attempt("write", || {
            self.judge_write(&found)?;
            let old = replaceable(&found)?;
            if old.is_some_and(|old| self.desk.has_changed(&found.place(), &Stamp::of(old))) {
                return Err("it has changed since you read it; read it again before you write it".into());
            }
            self.put(&found, content.as_bytes())?;
            let verb = if old.is_some() { "replaced" } else { "created" };
            let (bytes, lines) = (content.len(), content.lines().count());
            Ok(format!("{verb} {}: {bytes} bytes, {lines} lines written", found.named()))
        })
    }

    /// `EditFile`: one text in a file replaced by another, every other byte as it was.
    ///
    /// # Errors
    /// As `write_file`; also when the old text does not occur exactly once. Whether the pod has seen the file
    /// does not matter: the edit works on the content of this moment.
    pub fn edit_file(&mut self, path: &str, old: &str, new: &str, all: bool) -> Result<String> {
        let found = self.desk.find(path)?;
        found.attempt("edit", || {
            self.judge_write(&found)?;
            self.judge_read(&found)?;
            replaceable(&found)?;
            let (open, metadata) = found.open()?;
            let size = metadata.len();
            if size > EDIT_BYTES_MAX as u64 {
                return Err(format!("it has {size} bytes, EditFile takes at most {EDIT_BYTES_MAX}").into());
            }
            let content = file::read_whole(&open, EDIT_BYTES_MAX)?;
            let (content, count) = edit_text(&content, old, new, all)?;
            self.put(&found, &content)?;
            Ok(format!("edited {}: {count} replacement{}", found.named(), if count == 1 { "" } else { "s" }))
        })
    }

    /// Gives the place new content, unless something else than was found has its name by then.
    fn put(&mut self, found: &Found, content: &[u8]) -> Result<(), Why> {
        self.go_on()?;
        let place = found.place();
        let name = Path::new(place.file_name().unwrap_or_default());
        let old = replaceable(found)?;
        let at = make_directories(&self.scope, found)?;
        let temporary = PathBuf::from(format!(".insomnia-{}.tmp", random_hex(8)?));
        let written = replace(&at, &temporary, name, old, content);
        if written.is_err() {
            if let Err(error) = file::remove_at(&at, &temporary) {
                log::warn!("a temporary file stays beside {}: {error}", found.named()); // the first failure is told
            }
        }
        self.desk.remember(place, written?);
        Ok(())
    }
}

/// What is at the place now, if it may be replaced; `None` if nothing is.
fn replaceable(found: &Found) -> Result<Option<&Metadata>, Why> {
    let Some((_, metadata)) = found.file()? else { return Ok(None) };
    let mode = metadata.mode() & 0o7777;
    if mode & 0o222 == 0 {
        return Err(format!("it is write-protected (mode {mode:04o}); change that first").into());
    }
    Ok(Some(metadata))
}

/// Makes the missing directories one after the other, each judged where it really is before anything is made in
/// it, and returns the last one. They stay when the file does not come.
fn make_directories(scope: &EffectiveScope, found: &Found) -> Result<OwnedFd, Why> {
    let mut at = found.at.try_clone()?;
    for name in found.below.iter().rev().skip(1).rev() {
        file::make_directory_at(&at, Path::new(name), 0o777)?;
        at = file::open_directory_at(&at, Path::new(name))?;
        if scope.judge_write(&judged_text(&file::real_path(&at)?)) != Verdict::Allowed {
            return Err("its directories were moved out of your write scope just now".into());
        }
    }
    Ok(at)
}

/// Writes a new file that then takes the name, if that is still what it was.
fn replace(
    at: &OwnedFd,
    temporary: &Path,
    name: &Path,
    old: Option<&Metadata>,
    content: &[u8],
) -> Result<Stamp, Why> {
    // Nobody else may open the new content before it has the mode of the old one.
    let mut new = file::create_at(at, temporary, if old.is_some() { 0o600 } else { 0o666 })?;
    if let Some(old) = old {
        if let Err(error) = fchown(&new, Some(old.uid()), Some(old.gid())) {
            log::debug!("the owner of a file changes: {error}"); // only root may give files away
        }
        file::set_mode(&new, old.mode() & 0o777)?;
    }
    new.write_all(content)?;
    new.sync_data()?;
    if file::stamp_at(at, name)? != old.map(Stamp::of) {
        return Err("it has changed just now; read it again".into());
    }
    match old {
        Some(_) => file::rename_at(at, temporary, name)?,
        None => file::rename_new_at(at, temporary, name)?,
    }
    Ok(Stamp::of(&new.metadata()?)) // after the rename, which changes the change time
}
