//! Insomnia: several LLM agents on one machine, each an independent process, never two writers on one path.
//!
//! This file is the floor plan: every module once, bottom floor first. A module may use the floors below it,
//! never those above; `tests/it/architecture.rs` reads the `use crate::` lines and holds us to it.

/// The words everything else speaks: pure data and rules, std and serde only. What we fuzz.
pub mod words {
    pub mod allocation;
    pub mod compaction;
    pub mod error;
    pub mod identity;
    pub mod limits;
    pub mod message;
    pub mod notification;
    pub mod protocol;
    pub mod rebuild;
    pub mod scope;
    pub mod text;
}

/// The system: the only files that name nix, signal-hook or `process::Command`. They speak of descriptors,
/// pids and paths, never of pods.
pub mod sys {
    pub mod clock;
    pub mod confine;
    pub mod file;
    pub mod process;
    pub mod raw;
    pub mod signal;
    pub mod socket;
    pub mod supervise;
    pub mod thread;
    pub mod wait;
}

/// What lies on disk.
pub mod store {
    pub mod instruction;
    pub mod life;
    pub mod manifest;
    pub mod paths;
    pub mod registry;
    pub mod repair;
    pub mod scope_lock;
    pub mod session;
}

/// What lies outside the process: other pods and the model.
pub mod wire {
    pub mod client;
    pub mod events;
    pub mod launch;
    pub mod provider;
    pub mod sandbox;
}

/// What the model may do.
pub mod tools {
    pub mod context;
    pub mod edit;
    pub mod files;
    pub mod glob;
    pub mod input;
    pub mod mailbox;
    pub mod page;
    pub mod place;
    pub mod pods;
    pub mod search;
    pub mod shell;
    pub mod spawn;
    pub mod specs;
    pub mod stop;
    pub mod survey;
    pub mod toolbox;
    pub mod walk;
}

/// What makes a pod alive.
pub mod heart {
    pub mod controller;
    pub mod pod;
    pub mod recover;
    pub mod reports;
    pub mod server;
    pub mod turn;
    pub mod watcher;
}

/// What people and spawners call.
pub mod doors {
    pub mod cli;
    pub mod commands;
    mod demo;
    mod doctor;
    mod find;
    mod follow;
    mod list;
    mod manual;
    pub mod pod_command;
    mod run;
    mod scope;
    mod talk;
    mod terminal;
    #[cfg(feature = "tui")]
    pub mod tui;
}
