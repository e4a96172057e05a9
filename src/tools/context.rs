//! What a pod is and holds, shared by its connections, its turn and its watchers.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde::de::DeserializeOwned;

use crate::store::life::{self, Holding};
use crate::store::manifest::Manifest;
use crate::store::paths::Directories;
use crate::store::registry::{PodRecord, Registry};
use crate::store::scope_lock::{ScopeLock, ScopeView};
use crate::store::session::Session;
use crate::sys::thread::lock;
use crate::tools::mailbox::{Event, Mailbox};
use crate::tools::survey::address_of_record;
use crate::wire::client;
use crate::wire::events::EventSender;
use crate::wire::sandbox::Sandbox;
use crate::words::error::Result;
use crate::words::identity::{Life, Pid, PodName};
use crate::words::message::Item;
use crate::words::protocol::{Method, Sender};

/// What a pod is and holds. Nothing in it changes but through the parts' own methods.
#[derive(Debug)]
pub struct PodContext {
    /// Its id and life.
    pub own: Sender,
    /// The pod that spawned it, as the lock named it at the start.
    pub spawner: Option<Sender>,
    /// The name it was asked to have.
    pub name: PodName,
    /// Its process.
    pub pid: Pid,
    /// Its working directory.
    pub directory: PathBuf,
    /// Its socket.
    pub socket: PathBuf,
    /// Insomnia's directories.
    pub directories: Directories,
    /// Its settings, with the provider resolved.
    pub manifest: Manifest,
    /// The lock file.
    pub lock: ScopeLock,
    /// What it may write and read now.
    pub view: ScopeView,
    /// The pods it knows.
    pub registry: Registry,
    /// Its history.
    pub session: Session,
    // A channel will not do: the turn and a connection append, and the controller hears in the file's order.
    /// Held while an item is appended and told.
    pub logging: Mutex<()>,
    /// The way to its spawner.
    pub events: EventSender,
    /// The way to its controller.
    pub mailbox: Mailbox,
    /// What confines its commands.
    pub sandbox: Sandbox,
    /// Whether it is ending and refuses new work; set once, by the controller.
    pub ending: AtomicBool,
    /// Requests whose answers are not all written yet; the end gives them a moment.
    pub answering: AtomicUsize,
}

impl PodContext {
    /// Whether the pod is ending and refuses new work.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// Appends an item to the history, tells the controller, which must not call this, and returns its number.
    ///
    /// # Errors
    /// When it cannot be saved; then nothing is told.
    pub fn log(&self, item: Item) -> Result<u64> {
        let _order = lock(&self.logging);
        let logged = self.session.append(item)?;
        let number = self.session.len() - 1;
        self.mailbox.post(Event::Logged(logged));
        Ok(number)
    }

    /// Asks a known pod, that very life of it.
    ///
    /// # Errors
    /// As `client::ask`.
    pub fn ask<T: DeserializeOwned>(&self, record: &PodRecord, method: Method) -> Result<T> {
        client::ask(&address_of_record(record), Some(&self.own), method)
    }

    /// Whether a pod of this life lives.
    pub fn lives(&self, life: &Life) -> bool {
        life::probe(self.lock.runtime(), life) == Holding::Held
    }

    /// The model that is asked: the one set last, else that of the settings.
    pub fn model(&self) -> Option<String> {
        self.session.ask(|summary| summary.model.clone()).or_else(|| self.manifest.provider.model.clone())
    }

    /// Insomnia's own directories, which neither tools nor commands may look into.
    pub fn hidden(&self) -> Vec<PathBuf> {
        self.directories.hidden(self.manifest.provider.api_key_file.as_ref())
    }
}
