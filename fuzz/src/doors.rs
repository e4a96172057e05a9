//! Checks of what people and models ask for: command lines, tool arguments, edits and patterns.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use insomnia::doors::commands::{self, Asked, Command, Given};
use insomnia::doors::pod_command::{self, Arguments, Mode};
use insomnia::tools::edit::edit_text;
use insomnia::tools::glob::Glob;
use insomnia::tools::search::split_absolute;
use insomnia::tools::{input, specs};
use insomnia::words::error::Error;
use insomnia::words::limits::Limits;
use serde_json::Value;

use super::{fields, number, utf8};

/// Command lines of both programs: what is understood means the same once written out again.
pub fn command_line(bytes: &[u8]) {
    let (program, line) = number(bytes);
    let given: Vec<OsString> =
        line.split(|&byte| byte == 0).take(40).map(|word| OsStr::from_bytes(word).to_owned()).collect();
    let outcome = if program % 2 == 0 {
        commands::parse(given).map(|asked| match asked {
            Asked::Help(text) => assert!(!text.is_empty()),
            Asked::Run(command, found) => insomnia_comes_back(command, &found),
        })
    } else {
        pod_command::parse(given).map(|parsed| match parsed {
            Err(text) => assert!(!text.is_empty()),
            Ok(arguments) => pod_comes_back(&arguments),
        })
    };
    assert!(matches!(outcome, Ok(()) | Err(Error::Usage(_))), "{outcome:?}");
}

fn insomnia_comes_back(command: &Command, found: &Given) {
    assert!(found.words.len() <= command.arguments.split_whitespace().count());
    let mut again: Vec<OsString> = command.name.split(' ').map(OsString::from).collect();
    for flag in &command.flags {
        again.extend(found.values(flag.name).map(|value| format!("--{}={value}", flag.name).into()));
        again.extend(
            (flag.value.is_empty() && found.has(flag.name)).then(|| format!("--{}", flag.name).into()),
        );
    }
    again.push("--".into());
    again.extend(found.words.iter().map(OsString::from));
    let Ok(Asked::Run(same, twice)) = commands::parse(again) else { panic!("{found:?}") };
    assert_eq!((same.name, &twice.words), (command.name, &found.words));
    for flag in &command.flags {
        assert_eq!(twice.has(flag.name), found.has(flag.name));
        assert!(twice.values(flag.name).eq(found.values(flag.name)));
    }
}

fn pod_comes_back(arguments: &Arguments) {
    let Arguments { mode, options, overlay } = arguments;
    let mut again: Vec<OsString> = Vec::new();
    again.extend((*mode == Mode::Background).then(|| "--background-of-launch".into())); // comes first
    let mut add =
        |name: &str, value: &OsStr| again.extend([OsString::from(format!("--{name}")), value.to_owned()]);
    options.name.iter().for_each(|value| add("name", value.as_str().as_ref()));
    options.scope.iter().for_each(|value| add("scope", value.as_ref()));
    options.task.iter().for_each(|value| add("task", value.as_ref()));
    options.adopt.iter().for_each(|value| add("adopt", value.as_str().as_ref()));
    options.directory.iter().for_each(|value| add("dir", value.as_os_str()));
    options.manifest.iter().for_each(|value| add("manifest", value.as_os_str()));
    options.callback.iter().for_each(|value| add("callback", value.as_os_str()));
    overlay.iter().for_each(|value| add("overlay", value.as_os_str()));
    if let Some(pod_id) = &options.resume {
        again.extend(["--resume", "--name", pod_id.as_str()].map(OsString::from));
    }
    again.extend((*mode == Mode::Foreground).then(|| "--foreground".into()));
    let Ok(Ok(twice)) = pod_command::parse(again) else { panic!("{arguments:?}") };
    assert_eq!(format!("{twice:?}"), format!("{arguments:?}"));
}

/// Tool arguments that are taken have only fields of the schema, each of its type, and all that are required.
pub fn tool_input(bytes: &[u8]) {
    let (tool, text) = number(bytes);
    let Ok(value) = serde_json::from_slice::<Value>(text) else { return };
    let specs = specs::all(&Limits::default(), Some(String::new()));
    let spec = &specs[tool % specs.len()];
    let Ok(_) = input::parse(spec, &value) else { return };
    let given = value.as_object().unwrap();
    let properties = spec.input_schema["properties"].as_object().unwrap();
    for (name, value) in given {
        let fits = match properties[name]["type"].as_str().unwrap() {
            "string" => value.is_string(),
            "integer" => value.is_u64(),
            "boolean" => value.is_boolean(),
            "array" => value.as_array().is_some_and(|items| items.iter().all(Value::is_string)),
            other => panic!("type {other}"),
        };
        assert!(fits || value.is_null(), "{name}: {value}");
    }
    let required = spec.input_schema["required"].as_array().unwrap();
    assert!(
        required.iter().all(|name| given.get(name.as_str().unwrap()).is_some_and(|value| !value.is_null()))
    );
}

/// An edit is what replacing does in a text of plain line ends; other bytes stay.
pub fn edit(bytes: &[u8]) {
    let (all, bytes) = number(bytes);
    let all = all % 2 == 1;
    let [old, new, content] = fields(bytes);
    let (old, new) = (utf8(old), utf8(new));
    let outcome = edit_text(content, &old, &new, all);
    let plain = |text: &str| text.replace("\r\n", "\n");
    let count_of = |text: &str, part: &str| {
        (0..text.len()).filter(|&at| text.as_bytes()[at..].starts_with(part.as_bytes())).count()
    };
    if let Ok((result, count)) = &outcome {
        assert!(*count == 1 || all && *count > 1);
        let lone = |bytes: &[u8]| bytes.iter().filter(|byte| !byte.is_ascii()).count();
        assert_eq!(lone(content) + count * lone(new.as_bytes()), lone(result) + count * lone(old.as_bytes()));
    }
    let (Ok(text), old, new) = (std::str::from_utf8(content), plain(&old), plain(&new)) else { return };
    let text = plain(text);
    match outcome {
        Ok((result, _)) if !text.contains('\r') && !new.contains('\r') => {
            assert!(count_of(&text, &old) == 1 || all);
            assert_eq!(plain(std::str::from_utf8(&result).unwrap()), text.replace(&old, &new));
        }
        Ok(_) => {}
        Err(why) if why.contains("is empty") => assert!(old.is_empty()),
        Err(why) if why.contains("are the same") => assert_eq!(old, new),
        Err(why) if why.contains("does not occur") => assert!(!text.contains(&old)),
        Err(why) => {
            let said = why.strip_prefix("\"old\" occurs ").expect("nothing here is large");
            let count: usize = said.split(' ').next().unwrap().parse().unwrap();
            let (_, lines) = said.split_once('[').unwrap();
            let lines = lines.split(']').next().unwrap().split(',').count();
            assert!(!all && count > 1 && count <= count_of(&text, &old) && lines == count.min(5));
        }
    }
}

/// A pattern takes what its names and stars say, one by one; a path written literally is found; the parts of an
/// absolute one are the whole.
pub fn glob(bytes: &[u8]) {
    let [pattern, path] = fields(bytes);
    let (pattern, path) = (utf8(pattern), utf8(path));
    if pattern.starts_with('/') {
        let (start, rest) = split_absolute(&pattern);
        assert!(start.ends_with('/') && !start.contains(['*', '?', '[']));
        assert_eq!(format!("{start}{}", rest.strip_prefix("./").unwrap_or_else(|| &rest[1..])), pattern);
    }
    let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
    if let Ok(glob) = Glob::new(&pattern) {
        let parts: Vec<&str> = pattern.split('/').filter(|name| !name.is_empty() && *name != ".").collect();
        let stars = parts.iter().filter(|name| **name == "**").count();
        if pattern.contains('/') && stars <= 2 && names.len() <= 12 && parts.last() != Some(&"**") {
            assert_eq!(glob.matches(path.as_bytes()), takes(&parts, &names), "{pattern} and {path}");
        }
    }
    let literal: String = path
        .chars()
        .flat_map(|c| ["\\", ""].map(|mark| (mark, c)))
        .filter_map(|(mark, c)| match mark {
            "\\" if "*?[]\\".contains(c) => Some('\\'),
            "" => Some(c),
            _ => None,
        })
        .collect();
    if let Ok(glob) = Glob::new(&format!("./{literal}")) {
        assert!(names.contains(&".") || glob.matches(path.as_bytes()), "{literal} and {path}");
        assert!(!glob.matches(format!("{path}/x").as_bytes()) || names.contains(&"."));
    }
}

/// Whether the parts take the names; each part that is no `**` is asked alone.
fn takes(parts: &[&str], names: &[&str]) -> bool {
    match parts.split_first() {
        None => names.is_empty(),
        Some((&"**", rest)) => (0..=names.len()).any(|skipped| takes(rest, &names[skipped..])),
        Some((part, rest)) => names.split_first().is_some_and(|(name, after)| {
            Glob::new(part).unwrap().matches(name.as_bytes()) && takes(rest, after)
        }),
    }
}
