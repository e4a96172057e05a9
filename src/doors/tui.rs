//! `insomnia tui`: the pods, the conversation of one of them and a line of input on one screen.
//!
//! One thread owns the state and the terminal; it takes events from one bounded channel, draws at most 30 frames a
//! second, and waits for nothing else. Keys, surveys, streams and requests have threads of their own.

pub mod columns;
pub mod conversation;
pub mod feed;
pub mod input;
pub mod paint;
pub mod screen;
pub mod state;
pub mod tree;

use std::io::{self, IsTerminal, Stdout};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use ratatui::Terminal;
use ratatui::backend::{Backend, CrosstermBackend};
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{
    DisableBracketedPaste, EnableBracketedPaste, KeyboardEnhancementFlags, PopKeyboardEnhancementFlags,
    PushKeyboardEnhancementFlags, read,
};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

use crate::doors::commands::Given;
use crate::doors::find::{Found, Machine};
use crate::doors::terminal::answers_to_a_person;
use crate::doors::tui::feed::Feed;
use crate::doors::tui::paint::Paint;
use crate::doors::tui::state::{Effect, Event, State};
use crate::doors::tui::tree::Row;
use crate::sys::clock;
use crate::sys::signal::{exit_now, on_end_signals};
use crate::words::error::{Error, Result};
use crate::words::identity::{PodId, PodName};
use crate::words::protocol::{KnownPod, Status};

/// Between two frames: fast enough for eyes, slow enough for ssh.
const FRAME: Duration = Duration::from_millis(33);
/// Without any event the times on the screen go on.
const TICK: Duration = Duration::from_secs(1);
/// Events that wait for the screen; when they are so many their senders wait, down to the pod's own bound.
pub const EVENTS_MAX: usize = 1024;
/// A terminal that takes nothing any more holds the end up for so long.
const FAREWELL: Duration = Duration::from_millis(500);

/// `insomnia tui [POD]`.
///
/// # Errors
/// When there is no terminal or no such pod.
pub(super) fn run(machine: &Machine, given: &Given) -> Result<bool> {
    if !answers_to_a_person() || !io::stdin().is_terminal() {
        return Err(Error::told("the TUI needs a terminal; \"insomnia attach POD\" works without one"));
    }
    let chosen = given.words.first().map(|pod| row_of(machine, pod)).transpose()?.flatten();
    let root = chosen.as_ref().map(|row| row.pod.pod_id.clone());
    let (sender, events) = bounded(EVENTS_MAX);
    let failed = |source| Error::io("use the terminal", source);
    let mut screen = Screen::enter(&sender).map_err(failed)?;
    let size = screen.terminal.size().map_err(failed)?;
    let paint = Paint { has_colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) };
    let mut state = State::new(size, paint, root.clone());
    let feed = Feed::start(machine, root, &sender)?;
    if let Some(row) = chosen {
        feed.perform(state.follow(row));
    }
    // A terminal that is gone takes no frame: that is an end like any other.
    let _ = show(&mut screen.terminal, &mut state, &events, |effect| feed.perform(effect));
    Ok(true)
}

/// Takes events and draws frames until the state is over.
///
/// # Errors
/// When the terminal cannot be written.
pub fn show<B: Backend>(
    terminal: &mut Terminal<B>,
    state: &mut State,
    events: &Receiver<Event>,
    mut perform: impl FnMut(Effect),
) -> Result<()> {
    let mut drawn: Option<Instant> = None;
    let mut is_stale = true;
    while !state.is_over {
        let due = drawn.map_or(Duration::ZERO, |drawn| FRAME.saturating_sub(drawn.elapsed()));
        if is_stale && due.is_zero() {
            state.settle();
            let drawing = terminal.draw(|frame| screen::draw(state, clock::now_seconds(), frame));
            drawing.map_err(|source| Error::io("write to the terminal", source))?;
            (drawn, is_stale) = (Some(Instant::now()), false);
        }
        match events.recv_timeout(if is_stale { due } else { TICK }) {
            Ok(event) => state.handle_event(event).into_iter().for_each(&mut perform),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        is_stale = true;
    }
    Ok(())
}

/// The pod that is named on the command line, as it is now.
fn row_of(machine: &Machine, pod: &str) -> Result<Option<Row>> {
    match machine.any(pod)? {
        Found::Living(entry) => Ok(feed::described(machine, &machine.table()?, vec![&entry]).pop()),
        Found::Elsewhere(address) => Err(Error::told(format!(
            "the TUI shows pods of your own lock; \"insomnia attach {}\" follows this one",
            address.pod
        ))),
        Found::Ended(_) => {
            let pod = KnownPod {
                pod_id: PodId::new(pod)?,
                name: PodName::new(pod)
                    .or_else(|_| PodName::new(pod.rsplit_once('-').map_or(pod, |(name, _)| name)))?,
                status: Status::Stopped,
                answers: false,
                detail: String::new(),
                since: 0,
                scope: Vec::new(),
                last_response: String::new(),
                turn: 0,
                usage: Default::default(),
                usage_tree: Default::default(),
                spawner: None,
                socket: String::new(),
            };
            Ok(Some(Row { pod, life: None })) // its newest session is meant
        }
    }
}

/// The terminal while it is ours; dropping it gives it back.
#[derive(Debug)]
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal, and sees to it that it is given back however the program ends: by a panic of any thread,
    /// a signal, or a terminal that takes nothing any more. Keys come from a thread of their own.
    ///
    /// # Errors
    /// As the terminal's own.
    pub fn enter(events: &Sender<Event>) -> io::Result<Screen> {
        log::set_max_level(log::LevelFilter::Off); // it would be written over the screen
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            before(panic);
            exit_now(101); // as with panic=abort: no thread goes on without the terminal
        }));
        let ends = events.clone();
        on_end_signals(move |_| {
            let _ = ends.send_timeout(Event::End, FAREWELL);
            std::thread::sleep(FAREWELL);
            // The program hangs in a write to a terminal that takes nothing, not even the words that leave it.
            let _ = disable_raw_mode();
            exit_now(1);
        })?;
        let screen = Screen { terminal: Terminal::new(CrosstermBackend::new(io::stdout()))? };
        enable_raw_mode()?;
        let flags = KeyboardEnhancementFlags::DISAMBIGUATE_ESCAPE_CODES; // terminals that know it tell Shift-Enter
        let push = PushKeyboardEnhancementFlags(flags);
        execute!(io::stdout(), EnterAlternateScreen, EnableBracketedPaste, push)?;
        let keys = events.clone();
        std::thread::Builder::new().name("keys".into()).spawn(move || {
            while let Ok(event) = read() {
                if keys.send(Event::Terminal(event)).is_err() {
                    return;
                }
            }
            let _ = keys.send(Event::End); // the terminal is gone
        })?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back. What fails here fails because it is gone.
fn restore() {
    let _ = disable_raw_mode();
    let leave = (PopKeyboardEnhancementFlags, DisableBracketedPaste, LeaveAlternateScreen, Show);
    let _ = execute!(io::stdout(), leave.0, leave.1, leave.2, leave.3);
}
