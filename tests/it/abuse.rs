//! A pod whose socket is abused in each way at once answers others within a second, with at most 64 connection
//! threads and less than 30 MB, and is as it was when they have gone.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;

use crate::protocol::{descriptors, threads_named};
use crate::world::{World, memory_kib, wait_until};

/// Opens so many connections, and says so on each.
fn clients(world: &World, count: usize, line: &[u8]) -> Vec<UnixStream> {
    let one = |_| {
        let mut stream = UnixStream::connect(world.socket("main")).unwrap();
        stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        let _ = stream.write_all(line); // what the pod does not read stays
        stream
    };
    (0..count).map(one).collect()
}

/// Clients that leave at once, each before the next comes.
fn one_by_one(world: &World, count: usize, line: &[u8]) -> Vec<UnixStream> {
    (0..count).for_each(|_| drop(clients(world, 1, line)));
    Vec::new()
}

#[test]
fn u07_whoever_abuses_the_socket_keeps_nobody_waiting_and_takes_no_memory() {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(8192)), hard).unwrap();
    let text = "x".repeat(300_000);
    let world = World::with_script(json!({ "main": vec![json!({ "text": text }); 4] }));
    world.start(&[]);
    (0..4).for_each(|_| assert_eq!(world.turn("main", "go")["result"], "finished"));
    let pid = world.pid("main");
    let before = descriptors(pid);
    let almost = vec![b'x'; (1 << 20) - 1];
    type Attack<'a> = (&'a str, &'a dyn Fn() -> Vec<UnixStream>);
    let half_open = || {
        let clients = clients(&world, 300, b"{\"method\":\"status\"}\n");
        clients.iter().for_each(|client| client.shutdown(std::net::Shutdown::Write).unwrap_or(()));
        clients
    };
    let attacks: [Attack<'_>; 8] = [
        ("silent", &|| clients(&world, 2_000, b"")),
        ("half a line", &|| clients(&world, 300, b"{\"method\":\"sta")),
        ("almost a MiB and no end", &|| clients(&world, 70, &almost)),
        ("slow readers of pages", &|| {
            clients(&world, 70, b"{\"method\":\"get_history\",\"params\":{\"since\":3}}\n")
        }),
        ("slow subscribers", &|| {
            clients(&world, 20, b"{\"method\":\"subscribe\",\"params\":{\"since\":0}}\n")
        }),
        ("half-open", &half_open),
        ("a flood of connects", &|| one_by_one(&world, 5_000, b"")),
        ("gone before the answer", &|| one_by_one(&world, 1_000, b"{\"method\":\"get_history\"}\n")),
    ];
    for (name, attack) in attacks {
        let (over, longest, peak) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    let asked = Instant::now();
                    while !world.raw("main", b"{\"method\":\"status\"}\n").starts_with("{\"ok\"") {}
                    let millis = u64::try_from(asked.elapsed().as_millis()).unwrap();
                    longest.fetch_max(millis, Ordering::SeqCst);
                    peak.fetch_max(memory_kib(pid, "VmRSS"), Ordering::SeqCst);
                    // Some have given their place back and are about to end, which takes a moment.
                    let is_bounded = || threads_named(pid, "connection") <= 64;
                    let pause = || std::thread::sleep(Duration::from_millis(1));
                    assert!(
                        (0..100).any(|_| is_bounded() || {
                            pause();
                            false
                        }),
                        "{name}: too many threads"
                    );
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let held = attack();
            std::thread::sleep(Duration::from_millis(500)); // they stay a while
            over.store(true, Ordering::SeqCst);
            drop(held);
        });
        let (longest, peak) = (longest.into_inner(), peak.into_inner());
        // An unoptimised pod needs its time to make seventy pages.
        let limit = if cfg!(debug_assertions) { 30_000 } else { 1_000 };
        assert!(longest < limit && peak < 30 << 10, "{name}: status took {longest} ms, memory {peak} KiB");
    }
    wait_until("their descriptors are closed", || descriptors(pid) <= before);
    wait_until("their threads have ended", || threads_named(pid, "connection") == 0);
    let peak = memory_kib(pid, "VmHWM");
    assert!(peak < 30 << 10, "memory was {peak} KiB");
    assert_eq!(world.turn("main", "go")["result"], "finished");
}
