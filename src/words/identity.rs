//! Who a pod is: its name, its unique id, one life of it, and the process that lives it.
//!
//! Pure. Each type checks its text once, in the constructor, so that no name that reached us over a socket
//! or out of a file can become a path or a signal by surprise.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::words::error::{Error, Result};
use crate::words::text::harmless_line;

/// Longest name that a person or a model may ask for, in bytes.
pub const MAX_NAME_BYTES: usize = 32;
/// Longest pod_id: a name and a suffix such as `-1000`, in bytes.
pub const MAX_POD_ID_BYTES: usize = MAX_NAME_BYTES + 8;
/// Length of a life in hexadecimal digits (128 random bits).
pub const LIFE_DIGITS: usize = 32;
/// No pod may have the name of the directory that lies beside the pods' folders: its end would take the life
/// files of all others away.
const KEPT_NAME: &str = "life";

/// What `is_model_name` asks for, in words.
pub const MODEL_NAME_RULE: &str = "a model's name is one line of 1 to 256 bytes";

/// Whether a text can be the name of a model: not blank, and nothing in it that could drive a terminal.
pub fn is_model_name(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= 256 && harmless_line(text) == text
}

fn check_name(kind: &str, text: &str, max_bytes: usize) -> Result<()> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '-';
    if text == KEPT_NAME {
        return Err(Error::told(format!("{kind} \"{KEPT_NAME}\" is kept for Insomnia itself; use another")));
    }
    let good_start = text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    if good_start && text.len() <= max_bytes && text.chars().all(allowed) {
        return Ok(());
    }
    let shown: String = text.chars().take(64).flat_map(char::escape_default).collect();
    Err(Error::told(format!(
        "{kind} \"{shown}\" is not allowed: use 1 to {max_bytes} of a-z, 0-9, \"_\" and \"-\", first a letter or digit"
    )))
}

macro_rules! text_type {
    ($(#[$doc:meta])* $type:ident, $check:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $type(String);

        impl $type {
            /// Checks `text` and keeps it.
            ///
            /// # Errors
            /// When the text breaks the rule of this type; the message says which.
            pub fn new(text: impl Into<String>) -> Result<Self> {
                let text = text.into();
                $check(&text)?;
                Ok(Self(text))
            }

            /// The text itself.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $type {
            type Error = Error;
            fn try_from(text: String) -> Result<Self> {
                Self::new(text)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_type!(
    /// The name that a person or a model asked for; not unique.
    PodName,
    |text: &str| check_name("name", text, MAX_NAME_BYTES)
);

text_type!(
    /// The unique identity among the live pods of this user: the name, or the name with `-2`, `-3`...
    PodId,
    |text: &str| check_name("pod_id", text, MAX_POD_ID_BYTES)
);

text_type!(
    /// The random nonce of one run of a pod; it never comes again and tells a pod from its successor.
    Life,
    |text: &str| {
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if text.len() == LIFE_DIGITS && text.bytes().all(digit) {
            Ok(())
        } else {
            Err(Error::told(format!("a life is {LIFE_DIGITS} digits of 0-9 and a-f")))
        }
    }
);

impl PodId {
    /// The `n`-th candidate for a pod of this name: the name itself, then `name-2`, `name-3`...
    pub fn candidate(name: &PodName, n: usize) -> PodId {
        if n <= 1 { PodId(name.0.clone()) } else { PodId(format!("{name}-{n}")) }
    }
}

/// A process number that can belong to a pod: above 1, so that it is never a group, everyone, or init.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "i32")]
pub struct Pid(i32);

impl Pid {
    /// Checks a process number.
    ///
    /// # Errors
    /// When it is below 2: kill(2) gives 1, 0 and negative numbers other meanings.
    pub fn new(number: i32) -> Result<Self> {
        if number > 1 { Ok(Pid(number)) } else { Err(Error::told(format!("pid {number} is below 2"))) }
    }

    /// The number itself.
    pub fn get(self) -> i32 {
        self.0
    }
}

impl TryFrom<i32> for Pid {
    type Error = Error;
    fn try_from(number: i32) -> Result<Self> {
        Pid::new(number)
    }
}

impl fmt::Display for Pid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_strict_rule() {
        for good in ["a", "coder", "0", "a_b-c", "x2", &"n".repeat(32)] {
            assert!(PodName::new(good).is_ok(), "{good}");
        }
        let long = "n".repeat(33);
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            "../x",
            "-rf",
            "_x",
            "a\nb",
            "a\x1b[2J",
            " ",
            "scope.lock",
            "CON",
            "life",
            "é",
            &long,
        ] {
            assert!(PodName::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_refusal_shows_the_name_harmlessly() {
        let error = PodName::new("a\x1b[2J").unwrap_err().to_string();
        assert!(error.contains("a\\u{1b}[2J"), "{error}");
    }

    #[test]
    fn a_second_pod_of_one_name_gets_a_number() {
        let name = PodName::new("coder").unwrap();
        assert_eq!(PodId::candidate(&name, 1).as_str(), "coder");
        assert_eq!(PodId::candidate(&name, 3).as_str(), "coder-3");
    }

    #[test]
    fn a_pid_below_two_is_refused() {
        for bad in [1, 0, -1, i32::MIN] {
            assert!(serde_json::from_str::<Pid>(&bad.to_string()).is_err());
        }
        assert_eq!(serde_json::from_str::<Pid>("2").unwrap().get(), 2);
    }
}
