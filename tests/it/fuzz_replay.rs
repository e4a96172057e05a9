//! Every input that the fuzzer starts from or has found, on stable: the checks of `fuzz`, without the fuzzer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[path = "../../fuzz/src/lib.rs"]
mod fuzz;

fn kept(folder: &str, name: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(folder).join(name);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_kept_input_holds_and_so_do_beginnings_of_it() {
    for (name, check) in fuzz::CHECKS {
        let seeds = kept("corpus", name);
        assert!(!seeds.is_empty(), "fuzz/corpus/{name} has no seed");
        for path in [seeds, kept("regressions", name)].concat() {
            let bytes = std::fs::read(&path).unwrap();
            let run = || {
                check(&bytes);
                (0..bytes.len()).step_by(1 + bytes.len() / 64).for_each(|end| check(&bytes[..end]));
            };
            assert!(std::panic::catch_unwind(run).is_ok(), "{} fails as an input", path.display());
        }
    }
}

#[test]
fn every_check_has_a_target_and_every_folder_a_check() {
    let names: BTreeSet<String> = fuzz::CHECKS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let stems = |folder: &str| -> BTreeSet<String> {
        let files = kept(folder, "").into_iter();
        files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
    };
    assert_eq!(stems("src/bin"), names);
    assert_eq!(stems("corpus"), names);
    assert!(stems("regressions").is_subset(&names) && stems("dictionaries").is_subset(&names));
}
