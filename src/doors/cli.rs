//! The `insomnia` command: from a command line to one function, and back to an exit code.

use std::process::ExitCode;

use crate::doors::commands::{self, Asked, Command, Given};
use crate::doors::find::Machine;
use crate::doors::terminal::{answer, talk_line};
#[cfg(feature = "tui")]
use crate::doors::tui::run as tui;
use crate::doors::{demo, doctor, list, manual, run, scope, talk};
use crate::words::error::{Error, Result};

/// Runs the command: 0 done, 1 the answer is no or it failed, 2 wrong usage.
pub fn main() -> ExitCode {
    let level = std::env::var("RUST_LOG").unwrap_or_else(|_| "error".to_owned());
    let _ = env_logger::Builder::new().parse_filters(&level).try_init(); // the first logger stays
    let outcome = commands::parse(std::env::args_os().skip(1)).and_then(|asked| match asked {
        Asked::Help(text) => {
            answer(&text);
            Ok(true)
        }
        Asked::Run(command, given) => dispatch(command, &given).map_err(|error| command.usage(error)),
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            talk_line(&format!("insomnia: {error}"));
            ExitCode::from(if matches!(error, Error::Usage(_)) { 2 } else { 1 })
        }
    }
}

fn dispatch(command: &Command, given: &Given) -> Result<bool> {
    let machine = Machine::open;
    match command.name {
        "demo" => demo::run(),
        "doctor" => doctor::run(given),
        "man" => {
            answer(&manual::manual());
            Ok(true)
        }
        "completions" => {
            let shell = given.word(0, "the name of the shell")?;
            let text = manual::completions(shell);
            answer(&text.ok_or_else(|| Error::Usage(format!("\"{shell}\" is none of bash, zsh and fish")))?);
            Ok(true)
        }
        "run" => run::run(&machine()?, given),
        "list" => list::list(&machine()?, given),
        "show" => list::show(&machine()?, given),
        "prune" => list::prune(&machine()?, given),
        "send" => talk::send(&machine()?, given),
        "read" => talk::read(&machine()?, given),
        "history" => talk::history(&machine()?, given),
        "log" => talk::log(&machine()?, given),
        "attach" => talk::attach(&machine()?, given),
        "stop" => talk::stop(&machine()?, given),
        "cancel" => talk::cancel(&machine()?, given),
        "resume" => talk::resume(&machine()?, given),
        "set" => talk::set(&machine()?, given),
        "tui" => tui(&machine()?, given),
        "scope list" => scope::list(&machine()?, given),
        "scope who" => scope::who(&machine()?, given),
        "scope repair" => scope::repair(&machine()?, given),
        other => Err(Error::Usage(format!("command \"{other}\" cannot run"))),
    }
}

#[cfg(not(feature = "tui"))]
fn tui(_machine: &Machine, _given: &Given) -> Result<bool> {
    Err(Error::told(
        "this program is built without the TUI; \"cargo install --path . --features tui\" builds it in, and \
         \"insomnia attach POD\" follows a pod without it",
    ))
}
