//! `insomnia scope`: who holds which scope. Reads the lock file without taking its lock.

use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::doors::find::Machine;
use crate::doors::terminal::{ago, answer, answer_line, table, talk_line};
use crate::store::life;
use crate::sys::clock;
use crate::words::allocation::{Allocation, AllocationTable};
use crate::words::error::Result;
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
