//! The file tools against the known faults of kind P, and the file parts of S02, S10 and T02.
//!
//! Each test is named after its case. `INSOMNIA_LONG=1` runs the races at full length.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails where it stands; the lints know test functions but not what these call"
)]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::sys::process::{ErrorOutput, Program};
use insomnia::sys::wait::Cancel;
use insomnia::tools::input::{self, Input};
use insomnia::tools::place::{FileCall, FileDesk};
use insomnia::tools::specs;
use insomnia::words::identity::PodId;
use insomnia::words::limits::Limits;
use insomnia::words::scope::{EffectiveScope, Loan, Rule};

use crate::world::is_long;

/// A directory `w` with `src`, which may be written, and `other`, which may not.
struct World {
    w: PathBuf,
    desk: FileDesk,
    scope: EffectiveScope,
    cancel: Cancel,
    _place: tempfile::TempDir,
}

type Answer = Result<String, String>;

impl World {
    fn new() -> World {
        World::at(tempfile::tempdir().unwrap())
    }

    /// In memory where that exists: races want many rounds, not a disk.
    fn in_memory() -> World {
        World::at(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap())
    }

    fn at(place: tempfile::TempDir) -> World {
        let w = place.path().canonicalize().unwrap().join("w");
        for directory in ["src", "other"] {
            fs::create_dir_all(w.join(directory)).unwrap();
        }
        fs::write(w.join("other/f"), "secret\n").unwrap();
        let desk = FileDesk {
            directory: w.clone(),
            protect_git: true,
            page_bytes_max: Limits::default().file_read_bytes,
            ..FileDesk::default()
        };
        let scope = EffectiveScope {
            allow: vec![rule(&w.join("src"), "write"), rule(Path::new("/"), "read")],
            lent: vec![],
        };
        World { w, desk, scope, cancel: Cancel::new().unwrap(), _place: place }
    }

    fn lend(&mut self, path: &str, holder: &str) {
        let rule = rule(&self.w.join(path), "write");
        self.scope.lent.push(Loan { holder: PodId::new(holder).unwrap(), rule });
    }

    fn call(&mut self) -> FileCall<'_> {
        FileCall { desk: &mut self.desk, scope: self.scope.clone(), cancel: &self.cancel }
    }

    fn read(&mut self, path: &str) -> Answer {
        self.read_page(json!({"path": path}))
    }

    fn read_page(&mut self, input: Value) -> Answer {
        let Input::ReadFile { path, offset, limit } = given("ReadFile", &input)? else { panic!("{input}") };
        self.call().read_file(&path, offset, limit).map_err(|error| error.to_string())
    }

    fn write(&mut self, path: &str, content: &str) -> Answer {
        self.call().write_file(path, content).map_err(|error| error.to_string())
    }

    fn edit(&mut self, path: &str, old: &str, new: &str) -> Answer {
        self.call().edit_file(path, old, new, false).map_err(|error| error.to_string())
    }

    fn list(&mut self, input: Value) -> Answer {
        let Input::ListFiles { path, pattern } = given("ListFiles", &input)? else { panic!("{input}") };
        self.call().list_files(path, pattern).map_err(|error| error.to_string())
    }

    fn search(&mut self, input: Value) -> Answer {
        let Input::SearchFiles { pattern, path, glob, plain: None } = given("SearchFiles", &input)? else {
            panic!("{input}")
        };
        self.call().search_files(&pattern, path, glob, false).map_err(|error| error.to_string())
    }

    fn content(&self, path: &str) -> String {
        fs::read_to_string(self.w.join(path)).unwrap()
    }

    /// Writes and edits, both of which must be refused with these words, the whole tree being the same after.
    fn refuses(&mut self, path: &str, words: &str) {
        let before = fingerprint(&self.w);
        let answers = [self.write(path, "overwritten"), self.edit(path, "secret", "overwritten")];
        for answer in answers {
            let error = answer.expect_err(path);
            assert!(error.contains(words), "{path}: {error}");
        }
        assert_eq!(fingerprint(&self.w), before, "{path}");
    }
}

/// The input of a call as the tool gets it.
fn given(tool: &str, input: &Value) -> Result<Input, String> {
    let specs = specs::all(&Limits::default(), None);
    let spec = specs.iter().find(|spec| spec.name == tool).unwrap();
    input::parse(spec, input).map_err(|error| error.to_string())
}

fn rule(path: &Path, access: &str) -> Rule {
    Rule::try_from(format!("{}:{access}", path.display())).unwrap()
}

/// Every name below, with what it is, its content or target, and its state: equal only if nothing was touched.
fn fingerprint(directory: &Path) -> Vec<(PathBuf, u64, i64, i64, u32, Vec<u8>)> {
    let mut all = Vec::new();
    let mut open = vec![directory.to_owned()];
    while let Some(path) = open.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let content = match () {
            () if metadata.is_file() && metadata.len() < 1 << 20 => fs::read(&path).unwrap(),
            () if metadata.is_symlink() => fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec(),
            () => vec![],
        };
        if metadata.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        // Of directories the times are compared too: a temporary file that came and went shows there.
        all.push((path, metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.mode(), content));
    }
    all.sort();
    all
}

/// Runs `call`, which must not wait for what never comes.
fn soon<T>(call: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let answer = call();
    assert!(started.elapsed() < Duration::from_secs(60), "took {:?}", started.elapsed());
    answer
}

/// The clock of the file system must have moved on before a change can be seen in a time.
fn let_time_pass() {
    std::thread::sleep(Duration::from_millis(20));
}

fn rounds() -> usize {
    if is_long() { 200_000 } else { 20_000 }
}

#[test]
fn p01_a_sibling_with_the_same_beginning_is_refused() {
    let mut world = World::new();
    fs::create_dir(world.w.join("src-old")).unwrap();
    fs::write(world.w.join("src-old/a"), "secret\n").unwrap();
    for path in ["src-old/a", "srcx", "src.bak/a"] {
        world.refuses(path, "outside your write scope");
        world.refuses(&world.w.join(path).display().to_string(), "src:write:recursive");
    }
    world.write("src/a", "secret\n").unwrap();
    world.edit("src/a", "secret", "open").unwrap();
    assert_eq!(world.content("src/a"), "open\n");
}

#[test]
fn p02_a_link_that_leaves_the_scope_is_refused_and_one_inside_survives() {
    let mut world = World::new();
    symlink(world.w.join("other"), world.w.join("src/out")).unwrap();
    symlink("../other/f", world.w.join("src/g")).unwrap();
    symlink("../other/new", world.w.join("src/dangling")).unwrap();
    for path in ["src/out/new", "src/out/f", "src/g", "src/dangling"] {
        let real = format!("(really \"{}", world.w.join("other").display());
        world.refuses(path, &real);
    }
    fs::create_dir(world.w.join("src/d")).unwrap();
    symlink("d/f", world.w.join("src/l")).unwrap();
    symlink("d", world.w.join("src/m")).unwrap();
    world.write("src/l", "one\n").unwrap();
    world.edit("src/l", "one", "two").unwrap();
    world.edit("src/m/f", "two", "three").unwrap();
    assert_eq!(world.content("src/d/f"), "three\n");
    assert_eq!(fs::read_link(world.w.join("src/l")).unwrap(), Path::new("d/f"));
    assert_eq!(fs::read_link(world.w.join("src/m")).unwrap(), Path::new("d"));
}

#[test]
fn p03_two_dots_behind_a_directory_that_does_not_exist() {
    let mut world = World::new();
    let root = world.w.display().to_string();
    world.refuses(&format!("{root}/src/none/../../other/x"), "outside");
    world.refuses(&format!("{root}/src/none/../../other/f"), "outside");
    assert!(!world.w.join("src/none").exists());
    world.write(&format!("{root}/src/./a/../b"), "b").unwrap();
    world.write(&format!("{root}/src/../src/c"), "c").unwrap();
    assert_eq!(fs::read_dir(world.w.join("src")).unwrap().count(), 2, "only b and c");
    fs::create_dir(world.w.join("src/a")).unwrap();
    world.write(&format!("{root}/src/./a/../b"), "b2").unwrap();
    for path in ["src/a/..", "src/a", "src/a/", "src", "src/new/", "src/a/.", "src/none/.."] {
        world.refuses(path, "directory");
    }
    world.write("src/deep/er/f", "f").unwrap();
    assert_eq!(world.content("src/deep/er/f"), "f");
    world.refuses("src/b/x", "");
}

#[test]
fn p04_what_is_lent_is_refused_by_whatever_name() {
    let mut world = World::new();
    fs::create_dir(world.w.join("src/core")).unwrap();
    fs::write(world.w.join("src/core/f"), "secret\n").unwrap();
    symlink("core", world.w.join("src/l")).unwrap();
    symlink("core/f", world.w.join("src/lf")).unwrap();
    world.lend("src/core", "coder");
    for path in ["src/core/f", "src/l/f", "src/lf", "src/core/new", "src/l/new/x", "src/x/../l/f"] {
        world.refuses(path, "is lent to pod \"coder\" (rule ");
    }
    assert!(world.read("src/l/f").unwrap().contains("secret"), "reading stays allowed");
    world.scope.lent.clear();
    world.edit("src/l/f", "secret", "back").unwrap();
}

/// Exchanges two names until told to stop.
#[cfg(target_env = "gnu")]
fn exchange(one: PathBuf, other: PathBuf, stop: &AtomicBool) {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    while !stop.load(Ordering::Relaxed) {
        renameat2(AT_FDCWD, &one, AT_FDCWD, &other, RenameFlags::RENAME_EXCHANGE).unwrap();
    }
}

/// As above, where nix has no such call.
#[cfg(not(target_env = "gnu"))]
fn exchange(one: PathBuf, other: PathBuf, stop: &AtomicBool) {
    const SCRIPT: &str = "import ctypes, os, sys
call = ctypes.CDLL(None).renameat2
while call(-100, os.fsencode(sys.argv[1]), -100, os.fsencode(sys.argv[2]), 2) == 0: pass";
    let args = ["-c".into(), SCRIPT.into(), one.into_os_string(), other.into_os_string()];
    let running = Program::new("python3", args).start(ErrorOutput::WithOutput).unwrap();
    while !stop.load(Ordering::Relaxed) {
        std::thread::yield_now();
    }
    drop(running);
}

#[test]
fn p05_a_link_swapped_in_between_is_not_followed() {
    let mut world = World::in_memory();
    world.scope.allow.truncate(1); // reading elsewhere is denied as well
    fs::create_dir(world.w.join("src/d")).unwrap();
    fs::write(world.w.join("src/d/f"), "mine 0\n").unwrap();
    symlink(world.w.join("other"), world.w.join("src/l")).unwrap();
    let before = fingerprint(&world.w.join("other"));
    let stop = AtomicBool::new(false);
    let (one, other) = (world.w.join("src/d"), world.w.join("src/l"));
    let (mut done, mut refused) = (0, 0);
    std::thread::scope(|threads| {
        threads.spawn(|| exchange(one, other, &stop));
        for round in 0..2 * rounds() {
            // Every other one edits; p06 writes and the next test reads as often.
            let answer = match round % 4 {
                0 => world.write("src/d/f", &format!("mine {round}\n")),
                1 => world.edit("src/d/f", "mine", "mine"),
                2 => world.edit("src/d/f", "mine", "mine too"),
                _ => world.read("src/d/f"),
            };
            match answer {
                Ok(text) => {
                    assert!(!text.contains("secret"), "round {round}: {text}");
                    done += 1;
                }
                Err(error) => {
                    assert!(!error.contains("secret"), "round {round}: {error}");
                    refused += usize::from(error.contains("outside"));
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(fingerprint(&world.w.join("other")), before);
    assert!(done > 100 && refused > 100, "no race happened: {done} done, {refused} refused");
}

#[test]
fn p05_a_walk_and_a_last_name_do_not_follow_a_swapped_link_either() {
    let mut world = World::in_memory();
    world.scope.allow.truncate(1);
    fs::create_dir(world.w.join("src/d")).unwrap();
    for path in ["src/d/f", "src/f"] {
        fs::write(world.w.join(path), "mine secretly\n").unwrap();
    }
    fs::write(world.w.join("other/secret"), "").unwrap(); // no listing may name it
    symlink(world.w.join("other"), world.w.join("src/l")).unwrap();
    symlink(world.w.join("other/f"), world.w.join("src/m")).unwrap();
    let stop = AtomicBool::new(false);
    let src = world.w.join("src");
    let (mut directories, mut files) = (0, 0);
    std::thread::scope(|threads| {
        threads.spawn(|| exchange(src.join("d"), src.join("l"), &stop));
        threads.spawn(|| exchange(src.join("f"), src.join("m"), &stop));
        for round in 0..rounds() {
            let (directory, place) = (["src", "src/d"][round % 2], ["src", "src/d", "src/f"][round % 3]);
            let mut answers = vec![world.read("src/f"), world.list(json!({"path": directory}))];
            // Each search starts three processes.
            if is_long() || round % 10 == 0 {
                answers.push(world.search(json!({"pattern": "secret", "path": place})));
            }
            for text in answers.into_iter().flatten() {
                directories += usize::from(text.contains("d/f:1: mine"));
                files += usize::from(text.contains("src/f:1: mine") || text.contains("1\tmine"));
                for line in text.lines().filter(|line| line.contains("secret")) {
                    assert!(line.contains("mine"), "round {round}: {line}");
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(directories > 10 && files > 10, "no race happened: {directories}, {files}");
}

#[test]
fn p06_an_earlier_directory_swapped_for_a_link_is_not_followed() {
    let mut world = World::in_memory();
    fs::create_dir_all(world.w.join("src/a/b")).unwrap();
    fs::create_dir_all(world.w.join("other/b")).unwrap();
    symlink(world.w.join("other"), world.w.join("src/l")).unwrap();
    let before = fingerprint(&world.w.join("other"));
    let real = fs::File::open(world.w.join("src/a")).unwrap();
    let by_descriptor = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&real)));
    let stop = AtomicBool::new(false);
    let (one, other) = (world.w.join("src/a"), world.w.join("src/l"));
    let (mut done, mut refused) = (0, 0);
    std::thread::scope(|threads| {
        threads.spawn(|| exchange(one, other, &stop));
        for _ in 0..rounds() {
            match world.write("src/a/b/c/f", "x") {
                Ok(_) => done += 1,
                Err(error) => refused += usize::from(error.contains("outside")),
            }
            let _ = fs::remove_dir_all(by_descriptor.join("b/c")); // so that the next round creates it again
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(fingerprint(&world.w.join("other")), before);
    assert!(done > 100 && refused > 100, "no race happened: {done} done, {refused} refused");
}

#[test]
fn p07_a_hard_link_is_replaced_by_name_and_the_other_name_keeps_its_content() {
    let mut world = World::new();
    fs::hard_link(world.w.join("other/f"), world.w.join("src/h")).unwrap();
    world.edit("src/h", "secret", "edited").unwrap();
    assert_eq!((world.content("src/h"), world.content("other/f")), ("edited\n".into(), "secret\n".into()));
    fs::hard_link(world.w.join("other/f"), world.w.join("src/i")).unwrap();
    world.write("src/i", "written").unwrap();
    assert_eq!((world.content("src/i"), world.content("other/f")), ("written".into(), "secret\n".into()));
}

#[test]
fn p08_whatever_is_refused_keeps_every_byte() {
    // Every refusal in this file goes through `refuses`, which compares the whole tree; these are the rest.
    let mut world = World::new();
    fs::write(world.w.join("src/locked"), "secret\n").unwrap();
    fs::set_permissions(world.w.join("src/locked"), fs::Permissions::from_mode(0o444)).unwrap();
    world.refuses("src/locked", "write-protected");
    world.refuses("", "path is empty");
    world.refuses("src/a\0b", "NUL");
    world.refuses(&"src/a/".repeat(1000), "longer than");
    fs::write(world.w.join("src/twice"), "secret secret").unwrap();
    let before = fingerprint(&world.w);
    assert!(world.edit("src/twice", "secret", "x").unwrap_err().contains("occurs 2 times"));
    assert!(world.edit("src/twice", "", "x").unwrap_err().contains("empty"));
    assert!(world.edit("src/gone", "a", "x").unwrap_err().contains("there is no file"));
    assert!(world.write("src/twice/x/y", "x").is_err());
    assert_eq!(fingerprint(&world.w), before);
}

#[test]
fn p09_a_rule_with_needless_slashes_is_no_rule_yet() {
    // The store makes rules canonical; what the tools are given cannot be anything else.
    for text in ["/w/src/:write", "/w/src//:write", "/w//src:write", "/w/./src:write", "/w/x/../src:write"] {
        assert!(Rule::try_from(text.to_owned()).is_err(), "{text}");
    }
    let mut world = World::new();
    world.write("src//a", "x").unwrap();
    world.write(&format!("{}//src/./b", world.w.display()), "x").unwrap();
}

/// What holds on a case-insensitive file system, of which none can be made everywhere this runs:
///
/// - What is judged is not the name as written but the kernel's path of the opened directory, and beside it what
///   the directories above really are: device and inode of a lent or hidden directory are found under any
///   spelling. The next test shows that with a second name of one directory.
/// - A spelling that the kernel does not give back in the rule's own letters is outside of the rule: refused.
/// - Protected names are compared in any case of letters, everywhere.
/// - On a case-sensitive file system the two names are two places.
#[test]
fn p10_other_letters_are_another_place_or_refused() {
    let mut world = World::new();
    fs::create_dir(world.w.join("src/Core")).unwrap();
    world.lend("src/Core", "coder");
    world.refuses("src/Core/f", "lent to pod \"coder\"");
    if world.w.join("src/core").exists() {
        world.refuses("src/CORE/f", "");
    } else {
        world.write("src/CORE/f", "mine").unwrap();
    }
    world.refuses("src/.GIT/Hooks/pre-commit", "protected");
    // A lent directory that is gone could come back under another spelling.
    fs::remove_dir(world.w.join("src/Core")).unwrap();
    world.refuses("src/Core/f", "lent to pod \"coder\"");
    world.refuses("src/cORE/f", "lent to pod \"coder\"");
}

#[test]
fn p10_a_second_name_of_one_directory_is_judged_as_that_directory() {
    let world = World::new();
    for directory in ["src/core/sub", "src/alias", "src/state/main", "src/seen"] {
        fs::create_dir_all(world.w.join(directory)).unwrap();
    }
    fs::write(world.w.join("src/core/sub/f"), "secret\n").unwrap();
    fs::write(world.w.join("src/state/main/key"), "secret\n").unwrap();
    let root = world.w.display();
    // Mounts of a namespace of its own: nothing of it is seen outside nor left behind.
    let script = format!(
        "mount --bind {root}/src/core {root}/src/alias && mount --bind {root}/src/state {root}/src/seen || exit 77
         W={root} exec {} --ignored --exact files::child_p10 --nocapture",
        std::env::current_exe().unwrap().display()
    );
    let mut child =
        Program::new("unshare", ["-rm", "sh", "-c", &script]).start(ErrorOutput::WithOutput).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let output = child.read_to_end(1 << 20, None, deadline).unwrap();
    let output = String::from_utf8_lossy(&output);
    match child.wait(deadline).unwrap().code() {
        Some(0) => assert!(output.contains("1 passed"), "{output}"),
        Some(1 | 77) if !output.contains("panicked") => eprintln!("not run: no mounts here: {output}"),
        code => panic!("{code:?}: {output}"),
    }
}

#[test]
#[ignore = "run by p10_a_second_name_of_one_directory_is_judged_as_that_directory among its mounts"]
fn child_p10() {
    let mut world = World::new();
    world.w = std::env::var_os("W").unwrap().into();
    world.scope.allow = vec![rule(&world.w.join("src"), "write"), rule(Path::new("/"), "read")];
    world.desk.directory = world.w.clone();
    world.desk.hidden = vec![world.w.join("src/state")];
    world.lend("src/core", "coder");
    for path in ["src/core/sub/f", "src/alias/sub/f", "src/alias/new", "src/alias/x/y"] {
        world.refuses(path, "lent to pod \"coder\"");
    }
    for path in ["src/state/main/key", "src/seen/main/key"] {
        world.refuses(path, "belongs to Insomnia");
        assert!(world.read(path).unwrap_err().contains("belongs to Insomnia"), "{path}");
    }
    let listed = world.list(json!({})).unwrap();
    assert!(!listed.contains("key") && listed.contains("src/alias/sub/f"), "{listed}");
}

#[test]
fn p11_the_long_way_round_through_proc() {
    use std::os::fd::AsRawFd;
    let mut world = World::new();
    let root = world.w.display().to_string();
    fs::write(world.w.join("src/f"), "in scope\n").unwrap();
    world.refuses(&format!("/proc/self/root{root}/other/f"), "outside your write scope");
    world.refuses("/proc/self/cwd/../other-than-this/f", "outside your write scope");
    let mut other_process = Program::new("sleep", ["1000"])
        .directory(&world.w.join("other"))
        .start(ErrorOutput::WithOutput)
        .unwrap();
    let children = fs::read_to_string("/proc/thread-self/children").unwrap();
    assert!(!children.is_empty());
    for child in children.split_whitespace() {
        world.refuses(&format!("/proc/{child}/cwd/f"), "outside your write scope");
    }
    other_process.kill();
    let open = fs::File::options().read(true).write(true).open(world.w.join("other/f")).unwrap();
    for path in [format!("/dev/fd/{}", open.as_raw_fd()), format!("/proc/self/fd/{}", open.as_raw_fd())] {
        world.refuses(&path, "outside your write scope");
    }
    let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    world.refuses(&format!("/proc/self/fd/{}", one.as_raw_fd()), "outside your write scope");
    assert!(world.read(&format!("/proc/self/root{root}/src/f")).unwrap().contains("in scope"));
    world.write(&format!("/proc/self/root{root}/src/f"), "judged as /w/src/f").unwrap();
    world.scope.allow.truncate(1);
    assert!(world.read(&format!("/proc/self/root{root}/other/f")).unwrap_err().contains("read scope"));
    assert!(world.read("/proc/self/environ").unwrap_err().contains("read scope"));
}

#[test]
fn p12_a_pipe_that_never_ends_is_not_opened() {
    let mut world = World::new();
    nix::unistd::mkfifo(&world.w.join("src/p"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    fs::write(world.w.join("src/x"), "needle\n").unwrap();
    soon(|| world.refuses("src/p", "not a regular file"));
    assert!(soon(|| world.read("src/p")).unwrap_err().contains("not a regular file"));
    let found = soon(|| world.search(json!({"pattern": "needle", "path": "src"}))).unwrap();
    assert_eq!(found, "src/x:1: needle\n");
    assert!(soon(|| world.search(json!({"pattern": "x", "path": "src/p"}))).is_err());
    let pattern = format!("{}/src/**", world.w.display());
    assert_eq!(soon(|| world.list(json!({"pattern": pattern}))).unwrap(), "src/p\nsrc/x\n");
}

/// Runs an ignored test of this file in a process of its own, so that its memory is only its own.
fn in_a_process_of_its_own(test: &str) {
    let args = ["--ignored", "--exact", test, "--nocapture"];
    let program = std::env::current_exe().unwrap();
    let mut child = Program::new(program, args).start(ErrorOutput::WithOutput).unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    let output = child.read_to_end(1 << 20, None, deadline).unwrap();
    let ended = child.wait(deadline).unwrap();
    let output = String::from_utf8_lossy(&output);
    assert!(ended.success() && output.contains("1 passed"), "{output}");
}

/// The most memory that this process has had, in KiB.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The bytes that this process has read so far.
fn bytes_read() -> u64 {
    let text = fs::read_to_string("/proc/self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn p13_an_endless_device_is_refused() {
    in_a_process_of_its_own("files::child_p13");
}

#[test]
#[ignore = "run by p13_an_endless_device_is_refused in a process of its own"]
fn child_p13() {
    let mut world = World::new();
    let socket = world.w.join("src/socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let before = peak_memory();
    for path in [
        "/dev/zero",
        "/dev/random",
        "/dev/stdin",
        "/dev/full",
        "/dev/tty",
        "/proc/kmsg",
        "/proc/self/mem",
        "/proc/self/environ",
        "/sys/kernel/notes",
        "src/socket",
        "src",
        "/",
    ] {
        let error = soon(|| world.read(path)).expect_err(path);
        assert!(!error.is_empty());
        soon(|| world.refuses(path, ""));
        assert!(soon(|| world.search(json!({"pattern": "x", "path": "src/socket"}))).is_err());
    }
    assert!(soon(|| world.list(json!({"path": "/proc"}))).is_err());
    let grown = peak_memory() - before;
    assert!(grown < 10 << 10, "{grown} KiB");
}

#[test]
fn p14_a_very_large_file_is_read_in_pages() {
    in_a_process_of_its_own("files::child_p14");
}

#[test]
#[ignore = "run by p14_a_very_large_file_is_read_in_pages in a process of its own"]
fn child_p14() {
    let mut world = World::new();
    let sparse = fs::File::create(world.w.join("src/sparse")).unwrap();
    sparse.set_len(20 << 30).unwrap();
    let lines = fs::File::create(world.w.join("src/lines")).unwrap();
    lines.write_all_at("line\n".repeat(40_000).as_bytes(), 0).unwrap();
    lines.set_len(20 << 30).unwrap();
    let single = fs::File::create(world.w.join("src/single")).unwrap();
    let piece = vec![b'x'; 1 << 20];
    for at in 0..200 {
        single.write_all_at(&piece, at << 20).unwrap();
    }
    single.write_all_at(b"\nlast", 200 << 20).unwrap();
    let before = peak_memory();
    let bounded = |call: &mut dyn FnMut() -> Answer| {
        let begin = bytes_read();
        let answer = call();
        let read = bytes_read() - begin;
        assert!(read < 1 << 30, "read {read} bytes");
        answer
    };
    for input in [json!({"path": "src/sparse"}), json!({"path": "src/sparse", "offset": 1, "limit": 10})] {
        let error = bounded(&mut || world.read_page(input.clone())).unwrap_err();
        assert!(error.contains("binary file; its 21474836480 bytes are left out"), "{error}");
    }
    let text = bounded(&mut || world.read("src/lines")).unwrap();
    assert!(text.contains("go on with \"offset\": "), "{}", &text[text.len() - 200..]);
    let text = bounded(&mut || world.read_page(json!({"path": "src/lines", "offset": 39_990}))).unwrap();
    assert!(text.contains("line 40001 is binary") && text.contains("bytes left out"), "{text}");
    let error = bounded(&mut || world.read_page(json!({"path": "src/lines", "offset": 50_000}))).unwrap_err();
    assert!(error.contains("is too far away") || error.contains("is beyond its end"), "{error}");
    let text = bounded(&mut || world.read("src/single")).unwrap();
    let left = (200 << 20) - (8 << 10);
    assert!(
        text.contains(&format!("[... {left} bytes of this line left out]\n     2\tlast\n")),
        "{}",
        text.len()
    );
    let text =
        bounded(&mut || world.read_page(json!({"path": "src/single", "offset": 1, "limit": 1}))).unwrap();
    assert!(text.contains("[4 of 209715205 bytes left out after this; go on with \"offset\": 2]"));
    let text =
        bounded(&mut || world.read_page(json!({"path": "src/single", "offset": 1, "limit": 10}))).unwrap();
    assert!(text.len() < 10_000);
    for path in ["src/sparse", "src/single", "src/lines"] {
        let error = bounded(&mut || world.edit(path, "x", "y")).unwrap_err();
        assert!(error.contains("EditFile takes at most 8388608"), "{error}");
    }
    let found = bounded(&mut || world.search(json!({"pattern": "x"}))).unwrap();
    assert!(found.contains("[3 files over 16 MiB were not searched]"), "{found}");
    let grown = peak_memory() - before;
    assert!(grown < 64 << 10, "{grown} KiB");
}

#[test]
fn p15_line_ends_are_not_rewritten() {
    let mut world = World::new();
    fs::write(world.w.join("src/f"), "a\r\nb\r\nc\r\n").unwrap();
    world.edit("src/f", "b", "B").unwrap();
    world.edit("src/f", "a\nB", "A\nB").unwrap();
    assert_eq!(world.content("src/f"), "A\r\nB\r\nc\r\n");
    assert!(world.read("src/f").unwrap().contains("     1\tA\n     2\tB\n"), "no CR is shown");
    assert!(world.read("src/f").unwrap().contains("lines end in CRLF"));
    fs::write(world.w.join("src/g"), "a\nb").unwrap();
    world.edit("src/g", "b", "c").unwrap();
    assert_eq!(world.content("src/g"), "a\nc");
}

#[test]
fn p16_names_that_are_not_utf8_are_shown_and_taken_back() {
    let mut world = World::new();
    let directory = world.w.join(OsStr::from_bytes(b"src/d\xff"));
    fs::create_dir(&directory).unwrap();
    for path in [&b"src/a\xffz.txt"[..], b"src/d\xff/f", b"src/tab\t\n"] {
        fs::write(world.w.join(OsStr::from_bytes(path)), "needle\n").unwrap();
    }
    let listed = world.list(json!({"path": "src"})).unwrap();
    assert_eq!(listed, "src/a\\xffz.txt\nsrc/d\\xff/f\nsrc/tab\\x09\\x0a\n");
    let found = world.search(json!({"pattern": "needle"})).unwrap();
    for path in listed.lines() {
        assert!(found.contains(&format!("{path}:1: needle\n")), "{found}");
        assert!(world.read(path).unwrap().contains("needle"), "{path}");
        world.edit(path, "needle", "thread").unwrap();
        world.write(path, "needle\n").unwrap();
    }
    world.write("src/d\\xff/new", "x").unwrap();
    assert_eq!(fs::read(directory.join("new")).unwrap(), b"x");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
    fs::write(world.w.join("src/real\\xff"), "backslash\n").unwrap();
    assert!(world.read("src/real\\xff").unwrap().contains("backslash"), "the literal name comes first");
    assert!(world.list(json!({"path": "src/d\\xff"})).unwrap().contains("new"));
    // A rule cannot name it, so it never takes such a name for its own.
    world.scope.allow = vec![rule(&world.w.join("src/d\u{fffd}"), "write"), rule(Path::new("/"), "read")];
    world.refuses("src/d\\xff/f", "outside");
}

#[test]
fn p17_loops_of_links_are_not_walked() {
    let mut world = World::new();
    fs::create_dir(world.w.join("src/s")).unwrap();
    fs::write(world.w.join("src/s/f"), "x\n").unwrap();
    for (target, name) in [(".", "s"), ("..", "up"), ("/", "root")] {
        symlink(target, world.w.join("src/s").join(name)).unwrap();
    }
    let started = Instant::now();
    let listed = world.list(json!({"path": "src", "pattern": "**/*"})).unwrap();
    assert_eq!(listed, "src/s/f\nsrc/s/root\nsrc/s/s\nsrc/s/up\n");
    assert_eq!(world.search(json!({"path": "src", "pattern": "x"})).unwrap(), "src/s/f:1: x\n");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn p18_a_change_nobody_saw_is_not_written_over() {
    let mut world = World::new();
    let path = world.w.join("src/f");
    fs::write(&path, "one\ntwo\n").unwrap();
    world.read("src/f").unwrap();
    let_time_pass();
    fs::write(&path, "one\nTWO\nthree\n").unwrap();
    let error = world.write("src/f", "mine").unwrap_err();
    assert!(error.contains("has changed since you read it; read it again"), "{error}");
    assert_eq!(world.content("src/f"), "one\nTWO\nthree\n");
    assert!(world.edit("src/f", "two", "2").unwrap_err().contains("does not occur"));
    world.edit("src/f", "TWO", "2").unwrap();
    assert_eq!(world.content("src/f"), "one\n2\nthree\n");
    world.write("src/f", "mine").unwrap();
    world.write("src/f", "mine again").unwrap();

    // The same size and modification time do not hide a change.
    let times = fs::metadata(&path).unwrap();
    let_time_pass();
    fs::write(&path, "mine AGAIN").unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(times.modified().unwrap()).unwrap();
    assert!(world.write("src/f", "x").unwrap_err().contains("has changed since"));
    world.read("src/f").unwrap();
    world.write("src/f", "x").unwrap();

    // Replaced by another file, as editors do.
    fs::write(world.w.join("src/g"), "x").unwrap();
    fs::rename(world.w.join("src/g"), &path).unwrap();
    assert!(world.write("src/f", "y").unwrap_err().contains("has changed since"));

    // Gone: there is nothing to lose. Never read: it may be replaced.
    fs::remove_file(&path).unwrap();
    world.write("src/f", "y").unwrap();
    fs::write(world.w.join("src/new"), "x").unwrap();
    world.write("src/new", "y").unwrap();
}

#[test]
fn s02_git_hooks_and_configuration_are_protected() {
    let mut world = World::new();
    fs::create_dir_all(world.w.join("src/.git/hooks")).unwrap();
    fs::write(world.w.join("src/.git/config"), "secret").unwrap();
    fs::create_dir(world.w.join("src/tree")).unwrap();
    fs::write(world.w.join("src/tree/.git"), "gitdir: elsewhere").unwrap(); // a linked work tree
    symlink(".git/hooks", world.w.join("src/h")).unwrap();
    symlink(".git/config", world.w.join("src/c")).unwrap();
    for path in [
        "src/.git/hooks/pre-commit",
        "src/.git/config",
        "src/h/pre-commit",
        "src/c",
        "src/.insomnia/manifest.json",
        "src/sub/.git/hooks/x",
        "src/.git/modules/m/config",
        "src/tree/.git",
        "src/new/.GIT",
    ] {
        world.refuses(path, "protected");
    }
    assert!(world.read("src/.git/config").unwrap().contains("secret"));
    world.desk.protect_git = false;
    world.write("src/.git/hooks/pre-commit", "x").unwrap();
}

#[test]
fn s10_an_empty_scope_writes_nothing() {
    let mut world = World::new();
    fs::write(world.w.join("src/f"), "secret").unwrap();
    world.scope.allow.remove(0);
    world.refuses("src/f", "you have no such scope at all");
    world.refuses("src/new", "outside");
    world.scope = EffectiveScope::default();
    world.refuses("src/f", "you have no such scope at all");
    assert!(world.read("src/f").unwrap_err().contains("outside your read scope"));
    assert!(world.list(json!({})).is_err() && world.search(json!({"pattern": "x"})).is_err());
}

#[test]
fn a_narrower_read_scope_is_kept_while_walking() {
    let mut world = World::new();
    fs::create_dir(world.w.join("src/sub")).unwrap();
    for path in ["src/f", "src/sub/g"] {
        fs::write(world.w.join(path), "needle\n").unwrap();
    }
    world.scope.allow = vec![Rule::try_from(format!("{}:read:flat", world.w.join("src").display())).unwrap()];
    assert_eq!(world.list(json!({"path": "src"})).unwrap(), "src/f\n");
    assert_eq!(world.search(json!({"path": "src", "pattern": "needle"})).unwrap(), "src/f:1: needle\n");
    assert!(world.read("src/sub/g").is_err());
    assert_eq!(
        world.list(json!({"path": "src/sub"})).unwrap(),
        "[no files]\n",
        "the directory is in, they are not"
    );
}

#[test]
fn insomnias_own_places_are_kept_away_from() {
    let mut world = World::new();
    fs::create_dir_all(world.w.join("src/state/main/results")).unwrap();
    for path in ["src/state/main/history", "src/state/main/results/1", "src/key"] {
        fs::write(world.w.join(path), "secret\n").unwrap();
    }
    fs::hard_link(world.w.join("src/key"), world.w.join("src/second-name")).unwrap();
    world.desk.hidden = vec![world.w.join("src/state"), world.w.join("src/key")];
    world.desk.shown = vec![world.w.join("src/state/main/results")];
    for path in ["src/state/main/history", "src/state/main/results/1", "src/state/new", "src/key"] {
        world.refuses(path, "belongs to Insomnia");
    }
    for path in ["src/state/main/history", "src/key", "src/second-name"] {
        assert!(world.read(path).unwrap_err().contains("belongs to Insomnia"), "{path}");
    }
    assert!(world.read("src/state/main/results/1").unwrap().contains("secret"));
    assert_eq!(world.list(json!({"path": "src/state/main/results"})).unwrap(), "src/state/main/results/1\n");
    assert!(world.list(json!({"path": "src/state"})).is_err());
    assert_eq!(world.list(json!({"path": "src"})).unwrap(), "src/second-name\n");
    assert_eq!(world.search(json!({"path": "src", "pattern": "secret"})).unwrap(), "[no matches]\n");
}

#[test]
fn t02_many_hits_are_cut_and_counted() {
    let mut world = World::new();
    let hits: String = (0..1000).map(|number| format!("needle {number} {}\n", "x".repeat(1000))).collect();
    for number in 0..200 {
        fs::write(world.w.join(format!("src/f{number:03}")), &hits).unwrap();
    }
    let found = world.search(json!({"pattern": "needle"})).unwrap();
    assert!(found.len() < 256 << 10, "{}", found.len());
    assert_eq!(found.lines().filter(|line| line.contains(": needle ")).count(), 500);
    assert!(found.contains("[src/f000 has more matching lines]"));
    assert!(found.ends_with(
        "[500 matching lines are shown, the most there can be; narrow \"pattern\", \"path\" or \"glob\"]\n"
    ));
    for number in 0..1100 {
        fs::write(world.w.join(format!("other/g{number:04}")), "").unwrap();
    }
    let listed = world.list(json!({"path": "other"})).unwrap();
    assert_eq!(listed.lines().count(), 1001);
    assert!(listed.contains("[only the first 1000 paths are listed"));
}

#[test]
fn a_page_ends_where_the_next_begins() {
    let mut world = World::new();
    let text: String = (1..=50_000).map(|number| format!("line number {number}\n")).collect();
    fs::write(world.w.join("src/f"), &text).unwrap();
    let mut offset = 1;
    let mut seen = 0;
    loop {
        let page = world.read_page(json!({"path": "src/f", "offset": offset})).unwrap();
        assert!(page.len() < 300 << 10);
        let numbered = page.lines().filter(|line| line.contains("\tline number ")).count();
        seen += numbered;
        match page.split("go on with \"offset\": ").nth(1) {
            Some(rest) => offset = rest.split(']').next().unwrap().parse().unwrap(),
            None => break,
        }
    }
    assert_eq!(seen, 50_000);
    let page = world.read_page(json!({"path": "src/f", "offset": 7, "limit": 2})).unwrap();
    assert!(page.starts_with("     7\tline number 7\n     8\tline number 8\n["), "{page}");
    for (path, content, lines) in [("src/open", "a\nb", 2), ("src/closed", "a\nb\n", 2)] {
        fs::write(world.w.join(path), content).unwrap();
        let error = world.read_page(json!({"path": path, "offset": 9})).unwrap_err();
        assert!(error.contains(&format!("has {lines} lines")), "{error}");
    }
    fs::write(world.w.join("src/empty"), "").unwrap();
    assert_eq!(world.read("src/empty").unwrap(), "[the file is empty]\n");
    fs::write(world.w.join("src/latin"), b"caf\xe9\n").unwrap();
    assert!(world.read("src/latin").unwrap().starts_with("     1\tcaf\u{fffd}\n[bytes that are not UTF-8"));
    assert!(world.read_page(json!({"path": "src/f", "offset": 0})).is_err());
    assert!(world.read_page(json!({"path": "src/f", "lines": 3})).unwrap_err().contains("\"lines\""));
}

#[test]
fn a_replaced_file_keeps_its_mode_and_leaves_nothing_beside_it() {
    let mut world = World::new();
    let path = world.w.join("src/run.sh");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
    world.write("src/run.sh", "new").unwrap();
    world.edit("src/run.sh", "new", "newer").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o750);
    if insomnia::sys::process::own_uid() == 0 {
        std::os::unix::fs::chown(&path, Some(65_534), Some(65_534)).unwrap();
        world.edit("src/run.sh", "newer", "newest").unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (65_534, 65_534, 0o750));
    }
    assert_eq!(fs::read_dir(world.w.join("src")).unwrap().count(), 1);
}

#[test]
fn a_flat_rule_reaches_the_direct_children_only() {
    let mut world = World::new();
    let flat = Rule::try_from(format!("{}:write:flat", world.w.join("src").display())).unwrap();
    world.scope.allow = vec![flat, rule(Path::new("/"), "read")];
    world.write("src/f", "x").unwrap();
    world.refuses("src/new/f", "outside");
    assert!(!world.w.join("src/new").exists());
}
