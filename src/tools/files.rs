//! `ReadFile`, `WriteFile` and `EditFile`: single files, read in pages and replaced whole.
//!
//! A file is never truncated or changed in place: new content goes into a new file of the same directory, which
//! then takes the name. So a refusal leaves everything as it was, and of a file with several hard links only
//! this name gets the new content; the other names keep the old one. Mode and owner are copied, set-user-id bits
//! excepted. Runs on the turn thread.

use std::ffi::OsString;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::sys::clock::random_hex;
use crate::sys::file::{self, Stamp};
use crate::sys::wait::Cancel;
use crate::tools::input;
use crate::tools::place::{FileDesk, Found, judged_text, open_regular, require_regular};
use crate::wire::provider::ToolSpec;
use crate::words::error::{Error, Result};
use crate::words::limits::Limits;
use crate::words::scope::{EffectiveScope, Verdict};

/// The largest file that `EditFile` takes, in bytes; what it makes of it may be four times as large.
pub const EDIT_BYTES_MAX: usize = 8 << 20;
/// A file with a NUL in its first so many bytes is no text; the size that grep and git look at.
pub(crate) const SNIFF_BYTES: usize = 8 << 10;
/// Of a longer line only the beginning is shown, so that one line cannot fill a page.
const LINE_BYTES_MAX: usize = 8 << 10;
/// One call looks at so much of a file, to find a line or the end of one, and for so long.
const SCAN_BYTES_MAX: u64 = 1 << 30;
const SCAN_TIME_MAX: Duration = Duration::from_secs(2);
/// Between two looks at the clock and the cancel flag.
const SCAN_STEP_BYTES: u64 = 8 << 20;

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
        let mut page = Page::new(open, metadata.len(), self.limits.file_read_bytes);
        page.fill(first, limit, cancel, &found)?;
        self.remember(found.place(), stamp);
        let mut text = page.finish(first)?;
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

/// A page of a file that is being read.
struct Page {
    reader: BufReader<File>,
    size: u64,
    bytes_max: usize,
    text: String,
    line: Vec<u8>,
    /// The number of the next line.
    next: u64,
    /// Bytes of the file that were looked at.
    scanned: u64,
    deadline: Instant,
    crlf: bool,
    lossy: bool,
    /// Why the page ends before it is full.
    stopped: Option<String>,
    at_end: bool,
    /// Whether the last line of the file has no newline, as far as that was seen.
    last_is_open: bool,
}

/// How far a line was followed.
enum LineEnd {
    Newline,
    EndOfFile,
    GaveUp,
}

impl Page {
    fn new(open: File, size: u64, bytes_max: usize) -> Page {
        Page {
            reader: BufReader::with_capacity(64 << 10, open),
            size,
            bytes_max,
            text: String::new(),
            line: Vec::new(),
            next: 1,
            scanned: 0,
            deadline: Instant::now() + SCAN_TIME_MAX,
            crlf: false,
            lossy: false,
            stopped: None,
            at_end: false,
            last_is_open: false,
        }
    }

    fn fill(&mut self, first: u64, limit: u64, cancel: &Cancel, found: &Found) -> Result<()> {
        let cannot = |error| Error::io(format!("read {}", found.named()), error);
        let head = self.reader.fill_buf().map_err(cannot)?;
        if head.get(..SNIFF_BYTES.min(head.len())).is_some_and(|head| head.contains(&0)) {
            return Err(Error::told(format!(
                "{} is a binary file; its {} bytes are left out; use Shell to look into it",
                found.named(),
                self.size
            )));
        }
        while self.next < first {
            match self.skip_line(cancel).map_err(cannot)? {
                LineEnd::Newline => self.next += 1,
                LineEnd::EndOfFile => {
                    let lines = if self.last_is_open { self.next } else { self.next - 1 };
                    return Err(Error::told(format!(
                        "{} has {lines} lines; \"offset\" {first} is beyond its end",
                        found.named()
                    )));
                }
                LineEnd::GaveUp if cancel.is_set() => return Err(Error::Cancelled),
                LineEnd::GaveUp => {
                    return Err(Error::told(format!(
                        "line {first} of {} is too far away: {} of {} bytes were looked at, up to line {}; use Shell, for example sed -n",
                        found.named(),
                        self.scanned,
                        self.size,
                        self.next
                    )));
                }
            }
        }
        while self.next - first < limit && self.text.len() < self.bytes_max {
            if !self.add_line(cancel).map_err(cannot)? {
                break;
            }
        }
        if cancel.is_set() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Reads over one line, from where the reader stands.
    fn skip_line(&mut self, cancel: &Cancel) -> io::Result<LineEnd> {
        loop {
            if self.scanned >= SCAN_BYTES_MAX || cancel.is_set() || Instant::now() >= self.deadline {
                return Ok(LineEnd::GaveUp);
            }
            let mut step = self.reader.by_ref().take(SCAN_STEP_BYTES);
            let count = step.skip_until(b'\n')? as u64;
            let left = step.limit();
            self.scanned += count;
            if count == 0 {
                return Ok(LineEnd::EndOfFile);
            }
            // `skip_until` says how much it read, not whether it found the newline. Less than it was allowed to
            // read means a newline or the end of the file.
            let at_end = self.reader.fill_buf()?.is_empty();
            if (left > 0 && !at_end) || ((left == 0 || at_end) && self.last_was_newline()?) {
                return Ok(LineEnd::Newline);
            }
            if at_end {
                self.last_is_open = true;
                return Ok(LineEnd::EndOfFile);
            }
        }
    }

    /// Whether the last byte looked at is a newline.
    fn last_was_newline(&mut self) -> io::Result<bool> {
        use std::os::unix::fs::FileExt;
        let mut last = [0];
        let Some(at) = self.scanned.checked_sub(1) else { return Ok(false) };
        Ok(self.reader.get_ref().read_at(&mut last, at)? == 1 && last == [b'\n'])
    }

    /// Adds the next line to the page; `false` when there is none or the page must end here.
    fn add_line(&mut self, cancel: &Cancel) -> io::Result<bool> {
        self.line.clear();
        let mut start = self.reader.by_ref().take(LINE_BYTES_MAX as u64);
        let count = start.read_until(b'\n', &mut self.line)?;
        self.scanned += count as u64;
        if count == 0 {
            self.at_end = true;
            return Ok(false);
        }
        if self.line.contains(&0) {
            self.scanned -= count as u64;
            self.stopped = Some(format!("line {} is binary (it has NUL bytes)", self.next));
            return Ok(false);
        }
        let is_whole = self.line.ends_with(b"\n") || count < LINE_BYTES_MAX;
        if self.line.ends_with(b"\n") {
            self.line.pop();
            if self.line.ends_with(b"\r") {
                self.line.pop();
                self.crlf = true;
            }
        }
        let cut = if is_whole { 0 } else { cut_of_a_character(&self.line) };
        self.line.truncate(self.line.len() - cut);
        let shown = String::from_utf8_lossy(&self.line);
        self.lossy = self.lossy || matches!(shown, std::borrow::Cow::Owned(_));
        self.text.push_str(&format!("{:>6}\t{shown}", self.next));
        if !is_whole {
            let before = self.scanned;
            let end = self.skip_line(cancel)?;
            let newline = u64::from(matches!(end, LineEnd::Newline));
            let left_out = (self.scanned - before + cut as u64).saturating_sub(newline);
            if matches!(end, LineEnd::GaveUp) {
                self.text.push_str(&format!(" [... at least {left_out} bytes of this line left out]\n"));
                self.stopped =
                    Some(format!("the end of line {} was not found in {} bytes", self.next, self.scanned));
                self.next += 1;
                return Ok(false);
            }
            if left_out > 0 {
                self.text.push_str(&format!(" [... {left_out} bytes of this line left out]"));
            }
        }
        self.text.push('\n');
        self.next += 1;
        Ok(true)
    }

    fn finish(mut self, first: u64) -> Result<String> {
        let more = !self.at_end
            && !self.reader.fill_buf().map_err(|error| Error::io("read the file on", error))?.is_empty();
        if self.next == first && self.stopped.is_none() && !more {
            let what = if self.size == 0 { "the file is empty" } else { "there are no more lines" };
            return Ok(format!("[{what}]\n"));
        }
        let left = format!("{} of {} bytes left out", self.size.saturating_sub(self.scanned), self.size);
        let mut notes: Vec<String> = Vec::new();
        match self.stopped.take() {
            Some(why) => notes.push(format!("{why}; {left}; use Shell for the rest, for example tail -c")),
            None if more => {
                notes.push(format!("{left} after this; go on with \"offset\": {}", self.next));
            }
            None => {}
        }
        if self.crlf {
            notes.push("lines end in CRLF; EditFile keeps that".to_owned());
        }
        if self.lossy {
            notes.push(
                "bytes that are not UTF-8 are shown as \u{fffd}; EditFile keeps them but cannot match them"
                    .to_owned(),
            );
        }
        for note in &notes {
            self.text.push_str(&format!("[{note}]\n"));
        }
        Ok(self.text)
    }
}

/// How many bytes at the end belong to a character that was cut off.
fn cut_of_a_character(text: &[u8]) -> usize {
    (1..4)
        .take_while(|back| *back <= text.len())
        .find_map(|back| {
            let byte = *text.get(text.len() - back)?;
            let length = match byte {
                0xc0..=0xdf => 2,
                0xe0..=0xef => 3,
                0xf0..=0xf7 => 4,
                0x80..=0xbf => return None,
                _ => return Some(0),
            };
            Some(if length > back { back } else { 0 })
        })
        .unwrap_or(0)
}

/// Why a text was not edited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditError {
    /// The text to be replaced is empty.
    Empty,
    /// Old and new text are the same.
    Same,
    /// The old text does not occur.
    NotFound,
    /// The old text occurs more than once: how often, and the lines of the first occurrences.
    NotUnique {
        /// How often it occurs.
        count: usize,
        /// Lines of the first occurrences, from 1.
        lines: Vec<usize>,
    },
    /// The result would have so many bytes.
    TooLarge(usize),
}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EditError::Empty => f.write_str("\"old\" is empty; give the text to be replaced"),
            EditError::Same => f.write_str("\"old\" and \"new\" are the same"),
            EditError::NotFound => f.write_str(
                "\"old\" does not occur in it; read the file again and copy the text exactly, without line numbers",
            ),
            EditError::NotUnique { count, lines } => {
                let shown: Vec<String> = lines.iter().map(ToString::to_string).collect();
                let more = if *count > lines.len() { ", ..." } else { "" };
                write!(
                    f,
                    "\"old\" occurs {count} times (lines {}{more}); add text around it until it occurs once, or set \"all\"",
                    shown.join(", ")
                )
            }
            EditError::TooLarge(bytes) => {
                write!(f, "the result would have {bytes} bytes, more than {}", 4 * EDIT_BYTES_MAX)
            }
        }
    }
}

impl std::error::Error for EditError {}

/// Replaces `old` by `new` in `content`, once or, if `all`, everywhere; returns the result and how often.
///
/// `old` is looked for as it is; if it does not occur, with line ends LF and CRLF taken as the same. In a file
/// whose lines all end in CRLF, and wherever the replaced text had CRLF, the line ends of `new` become CRLF.
/// Every byte outside the replaced text stays. The cost is linear in the lengths.
///
/// # Errors
/// When `old` is empty, equal to `new`, does not occur, occurs more than once without `all`, or the result is too
/// large.
pub fn edit_text(content: &[u8], old: &str, new: &str, all: bool) -> Result<(Vec<u8>, usize), EditError> {
    if old.is_empty() {
        return Err(EditError::Empty);
    }
    if old == new {
        return Err(EditError::Same);
    }
    let crlf_file = has_only_crlf(content);
    let mut matches = literal_matches(content, old.as_bytes());
    if matches.is_empty() && (old.contains('\n') && content.contains(&b'\r') || old.contains("\r\n")) {
        matches = matches_of_any_line_end(content, &old.replace("\r\n", "\n"));
    }
    match matches.len() {
        0 => return Err(EditError::NotFound),
        1 => {}
        _ if all => {}
        count => {
            let starts: Vec<usize> = matches.iter().take(5).map(|span| span.start).collect();
            return Err(EditError::NotUnique { count, lines: lines_of(content, &starts) });
        }
    }
    let lf = new.replace("\r\n", "\n");
    let crlf = lf.replace('\n', "\r\n");
    let mut parts: Vec<(&[u8], &[u8])> = Vec::with_capacity(matches.len()); // what stays, what is put after it
    let mut done = 0;
    for span in matches {
        let Some(kept) = content.get(done..span.start) else { continue }; // it overlaps the one before
        let replaced = content.get(span.clone()).unwrap_or_default();
        let literally = replaced == old.as_bytes();
        let had_crlf = replaced.windows(2).any(|pair| pair == b"\r\n");
        let replacement = match () {
            () if crlf_file || (!literally && had_crlf) => crlf.as_bytes(),
            () if !literally && replaced.contains(&b'\n') => lf.as_bytes(),
            () => new.as_bytes(),
        };
        parts.push((kept, replacement));
        done = span.end;
    }
    let tail = content.get(done..).unwrap_or_default();
    let length = parts.iter().fold(tail.len(), |sum, (kept, put)| sum.saturating_add(kept.len() + put.len()));
    if length > 4 * EDIT_BYTES_MAX {
        return Err(EditError::TooLarge(length));
    }
    let count = parts.len();
    let mut result = Vec::with_capacity(length);
    for (kept, put) in parts {
        result.extend_from_slice(kept);
        result.extend_from_slice(put);
    }
    result.extend_from_slice(tail);
    Ok((result, count))
}

type Span = std::ops::Range<usize>;

fn has_only_crlf(content: &[u8]) -> bool {
    let mut before = 0;
    let mut any = false;
    for &byte in content {
        if byte == b'\n' {
            if before != b'\r' {
                return false;
            }
            any = true;
        }
        before = byte;
    }
    any
}

/// Where `old` stands in `content`, byte for byte, overlapping ones included. A match that begins with the LF of a
/// CRLF is none: replacing it would leave half a line end behind.
fn literal_matches(content: &[u8], old: &[u8]) -> Vec<Span> {
    let splits = |start: usize| {
        old.first() == Some(&b'\n')
            && start.checked_sub(1).and_then(|before| content.get(before)) == Some(&b'\r')
    };
    occurrences(content, old)
        .into_iter()
        .filter(|start| !splits(*start))
        .map(|start| start..start + old.len())
        .collect()
}

/// Where `old`, whose lines end in LF, stands in `content` when CRLF counts as LF.
fn matches_of_any_line_end(content: &[u8], old: &str) -> Vec<Span> {
    let mut plain = Vec::with_capacity(content.len());
    let mut removed = Vec::new(); // for each CR taken out: the place in `plain` where it was
    let mut bytes = content.iter().peekable();
    while let Some(&byte) = bytes.next() {
        if byte == b'\r' && bytes.peek() == Some(&&b'\n') {
            removed.push(plain.len());
        } else {
            plain.push(byte);
        }
    }
    // A CR stands before its LF: a span that begins with that LF begins with the CR, one that ends there does not
    // reach it.
    let original = |at: usize| at + removed.partition_point(|&cr| cr < at);
    occurrences(&plain, old.as_bytes())
        .into_iter()
        .map(|start| original(start)..original(start + old.len()))
        .collect()
}

/// All places of `needle`, overlapping ones included, in linear time (Knuth, Morris, Pratt).
fn occurrences(text: &[u8], needle: &[u8]) -> Vec<usize> {
    if needle.is_empty() || needle.len() > text.len() {
        return Vec::new();
    }
    let at = |index: usize| needle.get(index).copied();
    // fallback[i]: length of the longest proper prefix of needle[..=i] that is also its suffix.
    let mut fallback: Vec<usize> = vec![0];
    let back = |fallback: &[usize], length: usize| {
        length.checked_sub(1).and_then(|last| fallback.get(last)).copied().unwrap_or(0)
    };
    let mut length = 0;
    for &byte in needle.iter().skip(1) {
        while length > 0 && at(length) != Some(byte) {
            length = back(&fallback, length);
        }
        length += usize::from(at(length) == Some(byte));
        fallback.push(length);
    }
    let mut found = Vec::new();
    let mut length = 0;
    for (end, &byte) in text.iter().enumerate() {
        while length > 0 && at(length) != Some(byte) {
            length = back(&fallback, length);
        }
        length += usize::from(at(length) == Some(byte));
        if length == needle.len() {
            found.push(end + 1 - length);
            length = back(&fallback, length);
        }
    }
    found
}

/// The line numbers, from 1, of places in ascending order.
fn lines_of(content: &[u8], places: &[usize]) -> Vec<usize> {
    let mut line = 1;
    let mut done = 0;
    places
        .iter()
        .map(|&place| {
            let between = content.get(done..place).unwrap_or_default();
            line += between.iter().filter(|&&byte| byte == b'\n').count();
            done = place;
            line
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(content: &str, old: &str, new: &str, all: bool) -> Result<String, EditError> {
        edit_text(content.as_bytes(), old, new, all).map(|(text, _)| String::from_utf8(text).unwrap())
    }

    #[test]
    fn p15_line_ends_are_kept() {
        let check = |content: &str, old: &str, new: &str, expected: &str| {
            assert_eq!(edit(content, old, new, false).unwrap(), expected, "{content:?} {old:?} {new:?}");
        };
        check("a\r\nb\r\nc\r\n", "b", "B", "a\r\nB\r\nc\r\n");
        check("a\r\nB\r\nc\r\n", "a\nB", "A\nB", "A\r\nB\r\nc\r\n");
        check("a\r\nb\r\n", "a\r\nb", "x\r\ny", "x\r\ny\r\n");
        check("a\r\nb\r\n", "b", "b\nc", "a\r\nb\r\nc\r\n");
        check("a\r\nb\r\n", "\nb", "\nc", "a\r\nc\r\n");
        check("a\r\nb\r\n", "a\n", "z\n", "z\r\nb\r\n");
        check("a\r\nb\r\n", "a", "z", "z\r\nb\r\n");
        check("a\nb\nc", "a\r\nb", "x\r\ny", "x\ny\nc");
        check("a\nb\r\nc\nd", "b\nc", "B\nC", "a\nB\r\nC\nd");
        check("a\nb\r\nc\nd", "c\nd", "C\nD", "a\nb\r\nC\nD");
        check("x\r\n\r\ny", "\n\n", "\n", "x\r\ny");
        check("no newline at the end", "end", "END", "no newline at the END");
    }

    #[test]
    fn old_must_occur_once_unless_all() {
        assert_eq!(edit("a b a", "a", "c", true).unwrap(), "c b c");
        let twice = EditError::NotUnique { count: 2, lines: vec![1, 3] };
        assert_eq!(edit("a\nb\na", "a", "c", false), Err(twice));
        assert_eq!(edit("aaa", "aa", "b", false), Err(EditError::NotUnique { count: 2, lines: vec![1, 1] }));
        assert_eq!(edit("aaa", "aa", "b", true).unwrap(), "ba");
        assert_eq!(edit("a", "b", "c", false), Err(EditError::NotFound));
        assert_eq!(edit("", "b", "c", false), Err(EditError::NotFound));
        assert_eq!(edit("a", "", "c", false), Err(EditError::Empty));
        assert_eq!(edit("a", "a", "a", false), Err(EditError::Same));
    }

    #[test]
    fn an_edit_keeps_bytes_that_are_no_text_and_stays_bounded() {
        assert_eq!(edit_text(b"\xff a \xfe", "a", "b", false).unwrap(), (b"\xff b \xfe".to_vec(), 1));
        let many = "a".repeat(1 << 20);
        assert!(matches!(edit(&many, "a", &many, true), Err(EditError::TooLarge(_))));
        let started = Instant::now();
        assert_eq!(edit(&many, &format!("{}b", &many[1000..]), "", false), Err(EditError::NotFound));
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn occurrences_are_found_like_by_the_slow_way() {
        for text in ["abababa", "aaaa", "abcabd", "xabcabcabx", "", "ab"] {
            for needle in ["a", "aba", "aa", "abd", "abcab", "b", "abab"] {
                let slow: Vec<usize> = (0..text.len()).filter(|&at| text[at..].starts_with(needle)).collect();
                assert_eq!(occurrences(text.as_bytes(), needle.as_bytes()), slow, "{needle} in {text}");
            }
        }
    }

    #[test]
    fn a_line_is_cut_between_characters() {
        for (text, cut) in
            [(&b"ab"[..], 0), ("日".as_bytes(), 0), (&"日".as_bytes()[..2], 2), (b"a\xf0\x9f", 2)]
        {
            assert_eq!(cut_of_a_character(text), cut, "{text:?}");
        }
    }

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
