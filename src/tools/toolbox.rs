//! The tools of one pod: which there are, and running one call.
//!
//! Lives on the turn thread; calls run one after another, so nothing writes while a scope shrinks.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde::de::DeserializeOwned;

use crate::sys::wait::Cancel;
use crate::tools::context::PodContext;
use crate::tools::place::FileDesk;
use crate::tools::{input, pods, shell, spawn, specs};
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
            let manifest = &self.context.manifest;
            let mut specs = specs::all(&manifest.limits, shell::description(&self.context));
            specs.retain(|spec| !manifest.tools.deny.iter().any(|name| name == spec.name));
            specs
        })
    }

    /// Runs one call. An error is an answer too; a long one keeps head and tail, and the whole goes to a file.
    pub fn run(&mut self, call: &ToolCall, cancel: &Cancel) -> ToolAnswer {
        let (ok, text) = match self.check(call).and_then(|()| self.dispatch(call, cancel)) {
            Ok(text) => (true, text),
            Err(error) => (false, without_marks(&error.to_string())), // a child's own words may be in it
        };
        ToolAnswer { ok, text: self.bound(&call.name, text) }
    }

    fn check(&self, call: &ToolCall) -> Result<()> {
        if let Some(spec) = self.specs().iter().find(|spec| spec.name == call.name) {
            return input::check(spec, &call.input);
        }
        let names: Vec<&str> = self.specs().iter().map(|spec| spec.name).collect();
        let shown = harmless_line(&call.name);
        Err(Error::told(format!("there is no tool \"{shown}\" for you; there are: {}", names.join(", "))))
    }

    fn dispatch(&mut self, call: &ToolCall, cancel: &Cancel) -> Result<String> {
        let context = &*self.context;
        // The scope is looked at anew by each call: it grows when a pod ends, and shrinks by SpawnPod only.
        let scope = || context.view.effective();
        let answer = match call.name.as_str() {
            "SpawnPod" => spawn::run(context, given(call)?, cancel)?,
            "SendToPod" => pods::send(context, given(call)?)?,
            "ReadPodOutput" => pods::read(context, given(call)?)?,
            "StopPod" => pods::stop_pod(context, &given(call)?, cancel)?,
            "ListPods" => pods::list(context)?,
            "IntroducePod" => pods::introduce(context, &given(call)?)?,
            "WaitPods" => pods::wait(context, &given(call)?, cancel)?,
            "ReadFile" => return self.desk.read_file(&scope()?, &given(call)?, cancel),
            "WriteFile" => return self.desk.write_file(&scope()?, &given(call)?, cancel),
            "EditFile" => return self.desk.edit_file(&scope()?, &given(call)?, cancel),
            "ListFiles" => return self.desk.list_files(&scope()?, given(call)?, cancel),
            "SearchFiles" => return self.desk.search_files(&scope()?, given(call)?, cancel),
            "Shell" => return shell::run(context, &scope()?, given(call)?, cancel),
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

/// The input of a call that was checked, in its typed form.
fn given<T: DeserializeOwned>(call: &ToolCall) -> Result<T> {
    T::deserialize(&call.input)
        .map_err(|error| Error::told(format!("{}: the input is wrong: {error}", call.name)))
}

fn write_result(path: &Path, text: &str) -> std::io::Result<()> {
    let directory = crate::sys::file::open_directory(path.parent().unwrap_or(Path::new("/")))?;
    let name = path.file_name().map(Path::new).unwrap_or(Path::new("result"));
    crate::sys::file::remove_at(&directory, name)?;
    crate::sys::file::write_complete(&directory, name, text.as_bytes(), 0o600)
}
