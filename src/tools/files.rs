//! `ReadFile`, `WriteFile` and `EditFile`: single files, read in pages and replaced whole.
//!
//! A file is never truncated or changed in place: new content goes into a new file of the same directory, which
//! then takes the name. So a refusal leaves everything as it was, and of a file with several hard links only
//! this name gets the new content; the other names keep the old one. Mode and owner are copied, set-user-id bits
//! excepted. Runs on the turn thread.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::sys::clock::random_hex;
use crate::sys::file::{self, Stamp};
use crate::sys::wait::Cancel;
use crate::tools::edit::{EDIT_BYTES_MAX, edit_text};
use crate::tools::input;
use crate::tools::page::Page;
use crate::tools::place::{FileDesk, Found, judged_text, open_regular, require_regular};
use crate::wire::provider::ToolSpec;
use crate::words::error::{Error, Result};
use crate::words::limits::Limits;
use crate::words::scope::{EffectiveScope, Verdict};

/// What the model is told about the tools of this file.
#[must_use]
pub fn specs(limits: &Limits) -> Vec<ToolSpec> {
    let page = limits.file_read_bytes >> 10;
    vec![
        ToolSpec {
            name: "ReadFile",
            description: format!(
                "Read a text file as numbered lines, {page} KiB at most per call; go on with \"offset\". Line ends and bytes that are not UTF-8 are described at the end."
            ),
            input_schema: read_schema(),
        },
        ToolSpec {
            name: "WriteFile",
            description: "Create a file, or replace the whole content of one, in your write scope. Missing directories are created. Refused if the file changed since you last read or wrote it. For a small change use EditFile.".to_owned(),
            input_schema: write_schema(),
        },
        ToolSpec {
            name: "EditFile",
            description: "Replace the text \"old\" in a file by \"new\". \"old\" must occur exactly once, without the line numbers of ReadFile, unless \"all\" is true. Line ends of the file (LF or CRLF) are kept.".to_owned(),
            input_schema: edit_schema(),
        },
    ]
}

fn read_schema() -> Value {
    json!({ "type": "object", "additionalProperties": false, "required": ["path"], "properties": {
        "path": { "type": "string", "description": "file, absolute or relative to your directory" },
        "offset": { "type": "integer", "minimum": 1, "description": "first line, from 1" },
        "limit": { "type": "integer", "minimum": 1, "description": "number of lines" } } })
}

fn write_schema() -> Value {
    json!({ "type": "object", "additionalProperties": false, "required": ["path", "content"], "properties": {
        "path": { "type": "string", "description": "file, absolute or relative to your directory" },
        "content": { "type": "string", "description": "the whole new content" } } })
}

fn edit_schema() -> Value {
    json!({ "type": "object", "additionalProperties": false, "required": ["path", "old", "new"], "properties": {
        "path": { "type": "string", "description": "file, absolute or relative to your directory" },
        "old": { "type": "string", "description": "the exact text to replace" },
        "new": { "type": "string", "description": "the text to put there" },
        "all": { "type": "boolean", "description": "replace every occurrence" } } })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadInput {
    path: String,
    offset: Option<u64>,
    limit: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WriteInput {
    path: String,
    content: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EditInput {
    path: String,
    old: String,
    new: String,
    all: Option<bool>,
}

impl FileDesk {
    /// `ReadFile`: one page of numbered lines, and what was left out.
    ///
    /// Memory and time are bounded whatever the file: long lines are cut, and a call that has looked at 1 GiB or
    /// for 2 s stops and says so.
    ///
    /// # Errors
    /// When the input is wrong, the place may not be read, or it is no text file.
    pub fn read_file(&mut self, scope: &EffectiveScope, input: Value, cancel: &Cancel) -> Result<String> {
        let input: ReadInput = input::parse("ReadFile", &read_schema(), input)?;
        let first = input.offset.unwrap_or(1);
        let limit = input.limit.unwrap_or(u64::MAX);
        if first == 0 || limit == 0 {
            return Err(Error::told("ReadFile: \"offset\" and \"limit\" count from 1"));
        }
        let found = self.find(&input.path)?;
        self.judge_read(scope, &found)?;
        let (open, metadata) = open_for_reading(&found, &self.hidden_identities())?;
        let stamp = Stamp::of(&metadata);
        let changed = first > 1 && self.has_changed(&found.place(), &stamp);
        let named = found.named();
        let page = Page::new(open, metadata.len(), &named, cancel);
        let mut text = page.read(first, limit, self.limits.file_read_bytes)?;
        self.remember(found.place(), stamp);
        if changed {
            text.push_str("[the file has changed since you read another part of it]\n");
        }
        Ok(text)
    }

    /// `WriteFile`: the whole new content of a file.
    ///
    /// # Errors
    /// When the input is wrong, the place may not be written, something else than a file is there, or the file
    /// changed since the pod last read or wrote it. Nothing is changed then.
    pub fn write_file(&mut self, scope: &EffectiveScope, input: Value, cancel: &Cancel) -> Result<String> {
        let input: WriteInput = input::parse("WriteFile", &write_schema(), input)?;
        let found = self.find(&input.path)?;
        self.judge_write(scope, &found)?;
        let old = target_of(&found)?;
        if old.as_ref().is_some_and(|old| self.has_changed(&found.place(), &Stamp::of(old))) {
            return Err(changed_since(&found));
        }
        if cancel.is_set() {
            return Err(Error::Cancelled);
        }
        let (written, lines) = (input.content.len(), input.content.lines().count());
        let verb = if old.is_some() { "replaced" } else { "created" };
        self.put(scope, &found, old.as_ref(), input.content.as_bytes())?;
        Ok(format!("{verb} {}: {written} bytes, {lines} lines written", found.named()))
    }

    /// `EditFile`: one text in a file replaced by another, every other byte as it was.
    ///
    /// # Errors
    /// As `write_file`; also when the old text does not occur exactly once. Whether the pod has seen the file
    /// does not matter: the edit works on the content of this moment.
    pub fn edit_file(&mut self, scope: &EffectiveScope, input: Value, cancel: &Cancel) -> Result<String> {
        let input: EditInput = input::parse("EditFile", &edit_schema(), input)?;
        let found = self.find(&input.path)?;
        self.judge_write(scope, &found)?;
        self.judge_read(scope, &found)?;
        target_of(&found)?;
        let (open, metadata) = open_for_reading(&found, &self.hidden_identities())?;
        let too_large = || {
            Error::told(format!(
                "{} has {} bytes; EditFile takes at most {EDIT_BYTES_MAX}; use Shell for larger files",
                found.named(),
                metadata.len()
            ))
        };
        if metadata.len() > EDIT_BYTES_MAX as u64 {
            return Err(too_large());
        }
        let content = match file::read_whole(&open, EDIT_BYTES_MAX) {
            Ok(content) => content,
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => return Err(too_large()),
            Err(error) => return Err(Error::io(format!("read {}", found.named()), error)),
        };
        let (content, count) = edit_text(&content, &input.old, &input.new, input.all.unwrap_or(false))
            .map_err(|error| Error::told(format!("cannot edit {}: {error}", found.named())))?;
        if cancel.is_set() {
            return Err(Error::Cancelled);
        }
        self.put(scope, &found, Some(&metadata), &content)?;
        let times = if count == 1 { "1 replacement".to_owned() } else { format!("{count} replacements") };
        Ok(format!("edited {}: {times}", found.named()))
    }

    /// Gives the place new content: in a new file beside it, which then takes its name.
    ///
    /// `old` is what was found there before; when anything else has that name now, nothing is changed.
    fn put(
        &mut self,
        scope: &EffectiveScope,
        found: &Found,
        old: Option<&Metadata>,
        content: &[u8],
    ) -> Result<()> {
        let Some((name, directories)) = found.below.split_last() else {
            return Err(Error::told(format!("{} is not a regular file but a directory", found.named())));
        };
        let mut made = MadeDirectories::default();
        let written = made.make(scope, found, directories).and_then(|made_at| {
            let at = made_at.as_ref().unwrap_or(&found.at);
            put_at(at, Path::new(name), old, content, found)
        });
        match written {
            Ok(stamp) => {
                self.remember(found.place(), stamp);
                Ok(())
            }
            Err(error) => {
                made.undo();
                Err(error)
            }
        }
    }
}

fn open_for_reading(found: &Found, hidden: &[(u64, u64)]) -> Result<(File, Metadata)> {
    if found.is_directory() {
        return Err(Error::told(format!(
            "{} is not a regular file but a directory; ListFiles shows what is in it",
            found.named()
        )));
    }
    let Some(name) = found.below.first().filter(|_| found.exists && !found.ends_as_directory) else {
        return Err(Error::told(format!(
            "there is no file {}; ListFiles shows what is there",
            found.named()
        )));
    };
    let (open, metadata) = open_regular(&found.at, name, &found.named())?;
    // The judgement looked at the name; what was opened may have been put there since.
    if hidden.contains(&(metadata.dev(), metadata.ino())) {
        return Err(Error::told(format!("cannot read {}: it belongs to Insomnia itself", found.named())));
    }
    Ok((open, metadata))
}

/// What is at the place now, if it may be replaced; `None` if nothing is.
fn target_of(found: &Found) -> Result<Option<Metadata>> {
    if found.is_directory() || found.ends_as_directory {
        return Err(Error::told(format!(
            "{} is not a regular file but a directory; name a file",
            found.named()
        )));
    }
    let Some((_, metadata)) = found.entry()? else { return Ok(None) };
    require_regular(&metadata, &found.named())?;
    if metadata.mode() & 0o222 == 0 {
        return Err(Error::told(format!(
            "{} is write-protected (mode {:04o}); change its mode first if that is wanted",
            found.named(),
            metadata.mode() & 0o7777
        )));
    }
    Ok(Some(metadata))
}

fn changed_since(found: &Found) -> Error {
    Error::told(format!(
        "{} has changed since you read it; read it again, then write what should be there now",
        found.named()
    ))
}

/// Directories that were made for a file, so that they can be taken away when it does not come.
#[derive(Debug, Default)]
struct MadeDirectories(Vec<(OwnedFd, OsString)>);

impl MadeDirectories {
    /// Makes the missing directories one after the other, each judged where it really is before anything is
    /// made in it. Returns the last one, `None` when none was missing.
    fn make(&mut self, scope: &EffectiveScope, found: &Found, names: &[OsString]) -> Result<Option<OwnedFd>> {
        let cannot = |error| Error::io(format!("create the directories of {}", found.named()), error);
        let mut at: Option<OwnedFd> = None;
        for name in names {
            let above = at.as_ref().unwrap_or(&found.at);
            if file::create_directory_at(above, Path::new(name)).map_err(cannot)? {
                self.0.push((above.try_clone().map_err(cannot)?, name.clone()));
            }
            let made = file::open_directory_at(above, Path::new(name)).map_err(cannot)?;
            let real = file::real_path(&made).map_err(cannot)?;
            if scope.judge_write(&judged_text(&real)) != Verdict::Allowed {
                return Err(Error::told(format!(
                    "the directories of {} were moved out of your write scope just now; nothing was written",
                    found.named()
                )));
            }
            at = Some(made);
        }
        Ok(at)
    }

    fn undo(self) {
        for (at, name) in self.0.iter().rev() {
            if let Err(error) = file::remove_directory_at(at, Path::new(name)) {
                log::debug!("a new directory stays: {error}"); // somebody uses it already
            }
        }
    }
}

fn put_at(at: &OwnedFd, name: &Path, old: Option<&Metadata>, content: &[u8], found: &Found) -> Result<Stamp> {
    let cannot = |error| Error::io(format!("write {}", found.named()), error);
    let temporary = PathBuf::from(format!(".insomnia-{}.tmp", random_hex(8).map_err(cannot)?));
    // Nobody else may open the new content before it has the mode of the old one.
    let mode = if old.is_some() { 0o600 } else { 0o666 };
    let mut new = file::create_at(at, &temporary, mode).map_err(cannot)?;
    let written = fill(&mut new, old, content).map_err(cannot).and_then(|()| {
        let now = file::stamp_at(at, name).map_err(cannot)?;
        match (old.map(Stamp::of), now) {
            (Some(old), Some(now)) if old == now => file::rename_at(at, &temporary, name).map_err(cannot),
            (None, None) => file::rename_new_at(at, &temporary, name).map_err(cannot),
            (Some(_), _) => Err(Error::told(format!(
                "{} was changed by somebody else just now; read it again",
                found.named()
            ))),
            (None, Some(_)) => Err(Error::told(format!(
                "{} was created by somebody else just now; read it first",
                found.named()
            ))),
        }
    });
    if let Err(error) = written {
        if let Err(left) = file::remove_at(at, &temporary) {
            log::warn!("a temporary file stays beside {}: {left}", found.named()); // the first failure is told
        }
        return Err(error);
    }
    Ok(Stamp::of(&new.metadata().map_err(cannot)?)) // after the rename, which changes the change time
}

fn fill(new: &mut File, old: Option<&Metadata>, content: &[u8]) -> io::Result<()> {
    if let Some(old) = old {
        let made = new.metadata()?;
        if (old.uid(), old.gid()) != (made.uid(), made.gid()) {
            if let Err(error) = std::os::unix::fs::fchown(&*new, Some(old.uid()), Some(old.gid())) {
                log::debug!("the owner of a file changes: {error}"); // only root may give files away
            }
        }
        file::set_mode(&*new, old.permissions().mode() & 0o777)?;
    }
    new.write_all(content)?;
    new.sync_data()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schemas_agree_with_the_inputs() {
        let full = [
            json!({"path": "a", "offset": 1, "limit": 2}),
            json!({"path": "a", "content": "b"}),
            json!({"path": "a", "old": "b", "new": "c", "all": true}),
        ];
        for (spec, sample) in specs(&Limits::default()).iter().zip(full) {
            let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&spec.input_schema["properties"]), names(&sample), "{}", spec.name);
            let parsed = match spec.name {
                "ReadFile" => input::parse::<ReadInput>("t", &spec.input_schema, sample).map(|_| ()),
                "WriteFile" => input::parse::<WriteInput>("t", &spec.input_schema, sample).map(|_| ()),
                _ => input::parse::<EditInput>("t", &spec.input_schema, sample).map(|_| ()),
            };
            parsed.unwrap();
        }
    }
}
