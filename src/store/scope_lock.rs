//! `scope.lock`: the one file that says who may write where, read whole and replaced whole.
//!
//! Guarded by flock(2) on the file itself and replaced by rename, so that a reader without the lock sees the old
//! or the new table and a killed writer leaves the old one. Never held across a socket, a child or the model.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::store::life::{self, Holding};
use crate::store::paths::{RuntimeDirectory, SOCKET_NAME};
use crate::sys::clock::random_hex;
use crate::sys::file::{self, LockedFile, Stamp};
use crate::sys::process;
use crate::sys::thread::lock;
use crate::sys::wait::Cancel;
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};
use crate::words::identity::{Life, PodId};
use crate::words::limits::LOCK_WAIT;
use crate::words::scope::EffectiveScope;

/// Written only under the lock, so a killed writer leaves at most this one file.
const TEMPORARY: &str = "scope.lock.new";
/// A table of 10,000 pods has about 4 MB.
const TABLE_BYTES_MAX: usize = 16 << 20;

/// The lock file of one runtime directory.
#[derive(Debug, Clone)]
pub struct ScopeLock {
    runtime: Arc<RuntimeDirectory>,
}

/// The outcome of a change.
#[derive(Debug)]
pub struct Edited<T> {
    /// What the change returned.
    pub value: T,
    /// The entries that were found dead and released on the way.
    pub reclaimed: Vec<Allocation>,
}

impl ScopeLock {
    pub(crate) const NAME: &str = "scope.lock";

    /// The lock file in this runtime directory.
    pub fn new(runtime: Arc<RuntimeDirectory>) -> ScopeLock {
        ScopeLock { runtime }
    }

    /// The runtime directory.
    pub fn runtime(&self) -> &RuntimeDirectory {
        &self.runtime
    }

    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.runtime.path().join(ScopeLock::NAME)
    }

    /// The table as it is now, without the lock: works while another process sits on it.
    ///
    /// # Errors
    /// `Error::LockUnusable` when the file is damaged, or missing although pods live.
    pub fn read(&self) -> Result<AllocationTable> {
        match self.open() {
            Ok(opened) => self.parse(&opened),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.check_missing()?;
                Ok(AllocationTable::default())
            }
            Err(error) => Err(self.cannot_open(error)),
        }
    }

    fn open(&self) -> io::Result<File> {
        file::open_at(self.runtime.descriptor(), Path::new(ScopeLock::NAME))
    }

    /// Only a link cannot be opened because of what it is; everything else is told apart once it is open.
    fn cannot_open(&self, error: io::Error) -> Error {
        match self.stamp() {
            Ok(Some(stamp)) if !stamp.is_file() => self.unusable("it is no regular file"),
            Ok(_) | Err(_) => self.failed("open")(error),
        }
    }

    /// The state of the file; `None` while there is none.
    pub(crate) fn stamp(&self) -> Result<Option<Stamp>> {
        file::stamp_at(self.runtime.descriptor(), Path::new(ScopeLock::NAME)).map_err(self.failed("look at"))
    }

    fn failed(&self, action: &str) -> impl Fn(io::Error) -> Error {
        move |source| Error::on(action, &self.path())(source)
    }

    fn unusable(&self, fault: impl Into<String>) -> Error {
        Error::LockUnusable { path: self.path(), fault: fault.into() }
    }

    /// Changes the table under the lock: reclaims the dead, applies `change`, commits by rename.
    ///
    /// When `change` fails nothing is written. `cancel` ends the wait for the lock.
    ///
    /// # Errors
    /// `Error::LockBusy` when somebody holds the lock for 5 s, `Error::LockUnusable` when the file is damaged,
    /// `Error::Cancelled`, or what `change` returned.
    pub fn edit<T>(
        &self,
        cancel: Option<&Cancel>,
        change: impl FnOnce(&mut AllocationTable) -> Result<T>,
    ) -> Result<Edited<T>> {
        if self.stamp()?.is_none() {
            self.check_missing()?;
            self.create(&AllocationTable::default())?;
        }
        let locked = self.lock(cancel)?;
        let before = self.read_text(locked.file())?;
        let mut table = self.parse_text(&before)?;
        let reclaimed = table.reclaim(|allocation| life::is_dead(&self.runtime, allocation));
        let value = change(&mut table)?;
        let text = table.to_text();
        if text.as_bytes() != before {
            // The lock ends with the rename: whoever comes next locks the new file. So folders go before it; after
            // it another pod may have the pod_id and a folder of that name. A life never comes again.
            reclaimed.iter().for_each(|allocation| self.remove_folder(allocation));
            self.commit(&locked, &table, &text)?;
            reclaimed.iter().for_each(|allocation| life::remove(&self.runtime, &allocation.life));
        }
        Ok(Edited { value, reclaimed })
    }

    /// Removes life files that no entry names and nobody holds, and folders of pods that have no entry. To be
    /// called inside `edit`.
    pub fn sweep(&self, table: &AllocationTable) {
        let folders = self.runtime.is_in_place().then(|| std::fs::read_dir(self.runtime.path()));
        for entry in folders.into_iter().flatten().flatten().flatten() {
            let id = entry.file_name().into_string().ok().and_then(|name| PodId::new(name).ok());
            // Only what a pod makes there, so that nothing of anybody else goes.
            if id.is_some_and(|id| table.get(&id).is_none()) && entry.path().join(SOCKET_NAME).exists() {
                let _ = std::fs::remove_dir_all(entry.path()); // the next start tries again
            }
        }
        let lives = life::all(&self.runtime).unwrap_or_else(|error| {
            log::warn!("cannot sweep: {error}"); // the next start does
            Vec::new()
        });
        for life in lives {
            if table.by_life(&life).is_none() && life::probe(&self.runtime, &life) == Holding::Free {
                life::remove(&self.runtime, &life);
            }
        }
    }

    /// Takes the entry of this very life out of the table and removes what it has left in the runtime directory. To be
    /// called inside `edit`. Without an entry the traces may be those of a successor already.
    pub fn release(&self, table: &mut AllocationTable, life: &Life) {
        if let Some(gone) = table.release(life) {
            self.remove_traces(&gone);
        }
    }

    /// Removes what a released pod has left in the runtime directory. To be called inside `edit`, before the
    /// pod_id can be used again.
    ///
    /// A folder where something else is in the place of the socket was never the pod's, and stays.
    pub fn remove_traces(&self, allocation: &Allocation) {
        life::remove(&self.runtime, &allocation.life);
        self.remove_folder(allocation);
    }

    /// Folders go by path, so none goes where another directory has taken the place of ours: it has pods of its own.
    fn remove_folder(&self, allocation: &Allocation) {
        if !self.runtime.is_in_place() {
            return;
        }
        let folder = self.runtime.path().join(allocation.pod_id.as_str());
        let is_foreign = |socket: std::fs::Metadata| !socket.file_type().is_socket();
        if folder.join(SOCKET_NAME).symlink_metadata().is_ok_and(is_foreign) {
            return;
        }
        let _ = std::fs::remove_dir_all(folder); // gone already is fine; what stays is replaced at the next start
    }

    /// Gives a complete new file its name; `false` when somebody was faster.
    pub(crate) fn create(&self, table: &AllocationTable) -> Result<bool> {
        let directory = self.runtime.descriptor();
        let failed = self.failed("create");
        let own_name = format!("{}.{}", ScopeLock::NAME, random_hex(8).map_err(&failed)?);
        let own_name = Path::new(&own_name);
        let linked = file::write_complete(directory, own_name, table.to_text().as_bytes(), 0o600)
            .and_then(|()| file::link_at(directory, own_name, Path::new(ScopeLock::NAME)));
        let _ = file::remove_at(directory, own_name); // a leftover is never read
        match linked {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(source) => Err(failed(source)),
        }
    }

    /// A missing file is a first start only while nobody lives. It is linked before any life file exists, so
    /// one that is still missing after a held life was seen has been taken away.
    fn check_missing(&self) -> Result<()> {
        let lives = life::all(&self.runtime)?;
        let held = lives.iter().find(|life| life::probe(&self.runtime, life) == Holding::Held);
        let Some(life) = held.filter(|_| matches!(self.stamp(), Ok(None))) else { return Ok(()) };
        let entry = life::entry_of(&self.runtime, life);
        let pod = entry.map_or_else(|_| "a pod".to_owned(), |a| format!("pod \"{}\"", a.pod_id));
        Err(self.unusable(format!("it is missing although {pod} lives")))
    }

    pub(crate) fn lock(&self, cancel: Option<&Cancel>) -> Result<LockedFile> {
        let failed = self.failed("lock");
        let deadline = Instant::now() + LOCK_WAIT;
        let mut pause = Duration::from_micros(500);
        loop {
            let opened = self.open().map_err(|error| self.cannot_open(error))?;
            let inode = opened.metadata().map_err(&failed)?.ino();
            // After a rename the lock on the old file means nothing: look at the name again.
            if let Ok(locked) = file::try_lock_exclusive(opened).map_err(&failed)? {
                if self.is_current(&locked)? {
                    return Ok(locked);
                }
                continue;
            }
            if Instant::now() >= deadline {
                return Err(Error::LockBusy { path: self.path(), holder: process::holder_of_lock(inode) });
            }
            match cancel {
                Some(cancel) if cancel.sleep(pause) => return Err(Error::Cancelled),
                Some(_) => {}
                None => std::thread::sleep(pause),
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    fn is_current(&self, locked: &LockedFile) -> Result<bool> {
        let locked = Stamp::of(&locked.file().metadata().map_err(self.failed("look at"))?);
        Ok(self.stamp()?.is_some_and(|named| named.same_file(&locked)))
    }

    pub(crate) fn parse(&self, opened: &File) -> Result<AllocationTable> {
        self.parse_text(&self.read_text(opened)?)
    }

    fn parse_text(&self, text: &[u8]) -> Result<AllocationTable> {
        AllocationTable::parse(text).map_err(|error| self.unusable(error.to_string()))
    }

    fn read_text(&self, opened: &File) -> Result<Vec<u8>> {
        if !opened.metadata().map_err(self.failed("look at"))?.is_file() {
            return Err(self.unusable("it is no regular file"));
        }
        file::read_whole(opened, TABLE_BYTES_MAX).map_err(|error| {
            let is_too_large = error.kind() == io::ErrorKind::FileTooLarge;
            if is_too_large { self.unusable(error.to_string()) } else { self.failed("read")(error) }
        })
    }

    pub(crate) fn commit(&self, locked: &LockedFile, table: &AllocationTable, text: &str) -> Result<()> {
        // A bug must not be committed. Reading the text back as well would find nothing more: that what is written
        // reads the same is the model test's business, and its length is checked before the rename.
        let path = self.path();
        let path = path.display();
        if let Err(error) = table.validate() {
            return Err(Error::told(format!("the change of \"{path}\" is given up: {error}")));
        }
        if text.len() > TABLE_BYTES_MAX {
            return Err(Error::told(format!("the change would make \"{path}\" too large to be read")));
        }
        if !self.is_current(locked)? {
            return Err(Error::told(format!(
                "\"{path}\" was replaced by somebody else during a change; look who does that, then try again"
            )));
        }
        let (directory, name) = (self.runtime.descriptor(), Path::new(ScopeLock::NAME));
        file::replace_at(directory, Path::new(TEMPORARY), name, text.as_bytes(), 0o600)
            .map_err(self.failed("replace"))
    }
}

/// What one pod may do, re-read when `scope.lock` has changed: one `stat` per question otherwise.
#[derive(Debug)]
pub struct ScopeView {
    lock: ScopeLock,
    pod_id: PodId,
    life: Life,
    // A channel will not do: the turn, connections and watchers ask in no order, and each wants the newest.
    last: Mutex<Option<(Stamp, EffectiveScope)>>,
}

impl ScopeView {
    /// The view of this life of this pod.
    pub fn new(lock: ScopeLock, pod_id: PodId, life: Life) -> ScopeView {
        ScopeView { lock, pod_id, life, last: Mutex::new(None) }
    }

    /// What the pod may do now. While the file is damaged this is what was known last, which is safe because
    /// nobody new can start.
    ///
    /// # Errors
    /// When `scope.lock` cannot be found any more through the open runtime directory or by its path, or holds
    /// no entry of this life: then nothing may be written.
    pub fn effective(&self) -> Result<EffectiveScope> {
        let stamp = self.found()?;
        let mut last = lock(&self.last);
        if let Some((_, scope)) = last.as_ref().filter(|(known, _)| *known == stamp) {
            return Ok(scope.clone());
        }
        let table = match (self.lock.read(), last.as_ref()) {
            (Ok(table), _) => table,
            (Err(Error::LockUnusable { fault, .. }), Some((_, scope))) => {
                log::error!("scope.lock is damaged ({fault}); going on within the last scope");
                return Ok(scope.clone());
            }
            (Err(error), _) => return Err(error),
        };
        let own = table.get(&self.pod_id).filter(|entry| entry.life == self.life);
        let Some(scope) = own.and_then(|_| table.effective(&self.pod_id)) else {
            return Err(Error::told(format!(
                "pod \"{}\" has no entry in \"{}\" any more, so it may not write; look at \"insomnia scope list\"",
                self.pod_id,
                self.lock.path().display()
            )));
        };
        *last = Some((stamp, scope.clone()));
        Ok(scope)
    }

    fn found(&self) -> Result<Stamp> {
        let through = self.lock.stamp().ok().flatten();
        let by_path = std::fs::symlink_metadata(self.lock.path()).ok().map(|metadata| Stamp::of(&metadata));
        match (through, by_path) {
            // Between the two looks somebody may have replaced the file; the directory must be the same then. A
            // new one in its place is another world, whose pods know nothing of this one.
            (Some(stamp), Some(named)) if stamp.same_file(&named) || self.lock.runtime().is_in_place() => {
                Ok(stamp)
            }
            (Some(_), Some(_)) | (None, _) | (_, None) => Err(Error::told(format!(
                "\"{}\" is gone, so nobody knows who may write and all writing stops; look who removes it, then stop this pod",
                self.lock.path().display()
            ))),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::words::allocation::tests::entry;
    use crate::words::limits::Limits;

    pub(crate) fn fresh() -> (tempfile::TempDir, ScopeLock) {
        let place = tempfile::tempdir().unwrap();
        let runtime = RuntimeDirectory::open_or_create(&place.path().join("r")).unwrap();
        (place, ScopeLock::new(Arc::new(runtime)))
    }

    /// Registers a pod of this very process, whose life file is not needed for it to count as alive.
    fn register(lock: &ScopeLock, id: &str, number: u32, scope: &str) -> Result<()> {
        let mut allocation = entry(id, number, &[scope], None);
        allocation.pid = crate::words::identity::Pid::new(crate::sys::process::own_pid()).unwrap();
        allocation.start_time = crate::sys::process::process_stat(allocation.pid.get()).unwrap().start_time;
        lock.edit(None, |table| Ok(table.register(allocation, &Limits::default())?)).map(|_| ())
    }

    #[test]
    fn a_change_is_seen_by_a_reader_without_the_lock() {
        let (_place, lock) = fresh();
        assert!(lock.read().unwrap().allocations().is_empty());
        register(&lock, "a", 1, "/w:write").unwrap();
        let holder = lock.lock(None).unwrap();
        assert_eq!(lock.read().unwrap().allocations().len(), 1);
        drop(holder);
    }

    #[test]
    fn a_pod_whose_directory_was_moved_removes_nothing_of_the_one_in_its_place() {
        let (place, lock) = fresh();
        register(&lock, "a", 1, "/w:write").unwrap();
        let runtime = place.path().join("r");
        std::fs::rename(&runtime, place.path().join("aside")).unwrap();
        std::fs::create_dir_all(runtime.join("a")).unwrap();
        let socket = runtime.join("a").join(SOCKET_NAME);
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let life = lock.read().unwrap().allocations()[0].life.clone();
        lock.edit(None, |table| {
            lock.release(table, &life);
            lock.sweep(table);
            Ok(())
        })
        .unwrap();
        assert!(lock.read().unwrap().allocations().is_empty());
        assert!(socket.exists(), "it belongs to a pod of the new directory");
    }

    #[test]
    fn a_refused_change_leaves_the_file_as_it_was() {
        let (_place, lock) = fresh();
        register(&lock, "a", 1, "/w:write").unwrap();
        let before = std::fs::read(lock.path()).unwrap();
        assert!(register(&lock, "b", 2, "/w/x:write").is_err());
        assert_eq!(std::fs::read(lock.path()).unwrap(), before);
    }

    #[test]
    fn the_dead_are_reclaimed_by_whoever_comes_next() {
        let (_place, lock) = fresh();
        let dead = entry("dead", 1, &["/w:write"], None); // pid 1001 with start time 1 is nobody
        lock.edit(None, |table| Ok(table.register(dead, &Limits::default())?)).unwrap();
        let edited = lock.edit(None, |table| Ok(table.allocations().len())).unwrap();
        assert_eq!((edited.value, edited.reclaimed.len()), (0, 1));
        assert!(lock.read().unwrap().allocations().is_empty());
    }

    #[test]
    fn l11_damaged_content_is_refused_and_left_untouched() {
        let (_place, lock) = fresh();
        lock.edit(None, |_| Ok(())).unwrap();
        for bad in ["", "{", "null", "[]", "{\"version\":9,\"allocations\":[]}"] {
            std::fs::write(lock.path(), bad).unwrap();
            let error = lock.edit(None, |_| Ok(())).unwrap_err();
            assert!(matches!(error, Error::LockUnusable { .. }), "{error}");
            assert!(error.to_string().contains("insomnia scope repair"), "{error}");
            assert_eq!(std::fs::read_to_string(lock.path()).unwrap(), bad);
        }
    }

    #[test]
    fn l04_a_missing_file_while_a_pod_lives_is_no_first_start() {
        let (_place, lock) = fresh();
        lock.edit(None, |_| Ok(())).unwrap();
        let held = life::HeldLife::create(lock.runtime(), &entry("a", 1, &[], None)).unwrap();
        std::fs::remove_file(lock.path()).unwrap();
        assert!(matches!(lock.edit(None, |_| Ok(())), Err(Error::LockUnusable { .. })));
        drop(held);
        lock.edit(None, |_| Ok(())).unwrap();
    }

    #[test]
    fn a_view_stops_when_the_directory_was_moved_and_made_anew() {
        let (place, lock) = fresh();
        register(&lock, "a", 1, "/w:write").unwrap();
        let view = ScopeView::new(lock.clone(), PodId::new("a").unwrap(), entry("a", 1, &[], None).life);
        view.effective().unwrap();
        std::fs::rename(place.path().join("r"), place.path().join("moved")).unwrap();
        let other =
            ScopeLock::new(Arc::new(RuntimeDirectory::open_or_create(&place.path().join("r")).unwrap()));
        register(&other, "b", 2, "/w:write").unwrap();
        assert!(view.effective().is_err(), "two worlds, two writers");
        std::fs::remove_dir_all(place.path().join("r")).unwrap();
        std::fs::rename(place.path().join("moved"), place.path().join("r")).unwrap();
        view.effective().unwrap();
    }

    #[test]
    fn a_view_follows_the_file_and_stops_without_it() {
        let (_place, lock) = fresh();
        register(&lock, "a", 1, "/w:write").unwrap();
        let life = entry("a", 1, &[], None).life;
        let view = ScopeView::new(lock.clone(), PodId::new("a").unwrap(), life.clone());
        assert!(view.effective().unwrap().lent.is_empty());
        let text = std::fs::read(lock.path()).unwrap();
        std::fs::write(lock.path(), "{").unwrap();
        view.effective().expect("goes on within the last scope");
        std::fs::remove_file(lock.path()).unwrap();
        assert!(view.effective().is_err());
        std::fs::write(lock.path(), text).unwrap();
        view.effective().unwrap();
        lock.edit(None, |table| Ok(table.release(&life))).unwrap();
        assert!(view.effective().unwrap_err().to_string().contains("no entry"));
    }
}
