//! Reports of children: who may report, what a report does, and what the model is told.
//!
//! Runs on the connection's thread, before the controller hears of it. Each effect may be done twice without
//! harm, and nothing depends on the order of reports.

use crate::store::registry::Origin;
use crate::tools::context::PodContext;
use crate::tools::mailbox::Event;
use crate::tools::survey;
use crate::words::allocation::{AllocationState, AllocationTable};
use crate::words::error::Result;
use crate::words::identity::{Life, PodId};
use crate::words::notification::render_event;
use crate::words::protocol::{Done, ErrorCode, PodEvent, Sender, WireError};
use crate::words::scope::Rule;

/// Takes a report: does what it means and passes it on to the controller.
///
/// # Errors
/// `not_allowed` without a sender, `unknown_pod` from a life that is not known here, `bad_request` when the
/// report speaks for somebody else, `internal` when its effect could not be done.
pub fn receive(context: &PodContext, from: Option<&Sender>, event: &PodEvent) -> Result<Done, WireError> {
    let Some(from) = from else {
        return Err(WireError::new(ErrorCode::NotAllowed, "a report needs \"from\": only pods report"));
    };
    if event.reporter() != &from.pod_id {
        return Err(WireError::new(ErrorCode::BadRequest, "a pod reports of itself only"));
    }
    // Without a readable lock the registry alone says who is known, and no scope comes back.
    let table = context.lock.read().unwrap_or_else(|error| {
        log::error!("a report comes while the lock cannot be read: {error}");
        AllocationTable::default()
    });
    if !is_known(context, &table, from) {
        let reason =
            format!("pod \"{}\" with that life is not known to \"{}\"", from.pod_id, context.own.pod_id);
        return Err(WireError::new(ErrorCode::UnknownPod, reason));
    }
    let returned = match event {
        PodEvent::TurnEnded { .. } | PodEvent::Errored { .. } => Vec::new(),
        PodEvent::ShutDown { .. } => match ended(context, &table, &from.life)? {
            Some(returned) => returned,
            None => return Ok(Done {}), // heard already, from its watcher
        },
        PodEvent::ScopeSubDelegated { sub_pod, sub_socket, .. } => {
            spawned_below(context, &table, sub_pod, sub_socket)?;
            Vec::new()
        }
    };
    context.mailbox.post(Event::Notice(render_event(event, &from.life, &returned)));
    Ok(Done {})
}

/// A pod is known when the registry has that very life, or the lock has it below this pod.
fn is_known(context: &PodContext, table: &AllocationTable, from: &Sender) -> bool {
    let registered = context.registry.by_life(&from.life).is_some_and(|record| record.pod_id == from.pod_id);
    let own = &context.own.life;
    let below = table.by_life(&from.life).filter(|entry| entry.pod_id == from.pod_id);
    registered
        || below.is_some_and(|entry| table.ancestors(&entry.pod_id).iter().any(|above| above.life == *own))
}

/// Forgets a pod that has ended and frees what the lock still holds of that very life. `None` when its end was
/// heard already; otherwise what came back.
fn ended(context: &PodContext, table: &AllocationTable, life: &Life) -> Result<Option<Vec<String>>> {
    let entry = table.by_life(life).cloned();
    let record = context.registry.end(life)?;
    let Some(scope) =
        record.map(|record| record.scope).or_else(|| entry.clone().map(|entry| entry.scope_allow))
    else {
        return Ok(None);
    };
    let table = match entry {
        None => table.clone(),
        Some(_) => {
            let freed = context.lock.edit(None, |table| {
                context.lock.release(table, life);
                Ok(table.clone())
            });
            freed?.value
        }
    };
    survey::add_descendants(context, &table)?;
    Ok(Some(came_back(&table, &context.own.pod_id, &scope)))
}

/// The write rules of an ended pod that are this pod's again, each with what its own pods still hold of it.
pub fn came_back(table: &AllocationTable, own: &PodId, scope: &[Rule]) -> Vec<String> {
    let Some(effective) = table.effective(own) else { return Vec::new() };
    let mine = |rule: &&Rule| {
        rule.writes() && effective.allow.iter().any(|allowed| allowed.writes() && allowed.contains(rule))
    };
    let describe = |rule: &Rule| {
        let kept = effective.lent.iter().filter(|loan| loan.rule.overlaps(rule));
        let kept: Vec<String> =
            kept.map(|loan| format!("{} is still held by {}", loan.rule.path(), loan.holder)).collect();
        if kept.is_empty() { rule.to_string() } else { format!("{rule} ({})", kept.join(", ")) }
    };
    scope.iter().filter(mine).map(describe).collect()
}

fn spawned_below(
    context: &PodContext,
    table: &AllocationTable,
    sub_pod: &PodId,
    sub_socket: &str,
) -> Result<()> {
    let held =
        table.get(sub_pod).filter(|entry| entry.socket == sub_socket && entry.state == AllocationState::Live);
    let Some(entry) = held.filter(|entry| context.registry.by_life(&entry.life).is_none()) else {
        return Ok(());
    };
    survey::know(context, entry, Origin::Descendant).map(|_| ())
}
