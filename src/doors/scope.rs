//! `insomnia scope`: who holds which scope. Reads the lock file without taking its lock.

use std::path::Path;

use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::doors::find::Machine;
use crate::doors::terminal::{ago, reply, table, talk_line, with};
use crate::store::paths::canonical;
use crate::store::{life, repair};
use crate::sys::clock;
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};

/// `insomnia scope list`.
pub(super) fn list(machine: &Machine, given: &Given) -> Result<bool> {
    let allocations = machine.lock.read()?;
    if allocations.allocations().is_empty() && !given.has("json") {
        talk_line("nobody holds any scope");
        return Ok(true);
    }
    let rows: Vec<Value> =
        allocations.allocations().iter().map(|entry| as_json(machine, &allocations, entry)).collect();
    reply(given, &json!({ "allocations": rows }), || render(machine, &allocations));
    Ok(true)
}

fn as_json(machine: &Machine, allocations: &AllocationTable, entry: &Allocation) -> Value {
    let lent: Vec<String> =
        allocations.loans(&entry.pod_id).iter().map(|loan| loan.rule.to_string()).collect();
    let alive = !life::is_dead(machine.lock.runtime(), entry);
    with(entry, json!({ "alive": alive, "lent": lent }))
}

/// The tree of pods with what each may write and what it has lent.
pub(super) fn render(machine: &Machine, allocations: &AllocationTable) -> String {
    let mut rows = Vec::new();
    let roots = allocations.allocations().iter().filter(|entry| entry.delegated_from.is_none());
    for root in roots {
        add_rows(machine, allocations, root, 0, &mut rows);
    }
    table(&["POD", "PID", "ALIVE", "FOR", "WRITES", "EXCEPT, LENT TO"], rows)
}

fn add_rows(
    machine: &Machine,
    allocations: &AllocationTable,
    entry: &Allocation,
    depth: usize,
    rows: &mut Vec<Vec<String>>,
) {
    let writes: Vec<String> =
        entry.write_rules().map(|rule| rule.to_string().replacen(":write:recursive", "", 1)).collect();
    let loans = allocations.loans(&entry.pod_id);
    let lent: Vec<String> =
        loans.iter().map(|loan| format!("{} ({})", loan.rule.path(), loan.holder)).collect();
    let or_dash = |list: Vec<String>| if list.is_empty() { "-".to_owned() } else { list.join(" ") };
    rows.push(vec![
        format!("{}{}", "  ".repeat(depth), entry.pod_id),
        entry.pid.to_string(),
        if life::is_dead(machine.lock.runtime(), entry) { "no" } else { "yes" }.to_owned(),
        ago(entry.since, clock::now_seconds()),
        or_dash(writes),
        or_dash(lent),
    ]);
    for child in allocations.children(&entry.pod_id) {
        add_rows(machine, allocations, child, depth + 1, rows);
    }
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
        json!({ "pod_id": entry.pod_id, "pid": entry.pid, "rule": rule(entry),
            "alive": !life::is_dead(machine.lock.runtime(), entry) })
    };
    let is_alive = |entry: &&&Allocation| !life::is_dead(machine.lock.runtime(), entry);
    let living: Vec<&Allocation> = holders.iter().filter(is_alive).copied().collect();
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
            let ids: Vec<&str> = repaired.entries.iter().map(|entry| entry.pod_id.as_str()).collect();
            let ids = if ids.is_empty() { "no pod, as none lives".to_owned() } else { ids.join(", ") };
            lines.push(format!("rebuilt with {ids}"));
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
