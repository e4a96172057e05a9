//! Life files: a pod is alive exactly while somebody holds the exclusive lock on `life/<nonce>`.
//!
//! Probes and watchers ask for the shared lock, so they never take each other for the owner. Measured on
//! running, stopped, zombie and gone processes: the lock is right in each case, a process number is not.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::store::paths::RuntimeDirectory;
use crate::sys::clock::random_hex;
use crate::sys::file::{self, LockedFile, Stamp};
use crate::sys::process;
use crate::sys::wait::Cancel;
use crate::words::allocation::Allocation;
use crate::words::error::{Error, Result};
use crate::words::identity::{LIFE_DIGITS, Life, Pid};

const DIRECTORY: &str = "life";
/// The name of a life file until it is complete and locked. Used only under the lock of `scope.lock`, so a killed
/// starter leaves at most this one.
const UNBORN: &str = "new";
/// The largest life file that is read: one entry of the table.
const CONTENT_BYTES_MAX: usize = 1 << 20;

/// A life file whose exclusive lock this process holds.
#[derive(Debug)]
pub struct HeldLife {
    life: Life,
    lock: LockedFile,
}

/// What a look at a life file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holding {
    /// Somebody holds it: the pod lives.
    Held,
    /// Nobody holds it: the pod is dead.
    Free,
    /// There is no such file, which proves nothing.
    Missing,
}

/// A new random life.
///
/// # Errors
/// When the system gives no random bytes.
pub fn new_life() -> Result<Life> {
    let text = random_hex(LIFE_DIGITS / 2).map_err(|source| Error::io("read random bytes", source))?;
    Life::new(text)
}

fn file_name(life: &Life) -> PathBuf {
    Path::new(DIRECTORY).join(life.as_str())
}

fn open(runtime: &RuntimeDirectory, life: &Life) -> io::Result<File> {
    file::open_at(runtime.descriptor(), &file_name(life))
}

impl HeldLife {
    /// Creates the life file of this entry and locks it. To be called under the lock of `scope.lock`, where
    /// nobody sweeps.
    ///
    /// The file gets its name only when it is locked and holds the entry, from which `scope repair` can rebuild
    /// the table. So nobody ever sees a life that is not held yet: a probe's shared lock cannot come in between,
    /// and a sweep cannot take it for a dead one.
    ///
    /// # Errors
    /// When the file cannot be created, written or locked.
    pub fn create(runtime: &RuntimeDirectory, entry: &Allocation) -> Result<HeldLife> {
        let life = entry.life.clone();
        let failed = |source| Error::io(format!("create life file \"{life}\""), source);
        let directory = runtime.descriptor();
        let unborn = Path::new(DIRECTORY).join(UNBORN);
        file::make_directory_at(directory, Path::new(DIRECTORY), 0o700).map_err(failed)?;
        file::remove_at(directory, &unborn).map_err(failed)?;
        let created = file::create_at(directory, &unborn, 0o600).map_err(failed)?;
        let Ok(lock) = file::try_lock_exclusive(created).map_err(failed)? else {
            return Err(Error::told(format!("life file \"{life}\" is held by somebody else")));
        };
        let text = serde_json::to_string(entry).unwrap_or_default();
        let mut file = lock.file();
        file.write_all(text.as_bytes()).map_err(failed)?;
        file::rename_new_at(directory, &unborn, &file_name(&life)).map_err(failed)?;
        Ok(HeldLife { life, lock })
    }

    /// Which life it is.
    pub fn life(&self) -> &Life {
        &self.life
    }

    /// Keeps the life held until the process ends, and as long as anybody has the returned file open.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn keep_until_exit(self) -> Result<File> {
        let failed = |source| Error::io(format!("share life file \"{}\"", self.life), source);
        self.lock.keep_until_exit().map_err(failed)
    }
}

/// Looks whether a life is held, without waiting.
pub fn probe(runtime: &RuntimeDirectory, life: &Life) -> Holding {
    match open(runtime, life).and_then(file::try_lock_shared) {
        Ok(Ok(_)) => Holding::Free,
        Ok(Err(_)) => Holding::Held,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Holding::Missing,
        Err(error) => {
            log::warn!("cannot probe life {life}: {error}"); // without proof of death a pod counts as alive
            Holding::Held
        }
    }
}

/// Whether the pod of this entry is dead for sure.
///
/// A missing life file proves nothing: then the process must be gone, a zombie, or another one.
pub fn is_dead(runtime: &RuntimeDirectory, allocation: &Allocation) -> bool {
    match probe(runtime, &allocation.life) {
        Holding::Held => false,
        Holding::Free => true,
        Holding::Missing => !process::process_stat(allocation.pid.get())
            .is_some_and(|stat| !stat.is_zombie && stat.start_time == allocation.start_time),
    }
}

/// Waits without a limit until nobody holds this life. For watcher threads. `false` when it has no file, which proves
/// nothing.
///
/// # Errors
/// When the file cannot be opened or locked.
pub fn wait_for_end(runtime: &RuntimeDirectory, life: &Life) -> Result<bool> {
    match open(runtime, life).and_then(file::lock_shared) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(Error::io(format!("watch life {life}"), source)),
    }
}

/// Waits until the pod of this entry is dead; `false` at the deadline or when cancelled.
#[must_use]
pub fn ended_by(
    runtime: &RuntimeDirectory,
    allocation: &Allocation,
    cancel: &Cancel,
    deadline: Instant,
) -> bool {
    let mut pause = Duration::from_micros(500);
    loop {
        if is_dead(runtime, allocation) {
            return true;
        }
        if Instant::now() >= deadline || cancel.sleep(pause) {
            return false;
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Whether the process of this number has the life file open: it is the pod, or a helper of it.
///
/// A start time is counted in ticks of 10 ms, so a number and a time alone could fit another process.
/// Source: proc_pid_fd(5).
pub fn is_open_in(runtime: &RuntimeDirectory, life: &Life, pid: Pid) -> bool {
    let Ok(Some(stamp)) = file::stamp_at(runtime.descriptor(), &file_name(life)) else { return false };
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut opened = descriptors.filter_map(|descriptor| std::fs::metadata(descriptor.path()).ok());
    opened.any(|metadata| Stamp::of(&metadata).same_file(&stamp))
}

/// Removes a life file whose entry is gone. To be called under the lock of `scope.lock`.
pub fn remove(runtime: &RuntimeDirectory, life: &Life) {
    if let Err(error) = file::remove_at(runtime.descriptor(), &file_name(life)) {
        log::debug!("life file {life} stays: {error}"); // the next sweep takes it
    }
}

/// All lives that have a file, held or not.
///
/// # Errors
/// When the directory is there and cannot be listed.
pub fn all(runtime: &RuntimeDirectory) -> Result<Vec<Life>> {
    let listed = file::open_directory_at(runtime.descriptor(), Path::new(DIRECTORY))
        .and_then(|directory| file::entries(directory, usize::MAX));
    match listed {
        Ok(names) => {
            Ok(names.into_iter().filter_map(|(name, _)| Life::new(name.into_string().ok()?).ok()).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()), // no directory, no lives
        Err(source) => Err(Error::io("list the life files", source)),
    }
}

/// The entry that a life file holds: the pod's own, as it was at its start.
///
/// # Errors
/// When the file cannot be read or holds no entry of this life.
pub fn entry_of(runtime: &RuntimeDirectory, life: &Life) -> Result<Allocation> {
    let text = open(runtime, life)
        .and_then(|opened| file::read_whole(&opened, CONTENT_BYTES_MAX))
        .map_err(|source| Error::io(format!("read life file \"{life}\""), source))?;
    let entry: Option<Allocation> = serde_json::from_slice(&text).ok();
    entry
        .filter(|entry| entry.life == *life)
        .ok_or_else(|| Error::told(format!("life file \"{life}\" holds no entry of this life")))
}

/// Who holds a life, in words.
pub fn holder_of(runtime: &RuntimeDirectory, life: &Life) -> String {
    let stamp = file::stamp_at(runtime.descriptor(), &file_name(life)).ok().flatten();
    process::holder_of_lock(stamp.map_or(0, |stamp| stamp.inode()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_is_held_until_its_owner_lets_go() {
        let place = tempfile::tempdir().unwrap();
        let runtime = RuntimeDirectory::open_or_create(&place.path().join("r")).unwrap();
        let entry = crate::words::allocation::tests::entry("a", 1, &["/w:write"], None);
        let life = &entry.life;
        assert_eq!(probe(&runtime, life), Holding::Missing);
        let held = HeldLife::create(&runtime, &entry).unwrap();
        assert_eq!(probe(&runtime, life), Holding::Held);
        assert_eq!(all(&runtime).unwrap(), vec![life.clone()]);
        assert_eq!(entry_of(&runtime, life).unwrap(), entry);
        drop(held);
        assert_eq!(probe(&runtime, life), Holding::Free);
        wait_for_end(&runtime, life).unwrap();
        remove(&runtime, life);
        assert_eq!(probe(&runtime, life), Holding::Missing);
    }

    #[test]
    fn a_life_file_that_cannot_be_opened_proves_no_death() {
        let place = tempfile::tempdir().unwrap();
        let runtime = RuntimeDirectory::open_or_create(&place.path().join("r")).unwrap();
        let entry = crate::words::allocation::tests::entry("a", 1, &[], None);
        std::fs::create_dir(place.path().join("r/life")).unwrap();
        std::os::unix::fs::symlink("nowhere", place.path().join("r/life").join(entry.life.as_str())).unwrap();
        assert!(!is_dead(&runtime, &entry), "its process is gone, but something of it may still write");
    }

    #[test]
    fn without_a_life_file_only_the_very_process_counts() {
        let place = tempfile::tempdir().unwrap();
        let runtime = RuntimeDirectory::open_or_create(&place.path().join("r")).unwrap();
        let mut entry = crate::words::allocation::tests::entry("a", 1, &[], None);
        entry.pid = crate::words::identity::Pid::new(process::own_pid()).unwrap();
        entry.start_time = process::process_stat(process::own_pid()).unwrap().start_time;
        assert!(!is_dead(&runtime, &entry));
        entry.start_time += 1;
        assert!(is_dead(&runtime, &entry), "l06: the number was given to another process");
    }
}
