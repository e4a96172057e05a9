//! Checks of what lies on disk: paths, settings, a history, and what the system says of a process.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use insomnia::store::manifest::{Layer, Manifest, ProviderSettings, Source, lay_over};
use insomnia::store::paths::{Place, resolve};
use insomnia::store::session::Session;
use insomnia::sys::process::{ProcessStat, parse_stat};
use insomnia::words::error::Error;
use insomnia::words::limits::Limits;
use insomnia::words::message::Item;
use insomnia::words::scope::is_normal;

use super::{fields, is_same, number, utf8};

/// A path comes to one in normal form that no link and no file is in the way of, and stays as it is then.
///
/// The first line is the path; the others are links as `PATH>TARGET`, files as `PATH`, and directories as `PATH/`.
pub fn path(bytes: &[u8]) {
    let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    let mut lines = bytes.split(|&byte| byte == b'\n');
    let whole = Path::new("/").join(path(lines.next().unwrap_or_default()));
    let mut tree: HashMap<PathBuf, Place> = HashMap::new();
    for line in lines.take(50) {
        let (at, place) = match line.iter().position(|&byte| byte == b'>') {
            Some(end) => (&line[..end], Place::Link(path(&line[end + 1..]))),
            None if line.ends_with(b"/") => (line, Place::Directory),
            None => (line, Place::File),
        };
        tree.insert(Path::new("/").join(path(at)), place);
    }
    let look = |place: &Path| {
        assert!(is_normal(&place.to_string_lossy().replace('\0', "0")), "{place:?}");
        Ok(tree.get(place).cloned().unwrap_or(Place::Nothing))
    };
    let real = match resolve(&whole, &look) {
        Ok(real) => real,
        Err(error) => return assert!(!error.to_string().contains(char::is_control)),
    };
    assert_eq!(resolve(&real, &look).unwrap(), real);
    assert!(is_normal(&real.to_string_lossy().replace('\0', "0")), "{real:?}");
    for above in real.ancestors().filter(|above| above.parent().is_some()) {
        let place = tree.get(above);
        assert!(!matches!(place, Some(Place::Link(_))) && (above == real || place != Some(&Place::File)));
    }
    if tree.is_empty() && !whole.as_os_str().as_bytes().windows(2).any(|pair| pair == b"..") {
        assert_eq!(real, whole.components().collect::<PathBuf>());
    }
}

/// A project's layer never widens what the user's settings allow; what was resolved means the same to a child.
pub fn manifest(bytes: &[u8]) {
    let layers = fields::<3>(bytes);
    let sources = [(Source::User, "/home/u"), (Source::Project, "/p"), (Source::Overlay, "/")];
    let read =
        |at: usize| Layer::parse(&utf8(layers[at]), sources[at].0, "m\u{1b}", Path::new(sources[at].1));
    let shown = |error: Error| assert!(!error.to_string().contains(char::is_control), "{error:?}");
    let user = Layer::parse("{}", Source::User, "m", Path::new("/"));
    let user = read(0).map_err(shown).or(user).unwrap();
    let below = lay_over(std::slice::from_ref(&user)).unwrap();
    let resolved = match read(1).and_then(|project| lay_over(&[user, project])) {
        Ok(manifest) => {
            does_not_widen(&below, &manifest);
            manifest
        }
        Err(error) => {
            shown(error);
            below
        }
    };
    let text = serde_json::to_value(&resolved).unwrap();
    let again = lay_over(&[Layer::overlay(&text, "child").unwrap()]).unwrap();
    assert!(is_same(&serde_json::to_value(again).unwrap(), &text), "{text}");
    if let Ok(overlay) = read(2) {
        assert!(lay_over(&[overlay]).is_ok());
    }
}

fn does_not_widen(below: &Manifest, with: &Manifest) {
    let provider = ProviderSettings { model: below.provider.model.clone(), ..with.provider.clone() };
    assert_eq!(provider, below.provider);
    let given =
        |m: &Manifest| (m.scope.clone(), m.pod_command.clone(), m.trusted_projects.clone(), m.protect_git);
    assert_eq!(given(with), given(below));
    assert!(below.tools.deny.iter().all(|tool| with.tools.deny.contains(tool)));
    let shell = |m: &Manifest| {
        (m.shell.sandbox, m.shell.env.clone(), m.shell.writable.clone(), m.shell.spawner_level)
    };
    assert_eq!(shell(with), shell(below));
    assert!(below.shell.network || !with.shell.network);
    assert!(with.shell.timeout_seconds <= below.shell.timeout_seconds);
    let limits = |limits: &Limits| serde_json::to_value(limits).unwrap();
    let (was, is) = (limits(&below.limits), limits(&with.limits));
    assert!(is.as_object().unwrap().iter().all(|(key, value)| value.as_u64() <= was[key].as_u64()), "{is}");
    let instruction = with.instruction.as_str();
    let is_bound = instruction.starts_with("$insomnia/") || instruction.starts_with("$project/");
    assert!(is_bound || instruction == below.instruction);
}

/// A history is its whole lines: what was torn off is cut, nothing before it changes, and it can be gone on with.
pub fn history(bytes: &[u8]) {
    let (torn, text) = number(bytes);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.jsonl");
    let write = |text: &[u8]| std::fs::write(&path, text).unwrap();
    write(text);
    let Ok(session) = Session::open(folder.path()) else { return };
    let items = items_of(&session);
    assert_eq!(items.len(), text.iter().filter(|&&byte| byte == b'\n').count());
    for (since, item) in (0..).zip(&items) {
        assert_eq!(session.page(since).unwrap().items.first().map(|logged| &logged.item), Some(item));
    }
    write(&text[..text.len().saturating_sub(torn)]);
    let session = Session::open(folder.path()).unwrap();
    let kept = items_of(&session);
    assert_eq!(kept, items[..kept.len()]);
    let new = Item::ModelError { message: utf8(text) };
    session.append(new.clone()).unwrap();
    let again = Session::open(folder.path()).unwrap();
    assert_eq!(items_of(&again), [kept, vec![new]].concat());
    assert_eq!(again.summary(), session.summary());
}

fn items_of(session: &Session) -> Vec<Item> {
    let (mut items, mut since, mut more) = (Vec::new(), 0, true);
    while more {
        let page = session.page(since).unwrap();
        items.extend(page.items.into_iter().map(|logged| logged.item));
        (since, more) = (page.cursor, page.more);
    }
    items
}

/// State and start time are found whatever the program calls itself.
pub fn proc_stat(bytes: &[u8]) {
    let _ = parse_stat(bytes);
    let (start_time, name) = number(bytes);
    let state = if start_time % 2 == 0 { "S" } else { "Z" };
    let numbers = "1 42 42 0 -1 4194560 103 0 0 0 0 0 0 0 20 0 1 0";
    let text = [b"42 (", name, format!(") {state} {numbers} {start_time} 5 6\n").as_bytes()].concat();
    let expected = ProcessStat { is_zombie: state == "Z", start_time: start_time as u64 };
    assert_eq!(parse_stat(&text), Some(expected));
    let torn = &text[..text.len() - 5 - start_time.to_string().len()];
    assert_ne!(parse_stat(torn), Some(expected));
}
