//! The manifest: settings in layers, each read from JSON, checked, and laid over the one below.
//!
//! Parsing and laying over are pure functions of texts; only `gather` reads files. A project's file arrives
//! with a `git clone`, so it must never widen rights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::slice;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::store::session;
use crate::sys::file;
use crate::sys::file::read_regular;
use crate::words::error::{Error, Result};
use crate::words::identity::{MODEL_NAME_RULE, is_model_name};
use crate::words::limits::Limits;
use crate::words::scope::{HOME_RULE, begins_at_home};
use crate::words::text::{harmless_line, json_fault};

/// The largest manifest that is read, in bytes.
pub const MANIFEST_BYTES_MAX: usize = 1 << 20;

/// With 0 of these nothing would work at all.
const ABOVE_ZERO: [&str; 9] = [
    "provider.max_tokens",
    "provider.silence_seconds",
    "limits.steps",
    "limits.launch_seconds",
    "limits.stop_seconds",
    "limits.pods_per_user",
    "limits.tool_result_bytes",
    "limits.file_read_bytes",
    "shell.timeout_seconds",
];

/// Keys whose values are groups of settings.
const GROUPS: [&str; 4] = ["provider", "tools", "shell", "limits"];

/// Keys whose values are paths, or begin with one.
const PATHS: [&str; 6] =
    ["provider.file", "provider.api_key_file", "instruction", "scope", "shell.writable", "trusted_projects"];

/// Keys whose values are a program and its arguments.
const PROGRAMS: [&str; 2] = ["provider.command", "pod_command"];

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
    /// Seconds without a byte of an answer after which a request is tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silence_seconds: Option<u64>,
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
    /// The level of the spawner, which the child's must not fall below. Set by SpawnPod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spawner_level: Option<u8>,
}

impl Default for ShellSettings {
    fn default() -> Self {
        ShellSettings {
            sandbox: SandboxSetting::Required,
            network: true,
            timeout_seconds: 120,
            env: Vec::new(),
            writable: Vec::new(),
            spawner_level: None,
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
    /// Where each value that is not built in comes from, by its key, such as `provider.model`.
    #[serde(skip)]
    pub sources: Sources,
    /// What was left out on the way, and why: for the log, which begins later.
    #[serde(skip)]
    pub warnings: Vec<String>,
}

/// Keys of values, such as `provider.model`, and where each comes from.
pub type Sources = BTreeMap<String, String>;

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
            sources: Sources::new(),
            warnings: Vec::new(),
        }
    }
}

/// Where a layer came from; later ones win.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The user's own file.
    User,
    /// The project's file in a directory that the user does not trust.
    Project,
    /// The project's file in a directory that the user trusts.
    TrustedProject,
    /// What the spawner, or a person on the command line, gave along.
    Overlay,
}

/// One layer: the keys that were given, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    source: Source,
    place: String,
    given: Map<String, Value>,
    sources: Sources,
}

impl Layer {
    /// Reads a layer from the text of a file called `place`; relative paths in it are made absolute against
    /// `base`.
    ///
    /// # Errors
    /// `Error::Manifest` naming file, line and key for an unknown key or a wrong type.
    pub fn parse(text: &str, source: Source, place: &str, base: &Path) -> Result<Layer> {
        let given = serde_json::from_str::<Map<String, Value>>(text);
        serde_json::from_str::<Manifest>(text).map_err(|error| wrong(place, &error, given.as_ref().ok()))?;
        let mut given = given.map_err(|error| wrong(place, &error, None))?;
        // serde would also take a list for a group of settings, and the keys of a list are not looked at below.
        if let Some(group) = GROUPS.iter().find(|group| given.get(**group).is_some_and(Value::is_array)) {
            return Err(not_valid(place, "", &format!("\"{group}\" must be an object, not a list")));
        }
        for (key, value) in flatten(&given) {
            let reason = match value.as_str() {
                _ if ABOVE_ZERO.contains(&key.as_str()) && value.as_u64() == Some(0) => {
                    "it must be at least 1"
                }
                Some(model) if key == "provider.model" && !is_model_name(model) => MODEL_NAME_RULE,
                _ if PATHS.contains(&key.as_str()) && any_begins_at_home(value) => HOME_RULE,
                _ => continue,
            };
            return Err(not_valid(place, &format!(", key \"{key}\""), reason));
        }
        make_absolute(&mut given, base);
        let set = flatten(&given).filter(|(_, value)| !value.is_null());
        let sources = set.map(|(key, _)| (key, place.to_owned())).collect();
        Ok(Layer { source, place: place.to_owned(), given, sources })
    }

    /// Makes a layer of an overlay that this program has put together.
    ///
    /// # Errors
    /// As `parse`.
    pub fn overlay(given: &Value, place: &str) -> Result<Layer> {
        Layer::parse(&given.to_string(), Source::Overlay, place, Path::new("/"))
    }

    /// The tools that the layer denies.
    pub fn denied_tools(&self) -> Vec<String> {
        let denied = self.given.get("tools").and_then(|tools| tools.get("deny"));
        denied.and_then(|names| serde_json::from_value(names.clone()).ok()).unwrap_or_default()
    }

    /// Whether the layer names a model.
    pub fn gives_model(&self) -> bool {
        self.sources.contains_key("provider.model")
    }

    /// Whether the layer gives anything that could widen rights; the sentence names the key.
    fn check_project(&self, below: &Value) -> Result<()> {
        let is_bound = |name: &str| name.starts_with("$insomnia/") || name.starts_with("$project/");
        for (key, value) in flatten(&self.given) {
            let now = below.pointer(&format!("/{}", key.replace('.', "/")));
            let now_number = now.and_then(Value::as_u64);
            let what = match key.as_str() {
                "provider.model" | "tools.deny" | "wake_on_events" => continue,
                "shell.network" if value == &Value::Bool(false) || now == Some(value) => continue,
                "instruction" if value.as_str().is_some_and(is_bound) => continue,
                key if key == "shell.timeout_seconds" || key.starts_with("limits.") => {
                    if value.as_u64() <= now_number {
                        continue;
                    }
                    format!("raise \"{key}\" (it is {})", now_number.unwrap_or_default())
                }
                key => format!("set \"{key}\""),
            };
            return Err(Error::Manifest(format!(
                "manifest \"{}\" may not {what}: it comes with the project; set it in your own manifest, or list the project's directory there in \"trusted_projects\"",
                harmless_line(&self.place)
            )));
        }
        Ok(())
    }
}

/// Lays the layers over the built-in settings, the first one lowest. Objects are laid over key by key, denied
/// tools add up, everything else is replaced.
///
/// # Errors
/// `Error::Manifest` when a project that is not trusted would widen rights.
pub fn lay_over(layers: &[Layer]) -> Result<Manifest> {
    let (mut whole, mut sources) = (json!(Manifest::default()), Sources::new());
    let mut deny: Vec<String> = Vec::new();
    for layer in layers {
        if layer.source == Source::Project {
            layer.check_project(&whole)?;
        }
        lay_value(&mut whole, &Value::Object(layer.given.clone()));
        for tool in layer.denied_tools() {
            if !deny.contains(&tool) {
                deny.push(tool);
            }
        }
        for (key, place) in &layer.sources {
            let before = sources.get(key).filter(|_| key == "tools.deny");
            let before = before.map(|before| format!("{before}, ")).unwrap_or_default();
            sources.insert(key.clone(), before + place);
        }
    }
    let manifest: Manifest =
        serde_json::from_value(whole).map_err(|error| wrong("as laid over", &error, None))?;
    Ok(Manifest { tools: ToolSettings { deny }, sources, ..manifest })
}

fn lay_value(below: &mut Value, above: &Value) {
    match (below, above) {
        (Value::Object(below), Value::Object(above)) => {
            for (key, value) in above {
                // Nothing over nothing: what a session has kept of a secret is given up.
                if value.is_null() && below.get(key).is_some_and(Value::is_null) {
                    below.remove(key);
                    continue;
                }
                lay_value(below.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (_, Value::Null) => {} // as if it were not there
        (below, above) => *below = above.clone(),
    }
}

/// Paths in a manifest are relative to the file they stand in, and must mean the same to a child elsewhere.
fn make_absolute(given: &mut Map<String, Value>, base: &Path) {
    for (key, value) in flatten_mut(given) {
        let (is_program, is_instruction) = (PROGRAMS.contains(&key.as_str()), key == "instruction");
        if !is_program && !PATHS.contains(&key.as_str()) {
            continue;
        }
        // A program without a slash is looked for on PATH. What no file says stays as it was said.
        let is_path = |text: &str| match text {
            "" => false,
            word if is_program => base != Path::new("/") && word.contains('/'),
            name => !is_instruction || !name.starts_with('$'),
        };
        let count = if is_program { 1 } else { usize::MAX };
        let is_list = value.is_array();
        let texts =
            if is_list { value.as_array_mut().map(Vec::as_mut_slice) } else { Some(slice::from_mut(value)) };
        for text in texts.into_iter().flatten().take(count) {
            if let Some(path) = text.as_str().filter(|text| is_path(text)) {
                *text = Value::from(base.join(path).to_string_lossy());
            }
        }
    }
}

fn any_begins_at_home(value: &Value) -> bool {
    let texts =
        value.as_str().into_iter().chain(value.as_array().into_iter().flatten().filter_map(Value::as_str));
    texts.into_iter().any(begins_at_home)
}

/// The values of a manifest by their whole keys, in order: `provider.model`, `wake_on_events`.
pub fn flatten(given: &Map<String, Value>) -> impl Iterator<Item = (String, &Value)> {
    let is_group = |key: &String| GROUPS.contains(&key.as_str());
    given.iter().flat_map(move |(key, value)| match value.as_object().filter(|_| is_group(key)) {
        Some(inner) => inner.iter().map(|(name, value)| (format!("{key}.{name}"), value)).collect(),
        None => vec![(key.clone(), value)],
    })
}

fn flatten_mut(given: &mut Map<String, Value>) -> impl Iterator<Item = (String, &mut Value)> {
    given.iter_mut().flat_map(|(key, value)| {
        if !value.is_object() || !GROUPS.contains(&key.as_str()) {
            return vec![(key.clone(), value)];
        }
        let inner = value.as_object_mut().into_iter().flatten();
        inner.map(|(name, value)| (format!("{key}.{name}"), value)).collect()
    })
}

fn not_valid(place: &str, at: &str, reason: &str) -> Error {
    Error::Manifest(harmless_line(&format!("manifest \"{place}\"{at} is not valid: {reason}")))
}

/// A sentence with file, line and key. The key is the first whose value alone is refused in the same way.
fn wrong(place: &str, error: &serde_json::Error, given: Option<&Map<String, Value>>) -> Error {
    let text = json_fault(error);
    let is_refused = |(key, value): &(String, &Value)| {
        let in_group = key.split_once('.').filter(|(group, _)| GROUPS.contains(group));
        let alone =
            in_group.map_or_else(|| json!({ key: value }), |(group, name)| json!({ group: { name: value } }));
        serde_json::from_value::<Manifest>(alone).is_err_and(|error| json_fault(&error) == text)
    };
    let key = given.and_then(|given| flatten(given).find(is_refused));
    let key = key.map(|(key, _)| format!(", key \"{key}\"")).unwrap_or_default();
    let line = if error.line() > 0 { format!(", line {}", error.line()) } else { String::new() };
    not_valid(place, &(line + &key), &text)
}

/// The manifest files that count for a pod in `directory`, the lowest first, whether they exist or not: the user's,
/// and the nearest one upward, which is a trusted one if the user lists its directory.
///
/// # Errors
/// When the user's file is not valid.
pub fn files(config: &Path, directory: &Path) -> Result<Vec<(Source, PathBuf)>> {
    let user = config.join("manifest.json");
    let trusted = lay_over(read_layer(&user, Source::User, &mut Vec::new())?.as_slice())?.trusted_projects;
    let project = super::paths::nearest_upward(directory, ".insomnia/manifest.json").map(|project| {
        let is_trusted = trusted.iter().any(|path| path.canonicalize().is_ok_and(|path| path == project));
        let source = if is_trusted { Source::TrustedProject } else { Source::Project };
        (source, project.join(".insomnia/manifest.json"))
    });
    Ok([(Source::User, user)].into_iter().chain(project).collect())
}

/// Reads the user's and the project's manifest, as far as they exist, and puts the overlays on top.
///
/// # Errors
/// As `Layer::parse` and `lay_over`, and when a file that exists cannot be read.
pub fn gather(config: &Path, directory: &Path, overlays: Vec<Layer>) -> Result<Manifest> {
    let (mut layers, mut warnings) = (Vec::new(), Vec::new());
    for (source, path) in files(config, directory)? {
        layers.extend(read_layer(&path, source, &mut warnings)?);
    }
    layers.extend(overlays);
    Ok(Manifest { warnings, ..lay_over(&layers)? })
}

/// Whether the value of a header of this name may be a secret.
pub fn may_be_secret(header: &str) -> bool {
    let header = header.to_ascii_lowercase();
    ["key", "auth", "token", "secret", "cookie"].iter().any(|sign| header.contains(sign))
}

/// Keeps the resolved settings in a session folder, and beside them where each comes from. Of headers that
/// may be secrets only the names: a session that is resumed takes them from the user's manifest again.
///
/// # Errors
/// When a file cannot be written.
pub fn save(folder: &Path, manifest: &Manifest) -> Result<()> {
    let failed = Error::on("keep the manifest in", folder);
    let directory = file::open_directory(folder).map_err(failed)?;
    let mut kept = manifest.clone();
    let secrets = kept.provider.headers.iter_mut().filter(|(name, _)| may_be_secret(name));
    secrets.for_each(|(_, value)| *value = Value::Null);
    for (name, value) in [(session::MANIFEST, json!(kept)), (session::SOURCES, json!(manifest.sources))] {
        let (text, temporary) = (format!("{value:#}"), format!("{name}.new"));
        file::replace_at(&directory, Path::new(&temporary), Path::new(name), text.as_bytes(), 0o600)
            .map_err(failed)?;
    }
    Ok(())
}

/// The settings in a file that a person names.
///
/// # Errors
/// As `Layer::parse`, and when the file cannot be read.
pub fn named(path: &Path) -> Result<Layer> {
    let text = read_regular(path, MANIFEST_BYTES_MAX).map_err(Error::on("read manifest", path))?;
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    Layer::parse(&text, Source::Overlay, &path.to_string_lossy(), absolute.parent().unwrap_or(Path::new("/")))
}

/// The settings that `save` has kept, as a layer.
///
/// # Errors
/// As `Layer::parse`, and when the manifest cannot be read; without the sources the values count as built in.
pub fn saved(folder: &Path) -> Result<Layer> {
    let path = folder.join(session::MANIFEST);
    let text = read_regular(&path, MANIFEST_BYTES_MAX).map_err(Error::on("read", &path))?;
    let sources = read_regular(&folder.join(session::SOURCES), MANIFEST_BYTES_MAX).unwrap_or_default();
    let sources = serde_json::from_str(&sources).unwrap_or_default();
    let layer = Layer::parse(&text, Source::Overlay, &path.to_string_lossy(), Path::new("/"))?;
    Ok(Layer { sources, ..layer })
}

fn read_layer(path: &Path, source: Source, warnings: &mut Vec<String>) -> Result<Option<Layer>> {
    let failed = Error::on("read manifest", path);
    let entry = match file::open_target(path) {
        Ok(entry) => entry,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed(source)),
    };
    if let (Err(error), true) = (file::refuse_strangers(&entry), source != Source::User) {
        warnings.push(failed(error).to_string());
        return Ok(None);
    }
    let text = file::read_entry(&entry, MANIFEST_BYTES_MAX).map_err(failed)?;
    let base = path.parent().unwrap_or(Path::new("/"));
    // A project's manifest lies in `.insomnia`, and its paths are those of the project.
    let base = if base.ends_with(".insomnia") { base.parent().unwrap_or(base) } else { base };
    Layer::parse(&text, source, &path.to_string_lossy(), base).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(source: Source, text: &str) -> Layer {
        Layer::parse(text, source, "m.json", Path::new("/p")).unwrap()
    }

    #[test]
    fn a_program_that_is_a_path_is_the_one_beside_the_manifest() {
        let text = r#"{"provider":{"command":["./model","./x"]},"pod_command":["bin/pod"]}"#;
        let layer = Layer::parse(text, Source::User, "m.json", Path::new("/c")).unwrap();
        let manifest = lay_over(&[layer]).unwrap();
        assert_eq!(manifest.provider.command, ["/c/./model", "./x"]);
        assert_eq!(manifest.pod_command, ["/c/bin/pod"]);
        let layer =
            Layer::parse(r#"{"pod_command":["pod"]}"#, Source::User, "m.json", Path::new("/c")).unwrap();
        assert_eq!(lay_over(&[layer]).unwrap().pod_command, ["pod"]);
    }

    #[test]
    fn later_layers_win_and_denied_tools_add_up() {
        let manifest = lay_over(&[
            layer(
                Source::User,
                r#"{"provider":{"kind":"script","file":"s.json"},"tools":{"deny":["Shell"]}}"#,
            ),
            layer(
                Source::Project,
                r#"{"provider":{"model":"m"},"tools":{"deny":["WriteFile"]},"limits":{"steps":5}}"#,
            ),
            layer(Source::Overlay, r#"{"tools":{"deny":[]},"wake_on_events":false}"#),
        ])
        .unwrap();
        assert_eq!(manifest.provider.file, Some("/p/s.json".into()));
        assert_eq!(manifest.provider.model.as_deref(), Some("m"));
        assert_eq!(manifest.tools.deny, ["Shell", "WriteFile"]);
        assert!(!manifest.wake_on_events);
        assert_eq!(manifest.sources["tools.deny"], "m.json, m.json, m.json");
        assert!(!manifest.sources.contains_key("limits.depth"), "built in");
        assert_eq!(manifest.limits.steps, 5);
    }

    #[test]
    fn s01_a_project_cannot_widen_rights() {
        for (text, key) in [
            (r#"{"provider":{"base_url":"http://evil"}}"#, "provider.base_url"),
            (r#"{"pod_command":["sh"]}"#, "pod_command"),
            (r#"{"scope":["/:write"]}"#, "scope"),
            (r#"{"shell":{"sandbox":"off"}}"#, "shell.sandbox"),
            (r#"{"shell":{"env":["KEY"]}}"#, "shell.env"),
            (r#"{"shell":{"writable":["/"]}}"#, "shell.writable"),
            (r#"{"trusted_projects":["/p"]}"#, "trusted_projects"),
            (r#"{"limits":{"depth":5}}"#, "limits.depth"),
            (r#"{"protect_git":false}"#, "protect_git"),
            (r#"{"instruction":"/home/u/.ssh/id"}"#, "instruction"),
        ] {
            let error = lay_over(&[layer(Source::Project, text)]).unwrap_err().to_string();
            assert!(error.contains(&format!("\"{key}\"")) && error.contains("trusted_projects"), "{error}");
            lay_over(&[layer(Source::TrustedProject, text)]).unwrap();
        }
        // A list could give the values of a group without the names of its keys.
        for text in
            [r#"{"provider":["openai","m","http://evil"]}"#, r#"{"shell":["off"]}"#, r#"{"limits":[9]}"#]
        {
            let error =
                Layer::parse(text, Source::Project, "m.json", Path::new("/p")).unwrap_err().to_string();
            assert!(error.contains("must be an object"), "{error}");
        }
        let off = layer(Source::User, r#"{"shell":{"network":false}}"#);
        assert!(lay_over(&[off.clone(), layer(Source::Project, r#"{"shell":{"network":true}}"#)]).is_err());
        assert!(lay_over(&[off, layer(Source::Project, r#"{"shell":{"network":false}}"#)]).is_ok());
    }

    #[test]
    fn an_unknown_key_is_named_with_file_and_line() {
        let parse =
            |text: &str| Layer::parse(text, Source::User, "/u/manifest.json", Path::new("/")).unwrap_err();
        let error = parse("{\n \"provder\": {}\n}").to_string();
        assert!(
            error.contains("/u/manifest.json") && error.contains("provder") && error.contains("line 2"),
            "{error}"
        );
        for (bad, told) in [
            ("", ", line 1 is not valid: EOF"),
            ("[]", "an object"),
            ("{\"limits\":{\n\"depht\":1}}", ", line 2, key \"limits.depht\""),
            (
                "{\"limits\":{\"steps\":\"x\"}}",
                "key \"limits.steps\" is not valid: invalid type: string \"x\", expected a whole number",
            ),
            (
                "{\"shell\":\n7}",
                ", line 2, key \"shell\" is not valid: invalid type: integer `7`, expected an object",
            ),
            ("{\"provider\":{\"kind\":\"magic\"}}", "key \"provider.kind\""),
            ("{\"provider\":{\"max_tokens\":-1}}", "key \"provider.max_tokens\""),
            ("{\"scope\":1}", "key \"scope\" is not valid: invalid type: integer `1`, expected a list"),
            ("{\"wake_on_events\":1}", "key \"wake_on_events\""),
            ("{\"limits\":{\"steps\":0}}", "key \"limits.steps\" is not valid: it must be at least 1"),
            ("{\"limits\":{\"launch_seconds\":0}}", "key \"limits.launch_seconds\" is not valid"),
            ("{\"limits\":{\"stop_seconds\":0}}", "key \"limits.stop_seconds\" is not valid"),
            (
                "{\"provider\":{\"model\":\"a\\u001b[2J\"}}",
                "key \"provider.model\" is not valid: a model's name",
            ),
            ("{\"provider\":{\"model\":\" \"}}", "a model's name is one line"),
            ("{\"wake_on_events\":1,\n\"limits\":{\"steps\":\"x\"}}", "line 1, key \"wake_on_events\""),
            ("{\"zzz\":1,\"aaa\":2}", "key \"zzz\" is not valid: unknown field `zzz`"),
            ("{\"nope\":{\"a\":{}}}", "key \"nope\""),
            ("{\"scope\":{\"a\":1}}", "key \"scope\""),
            ("{\"instruction\":{}}", "key \"instruction\""),
            ("{\"shell\":{\"env\":{\"A\":\"b\"}}}", "key \"shell.env\""),
        ] {
            let error = parse(bad).to_string();
            assert!(error.contains(told) && !error.contains("struct "), "{bad}: {error}");
        }
    }

    #[test]
    fn settings_that_are_kept_again_are_there_at_every_moment() {
        let place = tempfile::tempdir().unwrap();
        save(place.path(), &Manifest::default()).unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..100).for_each(|_| save(place.path(), &Manifest::default()).unwrap());
                is_over.store(true, std::sync::atomic::Ordering::SeqCst);
            });
            while !is_over.load(std::sync::atomic::Ordering::SeqCst) {
                saved(place.path()).unwrap();
            }
        });
    }

    #[test]
    fn the_project_is_read_from_the_nearest_directory_upward() {
        let place = tempfile::tempdir().unwrap();
        let (config, project) = (place.path().join("config"), place.path().join("project"));
        std::fs::create_dir_all(project.join("a/b")).unwrap();
        std::fs::create_dir_all(project.join(".insomnia")).unwrap();
        std::fs::create_dir_all(&config).unwrap();
        let manifest = project.join(".insomnia/manifest.json");
        std::fs::write(&manifest, r#"{"provider":{"model":"near"}}"#).unwrap();
        let found = gather(&config, &project.join("a/b"), vec![]).unwrap();
        assert_eq!(found.provider.model.as_deref(), Some("near"));
        std::fs::write(&manifest, r#"{"provider":{"kind":"script","file":"s"}}"#).unwrap();
        assert!(gather(&config, &project.join("a/b"), vec![]).is_err());
        let trust = serde_json::json!({ "trusted_projects": [project] }).to_string();
        std::fs::write(config.join("manifest.json"), trust).unwrap();
        let found = gather(&config, &project.join("a/b"), vec![]).unwrap();
        assert_eq!(found.provider.file, Some(project.join("s")));
    }
}
