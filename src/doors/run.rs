//! `insomnia run`: a root pod here, followed until its whole tree is quiet, then ended.

use std::io::{BufRead, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::doors::commands::Given;
use crate::doors::find::Machine;
use crate::doors::follow::{Follower, Style};
use crate::doors::terminal::{answer_line, answers_to_a_person, talk, talk_line};
use crate::store::manifest::{self, Layer, Source};
use crate::store::paths::canonical;
use crate::sys::signal::{self, EndSignal};
use crate::sys::wait::Cancel;
use crate::tools::stop::{self, Manner};
use crate::tools::survey;
use crate::wire::client::{self, Address, Next, Subscription};
use crate::wire::launch::{self, Launch, Ready};
use crate::words::error::{Error, Result};
use crate::words::limits::MAX_LINE_BYTES;
use crate::words::message::TurnResult;
use crate::words::protocol::{CancelReply, ErrorCode, Method, RunReply, Status, StatusReply, StreamEvent};
use crate::words::text::harmless;

/// How often the tree is looked at while nothing comes from its root.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What a lost terminal and Ctrl-C have asked for, counted by the signal thread.
#[derive(Debug, Clone, Default)]
struct Interrupts {
    presses: Arc<AtomicUsize>,
    hang_ups: Arc<AtomicUsize>,
    /// Whether nothing runs and the main thread waits for a line, which a signal does not wake.
    at_prompt: Arc<AtomicBool>,
}

impl Interrupts {
    fn listen(machine: &Machine, pod_id: &str) -> Result<Interrupts> {
        let interrupts = Interrupts::default();
        let (theirs, machine, pod_id) = (interrupts.clone(), machine.clone(), pod_id.to_owned());
        let count = move |signal| {
            let counter = match signal {
                EndSignal::Interrupt | EndSignal::Terminate => &theirs.presses,
                EndSignal::HangUp => &theirs.hang_ups,
            };
            counter.fetch_add(1, Ordering::SeqCst);
            if signal != EndSignal::HangUp && theirs.at_prompt.load(Ordering::SeqCst) {
                let ended = stop_tree(&machine, &pod_id);
                signal::exit_now(i32::from(ended.is_err()));
            }
        };
        signal::on_end_signals(count).map_err(|source| Error::io("listen for signals", source))?;
        Ok(interrupts)
    }
}

/// A root pod that a person follows.
struct Followed<'a> {
    machine: &'a Machine,
    root: Address,
    pod_id: String,
    events: Subscription,
    follower: Follower,
    interrupts: Interrupts,
    presses_seen: usize,
    waiting_for: String,
}

/// Why following ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    /// Every pod of the tree is quiet.
    Quiet,
    /// Ctrl-C came twice.
    Interrupted,
    /// The terminal is gone.
    HungUp,
    /// Nobody reads standard output any more.
    Unheard,
    /// The root pod has ended.
    Ended,
}

/// Runs the command. The answer is whether the root's last turn finished.
///
/// # Errors
/// When the pod cannot be started or reached; what was started is ended then.
pub fn run(machine: &Machine, given: &Given) -> Result<bool> {
    if given.words.first().is_some_and(|task| task.trim().is_empty()) {
        return Err(Error::Usage("the task is empty".into()));
    }
    let ready = launch_root(machine, given)?;
    let root = Address { pod: ready.pod_id.to_string(), socket: ready.socket.clone(), life: None };
    let outcome = if given.has("detach") {
        let task = given.words.first().cloned();
        let accepted = task.map_or(Ok(()), |task| give_task(&root, task));
        accepted.map(|()| {
            answer_line(&json!(ready).to_string());
            true
        })
    } else {
        follow_root(machine, given, &root)
    };
    if outcome.is_err() {
        stop_tree(machine, &root.pod)?;
    }
    outcome
}

fn follow_root(machine: &Machine, given: &Given, root: &Address) -> Result<bool> {
    let style = match (given.has("json"), given.has("quiet"), answers_to_a_person()) {
        (true, _, _) => Style::Json,
        (false, true, _) => Style::Quiet,
        (false, false, true) => Style::Text,
        (false, false, false) => Style::Talk,
    };
    let mut followed = Followed {
        machine,
        events: client::subscribe(root, None)?,
        root: root.clone(),
        pod_id: root.pod.clone(),
        follower: Follower::new(style),
        interrupts: Interrupts::listen(machine, &root.pod)?,
        presses_seen: 0,
        waiting_for: String::new(),
    };
    let status: StatusReply = client::ask(root, None, Method::Status)?;
    let writes: Vec<String> =
        status.scope.iter().filter(|rule| rule.writes()).map(ToString::to_string).collect();
    let writes = if writes.is_empty() { "nothing".to_owned() } else { writes.join(", ") };
    followed.follower.say(&format!("-- pod {} (pid {}) may write {writes}", root.pod, status.pid));
    if !status.sandbox.starts_with('1') {
        followed.follower.say(&format!("-- shell {}", status.sandbox));
    }
    let over = match given.words.first() {
        Some(task) => followed.one_task(task)?,
        None => followed.lines_from_input()?,
    };
    followed.follower.end_line();
    let finished = followed.follower.last_end.as_ref().is_none_or(|end| end.result == TurnResult::Finished);
    let is_answer = finished && over != Over::Ended && !followed.follower.last_text.is_empty();
    if is_answer && matches!(style, Style::Talk | Style::Quiet) {
        let text = format!("{}\n", harmless(&followed.follower.last_text));
        followed.follower.answer(&text);
    }
    match over {
        Over::HungUp => return Ok(true), // as --detach: the pods live on and nobody listens
        Over::Quiet | Over::Interrupted if given.has("keep") => {
            let said = format!("-- pod {} lives on; \"insomnia stop {} --tree\" ends it", root.pod, root.pod);
            followed.follower.say(&said);
        }
        Over::Quiet | Over::Interrupted | Over::Unheard => stop_tree(machine, &root.pod)?,
        Over::Ended => followed.say_who_lives_on()?,
    }
    match followed.follower.unheard.take() {
        Some(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("write to standard output", error))
        }
        Some(_) => Ok(true),
        None => Ok(finished && over == Over::Quiet),
    }
}

fn give_task(root: &Address, task: String) -> Result<()> {
    let bytes = task.len();
    let given = client::ask::<RunReply>(root, None, Method::Run { input: task });
    if matches!(&given, Err(Error::Peer(refusal)) if refusal.code == ErrorCode::TooLarge) {
        return Err(Error::told(format!(
            "the task has {bytes} bytes, more than a request line may have ({MAX_LINE_BYTES}); put it into a file and name the file"
        )));
    }
    given.map(|_| ())
}

/// Ends the pod and all below it; one that cannot be ended is named.
fn stop_tree(machine: &Machine, pod_id: &str) -> Result<()> {
    let Ok(root) = machine.living(pod_id) else { return Ok(()) };
    let cancel = Cancel::new().map_err(|source| Error::io("make an event descriptor", source))?;
    let manner = Manner { from: None, limit: machine.stop_limit(), ask: true, cancel: &cancel };
    for (pod_id, error) in stop::stop_tree(&machine.lock, &root, manner).into_iter().filter_map(Result::err) {
        talk_line(&format!("pod \"{pod_id}\" lives on: {error}"));
    }
    Ok(())
}

fn launch_root(machine: &Machine, given: &Given) -> Result<Ready> {
    let current =
        std::env::current_dir().map_err(|source| Error::io("find the current directory", source))?;
    let directory = canonical(Path::new(given.value("dir").unwrap_or(".")), &current)?;
    if !directory.is_dir() {
        return Err(Error::told(format!("working directory \"{}\" is no directory", directory.display())));
    }
    let mut overlay = json!({});
    let mut set = |pointer: [&str; 2], value: Value| {
        let [outer, inner] = pointer;
        let place = overlay.as_object_mut().map(|object| object.entry(outer).or_insert_with(|| json!({})));
        match place {
            Some(place) if inner.is_empty() => *place = value,
            Some(Value::Object(place)) => drop(place.insert(inner.to_owned(), value)),
            Some(_) | None => {}
        }
    };
    for (flag, pointer) in [
        ("model", ["provider", "model"]),
        ("provider", ["provider", "kind"]),
        ("instruction", ["instruction", ""]),
    ] {
        if let Some(value) = given.value(flag) {
            set(pointer, json!(value));
        }
    }
    let mut layers = Vec::new();
    if let Some(path) = given.value("manifest") {
        let text = crate::sys::file::read_regular(Path::new(path), manifest::MANIFEST_BYTES_MAX)
            .map_err(|source| Error::io(format!("read manifest \"{path}\""), source))?;
        layers.push(Layer::parse(&text, Source::Overlay, path, &current)?);
    }
    let flags = Layer::overlay(&overlay, "command line").map_err(|error| Error::Usage(error.to_string()))?;
    layers.push(flags);
    let settings = manifest::gather(&machine.directories.config, &directory, layers)?;

    let text = directory.to_string_lossy().into_owned();
    let mut args = vec!["--name".to_owned(), given.value("name").unwrap_or("main").to_owned()];
    args.extend(["--dir".to_owned(), text.clone(), "--overlay".to_owned(), "-".to_owned()]);
    args.extend(
        given
            .value("manifest")
            .into_iter()
            .flat_map(|path| ["--manifest".to_owned(), current.join(path).to_string_lossy().into_owned()]),
    );
    let mut rules: Vec<String> = given.values("scope").map(str::to_owned).collect();
    if given.has("read-only") {
        if !rules.is_empty() {
            return Err(Error::Usage("--read-only and --scope contradict each other".into()));
        }
        if let Some(object) = overlay.as_object_mut() {
            object.insert("scope".into(), json!([]));
        }
    } else if rules.is_empty() && settings.scope.is_empty() {
        rules.push(format!("{text}:write:recursive"));
    }
    args.extend(rules.into_iter().flat_map(|rule| ["--scope".to_owned(), rule]));
    let cancel = Cancel::new().map_err(|source| Error::io("make an event descriptor", source))?;
    let command = launch::pod_command(&settings.pod_command);
    let (overlay, limit) = (overlay.to_string(), settings.limits.launch());
    let wanted = Launch {
        command: &command,
        args: &args,
        directory: &current,
        overlay: &overlay,
        variables: &[],
        limit,
    };
    launch::launch(wanted, &cancel).map_err(|error| {
        let text = error.to_string();
        if text.contains("is held by pod") {
            return Error::told(format!("{text}; or start with --read-only"));
        }
        error
    })
}

impl Followed<'_> {
    fn one_task(&mut self, task: &str) -> Result<Over> {
        give_task(&self.root, task.to_owned())?;
        self.follow()
    }

    /// Each line is a task; the next one is read when the tree is quiet.
    fn lines_from_input(&mut self) -> Result<Over> {
        let input = std::io::stdin();
        let mut lines = input.lock().lines();
        loop {
            if input.is_terminal() {
                self.follower.end_line();
                talk("> ");
            }
            self.interrupts.at_prompt.store(true, Ordering::SeqCst);
            let next = lines.next();
            self.interrupts.at_prompt.store(false, Ordering::SeqCst);
            let Some(line) = next else { return Ok(Over::Quiet) };
            let line = line.map_err(|source| Error::io("read a line from standard input", source))?;
            if line.trim().is_empty() {
                continue;
            }
            let over = self.one_task(&line)?;
            if over != Over::Quiet {
                return Ok(over);
            }
        }
    }

    /// Shows events until the tree is quiet: looked at when the root has become so, and while nothing comes.
    fn follow(&mut self) -> Result<Over> {
        loop {
            let may_be_quiet = match self.events.next(Instant::now() + LOOK_AGAIN)? {
                Next::Event(event) => {
                    self.follower.show(&event);
                    matches!(*event, StreamEvent::Status { status, .. } if status != Status::Running)
                }
                Next::Nothing => true,
                Next::Over => return Ok(Over::Ended),
            };
            if self.follower.unheard.is_some() {
                return Ok(Over::Unheard);
            }
            if let Some(over) = self.look_at_signals()? {
                return Ok(over);
            }
            // Two looks in a row must say so: a report may be on its way from a pod that is quiet already to
            // one that is about to wake.
            if may_be_quiet {
                let first = self.look_at_tree()?;
                if first.is_some() && first == self.look_at_tree()? {
                    return Ok(Over::Quiet);
                }
            }
        }
    }

    fn look_at_signals(&mut self) -> Result<Option<Over>> {
        if self.interrupts.hang_ups.load(Ordering::SeqCst) > 0 {
            return Ok(Some(Over::HungUp));
        }
        let presses = self.interrupts.presses.load(Ordering::SeqCst);
        if presses == self.presses_seen {
            return Ok(None);
        }
        if presses > 1 {
            return Ok(Some(Over::Interrupted));
        }
        self.presses_seen = presses;
        let reply: CancelReply = client::ask(&self.root, None, Method::Cancel)?;
        let said = if reply.cancelled { "cancelling the turn" } else { "no turn is running" };
        self.follower.say(&format!("-- {said}; Ctrl-C again ends pod {} and all below it", self.pod_id));
        Ok(None)
    }

    /// The pods of the tree with their turns when all are quiet; otherwise says whom it waits for.
    fn look_at_tree(&mut self) -> Result<Option<Vec<(String, u64)>>> {
        let table = self.machine.lock.read()?;
        let Some(root) = self.machine.living(&self.pod_id).ok() else { return Ok(Some(Vec::new())) };
        let entries: Vec<_> = [&root].into_iter().chain(table.subtree(&root.pod_id)).collect();
        let addresses: Vec<_> = entries.iter().map(|entry| survey::address_of(entry)).collect();
        let answers = survey::ask_all(&addresses, None);
        let is_quiet =
            |status: &StatusReply| status.status != Status::Running && status.events_in_flight == 0;
        let busy: Vec<String> = entries
            .iter()
            .zip(&answers)
            .filter(|(_, answer)| !answer.as_ref().is_some_and(is_quiet))
            .map(|(entry, answer)| {
                let detail = answer.as_ref().map_or("does not answer", |answer| answer.detail.as_str());
                format!("{} ({detail})", entry.pod_id)
            })
            .collect();
        let others: Vec<&String> =
            busy.iter().filter(|line| !line.starts_with(&format!("{} ", self.pod_id))).collect();
        if busy.len() == others.len() && !others.is_empty() {
            let waiting_for = others.iter().map(|line| line.as_str()).collect::<Vec<_>>().join(", ");
            if waiting_for != self.waiting_for {
                self.follower.say(&format!("-- waiting for {waiting_for}"));
                self.waiting_for = waiting_for;
            }
        }
        // What the root's last turn has said is shown before following ends.
        let shown = self.follower.last_end.as_ref().map_or(0, |end| end.turn);
        if !busy.is_empty() || answers.first().and_then(Option::as_ref).is_some_and(|root| root.turn != shown)
        {
            return Ok(None);
        }
        let turns = answers.iter().flatten().map(|answer| (answer.pod_id.to_string(), answer.turn));
        Ok(Some(turns.collect()))
    }

    fn say_who_lives_on(&mut self) -> Result<()> {
        let table = self.machine.lock.read()?;
        let mine = format!("{}/", self.pod_id);
        let orphans = table
            .allocations()
            .iter()
            .filter(|a| a.spawned_by.as_ref().is_some_and(|by| by.starts_with(&mine)));
        let orphans: Vec<&str> = orphans.map(|a| a.pod_id.as_str()).collect();
        let orphans = if orphans.is_empty() {
            String::new()
        } else {
            format!("; these live on: {}", orphans.join(", "))
        };
        let pod = &self.pod_id;
        talk_line(&format!(
            "pod {pod} has ended before its work did{orphans}; \"insomnia resume {pod}\" goes on with it"
        ));
        Ok(())
    }
}
