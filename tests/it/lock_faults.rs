//! Calls that fail, disks that are full, and directories that vanish: the old file stays whole, the error is clear,
//! nothing hangs, and a pod that cannot find the file stops writing.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::sys::process::{self, ErrorOutput};

use crate::world::{PATIENCE, Ran, World, has_tool, is_long, ran, skip};

/// Runs a program that must end within ten seconds.
fn within_ten_seconds(world: &World, program: &str, args: &[&str]) -> Ran {
    let begin = Instant::now();
    let mut running = world.program(program, args).start(ErrorOutput::Separate).unwrap();
    let deadline = begin + Duration::from_secs(10);
    let stdout = running
        .read_to_end(1 << 20, None, deadline)
        .unwrap_or_else(|error| panic!("{program} {args:?} hangs: {error}"));
    let code = running.wait(deadline).unwrap().code();
    Ran { code, stdout: String::from_utf8_lossy(&stdout).into_owned(), stderr: running.error_text(1 << 20) }
}

/// The entries of a table that must be whole.
fn table(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let table: Value =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("broken: {error}: {text:?}"));
    table["allocations"].as_array().unwrap().clone()
}

#[test]
fn a_start_whose_system_calls_fail_leaves_the_table_whole() {
    if !has_tool("strace") {
        return;
    }
    let world = World::with_script(json!({}));
    world.start(&["--name", "keeper", "--scope", "kept:write"]);
    let path = world.runtime().join("scope.lock");
    let keeper = world.entry("keeper").unwrap();
    let calls = [
        ("openat", &["EIO", "EACCES", "EMFILE", "EINTR", "ENOSPC"][..]),
        ("write", &["EIO", "ENOSPC", "EINTR"]),
        ("fsync", &["EIO", "ENOSPC"]),
        ("renameat,renameat2", &["EIO", "EACCES", "ENOSPC"]),
        ("flock", &["EIO", "EINTR", "ENOLCK"]),
        ("mkdirat,mkdir", &["EACCES", "ENOSPC"]),
        ("linkat,unlinkat", &["EIO", "EACCES"]),
    ];
    let (mut tried, mut started) = (0, 0);
    for (names, errors) in calls {
        for error in errors {
            // Calls on the runtime directory's files only: the loader's own are not ours to survive.
            for n in if is_long() { (1..=20).collect::<Vec<_>>() } else { vec![1, 2, 3] } {
                let inject = format!("inject={names}:error={error}:when={n}");
                let life = world.runtime().join("life");
                let mut args = vec!["-f", "-qq", "-o", "/dev/null", "-e", &inject];
                let runtime = world.runtime();
                let (runtime, life) = (runtime.to_str().unwrap(), life.to_str().unwrap());
                let new = format!("{runtime}/scope.lock.new");
                for place in [runtime, life, path.to_str().unwrap(), &new] {
                    args.extend(["-P", place]);
                }
                args.extend([env!("CARGO_BIN_EXE_pod"), "--foreground", "--scope", "s:write", "--name", "x"]);
                let what = format!("{names} {error} {n}");
                let code = start_in_foreground(&world, &args, &what);
                tried += 1;
                started += usize::from(code);
                assert!(table(&path).contains(&keeper), "{what}: a living pod is lost");
            }
        }
    }
    println!("{tried} faults, {started} of them without effect on the start");
    assert!(started < tried, "no fault was ever met");
    let ran = world.pod_command(["--name", "after", "--scope", "s:write"]);
    assert_eq!(ran.code, Some(0), "afterwards everything works: {ran:?}");
    let entries = table(&path);
    assert_eq!(entries.len(), 2, "nobody else is left: {entries:#?}");
}

/// Starts a pod under strace; when it comes up it is ended again. Whether it came up.
fn start_in_foreground(world: &World, args: &[&str], what: &str) -> bool {
    let mut running = world.program("strace", args).start(ErrorOutput::Separate).unwrap();
    let mut line = [0; 4096];
    let deadline = Instant::now() + Duration::from_secs(10);
    match running.read(&mut line, None, deadline).unwrap() {
        process::Output::Bytes(count) => {
            let ready: Value = serde_json::from_slice(&line[..count]).unwrap();
            let pid = i32::try_from(ready["pid"].as_i64().unwrap()).unwrap();
            ran(world.program("kill", ["-9", &pid.to_string()]));
            let _ = running.wait(Instant::now() + PATIENCE);
            true
        }
        process::Output::End => {
            let code = running.wait(deadline).unwrap().code();
            let errors = running.error_text(4096);
            assert!(code == Some(1) && errors.starts_with("pod: "), "{what}: {code:?} {errors}");
            assert!(!errors.contains("panicked"), "{what}: {errors}");
            false
        }
        hung @ (process::Output::Cancelled | process::Output::TimedOut) => panic!("{what}: hangs: {hung:?}"),
    }
}

/// A file system in memory with this size, unmounted when dropped. `None` where one may not mount.
pub struct Mounted(PathBuf);

impl Mounted {
    fn new(world: &World, options: &str) -> Option<Mounted> {
        Mounted::at(world, world.runtime(), options)
    }

    pub fn at(world: &World, path: PathBuf, options: &str) -> Option<Mounted> {
        if process::own_uid() != 0 || !has_tool("mount") {
            skip("only root may mount");
            return None;
        }
        std::fs::create_dir_all(&path).unwrap();
        let options = format!("mode=700,{options}");
        let args = ["-t", "tmpfs", "-o", &options, "tmpfs", path.to_str().unwrap()];
        let mounted = ran(world.program("mount", args));
        if mounted.code != Some(0) {
            skip(&format!("cannot mount here: {}", mounted.stderr));
            return None;
        }
        Some(Mounted(path))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        ran(insomnia::sys::process::Program::new("umount", [Path::new("-l"), &self.0]));
    }
}

#[test]
fn l03_a_full_disk_breaks_nothing_at_33_levels() {
    let world = World::with_script(json!({}));
    let Some(place) = Mounted::new(&world, "size=64k") else { return };
    world.start(&["--name", "keeper", "--scope", "kept:write"]);
    let path = world.runtime().join("scope.lock");
    let keeper = world.entry("keeper").unwrap();
    let filler = place.0.join("filler");
    let mut refused = 0;
    for level in 0..33 {
        // A page at a time up to the brim, then from a full disk again with less left over.
        std::fs::write(&filler, vec![b'x'; 2048 * level]).ok();
        let before = std::fs::read(&path).unwrap();
        let ran =
            within_ten_seconds(&world, env!("CARGO_BIN_EXE_pod"), &["--name", "x", "--scope", "s:write"]);
        if ran.code == Some(0) {
            world.kill("x");
        } else {
            refused += 1;
            assert!(ran.stderr.contains("No space left"), "level {level}: {ran:?}");
            let after = table(&path);
            assert!(after.contains(&keeper), "level {level}: {after:?}");
            assert!(after.len() <= 2 && !before.is_empty());
        }
        std::fs::remove_file(&filler).unwrap();
    }
    println!("{refused} of 33 levels were too full");
    assert!(refused > 0);
    world.start(&["--name", "after", "--scope", "s:write"]);
    world.signal("keeper", "TERM");
    crate::world::wait_until("it has given its scope back", || world.entry("keeper").is_none());
}

#[test]
fn without_inodes_nothing_changes() {
    let world = World::with_script(json!({}));
    let Some(place) = Mounted::new(&world, "nr_inodes=12") else { return };
    world.start(&["--name", "keeper", "--scope", "kept:write"]);
    let path = world.runtime().join("scope.lock");
    let mut made = 0;
    while std::fs::write(place.0.join(format!("filler-{made}")), "").is_ok() {
        made += 1;
    }
    let before = std::fs::read(&path).unwrap();
    let ran = within_ten_seconds(&world, env!("CARGO_BIN_EXE_pod"), &["--name", "x", "--scope", "s:write"]);
    assert!(ran.code == Some(1) && ran.stderr.contains("No space left"), "{ran:?}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    (0..made).for_each(|n| std::fs::remove_file(place.0.join(format!("filler-{n}"))).unwrap());
    world.start(&["--name", "x", "--scope", "s:write"]);
}

#[test]
fn a_read_only_directory_changes_nothing() {
    let world = World::with_script(json!({}));
    let Some(place) = Mounted::new(&world, "size=64k") else { return };
    world.start(&["--name", "x", "--scope", "s:write"]);
    world.kill("x"); // a living pod has a file open for writing, which keeps the kernel from remounting
    let remount = |how: &str| ran(world.program("mount", ["-o", how, place.0.to_str().unwrap()]));
    assert_eq!(remount("remount,ro").code, Some(0));
    let before = std::fs::read(world.runtime().join("scope.lock")).unwrap();
    let ran = within_ten_seconds(&world, env!("CARGO_BIN_EXE_pod"), &["--name", "y", "--scope", "s:write"]);
    assert!(ran.code == Some(1) && ran.stderr.contains("Read-only"), "{ran:?}");
    assert_eq!(std::fs::read(world.runtime().join("scope.lock")).unwrap(), before);
    assert_eq!(remount("remount,rw").code, Some(0));
    world.start(&["--name", "y", "--scope", "s:write"]);
}

/// A pod with one WriteFile in each turn, and what that came to.
fn writer() -> World {
    let write = |n: usize| json!({ "tool_calls": [{ "name": "WriteFile", "input": { "path": format!("s/f{n}"), "content": "x" } }] });
    let replies: Vec<Value> = (0..6).flat_map(|n| [write(n), json!({ "text": "done" })]).collect();
    let world = World::with_script(json!({ "main": replies }));
    world.start(&["--scope", "s:write"]);
    std::fs::create_dir_all(world.project().join("s")).unwrap();
    world
}

fn write_once(world: &World) -> (bool, String) {
    world.turn("main", "write");
    world.results("main", "WriteFile").pop().unwrap()
}

#[test]
fn a_pod_writes_on_inside_its_last_scope_while_the_file_is_damaged() {
    let world = writer();
    let path = world.runtime().join("scope.lock");
    assert!(write_once(&world).0);
    std::fs::write(&path, "{").unwrap();
    let (ok, text) = write_once(&world);
    assert!(ok, "{text}");
    let refused = world.pod_command(["--name", "b", "--scope", "t:write"]);
    assert!(refused.stderr.contains("insomnia scope repair"), "{refused:?}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "{");
}

#[test]
fn a_pod_stops_writing_when_the_file_is_gone_and_says_so() {
    let world = writer();
    let path = world.runtime().join("scope.lock");
    assert!(write_once(&world).0);
    let good = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let (ok, text) = write_once(&world);
    assert!(!ok && text.contains("scope.lock") && text.contains("gone"), "{text}");
    assert!(!world.project().join("s/f1").exists());
    std::fs::write(&path, good).unwrap();
    assert!(write_once(&world).0, "it is there again");
    std::fs::write(&path, r#"{"version":1,"allocations":[]}"#).unwrap();
    let (ok, text) = write_once(&world);
    assert!(!ok && text.contains("no entry"), "{text}");
}

#[test]
fn a_pod_stops_writing_when_its_directory_is_moved_or_removed() {
    let world = writer();
    assert!(write_once(&world).0);
    // The socket is reached by its path, so the turn is begun before the directory goes and held by the script.
    let replies = json!({ "moved": [
        { "delay_ms": 3000, "tool_calls": [{ "name": "WriteFile", "input": { "path": "m/f", "content": "x" } }] }
    ] });
    world.script(replies);
    for gone in ["moved", "removed"] {
        std::fs::create_dir_all(world.project().join("m")).unwrap();
        world.start(&["--name", "moved", "--scope", "m:write", "--task", "write"]);
        let history = || world.results("moved", "WriteFile");
        let pid = world.pid("moved");
        let aside = world.path(&format!("aside-{gone}"));
        if gone == "moved" {
            std::fs::rename(world.runtime(), &aside).unwrap();
            // Somebody begins a new world in the old place and gets the same scope there.
            world.start(&["--name", "rival", "--scope", "m:write"]);
        } else {
            std::fs::remove_dir_all(world.runtime()).unwrap();
        }
        crate::world::wait_until("the tool has answered", || !history().is_empty());
        let (ok, text) = history().pop().unwrap();
        assert!(!ok && text.contains("all writing stops"), "{gone}: {text}");
        assert!(!world.project().join("m/f").exists());
        if let Some(stat) = process::process_stat(pid) {
            process::kill_exactly(pid, stat.start_time).unwrap();
        }
        if gone == "moved" {
            world.kill("rival");
            std::fs::remove_dir_all(world.runtime()).unwrap();
        }
        std::fs::remove_dir_all(world.state().join("moved")).unwrap();
    }
}
