//! How far the TUI lags behind 5,000 events a second, and what it holds after many of them: the real loop, state,
//! layout and drawing at 200x60, without a terminal's own time. `cargo bench --features tui --bench tui`
//!
//! `INSOMNIA_SOAK_EVENTS` sets how many events the soak takes (default 3,000,000).

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark prints")]

use std::io;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use insomnia::doors::tui::paint::Paint;
use insomnia::doors::tui::state::{Event, News, State};
use insomnia::doors::tui::tree::Row;
use insomnia::doors::tui::{EVENTS_MAX, show};
use insomnia::words::message::{AssistantMessage, Item, LoggedItem, Stop, ToolCall, Usage};
use insomnia::words::protocol::StreamEvent;
use ratatui::Terminal;
use ratatui::backend::{Backend, TestBackend, WindowSize};
use ratatui::buffer::Cell;
use ratatui::layout::{Position, Size};

const EVENTS_PER_SECOND: u32 = 5_000;
const BURST_EVENTS: u32 = 50_000;
const SIZE: (u16, u16) = (200, 60);

/// A screen that notes when each frame was whole and the newest event in it.
struct Watched {
    screen: TestBackend,
    frames: Vec<(Instant, u32)>,
}

impl Backend for Watched {
    fn draw<'a, I: Iterator<Item = (u16, u16, &'a Cell)>>(&mut self, content: I) -> io::Result<()> {
        self.screen.draw(content)
    }
    fn hide_cursor(&mut self) -> io::Result<()> {
        self.screen.hide_cursor()
    }
    fn show_cursor(&mut self) -> io::Result<()> {
        self.screen.show_cursor()
    }
    fn get_cursor_position(&mut self) -> io::Result<Position> {
        self.screen.get_cursor_position()
    }
    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> io::Result<()> {
        self.screen.set_cursor_position(position)
    }
    fn clear(&mut self) -> io::Result<()> {
        self.screen.clear()
    }
    fn size(&self) -> io::Result<Size> {
        self.screen.size()
    }
    fn window_size(&mut self) -> io::Result<WindowSize> {
        self.screen.window_size()
    }
    fn flush(&mut self) -> io::Result<()> {
        let (left, bottom) = (SIZE.0 * 3 / 10, SIZE.1 - 4);
        let shown = (bottom.saturating_sub(3)..=bottom).rev().find_map(|y| {
            let row: String = (left..SIZE.0).map(|x| self.screen.buffer()[(x, y)].symbol()).collect();
            row.split_once("event ")?.1.split(' ').next()?.parse().ok()
        });
        self.frames.extend(shown.map(|event| (Instant::now(), event)));
        Ok(())
    }
}

fn news(event: StreamEvent) -> Event {
    Event::News { choice: 1, news: News::Stream(Box::new(event)) }
}

/// Mostly text that streams, now and then a whole reply with a tool call, and its result of a few KiB.
fn event(number: u32) -> Event {
    let id = format!("c{}", number / 50);
    let item = match number % 50 {
        48 => Item::Assistant(AssistantMessage {
            text: format!("event {number} 返事\n"),
            tool_calls: vec![ToolCall {
                id,
                name: "ReadFile".into(),
                input: serde_json::json!({ "path": "a" }),
            }],
            thinking: Vec::new(),
            stop: Stop::ToolUse,
            usage: Usage::default(),
        }),
        49 => {
            Item::ToolResult { id, name: "ReadFile".into(), ok: true, text: "a line of a file\n".repeat(200) }
        }
        _ => {
            return news(StreamEvent::TextDelta {
                text: format!("event {number} 日本語のテキスト and some text\n"),
            });
        }
    };
    news(StreamEvent::Item(LoggedItem { at: 0, item }))
}

fn resident_mib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
}

/// Runs the loop on what `send` sends; returns the frames.
fn run(send: impl FnOnce(&Sender<Event>) + Send + 'static) -> Vec<(Instant, u32)> {
    let (sender, events) = bounded(EVENTS_MAX);
    let mut state = State::new(Size::new(SIZE.0, SIZE.1), Paint { has_colours: true }, None);
    let pod = serde_json::json!({ "pod_id": "main", "name": "main", "status": "running", "answers": true, "detail": "",
        "scope": [], "last_response": "", "spawner": null, "socket": "" });
    let _ = state.follow(Row { pod: serde_json::from_value(pod).unwrap(), life: None });
    let screen = Watched { screen: TestBackend::new(SIZE.0, SIZE.1), frames: Vec::new() };
    let mut terminal = Terminal::new(screen).unwrap();
    let thread = std::thread::Builder::new().spawn(move || {
        send(&sender);
        std::thread::sleep(Duration::from_millis(100)); // the last frame
        sender.send(Event::End).unwrap();
    });
    show(&mut terminal, &mut state, &events, |_| ()).unwrap();
    thread.unwrap().join().unwrap();
    println!("  lines kept: {}", state.conversation.lines());
    std::mem::take(&mut terminal.backend_mut().frames)
}

fn main() {
    println!("burst: {BURST_EVENTS} events, {EVENTS_PER_SECOND} a second");
    let begin = Instant::now() + Duration::from_millis(200);
    let due = move |number: u32| begin + Duration::from_secs(1) * number / EVENTS_PER_SECOND;
    let frames = run(move |sender| {
        for number in 0..BURST_EVENTS {
            std::thread::sleep(due(number).saturating_duration_since(Instant::now()));
            sender.send(event(number)).unwrap();
        }
    });
    // The oldest event that a frame is the first to show has waited longest.
    let waited = frames.windows(2).filter(|pair| pair[1].1 > pair[0].1);
    let mut lags: Vec<Duration> =
        waited.map(|pair| pair[1].0.saturating_duration_since(due(pair[0].1 + 1))).collect();
    lags.sort();
    let at = |percent: usize| lags[(lags.len() - 1) * percent / 100].as_secs_f64() * 1e3;
    let newest = frames.iter().map(|(_, number)| number).max().unwrap();
    println!("  {} frames, newest event shown {newest}", frames.len());
    println!(
        "  lag of the oldest event in a frame: median {:.1} ms, 99th {:.1} ms, longest {:.1} ms",
        at(50),
        at(99),
        at(100)
    );

    let wanted = std::env::var("INSOMNIA_SOAK_EVENTS").ok().and_then(|text| text.parse().ok());
    let soak: u32 = wanted.unwrap_or(3_000_000);
    println!("soak: {soak} events, as fast as they are taken");
    let begin = Instant::now();
    run(move |sender| {
        let mut quarter = 0.0;
        for number in 0..soak {
            sender.send(event(number)).unwrap();
            if number == soak / 4 {
                quarter = resident_mib();
            }
        }
        println!("  resident after a quarter: {quarter:.1} MiB, at the end: {:.1} MiB", resident_mib());
    });
    println!("  {:.0} events a second", f64::from(soak) / begin.elapsed().as_secs_f64());
}
