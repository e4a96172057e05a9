//! Which pod a person means: a living one by its pod_id or socket, or an ended one by its sessions.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::store::paths::{Directories, RuntimeDirectory};
use crate::store::scope_lock::ScopeLock;
use crate::store::session;
use crate::store::{life, manifest};
use crate::tools::survey;
use crate::wire::client::Address;
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};
use crate::words::identity::PodId;
use crate::words::limits::Limits;
use crate::words::text::harmless_line;

/// The directories and the lock that a command works with.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Insomnia's directories.
    pub directories: Directories,
    /// The lock file.
    pub lock: ScopeLock,
}

/// A pod that a person means.
#[derive(Debug)]
pub enum Found {
    /// It has an entry.
    Living(Box<Allocation>),
    /// It has ended and left this session.
    Ended(PathBuf),
}

impl Machine {
    /// This user's directories, the runtime directory made if it is missing.
    ///
    /// # Errors
    /// When a directory cannot be used.
    pub fn open() -> Result<Machine> {
        Machine::of(Directories::from_environment()?)
    }

    /// These directories.
    ///
    /// # Errors
    /// When the runtime directory cannot be used.
    pub fn of(directories: Directories) -> Result<Machine> {
        let runtime = RuntimeDirectory::open_or_create(&directories.runtime)?;
        Ok(Machine { directories, lock: ScopeLock::new(Arc::new(runtime)) })
    }

    /// How long a pod may take to obey a stop, by the user's and this project's manifest; 10 s where they are wrong.
    #[must_use]
    pub fn stop_limit(&self) -> Duration {
        let directory = std::env::current_dir().unwrap_or_else(|_| self.directories.home.clone());
        let settings = manifest::gather(&self.directories.config, &directory, Vec::new());
        settings.map_or_else(|_| Limits::default(), |settings| settings.limits).stop()
    }

    /// The living pod that is meant.
    ///
    /// # Errors
    /// When there is none; the sentence lists those that live.
    pub fn living(&self, pod: &str) -> Result<Allocation> {
        let table = self.lock.read()?;
        living_in(&table, pod).cloned().ok_or_else(|| {
            let ids: Vec<String> = table.allocations().iter().map(|a| a.pod_id.to_string()).collect();
            let ids = if ids.is_empty() {
                "none lives".to_owned()
            } else {
                format!("there are: {}", ids.join(", "))
            };
            Error::told(format!("there is no living pod \"{}\"; {ids}", harmless_line(pod)))
        })
    }

    /// The address of the living pod that is meant.
    ///
    /// # Errors
    /// As `living`.
    pub fn address(&self, pod: &str) -> Result<Address> {
        // People mean whoever listens there, so no life is asked for.
        Ok(Address { life: None, ..survey::address_of(&self.living(pod)?) })
    }

    /// The pod that is meant, living or ended.
    ///
    /// # Errors
    /// When there was never one.
    pub fn any(&self, pod: &str) -> Result<Found> {
        let table = self.lock.read().unwrap_or_default(); // a damaged lock does not hide the sessions
        let is_alive = |entry: &&Allocation| !life::is_dead(self.lock.runtime(), entry);
        if let Some(entry) = living_in(&table, pod).filter(is_alive) {
            return Ok(Found::Living(Box::new(entry.clone())));
        }
        let newest = PodId::new(pod)
            .ok()
            .and_then(|id| session::folders_of(&self.directories.state, &id).into_iter().next());
        newest.map(Found::Ended).ok_or_else(|| {
            Error::told(format!(
                "there is no pod \"{}\", neither living nor ended; \"insomnia list --all\" shows all",
                harmless_line(pod)
            ))
        })
    }

    /// The session folder of the pod that is meant.
    ///
    /// # Errors
    /// As `any`, and when a living pod has no session.
    pub fn folder(&self, pod: &str) -> Result<PathBuf> {
        match self.any(pod)? {
            Found::Ended(folder) => Ok(folder),
            Found::Living(entry) => {
                survey::session_folder(&self.directories.state, &entry.pod_id, &entry.life).ok_or_else(|| {
                    Error::told(format!(
                        "pod \"{}\" has no session in \"{}\"",
                        entry.pod_id,
                        self.directories.state.display()
                    ))
                })
            }
        }
    }
}

fn living_in<'a>(table: &'a AllocationTable, pod: &str) -> Option<&'a Allocation> {
    let is_meant = |a: &&Allocation| {
        a.pod_id.as_str() == pod || (pod.contains('/') && Path::new(&a.socket) == Path::new(pod))
    };
    table.allocations().iter().find(is_meant)
}
