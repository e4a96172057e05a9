//! Writers of `scope.lock` that are killed at any moment, readers that take no lock, and a checker that knows
//! nothing of scopes: whoever may write a directory marks it with a lock of its own, and two marks are a failure.
//!
//! 2,000 kills and 200,000 reads in CI; for 100,000 kills and 1,000,000 reads:
//! `INSOMNIA_LONG=1 cargo test --release --test it lock_kills`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use insomnia::store::life::{self, HeldLife, Holding};
use insomnia::store::paths::RuntimeDirectory;
use insomnia::store::scope_lock::ScopeLock;
use insomnia::sys::process::{self, ErrorOutput, Output, Program, Running};
use insomnia::words::allocation::{Allocation, AllocationState};
use insomnia::words::error::Error;
use insomnia::words::identity::{Life, Pid, PodName};
use insomnia::words::limits::Limits;
use insomnia::words::scope::Rule;

use crate::world::{PATIENCE, is_long, memory_place, wait_until};

/// What the writers fight for, relative to the place. Some begin alike.
const CONTESTED: [&str; 5] = ["s", "s/a", "s/a/b", "s/a-b", "s/c"];

fn dice(state: &mut u64, sides: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 33) % sides
}

fn open_lock(place: &Path) -> ScopeLock {
    ScopeLock::new(Arc::new(RuntimeDirectory::open_or_create(&place.join("run")).unwrap()))
}

fn entry(name: &PodName, life: Life, rule: &str) -> Allocation {
    let pid = process::own_pid();
    Allocation {
        pod_id: insomnia::words::identity::PodId::candidate(name, 1),
        name: name.clone(),
        pid: Pid::new(pid).unwrap(),
        start_time: process::process_stat(pid).unwrap().start_time,
        life,
        state: AllocationState::Live,
        spawned_by: None,
        socket: String::new(),
        scope_allow: vec![Rule::try_from(rule.to_owned()).unwrap()],
        delegated_from: None,
        since: 0,
        extra: std::collections::BTreeMap::new(),
    }
}

/// Registers under a free id and holds the life; `None` when the scope is refused.
fn register(lock: &ScopeLock, mut wanted: Allocation) -> Option<(Allocation, HeldLife)> {
    let limits = Limits::default();
    let edited = lock.edit(None, |table| {
        wanted.pod_id = table.free_id(&wanted.name);
        table.register(wanted.clone(), &limits)?;
        let held = HeldLife::create(lock.runtime(), &wanted)?;
        lock.sweep(table);
        Ok((wanted, held))
    });
    match edited {
        Ok(edited) => Some(edited.value),
        Err(Error::Refused(_)) => None,
        Err(error) => panic!("FAULT register: {error}"),
    }
}

fn release(lock: &ScopeLock, (entry, held): (Allocation, HeldLife), own: &Life) {
    let edited = lock.edit(None, |table| {
        assert!(table.release(&entry.life).is_some(), "FAULT the entry of a living pod was taken");
        assert!(table.by_life(own).is_some(), "FAULT a living pod is lost");
        Ok(())
    });
    edited.unwrap_or_else(|error| panic!("FAULT release: {error}"));
    drop(held);
    life::remove(lock.runtime(), &entry.life);
}

/// Registers a pod of this process that lives as long as the result is kept.
pub fn register_somebody(lock: &ScopeLock, name: &str, rule: Option<&str>) -> (Allocation, HeldLife) {
    let mut wanted = entry(&PodName::new(name).unwrap(), life::new_life().unwrap(), "/nowhere:read");
    if let Some(rule) = rule {
        wanted.scope_allow = vec![Rule::try_from(rule.to_owned()).unwrap()];
    }
    register(lock, wanted).expect("its scope is free")
}

/// Takes such a pod out again.
pub fn release_one(lock: &ScopeLock, one: (Allocation, HeldLife)) {
    lock.edit(None, |table| Ok(table.release(&one.0.life))).unwrap();
    life::remove(lock.runtime(), &one.0.life);
}

/// Not a test: what the killed processes do. Started by the tests below with the place and a life.
#[test]
#[ignore = "is the writer that the other tests start"]
fn writer_process() {
    let Ok(place) = std::env::var("LOCK_WRITER_PLACE").map(PathBuf::from) else { return };
    let life = Life::new(std::env::var("LOCK_WRITER_LIFE").unwrap()).unwrap();
    let mut state = u64::from_str_radix(&life.as_str()[16..], 16).unwrap() | 1;
    let mut marks: Vec<Option<File>> = CONTESTED
        .iter()
        .map(|directory| place.join(directory).join("mark"))
        .map(|mark| Some(File::options().read(true).write(true).open(mark).unwrap()))
        .collect();
    let lock = open_lock(&place);
    let name = PodName::new("base").unwrap();
    let rule = format!("{}/own/{life}:write", place.display());
    let _own = register(&lock, entry(&name, life.clone(), &rule)).expect("FAULT nobody else wants it");
    let name = PodName::new("guest").unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    while Instant::now() < end {
        let wanted = usize::try_from(dice(&mut state, 5)).unwrap();
        let flat = dice(&mut state, 3) == 0;
        let reach = if flat { "flat" } else { "recursive" };
        let rule = format!("{}/{}:write:{reach}", place.display(), CONTESTED[wanted]);
        let Some(guest) = register(&lock, entry(&name, life::new_life().unwrap(), &rule)) else { continue };
        // By the names of directories as they stand in the list, by none of the program's own words.
        let below = format!("{}/", CONTESTED[wanted]);
        let mine =
            |directory: &str| directory == CONTESTED[wanted] || (!flat && directory.starts_with(&below));
        let mut locked = Vec::new();
        for (at, directory) in CONTESTED.iter().enumerate().filter(|(_, directory)| mine(directory)) {
            let mark = take_mark(&lock, directory, marks[at].take().unwrap());
            mark.write_all_at(guest.0.life.as_str().as_bytes(), 0).unwrap();
            locked.push((at, mark));
        }
        std::thread::sleep(Duration::from_micros(dice(&mut state, 300)));
        for (at, mark) in locked {
            marks[at] = Some(mark.unlock().unwrap());
        }
        release(&lock, guest, &life);
    }
}

/// Takes the mark of a directory that this process may write. Somebody who holds it and lives is a second writer.
///
/// A killed process lets its locks go one after another in no promised order, so for a moment the mark of a pod
/// that is dead already is still held.
fn take_mark(lock: &ScopeLock, directory: &str, mut mark: File) -> Flock<File> {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        match Flock::lock(mark, FlockArg::LockExclusiveNonblock) {
            Ok(mark) => return mark,
            Err((back, errno)) => {
                let mut life = [0; 32];
                let _ = back.read_at(&mut life, 0); // empty before the first writer
                let life = Life::new(String::from_utf8_lossy(&life));
                let lives = life.is_ok_and(|life| life::probe(lock.runtime(), &life) == Holding::Held);
                assert!(!lives && Instant::now() < end, "FAULT two writers of {directory}: {errno}");
                mark = back;
            }
        }
    }
}

struct Writer {
    life: Life,
    running: Running,
    registered: bool,
}

fn start_writer(place: &Path) -> Writer {
    let life = life::new_life().unwrap();
    let args = ["--exact", "lock_kills::writer_process", "--ignored", "--nocapture"];
    let running = Program::new(std::env::current_exe().unwrap(), args)
        .env("LOCK_WRITER_PLACE", place)
        .env("LOCK_WRITER_LIFE", life.as_str())
        .start(ErrorOutput::WithOutput)
        .unwrap();
    Writer { life, running, registered: false }
}

impl Writer {
    /// What it has said so far; it must be alive and have nothing to complain about.
    fn check(&mut self) {
        let mut buffer = [0; 4096];
        loop {
            match self.running.read(&mut buffer, None, Instant::now()).unwrap() {
                Output::Bytes(count) => {
                    let text = String::from_utf8_lossy(&buffer[..count]);
                    assert!(!text.contains("FAULT") && !text.contains("panicked"), "{text}");
                }
                Output::TimedOut => return,
                Output::End | Output::Cancelled => panic!("a writer ended by itself"),
            }
        }
    }
}

/// A place with the contested directories and their marks.
fn place() -> tempfile::TempDir {
    let place = memory_place();
    for directory in CONTESTED {
        std::fs::create_dir_all(place.path().join(directory)).unwrap();
        File::create(place.path().join(directory).join("mark")).unwrap();
    }
    place
}

fn temporary_files(place: &Path) -> Vec<String> {
    let names = std::fs::read_dir(place.join("run")).unwrap();
    names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "scope.lock" && name != "life")
        .collect()
}

/// A failed test must not leave a thread that goes on for ever.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn l01_and_l02_killed_writers_break_nothing_and_lose_nobody() {
    let place = place();
    let place = place.path().canonicalize().unwrap();
    let lock = open_lock(&place);
    lock.edit(None, |_| Ok(())).unwrap();
    let (kills_wanted, reads_wanted) = if is_long() { (100_000, 1_000_000) } else { (2_000, 200_000) };
    let (reads, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut state = 0x1234_5678_9abc_def1;
    std::thread::scope(|scope| {
        let _stop_in_any_case = StopOnDrop(&stop);
        let reader = || {
            while !stop.load(Ordering::Relaxed) {
                if let Err(error) = lock.read() {
                    stop.store(true, Ordering::Relaxed);
                    panic!("a reader without the lock: {error}");
                }
                reads.fetch_add(1, Ordering::Relaxed);
            }
        };
        let reader = std::thread::Builder::new().name("reader".into()).spawn_scoped(scope, reader).unwrap();
        let mut writers: Vec<Writer> = Vec::new();
        let (mut kills, mut of_registered) = (0, 0);
        while (kills < kills_wanted || reads.load(Ordering::Relaxed) < reads_wanted)
            && !stop.load(Ordering::Relaxed)
        {
            // 2 to 8 at once, now more, now fewer.
            let number = 2 + usize::try_from(kills / 50 % 7).unwrap();
            while writers.len() < number {
                writers.push(start_writer(&place));
            }
            std::thread::sleep(Duration::from_micros(dice(&mut state, 3_000)));
            let chosen = usize::try_from(dice(&mut state, writers.len() as u64)).unwrap();
            let mut killed = writers.swap_remove(chosen);
            killed.check();
            killed.running.kill();
            kills += 1;
            of_registered += u64::from(killed.registered);
            let table = lock.read().unwrap_or_else(|error| panic!("after kill {kills}: {error}"));
            for writer in &mut writers {
                let found = table.by_life(&writer.life).is_some();
                assert!(found || !writer.registered, "after kill {kills} a living pod is lost");
                writer.registered = found;
            }
            let left = temporary_files(&place);
            assert!(left.len() <= 1, "after kill {kills}: {left:?}");
        }
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        for mut writer in writers {
            wait_until("every writer is in the table", || {
                writer.check();
                lock.read().unwrap().by_life(&writer.life).is_some()
            });
        }
        println!(
            "{kills} kills, {of_registered} of them in the loop, {} reads without the lock",
            reads.load(Ordering::Relaxed)
        );
    });
    // All are dead now: the next who comes finds an empty house.
    lock.edit(None, |table| {
        lock.sweep(table);
        assert!(table.allocations().is_empty());
        Ok(())
    })
    .unwrap();
    assert_eq!(life::all(lock.runtime()).unwrap().len(), 0);
}

#[test]
fn probes_and_watchers_never_take_each_other_for_the_owner() {
    let place = memory_place();
    let lock = open_lock(place.path());
    let free = life::new_life().unwrap();
    let name = PodName::new("a").unwrap();
    drop(HeldLife::create(lock.runtime(), &entry(&name, free.clone(), "/w:write")).unwrap());
    let tries = AtomicU64::new(0);
    let tries_wanted = if is_long() { 10_000_000 } else { 1_000_000 };
    std::thread::scope(|scope| {
        for n in 0..4 {
            let body = || {
                while tries.fetch_add(1, Ordering::Relaxed) < tries_wanted {
                    assert_eq!(life::probe(lock.runtime(), &free), Holding::Free);
                    life::wait_for_end(lock.runtime(), &free).unwrap();
                }
            };
            std::thread::Builder::new().name(format!("prober {n}")).spawn_scoped(scope, body).unwrap();
        }
    });
}

/// A look at all lives used to come between a starter's creation of its life file and its lock.
#[test]
fn a_look_at_a_life_never_keeps_its_owner_out() {
    let place = memory_place();
    let lock = open_lock(place.path());
    let stop = AtomicBool::new(false);
    let name = PodName::new("a").unwrap();
    std::thread::scope(|scope| {
        let look = || {
            while !stop.load(Ordering::Relaxed) {
                for life in life::all(lock.runtime()).unwrap() {
                    let seen = life::probe(lock.runtime(), &life);
                    let gone = life::entry_of(lock.runtime(), &life).is_err();
                    assert!(seen != Holding::Free || gone || stop.load(Ordering::Relaxed), "seen unheld");
                }
            }
        };
        let _stop_in_any_case = StopOnDrop(&stop);
        std::thread::Builder::new().name("looker".into()).spawn_scoped(scope, look).unwrap();
        let end = Instant::now() + if is_long() { PATIENCE } else { Duration::from_secs(1) };
        while Instant::now() < end {
            let life = life::new_life().unwrap();
            let held = HeldLife::create(lock.runtime(), &entry(&name, life.clone(), "/w:write")).unwrap();
            life::remove(lock.runtime(), &life);
            drop(held);
        }
        stop.store(true, Ordering::Relaxed);
    });
}
