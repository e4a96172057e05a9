//! Going on with a session: what happened while the pod was away is written down once, before it lives again.
//!
//! Runs on the main thread between the registration and the first event.

use std::path::PathBuf;
use std::sync::Arc;

use crate::heart::watcher;
use crate::store::manifest::{self, Layer};
use crate::store::paths::Directories;
use crate::store::registry::{Origin, PodRecord};
use crate::store::session::{self, Session};
use crate::tools::context::PodContext;
use crate::tools::survey;
use crate::words::allocation::{Allocation, AllocationState, Refusal};
use crate::words::error::{Error, Result};
use crate::words::identity::{PodId, PodName};
use crate::words::message::{Item, TurnResult};
use crate::words::notification::{Kind, Notice, render_block};
use crate::words::scope::Rule;

/// The session that a resumed pod goes on with.
#[derive(Debug, Clone)]
pub struct Previous {
    /// The session's folder.
    pub folder: PathBuf,
    /// The pod's id.
    pub pod_id: PodId,
    /// The name it was asked to have.
    pub name: PodName,
    /// Its working directory.
    pub directory: PathBuf,
    /// The rules it was started with first.
    pub scope: Vec<Rule>,
    /// Its settings as resolved then.
    pub settings: Layer,
}

impl Previous {
    /// The newest session of this pod. Its first item says what the pod was started with.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn find(directories: &Directories, wanted: &PodId) -> Result<Previous> {
        let folders = session::folders_of(&directories.state, wanted);
        let folder = folders.into_iter().next().ok_or_else(|| {
            Error::told(format!(
                "there is no session of \"{wanted}\" to go on with; \"insomnia list --all\" shows all"
            ))
        })?;
        let first = Session::open_to_read(&folder)?.page(0)?.items.into_iter().next();
        let Some(Item::Session { pod_id, name, directory, scope, .. }) = first.map(|logged| logged.item)
        else {
            return Err(Error::told(format!(
                "the history in \"{}\" has lost its first line, which says what the pod was started with; \"insomnia history {wanted}\" still shows the rest, and with that folder moved away the session before it, or a new pod, can start",
                folder.display()
            )));
        };
        let settings = manifest::saved(&folder)?;
        Ok(Previous { folder, pod_id, name, directory: directory.into(), scope, settings })
    }
}

/// Ends the interrupted turn, tells the model which pods have died and what scope is lost, and watches the pods
/// that live.
///
/// # Errors
/// When the history or the registry cannot be written.
pub fn recover(context: &Arc<PodContext>, lost: &[Refusal]) -> Result<()> {
    let session = &context.session;
    let summary = session.summary();
    if summary.turn > 0 && summary.last_result.is_none() {
        let message = Some("the pod ended in the middle of it".to_owned());
        session.append(Item::TurnEnded { turn: summary.turn, result: TurnResult::Cancelled, message })?;
    }
    let table = context.lock.read()?;
    let own = &context.own.pod_id;
    let (living, dead): (Vec<_>, Vec<_>) =
        context.registry.pods().into_iter().partition(|record| table.by_life(&record.life).is_some());
    let ended = dead.iter().map(|record| format!("pod \"{}\" has ended while you were away", record.pod_id));
    let gone = lost.iter().map(|refusal| format!("you have lost a part of your scope: {refusal}"));
    let notices: Vec<Notice> = ended.chain(gone).map(news).collect();
    if !notices.is_empty() {
        // Written before the records are ended: told twice after a crash right here, but never not at all.
        session.append(Item::Notification { text: render_block(&notices, 0) })?;
    }
    for record in dead {
        context.registry.end(&record.life)?;
    }
    let known = living.into_iter().map(|record| {
        // One that belongs to another living pod now is only known.
        let spawner = table.by_life(&record.life).and_then(|entry| entry.delegated_from.as_ref());
        let is_lost = record.origin == Origin::Spawned && spawner != Some(own);
        PodRecord { origin: if is_lost { Origin::Introduced } else { record.origin }, ..record }
    });
    // Those that came back in the lock, but had not been recorded.
    let is_new = |entry: &&Allocation| {
        entry.state == AllocationState::Live && context.registry.by_life(&entry.life).is_none()
    };
    let back = table.subtree(own).into_iter().filter(is_new);
    let back = back.map(|entry| survey::record_of(&context.directories.state, entry, Origin::Descendant));
    for record in known.chain(back) {
        context.registry.add(record.clone())?;
        watcher::watch(context, record);
    }
    Ok(())
}

fn news(text: String) -> Notice {
    Notice { about: None, kind: Kind::News, wakes: false, text }
}
