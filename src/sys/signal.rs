//! Signals as calls on a thread of their own.
//!
//! The only file that names `signal-hook`. SIGPIPE is ignored by the Rust runtime already.

use std::io;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::sys::thread;

/// Which end somebody asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndSignal {
    /// Ctrl-C.
    Interrupt,
    /// The polite kill.
    Terminate,
    /// The terminal is gone.
    HangUp,
}

/// Calls `handle` on a thread named `signals` for each SIGINT, SIGTERM and SIGHUP. The thread lives as long as
/// the process.
///
/// # Errors
/// As sigaction(2), or when no thread can be started.
pub fn on_end_signals(mut handle: impl FnMut(EndSignal) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let run = move || {
        for signal in signals.forever() {
            handle(match signal {
                SIGINT => EndSignal::Interrupt,
                SIGHUP => EndSignal::HangUp,
                _ => EndSignal::Terminate,
            });
        }
    };
    thread::detach("signals", run)
}

/// Ends the process at once, without any tidying.
#[allow(clippy::exit, reason = "a second signal must not wait for anything, not even destructors")]
pub fn exit_now(code: i32) -> ! {
    std::process::exit(code)
}
