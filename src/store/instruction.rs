//! The instruction text of a pod: who it is, what it may do, and what its person wrote.

use std::io;
use std::path::{Path, PathBuf};

use crate::store::paths::nearest_upward;
use crate::sys::file::{self, Stamp};
use crate::words::error::{Error, Result};
use crate::words::text::cut_end;

/// `AGENTS.md` is cut at this length, in bytes.
const AGENTS_BYTES_MAX: usize = 32 << 10;
/// Any other instruction is refused beyond this length, in bytes.
const INSTRUCTION_BYTES_MAX: usize = 1 << 20;

const DEFAULT: &str = include_str!("default_instruction.md");

/// Resolves an instruction name to its text and appends the project's `AGENTS.md`.
///
/// `$insomnia/NAME` is built in, `$user/NAME` is `instructions/NAME.md` beside the user's manifest,
/// `$project/NAME` is `.insomnia/instructions/NAME.md` of the nearest project upward; anything else is a path.
/// Nothing `hidden` is read, by whatever name; why `AGENTS.md` is left out goes to `warnings`, as it is optional.
///
/// # Errors
/// When there is no such text or it is refused; the sentence names the file that was looked for.
pub fn resolve(
    name: &str,
    config: &Path,
    directory: &Path,
    hidden: &[PathBuf],
    warnings: &mut Vec<String>,
) -> Result<String> {
    let shared = config.join("instructions");
    let shared = shared.canonicalize().unwrap_or(shared);
    let read = |path: &Path, project: Option<&Path>| {
        let real_project = project.map(Path::canonicalize).transpose();
        let text = real_project.and_then(|project| read(path, project.as_deref(), hidden, &shared));
        text.map_err(Error::on("read instruction", path))
    };
    let file_of = |base: &Path, name: &str| {
        if name.is_empty() || name.starts_with('/') || name.contains("..") {
            return Err(Error::told(format!("instruction \"{name}\" is no name of a file")));
        }
        Ok(base.join("instructions").join(format!("{name}.md")))
    };
    let mut text = if let Some(name) = name.strip_prefix("$insomnia/") {
        match name {
            "default" => DEFAULT.to_owned(),
            other => {
                return Err(Error::told(format!(
                    "there is no built-in instruction \"{other}\"; there is \"default\""
                )));
            }
        }
    } else if let Some(name) = name.strip_prefix("$user/") {
        read(&file_of(config, name)?, None)?
    } else if let Some(name) = name.strip_prefix("$project/") {
        let project = nearest_upward(directory, ".insomnia").ok_or_else(|| {
            Error::told(format!(
                "instruction \"$project/{name}\" needs a directory .insomnia in \"{}\" or above",
                directory.display()
            ))
        })?;
        read(&file_of(&project.join(".insomnia"), name)?, Some(&project))?
    } else {
        read(&directory.join(name), None)?
    };
    if let Some(project) = nearest_upward(directory, "AGENTS.md") {
        match read(&project.join("AGENTS.md"), Some(&project)) {
            Ok(agents) => {
                let cut = cut_end(&agents, AGENTS_BYTES_MAX);
                text.push_str("\n\n# The project's AGENTS.md\n\n");
                text.push_str(&cut);
                if cut.len() < agents.len() {
                    text.push_str(&format!("\n(AGENTS.md was cut at {AGENTS_BYTES_MAX} bytes)"));
                }
            }
            Err(error) => warnings.push(error.to_string()),
        }
    }
    Ok(text)
}

/// Reads what `path` leads to, judged by what was really opened. A file of a project must lie in it and belong to
/// this user or root; of what is hidden only the `shared` directory may be read.
fn read(path: &Path, project: Option<&Path>, hidden: &[PathBuf], shared: &Path) -> io::Result<String> {
    let entry = file::open_target(path)?;
    let real = file::real_path(&entry)?;
    let refuse = |reason: &str| {
        let reason = format!("it is really \"{}\", {reason}", real.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
    };
    if let Some(project) = project {
        file::refuse_strangers(&entry)?;
        if !real.starts_with(project) {
            return refuse("outside the project");
        }
    }
    let this = Stamp::of(&entry.metadata()?);
    let is_hidden = |hidden: &PathBuf| {
        real.starts_with(hidden) && !(real.starts_with(shared) && shared.starts_with(hidden))
            || hidden.metadata().is_ok_and(|hidden| Stamp::of(&hidden).same_file(&this))
    };
    if hidden.iter().any(is_hidden) {
        return refuse("which no model may read");
    }
    file::read_entry(&entry, INSTRUCTION_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_name_is_found_and_agents_is_appended() {
        let place = tempfile::tempdir().unwrap();
        let (config, project) = (place.path().join("config"), place.path().join("p"));
        for (path, text) in [
            (config.join("instructions/mine.md"), "user text"),
            (project.join(".insomnia/instructions/ours.md"), "project text"),
            (project.join("own.md"), "path text"),
        ] {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let check = |name: &str, expected: &str| {
            let text = resolve(name, &config, &project, &[], &mut Vec::new()).unwrap();
            assert!(text.contains(expected), "{name}: {text}");
        };
        check("$user/mine", "user text");
        check("$project/ours", "project text");
        check("own.md", "path text");
        check("$insomnia/default", "SpawnPod");
        std::fs::write(project.join("AGENTS.md"), "z".repeat(AGENTS_BYTES_MAX + 1)).unwrap();
        check("$user/mine", "was cut at");
        for bad in ["$insomnia/none", "$user/none", "$user/../x", "$user/", "none.md"] {
            assert!(resolve(bad, &config, &project, &[], &mut Vec::new()).is_err(), "{bad}");
        }
    }

    #[test]
    fn r05_no_name_of_an_instruction_leads_to_a_key_or_out_of_the_project() {
        use std::os::unix::fs::symlink;
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        let (config, project) = (root.join("config"), root.join("p"));
        let (shared, ours) = (config.join("instructions"), project.join(".insomnia/instructions"));
        std::fs::create_dir_all(&shared).unwrap();
        std::fs::create_dir_all(&ours).unwrap();
        for file in ["config/key", "config/instructions/key.md", "config/instructions/good.md", "outside.md"]
        {
            std::fs::write(root.join(file), "secret").unwrap();
        }
        let hidden = [config.clone(), shared.join("key.md")];
        let resolve = |name: &str| {
            let mut warnings = Vec::new();
            let text = resolve(name, &config, &project, &hidden, &mut warnings);
            text.map(|text| (text, warnings)).map_err(|error| error.to_string())
        };
        for (target, reason) in [
            (Path::new("/proc/self/environ"), "view of the kernel"),
            (&config.join("key"), "no model may read"),
            (&shared.join("key.md"), "no model may read"),
            (&root.join("outside.md"), ""),
        ] {
            for link in [shared.join("x.md"), ours.join("x.md"), project.join("AGENTS.md")] {
                let _ = std::fs::remove_file(&link);
                symlink(target, &link).unwrap();
            }
            for name in ["$user/x", target.to_str().unwrap(), "AGENTS.md"] {
                match resolve(name) {
                    Ok((text, _)) => assert!(reason.is_empty() && text == "secret", "{name}: {text}"),
                    Err(error) => assert!(!reason.is_empty() && error.contains(reason), "{name}: {error}"),
                }
            }
            let error = resolve("$project/x").unwrap_err();
            assert!(error.contains("outside the project") && error.contains("x.md"), "{error}");
            let (text, warnings) = resolve("$user/good").unwrap();
            assert_eq!(text, "secret");
            assert!(warnings.len() == 1 && warnings[0].contains("outside the project"), "{warnings:?}");
        }
        // What lies in the project may be linked there, also under a second name of the key itself.
        std::fs::write(project.join("CLAUDE.md"), "inside").unwrap();
        std::fs::hard_link(shared.join("key.md"), project.join("hard.md")).unwrap();
        for (target, is_read) in [("CLAUDE.md", true), ("hard.md", false)] {
            std::fs::remove_file(project.join("AGENTS.md")).unwrap();
            symlink(target, project.join("AGENTS.md")).unwrap();
            let (text, warnings) = resolve("$user/good").unwrap();
            assert_eq!((text.ends_with("inside"), warnings.is_empty()), (is_read, is_read), "{text}");
        }
    }
}
