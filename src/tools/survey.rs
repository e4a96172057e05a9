//! How other pods are, asked in parallel so that one that hangs delays nobody.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::store::life;
use crate::store::registry::{Origin, PodRecord};
use crate::store::scope_lock::ScopeLock;
use crate::store::session::{self, Session};
use crate::sys::thread;
use crate::tools::context::PodContext;
use crate::tools::mailbox::Event;
use crate::wire::client::{self, Address, Asker};
use crate::words::allocation::{Allocation, AllocationState, AllocationTable};
use crate::words::error::Result;
use crate::words::identity::{Life, PodId};
use crate::words::limits::MAX_LAST_RESPONSE_BYTES;
use crate::words::message::{Summary, TurnResult, Usage};
use crate::words::protocol::{KnownPod, Method, Status, StatusReply};
use crate::words::text::cut_end;

/// A pod that does not answer within this time is shown as not answering, never as stopped.
pub const STATUS_LIMIT: Duration = Duration::from_secs(1);

/// Asks all these pods for their status at the same time; `None` for one that does not answer.
pub fn ask_all(addresses: &[Address], from: Asker<'_>) -> Vec<Option<StatusReply>> {
    let ask = |address: &Address| client::ask_within(address, from, Method::Status, STATUS_LIMIT).ok();
    std::thread::scope(|scope| {
        let asked: Vec<_> = addresses
            .iter()
            .map(|address| thread::small("status").spawn_scoped(scope, move || ask(address)))
            .collect();
        asked.into_iter().map(|asked| asked.ok()?.join().ok()?).collect()
    })
}

/// The address of the pod of an entry, that very life of it.
pub fn address_of(allocation: &Allocation) -> Address {
    Address {
        pod: allocation.pod_id.to_string(),
        socket: PathBuf::from(&allocation.socket),
        life: Some(allocation.life.clone()),
    }
}

/// The address of a known pod, that very life of it.
pub fn address_of_record(record: &PodRecord) -> Address {
    Address { pod: record.pod_id.to_string(), socket: record.socket.clone(), life: Some(record.life.clone()) }
}

/// What a session's log says of the pod's last state, for one that lives but does not answer.
pub fn last_known(summary: &Summary) -> Status {
    match summary.last_result {
        None if summary.turn > 0 => Status::Running,
        None | Some(TurnResult::Finished) => Status::Idle,
        Some(TurnResult::Failed | TurnResult::Cancelled | TurnResult::Limit) => Status::Paused,
    }
}

/// What the log in a session folder says of its pod; nothing where there is none to be read.
pub fn logged_summary(folder: Option<&Path>) -> Summary {
    let logged = folder.and_then(|folder| Session::open_to_read(folder).ok());
    logged.map(|session| session.summary()).unwrap_or_default()
}

/// The folder of the newest session of this life, for a pod that does not say it itself.
pub fn session_folder(state: &Path, pod_id: &PodId, life: &Life) -> Option<PathBuf> {
    let folders = session::folders_of(state, pod_id);
    let short = life.as_str().get(..8).unwrap_or_default();
    let of_life = |folder: &&PathBuf| folder.to_string_lossy().ends_with(short);
    folders.iter().find(of_life).or(folders.first()).cloned()
}

/// The pods that this pod knows, spawners before the spawned; what the lock holds below it is added first.
///
/// The dead that no watcher has dealt with yet are shown as stopped.
///
/// # Errors
/// When `scope.lock` cannot be used.
pub fn known_pods(context: &PodContext) -> Result<Vec<KnownPod>> {
    let table = context.lock.edit(None, |table| Ok(table.clone()))?.value;
    add_descendants(context, &table)?;
    let mut records = context.registry.pods();
    records.sort_by_key(|record| (table.ancestors(&record.pod_id).len(), record.pod_id.clone()));
    let addresses: Vec<Address> = records.iter().map(address_of_record).collect();
    let described = records.iter().zip(ask_all(&addresses, Some(&context.own)));
    let describe = |(record, answer)| describe(&context.lock, &table, record, answer);
    let mut pods: Vec<KnownPod> = described.map(describe).collect();
    let usages: Vec<(PodId, Usage)> = pods.iter().map(|pod| (pod.pod_id.clone(), pod.usage)).collect();
    for pod in &mut pods {
        pod.usage_tree = usage_of_tree(&table, &pod.pod_id, &usages);
    }
    Ok(pods)
}

/// The tokens of a pod and of all below it, as far as `usages` has them.
pub fn usage_of_tree(table: &AllocationTable, pod_id: &PodId, usages: &[(PodId, Usage)]) -> Usage {
    let below = table.subtree(pod_id);
    let is_in_tree = |id: &PodId| id == pod_id || below.iter().any(|entry| entry.pod_id == *id);
    let mut sum = Usage::default();
    usages.iter().filter(|(id, _)| is_in_tree(id)).for_each(|(_, usage)| sum += *usage);
    sum
}

/// Makes the pod of an entry known: recorded on disk, and watched.
///
/// # Errors
/// When the registry cannot be written.
pub fn know(context: &PodContext, entry: &Allocation, origin: Origin) -> Result<PodRecord> {
    let record = record_of(&context.directories.state, entry, origin);
    context.registry.add(record.clone())?;
    context.mailbox.post(Event::Known(record.clone()));
    Ok(record)
}

/// The record of the pod of an entry.
pub fn record_of(state: &Path, entry: &Allocation, origin: Origin) -> PodRecord {
    PodRecord {
        pod_id: entry.pod_id.clone(),
        name: entry.name.clone(),
        socket: PathBuf::from(&entry.socket),
        scope: entry.scope_allow.clone(),
        origin,
        spawner: entry.delegated_from.clone(),
        life: entry.life.clone(),
        state_dir: session_folder(state, &entry.pod_id, &entry.life),
    }
}

/// Makes every entry below this pod that is not known yet a known one, and notes who took over whom.
///
/// # Errors
/// When the registry cannot be written.
pub fn add_descendants(context: &PodContext, table: &AllocationTable) -> Result<()> {
    for entry in table.subtree(&context.own.pod_id) {
        match context.registry.by_life(&entry.life) {
            Some(known) if known.spawner != entry.delegated_from => {
                context.registry.add(PodRecord { spawner: entry.delegated_from.clone(), ..known })?;
            }
            None if entry.state == AllocationState::Live => drop(know(context, entry, Origin::Descendant)?),
            Some(_) | None => {}
        }
    }
    Ok(())
}

/// What is known of a recorded pod: its answer, else what the lock and its log tell.
pub fn describe(
    lock: &ScopeLock,
    table: &AllocationTable,
    record: &PodRecord,
    answer: Option<StatusReply>,
) -> KnownPod {
    let (status, detail, turn, usage, last_response) = match &answer {
        Some(StatusReply { status, detail, turn, usage, last_response, .. }) => {
            (*status, detail.as_str(), *turn, *usage, last_response.clone())
        }
        None => {
            let lives = life::probe(lock.runtime(), &record.life) == life::Holding::Held;
            let summary = logged_summary(record.state_dir.as_deref());
            let (status, detail) = if lives {
                (last_known(&summary), "lives but does not answer")
            } else {
                (Status::Stopped, "has ended")
            };
            (status, detail, summary.turn, summary.usage, summary.last_response)
        }
    };
    KnownPod {
        pod_id: record.pod_id.clone(),
        name: record.name.clone(),
        status,
        answers: answer.is_some(),
        detail: detail.to_owned(),
        since: answer.as_ref().map_or(0, |answer| answer.since),
        scope: record.scope.clone(),
        last_response: cut_end(&last_response, MAX_LAST_RESPONSE_BYTES),
        turn,
        usage,
        usage_tree: Usage::default(),
        spawner: table.by_life(&record.life).and_then(|entry| entry.delegated_from.clone()),
        socket: record.socket.to_string_lossy().into_owned(),
    }
}
