//! Where Insomnia keeps its files, and what a path that somebody wrote really means.
//!
//! The choice of directories is a function of the environment that it is given; everything else looks at the
//! disk. Any thread may call it.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use crate::sys::file::Stamp;
use crate::sys::{file, process, socket};
use crate::words::error::{Error, Result};
use crate::words::identity::PodId;
use crate::words::limits::MAX_RULES;
use crate::words::scope::Rule;
use crate::words::text::escape_name;

/// The socket in the folder of a pod.
pub(crate) const SOCKET_NAME: &str = "sock";

/// Links followed in one path before it is called a circle, as the kernel does (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// The three directories of Insomnia and the person's home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directories {
    /// Holds `scope.lock`, sockets and life files.
    pub runtime: PathBuf,
    /// Why the runtime directory is this one.
    pub runtime_reason: &'static str,
    /// Holds a folder for each pod run.
    pub state: PathBuf,
    /// Holds the user's manifest and instructions.
    pub config: PathBuf,
    /// The person's home.
    pub home: PathBuf,
}

impl Directories {
    /// The directories by the environment of this process.
    ///
    /// # Errors
    /// When neither `HOME` nor the XDG variables say where state belongs.
    pub fn from_environment() -> Result<Directories> {
        let run_user = PathBuf::from(format!("/run/user/{}", process::own_uid()));
        Directories::choose(&|name| std::env::var_os(name), process::own_uid(), run_user.is_dir())
    }

    /// The directories by these variables. `has_run_user` says whether `/run/user/UID` exists.
    ///
    /// # Errors
    /// When neither `HOME` nor the XDG variables say where state belongs, or our own variable is a relative path.
    pub fn choose(
        variable: &dyn Fn(&str) -> Option<OsString>,
        uid: u32,
        has_run_user: bool,
    ) -> Result<Directories> {
        // A relative path in these variables is to be ignored (XDG Base Directory Specification).
        let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        // One's own variable is not ignored: another directory would be another world, with other locks.
        let own = variable("INSOMNIA_RUNTIME_DIR").filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(path) = own.as_ref().filter(|path| !path.is_absolute()) {
            let path = escape_name(path.as_os_str().as_encoded_bytes());
            return Err(Error::told(format!(
                "INSOMNIA_RUNTIME_DIR is \"{path}\"; set it to an absolute path, or unset it"
            )));
        }
        let (runtime, runtime_reason) = if let Some(path) = own {
            (path, "INSOMNIA_RUNTIME_DIR is set")
        } else if let Some(path) = absolute("XDG_RUNTIME_DIR") {
            (path.join("insomnia"), "XDG_RUNTIME_DIR is set")
        } else if has_run_user {
            (PathBuf::from(format!("/run/user/{uid}/insomnia")), "/run/user/UID exists")
        } else {
            (
                PathBuf::from(format!("/tmp/insomnia-{uid}")),
                "there is no other place; it may be cleaned by age",
            )
        };
        let home = absolute("HOME");
        let below = |variable: &str, rest: &str| {
            let base = absolute(variable).or_else(|| home.as_ref().map(|home| home.join(rest)));
            base.map(|base| base.join("insomnia")).ok_or_else(|| {
                Error::told(format!(
                    "neither HOME nor {variable} is set to an absolute path; set one of them"
                ))
            })
        };
        Ok(Directories {
            runtime,
            runtime_reason,
            state: below("XDG_STATE_HOME", ".local/state")?,
            config: below("XDG_CONFIG_HOME", ".config")?,
            home: home.unwrap_or_else(|| PathBuf::from("/")),
        })
    }

    /// The socket of a pod.
    ///
    /// # Errors
    /// When the path is longer than a socket's path may be; it is never shortened.
    pub fn socket(&self, pod_id: &PodId) -> Result<PathBuf> {
        let path = self.runtime.join(pod_id.as_str()).join(SOCKET_NAME);
        let length = path.as_os_str().len();
        if length > socket::MAX_PATH_BYTES {
            return Err(Error::told(format!(
                "socket path \"{}\" has {length} bytes, at most {} are possible; use a shorter name or set INSOMNIA_RUNTIME_DIR to a shorter path",
                path.display(),
                socket::MAX_PATH_BYTES
            )));
        }
        Ok(path)
    }

    /// What neither models nor their commands may look into: these directories, and the file with the key.
    pub fn hidden(&self, key_file: Option<&PathBuf>) -> Vec<PathBuf> {
        let own = [&self.runtime, &self.state, &self.config].into_iter().chain(key_file);
        own.map(|path| path.canonicalize().unwrap_or_else(|_| path.clone())).collect()
    }

    /// Checks that a write rule keeps away from Insomnia's own directories, the root and the home itself.
    ///
    /// # Errors
    /// With the directory that is in the way.
    pub fn check_scope(&self, rule: &Rule) -> Result<()> {
        if !rule.writes() {
            return Ok(());
        }
        let refuse = |reason: String| {
            Err(Error::told(format!("write scope \"{}\" is refused: {reason}", rule.path())))
        };
        let home = canonical(&self.home, Path::new("/")).unwrap_or_else(|_| self.home.clone());
        if rule.path() == "/" || Path::new(rule.path()) == home {
            return refuse("it is the root or the home directory itself; give a directory below it".into());
        }
        for own in [&self.runtime, &self.state, &self.config] {
            let own = canonical(own, Path::new("/")).unwrap_or_else(|_| own.clone());
            let own = own.to_string_lossy();
            let meets = rule.covers(&own) || crate::words::scope::is_within(rule.path(), &own);
            if meets {
                return refuse(format!(
                    "it meets Insomnia's own directory \"{own}\"; give a directory beside it"
                ));
            }
        }
        Ok(())
    }
}

/// The runtime directory, open and checked. Everything in it is reached through the descriptor.
#[derive(Debug)]
pub struct RuntimeDirectory {
    path: PathBuf,
    descriptor: OwnedFd,
}

impl RuntimeDirectory {
    /// Opens the runtime directory, making it if it is missing.
    ///
    /// # Errors
    /// When it is a link, belongs to somebody else, can be entered by others, or lies on a network file system.
    pub fn open_or_create(path: &Path) -> Result<RuntimeDirectory> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(Error::on("create", parent))?;
        }
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(Error::on("create runtime directory", path)(source)),
        }
        Self::open(path)
    }

    /// Opens the runtime directory as it is.
    ///
    /// # Errors
    /// As `open_or_create`, and when it is missing.
    pub fn open(path: &Path) -> Result<RuntimeDirectory> {
        let shown = path.display();
        let refuse =
            |reason: String| Err(Error::told(format!("runtime directory \"{shown}\" is refused: {reason}")));
        let descriptor = match file::open_directory(path) {
            Ok(descriptor) => descriptor,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::on("open runtime directory", path)(error));
            }
            Err(error) => return refuse(format!("it must be a directory and no link ({error})")),
        };
        let metadata =
            std::fs::symlink_metadata(path).map_err(Error::on("look at runtime directory", path))?;
        if metadata.uid() != process::own_uid() {
            return refuse(format!("it belongs to user {}, not to you", metadata.uid()));
        }
        let mode = metadata.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return refuse(format!(
                "its mode is {mode:04o}, so others can enter it; run \"chmod 700 {shown}\""
            ));
        }
        let failed = Error::on("look at the file system of", path);
        if file::is_network_file_system(&descriptor).map_err(failed)? {
            return refuse("it lies on a network file system, where locks do not reach everyone".into());
        }
        Ok(RuntimeDirectory { path: path.to_owned(), descriptor })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether its path still leads to it.
    pub fn is_in_place(&self) -> bool {
        let open = file::stamp_at(&self.descriptor, Path::new(".")).ok().flatten();
        let named = std::fs::symlink_metadata(&self.path).ok().map(|metadata| Stamp::of(&metadata));
        open.zip(named).is_some_and(|(open, named)| open.same_file(&named))
    }

    /// Its open descriptor.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }
}

/// Makes a path absolute and canonical: links of the longest existing part resolved, `.`, `..`, `//` gone.
///
/// # Errors
/// As `resolve`, and when a part of the path cannot be looked at.
pub fn canonical(path: &Path, base: &Path) -> Result<PathBuf> {
    resolve(&base.join(path), &|place| match std::fs::symlink_metadata(place) {
        Ok(metadata) if metadata.is_symlink() => {
            std::fs::read_link(place).map(Place::Link).map_err(Error::on("read link", place))
        }
        Ok(metadata) if metadata.is_dir() => Ok(Place::Directory),
        Ok(_) => Ok(Place::File),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Place::Nothing),
        Err(source) => Err(Error::on("look at", place)(source)),
    })
}

/// What is at a path, its last link not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Nothing yet.
    Nothing,
    /// A directory.
    Directory,
    /// Something that has nothing below it.
    File,
    /// A link with this target.
    Link(PathBuf),
}

/// The path without links, `.`, `..` and `//` in the tree that `look` sees, which is only asked for absolute paths
/// in normal form. Pure, and fuzzed.
///
/// What does not exist yet is taken as written, with `..` removing the part before it.
///
/// # Errors
/// When a link leads in a circle, the path leads through a file, or `look` fails.
pub fn resolve(whole: &Path, look: &dyn Fn(&Path) -> Result<Place>) -> Result<PathBuf> {
    let shown = |path: &Path| escape_name(path.as_os_str().as_encoded_bytes());
    let told = |reason: &str| Error::told(format!("path \"{}\" {reason}", shown(whole)));
    let mut todo: VecDeque<OsString> = components(whole);
    let mut real = PathBuf::from("/");
    let mut links = 0;
    while let Some(part) = todo.pop_front() {
        if part == OsStr::new("..") {
            real.pop();
            continue;
        }
        let next = real.join(&part);
        match look(&next)? {
            Place::Link(target) => {
                links += 1;
                if links > LINKS_MAX {
                    return Err(told("goes through too many links"));
                }
                if target.is_absolute() {
                    real = PathBuf::from("/");
                }
                let rest = std::mem::take(&mut todo);
                todo = components(&target);
                todo.extend(rest);
            }
            Place::File if !todo.is_empty() => {
                return Err(told(&format!("leads through \"{}\", which is no directory", shown(&next))));
            }
            Place::File | Place::Directory | Place::Nothing => real = next,
        }
    }
    Ok(real)
}

fn components(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(part) => Some(part.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
        .collect()
}

/// Makes a scope rule of a text: its path absolute against `base` and canonical, and no file.
///
/// # Errors
/// When the text is no rule, its path is not UTF-8 once links are resolved, or it names a file.
pub fn canonical_rule(text: &str, base: &Path) -> Result<Rule> {
    let (path, access, reach) = Rule::parts(text)?;
    let path = canonical(Path::new(path), base)?;
    if path.exists() && !path.is_dir() {
        return Err(Error::told(format!(
            "scope rule \"{text}\" names a file; name the directory it is in, as rules name directories"
        )));
    }
    match path.to_str() {
        Some(path) => Rule::new(path, access, reach),
        None => Err(Error::told(format!(
            "scope path \"{}\" is not UTF-8 and cannot be stored",
            escape_name(path.as_os_str().as_encoded_bytes())
        ))),
    }
}

/// Makes scope rules of texts, each once.
///
/// # Errors
/// As `canonical_rule`.
pub fn canonical_rules<T: AsRef<str>>(texts: impl IntoIterator<Item = T>, base: &Path) -> Result<Vec<Rule>> {
    let mut rules: Vec<Rule> = Vec::new();
    for text in texts {
        if rules.len() > MAX_RULES {
            break; // refused by whoever registers them
        }
        let rule = canonical_rule(text.as_ref(), base)?;
        if !rules.contains(&rule) {
            rules.push(rule);
        }
    }
    Ok(rules)
}

/// The directory of the project around `directory`: the nearest one upward that has `name` in it.
pub fn nearest_upward(directory: &Path, name: &str) -> Option<PathBuf> {
    directory.ancestors().find(|place| place.join(name).exists()).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_runtime_directory_is_the_first_that_applies() {
        let check = |variables: &[(&str, &str)], has_run_user: bool, expected: &str| {
            let lookup = |name: &str| {
                let found =
                    variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
                found.or_else(|| (name == "HOME").then(|| "/home/u".into()))
            };
            let directories = Directories::choose(&lookup, 7, has_run_user).unwrap();
            assert_eq!(directories.runtime, Path::new(expected));
        };
        let both = [("INSOMNIA_RUNTIME_DIR", "/r"), ("XDG_RUNTIME_DIR", "/x")];
        check(&both, true, "/r");
        check(&[("XDG_RUNTIME_DIR", "/x")], true, "/x/insomnia");
        check(&[("XDG_RUNTIME_DIR", "relative")], true, "/run/user/7/insomnia");
        check(&[], false, "/tmp/insomnia-7");
        assert!(Directories::choose(&|_| None, 7, true).is_err());
        assert!(Directories::choose(&|_| Some("relative".into()), 7, true).is_err());
    }

    #[test]
    fn u01_a_socket_path_is_never_cut() {
        let deep = PathBuf::from(format!("/{}", "d".repeat(90)));
        let directories = Directories {
            runtime: deep,
            runtime_reason: "",
            state: "/s".into(),
            config: "/c".into(),
            home: "/h".into(),
        };
        assert!(directories.socket(&PodId::new("abcdef").unwrap()).is_ok(), "103 bytes");
        let error = directories.socket(&PodId::new("abcdefg").unwrap()).unwrap_err().to_string();
        assert!(error.contains("104 bytes") && error.contains("103"), "{error}");
    }

    #[test]
    fn p03_and_p09_every_spelling_becomes_one_path() {
        let place = tempfile::tempdir().unwrap();
        let w = place.path().canonicalize().unwrap();
        std::fs::create_dir_all(w.join("src/a")).unwrap();
        symlink("src", w.join("link")).unwrap();
        symlink(w.join("loop2"), w.join("loop1")).unwrap();
        symlink("loop1", w.join("loop2")).unwrap();
        std::fs::write(w.join("file"), "").unwrap();
        let check = |text: &str, expected: &str| {
            assert_eq!(canonical(Path::new(text), &w).unwrap(), w.join(expected), "{text}");
        };
        for spelling in
            ["src", "src/", "src//", "./src", "x/../src", "link", "link/a/..", "src/../link/../src"]
        {
            check(spelling, "src");
        }
        let outside = canonical(Path::new("none/../../other/x"), &w).unwrap();
        assert_eq!(outside, w.parent().unwrap().join("other/x"));
        check("link/new/deep", "src/new/deep");
        check("link/../file", "file");
        let refused = |text: &str, reason: &str| {
            let error = canonical(Path::new(text), &w).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        };
        refused("loop1/x", "too many links");
        refused("file/x", "leads through");
        refused(&"n".repeat(300), "look at");
        assert!(canonical_rule("file:write", &w).is_err());
        let rules = canonical_rules(["src:write", "link:write", "src/a:read:flat"], &w).unwrap();
        let rules: Vec<String> = rules.iter().map(Rule::to_string).collect();
        let w = w.display();
        assert_eq!(rules, [format!("{w}/src:write:recursive"), format!("{w}/src/a:read:flat")]);
    }

    #[test]
    fn one_rule_more_than_a_scope_may_have_is_read_and_no_other() {
        let texts = (0..MAX_RULES + 10).map(|n| format!("/d{n}:write"));
        assert_eq!(canonical_rules(texts, Path::new("/")).unwrap().len(), MAX_RULES + 1);
    }

    #[test]
    fn p03_forty_links_are_followed_and_no_more() {
        let links_from = |start: usize| {
            let look = |place: &Path| {
                let number: usize = place.file_name().unwrap().to_str().unwrap().parse().unwrap();
                let next = number.checked_sub(1).map(|next| Place::Link(next.to_string().into()));
                Ok(next.unwrap_or(Place::Directory))
            };
            resolve(Path::new(&format!("/{start}")), &look).ok()
        };
        assert_eq!(links_from(40), Some("/0".into()));
        assert_eq!(links_from(41), None);
    }

    #[test]
    fn l09_a_runtime_directory_that_others_control_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let place = tempfile::tempdir().unwrap();
        let good = place.path().join("good");
        let opened = RuntimeDirectory::open_or_create(&good).unwrap();
        assert_eq!(opened.path(), good);
        symlink(&good, place.path().join("link")).unwrap();
        let refused = |name: &str, reason: &str| {
            let error = RuntimeDirectory::open_or_create(&place.path().join(name)).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        };
        refused("link", "it must be a directory and no link");
        refused(&"n".repeat(300), "cannot create");
        let missing = RuntimeDirectory::open(&place.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("cannot open"), "{missing}");
        std::fs::set_permissions(&good, std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = RuntimeDirectory::open_or_create(&good).unwrap_err().to_string();
        assert!(error.contains("0777") && error.contains("chmod 700"), "{error}");
        assert!(RuntimeDirectory::open_or_create(&place.path().join("file")).is_ok());
        assert!(opened.is_in_place());
        std::fs::rename(&good, place.path().join("away")).unwrap();
        assert!(!opened.is_in_place(), "its path leads nowhere");
        std::fs::create_dir(&good).unwrap();
        assert!(!opened.is_in_place(), "its path leads to another");
    }

    #[test]
    fn a_scope_over_our_own_directories_or_the_home_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().canonicalize().unwrap();
        let directories = Directories {
            runtime: home.join("run"),
            runtime_reason: "",
            state: home.join(".local/state/insomnia"),
            config: home.join(".config/insomnia"),
            home: home.clone(),
        };
        let check = |text: &str, good: bool| {
            let rule = canonical_rule(text, &home).unwrap();
            assert_eq!(directories.check_scope(&rule).is_ok(), good, "{text}");
        };
        for bad in
            ["/:write", ".:write", "run:write", "run/x:write", ".local:write", ".config/insomnia/a:write"]
        {
            check(bad, false);
        }
        for whole in ["/:write", ".:write"] {
            let error = directories.check_scope(&canonical_rule(whole, &home).unwrap()).unwrap_err();
            assert!(error.to_string().contains("itself; give a directory below it"), "{error}");
        }
        for good in ["work:write", "/:read", ".local/share:write", "runner:write"] {
            check(good, true);
        }
    }
}
