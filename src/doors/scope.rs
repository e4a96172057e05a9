//! `insomnia scope`: who holds which scope. Reads the lock file without taking its lock.

use std::path::Path;

use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::doors::find::Machine;
use crate::doors::terminal::{ago, answer, answer_line, table, talk_line};
use crate::store::paths::canonical;
use crate::store::{life, repair};
use crate::sys::clock;
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::{Error, Result};
use crate::words::text::harmless;

/// `insomnia scope list`.
///
/// # Errors
/// When the lock file cannot be used.
pub fn list(machine: &Machine, given: &Given) -> Result<bool> {
    let allocations = machine.lock.read()?;
    if given.has("json") {
        let rows: Vec<Value> =
            allocations.allocations().iter().map(|entry| as_json(machine, &allocations, entry)).collect();
        answer_line(&json!({ "allocations": rows }).to_string());
    } else if allocations.allocations().is_empty() {
        talk_line("nobody holds any scope");
    } else {
        answer(&harmless(&render(machine, &allocations)));
    }
    Ok(true)
}

fn as_json(machine: &Machine, allocations: &AllocationTable, entry: &Allocation) -> Value {
    let mut row = json!(entry);
    if let Some(row) = row.as_object_mut() {
        row.insert("alive".into(), json!(!life::is_dead(machine.lock.runtime(), entry)));
        let lent: Vec<String> =
            allocations.loans(&entry.pod_id).iter().map(|loan| loan.rule.to_string()).collect();
        row.insert("lent".into(), json!(lent));
    }
    row
}

/// The tree of pods with what each may write and what it has lent.
#[must_use]
pub fn render(machine: &Machine, allocations: &AllocationTable) -> String {
    let mut rows =
        vec![["POD", "PID", "ALIVE", "FOR", "WRITES", "EXCEPT, LENT TO"].map(str::to_owned).to_vec()];
    let roots = allocations.allocations().iter().filter(|entry| entry.delegated_from.is_none());
    for root in roots {
        add_rows(machine, allocations, root, 0, &mut rows);
    }
    table(&rows)
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

/// `insomnia scope who PATH`: the line of pods that hold a scope over the path; the last one may write it.
///
/// # Errors
/// When the path or the lock file cannot be read.
pub fn who(machine: &Machine, given: &Given) -> Result<bool> {
    let current =
        std::env::current_dir().map_err(|source| Error::io("find the current directory", source))?;
    let path = canonical(Path::new(given.word(0, "PATH")?), &current)?;
    let path = path.to_str().ok_or_else(|| Error::told("nobody can hold a path that is not UTF-8"))?;
    let allocations = machine.lock.read()?;
    let holders = allocations.holders(path);
    let rule =
        |entry: &Allocation| entry.write_rules().find(|rule| rule.covers(path)).map(ToString::to_string);
    if given.has("json") {
        let line: Vec<Value> = holders
            .iter()
            .map(|entry| {
                json!({ "pod_id": entry.pod_id, "pid": entry.pid, "rule": rule(entry),
                "alive": !life::is_dead(machine.lock.runtime(), entry) })
            })
            .collect();
        let writer = holders.last().map(|entry| &entry.pod_id);
        answer_line(&json!({ "path": path, "writer": writer, "holders": line }).to_string());
        return Ok(writer.is_some());
    }
    let Some((writer, lenders)) = holders.split_last() else {
        answer_line(&harmless(&format!("nobody holds {path}")));
        return Ok(false);
    };
    let mut text = format!("pod {} (pid {}) may write {path}\n", writer.pod_id, writer.pid);
    for entry in lenders {
        text.push_str(&format!(
            "  pod {} holds {}, and has lent\n",
            entry.pod_id,
            rule(entry).unwrap_or_default()
        ));
    }
    text.push_str(&format!("  pod {} holds {}\n", writer.pod_id, rule(writer).unwrap_or_default()));
    answer(&harmless(&text));
    Ok(true)
}

/// `insomnia scope repair`. The answer is no when living pods contradict each other.
///
/// # Errors
/// When the lock is held for too long, or a file cannot be written.
pub fn repair(machine: &Machine, given: &Given) -> Result<bool> {
    let repaired = repair::repair(&machine.lock)?;
    let is_decided = repaired.undecided.is_empty();
    if given.has("json") {
        answer_line(
            &json!({ "fault": repaired.fault, "kept_aside": repaired.kept_aside, "undecided": repaired.undecided,
                "allocations": repaired.entries })
            .to_string(),
        );
        return Ok(is_decided);
    }
    let path = machine.lock.path();
    match &repaired.fault {
        None => answer_line(&format!("\"{}\" is sound; nothing is done", path.display())),
        Some(fault) => answer_line(&harmless(&format!("\"{}\": {fault}", path.display()))),
    }
    for reason in &repaired.undecided {
        talk_line(&format!("cannot decide: {reason}"));
    }
    if !is_decided {
        talk_line(
            "nothing is changed; stop one of these pods with \"insomnia stop POD\" or by its pid, then repair again",
        );
    } else if repaired.fault.is_some() {
        let ids: Vec<String> = repaired.entries.iter().map(|entry| entry.pod_id.to_string()).collect();
        let ids = if ids.is_empty() { "no pod, as none lives".to_owned() } else { ids.join(", ") };
        answer_line(&format!("rebuilt with {ids}"));
        if let Some(aside) = &repaired.kept_aside {
            answer_line(&format!("the bad file is \"{}\"", aside.display()));
        }
    }
    Ok(is_decided)
}
