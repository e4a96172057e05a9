//! `ListFiles` and `SearchFiles`: a walk, and the system's `grep` over what it found.
//!
//! `grep` is given the opened files by their descriptors, never names that could lead elsewhere by then.
//! Runs on the turn thread.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::sys::process::{ErrorOutput, Program, own_pid};
use crate::sys::wait::Cancel;
use crate::tools::glob::{Glob, MAX_PATTERN_BYTES};
use crate::tools::page::SNIFF_BYTES;
use crate::tools::place::FileCall;
use crate::tools::walk::{Each, Skipped, UNREADABLE, Walk};
use crate::words::error::{Error, Result};
use crate::words::text::{cut_end, harmless_line};

/// Paths in one answer of `ListFiles`.
pub(crate) const PATHS_MAX: usize = 1000;
/// Larger files are not searched.
pub(crate) const SEARCH_BYTES_MAX: u64 = 16 << 20;
/// Files given to one `grep`, all open at once: a fraction of the usual limit of 1,024 descriptors.
const BATCH: usize = 128;
/// Matching lines shown of one file, and in all.
pub(crate) const HITS_PER_FILE: usize = 20;
pub(crate) const HITS_MAX: usize = 500;
/// Of a longer matching line only the beginning is shown.
const HIT_BYTES_MAX: usize = 300;
/// One search is over after this time: some expressions take `grep` for ever.
const SEARCH_TIME_MAX: Duration = Duration::from_secs(60);

/// Starts `grep` with at most 512 MiB of memory (setrlimit(2), in KiB): a short expression such as `a{1,30000}` asks
/// for several GiB. A shell without this limit goes on without it. Of each line the name, the number and a little
/// more than is shown come through; the last one is the exit code of `grep`.
const BOUNDED_GREP: &str = "ulimit -v 524288 2>/dev/null; { grep \"$@\"; echo $?; } | cut -b 1-400";
const OUTPUT_BYTES_MAX: usize = BATCH * (HITS_PER_FILE + 2) * 401;

impl FileCall<'_> {
    /// `ListFiles`: the paths below a directory, sorted, and what was skipped.
    ///
    /// # Errors
    /// When the place is not there or may not be read.
    pub fn list_files(&self, path: Option<String>, pattern: Option<String>) -> Result<String> {
        let mut paths: Vec<String> = Vec::new();
        let skipped = self.walk_from(path, pattern, &mut |step, _| {
            paths.push(step.shown);
            Ok(paths.len() <= PATHS_MAX)
        })?;
        let is_cut = paths.len() > PATHS_MAX;
        paths.truncate(PATHS_MAX);
        paths.sort();
        let mut text = if paths.is_empty() { "[no files]".to_owned() } else { paths.join("\n") } + "\n";
        if is_cut {
            text +=
                &format!("[only the first {PATHS_MAX} paths are listed; narrow \"path\" or \"pattern\"]\n");
        }
        skipped.say(&mut text);
        Ok(text)
    }

    /// `SearchFiles`: the lines that match, as `grep` finds them.
    ///
    /// # Errors
    /// When the pattern is none, the place is not there or may not be read, `grep` is missing, or it does not
    /// understand the expression; then in its own words.
    pub fn search_files(
        &self,
        pattern: &str,
        path: Option<String>,
        glob: Option<String>,
        plain: bool,
    ) -> Result<String> {
        if pattern.is_empty() || pattern.contains(['\n', '\0']) || pattern.len() > MAX_PATTERN_BYTES {
            return Err(Error::told(format!(
                "SearchFiles: \"pattern\" must have 1 to {MAX_PATTERN_BYTES} bytes and no line break or NUL; lines are searched one by one"
            )));
        }
        let kind = if plain { "-F" } else { "-E" };
        let deadline = Instant::now() + SEARCH_TIME_MAX;
        let mut search =
            Search { pattern, kind, cancel: self.cancel, deadline, text: String::new(), hits: 0 };
        let mut batch: Vec<(String, File)> = Vec::new();
        let skipped = self.walk_from(path, glob, &mut |step, skipped| {
            match step.open(self).and_then(|open| searchable(open, skipped)) {
                Ok(open) => batch.extend(open.map(|open| (step.shown, open))),
                Err(_) => skipped.count(UNREADABLE),
            }
            if batch.len() == BATCH {
                search.run(&batch)?;
                batch.clear();
            }
            Ok(search.hits < HITS_MAX)
        })?;
        if search.hits < HITS_MAX {
            search.run(&batch)?; // without any file it still judges the expression
        }
        let mut text = search.text;
        if search.hits == 0 {
            text += "[no matches]\n";
        } else if search.hits == HITS_MAX {
            text += &format!(
                "[{HITS_MAX} matching lines are shown, the most there can be; narrow \"pattern\", \"path\" or \"glob\"]\n"
            );
        }
        skipped.say(&mut text);
        Ok(text)
    }

    /// Walks from `path`, the pod's directory by default. A pattern that begins with `/` names its own start.
    fn walk_from(
        &self,
        path: Option<String>,
        pattern: Option<String>,
        each: &mut Each<'_>,
    ) -> Result<Skipped> {
        let absolute = pattern.as_deref().filter(|pattern| pattern.starts_with('/')).map(split_absolute);
        let (path, pattern) = match &absolute {
            Some((start, rest)) => (start.as_str(), Some(rest.as_str())),
            None => (path.as_deref().unwrap_or("."), pattern.as_deref()),
        };
        let glob = pattern.map(Glob::new).transpose()?;
        let found = self.desk.find(path)?;
        found.attempt("list", || Walk::run(self, &found, glob, each))
    }
}

/// Where a pattern that begins with `/` starts: its names before the first with a star, question mark or bracket;
/// and the rest, relative to there.
pub fn split_absolute(pattern: &str) -> (String, String) {
    let wild = pattern.find(['*', '?', '[']).unwrap_or(pattern.len());
    let end = pattern.get(..wild).and_then(|plain| plain.rfind('/')).unwrap_or(0);
    let (start, rest) = pattern.split_at(end);
    (format!("{start}/"), format!(".{rest}")) // matched as a whole path, also when it is one name
}

/// An opened file, if it is worth searching.
fn searchable(open: Option<File>, skipped: &mut Skipped) -> io::Result<Option<File>> {
    let Some(open) = open else { return Ok(None) };
    let mut head = vec![0; SNIFF_BYTES];
    let count = open.read_at(&mut head, 0)?;
    if open.metadata()?.len() > SEARCH_BYTES_MAX {
        skipped.count("files over 16 MiB were not searched");
    } else if head.iter().take(count).any(|&byte| byte == 0) {
        skipped.count("binary files were not searched");
    } else {
        return Ok(Some(open));
    }
    Ok(None)
}

/// The answers of one or more runs of `grep`.
struct Search<'a> {
    pattern: &'a str,
    kind: &'static str,
    cancel: &'a Cancel,
    deadline: Instant,
    text: String,
    hits: usize,
}

impl Search<'_> {
    fn run(&mut self, batch: &[(String, File)]) -> Result<()> {
        let (output, words) = match self.grep(batch) {
            Err(_) if self.cancel.is_set() => return Err(Error::Cancelled),
            answer => answer
                .map_err(|error| Error::io("search; try a simpler pattern or a narrower \"path\"", error))?,
        };
        let mut lines: Vec<&str> = output.lines().collect();
        let code = lines.pop().unwrap_or_default();
        if !matches!(code, "0" | "1") && lines.is_empty() && self.hits == 0 {
            return Err(Error::told(format!("cannot search: {} (exit code {code})", harmless_line(&words))));
        }
        let warning = format!("[grep says: {}]\n", cut_end(&harmless_line(&words), 500));
        if !words.is_empty() && !self.text.contains(&warning) {
            self.text += &warning;
        }
        let prefix = batch_prefix();
        let (mut last, mut in_file) = ("", 0); // the file of the hit before, and its hits
        for line in lines {
            let mut parts = line.strip_prefix(&prefix).unwrap_or_default().splitn(3, ':');
            let (Some(fd), Some(number), Some(text)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            let of_file = |(_, open): &&(String, File)| fd.parse() == Ok(open.as_raw_fd());
            let Some((shown, _)) = batch.iter().find(of_file) else { continue };
            in_file = if fd == last { in_file + 1 } else { 1 };
            last = fd;
            if in_file > HITS_PER_FILE {
                self.text.push_str(&format!("[{shown} has more matching lines]\n"));
            } else if self.hits == HITS_MAX {
                break;
            } else {
                self.hits += 1;
                self.text.push_str(&format!("{shown}:{number}: {}\n", cut_end(text, HIT_BYTES_MAX)));
            }
        }
        Ok(())
    }

    /// Lets `grep` search these files: what it found, and what it said besides.
    fn grep(&self, batch: &[(String, File)]) -> io::Result<(String, String)> {
        let most = (HITS_PER_FILE + 1).to_string();
        // Files were looked at already, so all are text (-a): one byte that is not UTF-8 must not hide a file.
        let options =
            ["-c", BOUNDED_GREP, "sh", "-a", "-H", "-n", self.kind, "-m", &most, "-e", self.pattern, "--"];
        let names = batch.iter().map(|(_, open)| format!("{}{}", batch_prefix(), open.as_raw_fd()));
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
        let environment = [("PATH".into(), path), ("LC_ALL".into(), "C.UTF-8".into())];
        let mut grep = Program::new("sh", options.map(str::to_owned).into_iter().chain(names))
            .only_env(environment)
            .start(ErrorOutput::Separate)?;
        let output = grep.read_to_end(OUTPUT_BYTES_MAX, Some(self.cancel), self.deadline)?;
        grep.wait(self.deadline)?;
        Ok((String::from_utf8_lossy(&output).into_owned(), grep.error_text(2000)))
    }
}

/// What stands before the number of a descriptor in the name by which `grep` opens it.
fn batch_prefix() -> String {
    format!("/proc/{}/fd/", own_pid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::input::{self, Input};
    use crate::tools::place::FileDesk;
    use crate::tools::specs;
    use crate::words::limits::Limits;
    use crate::words::scope::{EffectiveScope, Rule};
    use serde_json::{Value, json};
    use std::path::Path;

    fn reader() -> EffectiveScope {
        EffectiveScope { allow: vec![Rule::try_from("/:read".to_owned()).unwrap()], lent: vec![] }
    }

    fn desk(place: &Path) -> FileDesk {
        FileDesk { directory: place.canonicalize().unwrap(), protect_git: true, ..FileDesk::default() }
    }

    fn run(desk: &mut FileDesk, tool: &str, input: Value, cancel: &Cancel) -> Result<String> {
        let specs = specs::all(&Limits::default(), None);
        let spec = specs.iter().find(|spec| spec.name == tool).unwrap();
        let call = FileCall { desk, scope: reader(), cancel };
        let input = input::parse(spec, &input).unwrap();
        if let Input::ListFiles { path, pattern } = input {
            return call.list_files(path, pattern);
        }
        let Input::SearchFiles { pattern, path, glob, plain } = input else { panic!("{input:?}") };
        call.search_files(&pattern, path, glob, plain == Some(true))
    }

    fn list(desk: &mut FileDesk, input: Value) -> String {
        run(desk, "ListFiles", input, &Cancel::new().unwrap()).unwrap()
    }

    fn search(desk: &mut FileDesk, input: Value) -> String {
        run(desk, "SearchFiles", input, &Cancel::new().unwrap()).unwrap()
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
        let mut desk = desk(place.path());
        let skipped = "[skipped 3 directories: .git, a/target, build]\n";
        let all = ".gitignore\na/build/z\na/x.rs\nb.txt\nempty/\nn/m/k\n";
        assert_eq!(list(&mut desk, json!({})), format!("{all}{skipped}"));
        assert_eq!(
            list(&mut desk, json!({"path": "a", "pattern": "*.rs"})),
            "a/x.rs\n[skipped 1 directories: a/target]\n"
        );
        assert_eq!(list(&mut desk, json!({"pattern": "a/**"})), format!("a/build/z\na/x.rs\n{skipped}"));
        let absolute = format!("{}/n/**", place.path().canonicalize().unwrap().display());
        assert_eq!(list(&mut desk, json!({"pattern": absolute})), "n/m/k\n");
        assert_eq!(list(&mut desk, json!({"path": "a/x.rs"})), "a/x.rs\n");
        assert_eq!(list(&mut desk, json!({"path": "a/target"})), "a/target/y.rs\n");
        assert_eq!(list(&mut desk, json!({"pattern": "none"})), format!("[no files]\n{skipped}"));
    }

    #[test]
    fn searches_with_the_words_of_grep() {
        let place = tree(&["a/x.rs", "b.txt"]);
        std::fs::write(place.path().join("latin"), b"caf\xe9 one\r\n-e two\n").unwrap();
        std::fs::write(place.path().join("binary"), b"\0one").unwrap();
        let mut desk = desk(place.path());
        assert_eq!(
            search(&mut desk, json!({"pattern": "is (a|b)"})),
            "a/x.rs:1: this is a/x.rs\nb.txt:1: this is b.txt\n[1 binary files were not searched]\n"
        );
        assert_eq!(search(&mut desk, json!({"pattern": "is", "glob": "*.txt"})), "b.txt:1: this is b.txt\n");
        assert_eq!(
            search(&mut desk, json!({"pattern": "one", "path": "latin"})),
            "latin:1: caf\u{fffd} one\n"
        );
        assert_eq!(search(&mut desk, json!({"pattern": "-e", "path": "latin"})), "latin:2: -e two\n");
        assert_eq!(search(&mut desk, json!({"pattern": "(", "plain": true, "path": "a"})), "[no matches]\n");
        let cancel = Cancel::new().unwrap();
        for path in [".", "binary"] {
            let input = json!({"pattern": "(", "path": path});
            let error = run(&mut desk, "SearchFiles", input, &cancel).unwrap_err().to_string();
            assert!(error.contains("nmatched"), "{error}");
        }
        let hungry =
            run(&mut desk, "SearchFiles", json!({"pattern": "a{1,30000}"}), &cancel).unwrap_err().to_string();
        assert!(hungry.starts_with("cannot search: grep: "), "{hungry}");
        for bad in [json!({"pattern": ""}), json!({"pattern": "a\nb"}), json!({"pattern": "a".repeat(5000)})]
        {
            assert!(run(&mut desk, "SearchFiles", bad, &cancel).is_err());
        }
    }

    #[test]
    fn a_cancelled_search_ends() {
        let place = tree(&["a"]);
        let cancel = Cancel::new().unwrap();
        cancel.set();
        let result = run(&mut desk(place.path()), "SearchFiles", json!({"pattern": "a"}), &cancel);
        assert!(matches!(result, Err(Error::Cancelled)));
    }
}
