//! Shell and its sandbox: what commands can do, what they cannot, and what is left when they are over.
//!
//! The battery is a list of attempts. Each says YES or NO, and the same list runs unconfined as a control, so that a
//! NO means "denied" and not "wrongly written". Everything here runs for root and, again, for an ordinary user.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use insomnia::store::life::{self, Holding};
use insomnia::store::paths::RuntimeDirectory;
use insomnia::sys::confine::View;
use insomnia::sys::process;
use insomnia::sys::supervise::Ended;
use insomnia::wire::sandbox::{Kept, Level, Outcome, Plan, Sandbox};
use insomnia::words::identity::Life;

use crate::world::{World, copy_program, has_tool, lives, ran, read, wait_until};

fn call(command: impl Into<String>) -> Value {
    json!({ "name": "Shell", "input": { "command": command.into() } })
}

/// A world whose main pod makes these calls in its first turn. `shell` is the manifest's section.
fn world_with(calls: Vec<Value>, shell: Value) -> World {
    let world = World::new();
    let main = json!([{ "tool_calls": calls }, { "text": "done" }]);
    let pods = json!({ "pods": { "main": main, "*": [{ "text": "I hold it" }] } });
    fs::write(world.path("script.json"), pods.to_string()).unwrap();
    let provider = json!({ "kind": "script", "file": world.path("script.json") });
    world.manifest(json!({ "provider": provider, "shell": shell }));
    world
}

/// Starts the main pod with these scopes, lets it make its calls, and returns what Shell answered.
fn go(world: &World, scopes: &[&str]) -> Vec<(bool, String)> {
    let args: Vec<&str> = scopes.iter().flat_map(|scope| ["--scope", scope]).collect();
    world.start(&args);
    assert_eq!(world.turn("main", "go")["result"], "finished");
    world.results("main", "Shell")
}

/// What one command comes to in a scope of the whole project.
fn one(command: &str) -> String {
    go(&world_with(vec![call(command)], json!({})), &[".:write"]).remove(0).1
}

/// Runs a test of this file as an ordinary user, if we are root.
fn again_as_user(test: &str) {
    if process::own_uid() == 0 && has_tool("setpriv") {
        inside(&USER, test);
    }
}

const USER: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

/// Runs a test of this file under another program.
fn inside(wrapper: &[&str], test: &str) {
    let this = std::env::current_exe().unwrap();
    let test = format!("shell::{test}");
    let words = wrapper[1..].iter().map(|word| (*word).into());
    let own = [this.into_os_string(), "--exact".into(), test.clone().into(), "--include-ignored".into()];
    let program = process::Program::new(wrapper[0], words.chain(own));
    let ran = ran(program.directory(Path::new("/")).env("INSOMNIA_TEST_INSIDE", "1"));
    assert!(
        ran.code == Some(0) && ran.stdout.contains("1 passed"),
        "{wrapper:?} {test}: {}{}",
        ran.stdout,
        ran.stderr
    );
}

fn rounds(few: usize, many: usize) -> usize {
    if std::env::var_os("INSOMNIA_LONG").is_some() { many } else { few }
}

/// An attempt: its name, a command whose exit code says whether it worked, and what it comes to at level 1, at level 3
/// (where nothing is lent, so that `core` is the pod's own) and unconfined: `Y`es, `N`o, `R`oot only, or `-` where it
/// depends on the machine.
type Attempt = (&'static str, String, &'static str);

const LEVEL_1: usize = 0;
const LEVEL_3: usize = 1;
const UNCONFINED: usize = 2;

fn attempts(world: &World, abstract_name: &str) -> Vec<Attempt> {
    let run = world.runtime().display().to_string();
    let connect = |address: &str| {
        format!("python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect({address})'")
    };
    let nested = |command: &str| format!("unshare -Urm sh -c '{command}'");
    let [core, docs] = ["src/a/core", "docs"].map(|name| world.project().join(name).display().to_string());
    let mut list: Vec<Attempt> = Vec::new();
    let mut add = |name, command: &str, columns| list.push((name, command.to_owned(), columns));
    add("write", "echo x > src/f", "YYY");
    add("create next to core", "echo x > src/a/new", "YYY");
    add("new directory", "mkdir src/a/dir && rmdir src/a/dir", "YYY");
    add("rename inside", "mv src/f src/g && mv src/g src/f", "YYY");
    add("read core", "grep -q core src/a/core/f", "YYY");
    add("read outside", "cat /etc/passwd", "YYY");
    add("write core", "echo x >> src/a/core/f", "NYY");
    add("create in core", "echo x > src/a/core/new; test -e src/a/core/new", "NYY");
    add("truncate in core", "cp src/a/core/f src/copy; truncate -s 0 src/a/core/g", "NYY");
    add("chmod in core", "chmod 640 src/a/core/f", "NYY");
    add("times in core", "touch -d 2001-01-01 src/a/core/f", "NYY");
    add("attributes in core", "setfattr -n user.x -v 1 src/a/core/f || touch -m src/a/core/f", "NY-");
    add("write core through a link", "ln -sf core/f src/a/l; echo x >> src/a/l", "NYY");
    add("hard link out of core", "ln src/a/core/f src/hard && rm src/hard", "NYY");
    add("write an older hard link", "echo x >> src/older", "YYY");
    add("write through /proc/self/root", &format!("echo x >> /proc/self/root{core}/f"), "NYY");
    add("write through /proc/self/cwd", "cd src/a/core && echo x >> /proc/self/cwd/f", "NYY");
    add("write outside the scope", "echo x > docs/x", "NNY");
    add("write outside through a link", "ln -s ../docs src/out; echo x > src/out/x", "NNY");
    add("write outside through /proc/self/root", &format!("echo x > /proc/self/root{docs}/x"), "NNY");
    add("truncate outside", "truncate -s 0 docs/f", "NNY");
    // Landlock does not govern modes and times of what cannot be written.
    add("chmod outside", "chmod 640 docs/f", "NYY");
    add("times outside", "touch -d 2001-01-01 docs/f", "NYY");
    add("hard link to outside", "ln docs/f src/theirs && echo x >> src/theirs", "NNY");
    add("rename to outside", "echo x > src/moved && mv src/moved docs/moved", "NNY");
    add("remove outside", "rm docs/g", "NNY");
    add("write in the home", "echo x > $HOME/x", "NNY");
    add("rename the scope", "mv src src2 && mv src2 src", "NN-");
    add("swap core", "mv src/a/core src/a/core2 && mv src/a/core2 src/a/core", "NYY");
    add("rename above core", "mv src/a src/b && mv src/b src/a", "NYY");
    add(
        "rename above by exchange",
        "mkdir -p src/e; python3 -c 'import ctypes,os,sys; l=ctypes.CDLL(None); sys.exit(l.renameat2(-100,b\"src/a\",-100,b\"src/e\",2)!=0)' && mv src/a src/t && mv src/e src/a && mv src/t src/e",
        "NYY",
    );
    // Landlock cannot take away inside of what is writable.
    add("git hook", "echo x > src/.git/hooks/pre-commit", "NYY");
    add("git configuration", "git -C src config core.hooksPath /x || echo x >> src/.git/config", "NYY");
    add("swap .git", "mv src/.git src/git2 && mv src/git2 src/.git", "NYY");
    add("project manifest", "echo '{}' >> src/.insomnia/manifest.json", "NYY");
    add("commit", "cd src && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x", "YYY");
    // Landlock hides what is in a file or directory, not that it is there.
    add("names of the runtime directory", &format!("ls {run} | grep -q scope.lock"), "NYY");
    add("read scope.lock", &format!("cat {run}/scope.lock"), "NNY");
    add("lock scope.lock", &format!("flock -n {run}/scope.lock true"), "NNY");
    add("write scope.lock", &format!("test -f {run}/scope.lock && echo >> {run}/scope.lock"), "NNY");
    // Landlock does not govern sockets that have a path.
    add("connect to the own pod", &connect(&format!("\"{run}/main/sock\"")), "NYY");
    add("connect to another pod", &connect(&format!("\"{run}/child/sock\"")), "NYY");
    add("connect to an abstract socket", &connect(&format!("b\"\\0{abstract_name}\"")), "NNY");
    add(
        "read the configuration",
        &format!("cat {}", world.path("config/insomnia/manifest.json").display()),
        "NNY",
    );
    add("read the state", &format!("cat {}/main/*/history.jsonl", world.state().display()), "NNY");
    add("signal the pod", "kill -0 POD", "NNY");
    add("root of the pod", "ls /proc/POD/root/", "NNY");
    add("environment of the pod", "cat /proc/POD/environ", "NNY");
    add(
        "trace the pod",
        "timeout -s INT 1 strace -o /dev/null -p POD; test $? = 124 -o $? = 0 -o $? = 130",
        "NN-",
    );
    add("environment of the supervisor", "grep -q INSOMNIA_RUNTIME /proc/$PPID/environ", "NN-");
    add(
        "take the life from the supervisor",
        "python3 -c \"import ctypes, os, sys; sys.exit(ctypes.CDLL(None).syscall(438, os.pidfd_open($PPID), 0, 0) < 0)\"",
        "NN-",
    );
    add("terminal", ": < /dev/tty", "NN-");
    add(
        "type into the terminal",
        "python3 -c 'import fcntl; [fcntl.ioctl(n, 0x5412, b\"x\") for n in (0,1,2)]'",
        "NN-",
    );
    add("only three descriptors", "test \"$(ls /proc/self/fd | tr '\\n' ' ')\" = '0 1 2 3 '", "YYY");
    add("input is null", "test \"$(readlink /proc/$$/fd/0)\" = /dev/null", "YYY");
    add("devices", "echo x > /dev/null && head -c1 /dev/urandom > /dev/full; test $? = 1", "YYY");
    // Landlock opens no devices but the known ones.
    add("own terminals", "python3 -c 'import pty; pty.openpty()'", "YNY");
    // Whoever is reduced to level 3 may not make namespaces.
    add("nested user namespace", "unshare -Ur true", "YN-");
    let mine = |what: &str| format!("test -d {core} && {what}");
    add("remount", &mine(&format!("mount -o remount,rw,bind {core}")), "NN-");
    add("unmount", &mine(&format!("umount {core}")), "NN-");
    add("lazy unmount", &mine(&format!("umount -l {core}")), "NN-");
    // Without the sandbox it works, outside of every namespace.
    let bind =
        format!("mount --bind {core} src/e && {{ echo x >> src/e/f; done=$?; umount src/e; exit $done; }}");
    add("bind elsewhere", &mine(&bind), "NN-");
    add("nested remount", &nested(&format!("mount -o remount,rw,bind {core} && echo x >> {core}/f")), "NN-");
    add("nested unmount", &nested(&format!("umount -l {core} && echo x >> {core}/f")), "NN-");
    add("nested bind", &nested(&format!("mount --bind {core} src/e && echo x >> src/e/f")), "NN-");
    add("nested recursive bind", &nested("mount --rbind src src/e && echo x >> src/e/a/core/f"), "NN-");
    add(
        "no capability",
        "test \"$(grep -c -E 'Cap(Inh|Prm|Eff|Amb):.*[1-9a-f]' /proc/self/status)\" = 0",
        "YY-",
    );
    add("no new privileges", "grep -q 'NoNewPrivs:.*1' /proc/self/status", "YY-");
    add(
        "block device",
        "for d in /dev/vda /dev/sda /dev/nvme0n1 /dev/loop0; do head -c1 $d && exit 0; done; false",
        "NN-",
    );
    add("make a device", "mknod src/disk b 7 0 && head -c1 src/disk", "NN-");
    add("kernel settings", "test -w /proc/sys/kernel/core_pattern", "NN-");
    add("system request", "test -w /proc/sysrq-trigger", "NN-");
    add(
        "new /proc in a nested namespace",
        "unshare -Urmpf sh -c 'mount -t proc proc /proc && test -w /proc/sys/kernel/core_pattern'",
        "NNR",
    );
    add(
        "new /sys in a nested namespace",
        "unshare -Urmn sh -c 'mount -t sysfs sysfs /mnt && test -w /mnt/kernel/mm/transparent_hugepage/enabled'",
        "NNR",
    );
    add("services", "test -e /run/dbus -o -e /run/docker.sock -o -e /run/systemd", "N--");
    // At level 3 they are those of everybody, so they cannot be written.
    add(
        "temporary files",
        &format!("echo x > /tmp/{abstract_name} && echo x > /dev/shm/{abstract_name} && mktemp"),
        "YNY",
    );
    list
}

/// Whether an answer is the one of this column.
fn is_in(column: usize) -> impl Fn(&Attempt, &str) -> bool {
    move |(_, _, columns), text| match columns.as_bytes()[column] {
        b'Y' => text.starts_with("YES\n"),
        b'R' if process::own_uid() == 0 => text.starts_with("YES\n"),
        b'N' | b'R' => text.starts_with("NO\n"),
        _ => text.starts_with("YES\n") || text.starts_with("NO\n"),
    }
}

/// Makes the attempts while a child has `core` with this access, and returns the level and, for each whose answer is
/// not as wanted, its name and the answer.
fn differences(
    shell: Value,
    access: &str,
    is_wanted: impl Fn(&Attempt, &str) -> bool,
) -> (String, Vec<String>) {
    use std::os::linux::net::SocketAddrExt;
    let name = format!("insomnia-test-{}", insomnia::sys::clock::random_hex(8).unwrap());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    let world = world_with(vec![], json!({}));
    let project = world.project();
    for directory in ["src/a/core", "src/.git/hooks", "src/.insomnia", "docs"] {
        fs::create_dir_all(project.join(directory)).unwrap();
    }
    for file in ["src/a/core/f", "src/a/core/g", "docs/f", "docs/g"] {
        fs::write(project.join(file), "core\n").unwrap();
    }
    fs::hard_link(project.join("src/a/core/g"), project.join("src/older")).unwrap();
    ran(world.program("git", ["init", "-q", "src"]));
    let attempts = attempts(&world, &name);
    // The pod's number is known only once it runs, so the script reads it from a file that the first call made.
    let pid_file = project.join("src/pod");
    let said = |command: &str| {
        let command = command.replace("POD", "$(cat \"$OLDPWD/src/pod\")");
        call(format!("OLDPWD=$PWD; if ( {command} ) > /dev/null 2>&1; then echo YES; else echo NO; fi"))
    };
    let scope = [format!("src/a/core:{access}")];
    let spawn = json!({ "name": "SpawnPod", "input": { "name": "child", "task": "hold", "scope": scope } });
    let calls: Vec<Value> =
        std::iter::once(spawn).chain(attempts.iter().map(|(_, command, _)| said(command))).collect();
    let script = json!({ "pods": { "main": [{ "tool_calls": calls }, { "text": "done" }], "*": [{ "text": "held" }] } });
    fs::write(world.path("script.json"), script.to_string()).unwrap();
    let provider = json!({ "kind": "script", "file": world.path("script.json") });
    world.manifest(json!({ "provider": provider, "shell": shell }));
    world.start(&["--scope", "src:write"]);
    fs::write(&pid_file, world.pid("main").to_string()).unwrap();
    let level = world.status("main")["sandbox"].as_str().unwrap().to_owned();
    assert_eq!(world.turn("main", "go")["result"], "finished");
    let results = world.results("main", "Shell");
    assert_eq!(results.len(), attempts.len());
    assert!(world.entry("child").is_some(), "s08: the child still runs");
    let wrong = |(attempt, (_, text)): (&Attempt, &(bool, String))| {
        (!is_wanted(attempt, text)).then(|| format!("{}: {}", attempt.0, text.trim()))
    };
    let found = attempts.iter().zip(&results).filter_map(wrong).collect();
    if !level.starts_with("0:") {
        for file in ["docs/f", "docs/g"].iter().chain((access == "write").then_some(&"src/a/core/f")) {
            assert_eq!(read(project.join(file)), "core\n");
        }
        assert!(!project.join("docs/x").exists() && !world.path("home/x").exists());
        for place in ["/tmp", "/dev/shm"] {
            assert!(!Path::new(place).join(&name).exists(), "private places leak");
        }
        let made = fs::metadata(project.join("src/f"));
        // Where every command is refused there is none.
        assert_eq!(made.is_ok(), results[0].0);
        assert!(
            made.is_err() || made.is_ok_and(|made| made.uid() == process::own_uid()),
            "files belong to the pod's user"
        );
    }
    (level, found)
}

fn has_battery_tools() -> bool {
    ["python3", "unshare", "strace", "git", "flock"].iter().all(|tool| has_tool(tool))
}

#[test]
fn every_attempt_of_the_battery_comes_out_as_wanted_at_level_1() {
    if !has_battery_tools() {
        return;
    }
    let (level, found) = differences(json!({}), "write", is_in(LEVEL_1));
    assert!(level.starts_with("1:"), "{level}");
    assert!(found.is_empty(), "{found:#?}");
    if std::env::var_os("INSOMNIA_TEST_INSIDE").is_none() {
        again_as_user("every_attempt_of_the_battery_comes_out_as_wanted_at_level_1");
    }
}

#[test]
fn without_the_sandbox_the_denied_attempts_work() {
    if !has_battery_tools() {
        return;
    }
    let (level, found) = differences(json!({ "sandbox": "off" }), "write", is_in(UNCONFINED));
    assert!(level.starts_with("0: unconfined"), "{level}");
    assert!(found.is_empty(), "{found:#?}");
    if std::env::var_os("INSOMNIA_TEST_INSIDE").is_none() {
        again_as_user("without_the_sandbox_the_denied_attempts_work");
    }
}

const REFUSE: [&str; 7] = ["bwrap", "--unshare-user", "--disable-userns", "--dev-bind", "/", "/", "--"];

/// As a kernel without Landlock.
const NO_LANDLOCK: [&str; 9] = [
    "strace",
    "-f",
    "--seccomp-bpf",
    "-o",
    "/dev/null",
    "-e",
    "trace=landlock_create_ruleset",
    "-e",
    "inject=landlock_create_ruleset:error=EOPNOTSUPP",
];

#[test]
fn s09_where_nothing_can_confine_there_is_no_shell_and_everybody_is_told_why() {
    if process::own_uid() == 0 && has_tool("bwrap") && has_tool("setpriv") && has_battery_tools() {
        inside(&REFUSE, "inner_level_4"); // Landlock does not govern what a root can do
        inside(&[&USER[..], &REFUSE[..], &NO_LANDLOCK[..]].concat(), "inner_level_4");
    }
}

fn is_refused_with_advice(_: &Attempt, text: &str) -> bool {
    let parts = [
        "the shell is off: the system refuses to confine commands (",
        "; allow user namespaces (",
        "\"off\"",
    ];
    parts.iter().all(|part| text.contains(part)) && text.ends_with("; use the file tools")
}

#[test]
#[ignore = "run by another test where nothing can confine"]
fn inner_level_4() {
    let (level, found) = differences(json!({}), "write", is_refused_with_advice);
    assert!(level.starts_with("4: off: the system refuses") && found.is_empty(), "{level} {found:#?}");
    let write = json!({ "name": "WriteFile", "input": { "path": "file", "content": "x" } });
    let world = world_with(vec![call("touch ran"), write], json!({}));
    go(&world, &[".:write"]);
    assert!(!world.project().join("ran").exists() && world.project().join("file").exists());
    let list = world.insomnia(["list", "--json"]).stdout;
    assert!(list.contains("4: off"), "{list}");
}

#[test]
fn s09_where_namespaces_are_refused_an_ordinary_user_has_the_reduced_level() {
    if process::own_uid() == 0 && has_tool("bwrap") && has_tool("setpriv") && has_battery_tools() {
        let refused = [&USER[..], &REFUSE[..]].concat();
        inside(&refused, "inner_level_3");
        inside(&refused, "without_the_sandbox_the_denied_attempts_work");
        inside(&refused, "a_key_file_inside_the_scope_is_hidden_and_stays_where_it_is");
    }
}

#[test]
#[ignore = "run by another test where namespaces are refused"]
fn inner_level_3() {
    let (level, found) = differences(json!({}), "read", is_in(LEVEL_3));
    assert!(level.starts_with("3: reduced") && found.is_empty(), "{level} {found:#?}");
    let while_lent =
        |_: &Attempt, text: &str| text.contains("the shell is off while a part of your scope is lent");
    let (level, found) = differences(json!({}), "write", while_lent);
    assert!(level.starts_with("3: reduced") && found.is_empty(), "{level} {found:#?}");
    // Landlock cannot cut the network.
    let (level, found) = differences(json!({ "network": false }), "write", is_refused_with_advice);
    assert!(level.starts_with("4: off: the system refuses") && found.is_empty(), "{level} {found:#?}");
    let mark = mark(90_000);
    assert_eq!(one(&format!("sleep {mark} & setsid sleep {mark} & true")), "exit code 0");
    wait_until("what was started is gone", || processes_with(&mark).is_empty());
}

/// Seconds to sleep that no other process on this machine has among its arguments.
fn mark(number: usize) -> String {
    format!("777.{:07}{number:05}", std::process::id())
}

/// Processes that have this word among their arguments.
fn processes_with(word: &str) -> Vec<i32> {
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let has = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(word)
    };
    pids.filter(has).filter(|pid| lives(*pid)).collect()
}

#[test]
fn t08_the_end_of_the_output_and_the_way_it_ended_are_always_told() {
    let long = "seq 1 100000; echo the error >&2; exit 3";
    let calls = vec![
        call(long),
        call("kill -9 $$"),
        json!({ "name": "Shell", "input": { "command": "echo begun; sleep 600", "timeout_seconds": 1 } }),
        call("printf 'a\\033[2Jb'; echo out; echo err >&2; echo out2"),
        call("head -c 3000000 /dev/zero | tr '\\0' x"),
        call("true"),
    ];
    let world = world_with(calls, json!({}));
    let results = go(&world, &[".:write"]);
    assert!(results[0].0 && results[0].1.len() < 17 << 10 && results[0].1.starts_with("1\n2\n"));
    assert!(
        results[0].1.ends_with("the error\nexit code 3"),
        "{}",
        &results[0].1[results[0].1.len() - 100..]
    );
    let whole = results[0].1.split("the whole is in \"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(read(whole).lines().count(), 100_002);
    assert_eq!(results[1], (true, "killed by signal 9".to_owned()));
    assert!(!results[2].0 && results[2].1.starts_with("begun\ntimed out after 1 s"), "{results:?}");
    assert_eq!(results[3].1, "a\x1b[2Jbout\nerr\nout2\nexit code 0");
    let whole = results[4].1.split("the whole is in \"").nth(1).unwrap().split('"').next().unwrap();
    assert!(read(whole).contains("1951424 bytes of output were not kept"));
    assert_eq!(results[5].1, "exit code 0");
}

#[test]
fn t06_escapes_never_reach_a_terminal_raw() {
    let world = world_with(vec![call("printf '\\033[2J\\033]0;t\\007\\r\\010\\302\\2332J'")], json!({}));
    go(&world, &[".:write"]);
    for command in [&["history", "main"][..], &["read", "main"], &["log", "main"], &["list"]] {
        let shown = world.insomnia(command).stdout;
        let bad = shown.chars().find(|c| c.is_control() && !"\n\t".contains(*c));
        assert_eq!(bad, None, "{command:?}: {shown:?}");
    }
}

#[test]
fn t01_the_call_ends_with_the_command_and_nothing_stays() {
    let mark = mark(90_001);
    let nasty = format!(
        "sleep {mark} & setsid sleep {mark} & nohup yes {mark} >/dev/null & \
        (sleep {mark} </dev/null >/dev/null 2>&1) & (trap '' TERM HUP INT; setsid setsid sleep {mark}) & echo started"
    );
    let world = world_with(vec![call(nasty)], json!({}));
    world.start(&["--scope", ".:write"]);
    let begun = Instant::now();
    world.turn("main", "go");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(world.results("main", "Shell")[0].1, "started\nexit code 0");
    assert_eq!(processes_with(&mark), [0; 0]);
}

#[test]
fn t03_endless_output_fills_neither_memory_nor_time() {
    let calls = vec![
        call("head -c 300M /dev/zero & head -c 300M /dev/zero >&2; wait"),
        json!({ "name": "Shell", "input": { "command": "cat /dev/zero", "timeout_seconds": 1 } }),
    ];
    let world = world_with(calls, json!({}));
    world.start(&["--scope", ".:write"]);
    let peak = |pid: i32| -> u64 {
        let status = read(format!("/proc/{pid}/status"));
        let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let (pid, before) = (world.pid("main"), peak(world.pid("main")));
    world.turn("main", "go");
    let results = world.results("main", "Shell");
    assert!(results[0].0 && results[1].1.contains("timed out after 1 s"));
    assert!(peak(pid) - before < 16 << 10, "grew by {} KiB", peak(pid) - before);
}

#[test]
fn t04_nothing_waits_for_an_answer() {
    for command in [
        "read x",
        "cat",
        "sudo -n true || sudo true",
        "git clone -q https://127.0.0.1:1/x",
        "python3 -c 'input()'",
    ] {
        let begun = Instant::now();
        let text = one(command);
        assert!(begun.elapsed() < Duration::from_secs(10) && text.contains("exit code"), "{command}: {text}");
    }
}

#[test]
fn t05_a_command_never_has_the_terminal_of_the_pod() {
    if !has_tool("script") {
        return;
    }
    let push = "python3 -c 'import fcntl; [fcntl.ioctl(n, 0x5412, b\"x\") for n in (0, 1, 2)]'";
    let tty =
        call(format!("if (: < /dev/tty) 2>/dev/null || {push} 2>/dev/null; then echo YES; else echo NO; fi"));
    for shell in [json!({}), json!({ "sandbox": "off" })] {
        let world = world_with(vec![tty.clone()], shell);
        let pod =
            format!("(: < /dev/tty) && {} --foreground --scope .:write --task go", env!("CARGO_BIN_EXE_pod"));
        let pod = world.program("script", ["-qec", &pod, "/dev/null"]);
        let running = pod.start(process::ErrorOutput::WithOutput).unwrap();
        wait_until("it has tried", || !world.results("main", "Shell").is_empty());
        assert!(world.results("main", "Shell")[0].1.starts_with("NO\n"));
        world.ok("main", "shutdown", Value::Null);
        wait_until("it has ended", || world.entry("main").is_none());
        drop(running);
    }
}

#[test]
fn a_cancel_kills_the_command_and_keeps_what_it_said() {
    let mark = mark(90_002);
    let world = world_with(vec![call(format!("echo begun; trap '' TERM; sleep {mark} & wait"))], json!({}));
    world.start(&["--scope", ".:write"]);
    let mut events = world.subscribe("main", None);
    world.ok("main", "run", json!({ "input": "go" }));
    wait_until("it runs", || processes_with(&mark).len() > 1);
    assert_eq!(world.ok("main", "cancel", Value::Null)["cancelled"], true);
    assert_eq!(events.until_turn_ended()["result"], "cancelled");
    assert!(world.results("main", "Shell")[0].1.starts_with("begun\ncancelled"));
    assert_eq!(processes_with(&mark), [0; 0]);
}

#[test]
fn r06_and_r04_keys_and_open_files_are_not_handed_down() {
    let world = world_with(
        vec![call(
            "env; echo; ls /proc/self/fd; cat /proc/$PPID/environ; cat /proc/1/environ; ls -l /proc/1/fd",
        )],
        json!({ "env": ["MY_LISTED", "OPENAI_API_KEY"] }),
    );
    let pod = env!("CARGO_BIN_EXE_pod");
    let script =
        format!("for n in 3 4 5 6 7 8 9; do eval \"exec $n</etc\"; done; exec {pod} --scope .:write");
    let program = world.program("bash", ["-c", &script]);
    let keys = ["ANTHROPIC_API_KEY", "OPENAI_API_KEY", "MY_TOKEN"];
    let program = keys.iter().fold(program, |program, name| program.env(name, "sk-secret"));
    let started =
        ran(program.env("MY_LISTED", "listed").env("LC_TIME", "C").env("TERM", "dumb").env("USER", "me"));
    assert_eq!(started.code, Some(0), "{}", started.stderr);
    world.turn("main", "go");
    let text = &world.results("main", "Shell")[0].1;
    assert!(!text.contains("sk-secret") && !text.contains("INSOMNIA"), "{text}");
    for wanted in ["MY_LISTED=listed", "LC_TIME=C", "TERM=dumb", "USER=me", "HOME=", "PATH="] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(text.contains("\n0\n1\n2\n3\n") && !text.contains("\n4\n"), "{text}");
}

#[test]
fn s06_the_working_directory_is_no_permission() {
    let world = World::new();
    fs::create_dir_all(world.project().join("src")).unwrap();
    fs::create_dir_all(world.project().join("other")).unwrap();
    std::os::unix::fs::symlink("../other", world.project().join("src/link")).unwrap();
    let at =
        |dir: &str| json!({ "name": "Shell", "input": { "command": "pwd; touch x || echo NO", "dir": dir } });
    let calls: Vec<Value> = ["other", "/", "..", "src/link", "src"].map(at).to_vec();
    world.script(json!({ "main": [{ "tool_calls": calls }, { "text": "done" }] }));
    let results = go(&world, &["src:write"]);
    for (result, denied) in results.iter().zip([true, true, true, true, false]) {
        assert_eq!(result.1.contains("NO\n") || !result.0, denied, "{result:?}");
    }
    assert!(world.project().join("src/x").exists() && !world.project().join("other/x").exists());
}

#[test]
fn a_pod_with_narrower_reading_has_no_shell_and_says_so() {
    let world = World::new();
    let spawn = json!({ "name": "SpawnPod", "input": { "name": "child", "task": "go", "scope": ["src:write", "src:read"] } });
    let child = json!([{ "tool_calls": [call("touch src/x")] }, { "text": "done" }]);
    world.script(json!({ "main": [{ "tool_calls": [spawn] }, { "text": "done" }], "child": child }));
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    wait_until("the child has tried", || !world.results("child", "Shell").is_empty());
    assert!(world.results("child", "Shell")[0].1.contains("there is no tool \"Shell\""));
    assert!(world.status("child")["sandbox"].as_str().unwrap().contains("narrower"));
}

#[test]
fn s05_a_child_is_never_confined_less_than_its_spawner() {
    let world = world_with(vec![], json!({ "sandbox": "off" }));
    let overlay = world.path("overlay.json");
    fs::write(&overlay, json!({ "shell": { "spawner_level": 1 } }).to_string()).unwrap();
    world.start(&["--overlay", overlay.to_str().unwrap()]);
    let sandbox = world.status("main")["sandbox"].clone();
    assert!(sandbox.as_str().unwrap().contains("a child is never on a weaker one"), "{sandbox}");
}

#[test]
fn flat_rules_are_read_only_and_the_manifest_adds_directories() {
    let world = World::new();
    for directory in ["flat", "cache"] {
        fs::create_dir_all(world.path(directory)).unwrap();
    }
    let calls = vec![call(format!("touch {0}/flat/x; touch {0}/cache/x", world.path("").display()))];
    let provider = json!({ "kind": "script", "file": world.path("script.json") });
    world.script(json!({ "main": [{ "tool_calls": calls }, { "text": "done" }] }));
    world.manifest(
        json!({ "provider": provider, "shell": { "writable": [world.path("cache")], "network": false } }),
    );
    let flat = format!("{}:write:flat", world.path("flat").display());
    let results = go(&world, &[&flat]);
    assert!(!world.path("flat/x").exists() && world.path("cache/x").exists(), "{results:?}");
}

#[test]
fn the_network_is_cut_when_the_manifest_says_so() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    for (network, expected) in [(true, "exit code 0"), (false, "exit code 1")] {
        let world = world_with(
            vec![call(format!("exec 3<>/dev/tcp/127.0.0.1/{port}"))],
            json!({ "network": network }),
        );
        let results = go(&world, &[".:write"]);
        assert!(results[0].1.ends_with(expected), "{network}: {results:?}");
    }
}

#[test]
fn s02_git_cannot_be_led_to_another_configuration() {
    let world = world_with(vec![call("echo ../evil > .git/commondir")], json!({}));
    ran(world.program("git", ["init", "-q"]));
    let results = go(&world, &[".:write"]);
    assert!(results[0].1.contains("was removed again") && !world.project().join(".git/commondir").exists());
    fs::write(world.project().join(".git/commondir"), ".").unwrap();
    let other = world_with(vec![call("true")], json!({}));
    assert_eq!(go(&other, &[".:write"])[0].1, "exit code 0");
    assert!(world.project().join(".git/commondir").exists(), "one that was there before stays");
    // Every repository that is protected, and nothing where a link leads to.
    let world = world_with(
        vec![call("echo x | tee a/.git/commondir > b/c/.git/commondir; ln -s ../elsewhere .git")],
        json!({}),
    );
    ran(world.program("git", ["init", "-q", "src/a"]));
    ran(world.program("git", ["init", "-q", "src/b/c"]));
    fs::create_dir(world.project().join("elsewhere")).unwrap();
    fs::write(world.project().join("elsewhere/commondir"), "x").unwrap();
    world.start(&["--dir", world.project().join("src").to_str().unwrap(), "--scope", ".:write"]);
    world.turn("main", "go");
    let (_, text) = world.results("main", "Shell").remove(0);
    assert!(text.ends_with("exit code 0"), "{text}");
    for (path, stays) in
        [("src/a/.git", false), ("src/b/c/.git", false), ("elsewhere", true), ("src/.git", true)]
    {
        assert_eq!(world.project().join(path).join("commondir").exists(), stays, "{path}");
    }
}

#[test]
fn git_configuration_can_be_written_where_a_person_allows_it() {
    let world = world_with(vec![], json!({}));
    ran(world.program("git", ["init", "-q"]));
    let script = json!({ "pods": { "main": [{ "tool_calls": [call("git config user.name x && echo x > .git/hooks/h")] }, { "text": "done" }] } });
    fs::write(world.path("script.json"), script.to_string()).unwrap();
    world.manifest(
        json!({ "provider": { "kind": "script", "file": world.path("script.json") }, "protect_git": false }),
    );
    assert_eq!(go(&world, &[".:write"])[0].1, "exit code 0");
}

#[test]
fn a_key_file_inside_the_scope_is_hidden_and_stays_where_it_is() {
    let world = World::new();
    let key = world.project().join("a/k/key");
    fs::create_dir_all(key.parent().unwrap()).unwrap();
    fs::write(&key, "sk-secret").unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let tried = [
        "cat a/k/key",
        "echo x > a/k/key",
        "mv a/k/key x",
        "mv a b",
        "mv a/k b",
        "rm -rf a",
        "echo x > a/k/other",
    ];
    let calls: Vec<Value> = tried.iter().map(|command| call(format!("{command} && echo YES"))).collect();
    world.script(json!({ "main": [{ "tool_calls": calls }, { "text": "done" }] }));
    let provider = json!({ "kind": "script", "file": world.path("script.json"), "api_key_file": key });
    world.manifest(json!({ "provider": provider }));
    let results = go(&world, &[".:write"]);
    let worked: Vec<bool> = results.iter().map(|(_, text)| text.contains("YES")).collect();
    // Level 3 cannot hide inside of what is writable, so it runs nothing.
    let is_level_3 = world.status("main")["sandbox"].as_str().unwrap().starts_with("3:");
    assert_eq!(worked, [false, false, false, false, false, false, !is_level_3], "{results:#?}");
    assert!(read(&key) == "sk-secret" && !results.iter().any(|(_, text)| text.contains("sk-")));
}

#[test]
fn s09_inside_its_own_shell_a_pod_is_confined_or_says_why_not() {
    let script = json!({ "pods": { "main": [{ "tool_calls": [call("echo inner; touch /etc/x")] }, { "text": "done" }] } });
    // In the scope, because a checkout below /tmp is hidden by the private one.
    let world = World::new();
    let copy = |program: &str, name: &str| {
        let place = world.project().join(name);
        copy_program(program, &place);
        place.display().to_string()
    };
    let (pod, insomnia) =
        (copy(env!("CARGO_BIN_EXE_pod"), "pod"), copy(env!("CARGO_BIN_EXE_insomnia"), "insomnia"));
    let command = format!(
        "export INSOMNIA_RUNTIME_DIR=/tmp/r XDG_STATE_HOME=/tmp/s XDG_CONFIG_HOME=/tmp/c; mkdir -p /tmp/c/insomnia /tmp/w; \
         echo '{}' > /tmp/c/insomnia/manifest.json; echo '{script}' > /tmp/script; cd /tmp/w; {pod} --scope .:write --task go; \
         {insomnia} list --json; for n in $(seq 100); do grep -h tool_result /tmp/s/insomnia/main/*/history.jsonl && exit; sleep 0.05; done",
        json!({ "provider": { "kind": "script", "file": "/tmp/script" } })
    );
    world.script(json!({ "main": [{ "tool_calls": [call(command)] }, { "text": "done" }] }));
    let inner = go(&world, &[".:write"]).remove(0).1;
    assert!(inner.contains("inner\\ntouch: cannot touch '/etc/x': Read-only file system"), "{inner}");
    // In the shell of a root no new /proc may be mounted, because it would show kernel settings that root can write.
    let is_root = process::own_uid() == 0;
    assert!(inner.contains(if is_root { "\"sandbox\":\"3: " } else { "\"sandbox\":\"1: " }), "{inner}");
    if std::env::var_os("INSOMNIA_TEST_INSIDE").is_none() {
        again_as_user("s09_inside_its_own_shell_a_pod_is_confined_or_says_why_not");
    }
}

#[test]
fn l08_only_the_life_file_is_shared_with_the_helpers() {
    let mark = mark(90_004);
    let world = world_with(vec![call(format!("sleep {mark}"))], json!({}));
    world.start(&["--scope", ".:write"]);
    world.ok("main", "run", json!({ "input": "go" }));
    wait_until("it runs", || !processes_with(&mark).is_empty());
    let helpers = processes_with("--confined");
    let of_ours = |pid: &i32| {
        let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let targets: Vec<String> =
            links.filter_map(|link| Some(fs::read_link(link.path()).ok()?.display().to_string())).collect();
        let run = world.runtime().display().to_string();
        targets.iter().any(|target| target.starts_with(&run)).then_some(targets)
    };
    let open: Vec<Vec<String>> = helpers.iter().filter_map(of_ours).collect();
    assert_eq!(open.len(), 2, "{open:?}");
    for target in open.iter().flatten() {
        let is_ours = target.contains("/run/life/") || target == "/dev/null" || target.contains("[signalfd]");
        assert!(is_ours || target.starts_with("socket:") || target.starts_with("pipe:"), "{open:?}");
    }
    world.ok("main", "cancel", Value::Null);
}

#[test]
fn r01_no_zombie_is_left() {
    let count = rounds(100, 1000);
    let mark = mark(90_003);
    let left = format!("sleep {mark} & true");
    let calls = (0..count).map(|n| call(if n % 2 == 0 { "true" } else { &left })).collect();
    let world = world_with(calls, json!({}));
    let results = go(&world, &[".:write"]);
    assert!(results.len() == count && results.iter().all(|(_, text)| text == "exit code 0"));
    let own = world.pid("main");
    let children = read(format!("/proc/{own}/task/{own}/children"));
    assert_eq!(children.trim(), "");
    assert_eq!(processes_with(&mark), [0; 0]);
}

#[test]
fn after_a_kill_nothing_survives_and_the_scope_is_not_free_before() {
    for round in 0..rounds(50, 500) {
        let mark = mark(round);
        let nasty = format!(
            "setsid sh -c 'while :; do : {mark}; echo > beat; done' & (setsid setsid sleep {mark} &) ; \
             (trap '' TERM HUP INT QUIT; sleep {mark}) & sleep {mark}"
        );
        let world = world_with(vec![call(nasty)], json!({}));
        world.start(&["--scope", ".:write"]);
        let entry = world.entry("main").unwrap();
        let own = Life::new(entry["life"].as_str().unwrap()).unwrap();
        let runtime = RuntimeDirectory::open(&world.runtime()).unwrap();
        world.ok("main", "run", json!({ "input": "go" }));
        if round % 5 != 0 {
            wait_until("it runs", || processes_with(&mark).len() > 4);
        } else {
            std::thread::sleep(Duration::from_millis(u64::try_from(round).unwrap() % 17)); // in the middle of the set-up
        }
        world.kill("main");
        let killed = Instant::now();
        while life::probe(&runtime, &own) == Holding::Held {
            assert!(killed.elapsed() < Duration::from_secs(2), "round {round}: the scope does not come back");
        }
        assert_eq!(processes_with(&mark), [0; 0], "round {round}");
    }
}

#[test]
fn what_is_lent_right_after_a_nasty_command_stays_quiet() {
    let count = rounds(20, 100);
    let calls = (0..count).flat_map(|n| {
        let nasty = format!("mkdir -p n{n}; cd n{n}; setsid sh -c 'while :; do echo $$-$RANDOM > beat; done' & \
            (while :; do date +%N > other; done) & until [ -s beat ] && [ -s other ]; do sleep 0.01; done");
        let quiet = format!("cd n{n}; a=$(cat beat other; stat -c %z .); sleep 0.02; [ \"$a\" = \"$(cat beat other; stat -c %z .)\" ] && echo QUIET");
        let id = format!("child{n}");
        [
            call(nasty),
            json!({ "name": "SpawnPod", "input": { "name": id, "task": "hold", "scope": [format!("n{n}:write")] } }),
            call(quiet),
            json!({ "name": "StopPod", "input": { "pod_id": id } }),
        ]
    });
    let world = world_with(calls.collect(), json!({}));
    let results = go(&world, &[".:write"]);
    let loud: Vec<_> =
        results.iter().skip(1).step_by(2).filter(|(_, text)| !text.starts_with("QUIET")).collect();
    assert_eq!((results.len(), loud), (2 * count, vec![]));
}

/// What the set-up and the supervision call; each is made to fail at its n-th time, for each n there is.
const CALLS: [&str; 30] = [
    "unshare",
    "mount",
    "open_tree",
    "move_mount",
    "mount_setattr",
    "openat",
    "close_range",
    "clone",
    "clone3",
    "setsid",
    "prctl",
    "landlock_create_ruleset",
    "landlock_restrict_self",
    "execve",
    "read",
    "recvfrom",
    "write",
    "sendto",
    "mkdir",
    "symlink",
    "readlink",
    "statx",
    "getdents64",
    "fcntl",
    "signalfd4",
    "rt_sigprocmask",
    "poll",
    "wait4",
    "mmap",
    "chdir",
];
const ERRORS: [&str; 7] = ["EPERM", "EIO", "ENOSPC", "EMFILE", "EACCES", "EINTR", "ENOMEM"];

#[test]
fn a_call_that_fails_during_the_set_up_never_runs_the_command_unconfined() {
    if !has_tool("strace") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let root = place.path().canonicalize().unwrap();
    for directory in ["scope/a/lent", "outside", "hidden"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    let (wrapper, trace) = (root.join("wrapper"), root.join("trace"));
    let view = View {
        writable: [root.join("scope")].into(),
        read_only: [root.join("scope/a/lent")].into(),
        hidden: [root.join("hidden")].into(),
        shown: [root.clone()].into(),
        network: true,
    };
    let mark = root.display().to_string();
    let command = format!(
        "sleep 600 {mark} & for place in outside hidden scope/a/lent; do echo x > {mark}/$place/escaped; done; \
         echo x > {mark}/scope/ran"
    );
    let escapes = ["outside/escaped", "hidden/escaped", "scope/a/lent/escaped"].map(|name| root.join(name));
    let (mut runs, mut refused) = (0, 0);
    // Whether there is an n-th time in one of the processes.
    let mut fails = |syscall: &str, error: &str, nth: usize| -> bool {
        let case = format!("{syscall} {error} {nth}");
        // The command itself is let go, so that it can do its worst.
        let until = if syscall == "execve" { "" } else { "-b execve" };
        let text = format!(
            "#!/bin/sh\nexec strace -f {until} -o {} -e trace={syscall} -e inject={syscall}:error={error}:when={nth} {} \"$@\"\n",
            trace.display(),
            env!("CARGO_BIN_EXE_pod")
        );
        fs::write(&wrapper, text).unwrap();
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
        let _ = fs::remove_file(root.join("scope/ran"));
        let sandbox = Sandbox::with_program(wrapper.clone(), tempfile::tempfile().unwrap());
        let words = vec!["/bin/sh".into(), "-c".into(), command.clone()];
        let (view, directory) = (view.clone(), root.join("scope"));
        let plan = Plan { level: Level::Namespaces, view, command: words, directory, variables: vec![] };
        match sandbox.run(&plan, &mut Kept::default(), None, Instant::now() + Duration::from_secs(20)) {
            Ok(Outcome::Ended(ended)) => {
                assert!(ended != Ended::Code(0) || root.join("scope/ran").exists(), "{case}");
            }
            Ok(other) => panic!("{case}: {other:?}"),
            Err(error) => {
                assert!(error.to_string().len() > 30, "{case}: {error}");
                refused += 1;
            }
        }
        runs += 1;
        for escape in &escapes {
            assert!(!escape.exists(), "{case}: {}", escape.display());
        }
        assert_eq!(processes_with(&mark), [0; 0], "{case}");
        read(&trace).contains("(INJECTED)")
    };
    for (number, syscall) in CALLS.iter().enumerate() {
        let errors = rounds(1, ERRORS.len());
        for (turn, error) in
            ERRORS.iter().cycle().skip(number % rounds(ERRORS.len(), 1)).take(errors).enumerate()
        {
            let mut nth = 1;
            while fails(syscall, error, nth) {
                nth += rounds(nth.div_ceil(2), 1);
            }
            // Other libraries than glibc start programs by other calls.
            let is_called = nth > 1 || turn > 0 || !cfg!(target_env = "gnu");
            assert!(is_called, "{syscall} is not called at all");
        }
    }
    println!("{runs} runs, {refused} refused");
    assert!(refused > 40, "only {refused} of {runs} were refused, so the test does not reach the set-up");
}

#[test]
fn s02_repositories_below_the_scope_are_protected_too() {
    let said =
        |command: &str| call(format!("if ( {command} ) >/dev/null 2>&1; then echo YES; else echo NO; fi"));
    let identity = "-c user.name=a -c user.email=a@b";
    let attempts = [
        ("echo x > sub/deep/.git/hooks/pre-commit", "NO"),
        ("git -C sub/deep config core.hooksPath /x", "NO"),
        ("mv sub/deep/.git sub/deep/git2", "NO"),
        ("mv sub other", "NO"),
        ("echo {} > sub/.insomnia/manifest.json", "NO"),
        (&format!("git -C sub/deep {identity} commit -q --allow-empty -m x"), "YES"),
        // What is not there cannot be protected.
        ("git init -q new && echo x > new/.git/hooks/pre-commit && mkdir .insomnia", "YES"),
        // From the next call on it is.
        ("echo x >> new/.git/hooks/pre-commit || rmdir .insomnia", "NO"),
    ];
    let world = world_with(attempts.iter().map(|(command, _)| said(command)).collect(), json!({}));
    ran(world.program("git", ["init", "-q", "sub/deep"]));
    fs::create_dir(world.project().join("sub/.insomnia")).unwrap();
    let results = go(&world, &[".:write"]);
    for ((command, wanted), (_, text)) in attempts.iter().zip(&results) {
        assert!(text.starts_with(wanted), "{command}: {text}");
    }
}

#[test]
fn a_loan_that_is_not_in_its_place_any_more_is_named() {
    let spawn = json!({ "name": "SpawnPod", "input": { "name": "child", "task": "hold", "scope": ["a/lent:write"] } });
    let world = World::new();
    let reply = |calls: Value| json!({ "tool_calls": calls });
    let done = json!({ "text": "done" });
    let main = json!([
        reply(json!([spawn])),
        done,
        reply(json!([call("touch ran")])),
        done,
        reply(json!([call("touch ran")])),
        done
    ]);
    world.script(json!({ "main": main, "*": [{ "text": "I hold it" }] }));
    let provider = json!({ "kind": "script", "file": world.path("script.json") });
    world.manifest(json!({ "provider": provider, "wake_on_events": false })); // the replies are for our turns
    world.start(&["--scope", ".:write"]);
    world.turn("main", "go");
    fs::rename(world.project().join("a"), world.project().join("b")).unwrap();
    world.turn("main", "again");
    let (worked, text) = world.results("main", "Shell").remove(0);
    assert!(
        !worked && text.contains("pod \"child\"") && text.contains("a/lent\"") && text.contains("renamed"),
        "{text}"
    );
    assert!(!world.project().join("ran").exists());
    fs::rename(world.project().join("b"), world.project().join("a")).unwrap();
    world.turn("main", "once more");
    assert!(world.results("main", "Shell").remove(1).0 && world.project().join("ran").exists());
}

#[test]
fn real_work_goes_on_inside() {
    let world = World::new();
    let project = world.project();
    fs::create_dir_all(project.join("crate/src")).unwrap();
    fs::write(project.join("crate/Cargo.toml"), "[package]\nname='t'\nversion='0.1.0'\nedition='2021'\n")
        .unwrap();
    fs::write(project.join("crate/src/main.rs"), "fn main() { println!(\"built\") }\n").unwrap();
    fs::write(project.join("Makefile"), "all: out\nout:\n\tcc -o out x.c && ./out\n").unwrap();
    fs::write(project.join("x.c"), "#include <stdio.h>\nint main(){puts(\"made\");return 0;}\n").unwrap();
    ran(world.program("git", ["init", "-q"]));
    let identity = "-c user.name=a -c user.email=a@b";
    let commands = [
        format!("git status --short && git add x.c && git {identity} commit -qm x && git log --oneline"),
        "cd crate && cargo run --offline".to_owned(),
        "make".to_owned(),
        "python3 -m venv --without-pip v && v/bin/python -c 'print(\"python\")'".to_owned(),
        "bash -c 'cat <<< here' | tee /tmp/x && script -qec 'tty' /dev/null".to_owned(),
    ];
    let calls: Vec<Value> = commands.iter().map(call).collect();
    fs::write(
        world.path("script.json"),
        json!({ "pods": { "main": [{ "tool_calls": calls }, { "text": "done" }] } }).to_string(),
    )
    .unwrap();
    let provider = json!({ "kind": "script", "file": world.path("script.json") });
    world.manifest(json!({ "provider": provider, "shell": { "env": ["CARGO_HOME", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN"] } }));
    let home = std::env::var_os("HOME").map(std::path::PathBuf::from).unwrap_or_default();
    let variable =
        |name: &str, below: &str| std::env::var_os(name).unwrap_or_else(|| home.join(below).into());
    let program = world.program(env!("CARGO_BIN_EXE_pod"), ["--scope", ".:write"]);
    let program = program
        .env("CARGO_HOME", variable("CARGO_HOME", ".cargo"))
        .env("RUSTUP_HOME", variable("RUSTUP_HOME", ".rustup"));
    assert_eq!(ran(program).code, Some(0));
    world.turn("main", "go");
    let results = world.results("main", "Shell");
    for ((command, (_, text)), wanted) in
        commands.iter().zip(&results).zip(["x", "built", "made", "python", "here"])
    {
        assert!(text.ends_with("exit code 0") && text.contains(wanted), "{command}: {text}");
    }
}

#[test]
fn s02_no_link_and_no_new_manifest_leads_what_is_protected_outside() {
    let tries = ["ln -s ../outside .git", "echo again", "mkdir .insomnia; echo {} > .insomnia/manifest.json"];
    let world = world_with(tries.map(call).to_vec(), json!({}));
    let outside = world.project().parent().unwrap().join("outside");
    fs::create_dir(&outside).unwrap();
    let provider = json!({ "kind": "script", "file": world.path("script.json") });
    world.manifest(json!({ "provider": provider, "trusted_projects": [world.project()] }));
    let results = go(&world, &[".:write"]);
    assert!(results[0].1.contains("exit code 0") && results[1].1.contains("again"), "{results:?}");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "nothing is made behind the link");
    assert!(!results[2].1.contains("exit code 0"), "a trusted project's settings: {results:?}");
    assert!(!world.project().join(".insomnia/manifest.json").exists());
}

#[test]
fn a_command_reaches_no_program_of_its_user_by_a_socket_outside_its_scope() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(); // /tmp is private anyway
    let path = place.path().canonicalize().unwrap().join("agent");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let connect = format!(
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"{}\")' && echo reached",
        path.display()
    );
    let world = world_with(vec![call(&connect)], json!({}));
    let (_, text) = go(&world, &[".:write"]).remove(0);
    assert!(!text.contains("reached"), "{text}");
    drop(listener);
}
