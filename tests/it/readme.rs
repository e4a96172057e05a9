//! The README tells the truth: every command it shows exists, every line of the protocol is understood.

use std::path::Path;

use insomnia::doors::commands::{Asked, COMMANDS, parse};
use insomnia::words::limits::Limits;
use insomnia::words::message::LoggedItem;
use insomnia::words::protocol::{StreamEvent, to_line};

use crate::world::{World, ran, read};

fn readme() -> String {
    read(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md"))
}

#[test]
fn every_documented_item_and_event_is_understood() {
    let text = readme();
    let (mut items, mut events) = (Vec::new(), Vec::new());
    for line in text.lines() {
        if line.starts_with("{\"at\"") {
            let item: LoggedItem =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            assert_eq!(
                serde_json::to_value(&item).unwrap()["type"],
                serde_json::from_str::<serde_json::Value>(line).unwrap()["type"]
            );
            items.push(line);
        } else if line.starts_with("{\"event\"") {
            let event: StreamEvent =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            assert_eq!(to_line(&event).trim_end(), line, "the line is just what is sent");
            events.push(line);
        }
    }
    for kind in [
        "session",
        "turn_started",
        "input",
        "notification",
        "assistant",
        "tool_result",
        "model_error",
        "compaction",
        "model_set",
        "turn_ended",
    ] {
        assert!(items.iter().any(|line| line.contains(&format!("\"type\":\"{kind}\""))), "{kind}");
    }
    for kind in [
        "turn_started",
        "text_delta",
        "tool_call",
        "tool_result",
        "notification",
        "retry",
        "compaction",
        "turn_ended",
        "status",
        "item",
        "dropped",
    ] {
        assert!(events.iter().any(|line| line.contains(&format!("\"event\":\"{kind}\""))), "{kind}");
    }
}

#[test]
fn every_command_it_shows_exists_and_every_command_is_shown() {
    let text = readme();
    for line in text.lines().filter(|line| line.starts_with("insomnia ")) {
        for command in
            line.split(['#', ';']).map(str::trim).filter(|command| command.starts_with("insomnia "))
        {
            let (plain, quoted) = command.split_once('\'').unwrap_or((command, ""));
            let mut words: Vec<std::ffi::OsString> =
                plain.split_whitespace().skip(1).map(Into::into).collect();
            if let Some((argument, rest)) = quoted.split_once('\'') {
                words.push(argument.into());
                words.extend(rest.split_whitespace().map(Into::into));
            }
            assert!(matches!(parse(words), Ok(Asked::Run(..))), "{command}");
        }
    }
    for command in COMMANDS.iter() {
        assert!(text.contains(&format!("insomnia {}", command.name)), "{} is not shown", command.name);
    }
}

#[test]
fn its_tour_runs_line_by_line() {
    let text = readme();
    let tour = text.split("\n## A five-minute tour\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let blocks = tour.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
    // What builds is run by CI; the test brings its own programs.
    let is_build = |line: &&str| line.starts_with("cargo build --release ");
    let lines: Vec<&str> = blocks.flat_map(str::lines).filter(|line| !is_build(line)).collect();
    assert!(tour.lines().any(|line| is_build(&line)) && lines.len() > 12, "{lines:?}");
    let world = World::new();
    let mut script = String::new();
    for (number, line) in lines.iter().enumerate() {
        script.push_str(&format!("{line}\necho \"@{number} $?\"\n"));
    }
    std::fs::write(world.path("tour.sh"), script).unwrap();
    let programs = Path::new(env!("CARGO_BIN_EXE_insomnia")).parent().unwrap().display();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
    let tour = world.path("tour.sh");
    let bash = world.program("bash", ["-c", "exec bash \"$0\" 2>&1", tour.to_str().unwrap()]);
    let said = ran(bash.env("PATH", path)).stdout;
    let mut rest = said.as_str();
    for (number, line) in lines.iter().enumerate() {
        let (printed, after) =
            rest.split_once(&format!("@{number} ")).unwrap_or_else(|| panic!("{line}: {said}"));
        assert!(after.starts_with("0\n"), "{line}: {printed}");
        if let Some((_, wanted)) = line.split_once("# prints: ") {
            assert!(printed.contains(wanted), "{line}: {printed}");
        }
        rest = after;
    }
    assert_eq!(world.table()["allocations"], serde_json::json!([]));
}

#[test]
fn the_limits_it_names_are_the_defaults() {
    let text = readme();
    let limits = serde_json::to_value(Limits::default()).unwrap();
    for (name, value) in limits.as_object().unwrap() {
        let row = text
            .lines()
            .find(|line| line.contains(&format!("`{name}`")))
            .unwrap_or_else(|| panic!("{name} is not told"));
        let value = value.as_u64().unwrap();
        let told = [value.to_string(), format!("{} KiB", value >> 10)];
        assert!(told.iter().any(|told| row.contains(told)), "{name} is {value}: {row}");
    }
}

#[test]
fn its_two_commands_are_what_ci_runs() {
    let (text, ci) = (readme(), read(Path::new(env!("CARGO_MANIFEST_DIR")).join(".ci/run")));
    assert!(text.contains("cargo build --release && target/release/insomnia demo"));
    assert!(ci.contains("cargo build --release") && ci.contains("target/release/insomnia demo"));
    assert!(text.contains("\ncargo test\n") && ci.contains("\ncargo test\n"));
}
