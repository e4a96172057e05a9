//! System calls without a safe wrapper: the only file that may be unsafe, one block for each call.
//!
//! Knows descriptors and numbers. Source: mount_setattr(2), close_range(2), landlock(7) and their header files.

#![allow(unsafe_code, reason = "neither std nor nix wraps these calls; each block says why it is sound")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::libc::{self, c_long, syscall};

/// What a mount allows no more: writing.
pub const READ_ONLY: u64 = 0x1;
/// What a mount allows no more: set-user-id programs.
pub const NO_SUID: u64 = 0x2;
/// What a mount allows no more: device files.
pub const NO_DEVICES: u64 = 0x4;

#[repr(C)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Sets and clears attributes of the mount whose root is open, with every mount below it if `recursive`.
///
/// # Errors
/// As mount_setattr(2): `EINVAL` when it is no root of a mount, `EPERM` for attributes that are locked.
pub fn set_mount(root: impl AsFd, recursive: bool, set: u64, clear: u64) -> io::Result<()> {
    let attributes = MountAttributes { set, clear, propagation: 0, user_namespace: 0 };
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
            size_of::<MountAttributes>(),
        )
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
#[must_use]
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
    let descriptor = checked(unsafe {
        syscall(libc::SYS_landlock_create_ruleset, &raw const attributes, size_of::<RulesetAttributes>(), 0)
    })?;
    let descriptor = RawFd::try_from(descriptor).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
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

fn checked(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
