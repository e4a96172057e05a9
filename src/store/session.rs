//! A session: the folder of one pod run with its history, an append-only file of one item a line.
//!
//! The log is the truth: the turn thread appends, everyone else reads pages of the file by item number. A
//! newline is the commit mark, so an unfinished last line is no item and is cut on open.

use std::fs::{DirBuilder, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::sys::clock;
use crate::sys::thread::lock;
use crate::words::compaction::Conversation;
use crate::words::error::{Error, Result};
use crate::words::identity::{Life, PodId};
use crate::words::limits::MAX_PAGE_BYTES;
use crate::words::message::{Item, LoggedItem, Summary};

const HISTORY: &str = "history.jsonl";
const INBOX: &str = "inbox.jsonl";
const RESULTS: &str = "results";
const LOG: &str = "pod.log";
/// Far more than any item has: a line beyond this is damage, and is not read into memory.
const ITEM_BYTES_MAX: u64 = 64 << 20;
/// The resolved manifest in a session folder.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Where each value of it comes from.
pub(crate) const SOURCES: &str = "sources.json";

/// A page of a history.
#[derive(Debug, Clone, PartialEq)]
pub struct Page {
    /// The items from the wanted number on.
    pub items: Vec<LoggedItem>,
    /// The number of the item after the last one.
    pub cursor: u64,
    /// Whether there are more items already.
    pub more: bool,
}

#[derive(Debug)]
struct Log {
    file: File,
    /// Where each item begins, and where the next one will.
    offsets: Vec<u64>,
    summary: Summary,
}

impl Log {
    fn count(&self) -> u64 {
        (self.offsets.len() as u64).saturating_sub(1)
    }

    fn end(&self) -> u64 {
        self.offsets.last().copied().unwrap_or(0)
    }
}

/// Text that a pod has accepted, and who sent it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// The text.
    pub text: String,
    /// The pod that sent it, `None` for a person.
    pub from: Option<PodId>,
}

/// An open session.
#[derive(Debug)]
pub struct Session {
    directory: PathBuf,
    /// Every accepted input, in order; the history has as many `input` items as have been taken from it.
    inbox: Option<File>,
    // A channel will not do: readers on connection threads need the offsets while the turn appends.
    log: Mutex<Log>,
}

/// Makes the folder of a new session: `STATE/<pod_id>/<time>-<life>`, mode 0700. The newest one sorts last.
///
/// # Errors
/// When it cannot be made.
pub fn create_folder(state: &Path, pod_id: &PodId, life: &Life) -> Result<PathBuf> {
    let (time, short) = (clock::compact_utc(clock::now_millis()), life.as_str().get(..8).unwrap_or_default());
    let directory = state.join(pod_id.as_str()).join(format!("{time}-{short}"));
    let created = DirBuilder::new().recursive(true).mode(0o700).create(directory.join(RESULTS));
    let shown = directory.display();
    let action = format!("create session folder \"{shown}\" (XDG_STATE_HOME chooses another place)");
    created.map_err(|source| Error::io(action, source))?;
    Ok(directory)
}

/// The folders of all sessions of this pod_id, the newest first.
pub fn folders_of(state: &Path, pod_id: &PodId) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(state.join(pod_id.as_str()))
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join(HISTORY).is_file())
        .collect();
    folders.sort();
    folders.reverse();
    folders
}

/// The pod_ids that have a session in this state directory, sorted.
pub fn pod_ids(state: &Path) -> Vec<PodId> {
    let entries = std::fs::read_dir(state).into_iter().flatten();
    let mut ids: Vec<PodId> = entries
        .filter_map(|entry| PodId::new(entry.ok()?.file_name().into_string().ok()?).ok())
        .filter(|id| !folders_of(state, id).is_empty())
        .collect();
    ids.sort();
    ids
}

/// The identity of a session in the `spawned_by` of an entry: its folder below the state directory.
pub fn session_name(directory: &Path) -> String {
    let parts: Vec<_> =
        directory.iter().rev().take(2).map(|part| part.to_string_lossy().into_owned()).collect();
    parts.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// The history of a session folder.
pub fn history_path(directory: &Path) -> PathBuf {
    directory.join(HISTORY)
}

/// The log file of a session folder.
pub fn log_path(directory: &Path) -> PathBuf {
    directory.join(LOG)
}

impl Session {
    /// Opens the history in a session folder for appending, making it if it is missing, and cuts an
    /// unfinished last line.
    ///
    /// # Errors
    /// When the file cannot be opened, or a complete line is no item; the sentence names file and line.
    pub fn open(directory: &Path) -> Result<Session> {
        let open = |name: &str| {
            let path = directory.join(name);
            let opened = File::options().read(true).append(true).create(true).mode(0o600).open(&path);
            opened.map_err(Error::on("open", &path))
        };
        let path = directory.join(HISTORY);
        let log = scan(&path, open(HISTORY)?)?;
        log.file.set_len(log.end()).map_err(Error::on("cut the unfinished end of", &path))?;
        let inbox = open(INBOX)?;
        cut_half_line(&inbox).map_err(Error::on("read", &directory.join(INBOX)))?;
        Ok(Session { directory: directory.to_owned(), inbox: Some(inbox), log: Mutex::new(log) })
    }

    /// Keeps an input before it is accepted, so that a killed pod does not lose it; a half-written line is rolled
    /// back, or the next input would be lost with it. One thread accepts, the controller's.
    ///
    /// # Errors
    /// When it cannot be written; it must be refused then.
    pub fn accept(&self, input: &Input) -> Result<()> {
        let path = self.directory.join(INBOX);
        let failed = Error::on("keep input in", &path);
        let mut line = serde_json::to_vec(input).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        let inbox = self.inbox.as_ref().ok_or_else(|| failed(io::ErrorKind::ReadOnlyFilesystem.into()))?;
        let begin = inbox.metadata().map_err(failed)?.len();
        append_whole(inbox, begin, &line).map_err(failed)
    }

    /// The inputs that were accepted and have not reached the conversation. A half line was never accepted.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn unheard(&self) -> Result<Vec<Input>> {
        let path = self.directory.join(INBOX);
        let text = std::fs::read(&path).map_err(Error::on("read", &path))?;
        let heard = usize::try_from(self.ask(|summary| summary.inputs)).unwrap_or(usize::MAX);
        let lines = text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
        Ok(lines.skip(heard).filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }

    /// Opens the history in a session folder for reading only, as it is.
    ///
    /// # Errors
    /// As `open`.
    pub fn open_to_read(directory: &Path) -> Result<Session> {
        let path = directory.join(HISTORY);
        let log = scan(&path, File::open(&path).map_err(Error::on("open history", &path))?)?;
        Ok(Session { directory: directory.to_owned(), inbox: None, log: Mutex::new(log) })
    }

    /// The session's folder.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where long tool results are kept.
    pub fn results(&self) -> PathBuf {
        self.directory.join(RESULTS)
    }

    /// Appends an item and returns it as logged. It is on its way to the disk when this returns, so a killed
    /// process does not lose it; a half-written line is rolled back.
    ///
    /// # Errors
    /// When it cannot be written whole; the history is as before then.
    pub fn append(&self, item: Item) -> Result<LoggedItem> {
        let logged = LoggedItem { at: clock::now_millis(), item };
        let mut line =
            serde_json::to_vec(&logged).map_err(|error| Error::told(format!("cannot log: {error}")))?;
        line.push(b'\n');
        if line.len() as u64 >= ITEM_BYTES_MAX {
            return Err(Error::told(format!("an item of {} bytes is more than a history takes", line.len())));
        }
        let mut log = lock(&self.log);
        let begin = log.end();
        append_whole(&log.file, begin, &line).map_err(Error::on("append to history in", &self.directory))?;
        log.offsets.push(begin + line.len() as u64);
        log.summary.add(&logged.item);
        Ok(logged)
    }

    /// How many items there are.
    pub fn len(&self) -> u64 {
        lock(&self.log).count()
    }

    /// Whether there is no item.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One thing that the items say about the pod, without a copy of the rest.
    pub fn ask<T>(&self, question: impl FnOnce(&Summary) -> T) -> T {
        question(&lock(&self.log).summary)
    }

    /// What the items say about the pod.
    pub fn summary(&self) -> Summary {
        lock(&self.log).summary.clone()
    }

    /// The items from number `since` on, at least one and about `MAX_PAGE_BYTES` at most.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn page(&self, since: u64) -> Result<Page> {
        let failed = Error::on("read history in", &self.directory);
        let log = lock(&self.log);
        let count = log.count();
        let since = since.min(count);
        let first = usize::try_from(since).unwrap_or(usize::MAX);
        let offsets = log.offsets.get(first..).unwrap_or_default();
        let begin = offsets.first().copied().unwrap_or(0);
        let fits = |end: &&u64| **end - begin <= MAX_PAGE_BYTES as u64;
        let taken = offsets.iter().skip(1).take_while(fits).count().max(usize::from(since < count));
        let end = offsets.get(taken).copied().unwrap_or(begin);
        let mut bytes = vec![0; usize::try_from(end - begin).unwrap_or(0)];
        log.file.read_exact_at(&mut bytes, begin).map_err(failed)?;
        drop(log);
        let lines = bytes.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let items = lines.map(serde_json::from_slice).collect::<Result<Vec<LoggedItem>, _>>();
        let items = items.map_err(|error| failed(error.into()))?;
        let cursor = since + items.len() as u64;
        Ok(Page { items, cursor, more: cursor < count })
    }

    /// What the model of this session is sent, the last compaction applied.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn conversation(&self) -> Result<Conversation> {
        let mut conversation = Conversation::default();
        let mut since = 0;
        loop {
            let page = self.page(since)?;
            (since..).zip(page.items).for_each(|(number, logged)| conversation.push(number, logged.item));
            since = page.cursor;
            if !page.more {
                return Ok(conversation);
            }
        }
    }

    /// The assistant's text: of the latest turn, or of everything from number `since` on as far as one page
    /// reaches. Returns the text, the cursor and whether there is more.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn output(&self, since: Option<u64>) -> Result<(String, u64, bool)> {
        let Some(since) = since else {
            let log = lock(&self.log);
            return Ok((log.summary.last_response.clone(), log.count(), false));
        };
        let page = self.page(since)?;
        let texts = page.items.iter().filter_map(|logged| logged.item.reply_text());
        Ok((texts.collect::<Vec<_>>().join("\n\n"), page.cursor, page.more))
    }
}

/// Writes a line at the end of the file, which is at `begin`, or leaves the file as it was: the line after half a one
/// would be lost with it.
fn append_whole(mut file: &File, begin: u64, line: &[u8]) -> io::Result<()> {
    file.write_all(line).inspect_err(|_| {
        if let Err(error) = file.set_len(begin) {
            log::error!("cannot roll back an unfinished line: {error}"); // it is cut at the next open
        }
    })
}

fn cut_half_line(mut file: &File) -> io::Result<()> {
    let mut text = Vec::new();
    io::Read::read_to_end(&mut file, &mut text)?;
    let committed = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    file.set_len(committed as u64)
}

fn scan(path: &Path, file: File) -> Result<Log> {
    let failed = Error::on("read history", path);
    let mut reader = BufReader::with_capacity(64 << 10, &file);
    let (mut offsets, mut summary, mut line) = (vec![0], Summary::default(), Vec::new());
    let mut at = 0;
    loop {
        line.clear();
        let count = reader.by_ref().take(ITEM_BYTES_MAX).read_until(b'\n', &mut line).map_err(failed)?;
        if line.last() != Some(&b'\n') && (count as u64) < ITEM_BYTES_MAX {
            return Ok(Log { file, offsets, summary });
        }
        let logged: LoggedItem = serde_json::from_slice(&line).map_err(|error| {
            Error::told(format!("history \"{}\", line {}: no item: {error}", path.display(), offsets.len()))
        })?;
        summary.add(&logged.item);
        at += count as u64;
        offsets.push(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(text: &str) -> Item {
        Item::Input { text: text.into(), from: None }
    }

    #[test]
    fn a_line_without_end_is_damage_and_not_read() {
        let place = tempfile::tempdir().unwrap();
        let hole = File::create(place.path().join(HISTORY)).unwrap();
        hole.set_len(ITEM_BYTES_MAX + 1).unwrap();
        let error = Session::open(place.path()).unwrap_err().to_string();
        assert!(error.contains("line 1: no item"), "{error}");
    }

    #[test]
    fn what_was_appended_is_read_back_by_pages() {
        let place = tempfile::tempdir().unwrap();
        let session = Session::open(place.path()).unwrap();
        assert!(session.is_empty() && session.page(0).unwrap().items.is_empty());
        let long = "x".repeat(100_000);
        (0..10).for_each(|_| drop(session.append(input(&long)).unwrap()));
        let first = session.page(0).unwrap();
        assert_eq!((first.items.len(), first.cursor, first.more), (2, 2, true));
        let last = session.page(9).unwrap();
        assert_eq!((last.items.len(), last.cursor, last.more), (1, 10, false));
        assert_eq!(session.page(99).unwrap().cursor, 10);
        assert_eq!(session.conversation().unwrap().items().len(), 10);
        let huge = session.append(input(&"y".repeat(MAX_PAGE_BYTES * 2))).unwrap();
        assert_eq!(session.page(10).unwrap().items, vec![huge], "one item is always given");
    }

    #[test]
    fn an_unfinished_tail_is_cut_on_open() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join(HISTORY);
        Session::open(place.path()).unwrap().append(input("whole")).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for torn in [&b"{"[..], b"{\"at\":1,\"type\":\"input\",\"text\":\"to", b"\xff\xfe"] {
            std::fs::write(&path, [&whole, torn].concat()).unwrap();
            assert_eq!(Session::open_to_read(place.path()).unwrap().len(), 1);
            let session = Session::open(place.path()).unwrap();
            assert_eq!(session.conversation().unwrap().items(), [input("whole")]);
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
    }

    #[test]
    fn accepted_inputs_that_were_not_heard_are_kept() {
        let place = tempfile::tempdir().unwrap();
        let session = Session::open(place.path()).unwrap();
        let inputs = ["a", "b\nc", "d"].map(|text| Input { text: text.into(), from: None });
        inputs.iter().for_each(|input| session.accept(input).unwrap());
        session.append(input("a")).unwrap();
        let path = place.path().join(INBOX);
        let torn = [std::fs::read(&path).unwrap(), b"{\"text\":\"to".to_vec()].concat();
        std::fs::write(&path, torn).unwrap();
        assert_eq!(Session::open(place.path()).unwrap().unheard().unwrap(), inputs[1..]);
        let damaged = std::fs::read_to_string(&path).unwrap().replacen("\"a\"", "\"a", 1);
        std::fs::write(&path, damaged).unwrap();
        let kept = Session::open(place.path()).unwrap().unheard().unwrap();
        assert_eq!(kept, inputs[1..], "a damaged line of before costs no other");
    }

    #[test]
    fn a_damaged_line_is_named() {
        let place = tempfile::tempdir().unwrap();
        Session::open(place.path()).unwrap().append(input("one")).unwrap();
        let path = place.path().join(HISTORY);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{text}nonsense\n")).unwrap();
        let error = Session::open(place.path()).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains(HISTORY), "{error}");
    }

    #[test]
    fn a_new_session_never_overwrites_an_older_one() {
        let place = tempfile::tempdir().unwrap();
        let id = PodId::new("main").unwrap();
        let lives = ["a", "b"].map(|digit| Life::new(digit.repeat(32)).unwrap());
        let folders = lives.map(|life| {
            let folder = create_folder(place.path(), &id, &life).unwrap();
            Session::open(&folder).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(2)); // the next folder has a later time
            folder
        });
        assert_eq!(folders_of(place.path(), &id), vec![folders[1].clone(), folders[0].clone()]);
        assert_eq!(pod_ids(place.path()), vec![id]);
        assert!(session_name(&folders[0]).starts_with("main/"));
    }
}
