//! The commands of `insomnia` as one table, from which help and the reading of arguments come.

use std::collections::HashMap;
use std::ffi::OsString;

use crate::words::error::{Error, Result};

/// One option of a command.
#[derive(Debug, Clone, Copy)]
pub struct Flag {
    /// Its name without the dashes.
    pub name: &'static str,
    /// What its value is called; empty for a switch.
    pub value: &'static str,
    /// What it does.
    pub about: &'static str,
}

/// One command.
#[derive(Debug, Clone, Copy)]
pub struct Command {
    /// Its words, such as `scope list`.
    pub name: &'static str,
    /// Its arguments.
    pub arguments: &'static str,
    /// What it does, in one line.
    pub about: &'static str,
    /// Its options.
    pub flags: &'static [Flag],
    /// A line that works.
    pub example: &'static str,
}

const fn flag(name: &'static str, value: &'static str, about: &'static str) -> Flag {
    Flag { name, value, about }
}

const JSON: Flag = flag("json", "", "print JSON");

/// All commands, in the order in which help shows them.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "run",
        arguments: "[TASK]",
        about: "start a root pod here, follow it until its pods are quiet, then end them; without TASK, each line of input is one",
        flags: &[
            flag("name", "NAME", "its name (default: main)"),
            flag("dir", "DIR", "its working directory (default: this one)"),
            flag(
                "scope",
                "RULE",
                "what it may write, PATH:write; repeat it (default: its working directory)",
            ),
            flag("read-only", "", "no write scope at all"),
            flag("model", "MODEL", "the model"),
            flag("provider", "KIND", "anthropic, openai, script or command"),
            flag("instruction", "NAME", "$insomnia/NAME, $user/NAME, $project/NAME or a path"),
            flag("manifest", "FILE", "settings over the user's and the project's"),
            flag("keep", "", "leave the pods running at the end"),
            flag("detach", "", "return as soon as the task is accepted"),
            flag("quiet", "", "only the final answer"),
            flag("json", "", "print the events as JSON, one a line"),
        ],
        example: "insomnia run 'write tests for src/parser.rs and make them pass'",
    },
    Command {
        name: "list",
        arguments: "",
        about: "list the living pods",
        flags: &[flag("all", "", "also those that have ended"), JSON],
        example: "insomnia list --all",
    },
    Command {
        name: "send",
        arguments: "POD TEXT",
        about: "send text to a pod: starts a turn, or reaches the running one",
        flags: &[flag("wait", "", "wait for the end of that turn and print the answer"), JSON],
        example: "insomnia send main 'now fix the warnings' --wait",
    },
    Command {
        name: "read",
        arguments: "POD",
        about: "print what a pod's model has said in its latest turn",
        flags: &[flag("since", "N", "everything since item N"), JSON],
        example: "insomnia read coder",
    },
    Command {
        name: "history",
        arguments: "POD",
        about: "print a pod's history",
        flags: &[flag("since", "N", "from item N on"), JSON],
        example: "insomnia history main --since 20",
    },
    Command {
        name: "log",
        arguments: "POD",
        about: "print a pod's log",
        flags: &[JSON],
        example: "insomnia log main",
    },
    Command {
        name: "attach",
        arguments: "POD",
        about: "follow a pod's conversation from now on, in plain lines",
        flags: &[
            flag("since", "N", "from item N on"),
            flag("json", "", "print the events as JSON, one a line"),
        ],
        example: "insomnia attach coder",
    },
    Command {
        name: "stop",
        arguments: "POD",
        about: "end a pod and wait until its scope is back",
        flags: &[flag("tree", "", "and every pod below it"), flag("kill", "", "do not ask, kill"), JSON],
        example: "insomnia stop main --tree",
    },
    Command {
        name: "cancel",
        arguments: "POD",
        about: "stop the running turn of a pod",
        flags: &[JSON],
        example: "insomnia cancel coder",
    },
    Command {
        name: "resume",
        arguments: "POD",
        about: "go on after a failed or cancelled turn, or with the session of a pod that ended",
        flags: &[JSON],
        example: "insomnia resume coder",
    },
    Command {
        name: "set",
        arguments: "POD model NAME",
        about: "let a pod ask another model of its provider from now on",
        flags: &[JSON],
        example: "insomnia set coder model gpt-5-mini",
    },
    Command {
        name: "scope list",
        arguments: "",
        about: "show who holds which scope, and what is lent",
        flags: &[JSON],
        example: "insomnia scope list",
    },
    Command {
        name: "scope who",
        arguments: "PATH",
        about: "tell who may write a path now, and why",
        flags: &[JSON],
        example: "insomnia scope who src/parser.rs",
    },
    Command {
        name: "scope repair",
        arguments: "",
        about: "rebuild a damaged scope.lock from the pods that live, keeping the bad file aside",
        flags: &[JSON],
        example: "insomnia scope repair",
    },
    Command {
        name: "demo",
        arguments: "",
        about: "watch pods lend, write, crash and hand back, without a key or network",
        flags: &[],
        example: "insomnia demo",
    },
];

/// What a command line asks for.
#[derive(Debug)]
pub enum Asked {
    /// Print this text.
    Help(String),
    /// Run this command.
    Run(&'static Command, Given),
}

/// The arguments that were given.
#[derive(Debug, Default)]
pub struct Given {
    /// The words that are no options.
    pub words: Vec<String>,
    values: HashMap<&'static str, Vec<String>>,
}

impl Given {
    /// Whether a switch was given.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// The last value of an option.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values.get(name).and_then(|values| values.last()).map(String::as_str)
    }

    /// All values of an option.
    pub fn values(&self, name: &str) -> impl Iterator<Item = &str> {
        self.values.get(name).into_iter().flatten().map(String::as_str)
    }

    /// The value of an option as a number.
    ///
    /// # Errors
    /// `Error::Usage` when it is none.
    pub fn number(&self, name: &str) -> Result<Option<u64>> {
        let parse = |text: &str| {
            text.parse().map_err(|_| Error::Usage(format!("--{name} needs a number, not \"{text}\"")))
        };
        self.value(name).map(parse).transpose()
    }

    /// The word at this place.
    ///
    /// # Errors
    /// `Error::Usage` naming what is missing.
    pub fn word(&self, at: usize, what: &str) -> Result<&str> {
        self.words.get(at).map(String::as_str).ok_or_else(|| Error::Usage(format!("{what} is missing")))
    }
}

/// Reads a command line without the program's name.
///
/// # Errors
/// `Error::Usage` with what is not understood, and the nearest command where there is one.
pub fn parse(given: impl IntoIterator<Item = OsString>) -> Result<Asked> {
    let usage = |error: lexopt::Error| Error::Usage(error.to_string());
    let mut words: Vec<OsString> = given.into_iter().collect();
    let first = words.first().and_then(|word| word.to_str()).unwrap_or("--help").to_owned();
    match first.as_str() {
        "--help" | "-h" | "help" => {
            let topic: Vec<_> = words.iter().skip(1).filter_map(|word| word.to_str()).collect();
            let found = find(&topic.join(" "));
            return Ok(Asked::Help(found.map_or_else(help, help_of)));
        }
        "--version" | "-V" => return Ok(Asked::Help(format!("insomnia {}\n", env!("CARGO_PKG_VERSION")))),
        _ => {}
    }
    let second = words.get(1).and_then(|word| word.to_str()).unwrap_or_default();
    let two_words = format!("{first} {second}");
    let command = match (find(&two_words), find(&first)) {
        (Some(command), _) => {
            words.drain(..2);
            command
        }
        (None, Some(command)) => {
            words.drain(..1);
            command
        }
        (None, None) if second.is_empty() || second == "--help" => match help_of_group(&first) {
            Some(help) => return Ok(Asked::Help(help)),
            None => return Err(Error::Usage(unknown(&first, ""))),
        },
        (None, None) => return Err(Error::Usage(unknown(&first, second))),
    };
    let mut parser = lexopt::Parser::from_args(words);
    let mut found = Given::default();
    while let Some(argument) = parser.next().map_err(usage)? {
        let name = match argument {
            lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => return Ok(Asked::Help(help_of(command))),
            lexopt::Arg::Long(name) => name.to_owned(),
            lexopt::Arg::Value(word) => {
                let word =
                    word.into_string().map_err(|word| Error::Usage(format!("{word:?} is not UTF-8")))?;
                found.words.push(word);
                continue;
            }
            lexopt::Arg::Short(_) => return Err(usage(argument.unexpected())),
        };
        let Some(flag) = command.flags.iter().find(|flag| flag.name == name) else {
            return Err(Error::Usage(format!("\"insomnia {}\" has no option --{name}", command.name)));
        };
        let values = found.values.entry(flag.name).or_default();
        if !flag.value.is_empty() {
            let value = parser.value().map_err(usage)?;
            values
                .push(value.into_string().map_err(|value| Error::Usage(format!("{value:?} is not UTF-8")))?);
        }
    }
    let words_max = command.arguments.split_whitespace().count();
    match found.words.get(words_max) {
        Some(surplus) => {
            Err(Error::Usage(format!("\"insomnia {}\" does not expect \"{surplus}\"", command.name)))
        }
        None => Ok(Asked::Run(command, found)),
    }
}

fn find(name: &str) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.name == name)
}

fn unknown(first: &str, second: &str) -> String {
    let wanted = if COMMANDS.iter().any(|command| command.name.starts_with(&format!("{first} "))) {
        format!("{first} {second}")
    } else {
        first.to_owned()
    };
    let nearest = COMMANDS.iter().map(|command| (distance(&wanted, command.name), command.name)).min();
    let hint =
        nearest.filter(|(distance, _)| *distance <= 3).map(|(_, name)| format!("; did you mean \"{name}\"?"));
    format!("there is no command \"{}\"{}", wanted.trim(), hint.unwrap_or_default())
}

/// The fewest letters to insert, remove or replace to make one word of the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (above, ca) in a.chars().enumerate() {
        let mut next = vec![above + 1];
        for ((cb, replace), remove) in b.iter().zip(&row).zip(row.iter().skip(1)) {
            let insert = next.last().copied().unwrap_or_default();
            next.push((replace + usize::from(ca != *cb)).min(remove + 1).min(insert + 1));
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}

/// What `insomnia --help` prints: one screen.
#[must_use]
pub fn help() -> String {
    let mut text = String::from(
        "insomnia: several LLM agents on one machine, never two writers on one path\n\nUsage: insomnia COMMAND [OPTIONS]\n\n",
    );
    for command in COMMANDS {
        let usage = format!("{} {}", command.name, command.arguments);
        text.push_str(&format!("  {:<18} {}\n", usage.trim(), command.about));
    }
    text.push_str(
        "\nPOD is a pod_id or the path of a socket. \"insomnia COMMAND --help\" says more.\n\
         Exit: 0 done, 1 the answer is no or it failed, 2 usage.\n\
         Example: insomnia run 'write tests for src/parser.rs and make them pass'\n",
    );
    text
}

/// The commands that begin with this word, such as `scope`.
fn help_of_group(first: &str) -> Option<String> {
    let group: Vec<&Command> =
        COMMANDS.iter().filter(|command| command.name.split(' ').next() == Some(first)).collect();
    (!group.is_empty()).then(|| group.iter().map(|command| help_of(command)).collect::<Vec<_>>().join("\n"))
}

fn help_of(command: &Command) -> String {
    let usage = format!("insomnia {} {}", command.name, command.arguments);
    let mut text = format!("{}: {}\n\nUsage: {} [OPTIONS]\n\n", command.name, command.about, usage.trim());
    for flag in command.flags {
        let name = format!("--{} {}", flag.name, flag.value);
        text.push_str(&format!("  {name:<20} {}\n", flag.about));
    }
    text.push_str(&format!("  {:<20} this text\n\nExample: {}\n", "--help", command.example));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn every_example_and_every_flag_is_understood() {
        for command in COMMANDS {
            let text = help_of(command);
            assert!(text.contains(command.example) && text.lines().count() < 24, "{text}");
            for flag in command.flags {
                let value = if flag.value.is_empty() { "" } else { "1" };
                let line = format!("{} --{} {value}", command.name, flag.name);
                assert!(matches!(parse(words(&line)), Ok(Asked::Run(..))), "{line}");
            }
            let example: Vec<&str> = command.example.split('\'').collect();
            let mut given: Vec<OsString> = words(example[0].strip_prefix("insomnia ").unwrap());
            given.extend(example.get(1).map(OsString::from));
            given.extend(example.get(2).map(|rest| words(rest)).unwrap_or_default());
            assert!(matches!(parse(given), Ok(Asked::Run(found, _)) if found.name == command.name));
        }
        assert!(help().lines().count() <= 24, "help fits on one screen");
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let check = |line: &str, expected: &str| {
            let error = parse(words(line)).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        };
        check("lst", "did you mean \"list\"?");
        check("scope lst", "did you mean \"scope list\"?");
        check("fly", "no command \"fly\"");
        check("list --wide", "has no option --wide");
        check("list main", "does not expect \"main\"");
        check("list -x", "-x");
        check("run --name", "--name");
    }
}
