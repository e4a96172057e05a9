//! Checks of what the floor `words` reads: the protocol, rules, the table, and texts of others.

use std::collections::{BTreeMap, BTreeSet};

use insomnia::words::allocation::{Allocation, AllocationState, AllocationTable, Refusal};
use insomnia::words::identity::{Life, Pid, PodId, PodName};
use insomnia::words::limits::{Limits, MAX_LINE_BYTES};
use insomnia::words::notification::{render_block, render_event};
use insomnia::words::protocol::{
    ErrorCode, HistoryReply, Method, OutputReply, PodEvent, PodsReply, Reply, Request, RunReply, StatusReply,
    StreamEvent, SubscribeReply, parse_request, to_line,
};
use insomnia::words::scope::{Rule, Verdict, parent};
use insomnia::words::text::{
    cut_end, cut_middle, escape_name, harmless, harmless_line, quote, unescape_name, without_marks,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{comes_back, fields, number, utf8};

/// A request line that is understood says the same once written again; any other is refused by a bounded sentence.
pub fn request(bytes: &[u8]) {
    match parse_request(bytes) {
        Ok(request) => request_comes_back(&request),
        Err(error) => {
            let codes = [ErrorCode::BadRequest, ErrorCode::UnknownMethod, ErrorCode::TooLarge];
            assert!(codes.contains(&error.code) && error.message.len() < 4 * bytes.len() + 500, "{error:?}");
        }
    }
}

fn request_comes_back(request: &Request) {
    let line = to_line(request);
    let text = line.strip_suffix('\n').unwrap();
    assert!(!text.contains('\n'));
    if line.len() <= MAX_LINE_BYTES {
        assert_eq!(parse_request(text.as_bytes()).as_ref(), Ok(request));
    }
}

/// A reply line comes back, as do the answers of all methods.
pub fn reply(bytes: &[u8]) {
    fn answer<T: Serialize + DeserializeOwned>(value: &Value) {
        let _ = serde_json::from_value::<T>(value.clone()).map(|answer| comes_back(&answer));
    }
    let Ok(reply) = serde_json::from_slice::<Reply>(bytes) else { return };
    assert_eq!(to_line(&reply), comes_back(&reply) + "\n");
    if let Reply::Ok(value) = &reply {
        answer::<RunReply>(value);
        answer::<StatusReply>(value);
        answer::<HistoryReply>(value);
        answer::<OutputReply>(value);
        answer::<PodsReply>(value);
        answer::<SubscribeReply>(value);
    }
}

/// An event line of `subscribe` comes back.
pub fn event_line(bytes: &[u8]) {
    if let Ok(event) = serde_json::from_slice::<StreamEvent>(bytes) {
        assert_eq!(to_line(&event), comes_back(&event) + "\n");
    }
}

/// A report comes back, alone and in its request; in a notice it stays within its line and its marks.
pub fn pod_event(bytes: &[u8]) {
    let Ok(event) = serde_json::from_slice::<PodEvent>(bytes) else { return };
    comes_back(&event);
    let life = Life::new("0".repeat(32)).unwrap();
    let notice = render_event(&event, &life, &[]);
    assert!(notice.text.contains(event.reporter().as_str()));
    let block = render_block(&[notice], 0);
    assert_eq!(block.lines().count(), 3, "{block}");
    assert_eq!(block.matches('<').count(), 2, "{block}");
    request_comes_back(&Request { method: Method::PodEvent(event), from: None, to: Some(life) });
}

/// A rule comes back, and the relations of two rules agree with the paths that they cover.
pub fn rule(bytes: &[u8]) {
    let read = |bytes: &[u8]| {
        let text = utf8(bytes);
        let rule = Rule::try_from(text.clone()).ok()?;
        assert_eq!(Rule::parts(&text).unwrap().0, rule.path());
        assert_eq!(Rule::try_from(rule.to_string()).unwrap(), rule);
        Some(rule)
    };
    let [first, second] = fields(bytes).map(read);
    let (Some(a), Some(b)) = (first, second) else { return };
    let below = |path: &str, rest: &str| format!("{}/{rest}", path.trim_end_matches('/'));
    let near = |rule: &Rule| {
        let path = rule.path();
        let above = parent(path).unwrap_or("/");
        [
            path.to_owned(),
            above.to_owned(),
            below(path, "x"),
            below(path, "x/y"),
            format!("{path}x"),
            below(above, "x"),
        ]
    };
    let paths: Vec<String> = [near(&a), near(&b)].concat();
    assert!(a.covers(a.path()) && a.contains(&a) && a.overlaps(&a));
    assert_eq!(a.overlaps(&b), paths.iter().any(|path| a.covers(path) && b.covers(path)), "{a} and {b}");
    assert_eq!(a.contains(&b), paths.iter().all(|path| a.covers(path) || !b.covers(path)), "{a} and {b}");
    assert_eq!(a.overlaps(&b), b.overlaps(&a));
}

/// The text of a table comes back; of those that hold a path, exactly the innermost may write it.
pub fn scope_lock(bytes: &[u8]) {
    let Ok(table) = AllocationTable::parse(bytes) else { return };
    let again = AllocationTable::parse(table.to_text().as_bytes()).unwrap();
    assert_eq!(again.allocations().len(), table.allocations().len());
    comes_back(&again);
    is_exclusive(&table, table.allocations().iter().flat_map(Allocation::write_rules).map(Rule::path));
    let _ = AllocationTable::rebuild(table.allocations().to_vec());
}

fn is_exclusive<'a>(table: &AllocationTable, paths: impl IntoIterator<Item = &'a str>) {
    let all = table.allocations();
    assert!(all.iter().filter_map(|a| a.delegated_from.as_ref()).all(|id| table.get(id).is_some()));
    for path in paths {
        let may_write =
            |a: &&Allocation| table.effective(&a.pod_id).unwrap().judge_write(path) == Verdict::Allowed;
        let writers: Vec<&PodId> = all.iter().filter(may_write).map(|a| &a.pod_id).collect();
        let holders = table.holders(path);
        let innermost: Vec<&PodId> = holders.last().map(|a| &a.pod_id).into_iter().collect();
        assert_eq!(writers, innermost, "who may write {path}");
    }
}

const PLACES: [&str; 6] = ["/a", "/a/a", "/a/a/a", "/a/ab", "/ab", "/ab/a"];

/// Any sequence of starts, loans, adoptions, ends and resumptions leaves a valid table in which every pod is there
/// once and every path has one writer; what is refused changes nothing.
pub fn allocation(bytes: &[u8]) {
    let mut table = AllocationTable::default();
    let mut lives = BTreeSet::new();
    let mut ended: Vec<Allocation> = Vec::new();
    let limits = Limits { pods_per_user: 12, ..Limits::default() };
    let paths: Vec<String> =
        PLACES.iter().flat_map(|p| ["", "/x", "/x/y"].map(|rest| format!("{p}{rest}"))).collect();
    for (step, operation) in (1..).zip(bytes.chunks_exact(3).take(64)) {
        let [kind, who, what] = [0, 1, 2].map(|at| usize::from(operation[at]));
        let before = table.clone();
        let known: Vec<Allocation> = table.allocations().to_vec();
        let chosen = known.get(who % known.len().max(1));
        let outcome: Result<(), Refusal> = match kind % 8 {
            0 => table
                .register(entry(&table, step, what, None), &limits)
                .map(|()| assert!(lives.insert(life(step)))),
            1..=3 => {
                let new = entry(&table, step, what, chosen);
                table.lend(new, &limits).map(|()| assert!(lives.insert(life(step))))
            }
            4 => chosen.map_or(Ok(()), |reserved| {
                table.adopt(&reserved.life, life(step), pid(step), 1)?;
                assert!(lives.remove(&reserved.life) && lives.insert(life(step)));
                Ok(())
            }),
            5 => chosen.map_or(Ok(()), |pod| {
                assert_eq!(table.release(&pod.life).as_ref(), Some(pod));
                assert!(lives.remove(&pod.life) && table.release(&pod.life).is_none());
                ended.push(pod.clone());
                Ok(())
            }),
            6 => {
                for gone in table.reclaim(|pod| usize::try_from(pod.start_time).unwrap() & what != 0) {
                    assert!(lives.remove(&gone.life));
                    ended.push(gone);
                }
                Ok(())
            }
            _ => ended.get(who % ended.len().max(1)).map_or(Ok(()), |old| {
                let again = Allocation { life: life(step), pid: pid(step), ..old.clone() };
                let resumed = table.resume(again, old.pod_id.as_str(), &limits)?;
                assert_eq!(resumed.entry.scope_allow.len() + resumed.lost.len(), old.scope_allow.len());
                lives.insert(life(step));
                Ok(())
            }),
        };
        assert!(outcome.is_ok() || table == before);
        table.validate().unwrap();
        assert_eq!(table.allocations().iter().map(|a| a.life.clone()).collect::<BTreeSet<_>>(), lives);
        is_exclusive(&table, paths.iter().map(String::as_str));
    }
    assert_eq!(AllocationTable::parse(table.to_text().as_bytes()).unwrap(), table);
}

fn life(step: i32) -> Life {
    Life::new(format!("{step:032x}")).unwrap()
}

fn pid(step: i32) -> Pid {
    Pid::new(step + 1).unwrap()
}

/// A new pod with up to two rules, which `what` picks; its session has its pod_id for a name.
fn entry(table: &AllocationTable, step: i32, what: usize, spawner: Option<&Allocation>) -> Allocation {
    let name = PodName::new(["p", "q", "p-2"][what % 3]).unwrap();
    let rule = |pick: usize| {
        let kind = ["read", "write", "write", "write:flat"][pick / PLACES.len() % 4];
        Rule::try_from(format!("{}:{kind}", PLACES[pick % PLACES.len()])).unwrap()
    };
    Allocation {
        pod_id: table.free_id(&name),
        name,
        pid: pid(step),
        start_time: 1 << (step % 8),
        life: life(step),
        state: if spawner.is_some() { AllocationState::Starting } else { AllocationState::Live },
        spawned_by: spawner.map(|spawner| spawner.pod_id.to_string()),
        socket: "/s".to_owned(),
        scope_allow: [rule(what), rule(what / 3)].into_iter().take(what % 4).collect(),
        delegated_from: spawner.map(|spawner| spawner.pod_id.clone()),
        since: 0,
        extra: BTreeMap::new(),
    }
}

/// What is shown drives no terminal and closes no mark; what is cut is as short as asked; names come back.
pub fn text(bytes: &[u8]) {
    let (length, bytes) = number(bytes);
    let text = utf8(bytes);
    let drives = |c: char| c.is_control() || matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}');
    let (shown, line) = (harmless(&text), harmless_line(&text));
    assert!(!shown.contains(|c| drives(c) && c != '\n' && c != '\t') && !line.contains(drives), "{shown:?}");
    assert_eq!((harmless(&shown), harmless_line(&line)), (shown, line));
    let quoted = quote(&text);
    assert!(!quoted.contains('<') && !quoted.contains('\n'));
    assert_eq!(serde_json::from_str::<String>(&quoted).unwrap(), text);
    let unmarked = without_marks(&text);
    assert!(["<notices", "</notices", "[message from pod"].iter().all(|mark| !unmarked.contains(mark)));
    let (end, middle) = (cut_end(&text, length + 3), cut_middle(&text, length, "x"));
    assert!(end.len() <= length + 3 && text.starts_with(end.strip_suffix("...").unwrap_or(&end)));
    assert!(middle.len() <= length + 60 && (middle == text || text.len() > length));
    let name = escape_name(bytes);
    assert!(!name.contains(char::is_control));
    assert_eq!(unescape_name(&name), bytes, "{name}");
}
