//! `ListFiles` and `SearchFiles`: a walk, and the system's `grep` over what it found.
//!
//! `grep` is given the opened files by their descriptors, never names that could lead elsewhere by then.
//! Runs on the turn thread.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::sys::file::{self, EntryKind};
use crate::sys::process::{ErrorOutput, Output, Program, Running, own_pid};
use crate::sys::wait::Cancel;
use crate::tools::glob::Glob;
use crate::tools::input;
use crate::tools::page::SNIFF_BYTES;
use crate::tools::place::{FileDesk, Identity, identity};
use crate::tools::walk::{SEARCH_BYTES_MAX, Skipped, Step, Walk};
use crate::wire::provider::ToolSpec;
use crate::words::error::{Error, Result};
use crate::words::scope::EffectiveScope;
use crate::words::text::{cut_end, harmless_line};

/// Paths in one answer of `ListFiles`.
const PATHS_MAX: usize = 1000;
/// Files given to one `grep`, all open at once: a fraction of the usual limit of 1,024 descriptors.
const BATCH: usize = 128;
/// Matching lines shown of one file, and in all.
const HITS_PER_FILE: usize = 20;
const HITS_MAX: usize = 500;
/// Of a longer matching line only the beginning is shown.
const HIT_BYTES_MAX: usize = 300;
/// The longest search pattern.
const PATTERN_BYTES_MAX: usize = 4096;
/// One search is over after this time: some expressions take `grep` for ever.
const SEARCH_TIME_MAX: Duration = Duration::from_secs(60);

/// Starts `grep` with at most 512 MiB of memory (setrlimit(2), in KiB): a short expression such as `a{1,30000}` asks
/// for several GiB. A shell without this limit goes on without it.
const BOUNDED_GREP: &str = "ulimit -v 524288 2>/dev/null; exec grep \"$@\"";

/// What the model is told about the tools of this file.
#[must_use]
pub fn specs() -> Vec<ToolSpec> {
    vec![
        ToolSpec {
            name: "ListFiles",
            description: format!(
                "List the files below a directory (default: yours), at most {PATHS_MAX}. Pattern: * ? [..] within a name, ** across directories; without / it is matched with names at any depth. Skips .git and directories that .gitignore names plainly; links are listed, not followed; an empty directory ends in /."
            ),
            input_schema: list_schema(),
        },
        ToolSpec {
            name: "SearchFiles",
            description: format!(
                "Search text in the files that ListFiles would list, line by line, with grep's extended regular expressions (no \\d; use [0-9]), or plain text. Shows path:line: text, at most {HITS_PER_FILE} lines per file and {HITS_MAX} in all; skips binary files and files over {} MiB.",
                SEARCH_BYTES_MAX >> 20
            ),
            input_schema: search_schema(),
        },
    ]
}

fn list_schema() -> Value {
    json!({ "type": "object", "additionalProperties": false, "required": [], "properties": {
        "path": { "type": "string", "description": "directory, absolute or relative to yours" },
        "pattern": { "type": "string", "description": "such as *.rs or src/**/*.rs, relative to path" } } })
}

fn search_schema() -> Value {
    json!({ "type": "object", "additionalProperties": false, "required": ["pattern"], "properties": {
        "pattern": { "type": "string", "description": "extended regular expression of grep" },
        "path": { "type": "string", "description": "directory or file, absolute or relative to yours" },
        "glob": { "type": "string", "description": "only files that match, such as *.rs" },
        "plain": { "type": "boolean", "description": "the pattern is plain text" } } })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListInput {
    path: Option<String>,
    pattern: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SearchInput {
    pattern: String,
    path: Option<String>,
    glob: Option<String>,
    plain: Option<bool>,
}

impl FileDesk {
    /// `ListFiles`: the paths below a directory, sorted, and what was skipped.
    ///
    /// # Errors
    /// When the input is wrong, or the place is not there or may not be read.
    pub fn list_files(&self, scope: &EffectiveScope, input: Value, cancel: &Cancel) -> Result<String> {
        let input: ListInput = input::parse("ListFiles", &list_schema(), input)?;
        let (path, glob) = start_and_glob(input.path, input.pattern)?;
        let found = self.find(&path)?;
        let mut walk = Walk::start(self, scope, &found, glob, cancel)?;
        let mut paths: Vec<String> = Vec::new();
        let mut is_cut = false;
        while let Some(step) = walk.next()? {
            if paths.len() == PATHS_MAX {
                is_cut = true;
                break;
            }
            paths.push(step.shown);
        }
        paths.sort();
        let mut text = paths.join("\n");
        if paths.is_empty() {
            text.push_str("[no files]");
        }
        text.push('\n');
        if is_cut {
            text.push_str(&format!(
                "[only the first {PATHS_MAX} paths are listed; narrow \"path\" or \"pattern\"]\n"
            ));
        }
        walk.skipped.say(&mut text);
        Ok(text)
    }

    /// `SearchFiles`: the lines that match, as `grep` finds them.
    ///
    /// # Errors
    /// When the input is wrong, the place is not there or may not be read, `grep` is missing, or it does not
    /// understand the expression; then in its own words.
    pub fn search_files(&self, scope: &EffectiveScope, input: Value, cancel: &Cancel) -> Result<String> {
        let input: SearchInput = input::parse("SearchFiles", &search_schema(), input)?;
        if input.pattern.is_empty() || input.pattern.contains(['\n', '\0']) {
            return Err(Error::told(
                "SearchFiles: \"pattern\" must not be empty nor contain a line break or NUL; lines are searched one by one",
            ));
        }
        if input.pattern.len() > PATTERN_BYTES_MAX {
            return Err(Error::told(format!(
                "SearchFiles: \"pattern\" is longer than {PATTERN_BYTES_MAX} bytes"
            )));
        }
        let (path, glob) = start_and_glob(input.path, input.glob)?;
        let found = self.find(&path)?;
        let mut walk = Walk::start(self, scope, &found, glob, cancel)?;
        let hidden = self.hidden_identities();
        let mut search = Search::new(&input.pattern, input.plain.unwrap_or(false), cancel);
        let mut batch: Vec<(String, File)> = Vec::new();
        while let Some(step) = walk.next()? {
            match candidate(&step, &hidden, &mut walk.skipped) {
                Some(open) => batch.push((step.shown, open)),
                None => continue,
            }
            if batch.len() == BATCH {
                search.run(&batch)?;
                batch.clear();
                if search.is_full() {
                    break;
                }
            }
        }
        if !search.is_full() && (!batch.is_empty() || !search.has_run) {
            search.run(&batch)?;
        }
        let mut text = search.finish();
        walk.skipped.say(&mut text);
        Ok(text)
    }
}

/// The start of the walk and the pattern below it. An absolute pattern names its own start: its names before the
/// first with a star, question mark or bracket.
fn start_and_glob(path: Option<String>, pattern: Option<String>) -> Result<(String, Option<Glob>)> {
    let Some(pattern) = pattern else { return Ok((path.unwrap_or_else(|| ".".to_owned()), None)) };
    let Some(absolute) = pattern.strip_prefix('/') else {
        let glob = Glob::new(&pattern)?;
        return Ok((path.unwrap_or_else(|| ".".to_owned()), Some(glob)));
    };
    if path.is_some() {
        return Err(Error::told("a pattern that begins with / names its own directory; leave \"path\" out"));
    }
    let names: Vec<&str> = absolute.split('/').collect();
    let plain = names.iter().take_while(|name| !name.contains(['*', '?', '['])).count();
    let plain = plain.min(names.len().saturating_sub(1));
    let (start, rest) = names.split_at_checked(plain).unwrap_or_default();
    // The rest is matched as a whole path, also when it is one name only.
    let glob = Glob::new(&format!("./{}", rest.join("/")))?;
    Ok((format!("/{}", start.join("/")), Some(glob)))
}

/// The opened file of a step, if it is worth searching.
fn candidate(step: &Step, hidden: &[Identity], skipped: &mut Skipped) -> Option<File> {
    if step.kind != EntryKind::File {
        return None;
    }
    // The kind is what the directory said; what is opened now is looked at again, first without opening it.
    let name = Path::new(&step.name);
    let opened = file::open_entry_at(step.directory.as_ref(), name).and_then(|entry| {
        if !entry.metadata()?.is_file() {
            return Ok(None);
        }
        file::open_at(step.directory.as_ref(), name).map(Some)
    });
    let open = match opened {
        Ok(open) => open?,
        Err(error) => {
            log::debug!("cannot open a file to search it: {error}"); // counted, and said at the end
            skipped.unreadable += 1;
            return None;
        }
    };
    let metadata = open.metadata().ok()?;
    if !metadata.is_file() || metadata.len() == 0 || hidden.contains(&identity(&metadata)) {
        return None;
    }
    if metadata.len() > SEARCH_BYTES_MAX {
        skipped.too_large += 1;
        return None;
    }
    let mut head = vec![0; SNIFF_BYTES];
    let count = open.read_at(&mut head, 0).ok()?;
    if head.get(..count).is_some_and(|head| head.contains(&0)) {
        skipped.binary += 1;
        return None;
    }
    Some(open)
}

/// The answers of one or more runs of `grep`.
struct Search<'a> {
    pattern: &'a str,
    plain: bool,
    cancel: &'a Cancel,
    deadline: Instant,
    text: String,
    hits: usize,
    has_run: bool,
    warnings: String,
}

impl<'a> Search<'a> {
    fn new(pattern: &'a str, plain: bool, cancel: &'a Cancel) -> Search<'a> {
        Search {
            pattern,
            plain,
            cancel,
            deadline: Instant::now() + SEARCH_TIME_MAX,
            text: String::new(),
            hits: 0,
            has_run: false,
            warnings: String::new(),
        }
    }

    fn is_full(&self) -> bool {
        self.hits >= HITS_MAX
    }

    /// Searches these files. Without any it still lets `grep` judge the expression.
    fn run(&mut self, batch: &[(String, File)]) -> Result<()> {
        self.has_run = true;
        let pid = own_pid();
        let names: Vec<String> =
            batch.iter().map(|(_, open)| format!("/proc/{pid}/fd/{}", open.as_raw_fd())).collect();
        let most = (HITS_PER_FILE + 1).to_string();
        let kind = if self.plain { "-F" } else { "-E" };
        // Files were looked at already, so all are text (-a): one byte that is not UTF-8 must not hide a file.
        let options = ["-a", "-H", "-n", kind, "-m", &most, "-e", self.pattern, "--"];
        let mut args: Vec<&OsStr> = ["-c", BOUNDED_GREP, "sh"].map(OsStr::new).to_vec();
        args.extend(options.map(OsStr::new));
        args.extend(names.iter().map(OsStr::new));
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
        let environment = [("PATH".into(), path), ("LC_ALL".into(), "C.UTF-8".into())];
        let started = Program::new("sh", args).only_env(environment).start(ErrorOutput::Separate);
        let mut grep = started.map_err(|error| Error::io("start grep", error))?;
        if !self.collect(&mut grep, batch, &names)? {
            return Ok(()); // enough was found; dropping it ends it
        }
        let ended = grep.wait(self.deadline).map_err(|error| Error::io("wait for grep", error))?;
        let words = grep.error_text(2000);
        if ended.code() == Some(127) {
            return Err(Error::told(
                "the program grep is not installed; SearchFiles needs it (ListFiles and ReadFile do not)",
            ));
        }
        if ended.code().is_none_or(|code| code > 1) && self.hits == 0 {
            let words = if words.is_empty() { format!("grep ended with {ended}") } else { words };
            return Err(Error::told(format!("cannot search: {}", harmless_line(&words))));
        }
        if self.warnings.is_empty() {
            self.warnings = harmless_line(&words);
        }
        Ok(())
    }

    /// Takes in the lines of `grep`; `false` when there are enough.
    fn collect(&mut self, grep: &mut Running, batch: &[(String, File)], names: &[String]) -> Result<bool> {
        let mut line: Vec<u8> = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        let mut last = usize::MAX; // the file of the hit before
        let mut in_file = 0;
        loop {
            let read = grep.read(&mut buffer, Some(self.cancel), self.deadline);
            let count = match read.map_err(|error| Error::io("read from grep", error))? {
                Output::Bytes(count) => count,
                Output::End => return Ok(true),
                Output::Cancelled => return Err(Error::Cancelled),
                Output::TimedOut => {
                    return Err(Error::told(format!(
                        "the search took longer than {} s; use a simpler pattern or a narrower \"path\"",
                        SEARCH_TIME_MAX.as_secs()
                    )));
                }
            };
            let mut rest = buffer.get(..count).unwrap_or_default();
            while !rest.is_empty() {
                let end = rest.iter().position(|&byte| byte == b'\n');
                let (piece, after) = match end {
                    Some(end) => (rest.get(..end), rest.get(end + 1..)),
                    None => (Some(rest), None),
                };
                // Enough for the name, the number, and one byte more than is shown.
                let room = (HIT_BYTES_MAX + 100).saturating_sub(line.len());
                let piece = piece.unwrap_or_default();
                line.extend_from_slice(piece.get(..room.min(piece.len())).unwrap_or_default());
                rest = after.unwrap_or_default();
                if end.is_none() {
                    continue;
                }
                let hit = Hit::parse(&line);
                let file = hit.as_ref().and_then(|hit| names.iter().position(|name| *name == hit.name));
                if let (Some(hit), Some(file)) = (hit, file) {
                    in_file = if file == last { in_file + 1 } else { 1 };
                    last = file;
                    let shown = batch.get(file).map(|(shown, _)| shown.as_str()).unwrap_or_default();
                    if in_file > HITS_PER_FILE {
                        self.text.push_str(&format!("[{shown} has more matching lines]\n"));
                    } else if self.is_full() {
                        return Ok(false);
                    } else {
                        self.hits += 1;
                        self.text.push_str(&format!("{shown}:{}: {}\n", hit.number, hit.text));
                    }
                }
                line.clear();
            }
        }
    }

    fn finish(self) -> String {
        let mut text = self.text;
        if self.hits == 0 {
            text.push_str("[no matches]\n");
        }
        if self.hits >= HITS_MAX {
            text.push_str(&format!(
                "[{HITS_MAX} matching lines are shown, the most there can be; narrow \"pattern\", \"path\" or \"glob\"]\n"
            ));
        }
        if !self.warnings.is_empty() {
            text.push_str(&format!("[grep says: {}]\n", cut_end(&self.warnings, 500)));
        }
        text
    }
}

/// One line of `grep -H -n`, whose names contain no colon.
struct Hit {
    name: String,
    number: u64,
    text: String,
}

impl Hit {
    fn parse(line: &[u8]) -> Option<Hit> {
        let mut parts = line.splitn(3, |&byte| byte == b':');
        let name = std::str::from_utf8(parts.next()?).ok()?.to_owned();
        let number = std::str::from_utf8(parts.next()?).ok()?.parse().ok()?;
        let text = parts.next()?;
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        Some(Hit { name, number, text: cut_end(&String::from_utf8_lossy(text), HIT_BYTES_MAX) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::limits::Limits;
    use crate::words::scope::Rule;

    fn reader() -> EffectiveScope {
        EffectiveScope { allow: vec![Rule::try_from("/:read".to_owned()).unwrap()], lent: vec![] }
    }

    fn desk(place: &Path) -> FileDesk {
        FileDesk::new(place.canonicalize().unwrap(), vec![], vec![], true, Limits::default())
    }

    fn list(desk: &FileDesk, input: Value) -> String {
        desk.list_files(&reader(), input, &Cancel::new().unwrap()).unwrap()
    }

    fn search(desk: &FileDesk, input: Value) -> String {
        desk.search_files(&reader(), input, &Cancel::new().unwrap()).unwrap()
    }

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        for file in files {
            let path = place.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("this is {file}\n")).unwrap();
        }
        place
    }

    #[test]
    fn lists_what_git_would_not_ignore_by_a_plain_name() {
        let place = tree(&["a/x.rs", "a/target/y.rs", "b.txt", ".git/HEAD", "build/z", "a/build/z", "n/m/k"]);
        std::fs::write(place.path().join(".gitignore"), "target/\n/build\n# k\n*.txt\nn\n!n\n").unwrap();
        std::fs::create_dir(place.path().join("empty")).unwrap();
        let desk = desk(place.path());
        let skipped = "[skipped 3 directories: .git, a/target, build]\n";
        let all = ".gitignore\na/build/z\na/x.rs\nb.txt\nempty/\nn/m/k\n";
        assert_eq!(list(&desk, json!({})), format!("{all}{skipped}"));
        assert_eq!(
            list(&desk, json!({"path": "a", "pattern": "*.rs"})),
            "a/x.rs\n[skipped 1 directories: a/target]\n"
        );
        assert_eq!(list(&desk, json!({"pattern": "a/**"})), format!("a/build/z\na/x.rs\n{skipped}"));
        let absolute = format!("{}/n/**", place.path().canonicalize().unwrap().display());
        assert_eq!(list(&desk, json!({"pattern": absolute})), "n/m/k\n");
        assert_eq!(list(&desk, json!({"path": "a/x.rs"})), "a/x.rs\n");
        assert_eq!(list(&desk, json!({"path": "a/target"})), "a/target/y.rs\n");
        assert_eq!(list(&desk, json!({"pattern": "none"})), format!("[no files]\n{skipped}"));
    }

    #[test]
    fn searches_with_the_words_of_grep() {
        let place = tree(&["a/x.rs", "b.txt"]);
        std::fs::write(place.path().join("latin"), b"caf\xe9 one\r\n-e two\n").unwrap();
        std::fs::write(place.path().join("binary"), b"\0one").unwrap();
        let desk = desk(place.path());
        assert_eq!(
            search(&desk, json!({"pattern": "is (a|b)"})),
            "a/x.rs:1: this is a/x.rs\nb.txt:1: this is b.txt\n[1 binary files were not searched]\n"
        );
        assert_eq!(search(&desk, json!({"pattern": "is", "glob": "*.txt"})), "b.txt:1: this is b.txt\n");
        assert_eq!(search(&desk, json!({"pattern": "one", "path": "latin"})), "latin:1: caf\u{fffd} one\n");
        assert_eq!(search(&desk, json!({"pattern": "-e", "path": "latin"})), "latin:2: -e two\n");
        assert_eq!(search(&desk, json!({"pattern": "(", "plain": true, "path": "a"})), "[no matches]\n");
        let cancel = Cancel::new().unwrap();
        for path in [".", "binary"] {
            let input = json!({"pattern": "(", "path": path});
            let error = desk.search_files(&reader(), input, &cancel).unwrap_err().to_string();
            assert!(error.contains("nmatched"), "{error}");
        }
        let hungry =
            desk.search_files(&reader(), json!({"pattern": "a{1,30000}"}), &cancel).unwrap_err().to_string();
        assert!(hungry.starts_with("cannot search: grep: "), "{hungry}");
        for bad in [json!({"pattern": ""}), json!({"pattern": "a\nb"}), json!({"pattern": "a".repeat(5000)})]
        {
            assert!(desk.search_files(&reader(), bad, &cancel).is_err());
        }
    }

    #[test]
    fn a_cancelled_search_ends() {
        let place = tree(&["a"]);
        let cancel = Cancel::new().unwrap();
        cancel.set();
        let result = desk(place.path()).search_files(&reader(), json!({"pattern": "a"}), &cancel);
        assert!(matches!(result, Err(Error::Cancelled)));
    }

    #[test]
    fn the_schemas_agree_with_the_inputs() {
        let full = [
            json!({"path": "a", "pattern": "b"}),
            json!({"pattern": "a", "path": "b", "glob": "c", "plain": true}),
        ];
        for (spec, sample) in specs().iter().zip(full) {
            let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&spec.input_schema["properties"]), names(&sample), "{}", spec.name);
            match spec.name {
                "ListFiles" => drop(input::parse::<ListInput>("t", &spec.input_schema, sample).unwrap()),
                _ => drop(input::parse::<SearchInput>("t", &spec.input_schema, sample).unwrap()),
            }
        }
    }
}
