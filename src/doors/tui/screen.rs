//! The state as a frame: what stands where. Pure, but for the time of day.

use ratatui::Frame;
use ratatui::layout::{Position, Rect};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Clear, Paragraph};

use crate::doors::tui::columns::{columns, fit, shown, wrap};
use crate::doors::tui::paint::{Paint, Tone};
use crate::doors::tui::state::{Focus, Over, Page, State};
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::scope::Loan;

/// The keys and what they do.
pub const KEYS: &[(&str, &str)] = &[
    ("Tab", "go on: pods, conversation, input"),
    ("Up Down j k", "select a pod; scroll"),
    ("Enter", "open the pod; send"),
    ("Esc", "leave the input; back to all root pods"),
    ("Alt-Enter Ctrl-J", "a new line in the input"),
    ("PgUp PgDn g G", "scroll; to the beginning, to the end"),
    ("[ ]", "turn above, below"),
    ("{ } Space f", "tool call above, below; fold it; fold all"),
    ("/ n N", "search; next hit above, below"),
    ("c r", "cancel the turn; resume"),
    ("s S", "stop the pod; stop it and all below it"),
    ("w F2", "who may write what"),
    ("? F1", "this help"),
    ("q Ctrl-C", "leave; the pods go on"),
];

/// Draws one frame.
pub fn draw(state: &State, now_seconds: u64, frame: &mut Frame<'_>) {
    let [tree, talk, input, foot] = state.areas();
    draw_tree(state, now_seconds, tree, frame);
    draw_talk(state, talk, frame);
    draw_input(state, input, frame);
    draw_foot(state, foot, frame);
    let over = Rect { height: foot.y, ..frame.area() };
    if let Over::Page(page, first) = state.over {
        let line = |(keys, about): &(&str, &str)| format!("{keys:<18}{about}");
        let (name, lines) = match page {
            Page::Help => ("keys", KEYS.iter().map(line).collect()),
            Page::Scope => ("who may write what", scope_lines(&state.table)),
        };
        draw_over(name, lines, first, over, state.paint, frame);
    }
}

fn title(text: &str, width: u16, has_focus: bool, paint: Paint) -> Line<'static> {
    let text = fit(&format!(" {text} "), usize::from(width));
    Line::styled(text, paint.of(if has_focus { Tone::Strong } else { Tone::Quiet }))
}

fn draw_tree(state: &State, now_seconds: u64, area: Rect, frame: &mut Frame<'_>) {
    let text = state.tree.root.as_ref().map_or("root pods".to_owned(), |root| format!("pods of {root}"));
    let title = title(&text, area.width.saturating_sub(1), state.focus == Focus::Tree, state.paint);
    let block = Block::new().borders(Borders::TOP | Borders::RIGHT).title(title);
    let inner = block.inner(area);
    let opened = state.chosen.as_ref().map(|chosen| &chosen.row.pod.pod_id);
    let size = (usize::from(inner.width), usize::from(inner.height));
    let lines = state.tree.view(size, opened, now_seconds, state.paint);
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn draw_talk(state: &State, area: Rect, frame: &mut Frame<'_>) {
    let (text, lines) = match &state.chosen {
        None => {
            let hint = "choose a pod with Up, Down and Enter; ? shows the keys";
            let lines = wrap(hint, usize::from(area.width)).into_iter().map(|row| Line::raw(row.to_owned()));
            ("no pod chosen".to_owned(), lines.collect())
        }
        Some(chosen) => {
            let pod = &chosen.row.pod.pod_id;
            let now = state.tree.get(pod).unwrap_or(&chosen.row);
            let what = match (chosen.trouble.as_str(), now.pod.detail.as_str()) {
                ("", "") => now.pod.status.to_string(),
                ("", detail) => format!("{}: {}", now.pod.status, shown(detail)),
                (how, _) if chosen.is_gone => format!("{how}; this is its log"),
                (trouble, _) => trouble.to_owned(),
            };
            let more = if state.conversation.follows() { "" } else { ", more below" };
            (format!("{pod}, {what}{more}"), state.conversation.view(state.paint))
        }
    };
    let title = title(&text, area.width, state.focus == Focus::Talk, state.paint);
    frame.render_widget(Paragraph::new(lines).block(Block::new().borders(Borders::TOP).title(title)), area);
}

fn draw_input(state: &State, area: Rect, frame: &mut Frame<'_>) {
    let to = state.chosen.as_ref().map_or(String::new(), |chosen| format!("to {}", chosen.row.pod.pod_id));
    let has_focus = state.focus == Focus::Input;
    let block = Block::new().borders(Borders::TOP).title(title(&to, area.width, has_focus, state.paint));
    let inner = Rect { x: area.x + 2, width: area.width.saturating_sub(3).max(1), ..block.inner(area) };
    frame.render_widget(block, area);
    let (lines, (column, row)) = state.input.view(usize::from(inner.width));
    frame.render_widget(Line::raw(">"), Rect { x: area.x, width: 1, height: 1, ..inner });
    frame.render_widget(Paragraph::new(lines), inner);
    if has_focus && state.over == Over::Nothing {
        let to_u16 = |number: usize| u16::try_from(number).unwrap_or(0);
        frame.set_cursor_position(Position::new(inner.x + to_u16(column), inner.y + to_u16(row)));
    }
}

fn draw_foot(state: &State, area: Rect, frame: &mut Frame<'_>) {
    let (text, tone) = match (&state.over, state.told.as_str(), state.focus) {
        (Over::Question(row, tree), ..) => {
            let below = match (state.table.children(&row.pod.pod_id).next(), tree) {
                (None, _) => "",
                (Some(_), true) => " and every pod below it",
                (Some(_), false) => ", not those below it",
            };
            (format!("stop pod {}{below}? y / n", row.pod.pod_id), Tone::Marked)
        }
        (Over::Search(needle), ..) => (format!("search: {}", shown(needle)), Tone::Strong),
        (Over::Page(..), ..) => ("Up, Down: scroll; any other key closes".to_owned(), Tone::Quiet),
        (Over::Nothing, "", Focus::Input) => {
            ("Enter sends, Esc leaves the input, F1 shows the keys".to_owned(), Tone::Quiet)
        }
        (Over::Nothing, "", Focus::Tree | Focus::Talk) => (
            "c cancel  r resume  s stop  S stop tree  w who writes  / search  ? help  q leave".to_owned(),
            Tone::Quiet,
        ),
        (Over::Nothing, told, _) => (told.to_owned(), Tone::Strong),
    };
    let text = fit(&text, usize::from(area.width));
    if let Over::Search(_) = state.over {
        let column = u16::try_from(columns(&text)).unwrap_or(0).min(area.width.saturating_sub(1));
        frame.set_cursor_position(Position::new(area.x + column, area.y));
    }
    frame.render_widget(Line::styled(text, state.paint.of(tone)), area);
}

fn draw_over(name: &str, lines: Vec<String>, first: usize, area: Rect, paint: Paint, frame: &mut Frame<'_>) {
    let block = Block::bordered().title(title(name, area.width.saturating_sub(2), true, paint));
    let inner = block.inner(area);
    let rows = lines.iter().flat_map(|line| wrap(line, usize::from(inner.width)));
    let rows: Vec<Line<'_>> = rows.map(Line::raw).collect();
    let first = first.min(rows.len().saturating_sub(usize::from(inner.height)));
    let rows: Vec<Line<'_>> = rows.into_iter().skip(first).collect();
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(rows).block(block), area);
}

/// Every pod with what it may write and what of that is lent, each below the pod that its scope was lent from.
fn scope_lines(table: &AllocationTable) -> Vec<String> {
    let mut lines = Vec::new();
    let roots = table.allocations().iter().filter(|entry| entry.delegated_from.is_none());
    let mut stack: Vec<(usize, &Allocation)> = roots.rev().map(|root| (0, root)).collect();
    while let Some((depth, entry)) = stack.pop() {
        let indent = "    ".repeat(depth);
        lines.push(format!("{indent}{}", entry.pod_id));
        let mut writes = entry.write_rules().peekable();
        if writes.peek().is_none() {
            lines.push(format!("{indent}  writes nothing"));
        }
        lines.extend(writes.map(|rule| format!("{indent}  writes {}", shown(&rule.to_string()))));
        let loans = table.loans(&entry.pod_id);
        let lent =
            |loan: &Loan| format!("{indent}  but not {}, lent to {}", shown(loan.rule.path()), loan.holder);
        lines.extend(loans.iter().map(lent));
        let children: Vec<_> = table.children(&entry.pod_id).collect();
        stack.extend(children.into_iter().rev().map(|child| (depth + 1, child)));
    }
    if lines.is_empty() {
        lines.push("nobody holds any scope".into());
    }
    lines
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{Event as TerminalEvent, KeyCode, KeyEvent, KeyModifiers};
    use ratatui::layout::Size;
    use ratatui::style::Color;

    use super::*;
    use crate::doors::tui::state::{Effect, Event, News};
    use crate::doors::tui::tree::Row;
    use crate::words::message::{Cause, Item, LoggedItem};
    use crate::words::protocol::{Method, StreamEvent};

    const SIZES: [(u16, u16); 2] = [(80, 24), (200, 60)];

    fn row(id: &str, spawner: Option<&str>, status: &str, words: &str) -> Row {
        let pod = serde_json::json!({
            "pod_id": id, "name": id, "status": status, "answers": true, "detail": format!("doing {status}"), "since": 940,
            "scope": [format!("/プロジェクト/{id}:write:recursive")], "last_response": words, "spawner": spawner, "socket": "/s",
        });
        Row { pod: serde_json::from_value(pod).unwrap(), life: None }
    }

    fn family() -> Vec<Row> {
        let below = |id: &str, status: &str| row(id, Some("main"), status, "直しました\x1b[2J");
        vec![row("main", None, "running", "始めます"), below("coder", "idle"), below("tester", "paused")]
    }

    fn surveyed(rows: Vec<Row>, root: Option<&str>) -> Event {
        let lock = serde_json::json!({ "version": 1, "allocations": [
            allocation("main", None, "/プロジェクト"), allocation("coder", Some("main"), "/プロジェクト/coder") ] });
        let table = AllocationTable::parse(lock.to_string().as_bytes()).unwrap();
        Event::Surveyed { rows, root: root.map(|id| id.parse_id()), table: Ok(table) }
    }

    fn allocation(id: &str, from: Option<&str>, path: &str) -> serde_json::Value {
        serde_json::json!({ "pod_id": id, "name": id, "pid": 1000 + id.len(), "start_time": 1, "life": format!("{:032x}", id.len()),
            "state": "live", "spawned_by": null, "socket": "/s", "scope_allow": [format!("{path}:write:recursive")],
            "delegated_from": from, "since": 1 })
    }

    trait ParseId {
        fn parse_id(&self) -> crate::words::identity::PodId;
    }

    impl ParseId for str {
        fn parse_id(&self) -> crate::words::identity::PodId {
            crate::words::identity::PodId::new(self).unwrap()
        }
    }

    fn state(size: (u16, u16)) -> State {
        State::new(Size::new(size.0, size.1), Paint { has_colours: false }, None)
    }

    fn press(state: &mut State, code: KeyCode) -> Vec<Effect> {
        state.handle_event(Event::Terminal(TerminalEvent::Key(KeyEvent::new(code, KeyModifiers::NONE))))
    }

    fn item(state: &mut State, item: Item) {
        let event = StreamEvent::Item(LoggedItem { at: 0, item });
        state.handle_event(Event::News { choice: 1, news: News::Stream(Box::new(event)) });
    }

    /// The frame as lines without their trailing spaces; every one must fit the terminal.
    fn frame(state: &mut State) -> Vec<String> {
        state.settle();
        let mut terminal = Terminal::new(TestBackend::new(state.size.width, state.size.height)).unwrap();
        terminal.draw(|frame| draw(state, 1_000, frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y: u16| {
            let (mut line, mut x) = (String::new(), 0);
            while x < buffer.area.width {
                let symbol = buffer[(x, y)].symbol();
                line.push_str(symbol);
                x += u16::try_from(columns(symbol).max(1)).unwrap();
            }
            assert_eq!(columns(&line), usize::from(buffer.area.width), "{line}");
            line.trim_end().to_owned()
        };
        (0..buffer.area.height).map(line).collect()
    }

    /// A state that shows the conversation of `main` of a whole family.
    fn opened(size: (u16, u16)) -> State {
        let mut state = state(size);
        state.handle_event(surveyed(vec![family().remove(0)], None));
        let effects = press(&mut state, KeyCode::Enter);
        assert!(matches!(&effects[..], [Effect::Survey(Some(_)), Effect::Follow(_, 1)]), "{effects:?}");
        state.handle_event(surveyed(family(), Some("main")));
        item(&mut state, Item::TurnStarted { turn: 1, cause: Cause::Run });
        item(
            &mut state,
            Item::Input {
                text: "ソースを\tよく読んで、それから直してください。急ぎません。".into(),
                from: None,
            },
        );
        let delta = StreamEvent::TextDelta { text: "はい、今\u{202e}".into() };
        state.handle_event(Event::News { choice: 1, news: News::Stream(Box::new(delta)) });
        state
    }

    #[test]
    fn the_first_frame_comes_before_any_data() {
        for size in SIZES {
            let lines = frame(&mut state(size));
            assert!(
                lines[0].starts_with(" root pods ──") && lines[1].starts_with("looking ..."),
                "{lines:#?}"
            );
            assert!(lines[1].contains("choose a pod with Up, Down and Enter"));
        }
    }

    #[test]
    fn the_tree_the_conversation_and_the_input_stand_side_by_side() {
        let mut state = opened(SIZES[0]);
        assert!(press(&mut state, KeyCode::Char('返')).is_empty());
        let mut expected = vec![
            " pods of main ───────────┐ main, running: doing running ────────────────────────",
            "*main running 1m doing r…│-- turn 1 (run)",
            "   プロジェクト/main 始… │> ソースを    よく読んで、それから直してください。急ぎ",
            "  coder idle 1m doing id…│ません。",
            "    プロジェクト/coder … │はい、今\\u{202e}",
            "  tester paused 1m doing…│",
            "    プロジェクト/tester …│",
        ];
        expected.extend(["                         │"; 14]);
        let rule = " to main ───────────────────────────────────────────────────────────────────────";
        expected.extend([rule, "> 返", "Enter sends, Esc leaves the input, F1 shows the keys"]);
        assert_eq!(frame(&mut state), expected);
        state.handle_event(Event::Terminal(TerminalEvent::Resize(200, 60)));
        let lines = frame(&mut state);
        assert_eq!(lines.len(), 60);
        let has = |text: &str| lines.iter().any(|line| line.contains(text));
        assert!(
            has("coder idle 1m doing idle") && has("プロジェクト/coder 直しました\\x1b[2J"),
            "{lines:#?}"
        );
        assert!(has("> ソースを    よく読んで、それから直してください。急ぎません。"));
    }

    #[test]
    fn what_lies_over_the_screen_takes_the_keys() {
        for size in SIZES {
            let mut state = opened(size);
            press(&mut state, KeyCode::F(1));
            let lines = frame(&mut state);
            for (keys, about) in KEYS {
                assert!(lines.iter().any(|line| line.contains(keys) && line.contains(about)), "{lines:#?}");
            }
            press(&mut state, KeyCode::Char('x'));
            press(&mut state, KeyCode::F(2));
            let lines = frame(&mut state).join("\n");
            for line in [
                "│main ",
                "│  writes /プロジェクト:write:recursive",
                "│  but not /プロジェクト/coder, lent to coder",
                "│    coder ",
                "│      writes /プロジェクト/coder:write:recursive",
            ] {
                assert!(lines.contains(line), "{line}: {lines}");
            }
            (0..3).for_each(|_| drop(press(&mut state, KeyCode::Esc)));
            assert!(frame(&mut state)[0].starts_with(" root pods ──"), "Esc goes back to all root pods");
            press(&mut state, KeyCode::Char('/'));
            "直し".chars().for_each(|c| drop(press(&mut state, KeyCode::Char(c))));
            assert_eq!(frame(&mut state).last().unwrap(), "search: 直し");
            press(&mut state, KeyCode::Enter);
            assert_eq!(frame(&mut state).last().unwrap(), "\"直し\": 1 of 1");
            press(&mut state, KeyCode::Char('n'));
            assert_eq!(frame(&mut state).last().unwrap(), "\"直し\" is not found above");
        }
    }

    #[test]
    fn only_a_yes_stops_a_pod() {
        for (key, tree) in [('s', false), ('S', true)] {
            let mut state = opened(SIZES[0]);
            for code in [KeyCode::Tab, KeyCode::Down, KeyCode::Char(key)] {
                press(&mut state, code);
            }
            assert_eq!(frame(&mut state).last().unwrap(), "stop pod coder? y / n", "nobody is below it");
            assert!(press(&mut state, KeyCode::Enter).is_empty());
            press(&mut state, KeyCode::Char(key));
            assert_eq!(
                press(&mut state, KeyCode::Char('y')),
                [Effect::Stop(Box::new(family().remove(1)), tree)]
            );
        }
    }

    #[test]
    fn keys_and_pastes_reach_the_chosen_pod() {
        let mut state = opened(SIZES[0]);
        state.handle_event(Event::Terminal(TerminalEvent::Paste("一行\r二行\x1b".into())));
        let sent = press(&mut state, KeyCode::Enter);
        let wanted = Method::Run { input: "一行\n二行".into() };
        assert!(
            matches!(&sent[..], [Effect::Ask(row, method)] if row.pod.pod_id.as_str() == "main" && *method == wanted)
        );
        press(&mut state, KeyCode::Esc);
        assert!(matches!(&press(&mut state, KeyCode::Char('c'))[..], [Effect::Ask(_, Method::Cancel)]));
        assert!(matches!(&press(&mut state, KeyCode::Char('r'))[..], [Effect::Ask(_, Method::Resume)]));
        for _ in 0..20 {
            press(&mut state, KeyCode::Char('c'));
        }
        assert_eq!(state.told, "too many requests are on their way");
        press(&mut state, KeyCode::Char('q'));
        assert!(state.is_over);
    }

    #[test]
    fn a_pod_that_ends_stays_readable_and_takes_no_text() {
        let mut state = opened(SIZES[0]);
        let gone = News::Gone("ended without saying so".into());
        state.handle_event(Event::News { choice: 1, news: gone });
        state.handle_event(surveyed(family().into_iter().skip(1).collect(), Some("main")));
        press(&mut state, KeyCode::Char('x'));
        assert!(press(&mut state, KeyCode::Enter).is_empty());
        let text = frame(&mut state).join("\n");
        for part in [
            "main, ended without saying so",
            "main ended without say",
            "はい、今",
            "pod main has ended; \"insomnia resume main\"",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        press(&mut state, KeyCode::Esc);
        assert!(press(&mut state, KeyCode::Char('r')).is_empty());
        assert_eq!(state.told, "pod main has ended; \"insomnia resume main\" starts it again");
        press(&mut state, KeyCode::Backspace);
        let late = News::Silent("of an earlier choice".into());
        state.handle_event(Event::News { choice: 0, news: late });
        assert!(!frame(&mut state).join("").contains("earlier"));
    }

    #[test]
    fn a_draft_is_never_sent_to_another_pod() {
        let mut state = opened(SIZES[0]);
        for code in [KeyCode::Char('x'), KeyCode::Tab, KeyCode::Down, KeyCode::Enter] {
            press(&mut state, code);
        }
        assert_eq!(frame(&mut state)[22], ">");
        assert!(press(&mut state, KeyCode::Enter).is_empty());
        press(&mut state, KeyCode::Up);
        assert_eq!(state.input.text(), "x");
    }

    #[test]
    fn sixty_four_pods_are_scrolled_through() {
        let mut state = state(SIZES[0]);
        let rows: Vec<Row> = (0..64).map(|n| row(&format!("pod-{n:02}"), None, "idle", "")).collect();
        state.handle_event(surveyed(rows, None));
        (0..63).for_each(|_| drop(press(&mut state, KeyCode::Down)));
        let text = frame(&mut state).join("\n");
        assert!(text.contains("pod-63") && text.contains("pod-54") && !text.contains("pod-53"), "{text}");
    }

    #[test]
    fn without_colours_only_bold_dim_and_reverse_are_used() {
        for has_colours in [true, false] {
            let mut state = opened(SIZES[0]);
            state.paint = Paint { has_colours };
            state.settle();
            let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
            terminal.draw(|frame| draw(&state, 1_000, frame)).unwrap();
            let is_coloured =
                terminal.backend().buffer().content().iter().any(|cell| cell.fg != Color::Reset);
            assert_eq!(is_coloured, has_colours);
        }
    }
}
