//! Which pod a person means: a living one by its pod_id or socket, or an ended one by its sessions; and what every
//! command does to pods in the same way.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::doors::terminal::listed;
use crate::store::manifest::{self, Manifest};
use crate::store::paths::{Directories, RuntimeDirectory};
use crate::store::scope_lock::ScopeLock;
use crate::store::{life, repair, session};
use crate::sys::wait::Cancel;
use crate::tools::stop::{self, Manner};
use crate::tools::survey;
use crate::wire::client::{self, Address};
use crate::wire::launch::{self, Launch, Ready};
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};
use crate::words::identity::PodId;
use crate::words::protocol::{Method, StatusReply};

/// The directories and the lock that a command works with.
#[derive(Debug, Clone)]
pub(super) struct Machine {
    /// Insomnia's directories.
    pub(super) directories: Directories,
    /// The lock file.
    pub(super) lock: ScopeLock,
    /// Where the command was called; `None` where that was removed.
    current: Option<PathBuf>,
}

/// A pod that a person means.
#[derive(Debug)]
pub(super) enum Found {
    /// It has an entry.
    Living(Box<Allocation>),
    /// It has no entry here, but a socket: it is another user's, or uses another runtime directory.
    Elsewhere(Address),
    /// It has ended and left this session.
    Ended(PathBuf),
}

impl Machine {
    /// This user's directories, the runtime directory made if it is missing.
    pub(super) fn open() -> Result<Machine> {
        Machine::of(Directories::from_environment()?)
    }

    /// These directories.
    pub(super) fn of(directories: Directories) -> Result<Machine> {
        let runtime = RuntimeDirectory::open_or_create(&directories.runtime)?;
        let current = std::env::current_dir().ok();
        Ok(Machine { directories, lock: ScopeLock::new(Arc::new(runtime)), current })
    }

    /// Where the command was called.
    ///
    /// # Errors
    /// When that is gone.
    pub(super) fn current(&self) -> Result<&Path> {
        let gone = || Error::told("the current directory was removed, or may not be read; go to another one");
        self.current.as_deref().ok_or_else(gone)
    }

    /// Who lives here, also where the lock cannot be used.
    pub(super) fn table(&self) -> Result<AllocationTable> {
        repair::living(&self.lock)
    }

    /// Whether the pod of this entry may still write.
    pub(super) fn lives(&self, entry: &Allocation) -> bool {
        !life::is_dead(self.lock.runtime(), entry)
    }

    /// The settings of this user in this directory.
    pub(super) fn settings(&self) -> Result<Manifest> {
        manifest::gather(&self.directories.config, self.current().unwrap_or(Path::new("/")), Vec::new())
    }

    /// The living pod of this user that is meant.
    pub(super) fn living(&self, pod: &str) -> Result<Allocation> {
        let table = self.table()?;
        living_in(&table, pod).cloned().ok_or_else(|| match elsewhere(pod) {
            Some((_, owner)) => Error::told(format!(
                "the pod at \"{pod}\" has no entry in \"{}\"; as user {owner}, with that runtime directory, \"insomnia stop\" ends it",
                self.lock.path().display()
            )),
            None => {
                let ids = listed(table.allocations().iter().map(|entry| &entry.pod_id), ", ");
                let ids = ids.map_or("none lives".to_owned(), |ids| format!("there are: {ids}"));
                Error::told(format!("there is no living pod \"{pod}\"; {ids}"))
            }
        })
    }

    /// The address of the living pod that is meant, another user's included.
    pub(super) fn address(&self, pod: &str) -> Result<Address> {
        match self.living(pod) {
            // People mean whoever listens there, so no life is asked for.
            Ok(entry) => Ok(Address { life: None, ..survey::address_of(&entry) }),
            Err(error) => elsewhere(pod).map(|(address, _)| address).ok_or(error),
        }
    }

    /// The pod that is meant, living or ended.
    pub(super) fn any(&self, pod: &str) -> Result<Found> {
        let table = self.table().unwrap_or_default(); // nothing hides the sessions
        if let Some(entry) = living_in(&table, pod).filter(|entry| self.lives(entry)) {
            return Ok(Found::Living(Box::new(entry.clone())));
        }
        if let Some((address, _)) = elsewhere(pod) {
            return Ok(Found::Elsewhere(address));
        }
        let folders = PodId::new(pod).map(|id| session::folders_of(&self.directories.state, &id));
        folders.unwrap_or_default().into_iter().next().map(Found::Ended).ok_or_else(|| {
            Error::told(format!(
                "there is no pod \"{pod}\", neither living nor ended; \"insomnia list --all\" shows all"
            ))
        })
    }

    /// The session folder of the pod that is meant.
    pub(super) fn folder(&self, pod: &str) -> Result<PathBuf> {
        match self.any(pod)? {
            Found::Ended(folder) => Ok(folder),
            Found::Elsewhere(address) => {
                let status: StatusReply = client::ask(&address, None, Method::Status)?;
                Ok(status.state_dir.into())
            }
            Found::Living(entry) => {
                let state = &self.directories.state;
                survey::session_folder(state, &entry.pod_id, &entry.life).ok_or_else(|| {
                    let state = state.display();
                    Error::told(format!("pod \"{}\" has no session in \"{state}\"", entry.pod_id))
                })
            }
        }
    }

    /// Ends a pod, or with the tree every pod below it too; each outcome.
    pub(super) fn stop(&self, target: &Allocation, tree: bool, ask: bool) -> Result<Vec<stop::Outcome>> {
        let cancel = new_cancel()?;
        let limit = self.settings().map(|settings| settings.limits).unwrap_or_default().stop();
        let manner = Manner { from: None, limit, ask, cancel: &cancel };
        Ok(stop::stop_all(&self.lock, target, tree, manner))
    }

    /// Starts a pod here.
    pub(super) fn launch(&self, settings: &Manifest, args: &[String], overlay: &str) -> Result<Ready> {
        let wanted = Launch {
            command: &launch::pod_command(&settings.pod_command),
            args,
            directory: self.current()?,
            overlay,
            variables: &[],
            limit: settings.limits.launch(),
        };
        launch::launch(wanted, &new_cancel()?)
    }

    /// What a person who leaves a pod must know: who still runs, and how to reach them.
    pub(super) fn who_lives_on(&self, pod: &str) -> Result<String> {
        let table = self.table()?;
        let below = living_in(&table, pod).map(|entry| table.subtree(&entry.pod_id)).unwrap_or_default();
        let below = listed(below.iter().map(|entry| &entry.pod_id), ", ");
        let below = below.map_or(String::new(), |below| format!(" with {below} below it"));
        Ok(format!(
            "-- pod {pod} lives on{below}; \"insomnia attach {pod}\" follows it, \"insomnia stop {pod} --tree\" ends it"
        ))
    }
}

/// A way to cancel that nobody uses.
pub(super) fn new_cancel() -> Result<Cancel> {
    Cancel::new().map_err(|source| Error::io("make an event descriptor", source))
}

fn living_in<'a>(table: &'a AllocationTable, pod: &str) -> Option<&'a Allocation> {
    let is_meant = |entry: &&Allocation| {
        entry.pod_id.as_str() == pod || (pod.contains('/') && Path::new(&entry.socket) == Path::new(pod))
    };
    table.allocations().iter().find(is_meant)
}

/// The pod behind the path of a socket that no entry here names, and its owner's number.
fn elsewhere(pod: &str) -> Option<(Address, u32)> {
    let metadata = Some(pod).filter(|pod| pod.contains('/')).and_then(|pod| std::fs::metadata(pod).ok())?;
    let address = Address { pod: pod.to_owned(), socket: pod.into(), life: None };
    metadata.file_type().is_socket().then_some((address, metadata.uid()))
}
