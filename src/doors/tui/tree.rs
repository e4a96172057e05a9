//! The pods to choose from: the root pods of the lock, or the tree of one of them. Pure.

use ratatui::text::Line;

use crate::doors::terminal::ago;
use crate::doors::tui::columns::{fit, shown};
use crate::doors::tui::paint::{Paint, Tone};
use crate::words::identity::{Life, PodId};
use crate::words::protocol::{KnownPod, Status};
use crate::words::scope::Rule;
use crate::words::text::harmless_line;

/// Pods that have ended and are still shown.
const ENDED_MAX: usize = 64;
/// Lines of one pod.
const LINES: usize = 2;

/// A pod as the tree shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// What it says of itself, or what is known of it.
    pub pod: KnownPod,
    /// Its life, where the lock has it.
    pub life: Option<Life>,
}

/// The pods, and which one is selected.
#[derive(Debug, Default)]
pub struct Tree {
    /// The pod whose tree is shown; `None` for the root pods.
    pub root: Option<PodId>,
    /// Spawners before the spawned, each with its depth.
    rows: Vec<(usize, Row)>,
    selected: usize,
    is_known: bool,
}

impl Tree {
    /// The tree of this pod, or the root pods; empty until the first survey.
    pub fn of(root: Option<PodId>) -> Tree {
        Tree { root, ..Tree::default() }
    }

    /// Takes a new survey. What is missing in it has ended and stays, up to `ENDED_MAX` pods.
    pub fn update(&mut self, mut found: Vec<Row>) {
        self.is_known = true;
        let chosen = self.selected().map(|row| row.pod.pod_id.clone());
        // How a pod ended is known from its stream; a survey only knows that it did.
        let how = |pod: &KnownPod| match self.get(&pod.pod_id) {
            Some(Row { pod, .. }) if pod.status == Status::Stopped && !pod.detail.is_empty() => {
                pod.detail.clone()
            }
            Some(_) | None => "has ended".into(),
        };
        for row in found.iter_mut().filter(|row| row.pod.status == Status::Stopped) {
            row.pod.detail = how(&row.pod);
        }
        let gone = |(_, row): &(usize, Row)| {
            let is_there = found.iter().any(|new| new.pod.pod_id == row.pod.pod_id);
            let pod = KnownPod { status: Status::Stopped, detail: how(&row.pod), ..row.pod.clone() };
            (!is_there).then(|| Row { pod, life: row.life.clone() })
        };
        let mut ended: Vec<Row> = self.rows.iter().filter_map(gone).collect();
        ended.drain(..ended.len().saturating_sub(ENDED_MAX));
        found.append(&mut ended);
        self.rows = in_order(found, self.root.as_ref());
        let is_chosen = |(_, row): &(usize, Row)| Some(&row.pod.pod_id) == chosen.as_ref();
        self.selected = self
            .rows
            .iter()
            .position(is_chosen)
            .unwrap_or(self.selected)
            .min(self.rows.len().saturating_sub(1));
    }

    /// The selected pod.
    pub fn selected(&self) -> Option<&Row> {
        self.rows.get(self.selected).map(|(_, row)| row)
    }

    /// The pod of this id.
    pub fn get(&self, pod_id: &PodId) -> Option<&Row> {
        self.rows.iter().map(|(_, row)| row).find(|row| row.pod.pod_id == *pod_id)
    }

    /// Notes what a pod itself has just said of its state.
    pub fn note(&mut self, pod_id: &PodId, status: Status, detail: &str) {
        for (_, row) in self.rows.iter_mut().filter(|(_, row)| row.pod.pod_id == *pod_id) {
            row.pod.status = status;
            detail.clone_into(&mut row.pod.detail);
        }
    }

    /// Selects the pod so many rows below.
    pub fn move_by(&mut self, rows: isize) {
        self.selected = self.selected.saturating_add_signed(rows).min(self.rows.len().saturating_sub(1));
    }

    /// The lines of a window of this size, the selected pod among them. `opened` is marked by `*`.
    pub fn view(
        &self,
        (width, height): (usize, usize),
        opened: Option<&PodId>,
        now_seconds: u64,
        paint: Paint,
    ) -> Vec<Line<'static>> {
        if self.rows.is_empty() {
            let text = match (self.is_known, &self.root) {
                (false, _) => "looking ...",
                (true, None) => "no pod lives; \"insomnia run\" starts one",
                (true, Some(_)) => "this pod has ended",
            };
            return vec![Line::styled(fit(text, width), paint.of(Tone::Quiet))];
        }
        let fitting = (height / LINES).max(1);
        let first = (self.selected + 1).saturating_sub(fitting);
        let mut lines = Vec::with_capacity(height);
        for (at, (depth, row)) in self.rows.iter().enumerate().skip(first).take(fitting) {
            let pod = &row.pod;
            let is_lost = pod.status == Status::Stopped;
            let tone = match (at == self.selected, pod.status) {
                (true, _) => Tone::Marked,
                (false, _) if !pod.answers && !is_lost => Tone::Bad,
                (false, Status::Running) => Tone::Notice,
                (false, Status::Paused) => Tone::Bad,
                (false, Status::Idle) => Tone::Plain,
                (false, Status::Stopped) => Tone::Quiet,
            };
            let indent = " ".repeat((*depth).min(8));
            let mark = if Some(&pod.pod_id) == opened { '*' } else { ' ' };
            let doubt = if pod.answers { "" } else { "?" };
            let since = if pod.since == 0 { String::new() } else { ago(pod.since, now_seconds) };
            let status = format!("{}{doubt} {since}", pod.status);
            let status = if is_lost { "" } else { status.trim_end() }; // the detail tells how it ended
            let gap = if is_lost { "" } else { " " };
            let head = format!("{mark}{indent}{} {status}{gap}{}", pod.pod_id, shown(&pod.detail));
            lines.push(Line::styled(fit(head.trim_end(), width), paint.of(tone)));
            let words = harmless_line(&pod.last_response);
            let below = format!(" {indent}  {} {words}", short_scope(&pod.scope));
            lines.push(Line::styled(fit(below.trim_end(), width), paint.of(Tone::Quiet)));
        }
        lines
    }
}

/// The rules that a pod may write by, in a few words: the end of the first path, and how many more.
fn short_scope(scope: &[Rule]) -> String {
    let mut writes = scope.iter().filter(|rule| rule.writes());
    let Some(first) = writes.next() else { return "reads only".into() };
    let parts: Vec<&str> = first.path().rsplit('/').take(2).collect();
    let path = parts.into_iter().rev().collect::<Vec<_>>().join("/");
    let more = writes.count();
    let more = if more > 0 { format!(" +{more}") } else { String::new() };
    format!("{}{more}", shown(&path))
}

/// Rows with their depth, each below its spawner; a pod whose spawner is not among them stands at the top, below
/// the root where it is one that was introduced.
fn in_order(mut rows: Vec<Row>, root: Option<&PodId>) -> Vec<(usize, Row)> {
    let mut ordered = Vec::new();
    while !rows.is_empty() {
        let is_among = |id: &PodId| rows.iter().any(|row| row.pod.pod_id == *id);
        let is_top =
            |row: &Row| Some(&row.pod.pod_id) == root || !row.pod.spawner.as_ref().is_some_and(&is_among);
        let at = rows.iter().position(is_top).unwrap_or(0);
        let depth =
            rows.get(at).map_or(0, |top| usize::from(root.is_some_and(|root| top.pod.pod_id != *root)));
        move_tree(at, depth, &mut rows, &mut ordered);
    }
    ordered
}

/// Moves a row, and all below it behind it.
fn move_tree(at: usize, depth: usize, rows: &mut Vec<Row>, ordered: &mut Vec<(usize, Row)>) {
    let row = rows.remove(at);
    let pod_id = row.pod.pod_id.clone();
    ordered.push((depth, row));
    while let Some(at) = rows.iter().position(|row| row.pod.spawner.as_ref() == Some(&pod_id)) {
        move_tree(at, depth + 1, rows, ordered);
    }
}
