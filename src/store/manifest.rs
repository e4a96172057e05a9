//! The manifest: settings in layers, each read from JSON, checked, and laid over the one below.
//!
//! Parsing and laying over are pure functions of texts; only `gather` reads files. A project's file arrives
//! with a `git clone`, so it must never widen rights.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::words::error::{Error, Result};
use crate::words::limits::Limits;
use crate::words::text::harmless_line;

/// The largest manifest that is read, in bytes.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Which kind of model is behind the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProviderKind {
    /// Anthropic Messages.
    Anthropic,
    /// OpenAI Chat Completions, also spoken by many local servers.
    Openai,
    /// Replies from a file.
    Script,
    /// Any program.
    Command,
}

/// How to reach the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct ProviderSettings {
    /// Which kind; without it one is chosen from the environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<ProviderKind>,
    /// Which model; without it the kind's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Where the provider is, with or without a path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_url: Option<String>,
    /// The environment variable that holds the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// The file that holds the key, of mode 0600.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_file: Option<PathBuf>,
    /// Tokens of one reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// Tokens that the model can hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<u64>,
    /// Further headers, name to value.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub headers: Map<String, Value>,
    /// The script file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The program and its arguments.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
}

/// Which tools the model gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct ToolSettings {
    /// Tools it does not get.
    pub deny: Vec<String>,
}

/// Whether the shell is confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum SandboxSetting {
    /// No sandbox, no shell.
    #[default]
    Required,
    /// A person wants it unconfined.
    Off,
}

/// How commands are run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShellSettings {
    /// Whether commands are confined.
    pub sandbox: SandboxSetting,
    /// Whether commands reach the network.
    pub network: bool,
    /// Seconds that a command may take unless the model asks for another time.
    pub timeout_seconds: u64,
    /// Further environment variables that commands see.
    pub env: Vec<String>,
    /// Further directories that commands may write, such as build caches.
    pub writable: Vec<PathBuf>,
}

impl Default for ShellSettings {
    fn default() -> Self {
        ShellSettings {
            sandbox: SandboxSetting::Required,
            network: true,
            timeout_seconds: 120,
            env: Vec::new(),
            writable: Vec::new(),
        }
    }
}

/// All settings of a pod, as resolved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Manifest {
    /// How to reach the model.
    pub provider: ProviderSettings,
    /// Which instruction text: `$insomnia/NAME`, `$user/NAME`, `$project/NAME` or a path.
    pub instruction: String,
    /// Rule texts, when none are given on the command line.
    pub scope: Vec<String>,
    /// Which tools the model gets.
    pub tools: ToolSettings,
    /// How commands are run.
    pub shell: ShellSettings,
    /// Whether notices wake the idle pod.
    pub wake_on_events: bool,
    /// Whether `.git/hooks`, `.git/config` and `.insomnia` are protected from the tools.
    pub protect_git: bool,
    /// The command that starts a pod; empty means `pod` beside the running program.
    pub pod_command: Vec<String>,
    /// Directories whose project manifest may widen rights.
    pub trusted_projects: Vec<PathBuf>,
    /// Limits.
    pub limits: Limits,
}

impl Default for Manifest {
    fn default() -> Self {
        Manifest {
            provider: ProviderSettings::default(),
            instruction: "$insomnia/default".to_owned(),
            scope: Vec::new(),
            tools: ToolSettings::default(),
            shell: ShellSettings::default(),
            wake_on_events: true,
            protect_git: true,
            pod_command: Vec::new(),
            trusted_projects: Vec::new(),
            limits: Limits::default(),
        }
    }
}
