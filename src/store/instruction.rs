//! The instruction text of a pod: who it is, what it may do, and what its person wrote.

use std::path::Path;

use crate::store::paths::nearest_upward;
use crate::sys::file::read_regular;
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
///
/// # Errors
/// When there is no such text; the sentence names the file that was looked for.
pub fn resolve(name: &str, config: &Path, directory: &Path) -> Result<String> {
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
        read(&file_of(config, name)?)?
    } else if let Some(name) = name.strip_prefix("$project/") {
        let project = nearest_upward(directory, ".insomnia").ok_or_else(|| {
            Error::told(format!(
                "instruction \"$project/{name}\" needs a directory .insomnia in \"{}\" or above",
                directory.display()
            ))
        })?;
        read(&file_of(&project.join(".insomnia"), name)?)?
    } else {
        read(&directory.join(name))?
    };
    if let Some(project) = nearest_upward(directory, "AGENTS.md") {
        match read_regular(&project.join("AGENTS.md"), INSTRUCTION_BYTES_MAX) {
            Ok(agents) => {
                let cut = cut_end(&agents, AGENTS_BYTES_MAX);
                text.push_str("\n\n# The project's AGENTS.md\n\n");
                text.push_str(&cut);
                if cut.len() < agents.len() {
                    text.push_str(&format!("\n(AGENTS.md was cut at {AGENTS_BYTES_MAX} bytes)"));
                }
            }
            Err(error) => log::warn!("cannot read AGENTS.md in \"{}\": {error}", project.display()), // it is optional
        }
    }
    Ok(text)
}

fn read(path: &Path) -> Result<String> {
    read_regular(path, INSTRUCTION_BYTES_MAX)
        .map_err(|source| Error::io(format!("read instruction \"{}\"", path.display()), source))
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
            let text = resolve(name, &config, &project).unwrap();
            assert!(text.contains(expected), "{name}: {text}");
        };
        check("$user/mine", "user text");
        check("$project/ours", "project text");
        check("own.md", "path text");
        check("$insomnia/default", "SpawnPod");
        std::fs::write(project.join("AGENTS.md"), "z".repeat(AGENTS_BYTES_MAX + 1)).unwrap();
        check("$user/mine", "was cut at");
        for bad in ["$insomnia/none", "$user/none", "$user/../x", "$user/", "none.md"] {
            assert!(resolve(bad, &config, &project).is_err(), "{bad}");
        }
    }
}
