//! How what is told looks: few colours, none where `NO_COLOR` asks for that; never colour alone.

use ratatui::style::{Color, Modifier, Style};

/// What a piece of the screen is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// What the model says.
    Plain,
    /// What people and pods send.
    Person,
    /// The beginning of a turn.
    Turn,
    /// A tool call.
    Call,
    /// A notice, or a pod that runs.
    Notice,
    /// What failed.
    Bad,
    /// What may be overlooked.
    Quiet,
    /// A title, or what the keys go to.
    Strong,
    /// What is selected.
    Marked,
}

/// Whether there are colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Paint {
    /// `false` leaves bold, dim and reverse only.
    pub has_colours: bool,
}

impl Paint {
    /// The style of a tone.
    pub fn of(self, tone: Tone) -> Style {
        let (colour, modifier) = match tone {
            Tone::Plain => (Color::Reset, Modifier::empty()),
            Tone::Person => (Color::Cyan, Modifier::BOLD),
            Tone::Turn => (Color::Blue, Modifier::BOLD),
            Tone::Call => (Color::Yellow, Modifier::empty()),
            Tone::Notice => (Color::Green, Modifier::empty()),
            Tone::Bad => (Color::Red, Modifier::empty()),
            Tone::Quiet => (Color::Reset, Modifier::DIM),
            Tone::Strong => (Color::Reset, Modifier::BOLD),
            Tone::Marked => (Color::Reset, Modifier::REVERSED),
        };
        let colour = if self.has_colours { colour } else { Color::Reset };
        Style::new().fg(colour).add_modifier(modifier)
    }
}
