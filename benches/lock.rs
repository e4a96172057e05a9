//! How long one change of `scope.lock` takes with 1, 100 and 1,000 allocations: register and release, each with its
//! lock, reading, probing of every life, checking and replacing. `cargo bench --bench lock`

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark prints")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use insomnia::store::life::{self, HeldLife};
use insomnia::store::paths::RuntimeDirectory;
use insomnia::store::scope_lock::ScopeLock;
use insomnia::sys::process;
use insomnia::words::allocation::{Allocation, AllocationState};
use insomnia::words::identity::{Pid, PodId, PodName};
use insomnia::words::limits::Limits;
use insomnia::words::scope::Rule;

fn entry(number: usize) -> Allocation {
    let pid = process::own_pid();
    let id = format!("pod-{number}");
    Allocation {
        pod_id: PodId::new(id.clone()).unwrap(),
        name: PodName::new("pod").unwrap(),
        pid: Pid::new(pid).unwrap(),
        start_time: process::process_stat(pid).unwrap().start_time,
        life: life::new_life().unwrap(),
        state: AllocationState::Live,
        spawned_by: None,
        socket: format!("/run/user/1000/insomnia/{id}/sock"),
        scope_allow: vec![Rule::try_from(format!("/home/somebody/project/part-{number}:write")).unwrap()],
        delegated_from: None,
        since: 1_700_000_000,
        extra: std::collections::BTreeMap::new(),
    }
}

fn main() {
    let memory = Path::new("/dev/shm");
    let place = tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()).unwrap();
    let runtime = Arc::new(RuntimeDirectory::open_or_create(&place.path().join("run")).unwrap());
    let lock = ScopeLock::new(Arc::clone(&runtime));
    let limits = Limits { pods_per_user: 10_000, ..Limits::default() };
    let register = |entry: Allocation| {
        let edited = lock.edit(None, |table| {
            table.register(entry.clone(), &limits)?;
            HeldLife::create(&runtime, &entry)
        });
        edited.unwrap().value
    };
    let mut lives: Vec<HeldLife> = Vec::new();
    println!("one change of {}:", place.path().display());
    for number in [1, 100, 1_000] {
        if lives.len() < number {
            let new: Vec<Allocation> = (lives.len()..number).map(entry).collect();
            let edited = lock.edit(None, |table| {
                new.into_iter()
                    .map(|entry| {
                        table.register(entry.clone(), &limits)?;
                        HeldLife::create(&runtime, &entry)
                    })
                    .collect::<Result<Vec<_>, _>>()
            });
            lives.extend(edited.unwrap().value);
        }
        let mut taken: Vec<Duration> = Vec::new();
        for _ in 0..(20_000 / number).clamp(200, 2_000) {
            let guest = entry(100_000);
            let begin = Instant::now();
            let held = register(guest.clone());
            taken.push(begin.elapsed());
            let begin = Instant::now();
            lock.edit(None, |table| Ok(table.release(&guest.life))).unwrap();
            taken.push(begin.elapsed());
            life::remove(&runtime, &guest.life);
            drop(held);
        }
        taken.sort();
        let at = |percent: usize| taken[taken.len() * percent / 100].as_secs_f64() * 1e3;
        println!("{number:5} allocations: median {:.3} ms, 99th {:.3} ms", at(50), at(99));
    }
}
