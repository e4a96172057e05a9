//! The table in `scope.lock`: which live pod holds which scope, and who lent it.
//!
//! Pure: no file, clock or process in here, so the promise "at most one writer per path" can be fuzzed and
//! checked against a model. Whether a pod lives is asked through a closure.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::words::error::{Error, Result};
use crate::words::identity::{Life, Pid, PodId, PodName};
use crate::words::limits::{Limits, MAX_RULES};
use crate::words::rebuild;
use crate::words::scope::{Access, EffectiveScope, Loan, Reach, Rule, Verdict};

/// The version of the file format that this program reads and writes.
pub const TABLE_VERSION: u64 = 1;

/// Whether the entry's process is there yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllocationState {
    /// Reserved by a spawner whose life file it names; the pod itself has not come yet.
    Starting,
    /// Held by the pod itself.
    Live,
}

/// One entry: a pod and the scope it holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    /// Unique among live pods of this user.
    pub pod_id: PodId,
    /// The name it was asked to have.
    pub name: PodName,
    /// Its process, for people; liveness is the life lock.
    pub pid: Pid,
    /// Start time of the process in clock ticks since boot (proc_pid_stat(5), field 22).
    pub start_time: u64,
    /// The nonce that names its life file.
    pub life: Life,
    /// Whether the pod is there yet.
    pub state: AllocationState,
    /// The session that spawned it, kept when the pod is re-parented; `None` for a pod that a person started.
    pub spawned_by: Option<String>,
    /// Its socket.
    pub socket: String,
    /// Its own rules. A pod without read rules reads everything.
    pub scope_allow: Vec<Rule>,
    /// The pod whose scope this was lent from, `None` for a root.
    pub delegated_from: Option<PodId>,
    /// When the entry was made, in seconds since 1970.
    #[serde(default)]
    pub since: u64,
    /// Fields of a later minor version, kept as they are.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

impl Allocation {
    /// The rules that allow writing.
    pub fn write_rules(&self) -> impl Iterator<Item = &Rule> {
        self.scope_allow.iter().filter(|rule| rule.writes())
    }
}

/// Why a start or a loan is refused. The text names the holder and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Another pod holds a path of the wanted rule.
    Held {
        /// The rule that was asked for.
        wanted: Rule,
        /// Who holds it.
        holder: PodId,
        /// The holder's process.
        pid: Pid,
        /// The holder's rule.
        rule: Rule,
    },
    /// The spawner itself does not hold the wanted rule.
    NotMine {
        /// The rule that was asked for.
        wanted: Rule,
        /// The pod that wanted to lend it.
        spawner: PodId,
    },
    /// A limit is reached.
    Limit {
        /// What is limited, in words.
        what: String,
        /// The limit's value.
        limit: usize,
        /// The setting that changes it.
        setting: &'static str,
    },
    /// The pod_id or life is not in the table, or is there twice.
    Entry(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Held { wanted, holder, pid, rule } => write!(
                f,
                "write scope \"{}\" is held by pod \"{holder}\" (pid {pid}, rule \"{rule}\"); stop it with \"insomnia stop {holder}\" or ask for a scope that does not meet it",
                wanted.path()
            ),
            Refusal::NotMine { wanted, spawner } => write!(
                f,
                "scope \"{wanted}\" is not inside the scope of pod \"{spawner}\"; a pod can lend only what it may use itself"
            ),
            Refusal::Limit { what, limit, setting } => {
                write!(f, "{what}: the limit is {limit} (manifest setting \"limits.{setting}\")")
            }
            Refusal::Entry(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for Refusal {}

/// What a pod that goes on with its session got.
#[derive(Debug, Clone, PartialEq)]
pub struct Resumed {
    /// Its entry.
    pub entry: Allocation,
    /// Why each of its old rules that is not in the entry is gone.
    pub lost: Vec<Refusal>,
}

/// All entries of `scope.lock`; always valid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AllocationTable {
    version: u64,
    allocations: Vec<Allocation>,
    #[serde(flatten)]
    extra: BTreeMap<String, Value>,
}

impl Default for AllocationTable {
    fn default() -> Self {
        AllocationTable { version: TABLE_VERSION, allocations: Vec::new(), extra: BTreeMap::new() }
    }
}

impl AllocationTable {
    /// Reads a table from the file's text and validates it.
    ///
    /// # Errors
    /// With what is wrong with it, as "it ..." goes on or as a sentence; a later version is told as such.
    pub fn parse(text: &[u8]) -> Result<AllocationTable> {
        #[derive(Deserialize)]
        struct Version {
            version: u64,
        }
        if text.iter().all(u8::is_ascii_whitespace) {
            return Err(Error::told("it is empty"));
        }
        // A later version may look different in everything but its number, so the number is asked for in any case;
        // but by a second reading only where the first one fails.
        let table: AllocationTable = serde_json::from_slice(text).map_err(|error| {
            let found = serde_json::from_slice::<Version>(text).map_or(0, |found| found.version);
            if found > TABLE_VERSION {
                return other_version(found);
            }
            Error::told(format!("it is no valid table: {error}"))
        })?;
        table.validate()?;
        Ok(table)
    }

    /// The complete text of the file: one line for each pod, for people who look into it.
    pub fn to_text(&self) -> String {
        fn json(value: &impl Serialize) -> String {
            serde_json::to_string(value).unwrap_or_default() // strings, numbers and lists cannot fail
        }
        let AllocationTable { version, allocations, extra } = self;
        let extra: String = extra.iter().map(|(key, value)| format!("{}: {value}, ", json(key))).collect();
        let begin = if allocations.is_empty() { "" } else { "\n" };
        let lines = allocations.iter().map(json).collect::<Vec<_>>().join(",\n");
        format!("{{ \"version\": {version}, {extra}\"allocations\": [{begin}{lines}\n] }}\n")
    }

    /// Makes a valid table of entries found one by one, for `scope repair`: see `words::rebuild`.
    ///
    /// # Errors
    /// Every contradiction between the entries, such as two writers of one path, one sentence each.
    pub fn rebuild(allocations: Vec<Allocation>) -> Result<AllocationTable, Vec<String>> {
        let table = AllocationTable::unchecked(allocations);
        let contradictions = rebuild::contradictions(&table.allocations);
        if !contradictions.is_empty() {
            return Err(contradictions);
        }
        table.validate().map_err(|error| vec![error.to_string()])?;
        Ok(table)
    }

    /// A table of entries found one by one that is only looked at, and never written: nothing in it is checked.
    pub(crate) fn unchecked(allocations: Vec<Allocation>) -> AllocationTable {
        let mut allocations = rebuild::without_adopted_reservations(allocations);
        rebuild::infer_spawners(&mut allocations);
        AllocationTable { allocations, ..AllocationTable::default() }
    }

    /// Checks every invariant: version, unique ids and lives, spawners that exist, no cycles, each child's
    /// writing inside its spawner's, and no two writers of one path except along a line of lending.
    ///
    /// # Errors
    /// With the first fault found.
    pub fn validate(&self) -> Result<()> {
        let invalid = |reason: String| Err(Error::told(reason));
        if self.version != TABLE_VERSION {
            return Err(other_version(self.version));
        }
        let mut by_id: HashMap<&PodId, &Allocation> = HashMap::with_capacity(self.allocations.len());
        let mut lives: HashSet<&Life> = HashSet::with_capacity(self.allocations.len());
        for allocation in &self.allocations {
            if by_id.insert(&allocation.pod_id, allocation).is_some() {
                return invalid(format!("pod \"{}\" is in it twice", allocation.pod_id));
            }
            if !lives.insert(&allocation.life) {
                return invalid(format!("two entries have the life {}", allocation.life));
            }
        }
        let lines = Lines { by_id };
        for allocation in &self.allocations {
            lines.check_spawner(allocation)?;
        }
        lines.check_one_writer(&self.allocations)
    }

    /// All entries, in the order in which they were registered.
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }

    /// The entry of this pod.
    pub fn get(&self, pod_id: &PodId) -> Option<&Allocation> {
        self.allocations.iter().find(|a| a.pod_id == *pod_id)
    }

    /// The entry of this very life.
    pub fn by_life(&self, life: &Life) -> Option<&Allocation> {
        self.allocations.iter().find(|a| a.life == *life)
    }

    /// The pods that `pod_id` lent a part of its scope to.
    pub fn children<'a>(&'a self, pod_id: &'a PodId) -> impl Iterator<Item = &'a Allocation> {
        self.allocations.iter().filter(move |a| a.delegated_from.as_ref() == Some(pod_id))
    }

    /// All pods below `pod_id`, spawners before the spawned.
    pub fn subtree<'a>(&'a self, pod_id: &'a PodId) -> Vec<&'a Allocation> {
        let mut found: Vec<&Allocation> = self.children(pod_id).collect();
        let mut next = 0;
        // Only a table that nobody has checked can have more; a circle would have no end.
        while let Some(allocation) = found.get(next).filter(|_| found.len() <= self.allocations.len()) {
            let id = &allocation.pod_id;
            found.extend(self.children(id));
            next += 1;
        }
        found
    }

    /// The pods above `pod_id`, its spawner first.
    pub fn ancestors(&self, pod_id: &PodId) -> Vec<&Allocation> {
        let above = |a: &&Allocation| a.delegated_from.as_ref().and_then(|id| self.get(id));
        let line = std::iter::successors(self.get(pod_id), above).skip(1);
        line.take(self.allocations.len()).collect() // as above
    }

    /// What a pod may do now: its own rules minus what its children hold. `None` without an entry.
    pub fn effective(&self, pod_id: &PodId) -> Option<EffectiveScope> {
        let mut allow = self.get(pod_id)?.scope_allow.clone();
        if allow.iter().all(Rule::writes) {
            allow.extend(Rule::new("/", Access::Read, Reach::Recursive));
        }
        Some(EffectiveScope { allow, lent: self.loans(pod_id) })
    }

    /// The write rules that live children of `pod_id` hold.
    pub fn loans(&self, pod_id: &PodId) -> Vec<Loan> {
        let loan =
            |child: &Allocation, rule: &Rule| Loan { holder: child.pod_id.clone(), rule: rule.clone() };
        self.children(pod_id)
            .flat_map(|child| child.write_rules().map(move |rule| loan(child, rule)))
            .collect()
    }

    /// The line of pods that hold a scope over `path`, the outermost first; the last one may write it.
    pub fn holders(&self, path: &str) -> Vec<&Allocation> {
        let holds = |a: &&Allocation| a.write_rules().any(|rule| rule.covers(path));
        let mut line: Vec<&Allocation> = self.allocations.iter().filter(holds).collect();
        line.sort_by_key(|a| self.ancestors(&a.pod_id).len());
        line
    }

    /// The first unused pod_id for this name.
    pub fn free_id(&self, name: &PodName) -> PodId {
        let mut candidates = (1..).map(|n| PodId::candidate(name, n));
        candidates.find(|id| self.get(id).is_none()).expect("a finite table leaves a number free")
    }

    /// Adds a root pod.
    ///
    /// # Errors
    /// `Refusal::Held` when any pod holds a path of its write rules, `Refusal::Limit` when the user's pods are
    /// as many as allowed, `Refusal::Entry` when the pod_id or life is taken. The table is unchanged then.
    pub fn register(&mut self, allocation: Allocation, limits: &Limits) -> Result<(), Refusal> {
        self.check_new(&allocation, limits)?;
        if allocation.delegated_from.is_some() {
            return Err(Refusal::Entry(format!("pod \"{}\" is no root pod", allocation.pod_id)));
        }
        if let Some(refusal) = allocation.write_rules().find_map(|wanted| self.conflict(wanted, &[])) {
            return Err(refusal);
        }
        self.allocations.push(allocation);
        Ok(())
    }

    /// Adds a pod that gets a part of the scope of the pod it names in `delegated_from`.
    ///
    /// # Errors
    /// As `register`, and `Refusal::NotMine` when a rule is not inside the spawner's effective scope.
    pub fn lend(&mut self, allocation: Allocation, limits: &Limits) -> Result<(), Refusal> {
        self.check_new(&allocation, limits)?;
        let spawner = allocation.delegated_from.clone().unwrap_or_else(|| allocation.pod_id.clone());
        let Some(effective) = self.effective(&spawner) else {
            return Err(Refusal::Entry(format!("pod \"{spawner}\" has no entry")));
        };
        let depth = self.ancestors(&spawner).len() + 2;
        if depth > limits.depth {
            let what = format!("pod \"{}\" would be at depth {depth}", allocation.pod_id);
            return Err(Refusal::Limit { what, limit: limits.depth, setting: "depth" });
        }
        if self.children(&spawner).count() >= limits.pods_per_spawner {
            let what = format!("pod \"{spawner}\" has as many running pods as it may");
            return Err(Refusal::Limit { what, limit: limits.pods_per_spawner, setting: "pods_per_spawner" });
        }
        let is_refused = |wanted: &&Rule| effective.judge_loan(wanted) != Verdict::Allowed;
        if let Some(wanted) = allocation.scope_allow.iter().find(is_refused) {
            let above = self.ancestors(&spawner).into_iter().map(|a| a.pod_id.clone());
            let line: Vec<PodId> = above.chain([spawner.clone()]).collect();
            let held = self.conflict(wanted, &line).filter(|_| wanted.writes());
            return Err(held.unwrap_or(Refusal::NotMine { wanted: wanted.clone(), spawner }));
        }
        self.allocations.push(allocation);
        Ok(())
    }

    /// Puts the pod's own life and process into the entry that was reserved for it, and returns the entry.
    ///
    /// # Errors
    /// `Refusal::Entry` when no such reservation is there (any more).
    pub fn adopt(
        &mut self,
        reservation: &Life,
        life: Life,
        pid: Pid,
        start_time: u64,
    ) -> Result<Allocation, Refusal> {
        let reserved = |a: &&mut Allocation| a.life == *reservation && a.state == AllocationState::Starting;
        let Some(entry) = self.allocations.iter_mut().find(reserved) else {
            return Err(Refusal::Entry(
                "the reservation for this pod is gone: its spawner gave up or ended; start it again".into(),
            ));
        };
        entry.life = life;
        entry.pid = pid;
        entry.start_time = start_time;
        entry.state = AllocationState::Live;
        Ok(entry.clone())
    }

    /// Adds a pod that goes on with the session `session` under its old id, and takes its children back.
    ///
    /// Of its old rules it keeps those that nobody else holds a part of; each other one is named in `lost`. The
    /// roots that this session spawned come back under it when their writing lies inside what it keeps; those
    /// under another living pod stay there.
    ///
    /// # Errors
    /// `Refusal::Entry` when a pod of this id lives, `Refusal::Limit` as for any start.
    pub fn resume(&mut self, entry: Allocation, session: &str, limits: &Limits) -> Result<Resumed, Refusal> {
        self.check_new(&entry, limits)?;
        let is_orphan =
            |a: &&Allocation| a.spawned_by.as_deref() == Some(session) && a.delegated_from.is_none();
        let mut children: Vec<PodId> =
            self.allocations.iter().filter(is_orphan).map(|a| a.pod_id.clone()).collect();
        let (kept, lost) = loop {
            let below = children.iter().flat_map(|id| self.subtree(id)).map(|a| a.pod_id.clone());
            let family: Vec<PodId> = below.chain(children.iter().cloned()).collect();
            let (mut kept, mut lost) = (Vec::new(), Vec::new());
            for rule in &entry.scope_allow {
                match self.conflict(rule, &family).filter(|_| rule.writes()) {
                    Some(refusal) => lost.push(refusal),
                    None => kept.push(rule.clone()),
                }
            }
            // A child outside what is kept is no child any more, and may hold what another rule needs.
            let fits = |child: &Allocation| {
                child.write_rules().all(|rule| kept.iter().any(|own| own.writes() && own.contains(rule)))
            };
            let before = children.len();
            children.retain(|id| self.get(id).is_some_and(fits));
            if children.len() == before {
                break (kept, lost);
            }
        };
        for child in self.allocations.iter_mut().filter(|a| children.contains(&a.pod_id)) {
            child.delegated_from = Some(entry.pod_id.clone());
        }
        let entry = Allocation { scope_allow: kept, delegated_from: None, ..entry };
        self.allocations.push(entry.clone());
        Ok(Resumed { entry, lost })
    }

    /// Takes the entry of this very life out; its children go to its own spawner. `None` when it is not there.
    pub fn release(&mut self, life: &Life) -> Option<Allocation> {
        let at = self.allocations.iter().position(|a| a.life == *life)?;
        let gone = self.allocations.remove(at);
        for allocation in &mut self.allocations {
            if allocation.delegated_from.as_ref() == Some(&gone.pod_id) {
                allocation.delegated_from.clone_from(&gone.delegated_from);
            }
        }
        Some(gone)
    }

    /// Releases every entry that `is_dead` says is dead, and returns them.
    ///
    /// Re-parenting one dead entry's children can only move them to another entry, so one pass that judges each
    /// entry once is the fixed point.
    pub fn reclaim(&mut self, is_dead: impl Fn(&Allocation) -> bool) -> Vec<Allocation> {
        let dead: Vec<Life> =
            self.allocations.iter().filter(|a| is_dead(a)).map(|a| a.life.clone()).collect();
        dead.iter().filter_map(|life| self.release(life)).collect()
    }

    fn check_new(&self, allocation: &Allocation, limits: &Limits) -> Result<(), Refusal> {
        if self.get(&allocation.pod_id).is_some() || self.by_life(&allocation.life).is_some() {
            return Err(Refusal::Entry(format!("a pod \"{}\" is registered already", allocation.pod_id)));
        }
        if self.allocations.len() >= limits.pods_per_user {
            let what = "this user has as many running pods as allowed".to_owned();
            return Err(Refusal::Limit { what, limit: limits.pods_per_user, setting: "pods_per_user" });
        }
        if allocation.scope_allow.len() > MAX_RULES {
            return Err(Refusal::Entry(format!(
                "a scope has at most {MAX_RULES} rules; name directories further up"
            )));
        }
        let mut seen = BTreeSet::new();
        if let Some(rule) = allocation.write_rules().find(|rule| !seen.insert(*rule)) {
            return Err(Refusal::Entry(format!("scope rule \"{rule}\" is given twice")));
        }
        Ok(())
    }

    /// The innermost pod that holds a path of `wanted`, the pods of `line` excepted.
    fn conflict(&self, wanted: &Rule, line: &[PodId]) -> Option<Refusal> {
        let others = self.allocations.iter().filter(|a| !line.contains(&a.pod_id));
        let held = others.flat_map(|a| a.write_rules().map(move |rule| (a, rule)));
        let (holder, rule) = held
            .filter(|(_, rule)| rule.overlaps(wanted))
            .max_by_key(|(a, rule)| (rule.covers(wanted.path()), self.ancestors(&a.pod_id).len()))?;
        Some(Refusal::Held {
            wanted: wanted.clone(),
            holder: holder.pod_id.clone(),
            pid: holder.pid,
            rule: rule.clone(),
        })
    }
}

fn other_version(version: u64) -> Error {
    Error::told(format!("it has version {version}, this program knows version {TABLE_VERSION}"))
}

/// The lines of lending, looked up by id while a table is validated.
struct Lines<'a> {
    by_id: HashMap<&'a PodId, &'a Allocation>,
}

impl<'a> Lines<'a> {
    fn spawner(&self, allocation: &Allocation) -> Option<&'a Allocation> {
        allocation.delegated_from.as_ref().and_then(|id| self.by_id.get(id)).copied()
    }

    fn is_above(&self, above: &Allocation, below: &Allocation) -> bool {
        std::iter::successors(self.spawner(below), |a| self.spawner(a)).any(|a| a.pod_id == above.pod_id)
    }

    fn check_spawner(&self, allocation: &Allocation) -> Result<()> {
        let id = &allocation.pod_id;
        let Some(spawner_id) = &allocation.delegated_from else { return Ok(()) };
        let Some(spawner) = self.spawner(allocation) else {
            return Err(Error::told(format!(
                "pod \"{id}\" names a spawner \"{spawner_id}\" that is not in it"
            )));
        };
        // A line longer than the table has come back to itself.
        let line = std::iter::successors(Some(spawner), |a| self.spawner(a)).take(self.by_id.len() + 1);
        if line.count() > self.by_id.len() {
            return Err(Error::told(format!("the spawners of pod \"{id}\" form a circle")));
        }
        for rule in allocation.write_rules() {
            if !spawner.write_rules().any(|own| own.contains(rule)) {
                return Err(Error::told(format!(
                    "pod \"{id}\" holds \"{rule}\", which is not inside the scope of its spawner \"{spawner_id}\""
                )));
            }
        }
        Ok(())
    }

    /// Sorted by components, every rule that can meet a later one is still on the stack of its prefixes, so
    /// the cost stays near linear in the number of rules.
    fn check_one_writer(&self, allocations: &'a [Allocation]) -> Result<()> {
        let mut rules: Vec<(&Allocation, &Rule)> =
            allocations.iter().flat_map(|a| a.write_rules().map(move |rule| (a, rule))).collect();
        rules.sort_by(|(_, a), (_, b)| by_components(a.path(), b.path()));
        let mut prefixes: Vec<(&Allocation, &Rule)> = Vec::new();
        for (owner, rule) in rules {
            while prefixes
                .last()
                .is_some_and(|(_, top)| !crate::words::scope::is_within(rule.path(), top.path()))
            {
                prefixes.pop();
            }
            for (other, above) in &prefixes {
                let related = other.pod_id == owner.pod_id
                    || self.is_above(other, owner)
                    || self.is_above(owner, other);
                if !related && above.overlaps(rule) {
                    return Err(Error::told(format!(
                        "pods \"{}\" and \"{}\" both hold \"{}\"",
                        other.pod_id,
                        owner.pod_id,
                        rule.path()
                    )));
                }
            }
            prefixes.push((owner, rule));
        }
        Ok(())
    }
}

/// Orders paths so that whatever lies below a directory follows it directly: `/` comes before every other byte.
fn by_components(a: &str, b: &str) -> Ordering {
    let order = |byte: u8| if byte == b'/' { 0 } else { byte }; // no name contains a NUL
    a.bytes().map(order).cmp(b.bytes().map(order))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An entry for tests: the pod_id doubles as the name, and the life is made from the number.
    pub(crate) fn entry(id: &str, number: u32, scope: &[&str], spawner: Option<&str>) -> Allocation {
        Allocation {
            pod_id: PodId::new(id).unwrap(),
            name: PodName::new(id).unwrap(),
            pid: Pid::new(1000 + i32::try_from(number).unwrap()).unwrap(),
            start_time: 1,
            life: Life::new(format!("{number:032x}")).unwrap(),
            state: AllocationState::Live,
            spawned_by: None,
            socket: format!("/run/{id}/sock"),
            scope_allow: scope.iter().map(|text| Rule::try_from((*text).to_owned()).unwrap()).collect(),
            delegated_from: spawner.map(|id| PodId::new(id).unwrap()),
            since: 0,
            extra: BTreeMap::new(),
        }
    }

    fn id(text: &str) -> PodId {
        PodId::new(text).unwrap()
    }

    fn family() -> AllocationTable {
        let limits = Limits::default();
        let mut table = AllocationTable::default();
        table.register(entry("root", 1, &["/w:write"], None), &limits).unwrap();
        table.lend(entry("mid", 2, &["/w/a:write"], Some("root")), &limits).unwrap();
        table.lend(entry("leaf", 3, &["/w/a/b:write"], Some("mid")), &limits).unwrap();
        table.validate().unwrap();
        table
    }

    #[test]
    fn refuses_a_second_writer_and_names_the_first() {
        let mut table = family();
        for wanted in ["/w:write", "/w/x:write", "/w/a/b/c:write", "/:write"] {
            let before = table.clone();
            let refusal = table.register(entry("other", 9, &[wanted], None), &Limits::default()).unwrap_err();
            assert!(matches!(refusal, Refusal::Held { .. }), "{wanted}: {refusal}");
            assert_eq!(table, before);
        }
        let innermost =
            table.register(entry("other", 9, &["/w/a/b:write"], None), &Limits::default()).unwrap_err();
        let text = innermost.to_string();
        assert!(
            text.contains("\"leaf\"") && text.contains("pid 1003") && text.contains("/w/a/b:write"),
            "{text}"
        );
    }

    #[test]
    fn reading_conflicts_with_nobody() {
        let mut table = family();
        table.register(entry("reader", 9, &["/w:read"], None), &Limits::default()).unwrap();
        table.register(entry("nothing", 10, &[], None), &Limits::default()).unwrap();
        table.validate().unwrap();
    }

    #[test]
    fn lends_only_from_what_is_left() {
        let mut table = family();
        let limits = Limits::default();
        let held = table.lend(entry("x", 9, &["/w/a:write"], Some("root")), &limits).unwrap_err();
        assert!(held.to_string().contains("held by pod \"mid\""), "{held}");
        let sibling = table.lend(entry("x", 9, &["/w/c:write"], Some("mid")), &limits).unwrap_err();
        assert!(matches!(sibling, Refusal::NotMine { .. }), "{sibling}");
        let nobody = table.lend(entry("x", 9, &["/w/c:write"], Some("ghost")), &limits).unwrap_err();
        assert!(matches!(nobody, Refusal::Entry(_)), "{nobody}");
        table.lend(entry("x", 9, &["/w/c:write:flat"], Some("root")), &limits).unwrap();
        let wider = table.lend(entry("y", 10, &["/w/c:write"], Some("x")), &limits).unwrap_err();
        assert!(matches!(wider, Refusal::NotMine { .. }), "recursive never fits inside flat: {wider}");
    }

    #[test]
    fn a_child_may_not_read_more_than_its_spawner() {
        let mut table = AllocationTable::default();
        let limits = Limits::default();
        table.register(entry("root", 1, &["/w:write", "/usr:read"], None), &limits).unwrap();
        assert!(table.lend(entry("a", 2, &["/etc:read"], Some("root")), &limits).is_err());
        table.lend(entry("b", 3, &["/usr/lib:read", "/w:read"], Some("root")), &limits).unwrap();
    }

    #[test]
    fn an_end_gives_the_scope_back_and_re_parents_the_children() {
        let mut table = family();
        let root = id("root");
        assert!(matches!(table.effective(&root).unwrap().judge_write("/w/a/f"), Verdict::Lent(_)));
        let life = table.get(&id("mid")).unwrap().life.clone();
        table.release(&life).unwrap();
        table.validate().unwrap();
        assert_eq!(table.get(&id("leaf")).unwrap().delegated_from, Some(root.clone()));
        let effective = table.effective(&root).unwrap();
        assert_eq!(effective.judge_write("/w/a/f"), Verdict::Allowed);
        assert!(matches!(effective.judge_write("/w/a/b/f"), Verdict::Lent(_)));
        assert!(table.release(&life).is_none(), "a late second release does nothing");
    }

    #[test]
    fn reclaims_every_dead_entry_at_once() {
        let mut table = family();
        let gone = table.reclaim(|a| a.pod_id.as_str() != "leaf");
        assert_eq!(gone.len(), 2);
        assert_eq!(table.get(&id("leaf")).unwrap().delegated_from, None);
        table.validate().unwrap();
    }

    #[test]
    fn limits_are_named_with_their_setting() {
        let mut table = family();
        let check = |table: &mut AllocationTable, limits: Limits, expected: &str| {
            let refusal = table.lend(entry("x", 9, &[], Some("leaf")), &limits).unwrap_err().to_string();
            assert!(refusal.contains(expected), "{refusal}");
        };
        check(&mut table, Limits { depth: 3, ..Limits::default() }, "limits.depth");
        check(&mut table, Limits { pods_per_spawner: 0, ..Limits::default() }, "limits.pods_per_spawner");
        check(&mut table, Limits { pods_per_user: 3, ..Limits::default() }, "limits.pods_per_user");
        let limits = Limits { depth: 4, pods_per_spawner: 1, ..Limits::default() };
        table.lend(entry("x", 9, &[], Some("leaf")), &limits).unwrap();
        let deeper = table.lend(entry("y", 10, &[], Some("x")), &limits).unwrap_err().to_string();
        assert!(deeper.contains("at depth 5: the limit is 4"), "{deeper}");
    }

    #[test]
    fn a_reservation_is_adopted_once() {
        let mut table = family();
        let mut reserved = entry("kid", 9, &["/w/k:write"], Some("root"));
        reserved.state = AllocationState::Starting;
        let reservation = reserved.life.clone();
        table.lend(reserved, &Limits::default()).unwrap();
        let life = Life::new("f".repeat(32)).unwrap();
        for other in [life.clone(), table.get(&id("mid")).unwrap().life.clone()] {
            assert!(table.adopt(&other, life.clone(), Pid::new(77).unwrap(), 5).is_err());
        }
        let adopted = table.adopt(&reservation, life.clone(), Pid::new(77).unwrap(), 5).unwrap();
        assert_eq!((adopted.life, adopted.state), (life.clone(), AllocationState::Live));
        assert!(table.adopt(&reservation, life, Pid::new(78).unwrap(), 5).is_err());
    }

    #[test]
    fn a_resumed_pod_takes_its_orphans_back_and_is_told_what_it_lost() {
        let mut table = family();
        table.allocations[1].spawned_by = Some("root/1".into());
        let old = table.get(&id("root")).unwrap().clone();
        table.release(&old.life);
        assert_eq!(table.get(&id("mid")).unwrap().delegated_from, None);
        table.register(entry("other", 8, &["/x/y:write"], None), &Limits::default()).unwrap();
        let again = entry("root", 9, &["/w:write", "/x:write"], None);
        let resumed = table.resume(again.clone(), "root/1", &Limits::default()).unwrap();
        table.validate().unwrap();
        assert_eq!(resumed.entry.scope_allow.len(), 1);
        assert!(resumed.lost[0].to_string().contains("\"other\""), "{:?}", resumed.lost);
        assert_eq!(table.get(&id("mid")).unwrap().delegated_from, Some(id("root")));
        assert!(table.resume(again, "root/1", &Limits::default()).is_err(), "it lives already");
    }

    #[test]
    fn an_orphan_outside_what_a_resumed_pod_keeps_stays_a_root() {
        let mut table = AllocationTable::default();
        let limits = Limits::default();
        let mut orphan = entry("kid", 2, &["/w/a:write"], None);
        orphan.spawned_by = Some("root/1".into());
        table.register(orphan, &limits).unwrap();
        table.register(entry("other", 3, &["/w/b:write"], None), &limits).unwrap();
        let old = entry("root", 9, &["/w:write", "/w:read", "/z:write"], Some("late"));
        let resumed = table.resume(old, "root/1", &limits).unwrap();
        table.validate().unwrap();
        assert_eq!((resumed.entry.scope_allow.len(), resumed.entry.delegated_from), (2, None));
        assert_eq!(table.get(&id("kid")).unwrap().delegated_from, None);
    }

    #[test]
    fn l11_content_that_makes_no_sense_is_refused() {
        let good = family().to_text();
        assert_eq!(AllocationTable::parse(good.as_bytes()).unwrap(), family());
        let twice = good.replace("\"pod_id\":\"mid\"", "\"pod_id\":\"root\"");
        let life = good.replace(&format!("{:032x}", 2), &format!("{:032x}", 1));
        let circle = good.replacen("\"delegated_from\":null", "\"delegated_from\":\"leaf\"", 1);
        let stranger = good.replace("\"delegated_from\":\"mid\"", "\"delegated_from\":\"ghost\"");
        let overlap = good.replace("\"delegated_from\":\"root\"", "\"delegated_from\":null");
        let outside = good.replace("/w/a/b:write", "/x:write");
        let pid = good.replace("\"pid\":1001", "\"pid\":1");
        let spaces = " ".repeat(1 << 20);
        for (bad, fault) in [
            ("", "is empty"),
            ("{", "no valid table"),
            ("null", "no valid table"),
            ("[]", "no valid table"),
            ("{}", "no valid table"),
            (&twice, "in it twice"),
            (&life, "two entries have the life"),
            (&circle, "form a circle"),
            (&stranger, "\"ghost\" that is not in it"),
            (&overlap, "both hold \"/w/a\""),
            (&outside, "not inside the scope"),
            (&pid, "below 2"),
            (&spaces, "is empty"),
        ] {
            let error = AllocationTable::parse(bad.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(fault), "{error}");
        }
        let newer = good.replace("\"version\": 1", "\"version\": 2");
        let error = AllocationTable::parse(newer.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "it has version 2, this program knows version 1");
    }

    #[test]
    fn two_writers_are_found_in_any_order_and_between_others() {
        let check = |roots: &[&str], good: bool| {
            let entries = (1..).zip(roots).map(|(n, rule)| entry(&format!("p{n}"), n, &[rule], None));
            let table = AllocationTable { allocations: entries.collect(), ..AllocationTable::default() };
            assert_eq!(table.validate().is_ok(), good, "{roots:?}");
        };
        check(&["/w/a:write", "/w:write"], false);
        check(&["/w:write", "/w-x:write", "/w/a:write"], false);
        check(&["/w:write:flat", "/w/a/b:write", "/w-x:write", "/w/a.b/c:write"], true);
    }

    #[test]
    fn the_pods_above_below_and_along_a_path_are_told_in_order() {
        let table = family();
        let ids = |found: Vec<&Allocation>| found.iter().map(|a| a.pod_id.to_string()).collect::<Vec<_>>();
        assert_eq!(ids(table.subtree(&id("root"))), ["mid", "leaf"]);
        assert_eq!(ids(table.ancestors(&id("leaf"))), ["mid", "root"]);
        assert_eq!(ids(table.holders("/w/a/b/f")), ["root", "mid", "leaf"]);
        assert_eq!(ids(table.holders("/w/a")), ["root", "mid"]);
        assert!(table.holders("/x").is_empty() && table.subtree(&id("leaf")).is_empty());
    }

    #[test]
    fn each_id_life_and_rule_is_registered_once() {
        let mut table = family();
        let name = PodName::new("mid").unwrap();
        assert_eq!(table.free_id(&PodName::new("new").unwrap()), id("new"));
        assert_eq!(table.free_id(&name), id("mid-2"));
        for bad in [
            entry("mid", 9, &[], None),
            entry("mid-2", 2, &[], None),
            entry("mid-2", 9, &[], Some("root")),
            entry("mid-2", 9, &["/x:write", "/y:write", "/x:write"], None),
        ] {
            let before = table.clone();
            assert!(matches!(table.register(bad, &Limits::default()), Err(Refusal::Entry(_))));
            assert_eq!(table, before);
        }
        let many: Vec<String> = (0..=MAX_RULES).map(|n| format!("/many/{n}:write")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let refused = table.register(entry("mid-2", 9, &many, None), &Limits::default()).unwrap_err();
        assert!(refused.to_string().contains("at most 60 rules"), "{refused}");
        let good = entry("mid-2", 9, &["/x:write", "/y:write"], None);
        table.register(good.clone(), &Limits::default()).unwrap();
        assert_eq!((table.by_life(&good.life), table.free_id(&name)), (Some(&good), id("mid-3")));
    }

    #[test]
    fn unknown_fields_survive_a_rewrite() {
        let text = family().to_text().replacen("\"pod_id\"", "\"colour\": \"red\", \"pod_id\"", 1);
        let table = AllocationTable::parse(text.as_bytes()).unwrap();
        assert!(table.to_text().contains("\"colour\":\"red\""));
    }
}
