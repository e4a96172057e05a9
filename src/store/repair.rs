//! `scope repair`: a damaged or missing `scope.lock` rebuilt from the pods that live.
//!
//! Each living pod holds its life file, and the file holds its entry. Only a person starts this; no pod looks
//! into the runtime directory for others. Any thread may call it.

use std::path::{Path, PathBuf};
use std::sync::Once;

use crate::store::life::{self, Holding};
use crate::store::scope_lock::ScopeLock;
use crate::sys::{clock, file};
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};

/// Copies of bad files kept of one second before the repair gives up.
const COPIES_MAX: usize = 100;

/// What a repair found and did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Repaired {
    /// What was wrong with the file; `None` when it was sound and nothing was done.
    pub fault: Option<String>,
    /// Where the bad file is now; `None` when there was none or nothing was done.
    pub kept_aside: Option<PathBuf>,
    /// The entries that are in the file now; empty when the repair could not decide.
    pub entries: Vec<Allocation>,
    /// Why it could not decide, one sentence each. Not empty: nothing was changed.
    pub undecided: Vec<String>,
}

/// Rebuilds `scope.lock` from the life files that are held, if it is damaged or missing.
///
/// The bad file is kept beside it as `scope.lock.bad-TIME` and never replaces an older copy. When the pods
/// contradict each other, or a living one has left no readable entry, nothing is changed.
///
/// # Errors
/// `Error::LockBusy` when somebody holds the lock for 5 s, and when a file cannot be read, linked or written.
pub fn repair(lock: &ScopeLock) -> Result<Repaired> {
    match lock.stamp()? {
        None => repair_missing(lock),
        Some(stamp) if stamp.is_file() => repair_damaged(lock),
        Some(_) => repair_stranger(lock),
    }
}

/// Under the lock on the bad file itself, so that nobody changes it meanwhile.
fn repair_damaged(lock: &ScopeLock) -> Result<Repaired> {
    let locked = lock.lock(None)?;
    let fault = match lock.parse(locked.file()) {
        Ok(table) => return Ok(sound(&table)),
        Err(Error::LockUnusable { fault, .. }) => fault,
        Err(error) => return Err(error),
    };
    let table = match rebuild(lock, &fault)? {
        Ok(table) => table,
        Err(undecided) => return Ok(undecided),
    };
    // One more name for the bad file, not a copy: that needs no space and cannot be cut short.
    let kept_aside = keep_aside(lock, |from, to| file::link_at(lock.runtime().descriptor(), from, to))?;
    lock.commit(&locked, &table, &table.to_text())?;
    Ok(Repaired { fault: Some(fault), kept_aside: Some(kept_aside), ..sound(&table) })
}

/// A link, directory or device in the file's place cannot be locked and is moved away.
fn repair_stranger(lock: &ScopeLock) -> Result<Repaired> {
    let fault = "it is no regular file";
    if let Err(undecided) = rebuild(lock, fault)? {
        return Ok(undecided);
    }
    let kept_aside = keep_aside(lock, |from, to| file::rename_new_at(lock.runtime().descriptor(), from, to))?;
    Ok(Repaired { fault: Some(fault.into()), kept_aside: Some(kept_aside), ..repair_missing(lock)? })
}

/// Nobody can lock what is missing; but while a pod lives nobody else creates it, and a hard link gives the name
/// to the first who comes.
fn repair_missing(lock: &ScopeLock) -> Result<Repaired> {
    let fault = "it is missing";
    match rebuild(lock, fault)? {
        Ok(table) if lock.create(&table)? => Ok(Repaired { fault: Some(fault.into()), ..sound(&table) }),
        Ok(_) => Ok(sound(&lock.read()?)), // somebody was faster
        Err(undecided) => Ok(undecided),
    }
}

/// Who lives: the table, or where that cannot be used, for whoever wants to see, ask or end somebody, what the life
/// files tell, contradictions and all. Nothing may be started or lent by it.
///
/// # Errors
/// When neither can be read.
pub fn living(lock: &ScopeLock) -> Result<AllocationTable> {
    static SAID: Once = Once::new();
    match lock.read() {
        Err(error @ Error::LockUnusable { .. }) => {
            SAID.call_once(|| log::error!("{error}; until then what the pods themselves have left counts"));
            Ok(AllocationTable::unchecked(held_entries(lock)?.0))
        }
        read => read,
    }
}

/// The table of the pods that live, or what to say where they do not tell it.
fn rebuild(lock: &ScopeLock, fault: &str) -> Result<Result<AllocationTable, Repaired>> {
    let (entries, unreadable) = held_entries(lock)?;
    let table = if unreadable.is_empty() { AllocationTable::rebuild(entries) } else { Err(unreadable) };
    Ok(table.map_err(|undecided| Repaired { fault: Some(fault.into()), undecided, ..Repaired::default() }))
}

/// The entries of the lives that are held, the oldest first, and what is said of those that cannot be read.
fn held_entries(lock: &ScopeLock) -> Result<(Vec<Allocation>, Vec<String>)> {
    let runtime = lock.runtime();
    let lives = life::all(runtime)?;
    let held = lives.iter().filter(|life| life::probe(runtime, life) == Holding::Held);
    let (mut entries, mut unreadable) = (Vec::new(), Vec::new());
    for life in held {
        match life::entry_of(runtime, life) {
            Ok(entry) => entries.push(entry),
            Err(error) => unreadable.push(format!(
                "a pod lives whose scope is not known ({error}); it is held by {}: end that, then repair again",
                life::holder_of(runtime, life)
            )),
        }
    }
    entries.sort_by(|a, b| (a.since, &a.pod_id).cmp(&(b.since, &b.pod_id)));
    Ok((entries, unreadable))
}

/// Gives the bad file a name that says when, without taking that of an older one.
fn keep_aside(lock: &ScopeLock, give: impl Fn(&Path, &Path) -> std::io::Result<()>) -> Result<PathBuf> {
    let time = clock::compact_utc(clock::now_millis());
    for n in 1..=COPIES_MAX {
        let suffix = if n == 1 { String::new() } else { format!("-{n}") };
        let name = format!("{}.bad-{time}{suffix}", ScopeLock::NAME);
        match give(Path::new(ScopeLock::NAME), Path::new(&name)) {
            Ok(()) => return Ok(lock.runtime().path().join(name)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(Error::io(format!("keep the bad file as \"{name}\""), source)),
        }
    }
    Err(Error::told(format!(
        "too many bad copies of {time}; look at \"{}\"",
        lock.runtime().path().display()
    )))
}

fn sound(table: &AllocationTable) -> Repaired {
    Repaired { entries: table.allocations().to_vec(), ..Repaired::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::life::HeldLife;
    use crate::store::scope_lock::tests::fresh;
    use crate::words::allocation::tests::entry;
    use crate::words::limits::Limits;

    /// A root and its child, both alive as long as the result is kept.
    fn family(lock: &ScopeLock) -> Vec<HeldLife> {
        let limits = Limits::default();
        let edited = lock.edit(None, |table| {
            let (root, mut kid) =
                (entry("root", 1, &["/w:write"], None), entry("kid", 2, &["/w/k:write"], Some("root")));
            kid.since = 1;
            table.register(root.clone(), &limits)?;
            table.lend(kid.clone(), &limits)?;
            Ok(vec![HeldLife::create(lock.runtime(), &root)?, HeldLife::create(lock.runtime(), &kid)?])
        });
        edited.unwrap().value
    }

    #[test]
    fn l11_the_table_comes_back_and_each_bad_file_is_kept() {
        let (_place, lock) = fresh();
        let _lives = family(&lock);
        let good = lock.read().unwrap();
        for bad in ["", "{", "null", "[]", "{\"version\":9,\"allocations\":[]}"] {
            std::fs::write(lock.path(), bad).unwrap();
            let repaired = repair(&lock).unwrap();
            assert!(repaired.fault.is_some() && repaired.undecided.is_empty(), "{repaired:?}");
            assert_eq!(std::fs::read_to_string(repaired.kept_aside.unwrap()).unwrap(), bad);
            assert_eq!(lock.read().unwrap(), good, "{bad:?}");
        }
        let kept = std::fs::read_dir(lock.runtime().path()).unwrap();
        let kept = kept.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains(".bad-"));
        assert_eq!(kept.count(), 5);
        assert_eq!(repair(&lock).unwrap().fault, None);
    }

    #[test]
    fn l04_a_missing_file_comes_back() {
        let (_place, lock) = fresh();
        let _lives = family(&lock);
        let good = lock.read().unwrap();
        std::fs::remove_file(lock.path()).unwrap();
        assert_eq!(repair(&lock).unwrap().entries.len(), 2);
        assert_eq!(lock.read().unwrap(), good);
    }

    #[test]
    fn l09_a_link_in_its_place_is_moved_away_and_not_followed() {
        let (place, lock) = fresh();
        let _lives = family(&lock);
        std::fs::write(place.path().join("precious"), "gold").unwrap();
        std::fs::remove_file(lock.path()).unwrap();
        std::os::unix::fs::symlink(place.path().join("precious"), lock.path()).unwrap();
        assert!(lock.edit(None, |_| Ok(())).is_err());
        let repaired = repair(&lock).unwrap();
        assert!(std::fs::symlink_metadata(repaired.kept_aside.unwrap()).unwrap().is_symlink());
        assert_eq!(lock.read().unwrap().allocations().len(), 2);
        assert_eq!(std::fs::read_to_string(place.path().join("precious")).unwrap(), "gold");
    }

    #[test]
    fn the_dead_do_not_come_back() {
        let (_place, lock) = fresh();
        let mut lives = family(&lock);
        lives.remove(0);
        std::fs::write(lock.path(), "").unwrap();
        let repaired = repair(&lock).unwrap();
        let [kid] = repaired.entries.as_slice() else { unreachable!("{repaired:?}") };
        assert_eq!((kid.pod_id.as_str(), &kid.delegated_from), ("kid", &None));
    }

    #[test]
    fn where_it_cannot_decide_nothing_changes() {
        let (_place, lock) = fresh();
        let _lives = family(&lock);
        let intruder = HeldLife::create(lock.runtime(), &entry("x", 3, &["/w/x:write"], None)).unwrap();
        std::fs::write(lock.path(), "{").unwrap();
        let repaired = repair(&lock).unwrap();
        assert_eq!((repaired.undecided.len(), &repaired.kept_aside), (1, &None), "{repaired:?}");
        assert_eq!(std::fs::read_to_string(lock.path()).unwrap(), "{");
        let path = lock.runtime().path().join("life").join(intruder.life().as_str());
        std::fs::write(path, "?").unwrap();
        let repaired = repair(&lock).unwrap();
        assert!(repaired.undecided[0].contains("is not known"), "{repaired:?}");
        drop(intruder);
        assert_eq!(repair(&lock).unwrap().entries.len(), 2);
    }
}
