//! The `insomnia` command: from a command line to one function, and back to an exit code.

use std::process::ExitCode;

use crate::doors::commands::{self, Asked, Command, Given};
use crate::doors::find::Machine;
use crate::doors::terminal::{answer, talk_line};
use crate::doors::{demo, run, scope, talk};
use crate::words::error::{Error, Result};

/// Runs the command: 0 done, 1 the answer is no or it failed, 2 wrong usage.
#[must_use]
pub fn main() -> ExitCode {
    let level = std::env::var("RUST_LOG").unwrap_or_else(|_| "error".to_owned());
    let _ = env_logger::Builder::new().parse_filters(&level).try_init(); // the first logger stays
    let outcome = commands::parse(std::env::args_os().skip(1)).and_then(|asked| match asked {
        Asked::Help(text) => {
            answer(&text);
            Ok(true)
        }
        Asked::Run(command, given) => dispatch(command, &given),
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(Error::Usage(text)) => {
            talk_line(&format!("insomnia: {text}; see \"insomnia --help\""));
            ExitCode::from(2)
        }
        Err(error) => {
            talk_line(&format!("insomnia: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: &Command, given: &Given) -> Result<bool> {
    if command.name == "demo" {
        return demo::run();
    }
    let machine = Machine::open()?;
    match command.name {
        "run" => run::run(&machine, given),
        "list" => talk::list(&machine, given),
        "send" => talk::send(&machine, given),
        "read" => talk::read(&machine, given),
        "history" => talk::history(&machine, given),
        "log" => talk::log(&machine, given),
        "attach" => talk::attach(&machine, given),
        "stop" => talk::stop(&machine, given),
        "cancel" => talk::cancel(&machine, given),
        "resume" => talk::resume(&machine, given),
        "set" => talk::set(&machine, given),
        "scope list" => scope::list(&machine, given),
        "scope who" => scope::who(&machine, given),
        "scope repair" => scope::repair(&machine, given),
        other => Err(Error::Usage(format!("command \"{other}\" cannot run"))),
    }
}
