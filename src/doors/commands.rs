//! The commands of `insomnia` as one text, from which come help, the reading of arguments, completions and the
//! manual page.

use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::LazyLock;

use crate::words::error::{Error, Result};

/// All commands in the order in which help shows them: name, arguments, whether there is JSON, and purpose; options;
/// a line that works.
const TABLE: &str = "\
run [TASK]: start a root pod here, follow it until all is quiet, end it; without TASK, each line of input is one
  --name NAME         its name (default: main)
  --dir DIR           its working directory (default: this one)
  --scope RULE        what it may write, PATH:write; repeat it (default: its working directory)
  --read-only         no write scope at all
  --model MODEL       the model
  --provider KIND     anthropic, openai, script or command
  --instruction NAME  $insomnia/NAME, $user/NAME, $project/NAME or a path
  --manifest FILE     settings over the user's and the project's
  --keep              leave the pods running at the end
  --detach            return as soon as the task is accepted
  --quiet             only the final answer
  --json              only the events as JSON, one a line
  Example: insomnia run 'write tests for src/parser.rs and make them pass'
list [--json]: list the living pods
  --all               also those that have ended
  Example: insomnia list --all
send POD TEXT [--json]: send text to a pod; it starts a turn, or reaches the running one
  --wait              follow that turn to its end and print the answer
  --quiet             with --wait, only the answer
  Example: insomnia send main 'now fix the warnings' --wait
read POD [--json]: print what a pod's model has said in its latest turn
  --since N           everything since item N
  Example: insomnia read coder
history POD [--json]: print a pod's history
  --since N           from item N on
  Example: insomnia history main --since 20
log POD [--json]: print a pod's log
  Example: insomnia log main
show POD [--json]: print a pod's settings, and where each comes from
  Example: insomnia show main
attach POD: follow a pod's conversation from now on, in plain lines
  --since N           from item N on
  --quiet             only what the model says
  --json              only the events as JSON, one a line
  Example: insomnia attach coder
tui [POD]: watch a pod's tree on one screen and step in (feature tui)
  Example: insomnia tui main
stop POD [--json]: end a pod and wait until its scope is back
  --tree              and every pod below it
  --kill              do not ask, kill
  Example: insomnia stop main --tree
cancel POD [--json]: stop the running turn of a pod
  Example: insomnia cancel coder
resume POD [--json]: go on after a failed turn, or with an ended pod's session; a cancelled turn is one too
  --manifest FILE     of one that ended: settings over those of its session
  Example: insomnia resume coder
set POD model NAME [--json]: let a pod ask another model of its provider from now on
  Example: insomnia set coder model gpt-5-mini
scope list [--json]: show who holds which scope, and what is lent
  Example: insomnia scope list
scope who PATH [--json]: tell who may write a path now, and why
  Example: insomnia scope who src/parser.rs
scope repair [--json]: rebuild a damaged scope.lock from the pods that live; the bad file is kept
  Example: insomnia scope repair
doctor [--json]: check that pods can run here, and say what to do where not
  Example: insomnia doctor
prune [--json]: remove the sessions of pods that ended long ago; never of one that lives
  --older-than AGE    ended so long ago, such as 12h, 30d or 0d (default: 30d)
  --dry-run           only say what would be removed
  Example: insomnia prune --older-than 7d --dry-run
demo: watch pods lend, write and crash, without a key or network
  Example: insomnia demo
completions bash|zsh|fish: print what a shell needs to complete commands
  Example: insomnia completions bash
man: print the manual page, for man -l or a file in man1
  Example: insomnia man
";

const PROGRAM: &str = "insomnia ";

const HELP: Flag = Flag { name: "help", value: "", about: "this text" };
const JSON: Flag = Flag { name: "json", value: "", about: "print JSON" };

/// One option of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flag {
    /// Its name without the dashes.
    pub name: &'static str,
    /// What its value is called; empty for a switch.
    pub value: &'static str,
    /// What it does.
    pub about: &'static str,
}

/// One command.
#[derive(Debug, Clone)]
pub struct Command {
    /// Its words, such as `scope list`.
    pub name: &'static str,
    /// Its arguments.
    pub arguments: &'static str,
    /// What it does, in one line.
    pub about: &'static str,
    /// Its options, `--help` last.
    pub flags: Vec<Flag>,
    /// A line that works.
    pub example: &'static str,
}

/// All commands of `insomnia`.
pub static COMMANDS: LazyLock<Vec<Command>> = LazyLock::new(|| read_table(TABLE));

/// Reads commands from a text like that of `insomnia`.
pub fn read_table(text: &'static str) -> Vec<Command> {
    let mut commands: Vec<Command> = Vec::new();
    for line in text.lines() {
        let (line, last) = (line.trim_start(), commands.last_mut().filter(|_| line.starts_with("  ")));
        if let Some(example) = line.strip_prefix("Example: ") {
            last.into_iter().for_each(|command| command.example = example);
        } else if let Some((usage, about)) = line.strip_prefix("--").and_then(|flag| flag.split_once("  ")) {
            let (name, value) = usage.split_once(' ').unwrap_or((usage, ""));
            let flag = Flag { name, value, about: about.trim() };
            last.into_iter().for_each(|command| {
                let own = command.flags.iter().take_while(|flag| ![HELP, JSON].contains(flag)).count();
                command.flags.insert(own, flag);
            });
        } else if let Some((usage, about)) = line.split_once(": ") {
            let (usage, flags) = match usage.strip_suffix(" [--json]") {
                Some(usage) => (usage, vec![JSON, HELP]),
                None => (usage, vec![HELP]),
            };
            let is_argument = |c: char| c.is_uppercase() || "[|".contains(c);
            let begin = usage.split_inclusive(' ').take_while(|word| !word.contains(is_argument));
            let (name, arguments) = usage.split_at(begin.map(str::len).sum());
            commands.push(Command { name: name.trim(), arguments, about, flags, example: "" });
        }
    }
    commands
}

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
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// The last value of an option.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values(name).last()
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

impl Command {
    /// A wrong usage of this command, with where to read how it is meant.
    pub fn usage(&self, error: Error) -> Error {
        let Error::Usage(text) = error else { return error };
        Error::Usage(format!("{text}; see \"{PROGRAM}{} --help\"", self.name))
    }

    /// Reads the arguments after this command's name; `None` when help is asked for.
    ///
    /// # Errors
    /// `Error::Usage` with what is not understood, and the nearest option where there is one.
    pub fn read(&self, words: impl IntoIterator<Item = OsString>) -> Result<Option<Given>> {
        let usage = |error: lexopt::Error| Error::Usage(error.to_string());
        let text = |word: OsString| {
            word.into_string().map_err(|word| Error::Usage(format!("{word:?} is not UTF-8")))
        };
        let mut parser = lexopt::Parser::from_args(words);
        let mut found = Given::default();
        while let Some(argument) = parser.next().map_err(usage)? {
            let name = match argument {
                lexopt::Arg::Short('h') => return Ok(None),
                lexopt::Arg::Long(name) => name.to_owned(),
                lexopt::Arg::Value(word) => {
                    found.words.push(text(word)?);
                    continue;
                }
                lexopt::Arg::Short(_) => return Err(usage(argument.unexpected())),
            };
            let Some(flag) = self.flags.iter().find(|flag| flag.name == name) else {
                let hint = nearest(&name, self.flags.iter().map(|flag| flag.name), "--");
                return Err(Error::Usage(format!("\"{}\" has no option --{name}{hint}", self.name)));
            };
            if flag.name == "help" {
                return Ok(None);
            }
            let values = found.values.entry(flag.name).or_default();
            if !flag.value.is_empty() {
                values.push(text(parser.value().map_err(usage)?)?);
            }
        }
        match found.words.get(self.arguments.split_whitespace().count()) {
            Some(surplus) => Err(Error::Usage(format!("\"{}\" does not expect \"{surplus}\"", self.name))),
            None => Ok(Some(found)),
        }
    }

    /// What `--help` prints; `program` stands before the name.
    pub fn help(&self, program: &str) -> String {
        let Command { name, arguments, about, flags, example } = self;
        let usage = format!("{program}{name} {arguments}");
        let line = |flag: &Flag| {
            let name = format!("--{} {}", flag.name, flag.value);
            format!("  {name:<20} {}\n", flag.about)
        };
        let flags: String = flags.iter().map(line).collect();
        format!("{name}: {about}\n\nUsage: {} [OPTIONS]\n\n{flags}\nExample: {example}\n", usage.trim())
    }
}

/// Reads a command line without the program's name.
///
/// # Errors
/// `Error::Usage` with what is not understood, and the nearest command or option where there is one.
pub fn parse(given: impl IntoIterator<Item = OsString>) -> Result<Asked> {
    let words: Vec<OsString> = given.into_iter().collect();
    let word = |at: usize| words.get(at).and_then(|word| word.to_str()).unwrap_or_default();
    let (is_help, at) = match word(0) {
        "" if !words.is_empty() => (false, 0),
        "" | "--help" | "-h" | "help" => (true, 1),
        "--version" | "-V" => return Ok(Asked::Help(format!("insomnia {}\n", env!("CARGO_PKG_VERSION")))),
        _ => (matches!(word(1), "" | "--help" | "-h"), 0),
    };
    let (first, second) = (word(at), word(at + 1));
    let two_words = format!("{first} {second}");
    let find = |name: &str| COMMANDS.iter().find(|command| command.name == name);
    let Some(command) = find(&two_words).or_else(|| find(first)) else {
        if is_help && first.is_empty() {
            return Ok(Asked::Help(help()));
        }
        let group = COMMANDS.iter().filter(|command| command.name.split(' ').next() == Some(first));
        let group: Vec<String> = group.map(|command| command.help(PROGRAM)).collect();
        if is_help && !group.is_empty() {
            return Ok(Asked::Help(group.join("\n")));
        }
        let wanted = if group.is_empty() { first } else { &two_words };
        let hint = nearest(wanted, COMMANDS.iter().map(|command| command.name), "");
        return Err(Error::Usage(format!("there is no command \"{wanted}\"{hint}; see \"{PROGRAM}--help\"")));
    };
    let rest = words.iter().skip(at + command.name.split(' ').count()).cloned();
    let read = command.read(rest).map_err(|error| command.usage(error))?;
    match read.filter(|_| at == 0) {
        Some(given) => Ok(Asked::Run(command, given)),
        None => Ok(Asked::Help(command.help(PROGRAM))),
    }
}

/// The nearest of the known names as a question, when it is near enough.
fn nearest<'a>(wanted: &str, known: impl Iterator<Item = &'a str>, before: &str) -> String {
    let nearest = known.map(|name| (distance(wanted, name), name)).min();
    let near_enough = nearest.filter(|(distance, _)| *distance <= 3 && *distance * 2 <= wanted.len());
    near_enough.map(|(_, name)| format!(" (did you mean \"{before}{name}\"?)")).unwrap_or_default()
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

/// What `insomnia --help` prints: 24 lines of 80 columns with the prompt after it, so of each command only what stands
/// before the first semicolon.
pub fn help() -> String {
    let line = |Command { name, arguments, about, .. }: &Command| {
        let (usage, about) = (format!("{name} {arguments}"), about.split(';').next().unwrap_or_default());
        format!("  {:<18} {about}\n", usage.trim())
    };
    let commands: String = COMMANDS.iter().map(line).collect();
    format!(
        "Usage: {PROGRAM}COMMAND [OPTIONS]; \"{PROGRAM}COMMAND --help\" says more.\n{commands}\
         POD: a pod_id or a socket's path. Exit: 0 done, 1 no or failed, 2 usage.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn every_example_and_every_flag_is_understood() {
        for command in COMMANDS.iter() {
            let text = command.help(PROGRAM);
            assert!(text.contains(command.example) && text.lines().count() < 24, "{text}");
            let asked = parse(words(&format!("{} --help", command.name))).unwrap();
            assert!(matches!(asked, Asked::Help(help) if help == text));
            let asked = parse(words(&format!("help {}", command.name))).unwrap();
            assert!(matches!(asked, Asked::Help(help) if help == text));
            for flag in command.flags.iter().filter(|flag| flag.name != "help") {
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
        assert!(COMMANDS.len() > 15 && help().lines().count() < 24, "{}", help());
        assert!(help().lines().all(|line| line.len() <= 80), "{}", help());
        assert!(matches!(parse(words("scope --help")), Ok(Asked::Help(help)) if help.contains("scope who")));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let check = |line: &str, expected: &str| {
            let error = parse(words(line)).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        };
        check("lst", "did you mean \"list\"?");
        check("scope lst", "did you mean \"scope list\"?");
        check("scope lst --json", "did you mean \"scope list\"?");
        check("fly", "no command \"fly\"");
        check("help fly", "no command \"fly\"");
        check("list --wide", "has no option --wide");
        check("stop main --tre", "did you mean \"--tree\"?");
        check("run --quite x", "did you mean \"--quiet\"?");
        check("list main", "does not expect \"main\"");
        check("list -x", "-x");
        check("run --name", "--name");
        for far in ["fly", "list --wide", "list --frob"] {
            assert!(!parse(words(far)).unwrap_err().to_string().contains("did you mean"), "{far}");
        }
    }
}
