//! Watchers: one thread for each known pod, which waits for the pod's life lock.
//!
//! A pod that ends by itself gives its entry back and says so with ShutDown before its process ends; for one that
//! does not, the watcher speaks. It stands in for polling and needs no deadline: the exit of this process ends it.

use std::sync::Arc;
use std::time::Duration;

use crate::heart::reports::came_back;
use crate::store::life;
use crate::store::registry::{Origin, PodRecord};
use crate::sys::thread;
use crate::tools::context::PodContext;
use crate::tools::mailbox::Event;
use crate::tools::survey;
use crate::words::identity::PodId;
use crate::words::notification::render_crash;

/// How long a ShutDown may still be in the hands of a connection of ours. The sender waits for its answer before
/// it exits, so this matters only where it gave up waiting.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(200);

/// How often a pod is looked at whose life file was removed.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Starts to watch a pod.
pub fn watch(context: &Arc<PodContext>, record: PodRecord) {
    let name = format!("watch {}", record.pod_id);
    let pod_id = record.pod_id.clone();
    let theirs = Arc::clone(context);
    let run = move || watch_until_end(&theirs, &record);
    if let Err(error) = thread::detach(name, run) {
        log::error!("nobody watches pod \"{pod_id}\": {error}"); // ListPods shows its end
    }
}

fn watch_until_end(context: &PodContext, record: &PodRecord) {
    let edited = loop {
        let is_proven = match life::wait_for_end(context.lock.runtime(), &record.life) {
            Ok(is_proven) => is_proven,
            Err(error) => {
                log::error!("cannot watch pod \"{}\": {error}", record.pod_id); // ListPods shows its end
                return;
            }
        };
        if context.is_ending() {
            return;
        }
        // What it held is its spawner's again from now on, whoever speaks of its end.
        let edited = context.lock.edit(None, |table| Ok(table.clone()));
        // A life file that somebody has removed proves nothing; the lock judges such a pod by its process.
        let is_gone = || edited.as_ref().is_ok_and(|edited| edited.value.by_life(&record.life).is_none());
        if is_proven || is_gone() {
            break edited;
        }
        std::thread::sleep(LOOK_AGAIN);
    };
    // An entry that was still there for us to reclaim was not given back: nothing is on its way.
    let is_crash =
        edited.as_ref().is_ok_and(|edited| edited.reclaimed.iter().any(|gone| gone.life == record.life));
    if !is_crash && context.registry.wait_ended(&record.life, SHUTDOWN_GRACE) {
        return;
    }
    let mine = is_mine_to_tell(context, record);
    match context.registry.end(&record.life) {
        Ok(Some(_)) => {}
        Ok(None) => return, // its ShutDown came after all
        Err(error) => log::error!("cannot forget pod \"{}\": {error}", record.pod_id), // told all the same
    }
    let table = match edited {
        Ok(edited) => edited.value,
        Err(error) => {
            log::error!("cannot take back the scope of pod \"{}\": {error}", record.pod_id); // the next opener does
            context.lock.read().unwrap_or_default()
        }
    };
    if let Err(error) = survey::add_descendants(context, &table) {
        log::error!("cannot take over the pods of \"{}\": {error}", record.pod_id); // ListPods does
    }
    if mine {
        let returned = came_back(&table, &context.own.pod_id, &record.scope);
        context.mailbox.post(Event::Notice(render_crash(&record.pod_id, &record.life, &returned)));
    }
}

/// Whether this pod is the nearest living ancestor: its model, and nobody else's, reads of the crash.
fn is_mine_to_tell(context: &PodContext, record: &PodRecord) -> bool {
    let newest = context.registry.by_life(&record.life);
    let record = newest.as_ref().unwrap_or(record); // somebody may have taken it over since it was first seen
    match record.origin {
        Origin::Spawned => true,
        Origin::Introduced => false,
        Origin::Descendant => {
            let mut above = std::iter::successors(record.spawner.clone(), |above| spawner_of(context, above));
            let is_own = |pod_id: &PodId| *pod_id == context.own.pod_id;
            let lives = |known: PodRecord| context.lives(&known.life);
            let nearest = above.find(|id| is_own(id) || context.registry.get(id).is_some_and(lives));
            nearest.is_none_or(|nearest| is_own(&nearest)) // where nobody in between is known any more it is ours
        }
    }
}

fn spawner_of(context: &PodContext, pod_id: &PodId) -> Option<PodId> {
    let record = context.registry.get(pod_id).or_else(|| context.registry.get_ended(pod_id));
    record.and_then(|record| record.spawner).filter(|spawner| spawner != pod_id)
}
