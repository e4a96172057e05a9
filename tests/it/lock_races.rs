//! Real pods that want the same place at the same moment, and the public faults of lock files by their numbers.
//!
//! 20 rounds of 50 racing pods in CI; for 200 rounds: `INSOMNIA_LONG=1 cargo test --release --test it lock_races`.

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::store::paths::RuntimeDirectory;
use insomnia::store::scope_lock::ScopeLock;
use insomnia::sys::process::{self, ErrorOutput};
use insomnia::words::error::Error;

use crate::world::{PATIENCE, Ran, World, has_tool, is_long, lives, memory_place, ran, wait_until};

/// Starts pods at the same moment and waits for all their launch commands.
fn race(world: &World, all: &[Vec<&str>]) -> Vec<Ran> {
    let pod = env!("CARGO_BIN_EXE_pod");
    let started: Vec<_> =
        all.iter().map(|args| world.program(pod, args).start(ErrorOutput::Separate).unwrap()).collect();
    let collect = |mut running: process::Running| {
        let stdout = running.read_to_end(1 << 20, None, Instant::now() + PATIENCE).unwrap();
        let code = running.wait(Instant::now() + PATIENCE).unwrap().code();
        Ran { code, stdout: String::from_utf8(stdout).unwrap(), stderr: running.error_text(1 << 20) }
    };
    started.into_iter().map(collect).collect()
}

/// Exactly one has started; every refusal names it. Returns its ready line.
fn one_winner(results: &[Ran]) -> Value {
    let (won, lost): (Vec<&Ran>, Vec<&Ran>) = results.iter().partition(|ran| ran.code == Some(0));
    assert_eq!(won.len(), 1, "{results:#?}");
    let ready: Value = serde_json::from_str(&won[0].stdout).unwrap();
    let (name, pid) = (format!("\"{}\"", ready["pod_id"].as_str().unwrap()), format!("pid {}", ready["pid"]));
    for ran in lost {
        assert!(ran.code == Some(1) && ran.stderr.contains(&name) && ran.stderr.contains(&pid), "{ran:?}");
    }
    ready
}

fn open_lock(world: &World) -> ScopeLock {
    ScopeLock::new(Arc::new(RuntimeDirectory::open_or_create(&world.runtime()).unwrap()))
}

/// An entry as another program might have written it, without a life file.
fn foreign_entry(pid: i32, start_time: u64, scope: &Path) -> Value {
    json!({ "pod_id": "old", "name": "old", "pid": pid, "start_time": start_time, "life": "0".repeat(32),
        "state": "live", "spawned_by": null, "socket": "/nowhere", "delegated_from": null,
        "scope_allow": [format!("{}:write:recursive", scope.display())] })
}

fn write_table(world: &World, entries: Value) {
    drop(open_lock(world));
    let text = json!({ "version": 1, "allocations": entries }).to_string();
    std::fs::write(world.runtime().join("scope.lock"), text).unwrap();
}

#[test]
fn of_fifty_pods_that_want_overlapping_scopes_one_starts() {
    let world = World::with_script(json!({}));
    std::fs::create_dir_all(world.project().join("s/a")).unwrap();
    std::os::unix::fs::symlink("s", world.project().join("link")).unwrap();
    let absolute = format!("{}:write", world.project().join("s/a/new").display());
    let spellings = [
        "s:write",
        "s/:write",
        ".//s//:write:recursive",
        "link:write",
        "x/../s:write",
        ".:write",
        "s/a:write",
        "link/a:write:flat",
        "s/a/.:write",
        // Inside every one of them, the flat one included.
        "link/../s/a/new/..:write",
    ];
    let rounds = if is_long() { 200 } else { 20 };
    for round in 0..rounds {
        let mut all: Vec<Vec<&str>> = (0..50)
            .map(|n| vec!["--name", "racer", "--scope", spellings[(n * 7 + round) % spellings.len()]])
            .collect();
        all[round % 50][3] = if round % 2 == 0 { &absolute } else { "s:write" };
        let ready = one_winner(&race(&world, &all));
        world.kill(ready["pod_id"].as_str().unwrap());
    }
}

#[test]
fn of_eight_pods_that_want_one_path_one_starts_a_hundred_times() {
    let world = World::with_script(json!({}));
    for _ in 0..100 {
        let results = race(&world, &vec![vec!["--scope", "s:write"]; 8]);
        let winner = one_winner(&results);
        world.kill(winner["pod_id"].as_str().unwrap());
    }
}

#[test]
fn a_zombie_is_dead_and_a_stopped_pod_is_alive() {
    let world = World::with_script(json!({}));
    // In the foreground it is a child of this test, and stays a zombie until the test looks after it.
    let pod = world.program(env!("CARGO_BIN_EXE_pod"), ["--foreground", "--scope", "s:write"]);
    let mut running = pod.start(ErrorOutput::Separate).unwrap();
    wait_until("it has an entry", || world.socket("main").exists());
    world.signal("main", "STOP");
    let refused = world.pod_command(["--name", "other", "--scope", "s:write"]);
    assert!(refused.stderr.contains("held by pod \"main\""), "{}", refused.stderr);
    let pid = world.pid("main");
    let stat = process::process_stat(pid).unwrap();
    process::kill_exactly(pid, stat.start_time).unwrap();
    wait_until("it is a zombie", || process::process_stat(pid).is_some_and(|stat| stat.is_zombie));
    wait_until("its scope is free", || {
        world.pod_command(["--name", "other", "--scope", "s:write"]).code == Some(0)
    });
    assert!(process::process_stat(pid).is_some_and(|stat| stat.is_zombie), "it is one still");
    assert!(running.wait(Instant::now() + PATIENCE).is_ok());
}

#[test]
fn l12_twenty_starters_reclaim_one_dead_entry_and_one_wins() {
    let world = World::with_script(json!({}));
    world.start(&["--name", "first", "--scope", "s:write"]);
    for _ in 0..if is_long() { 500 } else { 15 } {
        let dead = world.table()["allocations"][0]["pod_id"].as_str().unwrap().to_owned();
        world.kill(&dead);
        let all = vec![vec!["--name", "next", "--scope", "s:write"]; 20];
        let ready = one_winner(&race(&world, &all));
        let left = world.table()["allocations"].as_array().unwrap().clone();
        assert_eq!((left.len(), &left[0]["pid"]), (1, &ready["pid"]));
    }
}

#[test]
fn u03_ten_starters_of_one_name_each_answer_on_their_own_socket() {
    let world = World::with_script(json!({}));
    for _ in 0..if is_long() { 200 } else { 4 } {
        let results = race(&world, &vec![vec!["--name", "same"]; 10]);
        let mut ids: Vec<String> = Vec::new();
        for ran in &results {
            assert_eq!(ran.code, Some(0), "{ran:?}");
            let ready: Value = serde_json::from_str(&ran.stdout).unwrap();
            let id = ready["pod_id"].as_str().unwrap();
            let status = world.status(id);
            assert_eq!((&status["pod_id"], &status["pid"]), (&ready["pod_id"], &ready["pid"]));
            ids.push(id.to_owned());
        }
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 10, "{ids:?}");
        ids.iter().for_each(|id| world.kill(id)); // what is left is the crash that the next round begins with
    }
}

#[test]
fn eight_first_starts_at_once_make_one_whole_file() {
    for _ in 0..if is_long() { 50 } else { 5 } {
        let world = World::with_script(json!({}));
        for ran in race(&world, &vec![vec!["--name", "first"]; 8]) {
            assert_eq!(ran.code, Some(0), "{ran:?}");
        }
        assert_eq!(world.table()["allocations"].as_array().unwrap().len(), 8);
    }
    // The same without the cost of whole pods: each thread with descriptors of its own.
    let place = memory_place();
    for round in 0..300 {
        let directory = place.path().join(round.to_string());
        let barrier = Barrier::new(8);
        std::thread::scope(|scope| {
            for n in 0..8 {
                let body = || {
                    barrier.wait();
                    let runtime = Arc::new(RuntimeDirectory::open_or_create(&directory).unwrap());
                    let lock = ScopeLock::new(Arc::clone(&runtime));
                    let held = crate::lock_kills::register_somebody(&lock, "first", None);
                    lock.read().unwrap();
                    barrier.wait();
                    drop(held);
                };
                std::thread::Builder::new().name(format!("start {n}")).spawn_scoped(scope, body).unwrap();
            }
        });
        let names = std::fs::read_dir(&directory).unwrap();
        let mut names: Vec<_> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["life", "scope.lock"]);
    }
}

#[test]
fn l04_a_file_that_is_replaced_during_a_change_is_not_overwritten() {
    let world = World::with_script(json!({}));
    world.start(&["--name", "a", "--scope", "s:write"]);
    let lock = open_lock(&world);
    let (path, other) = (lock.path(), world.runtime().join("other"));
    let edited = lock.edit(None, |table| {
        std::fs::copy(&path, &other).unwrap();
        std::fs::rename(&other, &path).unwrap();
        let all = [vec!["--name", "b", "--scope", "s:write"], vec!["--name", "c", "--scope", "t:write"]];
        let codes: Vec<_> = race(&world, &all).iter().map(|ran| ran.code).collect();
        assert_eq!(codes, [Some(1), Some(0)], "the new file guards as the old one did");
        let life = table.allocations()[0].life.clone();
        Ok(table.release(&life))
    });
    assert!(edited.unwrap_err().to_string().contains("was replaced by somebody else"));
    assert!(world.entry("a").is_some() && world.entry("c").is_some());
    std::fs::remove_file(&path).unwrap();
    let refused = world.pod_command(["--name", "d", "--scope", "u:write"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("missing although pod"), "{refused:?}");
    assert!(refused.stderr.contains("insomnia scope repair") && !path.exists());
}

#[test]
fn l05_no_registration_is_lost_and_the_file_is_never_deleted() {
    let place = memory_place();
    let runtime = Arc::new(RuntimeDirectory::open_or_create(&place.path().join("run")).unwrap());
    let lock = ScopeLock::new(runtime);
    lock.edit(None, |_| Ok(())).unwrap();
    let all: Vec<_> = std::thread::scope(|scope| {
        let body = |n: usize| {
            let lock = &lock;
            move || {
                let mut kept = Vec::new();
                for round in 0..100 {
                    let name = format!("p{n}");
                    let entry = crate::lock_kills::register_somebody(lock, &name, None);
                    assert!(lock.path().exists());
                    if round % 20 == 0 {
                        kept.push(entry)
                    } else {
                        crate::lock_kills::release_one(lock, entry)
                    }
                }
                kept
            }
        };
        let threads: Vec<_> = (0..4)
            .map(|n| std::thread::Builder::new().name(format!("p{n}")).spawn_scoped(scope, body(n)).unwrap())
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((all.len(), lock.read().unwrap().allocations().len()), (20, 20));
}

#[test]
fn l06_a_process_number_used_again_is_dead_and_the_very_process_alive() {
    let world = World::with_script(json!({}));
    let mut sleeper = world.program("sleep", ["60"]).start(ErrorOutput::Separate).unwrap();
    wait_until("sleep is there", || !world.processes().is_empty());
    let pid = world.processes()[0];
    let start_time = process::process_stat(pid).unwrap().start_time;
    let scope = world.project().join("s");
    write_table(&world, json!([foreign_entry(pid, start_time, &scope)]));
    let refused = world.pod_command(["--scope", "s:write"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("\"old\""), "{refused:?}");
    write_table(&world, json!([foreign_entry(pid, start_time + 1, &scope)]));
    world.start(&["--scope", "s:write"]);
    assert!(world.entry("old").is_none());
    assert!(lives(pid), "nobody was sent a signal");
    sleeper.kill();
}

#[test]
fn l07_the_number_of_a_dead_pod_may_be_my_own() {
    let world = World::with_script(json!({}));
    let text = json!([foreign_entry(4711, 1, &world.project().join("s"))]);
    write_table(&world, text);
    let path = world.runtime().join("scope.lock");
    let script = format!(
        "sed -i \"s/4711/$$/\" '{}' && exec '{}' --foreground --scope s:write",
        path.display(),
        env!("CARGO_BIN_EXE_pod")
    );
    let pod = world.program("sh", ["-c", &script]).start(ErrorOutput::Separate).unwrap();
    wait_until("it has an entry", || world.entry("main").is_some());
    assert!(world.entry("old").is_none());
    drop(pod);
}

#[test]
fn l09_links_and_places_of_others_are_refused() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let check = |prepare: &dyn Fn(&World), reason: &str| {
        let world = World::with_script(json!({}));
        std::fs::write(world.path("precious"), "gold").unwrap();
        prepare(&world);
        let ran = world.pod_command(["--scope", "s:write"]);
        assert!(ran.code == Some(1) && ran.stderr.contains(reason), "{reason}: {ran:?}");
        assert_eq!(crate::world::read(world.path("precious")), "gold");
    };
    let directory = |world: &World, mode| {
        std::fs::create_dir(world.runtime()).unwrap();
        std::fs::set_permissions(world.runtime(), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    check(
        &|world| {
            directory(world, 0o700);
            symlink(world.path("precious"), world.runtime().join("scope.lock")).unwrap();
        },
        "no regular file",
    );
    check(
        &|world| {
            std::fs::create_dir(world.path("elsewhere")).unwrap();
            symlink(world.path("elsewhere"), world.runtime()).unwrap();
        },
        "no link",
    );
    check(&|world| directory(world, 0o777), "chmod 700");
    if process::own_uid() == 0 {
        check(
            &|world| {
                directory(world, 0o700);
                std::os::unix::fs::chown(world.runtime(), Some(12345), None).unwrap();
            },
            "belongs to user 12345",
        );
    }
}

#[test]
fn l10_a_stopped_holder_delays_changes_for_five_seconds_and_readers_not_at_all() {
    if !has_tool("flock") {
        return;
    }
    let world = World::with_script(json!({}));
    world.start(&["--name", "a", "--scope", "s:write"]);
    let own = world.pid("a");
    let path = world.runtime().join("scope.lock");
    let arguments = [path.as_os_str(), "sleep".as_ref(), "60".as_ref()];
    let mut holder = world.program("flock", arguments).start(ErrorOutput::Separate).unwrap();
    let lock = open_lock(&world);
    let others = || world.processes().into_iter().filter(|pid| *pid != own);
    wait_until("flock and sleep are there", || others().count() == 2);
    let send = |signal: &str, pid: i32| {
        ran(world.program("kill", [format!("-{signal}"), pid.to_string()]));
    };
    others().for_each(|pid| send("STOP", pid));
    let held: Vec<i32> = others().collect();

    let begin = Instant::now();
    assert_eq!(lock.read().unwrap().allocations().len(), 1);
    assert!(begin.elapsed() < Duration::from_millis(500), "reading takes no lock");
    let list = world.insomnia(["scope", "list", "--json"]);
    assert!(list.code == Some(0) && list.stdout.contains("\"pod_id\":\"a\""), "{}", list.stderr);
    assert!(world.insomnia(["scope", "who", "s/f"]).stdout.starts_with("pod a (pid "));
    assert!(world.insomnia(["list"]).stdout.contains("idle"));
    assert!(begin.elapsed() < Duration::from_secs(4), "nor do the commands that look");

    let start = |name: &str| {
        let args = ["--name", name, "--scope", "t:write"];
        world.program(env!("CARGO_BIN_EXE_pod"), args).start(ErrorOutput::Separate).unwrap()
    };
    let finish = |mut running: process::Running| {
        let _ = running.read_to_end(1 << 20, None, Instant::now() + PATIENCE).unwrap();
        let code = running.wait(Instant::now() + PATIENCE).unwrap().code();
        (code, running.error_text(1 << 20))
    };
    let starting = || others().filter(|pid| !held.contains(pid)).collect::<Vec<_>>();
    let begin = Instant::now();
    let (waiting, _) = (start("b"), send("TERM", own)); // a starts its end meanwhile
    wait_until("b is there", || starting().len() == 2);
    for _ in 0..20 {
        starting().into_iter().for_each(|pid| send("WINCH", pid));
        std::thread::sleep(Duration::from_millis(20));
    }
    let (code, errors) = finish(waiting);
    let took = begin.elapsed();
    assert!(
        code == Some(1) && errors.contains("(flock)") && errors.contains(&held[0].min(held[1]).to_string())
    );
    assert!(took > Duration::from_millis(4_500) && took < Duration::from_secs(9), "{took:?}");
    wait_until("a has ended without the lock", || !lives(own));
    assert!(begin.elapsed() < Duration::from_secs(12));

    let begin = Instant::now();
    let waiting = start("c");
    wait_until("c is there", || starting().len() == 2);
    starting().into_iter().for_each(|pid| send("TERM", pid));
    assert_ne!(finish(waiting).0, Some(0));
    assert!(begin.elapsed() < Duration::from_secs(3), "termination ends the wait");

    holder.kill();
    world.start(&["--name", "b", "--scope", "s:write"]);
    assert!(world.entry("a").is_none(), "what a could not give back is reclaimed");
}

#[test]
fn l10_what_only_looks_needs_no_lock_and_signals_do_not_hurry_a_turn_that_waits() {
    if !has_tool("flock") {
        return;
    }
    let spawn = json!({ "name": "SpawnPod", "input": { "name": "kid", "task": "t", "scope": ["k:write"] } });
    let world = World::with_script(json!({ "main": [{ "tool_calls": [spawn] }, { "text": "so be it" }] }));
    world.start(&["--scope", ".:write"]);
    let (path, marker) = (world.runtime().join("scope.lock"), world.path("held"));
    let hold = format!("touch {}; exec sleep 60", marker.display());
    let words = ["-o", path.to_str().unwrap(), "sh", "-c", &hold];
    let mut holder = world.program("flock", words).start(ErrorOutput::Separate).unwrap();
    wait_until("the lock is held", || marker.exists());
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({ "input": "go" }));
    events.until(|event| event["data"]["detail"] == "tool SpawnPod");
    let begin = Instant::now();
    for _ in 0..20 {
        world.signal("main", "HUP"); // it has a handler, so each one interrupts a system call
    }
    for words in [&["list"][..], &["list", "--json"], &["scope", "list"], &["scope", "who", "k"]] {
        let asked = Instant::now();
        let ran = world.insomnia(words);
        assert!(ran.code == Some(0) && ran.stdout.contains("main"), "{words:?}: {ran:?}");
        assert!(asked.elapsed() < Duration::from_secs(1), "{words:?} took {:?}", asked.elapsed());
    }
    while begin.elapsed() < Duration::from_secs(3) {
        world.signal("main", "HUP");
        assert_eq!(world.status("main")["status"], "running", "the wait was cut short");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(events.until_turn_ended()["result"], "finished");
    let (ok, text) = world.results("main", "SpawnPod").remove(0);
    assert!(!ok && text.contains("(flock)"), "the holder is not named: {text}");
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
    holder.kill();
    assert!(world.entry("kid").is_none());
}

#[test]
fn l11_no_start_and_no_change_while_the_content_makes_no_sense() {
    let world = World::with_script(json!({}));
    world.start(&["--name", "a", "--scope", "s:write"]);
    let path = world.runtime().join("scope.lock");
    let good = std::fs::read_to_string(&path).unwrap();
    let newer = good.replace("\"version\": 1", "\"version\": 2").replace("\"version\":1", "\"version\":2");
    for bad in ["", "{", "null", "[]", &newer, &" ".repeat(20 << 20)] {
        std::fs::write(&path, bad).unwrap();
        let ran = world.pod_command(["--name", "b", "--scope", "t:write"]);
        let named = ran.stderr.contains("scope.lock") && ran.stderr.contains("insomnia scope repair");
        assert!(ran.code == Some(1) && named, "{ran:?}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), bad);
    }
    let repaired = insomnia::store::repair::repair(&open_lock(&world)).unwrap();
    assert_eq!(repaired.entries.len(), 1, "{repaired:?}");
    assert_eq!(world.table(), serde_json::from_str::<Value>(&good).unwrap());
    world.start(&["--name", "b", "--scope", "t:write"]);
}

#[test]
fn l13_a_foreign_number_in_the_file_gets_no_signal() {
    let world = World::with_script(json!({}));
    world.start(&["--name", "a", "--scope", "s:write"]);
    let own = world.pid("a");
    let mut sleeper = world.program("sleep", ["60"]).start(ErrorOutput::Separate).unwrap();
    wait_until("sleep is there", || world.processes().len() == 2);
    let foreign = world.processes().into_iter().find(|pid| *pid != own).unwrap();
    let path = world.runtime().join("scope.lock");
    let good = world.table();
    for number in [1, 0, -1] {
        let mut table = good.clone();
        table["allocations"][0]["pid"] = json!(number);
        std::fs::write(&path, table.to_string()).unwrap();
        let error = open_lock(&world).edit(None, |_| Ok(())).unwrap_err();
        assert!(matches!(error, Error::LockUnusable { .. }), "{number}: {error}");
    }
    let mut table = good;
    table["allocations"][0]["pid"] = json!(foreign);
    std::fs::write(&path, table.to_string()).unwrap();
    assert!(open_lock(&world).edit(None, |_| Ok(())).unwrap().reclaimed.is_empty(), "its life is held");
    world
        .program("kill", ["-9", &own.to_string()])
        .start(ErrorOutput::Separate)
        .unwrap()
        .wait(Instant::now() + PATIENCE)
        .unwrap();
    wait_until("it is gone", || !lives(own));
    // Its first thread may be gone while others still hold the life.
    wait_until("it is reclaimed", || open_lock(&world).edit(None, |_| Ok(())).unwrap().reclaimed.len() == 1);
    assert!(lives(foreign));
    sleeper.kill();
}

#[test]
fn s03_and_p09_every_overlap_is_refused_in_every_spelling() {
    let world = World::with_script(json!({}));
    std::fs::create_dir_all(world.project().join("lib/foo")).unwrap();
    std::os::unix::fs::symlink("lib", world.project().join("l")).unwrap();
    world.start(&["--name", "a", "--scope", "lib//:write"]);
    let lib = world.project().join("lib");
    assert_eq!(
        world.entry("a").unwrap()["scope_allow"],
        json!([format!("{}:write:recursive", lib.display())])
    );
    for other in [
        "lib/foo:write",
        ".:write",
        "l:write",
        "l/foo/..:write",
        "lib/:write",
        "./lib:write:flat",
        "x/../lib:write",
    ] {
        let ran = world.pod_command(["--name", "b", "--scope", other]);
        assert!(ran.code == Some(1) && ran.stderr.contains("\"a\""), "{other}: {ran:?}");
    }
    for own in
        ["/".to_owned(), world.path("home").display().to_string(), world.runtime().display().to_string()]
    {
        let ran = world.pod_command(["--name", "b", "--scope", &format!("{own}:write")]);
        assert!(ran.code == Some(1) && ran.stderr.contains("is refused"), "{own}: {ran:?}");
    }
}

#[test]
fn s04_siblings_that_begin_alike_do_not_conflict() {
    let world = World::with_script(json!({}));
    for (name, scope) in [("a", "app:write"), ("b", "app-2:write"), ("c", "ap:write"), ("d", "app.d:write")] {
        world.start(&["--name", name, "--scope", scope]);
    }
}

#[test]
fn s10_no_scope_is_nothing_and_an_empty_path_is_refused() {
    let world = World::with_script(json!({
        "main": [{ "tool_calls": [{ "name": "WriteFile", "input": { "path": "f", "content": "x" } }] }]
    }));
    world.start(&[]);
    world.turn("main", "go");
    assert!(matches!(world.results("main", "WriteFile").as_slice(), [(false, _)]));
    assert!(!world.project().join("f").exists());
    let ran = world.pod_command(["--name", "b", "--scope", ":write"]);
    assert!(ran.code == Some(1) && ran.stderr.contains("empty"), "{ran:?}");
    world.start(&["--name", "c", "--scope", ".:write"]);
    let expected = json!([format!("{}:write:recursive", world.project().display())]);
    assert_eq!(world.entry("c").unwrap()["scope_allow"], expected);
}
