//! The floors hold: a module uses only what lies below it, and only `sys` names the system's own crates.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const FLOORS: [&str; 7] = ["words", "sys", "store", "wire", "tools", "heart", "doors"];

fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

fn floor_of(path: &Path) -> Option<usize> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let first = path.strip_prefix(src).unwrap().iter().next()?.to_str()?.to_owned();
    FLOORS.iter().position(|floor| *floor == first)
}

/// The code of a file without its comments and without the tests at its foot.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let above = text.split("#[cfg(test)]").next().unwrap_or_default();
    above.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

fn modules() -> Vec<(PathBuf, usize)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files: Vec<_> =
        sources(&src).into_iter().filter_map(|path| Some((path.clone(), floor_of(&path)?))).collect();
    assert!(files.len() > 30, "the test must see the sources");
    files
}

#[test]
fn arrows_point_downward() {
    for (path, floor) in modules() {
        let text = code(&path);
        for (at, _) in text.match_indices("crate::") {
            let used: String =
                text[at + 7..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let Some(below) = FLOORS.iter().position(|known| *known == used) else {
                panic!("{}: crate::{used} is no floor", path.display());
            };
            assert!(below <= floor, "{} uses the floor {used} above it", path.display());
        }
    }
}

#[test]
fn only_the_system_floor_names_the_systems_crates() {
    for (path, floor) in modules() {
        let text = code(&path).replace("unix::", "");
        for name in ["nix::", "signal_hook", "process::Command", "unsafe "] {
            assert!(FLOORS[floor] == "sys" || !text.contains(name), "{} names {name}", path.display());
        }
    }
}

#[test]
fn the_words_are_pure() {
    for (path, floor) in modules() {
        if FLOORS[floor] != "words" {
            continue;
        }
        let text = code(&path);
        for name in
            ["std::fs", "std::env", "std::thread", "std::net", "std::os", "SystemTime", "Instant", "log::"]
        {
            assert!(!text.contains(name), "{} names {name}", path.display());
        }
    }
}

#[test]
fn the_floor_plan_declares_every_module() {
    let plan = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let mut last = 0;
    for floor in FLOORS {
        let at = plan.find(&format!("pub mod {floor} {{")).unwrap_or_else(|| panic!("no floor {floor}"));
        assert!(at > last, "{floor} stands above what it lies on");
        last = at;
    }
    for (path, _) in modules() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let is_nested = ["provider", "tui"].iter().any(|noun| path.parent().unwrap().ends_with(noun));
        assert!(is_nested || plan.contains(&format!(" mod {name};")), "{name} is not in the floor plan");
    }
}

#[test]
fn the_default_build_has_eight_direct_dependencies_and_at_most_thirty_crates() {
    let manifest = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).unwrap();
    let section = manifest.split("\n[dependencies]\n").nth(1).unwrap().split("\n[").next().unwrap();
    let is_optional = |line: &&str| !line.contains("optional = true");
    let mut names: Vec<&str> = section
        .lines()
        .filter(|line| line.contains(" = "))
        .filter(is_optional)
        .filter_map(|line| line.split(' ').next())
        .collect();
    names.sort_unstable();
    let expected =
        ["crossbeam-channel", "env_logger", "lexopt", "log", "nix", "serde", "serde_json", "signal-hook"];
    assert_eq!(names, expected);
    let crates = dependencies("normal,build", "{p}");
    assert!(crates.len() > 8 && crates.len() <= 30, "{} crates: {crates:?}", crates.len());
}

/// Each part of a licence joined by AND must leave a choice that asks for no more than its text to be kept.
#[test]
fn every_dependency_may_be_passed_on_under_our_licences() {
    const FREE: [&str; 3] = ["MIT", "Apache-2.0", "Unicode-3.0"];
    let crates = dependencies("normal,build,dev", "{l}; {p}");
    assert!(crates.len() > 30, "{} crates: {crates:?}", crates.len());
    for line in crates {
        let licence = line.split(';').next().unwrap().replace('/', " OR ").replace(['(', ')'], "");
        let is_free = |part: &str| part.split(" OR ").any(|choice| FREE.contains(&choice));
        assert!(licence.split(" AND ").all(is_free), "{line}");
    }
}

/// What the default build depends on by these edges, a line in this form for each crate.
fn dependencies(edges: &str, form: &str) -> BTreeSet<String> {
    let tree = insomnia::sys::process::Program::new(
        env!("CARGO"),
        ["tree", "--edges", edges, "--prefix", "none", "--no-dedupe", "--offline", "--format", form],
    );
    let ran = crate::world::ran(tree.directory(Path::new(env!("CARGO_MANIFEST_DIR"))));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    ran.stdout.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
}

fn document(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn every_test_that_a_document_names_exists() {
    for (name, least) in [("ARCHITECTURE.md", 10), ("SECURITY.md", 20)] {
        let text = document(name);
        let named = text.lines().filter(|line| line.starts_with('|')).flat_map(quoted);
        let tests: Vec<&str> = named.filter(|text| text.contains("::")).collect();
        assert!(tests.len() >= least, "{name} names {tests:?}");
        for test in tests {
            assert!(crate::cases::is_a_test(test), "{name}: there is no test {test}");
        }
    }
}

#[test]
fn the_auditors_page_names_every_place_that_matters() {
    let places = [
        (
            "starts a process",
            vec!["Program::new(", "start_self(", "start_own_image(", "Command::new(", "run_in_child("],
        ),
        ("kills a process", vec!["kill(NixPid", "kill(Pid", "kill_exactly(", "pidfd_send_signal"]),
        ("mounts", vec![" mount(", "put_mount(", "set_mount("]),
        (
            "opens a socket",
            vec!["socket::listen(", "socket::connect(", "UnixStream::pair(", "UnixListener::bind("],
        ),
        (
            "creates, changes or removes files",
            vec![
                "file::write_complete",
                "file::replace_at",
                "file::create_at",
                "file::make_directory_at",
                "file::remove_at",
                "file::rename_at",
                "file::rename_new_at",
                "file::link_at",
                "File::options()",
                "fs::write(",
                "fs::create_dir",
                "fs::remove_",
                "fs::rename(",
                "DirBuilder::new()",
                "set_len(",
                "renameat2(",
                "unlinkat(",
                "mkdirat(",
                "linkat(",
            ],
        ),
        ("is unsafe", vec!["unsafe {"]),
    ];
    let page = document("SECURITY.md");
    for (what, marks) in places {
        let row = page.lines().find(|line| line.starts_with(&format!("| {what} |")));
        let told: BTreeSet<String> = quoted(row.unwrap_or_default()).map(str::to_owned).collect();
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let does = |path: &PathBuf| marks.iter().any(|mark| code(path).contains(mark));
        let found: BTreeSet<String> = modules()
            .into_iter()
            .map(|(path, _)| path)
            .filter(does)
            .map(|path| path.strip_prefix(&src).unwrap().to_str().unwrap().to_owned())
            .collect();
        assert_eq!(told, found, "SECURITY.md, row \"{what}\"");
    }
}

#[test]
fn the_auditors_page_tells_the_size_of_each_floor() {
    let page = document("SECURITY.md");
    let mut lines = [0; FLOORS.len()];
    for (path, floor) in modules().into_iter().filter(|(path, _)| !path.to_str().unwrap().contains("/tui")) {
        lines[floor] += code(&path).lines().filter(|line| !line.trim().is_empty()).count();
    }
    let all = lines.iter().sum();
    for (name, count) in FLOORS.into_iter().zip(lines).chain([("all", all)]) {
        let row = page.lines().find_map(|line| line.strip_prefix(&format!("| {name} | ")));
        let told: usize = row.unwrap().trim_end_matches(" |").replace(',', "").parse().unwrap();
        assert!(told.abs_diff(count) * 20 <= count, "{name} has {count} lines, SECURITY.md says {told}");
    }
}
