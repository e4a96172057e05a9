//! System calls without a safe wrapper: the only file that may be unsafe, one block for each call.
//!
//! Knows descriptors and numbers. Source: open_tree(2), move_mount(2), mount_setattr(2), mallopt(3), close_range(2),
//! renameat2(2), landlock(7) and their header files.

#![allow(unsafe_code, reason = "neither std nor nix wraps these calls; each block says why it is sound")]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::libc::{self, c_int, c_long, syscall};
use nix::sched::{CloneFlags, clone, unshare};
use nix::unistd::Pid;

use crate::sys::thread::STACK_BYTES;

/// What a mount allows no more: writing.
pub const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY;
/// What a mount allows no more: set-user-id programs.
pub const NO_SUID: u64 = libc::MOUNT_ATTR_NOSUID;
/// What a mount allows no more: device files.
pub const NO_DEVICES: u64 = libc::MOUNT_ATTR_NODEV;

/// Sets and clears attributes of the mount whose root is open, with every mount below it if `recursive`.
///
/// # Errors
/// As mount_setattr(2): `EINVAL` when it is no root of a mount, `EPERM` for attributes that are locked.
pub fn set_mount(root: impl AsFd, recursive: bool, set: u64, clear: u64) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: set, attr_clr: clear, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty C string, the structure has the size that is passed, and both outlive the call,
    // which writes to neither.
    let result = unsafe {
        syscall(
            libc::SYS_mount_setattr,
            root.as_fd().as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    checked(result).map(drop)
}

/// A copy of what is open and of all mounts below it, mounted nowhere yet.
///
/// # Errors
/// As open_tree(2).
pub fn copy_mount(place: impl AsFd) -> io::Result<OwnedFd> {
    const OPEN_TREE_CLONE: c_int = 1;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC | libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    // SAFETY: the path is an empty C string that is not written to.
    let result = unsafe { syscall(libc::SYS_open_tree, place.as_fd().as_raw_fd(), c"".as_ptr(), flags) };
    owned(result)
}

/// Mounts such a copy over what is open, whatever name that has by now.
///
/// # Errors
/// As move_mount(2).
pub fn put_mount(mount: impl AsFd, place: impl AsFd) -> io::Result<()> {
    let flags = libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_EMPTY_PATH;
    let (mount, place) = (mount.as_fd().as_raw_fd(), place.as_fd().as_raw_fd());
    // SAFETY: both paths are empty C strings that are not written to.
    let result = unsafe { syscall(libc::SYS_move_mount, mount, c"".as_ptr(), place, c"".as_ptr(), flags) };
    checked(result).map(drop)
}

/// Lets the allocator keep little: one heap for all threads instead of one each, and large blocks go back to the
/// system when they are freed. Elsewhere than in glibc it does nothing.
///
/// Source: mallopt(3): a threshold that is set does not grow by itself.
pub fn keep_heap_small() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes two numbers and changes how memory is got, not what is in it.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
    }
}

/// Renames within a directory to a name that must be free. Where libc is musl, nix has no such call.
///
/// # Errors
/// As renameat2(2): `EEXIST` when something has that name, `EINVAL` where the file system cannot do it.
pub fn rename_new(directory: impl AsFd, from: &Path, to: &Path) -> io::Result<()> {
    let directory = directory.as_fd().as_raw_fd();
    let [from, to] = [from, to].map(|name| CString::new(name.as_os_str().as_bytes()));
    let (from, to) = (from?, to?);
    // SAFETY: both names are C strings that outlive the call, which does not write to them.
    let result = unsafe {
        syscall(libc::SYS_renameat2, directory, from.as_ptr(), directory, to.as_ptr(), libc::RENAME_NOREPLACE)
    };
    checked(result).map(drop)
}

/// Marks every descriptor above 2 to be closed at the next exec, whoever left it open.
///
/// # Errors
/// As close_range(2).
pub fn close_others_on_exec() -> io::Result<()> {
    // SAFETY: the call takes three numbers; it closes nothing in this process, so no owner of a descriptor loses it.
    checked(unsafe { syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) })
        .map(drop)
}

/// Runs `work` in a child process that shares our memory, stopped until it has ended: nothing need be copied.
///
/// # Errors
/// As clone(2); `EINVAL` when this process has several threads. Source: unshare(2), which then refuses a memory of
/// its own.
pub fn run_in_child(mut work: impl FnMut() -> isize) -> io::Result<Pid> {
    unshare(CloneFlags::CLONE_VM)?;
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
    let mut stack = vec![0; STACK_BYTES];
    // SAFETY: as we have one thread and that is stopped, the child alone uses our memory, on a stack of its own, which
    // like `work` outlives it; it leaves by its exit only.
    Ok(unsafe { clone(Box::new(&mut work), &mut stack, flags, Some(libc::SIGCHLD)) }?)
}

#[repr(C)]
struct RulesetAttributes {
    handled_files: u64,
    handled_network: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathRule {
    allowed: u64,
    parent: RawFd,
}

/// Which version of Landlock the kernel has; 0 for none.
pub fn landlock_version() -> c_long {
    // SAFETY: with this flag the call takes no structure and returns a number.
    let version = unsafe { syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, 1) };
    version.max(0)
}

/// A new Landlock rule set: rights on files that need a rule, and what is confined to its own processes.
///
/// # Errors
/// As landlock_create_ruleset(2).
pub fn landlock_ruleset(handled_files: u64, scoped: u64) -> io::Result<OwnedFd> {
    let attributes = RulesetAttributes { handled_files, handled_network: 0, scoped };
    // SAFETY: the structure has the size that is passed and outlives the call, which does not write to it.
    owned(unsafe {
        syscall(libc::SYS_landlock_create_ruleset, &raw const attributes, size_of::<RulesetAttributes>(), 0)
    })
}

/// Allows these rights on what is open and on all below it.
///
/// # Errors
/// As landlock_add_rule(2): `EINVAL` for rights of directories on a file.
pub fn landlock_allow(ruleset: &OwnedFd, place: impl AsFd, allowed: u64) -> io::Result<()> {
    let rule = PathRule { allowed, parent: place.as_fd().as_raw_fd() };
    // SAFETY: 1 is the type of this structure, which outlives the call and is not written to.
    let result = unsafe { syscall(libc::SYS_landlock_add_rule, ruleset.as_raw_fd(), 1, &raw const rule, 0) };
    checked(result).map(drop)
}

/// Confines this thread and all that it starts to the rule set, for ever. Needs `no_new_privs`.
///
/// # Errors
/// As landlock_restrict_self(2).
pub fn landlock_restrict(ruleset: &OwnedFd) -> io::Result<()> {
    // SAFETY: the call takes a descriptor that is open and a number.
    checked(unsafe { syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) }).map(drop)
}

/// What a call has returned that makes a descriptor.
fn owned(result: c_long) -> io::Result<OwnedFd> {
    let descriptor = RawFd::try_from(checked(result)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn checked(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
