//! All that the screen shows, and the one function that changes it. Knows no terminal, socket, file or thread.

use ratatui::crossterm::event::{Event as TerminalEvent, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect, Size};

use crate::doors::tui::conversation::{Conversation, Target};
use crate::doors::tui::input::Input;
use crate::doors::tui::paint::Paint;
use crate::doors::tui::tree::{Row, Tree};
use crate::words::allocation::AllocationTable;
use crate::words::identity::PodId;
use crate::words::protocol::{Method, Status, StreamEvent};
use crate::words::text::harmless_line;

/// Requests on their way at once; more are refused until one is answered.
const REQUESTS_MAX: usize = 16;

/// Everything that can happen.
#[derive(Debug)]
pub enum Event {
    /// A key, a paste, another size.
    Terminal(TerminalEvent),
    /// The pods were looked at.
    Surveyed {
        /// Those that were found.
        rows: Vec<Row>,
        /// Whose they are: the root at that time.
        root: Option<PodId>,
        /// The lock, or why it cannot be read.
        table: Result<AllocationTable, String>,
    },
    /// Something about the chosen pod; late ones of another choice are dropped by their number.
    News {
        /// The number of the choice.
        choice: u64,
        /// What it is.
        news: News,
    },
    /// What a request came to.
    Told(String),
    /// Somebody ends the program, or the terminal is gone.
    End,
}

/// What is heard of the chosen pod.
#[derive(Debug)]
pub enum News {
    /// A line of its stream, or an item of its log.
    Stream(Box<StreamEvent>),
    /// It listens; the reply that was streaming comes again from its beginning.
    Listening,
    /// It lives but cannot be followed, and why; its log is read instead.
    Silent(String),
    /// It has ended, and how; the rest of its log has been told.
    Gone(String),
}

/// What is to be done outside.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Survey the tree of this pod, or the root pods.
    Survey(Option<PodId>),
    /// Follow this pod, under this number.
    Follow(Box<Row>, u64),
    /// Ask this pod.
    Ask(Box<Row>, Method),
    /// Stop a pod, or it and all below it.
    Stop(Box<Row>, bool),
}

/// Where keys go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Focus {
    /// To the pods.
    #[default]
    Tree,
    /// To the conversation.
    Talk,
    /// To the line of input.
    Input,
}

/// A page over the usual screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Page {
    /// The keys.
    Help,
    /// Who may write what.
    Scope,
}

/// What lies over the usual screen.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Over {
    /// Nothing.
    #[default]
    Nothing,
    /// A page, from this row on.
    Page(Page, usize),
    /// Whether to stop this pod, and all below it.
    Question(Box<Row>, bool),
    /// What is searched, as typed so far.
    Search(String),
}

/// The chosen pod.
#[derive(Debug)]
pub struct Chosen {
    /// As it was when it was chosen.
    pub row: Row,
    /// Why it is not followed now; empty while it is.
    pub trouble: String,
    /// Whether it has ended.
    pub is_gone: bool,
}

/// All that the screen shows.
#[derive(Debug, Default)]
pub struct State {
    /// The pods.
    pub tree: Tree,
    /// The pod whose conversation is shown.
    pub chosen: Option<Chosen>,
    choice: u64,
    /// Its conversation.
    pub conversation: Conversation,
    /// What is being typed.
    pub input: Input,
    /// Where keys go.
    pub focus: Focus,
    /// What lies over the screen.
    pub over: Over,
    /// The lock as it was last read.
    pub table: AllocationTable,
    /// The last word about a request.
    pub told: String,
    requests: usize,
    /// The size of the terminal.
    pub size: Size,
    /// Colours or not.
    pub paint: Paint,
    /// Whether to leave.
    pub is_over: bool,
}

impl State {
    /// The screen before anything is known.
    pub fn new(size: Size, paint: Paint, root: Option<PodId>) -> State {
        State { tree: Tree::of(root), size, paint, ..State::default() }
    }

    /// Where the pods, the conversation, the input and the last row lie.
    pub fn areas(&self) -> [Rect; 4] {
        let all = Rect::new(0, 0, self.size.width, self.size.height);
        let rows = self.input.rows(usize::from(all.width.saturating_sub(3)).max(1));
        let rows = u16::try_from(rows).unwrap_or(1) + 1;
        let [body, input, foot] =
            Layout::vertical([Constraint::Min(3), Constraint::Length(rows), Constraint::Length(1)])
                .areas(all);
        let width = (all.width * 3 / 10).clamp(26, 70);
        let [tree, talk] = Layout::horizontal([Constraint::Length(width), Constraint::Min(10)]).areas(body);
        [tree, talk, input, foot]
    }

    /// Makes the conversation fit the screen. To be called before a frame.
    pub fn settle(&mut self) {
        let [_, talk, ..] = self.areas();
        self.conversation.settle(usize::from(talk.width), usize::from(talk.height.saturating_sub(1)));
    }

    /// Takes one event and says what is to be done.
    pub fn handle_event(&mut self, event: Event) -> Vec<Effect> {
        match event {
            Event::Terminal(TerminalEvent::Key(key)) if key.kind != KeyEventKind::Release => {
                return self.on_key(key);
            }
            Event::Terminal(TerminalEvent::Paste(text)) => self.on_paste(&text),
            Event::Terminal(TerminalEvent::Resize(width, height)) => self.size = Size { width, height },
            Event::Terminal(
                TerminalEvent::Key(_)
                | TerminalEvent::Mouse(_)
                | TerminalEvent::FocusGained
                | TerminalEvent::FocusLost,
            ) => {}
            Event::Surveyed { rows, root, table } if root == self.tree.root => {
                self.tree.update(rows);
                match table {
                    Ok(table) => self.table = table,
                    Err(reason) => self.told = reason,
                }
            }
            Event::News { choice, news } if choice == self.choice => self.on_news(news),
            Event::Surveyed { .. } | Event::News { .. } => {} // of an earlier choice
            Event::Told(text) => {
                self.requests = self.requests.saturating_sub(1);
                self.told = harmless_line(&text);
            }
            Event::End => self.is_over = true,
        }
        Vec::new()
    }

    fn on_news(&mut self, news: News) {
        let Some(chosen) = &mut self.chosen else { return };
        match news {
            News::Stream(event) => {
                if let StreamEvent::Status { status, detail } = event.as_ref() {
                    self.tree.note(&chosen.row.pod.pod_id, *status, detail);
                }
                self.conversation.add(&event);
            }
            News::Listening => {
                chosen.trouble.clear();
                self.conversation.forget_streaming();
            }
            News::Silent(reason) => chosen.trouble = harmless_line(&reason),
            News::Gone(how) => {
                self.tree.note(&chosen.row.pod.pod_id, Status::Stopped, &how);
                (chosen.trouble, chosen.is_gone) = (how, true);
            }
        }
    }

    fn on_paste(&mut self, text: &str) {
        match &mut self.over {
            Over::Search(needle) => needle.push_str(&harmless_line(text)),
            Over::Nothing => {
                self.focus = Focus::Input;
                self.type_in(text);
            }
            Over::Page(..) | Over::Question(..) => {}
        }
    }

    fn type_in(&mut self, text: &str) {
        if !self.input.insert(text) {
            self.told = "that is too long to be sent; write it to a file and name the file".into();
        }
    }

    fn on_key(&mut self, key: KeyEvent) -> Vec<Effect> {
        let has_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if has_control && matches!(key.code, KeyCode::Char('c' | 'q')) {
            self.is_over = true;
            return Vec::new();
        }
        self.told.clear();
        match std::mem::replace(&mut self.over, Over::Nothing) {
            Over::Nothing => return self.on_usual_key(key, has_control),
            Over::Page(page, first) => {
                let first = match (key.code, ()) {
                    (KeyCode::Down | KeyCode::Char('j'), ()) => first + 1,
                    (KeyCode::Up | KeyCode::Char('k'), ()) => first.saturating_sub(1),
                    (KeyCode::PageDown, ()) => first + 10,
                    (KeyCode::PageUp, ()) => first.saturating_sub(10),
                    _ => return Vec::new(),
                };
                self.over = Over::Page(page, first);
            }
            Over::Question(row, tree) if matches!(key.code, KeyCode::Char('y' | 'Y')) => {
                self.told = format!("stopping {} ...", row.pod.pod_id);
                return self.begin(Effect::Stop(row, tree));
            }
            Over::Question(..) => self.told = "nothing is stopped".into(),
            Over::Search(needle) => self.on_search_key(needle, key.code),
        }
        Vec::new()
    }

    fn on_search_key(&mut self, mut needle: String, code: KeyCode) {
        match (code, ()) {
            (KeyCode::Char(c), ()) => needle.push(c),
            (KeyCode::Backspace, ()) => drop(needle.pop()),
            (KeyCode::Enter, ()) => {
                self.conversation.needle = needle.to_lowercase();
                return self.jump(Target::Hit, false);
            }
            (KeyCode::Esc, ()) => return,
            _ => {}
        }
        self.over = Over::Search(needle);
    }

    fn jump(&mut self, target: Target, forward: bool) {
        self.focus = Focus::Talk;
        let found = self.conversation.jump(target, forward);
        let way = if forward { "below" } else { "above" };
        self.told = match (found, target) {
            (true, Target::Hit) => {
                let (at, all) = self.conversation.hits();
                format!("\"{}\": {at} of {all}", harmless_line(&self.conversation.needle))
            }
            (true, Target::Turn | Target::Call) => String::new(),
            (false, Target::Hit) => {
                format!("\"{}\" is not found {way}", harmless_line(&self.conversation.needle))
            }
            (false, Target::Turn) => format!("no turn begins {way}"),
            (false, Target::Call) => format!("there is no tool call {way}"),
        };
    }

    fn on_usual_key(&mut self, key: KeyEvent, has_control: bool) -> Vec<Effect> {
        match (key.code, self.focus) {
            (KeyCode::Tab, _) => self.focus = next(self.focus),
            (KeyCode::BackTab, _) => self.focus = next(next(self.focus)),
            (KeyCode::F(1), _) => self.over = Over::Page(Page::Help, 0),
            (KeyCode::F(2), _) => self.over = Over::Page(Page::Scope, 0),
            (KeyCode::PageUp, _) => self.conversation.scroll_pages(-1),
            (KeyCode::PageDown, _) => self.conversation.scroll_pages(1),
            (_, Focus::Input) => return self.on_input_key(key, has_control),
            (KeyCode::Up | KeyCode::Char('k'), Focus::Tree) => self.tree.move_by(-1),
            (KeyCode::Down | KeyCode::Char('j'), Focus::Tree) => self.tree.move_by(1),
            (KeyCode::Enter, Focus::Tree) => return self.choose(),
            (KeyCode::Backspace | KeyCode::Left, Focus::Tree) => return self.show_tree_of(None),
            (KeyCode::Up | KeyCode::Char('k'), _) => self.conversation.scroll(-1),
            (KeyCode::Down | KeyCode::Char('j'), _) => self.conversation.scroll(1),
            (KeyCode::Home | KeyCode::Char('g'), _) => self.conversation.scroll(isize::MIN),
            (KeyCode::End | KeyCode::Char('G'), _) => self.conversation.scroll(isize::MAX),
            (KeyCode::Enter | KeyCode::Char('i'), _) => self.focus = Focus::Input,
            (KeyCode::Esc, _) => {
                self.focus = Focus::Tree;
                return self.show_tree_of(None);
            }
            (KeyCode::Char('q'), _) => self.is_over = true,
            (KeyCode::Char('?'), _) => self.over = Over::Page(Page::Help, 0),
            (KeyCode::Char('w'), _) => self.over = Over::Page(Page::Scope, 0),
            (KeyCode::Char('/'), _) => self.over = Over::Search(String::new()),
            (KeyCode::Char('n'), _) => self.jump(Target::Hit, false),
            (KeyCode::Char('N'), _) => self.jump(Target::Hit, true),
            (KeyCode::Char('['), _) => self.jump(Target::Turn, false),
            (KeyCode::Char(']'), _) => self.jump(Target::Turn, true),
            (KeyCode::Char('{'), _) => self.jump(Target::Call, false),
            (KeyCode::Char('}'), _) => self.jump(Target::Call, true),
            (KeyCode::Char(' '), _) => self.conversation.fold(),
            (KeyCode::Char('f'), _) => self.conversation.fold_all(),
            (KeyCode::Char('c'), _) => return self.ask(Method::Cancel),
            (KeyCode::Char('r'), _) => return self.ask(Method::Resume),
            (KeyCode::Char(letter @ ('s' | 'S')), _) => {
                if let Some(row) = self.target() {
                    self.over = Over::Question(Box::new(row.clone()), letter == 'S');
                }
            }
            _ => {}
        }
        Vec::new()
    }

    fn on_input_key(&mut self, key: KeyEvent, has_control: bool) -> Vec<Effect> {
        let has_alt = key.modifiers.contains(KeyModifiers::ALT);
        let breaks = has_alt || key.modifiers.contains(KeyModifiers::SHIFT);
        match (key.code, has_control) {
            (KeyCode::Enter, _) if breaks => self.type_in("\n"),
            (KeyCode::Char('j'), true) => self.type_in("\n"),
            (KeyCode::Enter, _) => return self.send(),
            (KeyCode::Esc, _) => self.focus = Focus::Talk,
            (KeyCode::Char('u'), true) => self.input.clear(),
            (KeyCode::Char('w'), true) => self.input.delete_word(),
            (KeyCode::Char('a'), true) | (KeyCode::Home, _) => self.input.home(),
            (KeyCode::Char('e'), true) | (KeyCode::End, _) => self.input.end(),
            (KeyCode::Char(c), false) if !has_alt => self.type_in(c.encode_utf8(&mut [0; 4])),
            (KeyCode::Backspace, _) => self.input.delete_before(),
            (KeyCode::Delete, _) => self.input.delete_under(),
            (KeyCode::Left, _) => self.input.left(),
            (KeyCode::Right, _) => self.input.right(),
            (KeyCode::Up, _) => self.input.up(),
            (KeyCode::Down, _) => self.input.down(),
            _ => {}
        }
        Vec::new()
    }

    /// The pod that keys mean: the selected one while they go to the pods, else the chosen one.
    pub fn target(&self) -> Option<&Row> {
        match (self.focus, &self.chosen) {
            (Focus::Talk | Focus::Input, Some(chosen)) => {
                Some(self.tree.get(&chosen.row.pod.pod_id).unwrap_or(&chosen.row))
            }
            (Focus::Tree, _) | (_, None) => self.tree.selected(),
        }
    }

    fn show_tree_of(&mut self, root: Option<PodId>) -> Vec<Effect> {
        if self.tree.root == root {
            return Vec::new();
        }
        self.tree = Tree::of(root.clone());
        vec![Effect::Survey(root)]
    }

    /// Chooses the selected pod; a root pod with its tree.
    fn choose(&mut self) -> Vec<Effect> {
        let Some(row) = self.tree.selected().cloned() else { return Vec::new() };
        let mut effects = Vec::new();
        if self.tree.root.is_none() {
            effects = self.show_tree_of(Some(row.pod.pod_id.clone()));
        }
        effects.push(self.follow(row));
        effects
    }

    /// Follows this pod and lets the keys go to the input.
    pub fn follow(&mut self, row: Row) -> Effect {
        self.choice += 1;
        self.conversation = Conversation::default();
        self.focus = Focus::Input;
        self.told.clear();
        let is_other = self.chosen.as_ref().is_some_and(|chosen| chosen.row.pod.pod_id != row.pod.pod_id);
        if is_other && !self.input.text().is_empty() {
            self.input.take(); // a draft belongs to its pod
            self.told = "what was typed for the other pod is in the history: Up".into();
        }
        self.chosen = Some(Chosen { row: row.clone(), trouble: String::new(), is_gone: false });
        Effect::Follow(Box::new(row), self.choice)
    }

    fn send(&mut self) -> Vec<Effect> {
        let Some(Chosen { row, is_gone, .. }) = &self.chosen else {
            self.told = "choose a pod first: Tab, then Enter".into();
            return Vec::new();
        };
        let row = Box::new(row.clone());
        if *is_gone {
            self.told = starts_again(&row);
        } else if !self.input.text().trim().is_empty() && !self.is_busy() {
            let input = self.input.take();
            self.conversation.scroll(isize::MAX);
            return self.begin(Effect::Ask(row, Method::Run { input }));
        }
        Vec::new()
    }

    fn ask(&mut self, method: Method) -> Vec<Effect> {
        let Some(row) = self.target().cloned() else { return Vec::new() };
        let is_gone = self.chosen.as_ref().is_some_and(|chosen| chosen.is_gone && chosen.row == row);
        if method == Method::Resume && (is_gone || row.pod.status == Status::Stopped) {
            self.told = starts_again(&row);
            return Vec::new();
        }
        self.begin(Effect::Ask(Box::new(row), method))
    }

    fn begin(&mut self, effect: Effect) -> Vec<Effect> {
        if self.is_busy() {
            return Vec::new();
        }
        self.requests += 1;
        vec![effect]
    }

    /// Whether nothing more can be asked now, which is said.
    fn is_busy(&mut self) -> bool {
        let is_busy = self.requests >= REQUESTS_MAX;
        if is_busy {
            self.told = "too many requests are on their way".into();
        }
        is_busy
    }
}

fn starts_again(row: &Row) -> String {
    let pod = &row.pod.pod_id;
    format!("pod {pod} has ended; \"insomnia resume {pod}\" starts it again")
}

fn next(focus: Focus) -> Focus {
    match focus {
        Focus::Tree => Focus::Talk,
        Focus::Talk => Focus::Input,
        Focus::Input => Focus::Tree,
    }
}
