//! The tools of one pod: which there are, and running one call.
//!
//! Lives on the turn thread; calls run one after another, so nothing writes while a scope shrinks.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use serde_json::json;

use crate::sys::file;
use crate::sys::wait::Cancel;
use crate::tools::context::PodContext;
use crate::tools::input::{self, Input, Until};
use crate::tools::place::{FileCall, FileDesk};
use crate::tools::{pods, shell, spawn, specs, survey};
use crate::wire::provider::ToolSpec;
use crate::words::error::{Error, Result};
use crate::words::limits::Limits;
use crate::words::message::ToolCall;
use crate::words::text::{cut_middle, harmless_line, without_marks};

/// Checks that only tools are denied: a misspelt one would be there.
///
/// # Errors
/// `Error::Manifest` with the name that no tool has.
pub fn check_denied<'a>(mut names: impl Iterator<Item = &'a String>) -> Result<()> {
    let tools = specs::all(&Limits::default(), Some(String::new()));
    let tools: Vec<&str> = tools.iter().map(|spec| spec.name).collect();
    let Some(unknown) = names.find(|name| !tools.contains(&name.as_str())) else { return Ok(()) };
    Err(Error::Manifest(format!(
        "\"tools.deny\" names \"{}\", which is no tool; the tools are {}",
        harmless_line(unknown),
        tools.join(", ")
    )))
}

/// The tools of one pod.
#[derive(Debug)]
pub struct Toolbox {
    context: Arc<PodContext>,
    desk: FileDesk,
    /// Made at the first look: the shell's text says how it is confined, which takes a moment to find out.
    specs: OnceLock<Vec<ToolSpec>>,
    results_written: u64,
}

impl Toolbox {
    /// The tools that this pod's manifest does not deny.
    pub fn new(context: Arc<PodContext>) -> Toolbox {
        let desk = FileDesk {
            directory: context.directory.clone(),
            hidden: context.hidden(),
            shown: context.session.results().canonicalize().into_iter().collect(),
            protect_git: context.manifest.protect_git,
            page_bytes_max: context.manifest.limits.file_read_bytes,
            seen: HashMap::new(),
        };
        Toolbox { context, desk, specs: OnceLock::new(), results_written: 0 }
    }

    /// The tools as the model is told about them.
    pub fn specs(&self) -> &[ToolSpec] {
        self.specs.get_or_init(|| {
            let manifest = &self.context.manifest;
            let mut specs = specs::all(&manifest.limits, shell::description(&self.context));
            specs.retain(|spec| !manifest.tools.deny.iter().any(|name| name == spec.name));
            specs
        })
    }

    /// Runs one call: whether it did what was asked, and the text for the model. An error is an answer too; a long one
    /// keeps head and tail, and the whole goes to a file.
    pub fn run(&mut self, call: &ToolCall, cancel: &Cancel) -> (bool, String) {
        let (ok, text) = match self.parse(call).and_then(|input| self.dispatch(input, cancel)) {
            Ok(text) => (true, text),
            Err(error) => (false, without_marks(&error.to_string())), // a child's own words may be in it
        };
        (ok, self.bound(&call.name, text))
    }

    fn parse(&self, call: &ToolCall) -> Result<Input> {
        if let Some(spec) = self.specs().iter().find(|spec| spec.name == call.name) {
            return input::parse(spec, &call.input);
        }
        let names: Vec<&str> = self.specs().iter().map(|spec| spec.name).collect();
        let shown = harmless_line(&call.name);
        Err(Error::told(format!("there is no tool \"{shown}\" for you; there are: {}", names.join(", "))))
    }

    fn dispatch(&mut self, input: Input, cancel: &Cancel) -> Result<String> {
        let context = &*self.context;
        let answer = match input {
            Input::SpawnPod(input) => spawn::run(context, &input, cancel)?,
            Input::SendToPod { pod_id, message } => pods::send(context, &pod_id, message)?,
            Input::ReadPodOutput { pod_id, since } => pods::read(context, &pod_id, since)?,
            Input::StopPod { pod_id, tree } => pods::stop_pod(context, &pod_id, tree == Some(true), cancel)?,
            Input::ListPods {} => json!({ "pods": survey::known_pods(context)? }),
            Input::WaitPods { pod_ids, until, timeout_seconds } => {
                pods::wait(context, pod_ids, until.unwrap_or(Until::All), timeout_seconds, cancel)?
            }
            Input::IntroducePod { to, pod_id } => pods::introduce(context, &to, &pod_id)?,
            Input::ReadFile { path, offset, limit } => {
                return self.file(cancel)?.read_file(&path, offset, limit);
            }
            Input::WriteFile { path, content } => return self.file(cancel)?.write_file(&path, &content),
            Input::EditFile { path, old, new, all } => {
                return self.file(cancel)?.edit_file(&path, &old, &new, all == Some(true));
            }
            Input::ListFiles { path, pattern } => return self.file(cancel)?.list_files(path, pattern),
            Input::SearchFiles { pattern, path, glob, plain } => {
                return self.file(cancel)?.search_files(&pattern, path, glob, plain == Some(true));
            }
            Input::Shell { command, timeout_seconds, dir } => {
                return shell::run(context, command, timeout_seconds, dir.as_deref(), cancel);
            }
        };
        // What other pods say is in here; an escape within a JSON text is the same text.
        Ok(without_marks(&answer.to_string()))
    }

    /// The scope is looked at anew by each call: it grows when a pod ends, and shrinks by SpawnPod only.
    fn file<'a>(&'a mut self, cancel: &'a Cancel) -> Result<FileCall<'a>> {
        let scope = self.context.view.effective()?;
        Ok(FileCall { desk: &mut self.desk, scope, cancel })
    }

    fn bound(&mut self, tool: &str, text: String) -> String {
        let bytes_max = self.context.manifest.limits.tool_result_bytes;
        if text.len() <= bytes_max {
            return text;
        }
        self.results_written += 1;
        let turn = self.context.session.ask(|summary| summary.turn);
        let directory = self.context.session.results();
        let name = PathBuf::from(format!("{turn}-{}-{tool}.txt", self.results_written));
        let kept = file::open_directory(&directory).and_then(|directory| {
            file::remove_at(&directory, &name)?;
            file::write_complete(&directory, &name, text.as_bytes(), 0o600)
        });
        let place = match kept {
            Ok(()) => {
                format!("the whole is in \"{}\", which ReadFile can page", directory.join(name).display())
            }
            Err(error) => format!("the whole could not be kept: {error}"),
        };
        cut_middle(&text, bytes_max, &place)
    }
}
