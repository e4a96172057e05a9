//! The line of input: several lines, a cursor, and what was sent before. Pure.

use ratatui::text::Line;

use crate::doors::tui::columns::{cluster, clusters, columns, wrap};

/// The longest text that can be typed or pasted, in bytes; a pod takes requests of 1 MiB.
const BYTES_MAX: usize = 512 << 10;
/// Texts that are remembered.
const HISTORY_MAX: usize = 100;
/// Rows that the input takes at most.
const ROWS_MAX: usize = 6;

/// What is being typed.
#[derive(Debug, Default)]
pub struct Input {
    text: String,
    /// Where the cursor stands, in bytes; between characters.
    cursor: usize,
    history: Vec<String>,
    /// Which text of the history is shown; its length for the new one.
    shown: usize,
    draft: String,
}

impl Input {
    /// What is typed.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Inserts typed or pasted text: other line ends become newlines, other control characters go. `false` when
    /// it does not fit.
    pub fn insert(&mut self, text: &str) -> bool {
        let text = text.replace("\r\n", "\n").replace('\r', "\n");
        let text: String = text.chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect();
        let fits = self.text.len() + text.len() <= BYTES_MAX;
        if fits {
            self.text.insert_str(self.cursor, &text);
            self.cursor += text.len();
        }
        fits
    }

    /// Takes the text out and remembers it.
    pub fn take(&mut self) -> String {
        let text = std::mem::take(&mut self.text);
        self.cursor = 0;
        if self.history.last() != Some(&text) {
            self.history.push(text.clone());
        }
        let surplus = self.history.len().saturating_sub(HISTORY_MAX);
        self.history.drain(..surplus);
        self.shown = self.history.len();
        text
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.text.clear();
        self.cursor = 0;
    }

    /// Removes the character before the cursor.
    pub fn delete_before(&mut self) {
        let end = self.cursor;
        self.left();
        self.text.replace_range(self.cursor..end, "");
    }

    /// Removes the character under the cursor.
    pub fn delete_under(&mut self) {
        let begin = self.cursor;
        self.right();
        self.text.replace_range(begin..self.cursor, "");
        self.cursor = begin;
    }

    /// Removes the word before the cursor.
    pub fn delete_word(&mut self) {
        let (before, _) = self.text.split_at(self.cursor);
        let word = before.trim_end().rsplit(char::is_whitespace).next().unwrap_or_default();
        let begin = before.trim_end().len() - word.len();
        self.text.replace_range(begin..self.cursor, "");
        self.cursor = begin;
    }

    /// Moves one character to the left.
    pub fn left(&mut self) {
        let begins = clusters(&self.text).map(|(begin, ..)| begin);
        self.cursor = begins.take_while(|begin| *begin < self.cursor).last().unwrap_or(0);
    }

    /// Moves one character to the right.
    pub fn right(&mut self) {
        self.cursor += cluster(self.text.get(self.cursor..).unwrap_or_default()).0;
    }

    /// Moves to the beginning of the line.
    pub fn home(&mut self) {
        let (before, _) = self.text.split_at(self.cursor);
        self.cursor = before.rfind('\n').map_or(0, |at| at + 1);
    }

    /// Moves to the end of the line.
    pub fn end(&mut self) {
        let (_, after) = self.text.split_at(self.cursor);
        self.cursor += after.find('\n').unwrap_or(after.len());
    }

    /// Moves a line up; from the first one to what was sent before.
    pub fn up(&mut self) {
        let old = self.cursor;
        self.home();
        if self.cursor > 0 {
            self.cursor -= 1; // over the newline
        } else if let Some(text) = self.shown.checked_sub(1).and_then(|at| self.history.get(at)) {
            if self.shown == self.history.len() {
                self.draft.clone_from(&self.text);
            }
            self.shown -= 1;
            self.text.clone_from(text);
            self.cursor = self.text.len();
        } else {
            self.cursor = old;
        }
    }

    /// Moves a line down; from the last one to what was sent after.
    pub fn down(&mut self) {
        self.end();
        if self.cursor < self.text.len() {
            self.cursor += 1;
        } else if self.shown < self.history.len() {
            self.shown += 1;
            self.text = self.history.get(self.shown).unwrap_or(&self.draft).clone();
            self.cursor = self.text.len();
        }
    }

    /// How many rows it takes at this width.
    pub fn rows(&self, width: usize) -> usize {
        wrap(&self.text, width).len().min(ROWS_MAX)
    }

    /// The rows of the window and the cursor's column and row in it.
    pub fn view(&self, width: usize) -> (Vec<Line<'static>>, (usize, usize)) {
        let (before, _) = self.text.split_at(self.cursor);
        let height = self.rows(width);
        let all = wrap(&self.text, width);
        // The row of the cursor begins at the last row start that is not behind it.
        let (mut row, mut begin, mut start) = (0, 0, 0);
        for (at, text) in all.iter().enumerate() {
            if start <= self.cursor {
                (row, begin) = (at, start);
            }
            start += text.len();
            start += usize::from(self.text.get(start..).is_some_and(|rest| rest.starts_with('\n')));
        }
        let column = columns(before.get(begin..).unwrap_or_default()).min(width.saturating_sub(1));
        let first = (row + 1).saturating_sub(height);
        let shown = all.iter().skip(first).take(height);
        (shown.map(|text| Line::raw(text.replace('\t', "    "))).collect(), (column, row - first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cursor_goes_by_characters_and_lines() {
        let mut input = Input::default();
        assert!(input.insert("ab\r\n日e\u{301}"));
        assert_eq!((input.text(), input.rows(10)), ("ab\n日e\u{301}", 2));
        assert_eq!(input.view(10).1, (3, 1));
        input.left();
        input.left();
        assert_eq!(input.view(10).1, (0, 1));
        input.delete_under();
        input.delete_before();
        assert_eq!(input.text(), "abe\u{301}");
        input.home();
        input.right();
        input.insert("x\x1b\x07");
        assert_eq!(input.text(), "axbe\u{301}");
        input.end();
        input.insert(" two words");
        input.delete_word();
        assert_eq!(input.text(), "axbe\u{301} two ");
        assert!(!input.insert(&"y".repeat(BYTES_MAX)), "a text that a pod would refuse");
    }

    #[test]
    fn what_was_sent_comes_back_and_the_draft_too() {
        let mut input = Input::default();
        for text in ["one", "two\nlines"] {
            input.insert(text);
            assert_eq!(input.take(), text);
        }
        input.insert("draft");
        input.up();
        assert_eq!(input.text(), "two\nlines");
        input.up();
        input.up();
        assert_eq!(input.text(), "one");
        input.up();
        assert_eq!(input.text(), "one", "nothing is older");
        input.down();
        input.down();
        assert_eq!(input.text(), "draft");
    }

    #[test]
    fn a_long_text_shows_the_rows_around_the_cursor() {
        let mut input = Input::default();
        input.insert(&"日本語".repeat(40));
        let (lines, cursor) = input.view(12);
        assert_eq!((lines.len(), cursor), (ROWS_MAX, (11, ROWS_MAX - 1)));
        input.home();
        assert_eq!(input.view(12).1, (0, 0));
    }
}
