//! The commands that ask one pod: send, read, history, log, attach, stop, cancel, resume; and list.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::doors::find::{Found, Machine};
use crate::doors::follow::{Follower, Style};
use crate::doors::terminal::{ago, answer, answer_line, answers_to_a_person, table, talk_line};
use crate::store::life;
use crate::store::manifest;
use crate::store::session::{self, Page, Session};
use crate::sys::clock;
use crate::sys::wait::Cancel;
use crate::tools::stop::{self, Manner, Stopped};
use crate::tools::survey;
use crate::wire::client::{self, Next};
use crate::wire::launch::{self, Launch};
use crate::words::allocation::Allocation;
use crate::words::error::{Error, Result};
use crate::words::identity::PodId;
use crate::words::limits::MAX_LAST_RESPONSE_BYTES;
use crate::words::message::{Item, LoggedItem, Summary, TurnResult};
use crate::words::protocol::{CancelReply, Done, Method, OutputReply, RunReply, Status, StatusReply};
use crate::words::text::{cut_end, harmless, harmless_line};

/// How long the life of a pod that does not answer may still be held after its end.
const JUST_ENDED: Duration = Duration::from_secs(2);
/// How long `send --wait` waits between two looks at whether the pod still lives.
const WAIT_STEP: Duration = Duration::from_secs(1);

/// `insomnia send POD TEXT`.
///
/// # Errors
/// When the pod does not live or refuses.
pub fn send(machine: &Machine, given: &Given) -> Result<bool> {
    let address = machine.address(given.word(0, "POD")?)?;
    let input = given.word(1, "TEXT")?.to_owned();
    if input.trim().is_empty() {
        return Err(Error::Usage("TEXT is empty".into()));
    }
    let mut events = if given.has("wait") { Some(client::subscribe(&address, None)?) } else { None };
    let reply: RunReply = client::ask(&address, None, Method::Run { input })?;
    let Some(events) = &mut events else {
        let said = if reply.queued { "queued for" } else { "started" };
        let plain = || format!("{said} turn {} of pod {}", reply.turn, address.pod);
        answer_line(&if given.has("json") { json!(reply).to_string() } else { plain() });
        return Ok(true);
    };
    let mut follower = Follower::new(Style::Quiet);
    let (result, message) = loop {
        match events.next(Instant::now() + WAIT_STEP)? {
            Next::Event(event) => follower.show(&event),
            Next::Nothing => {}
            Next::Over => {
                return Err(Error::told(format!("pod \"{}\" ended before its turn did", address.pod)));
            }
        }
        match follower.last_end.take() {
            Some(end) if end.turn == reply.turn => break (end.result, end.message),
            Some(_) | None => {}
        }
    };
    let text = follower.last_text;
    if given.has("json") {
        answer_line(
            &json!({ "turn": reply.turn, "result": result, "message": message, "text": text }).to_string(),
        );
    } else {
        answer_line(&harmless(&text));
        if result != TurnResult::Finished {
            talk_line(&format!("the turn did not finish: {}", message.unwrap_or_default()));
        }
    }
    Ok(result == TurnResult::Finished)
}

/// `insomnia read POD`.
///
/// # Errors
/// When there was never such a pod, or it lives and does not answer.
pub fn read(machine: &Machine, given: &Given) -> Result<bool> {
    let pod = given.word(0, "POD")?;
    let since = given.number("since")?;
    let output = match machine.any(pod)? {
        Found::Living(entry) => client::ask(&survey::address_of(&entry), None, Method::ReadOutput { since })?,
        Found::Ended(folder) => {
            let session = Session::open_to_read(&folder)?;
            let (text, cursor, more) = session.output(since)?;
            let Summary { turn, last_result, .. } = session.summary();
            OutputReply { status: Status::Stopped, text, cursor, more, turn, last_result }
        }
    };
    if given.has("json") {
        answer_line(&json!(output).to_string());
    } else {
        answer_line(&harmless(&output.text));
        if output.text.is_empty() && since.is_none() {
            let how =
                output.last_result.map_or("has not said anything yet", |_| "ended before it said anything");
            talk_line(&format!(
                "turn {} {how}; \"insomnia read {pod} --since 0\" shows all before it",
                output.turn
            ));
        }
        if output.more {
            talk_line(&format!("there is more: insomnia read {pod} --since {}", output.cursor));
        }
    }
    Ok(true)
}

/// `insomnia history POD`: read from the session's log, which is the truth for living and ended pods alike.
///
/// # Errors
/// When there was never such a pod, or its history cannot be read.
pub fn history(machine: &Machine, given: &Given) -> Result<bool> {
    let session = Session::open_to_read(&machine.folder(given.word(0, "POD")?)?)?;
    let mut since = given.number("since")?.unwrap_or(0);
    loop {
        let Page { items, cursor, more } = session.page(since)?;
        for (number, logged) in (since..).zip(items) {
            answer(&if given.has("json") {
                format!("{}\n", json!(logged))
            } else {
                describe(number, &logged)
            });
        }
        since = cursor;
        if !more {
            return Ok(true);
        }
    }
}

fn describe(number: u64, logged: &LoggedItem) -> String {
    let text = match &logged.item {
        Item::Session { pod_id, program, .. } => format!("session of pod {pod_id} (insomnia {program})"),
        Item::TurnStarted { turn, cause } => {
            format!("turn {turn} begins ({})", format!("{cause:?}").to_lowercase())
        }
        Item::Input { text, from: None } => format!("person: {text}"),
        Item::Input { text, from: Some(from) } => format!("pod {from}: {text}"),
        Item::Notification { text } => text.clone(),
        Item::Assistant(message) => {
            let calls = message.tool_calls.iter().map(|call| format!("\n-> {} {}", call.name, call.input));
            format!("model: {}{}", message.text, calls.collect::<String>())
        }
        Item::ToolResult { name, ok, text, .. } => {
            format!("<- {name} {}: {text}", if *ok { "ok" } else { "failed" })
        }
        Item::ModelError { message } => format!("the model could not be asked: {message}"),
        Item::Compaction { summary, until, .. } => {
            format!("a summary stands for the items before {until} from here on: {summary}")
        }
        Item::ModelSet { model } => format!("the model is {model} from here on"),
        Item::TurnEnded { turn, result, message } => {
            let why = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
            format!("turn {turn} {}{why}", format!("{result:?}").to_lowercase())
        }
    };
    let at = clock::compact_utc(logged.at);
    format!("{number:>5} {at} {}\n", harmless(&text).replace('\n', "\n      "))
}

/// `insomnia log POD`.
///
/// # Errors
/// When there was never such a pod, or its log cannot be read.
pub fn log(machine: &Machine, given: &Given) -> Result<bool> {
    let path = session::log_path(&machine.folder(given.word(0, "POD")?)?);
    let bytes = std::fs::read(&path)
        .map_err(|source| Error::io(format!("read log \"{}\"", path.display()), source))?;
    let text = String::from_utf8_lossy(&bytes);
    if given.has("json") {
        answer_line(&json!({ "path": path, "lines": text.lines().collect::<Vec<_>>() }).to_string());
    } else {
        answer(&harmless(&text));
    }
    Ok(true)
}

/// `insomnia attach POD`.
///
/// # Errors
/// When the pod does not live.
pub fn attach(machine: &Machine, given: &Given) -> Result<bool> {
    let address = machine.address(given.word(0, "POD")?)?;
    let mut events = client::subscribe(&address, given.number("since")?)?;
    let style = if given.has("json") { Style::Json } else { Style::Text };
    let mut follower = Follower::new(style);
    follower.say(&format!(
        "-- following pod {} ({}); Ctrl-C leaves it running",
        address.pod, events.opened.status
    ));
    loop {
        match events.next(Instant::now() + WAIT_STEP)? {
            Next::Event(event) => follower.show(&event),
            Next::Nothing => {}
            Next::Over => {
                follower.end_line();
                return Ok(true);
            }
        }
    }
}

/// `insomnia stop POD`.
///
/// # Errors
/// When the pod does not live, or does not end.
pub fn stop(machine: &Machine, given: &Given) -> Result<bool> {
    let target = machine.living(given.word(0, "POD")?)?;
    let cancel = Cancel::new().map_err(|source| Error::io("make an event descriptor", source))?;
    let manner = Manner { from: None, limit: machine.stop_limit(), ask: !given.has("kill"), cancel: &cancel };
    let outcome = if given.has("tree") {
        stop::stop_tree(&machine.lock, &target, manner)
    } else {
        vec![stop::stop(&machine.lock, &target, manner).map_err(|error| (target.pod_id.clone(), error))]
    };
    let mut all = true;
    let mut rows: Vec<Value> = Vec::new();
    for one in outcome {
        match one {
            Ok(stopped) if given.has("json") => rows.push(json!(stopped)),
            Ok(stopped) => answer(&describe_stop(&stopped, given)),
            Err((pod_id, error)) => {
                all = false;
                rows.push(json!({ "pod_id": pod_id, "error": error.to_string() }));
                talk_line(&format!("pod \"{pod_id}\" is not stopped: {error}"));
            }
        }
    }
    if given.has("json") {
        answer_line(&json!({ "stopped": rows }).to_string());
    }
    Ok(all)
}

fn describe_stop(stopped: &Stopped, given: &Given) -> String {
    let how = match stopped.how {
        stop::End::Graceful => "ended",
        stop::End::Killed if given.has("kill") => "was killed",
        stop::End::Killed => "did not obey and was killed",
        stop::End::AlreadyEnded => "had ended already",
    };
    let scope = &stopped.scope_returned;
    let scope = if scope.is_empty() {
        "it held no write scope".to_owned()
    } else {
        format!("{} is free", scope.join(", "))
    };
    let mut text = format!("pod {} {how}; {scope}\n", stopped.pod_id);
    // With the tree they are stopped next.
    for survivor in stopped.survivors.iter().filter(|_| !given.has("tree")) {
        let (pod, keeps) = (&survivor.pod_id, &survivor.keeps);
        let keeps = if keeps.is_empty() { String::new() } else { format!(" and keeps {}", keeps.join(", ")) };
        text.push_str(&format!("  pod {pod} lives on{keeps}; \"insomnia stop {pod} --tree\" ends it\n"));
    }
    harmless(&text)
}

/// `insomnia cancel POD`.
///
/// # Errors
/// When the pod does not live.
pub fn cancel(machine: &Machine, given: &Given) -> Result<bool> {
    let address = machine.address(given.word(0, "POD")?)?;
    let reply: CancelReply = client::ask(&address, None, Method::Cancel)?;
    let plain = if reply.cancelled { "cancelled" } else { "no turn is running" };
    answer_line(&if given.has("json") { json!(reply).to_string() } else { plain.to_owned() });
    Ok(reply.cancelled)
}

/// `insomnia set POD model NAME`: the next request of a living pod asks that model.
///
/// # Errors
/// When the pod does not live or refuses.
pub fn set(machine: &Machine, given: &Given) -> Result<bool> {
    let address = machine.address(given.word(0, "POD")?)?;
    match given.word(1, "the setting")? {
        "model" => {}
        other => return Err(Error::Usage(format!("\"model\" can be set, not \"{other}\""))),
    }
    let model = given.word(2, "NAME")?.to_owned();
    let plain = format!("the next request of pod {} asks {model}", address.pod);
    let answered = if given.has("json") { json!({ "model": model }).to_string() } else { plain };
    client::ask::<Done>(&address, None, Method::Set { model })?;
    answer_line(&answered);
    Ok(true)
}

/// `insomnia resume POD`: a living pod goes on after a turn that did not finish; one that has ended is started
/// again with its newest session, and goes on where it was interrupted.
///
/// # Errors
/// When there was never such a pod, it cannot be started, or no turn waits to go on.
pub fn resume(machine: &Machine, given: &Given) -> Result<bool> {
    let pod = given.word(0, "POD")?;
    let starts = match machine.any(pod)? {
        Found::Ended(_) => true,
        // One that was killed a moment ago may hold its life until its last thread has gone.
        Found::Living(entry) => {
            let asked = client::ask::<StatusReply>(&survey::address_of(&entry), None, Method::Status);
            let cancel = Cancel::new().map_err(|source| Error::io("make an event descriptor", source))?;
            asked.is_err()
                && life::ended_by(machine.lock.runtime(), &entry, &cancel, Instant::now() + JUST_ENDED)
        }
    };
    if starts {
        start_again(machine, pod)?;
    }
    let address = machine.address(pod)?;
    let status: StatusReply = client::ask(&address, None, Method::Status)?;
    if starts {
        let had = Session::open_to_read(Path::new(&status.state_dir))?.first_scope()?;
        for rule in had.iter().filter(|rule| rule.writes() && !status.scope.contains(rule)) {
            let who = machine
                .lock
                .read()?
                .holders(rule.path())
                .last()
                .map(|holder| format!(": pod {} holds it now", holder.pod_id));
            talk_line(&format!("pod {pod} has lost {rule}{}", who.unwrap_or_default()));
        }
    }
    if starts && status.status != Status::Paused {
        let plain = format!("pod {} goes on with its session and is {}", address.pod, status.status);
        answer_line(&if given.has("json") { json!(status).to_string() } else { plain });
        return Ok(true);
    }
    let reply: RunReply = client::ask(&address, None, Method::Resume)?;
    let plain = format!("turn {} of pod {} goes on", reply.turn, address.pod);
    answer_line(&if given.has("json") { json!(reply).to_string() } else { plain });
    Ok(true)
}

fn start_again(machine: &Machine, pod: &str) -> Result<()> {
    let current =
        std::env::current_dir().map_err(|source| Error::io("find the current directory", source))?;
    let settings = manifest::gather(&machine.directories.config, &current, Vec::new())?;
    let args = ["--name", pod, "--resume"].map(str::to_owned);
    let wanted = Launch {
        command: &launch::pod_command(&settings.pod_command),
        args: &args,
        directory: &current,
        overlay: "",
        variables: &[],
        limit: settings.limits.launch(),
    };
    let cancel = Cancel::new().map_err(|source| Error::io("make an event descriptor", source))?;
    launch::launch(wanted, &cancel).map(|_| ())
}

/// `insomnia list`: the pods of the lock, asked in parallel, and with `--all` the newest ended session of each
/// other pod_id.
///
/// # Errors
/// When the lock cannot be read.
pub fn list(machine: &Machine, given: &Given) -> Result<bool> {
    let lock_table = machine.lock.read()?;
    let is_alive = |entry: &&Allocation| !life::is_dead(machine.lock.runtime(), entry);
    let entries: Vec<&Allocation> = lock_table.allocations().iter().filter(is_alive).collect();
    let addresses: Vec<_> = entries.iter().map(|entry| survey::address_of(entry)).collect();
    let answers = survey::ask_all(&addresses, None);
    let usage = |(entry, asked): (&&Allocation, &Option<StatusReply>)| {
        Some((entry.pod_id.clone(), asked.as_ref()?.usage))
    };
    let usages: Vec<_> = entries.iter().zip(&answers).filter_map(usage).collect();
    let mut pods: Vec<Value> = Vec::new();
    for (entry, asked) in entries.iter().zip(answers) {
        let mut row = match asked {
            // Who it belongs to now, which may not be the one that spawned it.
            Some(status) => json!(StatusReply { spawner: entry.delegated_from.clone(), ..status }),
            None => unanswered(machine, entry),
        };
        if let Some(row) = row.as_object_mut() {
            let tree = survey::usage_of_tree(&lock_table, &entry.pod_id, &usages);
            row.insert("usage_tree".into(), json!(tree));
        }
        pods.push(row);
    }
    if given.has("all") {
        let living = |id: &PodId| entries.iter().any(|entry| entry.pod_id == *id);
        let ids = session::pod_ids(&machine.directories.state).into_iter().filter(|id| !living(id));
        pods.extend(ids.filter_map(|id| ended(machine, &id)));
    }
    if given.has("json") {
        answer_line(&json!({ "pods": pods }).to_string());
        return Ok(true);
    }
    if pods.is_empty() {
        talk_line("no pod lives; \"insomnia run\" starts one");
        return Ok(true);
    }
    let mut rows = vec![
        ["POD", "STATUS", "FOR", "SPAWNER", "SHELL", "WRITES", "LAST WORDS"].map(str::to_owned).to_vec(),
    ];
    rows.extend(pods.iter().map(row));
    answer(&harmless(&table(&rows)));
    Ok(true)
}

fn row(pod: &Value) -> Vec<String> {
    let text = |key: &str| pod.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let scope = pod.get("scope").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let writes: Vec<&str> =
        scope.filter_map(|rule| rule.split_once(":write").map(|(path, _)| path)).collect();
    let writes = if writes.is_empty() { "-".to_owned() } else { writes.join(" ") };
    let since = pod.get("since").and_then(Value::as_u64);
    let answers = pod.get("answers").and_then(Value::as_bool).unwrap_or(true);
    let status = if answers { text("status") } else { format!("{}?", text("status")) };
    let spawner = Some(text("spawner")).filter(|spawner| !spawner.is_empty()).unwrap_or_else(|| "-".into());
    vec![
        text("pod_id"),
        status,
        since.map_or_else(|| "-".to_owned(), |since| ago(since, clock::now_seconds())),
        spawner,
        text("sandbox").chars().next().map_or_else(|| "-".to_owned(), String::from),
        harmless_line(&writes),
        cut_end(&harmless_line(&text("last_response")), if answers_to_a_person() { 50 } else { 200 }),
    ]
}

/// A pod that lives but does not answer, as far as its session tells.
fn unanswered(machine: &Machine, entry: &Allocation) -> Value {
    let folder = survey::session_folder(&machine.directories.state, &entry.pod_id, &entry.life);
    let summary = survey::logged_summary(folder.as_deref());
    let state_dir = folder.map(|folder| folder.to_string_lossy().into_owned()).unwrap_or_default();
    json!(StatusReply {
        pod_id: entry.pod_id.clone(),
        name: entry.name.clone(),
        pid: entry.pid,
        life: entry.life.clone(),
        status: survey::last_known(&summary),
        detail: "lives but does not answer".into(),
        since: entry.since,
        answers: false,
        protocol: 0,
        version: String::new(),
        scope: entry.scope_allow.clone(),
        lent: Vec::new(),
        sandbox: String::new(),
        turn: summary.turn,
        last_response: cut_end(&summary.last_response, MAX_LAST_RESPONSE_BYTES),
        last_result: summary.last_result,
        usage: summary.usage,
        model: summary.model.unwrap_or_default(),
        spawner: entry.delegated_from.clone(),
        log: session::log_path(Path::new(&state_dir)).to_string_lossy().into_owned(),
        state_dir,
        queued: 0,
        events_in_flight: 0,
    })
}

fn ended(machine: &Machine, id: &PodId) -> Option<Value> {
    let folder = session::folders_of(&machine.directories.state, id).into_iter().next()?;
    let summary = Session::open_to_read(&folder).ok()?.summary();
    Some(json!({
        "pod_id": id, "name": id, "status": Status::Stopped, "detail": "has ended", "scope": [],
        "turn": summary.turn, "last_response": cut_end(&summary.last_response, MAX_LAST_RESPONSE_BYTES),
        "last_result": summary.last_result, "usage": summary.usage, "state_dir": folder, "log": session::log_path(&folder),
    }))
}
