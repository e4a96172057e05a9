//! `spawned_pods.json`: the pods that this pod knows, and those that it knew.
//!
//! Shared by the turn, connections and watchers; on disk before the request that changed it is answered. The
//! map is never locked while the disk is written.

use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sys::file;
use crate::sys::thread::{lock, wait_while};
use crate::words::error::{Error, Result};
use crate::words::identity::{Life, PodId, PodName};
use crate::words::scope::Rule;

const NAME: &str = "spawned_pods.json";
const TEMPORARY: &str = "spawned_pods.json.new";
/// Ended pods that are remembered, so that their output can still be read.
const ENDED_MAX: usize = 64;
const FILE_BYTES_MAX: usize = 4 << 20;

/// How a pod came to be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// This pod spawned it.
    Spawned,
    /// Somebody introduced it.
    Introduced,
    /// It was spawned below this pod.
    Descendant,
}

/// A known pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodRecord {
    /// Its id.
    pub pod_id: PodId,
    /// The name it was asked to have.
    pub name: PodName,
    /// Its socket.
    pub socket: PathBuf,
    /// Its rules.
    pub scope: Vec<Rule>,
    /// How it came to be known.
    pub origin: Origin,
    /// The pod it belongs to: the one that spawned it, or who took it over when that one ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spawner: Option<PodId>,
    /// Its life.
    pub life: Life,
    /// The folder of its session, where known.
    pub state_dir: Option<PathBuf>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Content {
    version: u64,
    pods: Vec<PodRecord>,
    ended: Vec<PodRecord>,
}

#[derive(Debug)]
struct Memory {
    content: Content,
    /// Dead pods whose name has been taken again before anybody spoke of their end. In `ended` already.
    replaced: Vec<PodRecord>,
    changes: u64,
}

impl Memory {
    fn unspoken(&self) -> impl Iterator<Item = &PodRecord> {
        self.content.pods.iter().chain(&self.replaced)
    }
}

impl Content {
    fn remember(&mut self, ended: PodRecord) {
        self.ended.push(ended);
        let surplus = self.ended.len().saturating_sub(ENDED_MAX);
        self.ended.drain(..surplus);
    }
}

/// The known pods of one session.
#[derive(Debug)]
pub struct Registry {
    directory: PathBuf,
    // A channel will not do: connection threads must change it before they answer, without the controller.
    memory: Mutex<Memory>,
    ended: Condvar,
    /// The number of the newest change on disk; held while writing, so that an older one never follows it.
    written: Mutex<u64>,
}

impl Registry {
    /// The registry in this session folder; an empty one where there is no file yet.
    ///
    /// # Errors
    /// When the file is there but cannot be read.
    pub fn open(directory: &Path) -> Result<Registry> {
        let path = directory.join(NAME);
        let content = match std::fs::File::open(&path) {
            Ok(opened) => {
                let text = file::read_whole(&opened, FILE_BYTES_MAX).map_err(Error::on("read", &path))?;
                let path = path.display();
                serde_json::from_slice(&text).map_err(|error| {
                    Error::told(format!("\"{path}\" is damaged: {error}; move it away to go on without it"))
                })?
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Content { version: 1, pods: Vec::new(), ended: Vec::new() }
            }
            Err(source) => return Err(Error::on("open", &path)(source)),
        };
        let memory = Mutex::new(Memory { content, replaced: Vec::new(), changes: 0 });
        let (directory, ended, written) = (directory.to_owned(), Condvar::new(), Mutex::new(0));
        Ok(Registry { directory, memory, ended, written })
    }

    /// Adds a pod, or replaces what was known of that pod_id. One that has ended already does not come back,
    /// however old the table is in which somebody saw it.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add(&self, record: PodRecord) -> Result<()> {
        self.change(|memory| {
            let Memory { content, replaced, .. } = memory;
            if content.ended.iter().any(|known| known.life == record.life) {
                return;
            }
            let (older, kept): (Vec<_>, Vec<_>) =
                content.pods.drain(..).partition(|known| known.pod_id == record.pod_id);
            content.pods = kept;
            for known in older.into_iter().filter(|known| known.life != record.life) {
                replaced.push(known.clone());
                content.remember(known);
            }
            content.pods.push(record);
        })
    }

    /// Takes the pod of this very life out of the living, and wakes whoever waits for that. `None` when it was
    /// not there, or its end was spoken of before.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn end(&self, life: &Life) -> Result<Option<PodRecord>> {
        let ended = self.change(|memory| {
            if let Some(at) = memory.replaced.iter().position(|known| known.life == *life) {
                return Some(memory.replaced.remove(at));
            }
            let at = memory.content.pods.iter().position(|known| known.life == *life)?;
            let record = memory.content.pods.remove(at);
            memory.content.remember(record.clone());
            Some(record)
        });
        self.ended.notify_all();
        ended
    }

    /// The living pod of this id.
    pub fn get(&self, pod_id: &PodId) -> Option<PodRecord> {
        lock(&self.memory).content.pods.iter().find(|known| known.pod_id == *pod_id).cloned()
    }

    /// The pod of this life, unless its end was spoken of.
    pub fn by_life(&self, life: &Life) -> Option<PodRecord> {
        lock(&self.memory).unspoken().find(|known| known.life == *life).cloned()
    }

    /// The newest ended pod of this id.
    pub fn get_ended(&self, pod_id: &PodId) -> Option<PodRecord> {
        lock(&self.memory).content.ended.iter().rev().find(|known| known.pod_id == *pod_id).cloned()
    }

    /// All living pods.
    pub fn pods(&self) -> Vec<PodRecord> {
        lock(&self.memory).content.pods.clone()
    }

    /// Waits until the end of the pod of this life was spoken of; `false` when `limit` passes before.
    #[must_use]
    pub fn wait_ended(&self, life: &Life, limit: Duration) -> bool {
        let lives = |memory: &mut Memory| memory.unspoken().any(|known| known.life == *life);
        wait_while(&self.ended, lock(&self.memory), limit, lives)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Memory) -> T) -> Result<T> {
        let (value, content, number) = {
            let mut memory = lock(&self.memory);
            let value = change(&mut memory);
            memory.changes += 1;
            (value, memory.content.clone(), memory.changes)
        };
        let mut written = lock(&self.written);
        if *written < number {
            let text = serde_json::to_string_pretty(&content).unwrap_or_default();
            file::open_directory(&self.directory)
                .and_then(|directory| {
                    let (temporary, name) = (Path::new(TEMPORARY), Path::new(NAME));
                    file::replace_at(directory, temporary, name, text.as_bytes(), 0o600)
                })
                .map_err(Error::on("write", &self.directory.join(NAME)))?;
            *written = number;
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &str, number: u32) -> PodRecord {
        PodRecord {
            pod_id: PodId::new(id).unwrap(),
            name: PodName::new(id).unwrap(),
            socket: "/s".into(),
            scope: vec![],
            origin: Origin::Spawned,
            spawner: None,
            life: Life::new(format!("{number:032x}")).unwrap(),
            state_dir: None,
        }
    }

    #[test]
    fn records_are_on_disk_when_the_call_returns() {
        let place = tempfile::tempdir().unwrap();
        let registry = Registry::open(place.path()).unwrap();
        registry.add(record("a", 1)).unwrap();
        registry.add(record("b", 2)).unwrap();
        registry.end(&record("a", 1).life).unwrap().unwrap();
        let reread = Registry::open(place.path()).unwrap();
        assert_eq!(reread.pods(), vec![record("b", 2)]);
        assert_eq!(reread.get_ended(&record("a", 1).pod_id), Some(record("a", 1)));
    }

    #[test]
    fn a_name_used_again_shows_once_and_the_end_of_the_old_life_is_spoken_of_once() {
        let place = tempfile::tempdir().unwrap();
        let registry = Registry::open(place.path()).unwrap();
        registry.add(record("a", 1)).unwrap();
        registry.add(record("a", 2)).unwrap();
        assert_eq!(registry.pods(), vec![record("a", 2)]);
        assert!(!registry.wait_ended(&record("a", 1).life, Duration::from_millis(1)));
        assert_eq!(registry.end(&record("a", 1).life).unwrap(), Some(record("a", 1)));
        assert!(registry.wait_ended(&record("a", 1).life, Duration::ZERO));
        assert_eq!(registry.end(&record("a", 1).life).unwrap(), None);
        registry.add(record("a", 1)).unwrap();
        assert_eq!(registry.pods(), vec![record("a", 2)], "a pod that has ended does not come back");
    }

    #[test]
    fn whoever_waits_for_an_end_is_woken() {
        let place = tempfile::tempdir().unwrap();
        let registry = Registry::open(place.path()).unwrap();
        registry.add(record("a", 1)).unwrap();
        assert!(!registry.wait_ended(&record("a", 1).life, Duration::from_millis(1)));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| registry.wait_ended(&record("a", 1).life, Duration::from_secs(60)));
            registry.end(&record("a", 1).life).unwrap();
            assert!(waiter.join().unwrap());
        });
    }
}
