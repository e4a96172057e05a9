//! Shell: one command, confined to what the pod may write now, over only when its last process is.
//!
//! Runs on the turn thread. How commands are confined is found out once, by really confining one.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::store::manifest::SandboxSetting;
use crate::store::paths::{Directories, canonical};
use crate::sys::confine::View;
use crate::sys::file;
use crate::sys::process::own_uid;
use crate::sys::thread;
use crate::sys::wait::Cancel;
use crate::tools::context::PodContext;
use crate::wire::sandbox::{Kept, Level, Outcome, Plan};
use crate::words::allocation::Allocation;
use crate::words::error::{Error, Result};
use crate::words::scope::{Access, EffectiveScope, Loan, Reach, Rule, Verdict};

const NAME: &str = "Shell";
/// The longest time that the model may ask for, in seconds.
const TIMEOUT_SECONDS_MAX: u64 = 24 * 3600;
/// The longest command: one argument of a program is limited. Source: execve(2), `MAX_ARG_STRLEN`.
const COMMAND_BYTES_MAX: usize = 120 << 10;
/// Variables that commands see, besides `LC_*` and those of the manifest.
const VARIABLES: [&str; 6] = ["PATH", "HOME", "LANG", "TERM", "USER", "TMPDIR"];
/// Variables whose value leads to a socket that would do things for the command outside.
const SOCKET_VARIABLES: [&str; 4] =
    ["XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST"];
/// Never given to a command, whatever the manifest lists.
const KEYS: [&str; 2] = ["ANTHROPIC_API_KEY", "OPENAI_API_KEY"];

/// How many directories and names are looked at to find the repositories below a scope: 0.1 ms for a small
/// project, 0.7 ms at most.
const DIRECTORIES_MAX: usize = 64;
const NAMES_MAX: usize = 1024;
/// Directories full of what others have made, in which nobody works.
const SKIPPED: [&str; 2] = ["node_modules", "target"];

/// What the model is told about the tool; `None` for a pod that may not read everywhere, as a shell does.
pub fn description(context: &PodContext) -> Option<String> {
    let how = match level(context) {
        Level::Off(reason) if !reads_everywhere(context) => {
            log::debug!("no shell: {reason}");
            return None;
        }
        Level::Off(reason) => format!("It is off here: {reason}."),
        Level::Unconfined => {
            "It is not confined here: keep to your write scope yourself, and leave what you have lent alone."
                .into()
        }
        Level::Landlock => {
            "It reads everywhere and writes only in your write scope; /tmp cannot be written, and \
            it is off while you have lent anything."
                .into()
        }
        Level::Namespaces => {
            let network = if context.manifest.shell.network {
                "The network is reachable."
            } else {
                "There is no network."
            };
            format!(
                "It reads everywhere and writes only in your recursive write rules, minus what you have lent; /tmp \
                 is private and empty at each call. .git/hooks, .git/config and .insomnia are read-only, so a directory with a repository in it \
                 can be neither moved nor removed. {network}"
            )
        }
    };
    let seconds = context.manifest.shell.timeout_seconds;
    Some(format!(
        "Run a command. There is no terminal and no input. {how} Every process it starts is killed when the command \
         ends, so nothing stays in the background. It is killed after {seconds} s unless `timeout_seconds` says \
         otherwise. You get its output and its exit code."
    ))
}

fn reads_everywhere(context: &PodContext) -> bool {
    context.view.effective().is_ok_and(|scope| scope.reads_everywhere())
}

/// How this pod's commands are confined. The first call takes a few milliseconds.
pub fn level(context: &PodContext) -> Level {
    let shell = &context.manifest.shell;
    if context.manifest.tools.deny.iter().any(|tool| tool == NAME) {
        return Level::Off("the manifest denies this tool".into());
    }
    if !reads_everywhere(context) {
        return Level::Off("its read rules are narrower than /, and a shell reads everywhere".into());
    }
    let level = match shell.sandbox {
        SandboxSetting::Off => Level::Unconfined,
        SandboxSetting::Required => {
            context.sandbox.probe(|| view(context, &EffectiveScope::default()).unwrap_or_default()).clone()
        }
    };
    match shell.spawner_level {
        Some(spawner) if level.is_weaker_than(spawner) => Level::Off(format!(
            "commands here could only be confined at level {}, its spawner's are at level {spawner}, and a child is never on a weaker one",
            level.number()
        )),
        Some(_) | None => level,
    }
}

/// Begins to find the level out, so that the first turn need not wait for it.
pub fn find_level_meanwhile(context: &Arc<PodContext>) {
    let context = Arc::clone(context);
    let probe = move || drop(level(&context));
    if let Err(error) = thread::detach("probe", probe) {
        log::debug!("no thread for the probe: {error}"); // whoever asks first does it
    }
}

/// Runs the tool.
///
/// # Errors
/// With the reason when the command was not run or had to be killed; the output so far is part of it.
pub(crate) fn run(
    context: &PodContext,
    command: String,
    timeout_seconds: Option<u64>,
    directory: Option<&Path>,
    cancel: &Cancel,
) -> Result<String> {
    if command.len() > COMMAND_BYTES_MAX || command.contains('\0') {
        return Err(Error::told(
            "the command is longer than 120 KiB or has a NUL byte; write it to a file first",
        ));
    }
    let scope = &context.view.effective()?;
    let seconds = timeout_seconds.unwrap_or(context.manifest.shell.timeout_seconds);
    let seconds = seconds.clamp(1, TIMEOUT_SECONDS_MAX);
    let directory = canonical(directory.unwrap_or(Path::new(".")), &context.directory)?;
    if !directory.is_dir() {
        return Err(Error::told(format!("\"{}\" is no directory", directory.display())));
    }
    let level = level(context);
    match &level {
        Level::Namespaces => {
            if let Some(Loan { holder, rule }) = scope.lent.iter().find(|loan| !is_in_place(loan)) {
                return Err(Error::told(format!(
                    "there is no shell now, because what is lent to pod \"{holder}\" could not be protected: nothing is at \"{}\" any more, as it or a directory above it was renamed or removed; have it put back, or end the loan with StopPod",
                    rule.path()
                )));
            }
        }
        Level::Landlock if scope.lent.is_empty() => {}
        Level::Landlock => {
            return Err(Error::told(format!(
                "the shell is off while a part of your scope is lent (level {level}); wait until {} has ended, or use the file tools",
                scope.lent.iter().map(|loan| loan.holder.to_string()).collect::<Vec<_>>().join(", ")
            )));
        }
        Level::Unconfined => {}
        Level::Off(reason) => {
            return Err(Error::told(format!("the shell is off: {reason}; use the file tools")));
        }
    }
    let command = vec![shell_program(), "-c".into(), command];
    let variables = variables(context, &level);
    let mut view = view(context, scope)?;
    if level == Level::Namespaces {
        let sockets = own_sockets().filter(|path| !view.writable.iter().any(|root| path.starts_with(root)));
        view.hidden.extend(sockets.collect::<Vec<_>>());
    }
    let plan = Plan { level: level.clone(), view, command, directory, variables };
    // With it git reads another configuration. What does not exist cannot be mounted, so it is taken away again, but
    // only where the directory around it is pinned, so that this leads nowhere else.
    let hooks = plan.view.read_only.iter().filter(|path| path.ends_with(".git/hooks"));
    let redirections =
        hooks.filter(|_| level == Level::Namespaces).map(|path| path.with_file_name("commondir"));
    let redirections: Vec<PathBuf> = redirections.filter(|path| !path.exists()).collect();
    let mut kept = Kept::default();
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let outcome = context.sandbox.run(&plan, &mut kept, Some(cancel), deadline)?;
    let mut text = kept.into_text();
    if redirections.iter().filter(|path| std::fs::remove_file(path).is_ok()).count() > 0 {
        text.push_str("\n.git/commondir was removed again: it leads git to another configuration\n");
    }
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    let unconfined = if level == Level::Unconfined { "\n(not confined, by the user's manifest)" } else { "" };
    let killed =
        |how: &str| Err(Error::told(format!("{text}{how}; everything it started was killed{unconfined}")));
    match outcome {
        Outcome::Ended(ended) => Ok(format!("{text}{ended}{unconfined}")),
        Outcome::TimedOut => killed(&format!("timed out after {seconds} s")),
        Outcome::Cancelled => killed("cancelled"),
    }
}

fn is_in_place(loan: &Loan) -> bool {
    let path = Path::new(loan.rule.path());
    path.canonicalize().is_ok_and(|real| real == path)
}

fn shell_program() -> String {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let bash = std::env::split_paths(&path).map(|directory| directory.join("bash"));
    let bash = bash.filter(|path| path.is_absolute()).find(|path| path.is_file());
    bash.and_then(|path| path.to_str().map(str::to_owned)).unwrap_or_else(|| "/bin/sh".into())
}

fn variables(context: &PodContext, level: &Level) -> Vec<(String, String)> {
    let manifest = &context.manifest;
    let is_wanted = |name: &str| {
        let wanted = manifest.shell.env.iter().any(|wanted| wanted == name);
        let is_key = KEYS.contains(&name) || manifest.provider.api_key_env.as_deref() == Some(name);
        let is_private = name == "TMPDIR" && *level != Level::Unconfined; // /tmp is what is private
        (wanted || VARIABLES.contains(&name) || name.starts_with("LC_")) && !is_key && !is_private
    };
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    std::env::vars_os().filter_map(text).filter(|(name, _)| is_wanted(name)).collect()
}

/// Where a directory of `shell.writable` really is.
///
/// # Errors
/// When it is none that a scope could have.
pub(crate) fn further_writable(path: &Path, directories: &Directories) -> Result<PathBuf> {
    let path = canonical(path, Path::new("/"))?;
    let rule = Rule::new(&path.to_string_lossy(), Access::Write, Reach::Recursive)?;
    let checked = directories.check_scope(&rule);
    checked.map_err(|error| Error::told(format!("\"shell.writable\" of the manifest: {error}")))?;
    Ok(path)
}

/// What commands see and may write now.
fn view(context: &PodContext, scope: &EffectiveScope) -> Result<View> {
    let mut writable = BTreeSet::new();
    for rule in scope.allow.iter().filter(|rule| rule.writes() && rule.reach() == Reach::Recursive) {
        let path = PathBuf::from(rule.path());
        std::fs::create_dir_all(&path)
            .map_err(|source| Error::io(format!("create \"{}\" of your scope", path.display()), source))?;
        writable.insert(path);
    }
    let mut read_only: BTreeSet<PathBuf> = scope.lent.iter().map(|loan| loan.rule.path().into()).collect();
    if context.manifest.protect_git {
        let around = context.directory.ancestors().find(|place| place.join(".git").exists());
        let projects = writable.iter().flat_map(|root| projects_in(root)).chain(around.map(Path::to_owned));
        let trusted = &context.manifest.trusted_projects;
        read_only.extend(projects.flat_map(|project| protected_in(&project, scope, trusted)));
    }
    for path in &context.manifest.shell.writable {
        let path = further_writable(path, &context.directories)?;
        if path.is_dir() {
            writable.insert(path);
        }
    }
    // Denying outside of what is writable would only cost time.
    read_only.retain(|path| writable.iter().any(|root| path.starts_with(root)));
    let table = context.lock.read().unwrap_or_default(); // damaged: the last scope is known, only less is shown
    let rules = table.allocations().iter().flat_map(Allocation::write_rules);
    let own = context.spawner.is_none().then(|| context.directory.clone());
    let shown = rules.map(|rule| rule.path().into()).chain(own).collect();
    let hidden = hidden(context, &writable);
    Ok(View { writable, read_only, hidden, shown, network: context.manifest.shell.network })
}

/// A scope, and the directories below it in which there is a repository or a manifest, the shallow ones first. At
/// most so many directories and names are looked at, because each call pays for it.
fn projects_in(root: &Path) -> Vec<PathBuf> {
    let (mut open, mut found) = (VecDeque::from([root.to_owned()]), vec![root.to_owned()]);
    let (mut directories, mut names) = (DIRECTORIES_MAX, NAMES_MAX);
    while let Some(directory) = open.pop_front().filter(|_| directories > 0 && names > 0) {
        directories -= 1;
        for entry in std::fs::read_dir(&directory).into_iter().flatten().take(names).flatten() {
            names -= 1;
            let name = entry.file_name();
            if name == ".git" || name == ".insomnia" {
                found.push(directory.clone());
            } else if entry.file_type().is_ok_and(|kind| kind.is_dir())
                && !name.as_bytes().starts_with(b".")
                && !SKIPPED.iter().any(|skipped| name == *skipped)
            {
                open.push_back(entry.path());
            }
        }
    }
    found
}

/// What other programs obey in a directory of a project: they would run what a command wrote there.
fn protected_in(directory: &Path, scope: &EffectiveScope, trusted: &[PathBuf]) -> Vec<PathBuf> {
    let git = directory.join(".git");
    let (settings, hooks) = (directory.join(".insomnia"), git.join("hooks"));
    let is_mine = |path: &Path| path.to_str().is_some_and(|path| scope.judge_write(path) == Verdict::Allowed);
    let is_trusted = |path: &PathBuf| path.canonicalize().is_ok_and(|path| path == directory);
    // What is missing cannot be protected.
    if is_mine(&settings) && trusted.iter().any(is_trusted) {
        let _ = std::fs::create_dir(settings);
    }
    if is_mine(&hooks) && file::is_real_directory(&git) {
        let _ = std::fs::create_dir(hooks);
    }
    let names =
        [".git/hooks", ".git/config", ".git/config.worktree", ".git/modules", ".git/worktrees", ".insomnia"];
    let mut found: Vec<PathBuf> = names.iter().map(|name| directory.join(name)).collect();
    found.extend(git.is_file().then_some(git));
    let found = found.into_iter().filter_map(|path| path.canonicalize().ok());
    let is_lent = |path: &Path| scope.lent.iter().any(|loan| path.starts_with(loan.rule.path())); // read-only anyway
    found.filter(|path| !is_lent(path)).collect()
}

/// Where programs of this user listen, such as agents that sign and services that start others. Source:
/// proc_net_unix(5), flag `__SO_ACCEPTCON`; a path follows seven columns.
fn own_sockets() -> impl Iterator<Item = PathBuf> {
    let listed = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let listens = |line: &&str| line.split_whitespace().nth(3) == Some("00010000");
    let path = |line: &str| line.find(" /").and_then(|at| Some(PathBuf::from(line.get(at + 1..)?)));
    let paths: Vec<PathBuf> = listed.lines().filter(listens).filter_map(path).collect();
    let is_own = |path: &PathBuf| path.symlink_metadata().is_ok_and(|found| found.uid() == own_uid());
    paths.into_iter().filter(is_own)
}

fn hidden(context: &PodContext, writable: &BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let sockets = SOCKET_VARIABLES.into_iter().filter_map(|name| {
        let value = std::env::var(name).ok()?;
        let path = value.split("unix:path=").last()?.split([',', ';']).next()?;
        Path::new(path.strip_prefix("unix://").unwrap_or(path)).canonicalize().ok()
    });
    // A directory of sockets around a scope cannot be hidden without the scope.
    let is_around = |path: &PathBuf| writable.iter().any(|root| root.starts_with(path));
    context
        .hidden()
        .into_iter()
        .chain(sockets.filter(|path| path != Path::new("/") && !is_around(path)))
        .collect()
}
