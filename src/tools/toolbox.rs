//! The tools of one pod: which there are, and running one call.
//!
//! Lives on the turn thread; calls run one after another, so nothing writes while a scope shrinks.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::sys::wait::Cancel;
use crate::tools::context::PodContext;
use crate::tools::place::FileDesk;
use crate::tools::{files, pods, search, shell, spawn};
use crate::wire::provider::ToolSpec;
use crate::words::error::{Error, Result};
use crate::words::message::ToolCall;
use crate::words::text::{cut_middle, harmless_line, without_marks};

/// All tools that there are.
pub const TOOLS: [&str; 13] = [
    "SpawnPod",
    "SendToPod",
    "ReadPodOutput",
    "StopPod",
    "ListPods",
    "WaitPods",
    "IntroducePod",
    "ReadFile",
    "WriteFile",
    "EditFile",
    "ListFiles",
    "SearchFiles",
    "Shell",
];

/// Checks that only tools are denied: a misspelt one would be there.
///
/// # Errors
/// `Error::Manifest` with the name that no tool has.
pub fn check_denied<'a>(mut names: impl Iterator<Item = &'a String>) -> Result<()> {
    let Some(unknown) = names.find(|name| !TOOLS.contains(&name.as_str())) else { return Ok(()) };
    Err(Error::Manifest(format!(
        "\"tools.deny\" names \"{}\", which is no tool; the tools are {}",
        harmless_line(unknown),
        TOOLS.join(", ")
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

/// What a call came to: the text for the model, and whether it did what was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolAnswer {
    /// Whether it did what was asked.
    pub ok: bool,
    /// The answer, or the sentence that says what went wrong.
    pub text: String,
}

impl Toolbox {
    /// The tools that this pod's manifest does not deny.
    pub fn new(context: Arc<PodContext>) -> Toolbox {
        let limits = &context.manifest.limits;
        let shown = context.session.results().canonicalize().into_iter().collect();
        let protect_git = context.manifest.protect_git;
        let desk =
            FileDesk::new(context.directory.clone(), context.hidden(), shown, protect_git, limits.clone());
        Toolbox { context, desk, specs: OnceLock::new(), results_written: 0 }
    }

    /// The tools as the model is told about them.
    pub fn specs(&self) -> &[ToolSpec] {
        self.specs.get_or_init(|| {
            let mut specs = vec![spawn::spec()];
            specs.extend(pods::specs());
            specs.extend(files::specs(&self.context.manifest.limits));
            specs.extend(search::specs());
            specs.extend(shell::spec(&self.context));
            let denied = &self.context.manifest.tools.deny;
            specs.retain(|spec| !denied.iter().any(|name| name == spec.name));
            specs
        })
    }

    /// Runs one call. An error is an answer too; a long one keeps head and tail, and the whole goes to a file.
    pub fn run(&mut self, call: &ToolCall, cancel: &Cancel) -> ToolAnswer {
        let answer = if self.specs().iter().any(|spec| spec.name == call.name) {
            self.dispatch(call, cancel)
        } else {
            let names: Vec<&str> = self.specs().iter().map(|spec| spec.name).collect();
            let shown = harmless_line(&call.name);
            Err(Error::told(format!("there is no tool \"{shown}\" for you; there are: {}", names.join(", "))))
        };
        let (ok, text) = match answer {
            Ok(text) => (true, text),
            Err(error) => (false, without_marks(&error.to_string())), // a child's own words may be in it
        };
        ToolAnswer { ok, text: self.bound(&call.name, text) }
    }

    fn dispatch(&mut self, call: &ToolCall, cancel: &Cancel) -> Result<String> {
        let context = &*self.context;
        let input = call.input.clone();
        // The scope is looked at anew by each call: it grows when a pod ends, and shrinks by SpawnPod only.
        let scope = || context.view.effective();
        let answer = match call.name.as_str() {
            "SpawnPod" => spawn::run(context, input, cancel)?,
            "SendToPod" => pods::send(context, input)?,
            "ReadPodOutput" => pods::read(context, input)?,
            "StopPod" => pods::stop_pod(context, input, cancel)?,
            "ListPods" => pods::list(context, input)?,
            "IntroducePod" => pods::introduce(context, input)?,
            "WaitPods" => pods::wait(context, input, cancel)?,
            "ReadFile" => return self.desk.read_file(&scope()?, input, cancel),
            "WriteFile" => return self.desk.write_file(&scope()?, input, cancel),
            "EditFile" => return self.desk.edit_file(&scope()?, input, cancel),
            "ListFiles" => return self.desk.list_files(&scope()?, input, cancel),
            "SearchFiles" => return self.desk.search_files(&scope()?, input, cancel),
            "Shell" => return shell::run(context, &scope()?, input, cancel),
            other => return Err(Error::told(format!("tool \"{other}\" cannot run"))),
        };
        // What other pods say is in here; an escape within a JSON text is the same text.
        Ok(without_marks(&answer.to_string()))
    }

    fn bound(&mut self, tool: &str, text: String) -> String {
        let bytes_max = self.context.manifest.limits.tool_result_bytes;
        if text.len() <= bytes_max {
            return text;
        }
        self.results_written += 1;
        let turn = self.context.session.ask(|summary| summary.turn);
        let path = self.context.session.results().join(format!("{turn}-{}-{tool}.txt", self.results_written));
        let place = match write_result(&path, &text) {
            Ok(()) => format!("the whole is in \"{}\", which ReadFile can page", path.display()),
            Err(error) => format!("the whole could not be kept: {error}"),
        };
        cut_middle(&text, bytes_max, &place)
    }
}

fn write_result(path: &Path, text: &str) -> std::io::Result<()> {
    let directory = crate::sys::file::open_directory(path.parent().unwrap_or(Path::new("/")))?;
    let name = path.file_name().map(Path::new).unwrap_or(Path::new("result"));
    crate::sys::file::remove_at(&directory, name)?;
    crate::sys::file::write_complete(&directory, name, text.as_bytes(), 0o600)
}
