//! Who lent to whom, worked out from entries that were found one by one, for `scope repair`.
//!
//! Pure. Each living pod keeps its own entry as it was at its start. That is enough for everything but one: when
//! its spawner has ended since, the table has given the pod to the spawner's own spawner, and its entry still
//! names the one that is gone.

use crate::words::allocation::{Allocation, AllocationState};
use crate::words::identity::PodId;

/// Leaves out reservations whose pod has come already: for a moment both lives are held.
pub(crate) fn without_adopted_reservations(allocations: Vec<Allocation>) -> Vec<Allocation> {
    let come: Vec<PodId> =
        allocations.iter().filter(|a| a.state == AllocationState::Live).map(|a| a.pod_id.clone()).collect();
    let adopted = |a: &Allocation| a.state == AllocationState::Starting && come.contains(&a.pod_id);
    allocations.into_iter().filter(|a| !adopted(a)).collect()
}

/// Gives each entry the spawner that the table would name now.
///
/// The named spawner stays if it is there and its writing contains the pod's own; the name alone proves little,
/// because a later pod may have got it. Otherwise it is the innermost pod whose writing contains all of the
/// pod's: every such pod is one of its line, since nobody else may hold those paths. A pod that writes nothing
/// and whose spawner is gone becomes a root, which takes nothing from anybody.
pub(crate) fn infer_spawners(allocations: &mut [Allocation]) {
    let found = allocations.to_vec();
    let is_above = |above: &Allocation, below: &Allocation| {
        let line = std::iter::successors(named(&found, below), |a| named(&found, a)).take(found.len());
        line.into_iter().any(|a| a.life == above.life)
    };
    // Of two pods with the same writing only their ages tell who lent it to whom; and even they do not when the
    // older one names the younger: that may be a successor of its spawner, or its spawner itself, started again.
    let is_inside = |inner: &Allocation, outer: &Allocation| {
        let by_age =
            || outer.since < inner.since && called(&found, outer).is_none_or(|a| a.life != inner.life);
        contains_all(outer, inner)
            && !is_above(inner, outer)
            && (!contains_all(inner, outer) || is_above(outer, inner) || by_age())
    };
    for allocation in allocations {
        // One that was spawned and names nobody was a root when its entry was written; its spawner may have come back.
        let is_root = allocation.delegated_from.is_none() && allocation.spawned_by.is_none();
        if is_root || named(&found, allocation).is_some() {
            continue;
        }
        let writes = allocation.write_rules().next().is_some();
        let others = found.iter().filter(|other| other.life != allocation.life);
        let line = others.filter(|other| writes && is_inside(allocation, other));
        let innermost = line.reduce(|chosen, other| if is_inside(other, chosen) { other } else { chosen });
        allocation.delegated_from = innermost.map(|a| a.pod_id.clone());
    }
}

/// The pod of the name that the entry gives for its spawner, if its writing contains the entry's.
fn called<'a>(found: &'a [Allocation], entry: &Allocation) -> Option<&'a Allocation> {
    let id = entry.delegated_from.as_ref().filter(|id| **id != entry.pod_id)?;
    found.iter().find(|spawner| spawner.pod_id == *id && contains_all(spawner, entry))
}

/// As `called`, unless that pod has the same writing and is younger: a pod may give the name of its own late
/// spawner to one that it spawns.
fn named<'a>(found: &'a [Allocation], entry: &Allocation) -> Option<&'a Allocation> {
    let spawner = called(found, entry)?;
    let leads_back = || {
        let mut line = std::iter::successors(Some(spawner), |a| called(found, a)).take(found.len());
        line.any(|above| above.life == entry.life)
    };
    let is_older = spawner.since < entry.since || (spawner.since == entry.since && !leads_back());
    (is_older || !contains_all(entry, spawner)).then_some(spawner)
}

/// Everything in which the entries contradict each other, one sentence each.
pub(crate) fn contradictions(allocations: &[Allocation]) -> Vec<String> {
    let spawner = |a: &Allocation| {
        let id = a.delegated_from.as_ref()?;
        allocations.iter().find(|other| other.pod_id == *id)
    };
    let is_above = |above: &Allocation, below: &Allocation| {
        let line = std::iter::successors(spawner(below), |a| spawner(a)).take(allocations.len());
        line.into_iter().any(|a| a.life == above.life)
    };
    let mut found = Vec::new();
    for (at, first) in allocations.iter().enumerate() {
        for second in allocations.iter().skip(at + 1) {
            if first.pod_id == second.pod_id {
                found.push(format!(
                    "two living pods call themselves \"{}\": {}",
                    first.pod_id,
                    both(first, second)
                ));
            }
            if is_above(first, second) || is_above(second, first) {
                continue;
            }
            for rule in first.write_rules() {
                for other in second.write_rules().filter(|other| other.overlaps(rule)) {
                    let inner = if rule.covers(other.path()) { other } else { rule };
                    found.push(format!(
                        "both may write \"{}\", and neither has lent it to the other: {}",
                        inner.path(),
                        both(first, second)
                    ));
                }
            }
        }
    }
    found
}

fn both(first: &Allocation, second: &Allocation) -> String {
    format!(
        "pod \"{}\" (pid {}) and pod \"{}\" (pid {}); stop one of them, then repair again",
        first.pod_id, first.pid, second.pod_id, second.pid
    )
}

/// Whether everything that `inner` may write lies inside what `outer` may write.
fn contains_all(outer: &Allocation, inner: &Allocation) -> bool {
    inner.write_rules().all(|rule| outer.write_rules().any(|own| own.contains(rule)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::allocation::AllocationTable;
    use crate::words::allocation::tests::entry;

    /// Rebuilds from entries and compares who has which spawner.
    fn check(entries: Vec<Allocation>, expected: &[(&str, Option<&str>)]) {
        let table = AllocationTable::rebuild(entries).unwrap();
        let found: Vec<(&str, Option<&str>)> = table
            .allocations()
            .iter()
            .map(|a| (a.pod_id.as_str(), a.delegated_from.as_ref().map(PodId::as_str)))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_pod_whose_spawner_is_gone_goes_to_the_innermost_that_holds_its_scope() {
        let root = entry("root", 1, &["/w:write"], None);
        let mid = entry("mid", 2, &["/w/a:write"], Some("root"));
        let leaf = entry("leaf", 3, &["/w/a/b:write"], Some("gone"));
        check(
            vec![leaf.clone(), root.clone(), mid],
            &[("leaf", Some("mid")), ("root", None), ("mid", Some("root"))],
        );
        check(vec![root, leaf.clone()], &[("root", None), ("leaf", Some("root"))]);
        check(vec![leaf], &[("leaf", None)]);
    }

    #[test]
    fn a_later_pod_of_the_same_name_is_not_the_spawner() {
        let root = entry("root", 1, &["/w:write"], None);
        let successor = entry("mid", 9, &["/w/c:write"], Some("root"));
        let leaf = entry("leaf", 3, &["/w/a/b:write"], Some("mid"));
        check(vec![root, successor, leaf], &[("root", None), ("mid", Some("root")), ("leaf", Some("root"))]);
    }

    #[test]
    fn a_pod_that_gave_away_the_name_of_its_spawner_is_not_below_itself() {
        let root = entry("root", 1, &["/w:write"], None);
        for scope in [&["/w/a:write"][..], &[]] {
            let mut first = entry("first", 2, scope, Some("mid"));
            let mut successor = entry("mid", 9, scope, Some("first"));
            (first.since, successor.since) = (10, 20);
            let parent = if scope.is_empty() { None } else { Some("root") };
            check(
                vec![root.clone(), successor, first],
                &[("root", None), ("mid", Some("first")), ("first", parent)],
            );
        }
    }

    #[test]
    fn of_two_pods_with_one_scope_the_older_has_lent_it() {
        let mut first = entry("first", 1, &["/w:write"], Some("gone"));
        let mut second = entry("second", 2, &["/w:write"], Some("lost"));
        (first.since, second.since) = (10, 20);
        check(vec![second.clone(), first.clone()], &[("second", Some("first")), ("first", None)]);
        let mut known = second.clone();
        (known.delegated_from, known.since) = (Some(first.pod_id.clone()), 10);
        check(vec![known, first.clone()], &[("second", Some("first")), ("first", None)]);
        first.delegated_from = Some(second.pod_id.clone());
        assert!(AllocationTable::rebuild(vec![first.clone(), second.clone()]).is_err(), "a successor or not");
        first.delegated_from = None;
        second.since = 10;
        let looked_at = AllocationTable::unchecked(vec![first.clone(), second.clone()]);
        assert_eq!(looked_at.allocations().len(), 2, "what is only looked at may be undecided");
        let undecided = AllocationTable::rebuild(vec![first, second]).unwrap_err();
        assert!(undecided.len() == 1 && undecided[0].contains("both may write \"/w\""), "{undecided:?}");
    }

    #[test]
    fn every_overlap_is_listed() {
        let entries = vec![
            entry("a", 1, &["/w:write", "/v/x:write"], None),
            entry("b", 2, &["/w/b:write"], None),
            entry("c", 3, &["/v:write:flat"], None),
        ];
        let listed = AllocationTable::rebuild(entries).unwrap_err();
        assert_eq!(listed.len(), 2, "{listed:?}");
        assert!(listed[0].contains("/w/b") && listed[0].contains("pid 1002"), "{listed:?}");
    }

    #[test]
    fn a_reservation_counts_until_its_pod_has_come() {
        let root = entry("root", 1, &["/w:write"], None);
        let mut reserved = entry("kid", 2, &["/w/k:write"], Some("root"));
        reserved.state = AllocationState::Starting;
        let come = entry("kid", 3, &["/w/k:write"], Some("root"));
        check(vec![root.clone(), reserved.clone()], &[("root", None), ("kid", Some("root"))]);
        check(vec![root, reserved, come], &[("root", None), ("kid", Some("root"))]);
    }
}
