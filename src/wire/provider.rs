//! The model behind a pod: one request in our own words, one reply, whatever the provider speaks.
//!
//! Translation is in pure functions of `anthropic` and `openai`; bytes come over `curl`. Runs on the turn thread.

use std::time::Duration;

use serde_json::Value;

use crate::words::message::{AssistantMessage, Item};

/// A tool as the model is told about it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolSpec {
    /// Its name.
    pub name: &'static str,
    /// What it does and how to use it, for the model.
    pub description: String,
    /// JSON schema of its input: an object.
    pub input_schema: Value,
}

/// One request to the model.
#[derive(Debug, Clone, Copy)]
pub struct ModelRequest<'a> {
    /// The instruction text.
    pub system: &'a str,
    /// The conversation; marks of turns and errors are skipped in translation.
    pub items: &'a [Item],
    /// The tools it may call.
    pub tools: &'a [ToolSpec],
    /// How many requests this session has made before, the failed ones included.
    pub number: u64,
}

/// Why there is no reply.
#[derive(Debug, Clone, PartialEq)]
pub enum Failure {
    /// It may work later: overload, a broken stream, a server error.
    Retry {
        /// What happened.
        reason: String,
        /// How long the provider wants us to wait.
        wait: Option<Duration>,
    },
    /// The conversation does not fit into the model's context any more.
    ContextTooLong(String),
    /// It will not work without a person: a wrong key, an unknown model.
    Final(String),
    /// Somebody cancelled the turn.
    Cancelled,
}

/// The outcome of one request.
pub type Outcome = Result<AssistantMessage, Failure>;
