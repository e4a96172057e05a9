//! `insomnia scope`: who holds which scope. Reads the lock file without taking its lock.

use std::path::Path;

use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::doors::find::Machine;
use crate::doors::terminal::{ago, listed, reply, table, talk_line, with};
use crate::store::paths::canonical;
use crate::store::repair;
use crate::sys::clock;
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};
use crate::words::identity::PodId;
use crate::words::scope::Rule;

/// `insomnia scope list`.
pub(super) fn list(machine: &Machine, given: &Given) -> Result<bool> {
    let allocations = machine.lock.read()?;
    if allocations.allocations().is_empty() && !given.has("json") {
        talk_line("nobody holds any scope");
        return Ok(true);
    }
    let as_json = |entry: &Allocation| {
        let lent: Vec<Rule> = allocations.loans(&entry.pod_id).into_iter().map(|loan| loan.rule).collect();
        with(entry, json!({ "alive": machine.lives(entry), "lent": lent }))
    };
    let rows: Vec<Value> = allocations.allocations().iter().map(as_json).collect();
    reply(given, &json!({ "allocations": rows }), || render(machine, &allocations));
    Ok(true)
}

/// The tree of pods with what each may write and what it has lent.
pub(super) fn render(machine: &Machine, allocations: &AllocationTable) -> String {
    let line = |entry: &&Allocation| -> Vec<PodId> {
        let above = allocations.ancestors(&entry.pod_id).into_iter().rev();
        above.chain([*entry]).map(|pod| pod.pod_id.clone()).collect()
    };
    let mut entries: Vec<&Allocation> = allocations.allocations().iter().collect();
    entries.sort_by_cached_key(line);
    let now = clock::now_seconds();
    let row = |entry: &Allocation| {
        let depth = allocations.ancestors(&entry.pod_id).len();
        let writes = entry.write_rules().map(|rule| rule.to_string().replacen(":write:recursive", "", 1));
        let loans = allocations.loans(&entry.pod_id).into_iter();
        let lent = loans.map(|loan| format!("{} ({})", loan.rule.path(), loan.holder));
        vec![
            format!("{}{}", "  ".repeat(depth), entry.pod_id),
            entry.pid.to_string(),
            if machine.lives(entry) { "yes" } else { "no" }.to_owned(),
            ago(entry.since, now),
            listed(writes, " ").unwrap_or("-".into()),
            listed(lent, " ").unwrap_or("-".into()),
        ]
    };
    table(&["POD", "PID", "ALIVE", "FOR", "WRITES", "EXCEPT, LENT TO"], entries.into_iter().map(row))
}

/// `insomnia scope who PATH`: the line of pods that hold a scope over the path; the last one that lives may
/// write it.
pub(super) fn who(machine: &Machine, given: &Given) -> Result<bool> {
    let path = canonical(Path::new(given.word(0, "PATH")?), machine.current()?)?;
    let path = path.to_str().ok_or_else(|| Error::told("nobody can hold a path that is not UTF-8"))?;
    let allocations = machine.lock.read()?;
    let holders = allocations.holders(path);
    let rule =
        |entry: &Allocation| entry.write_rules().find(|rule| rule.covers(path)).map(ToString::to_string);
    let as_json = |entry: &&Allocation| {
        let alive = machine.lives(entry);
        json!({ "pod_id": entry.pod_id, "pid": entry.pid, "rule": rule(entry), "alive": alive })
    };
    let living: Vec<&Allocation> = holders.iter().filter(|entry| machine.lives(entry)).copied().collect();
    let plain = || {
        let Some((writer, lenders)) = living.split_last() else { return format!("nobody holds {path}") };
        let holds = |entry: &Allocation| {
            format!("\n  pod {} holds {}", entry.pod_id, rule(entry).unwrap_or_default())
        };
        let lent: String = lenders.iter().map(|entry| format!("{}, and has lent", holds(entry))).collect();
        format!("pod {} (pid {}) may write {path}{lent}{}", writer.pod_id, writer.pid, holds(writer))
    };
    let writer = living.last().map(|entry| &entry.pod_id);
    let line: Vec<Value> = holders.iter().map(as_json).collect();
    reply(given, &json!({ "path": path, "writer": writer, "holders": line }), plain);
    Ok(writer.is_some())
}

/// `insomnia scope repair`. The answer is no when living pods contradict each other.
pub(super) fn repair(machine: &Machine, given: &Given) -> Result<bool> {
    let repaired = repair::repair(&machine.lock)?;
    let path = machine.lock.path();
    let plain = || {
        let mut lines = match &repaired.fault {
            None => vec![format!("\"{}\" is sound; nothing is done", path.display())],
            Some(fault) => vec![format!("\"{}\": {fault}", path.display())],
        };
        lines.extend(repaired.undecided.iter().map(|reason| format!("cannot decide: {reason}")));
        if !repaired.undecided.is_empty() {
            lines.push("nothing is changed; stop one of these pods with \"insomnia stop POD\" or by its pid, then repair again".into());
        } else if repaired.fault.is_some() {
            let ids = listed(repaired.entries.iter().map(|entry| &entry.pod_id), ", ");
            lines.push(format!("rebuilt with {}", ids.as_deref().unwrap_or("no pod, as none lives")));
            lines.extend(
                repaired.kept_aside.iter().map(|aside| format!("the bad file is \"{}\"", aside.display())),
            );
        }
        lines.join("\n")
    };
    let value = json!({ "fault": repaired.fault, "kept_aside": repaired.kept_aside,
        "undecided": repaired.undecided, "allocations": repaired.entries });
    reply(given, &value, plain);
    Ok(repaired.undecided.is_empty())
}
