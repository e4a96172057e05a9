//! Confining this process and what it starts: namespaces with a narrower view of the files, or Landlock.
//!
//! Knows paths, descriptors and mounts, never pods. Runs in a process of its own that has one thread, because a
//! process with several may not enter a user namespace. Every step that fails is an error; only what an older kernel
//! does not have is left out, which the level's name tells.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::fstat;

use crate::sys::{file, raw};

/// What the confined see of the file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct View {
    /// Directories that may be written, canonical. A set lists what lies deeper later.
    pub writable: BTreeSet<PathBuf>,
    /// Files and directories inside these that may not be written.
    pub read_only: BTreeSet<PathBuf>,
    /// Files and directories that are not there, wherever they lie.
    pub hidden: BTreeSet<PathBuf>,
    /// Directories that can be read although they lie in a place that is otherwise private.
    pub shown: BTreeSet<PathBuf>,
    /// Whether the network is reachable.
    pub network: bool,
}

/// Places that are empty, private and writable. What belongs to a scope inside them is put back.
const PRIVATE: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];
/// Where buses, agents and container services listen. Read-only does not stop a connection, so it is hidden.
const SERVICES: &str = "/run";
/// The only devices that work: a writable disk is a way around every mount.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// What a root without capabilities could still write below `/proc`, because it owns the files.
const KERNEL_SETTINGS: [&str; 10] =
    ["sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "asound", "driver"];
/// Size of each private place.
const PRIVATE_OPTIONS: &str = "size=1g,mode=1777";
/// The user id inside for root, so that no capability survives an exec: "nobody" on every system.
const PLAIN_ID: u32 = 65534;

/// Enters new namespaces in which only the view is there. The next process started is the first of its own
/// PID namespace and has to call `enter_inner`. The ids are our own.
///
/// # Errors
/// The step that the system refused, in words.
pub fn enter_outer(view: &View, uid: u32, gid: u32) -> io::Result<()> {
    let network = if view.network { CloneFlags::empty() } else { CloneFlags::CLONE_NEWNET };
    let kinds = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWIPC;
    unshare(kinds | network).map_err(|errno| told("create user, mount and process namespaces", errno))?;
    map_ids((0, uid), (0, gid))?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)
        .map_err(|errno| told("make mounts private", errno))?;
    // Opened while everything can still be seen. Where it stands, `shown` can be seen anyway.
    let is_private = |path: &Path| {
        let masks = PRIVATE.into_iter().chain([SERVICES]).map(Path::new);
        masks.into_iter().any(|mask| path.starts_with(mask) && path != mask)
    };
    let shown = view.shown.iter().filter(|path| is_private(path) && path.is_dir());
    let shown = shown.map(|path| (path, 0)).chain(view.writable.iter().map(|path| (path, raw::READ_ONLY)));
    let places = shown.map(|(path, clear)| Ok((path, open_exactly(path)?, clear)));
    let places = places.collect::<io::Result<Vec<_>>>()?;
    let root = file::open_place(Path::new("/"))?;
    raw::set_mount(root, true, raw::READ_ONLY | raw::NO_SUID | raw::NO_DEVICES, 0)
        .map_err(|error| told("make the file system read-only", error))?;
    make_devices()?;
    make_private()?;
    for (path, place, clear) in places {
        // What lies around a scope in a private place cannot be written by mistake: it would be lost at the end.
        let made = fs::DirBuilder::new().recursive(true).mode(0o555).create(path);
        made.and_then(|()| bind(&place, &open_any(path)?, 0, clear))
            .map_err(|error| told(format!("put \"{}\" in its place", path.display()), error))?;
    }
    if let Ok(services) = file::open_place(Path::new(SERVICES)) {
        raw::set_mount(services, false, raw::READ_ONLY, 0)
            .map_err(|error| told("make services read-only", error))?;
    }
    // Covered from now on, but a nested namespace may mount a new /proc as long as one without mounts in it is there.
    protect_kernel_settings(uid, KERNEL_SETTINGS.get(..1).unwrap_or_default())?;
    deny(view)
}

/// Finishes what `enter_outer` has begun: a process list of its own, and a user without any power over mounts.
///
/// `uid` and `gid` are those outside.
///
/// # Errors
/// The step that the system refused, in words.
pub fn enter_inner(uid: u32, gid: u32) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)
        .map_err(|errno| told("mount a /proc of its own", errno))?;
    protect_kernel_settings(uid, &KERNEL_SETTINGS)?;
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|errno| told("give up power over the mounts", errno))?;
    let plain = |id: u32| if id == 0 { PLAIN_ID } else { id };
    map_ids((plain(uid), 0), (plain(gid), 0))?;
    lock_privileges()?;
    if hides_abstract_sockets() {
        raw::landlock_restrict(&raw::landlock_ruleset(0, SCOPED)?)
            .map_err(|error| told("confine signals and abstract sockets", error))?;
    }
    Ok(())
}

/// Whether the kernel can keep the confined from abstract sockets outside: Landlock of version 6, Linux 6.12.
pub fn hides_abstract_sockets() -> bool {
    raw::landlock_version() >= 6
}

fn protect_kernel_settings(uid: u32, names: &[&str]) -> io::Result<()> {
    let names = names.iter().filter(|_| uid == 0);
    for place in names.filter_map(|name| open_any(&Path::new("/proc").join(name)).ok()) {
        bind(&place, &place, raw::READ_ONLY, 0).map_err(|error| told("protect kernel settings", error))?;
    }
    Ok(())
}

/// Lets no program that is started from now on inherit more than the three standard descriptors.
///
/// # Errors
/// As close_range(2).
pub fn keep_descriptors() -> io::Result<()> {
    raw::close_others_on_exec().map_err(|error| told("close inherited descriptors", error))
}

/// Forbids every later gain of privileges, for example by a set-user-id program.
///
/// # Errors
/// As prctl(2).
pub fn lock_privileges() -> io::Result<()> {
    nix::sys::prctl::set_no_new_privs().map_err(|errno| told("forbid new privileges", errno))
}

/// Abstract sockets and signals. Source: landlock(7).
const SCOPED: u64 = 0b11;
const READ_FILES: u64 = 1 | 1 << 2; // execute, read
const READ_DIRECTORIES: u64 = 1 << 3;
/// Every right on files up to version 5 of Landlock.
const ALL_RIGHTS: u64 = 0xffff;
/// Write, read, truncate.
const DEVICE_RIGHTS: u64 = 1 << 1 | 1 << 2 | 1 << 14;

/// Confines this process by Landlock alone: it cannot express read-only or hidden parts inside what is writable, and
/// the names below hidden directories can be listed.
///
/// # Errors
/// The step that the system refused, in words.
pub fn restrict(view: &View) -> io::Result<()> {
    if raw::landlock_version() < 6 {
        return Err(io::Error::other("the kernel's Landlock is missing or too old (version 6 is needed)"));
    }
    let is_writable = |path: &&PathBuf| view.writable.iter().any(|root| path.starts_with(root));
    if let Some(path) = view.hidden.iter().find(is_writable) {
        let reason = "lies in what may be written and cannot be hidden there; use the file tools, or move it";
        return Err(io::Error::other(format!("\"{}\" {reason}", path.display())));
    }
    lock_privileges()?;
    let ruleset = raw::landlock_ruleset(ALL_RIGHTS, SCOPED)?;
    let allow = |path: &Path, rights: u64| match open_any(path) {
        Ok(place) => {
            let is_directory = fstat(&place)?.st_mode & nix::libc::S_IFMT == nix::libc::S_IFDIR;
            let rights = if is_directory { rights } else { rights & (DEVICE_RIGHTS | READ_FILES) };
            raw::landlock_allow(&ruleset, place, rights).map_err(|error| told(path.display(), error))
        }
        Err(_) => Ok(()), // what cannot be opened needs no right
    };
    allow(Path::new("/"), READ_DIRECTORIES)?;
    for path in beside(&view.hidden) {
        allow(&path, READ_FILES | READ_DIRECTORIES)?;
    }
    for name in DEVICES {
        allow(&Path::new("/dev").join(name), DEVICE_RIGHTS)?;
    }
    view.writable.iter().try_for_each(|path| allow(path, ALL_RIGHTS))?;
    raw::landlock_restrict(&ruleset).map_err(|error| told("enter the Landlock domain", error))
}

/// The largest paths that together are everything but the hidden ones.
fn beside(hidden: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    let (mut open, mut found) = (vec![PathBuf::from("/")], Vec::new());
    while let Some(directory) = open.pop() {
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()).filter(|path| !path.is_symlink()) {
            if hidden.contains(&path) {
                continue;
            }
            let is_above = hidden.iter().any(|hidden| hidden.starts_with(&path));
            if is_above { open.push(path) } else { found.push(path) }
        }
    }
    found
}

/// A terminal system of its own, and the devices that every program expects.
fn make_devices() -> io::Result<()> {
    for path in DEVICES.map(|name| Path::new("/dev").join(name)) {
        if let Ok(place) = open_any(&path) {
            bind(&place, &place, 0, raw::NO_DEVICES)
                .map_err(|error| told(format!("keep \"{}\"", path.display()), error))?;
        }
    }
    if Path::new("/dev/pts").is_dir() {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        let options = Some("newinstance,ptmxmode=0666,mode=620");
        mount(Some("devpts"), "/dev/pts", Some("devpts"), flags, options)
            .map_err(|errno| told("make terminals of its own", errno))?;
        if let Ok(place) = open_any(Path::new("/dev/ptmx")) {
            bind(&open_any(Path::new("/dev/pts/ptmx"))?, &place, 0, 0)?;
        }
    }
    Ok(())
}

/// Empty places in which the confined may leave what they like until they end, and one in which nothing listens.
fn make_private() -> io::Result<()> {
    let resolver = fs::canonicalize("/etc/resolv.conf").ok().filter(|path| path.starts_with(SERVICES));
    let resolver = resolver.and_then(|path| Some((fs::read(&path).ok()?, path)));
    let is_link = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_symlink());
    let links: Vec<_> = fs::read_dir(SERVICES).into_iter().flatten().flatten().filter(is_link).collect();
    let links: Vec<_> =
        links.iter().filter_map(|link| Some((link.path(), fs::read_link(link.path()).ok()?))).collect();
    for place in PRIVATE.into_iter().chain([SERVICES]).filter(|path| file::is_real_directory(Path::new(path)))
    {
        mount_empty(Path::new(place), MsFlags::empty(), PRIVATE_OPTIONS)?;
    }
    for (path, target) in links {
        symlink(target, path)?; // some systems keep the way to every program here
    }
    if let Some((text, path)) = resolver {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(SERVICES)))?;
        fs::write(path, text)?;
    }
    Ok(())
}

/// Denials come last, the deeper ones after the others. Each directory between what is writable and what is
/// denied in it becomes a mount itself, because a mount cannot be renamed away.
fn deny(view: &View) -> io::Result<()> {
    let hidden = || view.hidden.iter().filter(|path| fs::symlink_metadata(path).is_ok());
    let mut pins: BTreeSet<&Path> = BTreeSet::new();
    for path in view.read_only.iter().chain(hidden()) {
        let above = path.ancestors().skip(1);
        pins.extend(
            above.filter(|pin| view.writable.iter().any(|root| pin.starts_with(root) && *pin != root)),
        );
    }
    let pins = pins.into_iter().map(|path| (path, 0));
    for (path, set) in pins.chain(view.read_only.iter().map(|path| (path.as_path(), raw::READ_ONLY))) {
        let place = open_exactly(path)?;
        bind(&place, &place, set, 0)
            .map_err(|error| told(format!("protect \"{}\"", path.display()), error))?;
    }
    for path in hidden() {
        if file::is_real_directory(path) {
            mount_empty(path, MsFlags::MS_RDONLY, "size=4k,mode=755")?;
        } else {
            // Without devices it cannot even be opened, so that nothing seems to succeed.
            let place = match open_any(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // gone meanwhile
                place => place?,
            };
            bind(&open_any(Path::new("/dev/null"))?, &place, raw::READ_ONLY | raw::NO_DEVICES, 0)
                .map_err(|error| told(format!("hide \"{}\"", path.display()), error))?;
        }
    }
    Ok(())
}

fn mount_empty(path: &Path, more: MsFlags, options: &str) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | more;
    mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options))
        .map_err(|errno| told(format!("put an empty directory over \"{}\"", path.display()), errno))
}

/// Mounts what is open over another open place, with these attributes. No name is looked at, so whatever somebody
/// renames meanwhile, these two are meant.
fn bind(source: &OwnedFd, place: &OwnedFd, set: u64, clear: u64) -> io::Result<()> {
    let mount = raw::copy_mount(source)?;
    if (set, clear) != (0, 0) {
        // A mount below it that was read-only before is locked and stays so.
        let result = raw::set_mount(&mount, true, set, clear);
        result
            .or_else(|error| if set == 0 { raw::set_mount(&mount, false, 0, clear) } else { Err(error) })?;
    }
    raw::put_mount(&mount, place)
}

fn open_any(path: &Path) -> io::Result<OwnedFd> {
    Ok(file::open_entry_at(nix::fcntl::AT_FDCWD, path)?.into())
}

/// Opens what has exactly this path, no link on the way.
fn open_exactly(path: &Path) -> io::Result<OwnedFd> {
    let place = open_any(path).map_err(|error| told(format!("open \"{}\"", path.display()), error))?;
    let real = file::real_path(&place)?;
    if real == path {
        return Ok(place);
    }
    Err(io::Error::other(format!("\"{}\" is really \"{}\" now", path.display(), real.display())))
}

/// Writes the identity maps of a new user namespace: (inside, outside). Source: user_namespaces(7).
fn map_ids(uid: (u32, u32), gid: (u32, u32)) -> io::Result<()> {
    let lines = [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("{} {} 1", uid.0, uid.1)),
        ("gid_map", format!("{} {} 1", gid.0, gid.1)),
    ];
    for (name, line) in lines {
        fs::write(format!("/proc/self/{name}"), line)
            .map_err(|error| told(format!("write {name}"), error))?;
    }
    Ok(())
}

fn told(what: impl std::fmt::Display, error: impl Into<io::Error>) -> io::Error {
    let error: io::Error = error.into();
    io::Error::new(error.kind(), format!("{what}: {error}"))
}
