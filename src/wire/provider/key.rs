//! The key of a provider: where it comes from, and how it stays out of every text that we write.
//!
//! A key travels on curl's standard input only. A key file is read again for each request, so that a new key
//! works without a restart.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::store::manifest::ProviderSettings;
use crate::sys::file::{open_target, read_entry};
use crate::sys::process::own_uid;
use crate::wire::provider::Lookup;
use crate::words::error::{Error, Result};

/// The longest key, in bytes; tokens of cloud services have a few thousand.
const KEY_BYTES_MAX: usize = 16 << 10;
/// What stands where a key stood.
const MASK: &str = "[key]";
/// Parts of a key from this length on are masked as well.
const PART_BYTES: usize = 8;

/// A text that must not be shown; `Debug` shows a mask.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret(String);

impl Secret {
    /// Keeps this text from being shown.
    pub(super) fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text itself, for the one place that sends it.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }

    /// `text` with this secret, and every part of it of 8 or more bytes, masked.
    pub(super) fn mask(&self, text: &str) -> String {
        if self.0.len() < 4 {
            return text.to_owned(); // no secret, and masking it would destroy the text
        }
        let bytes_min = PART_BYTES.min(self.0.len());
        let is_part = |start, end| text.get(start..end).is_some_and(|part| self.0.contains(part));
        let (mut shown, mut hidden_until) = (String::with_capacity(text.len()), 0);
        for (at, c) in text.char_indices() {
            if at < hidden_until {
                continue;
            }
            if is_part(at, at + bytes_min) {
                hidden_until = (at + bytes_min..).find(|&end| !is_part(at, end + 1)).unwrap_or(text.len());
                shown.push_str(MASK);
            } else {
                shown.push(c);
            }
        }
        shown
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

/// Where the key comes from.
#[derive(Debug, Clone)]
pub(super) enum KeySource {
    /// A variable of our environment, read at the start.
    Variable(String, Secret),
    /// A file, read again for each request.
    File(PathBuf),
    /// The server wants none; this variable would hold it.
    NotNeeded(String),
}

impl KeySource {
    /// Finds the key that the settings ask for, and checks it.
    ///
    /// `default_variable` is used when the settings name neither a variable nor a file; `is_optional` lets a
    /// missing variable pass, for servers that want no key.
    pub(super) fn find(
        settings: &ProviderSettings,
        default_variable: &str,
        is_optional: bool,
        lookup: Lookup,
    ) -> Result<KeySource> {
        let variable = match (&settings.api_key_env, &settings.api_key_file) {
            (Some(_), Some(_)) => {
                return Err(Error::told(
                    "the provider settings name both \"api_key_env\" and \"api_key_file\"; remove one of them",
                ));
            }
            (None, Some(path)) => return read_key_file(path).map(|_| KeySource::File(path.clone())),
            (variable, None) => variable.as_deref().unwrap_or(default_variable).to_owned(),
        };
        match lookup(&variable).filter(|value| !value.trim().is_empty()) {
            Some(value) => check_key(&value, &format!("the variable {variable}"))
                .map(|key| KeySource::Variable(variable, key)),
            None if is_optional => Ok(KeySource::NotNeeded(variable)),
            None => Err(Error::told(format!(
                "the variable {variable}, which should hold the provider's key, is not set; set it, or name a file of mode 0600 as \"api_key_file\" in the manifest"
            ))),
        }
    }

    /// The key as it is now; `None` when none is needed.
    pub(super) fn read(&self) -> Result<Option<Secret>> {
        match self {
            KeySource::Variable(_, key) => Ok(Some(key.clone())),
            KeySource::File(path) => read_key_file(path).map(Some),
            KeySource::NotNeeded(_) => Ok(None),
        }
    }
}

/// Where a person looks for the key.
impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeySource::Variable(name, _) => write!(f, "the key in the variable {name}"),
            KeySource::File(path) => write!(f, "the key in the file \"{}\"", path.display()),
            KeySource::NotNeeded(name) => write!(f, "the variable {name}, which is not set"),
        }
    }
}

fn check_key(text: &str, place: &str) -> Result<Secret> {
    match text.trim() {
        "" => Err(Error::told(format!("{place} holds no key; put the provider's key there"))),
        key if key.len() <= KEY_BYTES_MAX && key.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Ok(Secret::new(key))
        }
        _ => Err(Error::told(format!(
            "{place} does not hold a key: a key is one word of visible ASCII characters; copy it again"
        ))),
    }
}

fn read_key_file(path: &Path) -> Result<Secret> {
    let place = format!("the key file \"{}\"", path.display());
    let failed = |source| Error::io(format!("read {place}"), source);
    let fault = |what: String| Err(Error::told(format!("{place} {what}")));
    let entry = open_target(path).map_err(failed)?;
    let text = read_entry(&entry, KEY_BYTES_MAX).map_err(failed)?;
    let metadata = entry.metadata().map_err(failed)?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if owner != own_uid() {
        return fault(format!("belongs to user {owner}; make one of your own, of mode 0600"));
    }
    if !matches!(mode, 0o600 | 0o400) {
        let shown = path.display();
        return fault(format!("has mode {mode:04o}, so others may read it; run: chmod 600 \"{shown}\""));
    }
    check_key(&text, &place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const KEY: &str = "sk-test-0123456789abcdefghij";

    #[test]
    fn r07_a_key_and_its_parts_are_masked() {
        let check = |text: &str, expected: &str| assert_eq!(Secret::new(KEY).mask(text), expected);
        check("bad key sk-test-0123456789abcdefghij!", "bad key [key]!");
        check("starts sk-test-01... ends cdefghij", "starts [key]... ends [key]");
        check("only sk-test and ghij", "only sk-test and ghij");
        check("日本 456789abcd 語", "日本 [key] 語");
        check("", "");
        assert_eq!(Secret::new("mock").mask("the mock key"), "the [key] key");
        assert_eq!(Secret::new("a").mask("a key"), "a key");
        assert_eq!(
            format!("{:?}", KeySource::Variable("K".into(), Secret::new(KEY))),
            "Variable(\"K\", [key])"
        );
    }

    #[test]
    fn a_key_is_found_or_the_sentence_says_what_to_do() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str, mode: u32| {
            let path = place.path().join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Some(path)
        };
        let lookup = |name: &str| match name {
            "GOOD" => Some(KEY.to_owned()),
            "EMPTY" => Some(" ".to_owned()),
            "TWO_LINES" => Some(format!("{KEY}\nx-evil: 1")),
            _ => None,
        };
        let check = |variable: Option<&str>, file: Option<PathBuf>, optional: bool, expected: &str| {
            let settings = ProviderSettings {
                api_key_env: variable.map(str::to_owned),
                api_key_file: file,
                ..ProviderSettings::default()
            };
            let found = KeySource::find(&settings, "GOOD", optional, &lookup);
            let told = match &found {
                Ok(source) => source.to_string(),
                Err(error) => error.to_string(),
            };
            assert!(told.contains(expected), "{told}");
            assert!(!told.contains("0123456789") && !format!("{found:?}").contains("0123456789"), "{told}");
            if let Ok(source) = found {
                let key = source.read().unwrap();
                assert!(key.is_none_or(|key| key.reveal() == KEY));
            }
        };
        check(None, None, false, "the variable GOOD");
        check(Some("GONE"), None, false, "GONE, which should hold the provider's key, is not set");
        check(Some("GONE"), None, true, "GONE, which is not set");
        check(Some("EMPTY"), None, false, "is not set");
        check(Some("TWO_LINES"), None, false, "one word of visible ASCII");
        check(None, file("good", &format!("{KEY}\n"), 0o600), false, "the key in the file");
        check(None, file("read only", KEY, 0o400), false, "the key in the file");
        check(None, file("open", KEY, 0o644), false, "mode 0644, so others may read it; run: chmod 600");
        check(None, file("group", KEY, 0o640), false, "mode 0640");
        check(None, file("empty", "\n", 0o600), false, "holds no key");
        check(None, Some(place.path().join("nowhere")), false, "cannot read the key file");
        check(None, Some(place.path().to_owned()), false, "no regular file");
        check(Some("GOOD"), file("both", KEY, 0o600), false, "remove one of them");
    }
}
