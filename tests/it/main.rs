//! Whole-program tests: real files, locks, sockets and processes in temporary directories.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::wildcard_enum_match_arm,
    missing_debug_implementations,
    unreachable_pub,
    reason = "a test fails where it stands; the lints know test functions but not what these call"
)]

mod abuse;
mod architecture;
mod asking;
mod cases;
mod commands;
mod compaction;
mod examples;
mod faults;
mod files;
mod fuzz_replay;
mod history;
mod launch;
mod lessons;
mod lock_faults;
mod lock_kills;
mod lock_model;
mod lock_races;
mod models;
mod people;
mod protocol;
mod providers;
mod readme;
mod resuming;
mod shell;
mod soak;
mod spawn_kills;
mod spawning;
mod stopping;
mod strangers;
mod talking;
mod telling;
mod tree;
mod tui;
mod world;
