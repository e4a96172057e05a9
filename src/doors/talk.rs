//! The commands that ask one pod: send, read, history, log, attach, stop, cancel, resume.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::doors::find::{Found, Machine, new_cancel};
use crate::doors::follow::{First, Followed, Over, Presses, Style, TurnEnd, in_words};
use crate::doors::terminal::{answer, json_line, listed, reply, talk_line};
use crate::heart::recover::Previous;
use crate::store::life;
use crate::store::session::{self, Page, Session};
use crate::sys::clock;
use crate::tools::stop::{self, Outcome, Stopped};
use crate::tools::survey;
use crate::wire::client::{self, Address};
use crate::words::error::{Error, Result};
use crate::words::identity::PodId;
use crate::words::message::{Summary, TurnResult};
use crate::words::protocol::{CancelReply, Done, Method, OutputReply, RunReply, Status, StatusReply};

/// How long the life of a pod that does not answer may still be held after its end.
const JUST_ENDED: Duration = Duration::from_secs(2);

/// `insomnia send POD TEXT`.
pub(super) fn send(machine: &Machine, given: &Given) -> Result<bool> {
    let (pod, input) = (given.word(0, "POD")?, given.word(1, "TEXT")?.to_owned());
    if input.trim().is_empty() {
        return Err(Error::Usage("TEXT is empty".into()));
    }
    let address = machine.address(pod)?;
    let ask = |address: &Address| client::ask::<RunReply>(address, None, Method::Run { input });
    if !given.has("wait") {
        let sent = ask(&address)?;
        let said = if sent.queued { "queued for" } else { "started" };
        reply(given, &sent, || format!("{said} turn {} of pod {}", sent.turn, address.pod));
        return Ok(true);
    }
    let style = if given.has("json") { Style::Quiet } else { Style::of_answer(given) };
    let first = First::Cancels("leaves the pod running");
    let mut followed = Followed::begin(&address, None, style, first, Presses::listen(|| {})?)?;
    let turn = ask(&followed.address)?.turn;
    let is_that_turn = |end: &TurnEnd| end.turn == turn;
    let over = followed.follow(|follower, _| Ok(follower.last_end.as_ref().is_some_and(is_that_turn)))?;
    let follower = &mut followed.follower;
    follower.end_line();
    match over {
        Over::Reached => {}
        Over::Ended => return Err(Error::told(format!("pod \"{}\" ended before its turn did", address.pod))),
        Over::Interrupted => follower.say(&machine.who_lives_on(&address.pod)?),
        // The text has arrived, and nobody waits any more.
        Over::HungUp | Over::Unheard => return followed.is_heard().map(|_| true),
    }
    let Some(end) = follower.last_end.clone().filter(|_| over == Over::Reached) else { return Ok(false) };
    if given.has("json") {
        let (result, message, text) = (end.result, end.message, &follower.last_text);
        let value = json!({ "turn": turn, "result": result, "message": message, "text": text });
        answer(&format!("{}\n", json_line(&value)));
    } else {
        follower.answer_last_text();
        follower.say_failure();
    }
    followed.is_heard()?;
    Ok(end.result == TurnResult::Finished)
}

/// `insomnia read POD`.
pub(super) fn read(machine: &Machine, given: &Given) -> Result<bool> {
    let pod = given.word(0, "POD")?;
    let since = given.number("since")?;
    let ask = |address| client::ask(&address, None, Method::ReadOutput { since });
    let output = match machine.any(pod)? {
        Found::Living(entry) => ask(survey::address_of(&entry))?,
        Found::Elsewhere(address) => ask(address)?,
        Found::Ended(folder) => {
            let session = Session::open_to_read(&folder)?;
            let (text, cursor, more) = session.output(since)?;
            let Summary { turn, last_result, .. } = session.summary();
            OutputReply { status: Status::Stopped, text, cursor, more, turn, last_result }
        }
    };
    reply(given, &output, || output.text.clone());
    if given.has("json") {
        return Ok(true);
    }
    if output.text.is_empty() && since.is_none() {
        let how = output.last_result.map_or("has not said anything yet", |_| "ended before it said anything");
        let turn = output.turn;
        talk_line(&format!("turn {turn} {how}; \"insomnia read {pod} --since 0\" shows all before it"));
    }
    say_past_end(given, since, output.cursor);
    if output.more {
        talk_line(&format!("there is more: insomnia read {pod} --since {}", output.cursor));
    }
    Ok(true)
}

/// `insomnia history POD`: read from the session's log, which is the truth for living and ended pods alike.
pub(super) fn history(machine: &Machine, given: &Given) -> Result<bool> {
    let session = Session::open_to_read(&machine.folder(given.word(0, "POD")?)?)?;
    let mut since = given.number("since")?.unwrap_or(0);
    say_past_end(given, Some(since), session.len());
    loop {
        let Page { items, cursor, more } = session.page(since)?;
        for (number, logged) in (since..).zip(items) {
            let text = || in_words(&logged.item).replace('\n', "\n      ");
            reply(given, &logged, || format!("{number:>5} {} {}", clock::compact_utc(logged.at), text()));
        }
        since = cursor;
        if !more {
            return Ok(true);
        }
    }
}

fn say_past_end(given: &Given, since: Option<u64>, items: u64) {
    if let Some(since) = since.filter(|since| *since > items && !given.has("json")) {
        talk_line(&format!("nothing comes after item {since}: there are only {items} items"));
    }
}

/// `insomnia log POD`.
pub(super) fn log(machine: &Machine, given: &Given) -> Result<bool> {
    let path = session::log_path(&machine.folder(given.word(0, "POD")?)?);
    let bytes = std::fs::read(&path)
        .map_err(|source| Error::io(format!("read log \"{}\"", path.display()), source))?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    reply(given, &json!({ "path": path, "lines": lines }), || lines.join("\n"));
    Ok(true)
}

/// `insomnia attach POD`.
pub(super) fn attach(machine: &Machine, given: &Given) -> Result<bool> {
    let address = machine.address(given.word(0, "POD")?)?;
    let style = match (given.has("json"), given.has("quiet")) {
        (true, _) => Style::Json,
        (false, true) => Style::TextOnly,
        (false, false) => Style::Text,
    };
    let first = First::CancelsOrLeaves("leaves the pod running");
    let mut followed =
        Followed::begin(&address, given.number("since")?, style, first, Presses::listen(|| {})?)?;
    let (pod, status) = (&address.pod, followed.events.opened.status);
    let begin =
        format!("-- following pod {pod} ({status}); Ctrl-C cancels its turn, twice leaves it running");
    followed.follower.say(&begin);
    let over = followed.follow(|_, _| Ok(false))?;
    followed.follower.end_line();
    match over {
        Over::Interrupted => followed.follower.say(&machine.who_lives_on(pod)?),
        Over::Ended => followed.follower.say(&format!("-- the stream of pod {pod} is over")),
        Over::Reached | Over::HungUp | Over::Unheard => {}
    }
    followed.is_heard().map(|_| true)
}

/// `insomnia stop POD`.
pub(super) fn stop(machine: &Machine, given: &Given) -> Result<bool> {
    let target = machine.living(given.word(0, "POD")?)?;
    let outcome = machine.stop(&target, given.has("tree"), !given.has("kill"))?;
    let row = |one: &Outcome| match one {
        Ok(stopped) => json!(stopped),
        Err((pod_id, error)) => json!({ "pod_id": pod_id, "error": error.to_string() }),
    };
    let line = |one: &Outcome| match one {
        Ok(stopped) => describe_stop(stopped, target.delegated_from.as_ref(), given),
        Err((pod_id, error)) => format!("pod {pod_id} is not stopped: {error}"),
    };
    let rows: Vec<Value> = outcome.iter().map(row).collect();
    reply(given, &json!({ "stopped": rows }), || outcome.iter().map(line).collect::<Vec<_>>().join("\n"));
    Ok(outcome.iter().all(Result::is_ok))
}

fn describe_stop(stopped: &Stopped, spawner: Option<&PodId>, given: &Given) -> String {
    let how = match stopped.how {
        stop::End::Graceful => "ended",
        stop::End::Killed if given.has("kill") => "was killed",
        stop::End::Killed => "did not obey and was killed",
        stop::End::AlreadyEnded => "had ended already",
    };
    let now = spawner.map_or("is free".to_owned(), |spawner| format!("is back with pod {spawner}"));
    let scope = listed(&stopped.scope_returned, ", ").map(|scope| format!("{scope} {now}"));
    let scope = scope.as_deref().unwrap_or("it held no write scope");
    let mut text = format!("pod {} {how}; {scope}", stopped.pod_id);
    // With the tree they are stopped next.
    for survivor in stopped.survivors.iter().filter(|_| !given.has("tree")) {
        let (pod, keeps) = (&survivor.pod_id, listed(&survivor.keeps, ", "));
        let keeps = keeps.map_or(String::new(), |keeps| format!(" and keeps {keeps}"));
        text.push_str(&format!("\n  pod {pod} lives on{keeps}; \"insomnia stop {pod} --tree\" ends it"));
    }
    text
}

/// `insomnia cancel POD`.
pub(super) fn cancel(machine: &Machine, given: &Given) -> Result<bool> {
    let address = machine.address(given.word(0, "POD")?)?;
    let CancelReply { cancelled } = client::ask(&address, None, Method::Cancel)?;
    let plain = if cancelled { "cancelled" } else { "no turn is running" };
    reply(given, &CancelReply { cancelled }, || plain.to_owned());
    Ok(cancelled)
}

/// `insomnia set POD model NAME`: the next request of a living pod asks that model.
///
/// # Errors
/// When the pod does not live or refuses.
pub(super) fn set(machine: &Machine, given: &Given) -> Result<bool> {
    let pod = given.word(0, "POD")?;
    match given.word(1, "the setting")? {
        "model" => {}
        other => return Err(Error::Usage(format!("\"model\" can be set, not \"{other}\""))),
    }
    let model = given.word(2, "NAME")?.to_owned();
    let address = machine.address(pod)?;
    client::ask::<Done>(&address, None, Method::Set { model: model.clone() })?;
    reply(given, &json!({ "model": model }), || {
        format!("the next request of pod {} asks {model}", address.pod)
    });
    Ok(true)
}

/// `insomnia resume POD`: a living pod goes on after a turn that did not finish; one that has ended is started
/// again with its newest session, and goes on where it was interrupted.
pub(super) fn resume(machine: &Machine, given: &Given) -> Result<bool> {
    let pod = given.word(0, "POD")?;
    let starts = match machine.any(pod)? {
        Found::Ended(_) => true,
        Found::Elsewhere(_) => false,
        // One that was killed a moment ago may hold its life until its last thread has gone.
        Found::Living(entry) => {
            let asked = client::ask::<StatusReply>(&survey::address_of(&entry), None, Method::Status);
            let by = Instant::now() + JUST_ENDED;
            asked.is_err() && life::ended_by(machine.lock.runtime(), &entry, &new_cancel()?, by)
        }
    };
    let absolute = |path| machine.current().map(|current| current.join(path).display().to_string());
    let manifest = given.value("manifest").map(absolute).transpose()?;
    if starts {
        let mut args = ["--name", pod, "--resume"].map(str::to_owned).to_vec();
        args.extend(manifest.map(|path| format!("--manifest={path}")));
        machine.launch(&machine.settings()?, &args, "")?;
    } else if manifest.is_some() {
        return Err(Error::told(format!(
            "pod \"{pod}\" lives with the settings of its start; end it first: \"insomnia stop {pod}\""
        )));
    }
    let address = machine.address(pod)?;
    let status: StatusReply = client::ask(&address, None, Method::Status)?;
    if starts {
        let had = Previous::find(&machine.directories, &status.pod_id)?.scope;
        for rule in had.iter().filter(|rule| rule.writes() && !status.scope.contains(rule)) {
            let table = machine.table()?;
            let who =
                table.holders(rule.path()).pop().map(|who| format!(": pod {} holds it now", who.pod_id));
            talk_line(&format!("pod {pod} has lost {rule}{}", who.unwrap_or_default()));
        }
    }
    if starts && status.status != Status::Paused {
        let plain = || format!("pod {} goes on with its session and is {}", address.pod, status.status);
        reply(given, &status, plain);
        return Ok(true);
    }
    let resumed: RunReply = client::ask(&address, None, Method::Resume)?;
    reply(given, &resumed, || format!("turn {} of pod {} goes on", resumed.turn, address.pod));
    Ok(true)
}
