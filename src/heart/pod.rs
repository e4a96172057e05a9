//! A pod from its start to its end: register, listen, live, hand back, say goodbye.
//!
//! The main thread runs the controller; the order of the steps is that of the launch contract.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::heart::controller::Controller;
use crate::heart::recover::{self, Previous};
use crate::heart::server;
use crate::heart::turn::Worker;
use crate::store::instruction;
use crate::store::life::{self, HeldLife};
use crate::store::manifest::{self, Layer, Manifest};
use crate::store::paths::{Directories, RuntimeDirectory, canonical, canonical_rules};
use crate::store::registry::Registry;
use crate::store::scope_lock::{ScopeLock, ScopeView};
use crate::store::session::{self, Input, Session};
use crate::sys::signal::{self, EndSignal};
use crate::sys::{clock, process, socket, thread};
use crate::tools::context::PodContext;
use crate::tools::mailbox::{Event, Mailbox};
use crate::tools::{shell, toolbox};
use crate::wire::client::Address;
use crate::wire::events::EventSender;
use crate::wire::launch::Ready;
use crate::wire::provider::{Provider, ProviderPlace};
use crate::wire::sandbox::Sandbox;
use crate::words::allocation::{Allocation, AllocationState, Refusal};
use crate::words::error::{Error, Result};
use crate::words::identity::{Life, Pid, PodId, PodName};
use crate::words::limits::FAREWELL_DEADLINE;
use crate::words::message::Item;
use crate::words::protocol::{PodEvent, Sender};
use crate::words::scope::Rule;

/// How long those who have asked, or stream events, get for what is still to be written when the pod has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What a pod is started with.
#[derive(Debug, Clone, Default)]
pub struct StartOptions {
    /// The name to have.
    pub name: Option<PodName>,
    /// The working directory; the current one by default.
    pub directory: Option<PathBuf>,
    /// Rule texts; those of the manifest by default.
    pub scope: Vec<String>,
    /// One more manifest file.
    pub manifest: Option<PathBuf>,
    /// Settings over all manifests, as JSON text.
    pub overlay: Option<String>,
    /// The spawner's socket.
    pub callback: Option<PathBuf>,
    /// The reservation to take over.
    pub adopt: Option<Life>,
    /// The pod whose newest session it goes on with.
    pub resume: Option<PodId>,
    /// The first input.
    pub task: Option<String>,
}

/// A pod that accepts connections and has not begun to live.
#[derive(Debug)]
pub struct Pod {
    context: Arc<PodContext>,
    controller: Controller,
    task: Option<String>,
}

/// Why a pod did not start, and the log that says more, if it came that far.
#[derive(Debug)]
pub struct NotStarted {
    /// The reason.
    pub error: Error,
    /// Its log.
    pub log: Option<PathBuf>,
}

impl From<Error> for NotStarted {
    fn from(error: Error) -> NotStarted {
        NotStarted { error, log: None }
    }
}

/// Starts a pod up to the point where it accepts connections. To be called before another thread makes files.
///
/// # Errors
/// With the reason, after entry, folder and socket have been taken back.
pub fn start(options: StartOptions) -> Result<Pod, NotStarted> {
    let settings = Settings::gather(&options)?;
    let runtime = Arc::new(RuntimeDirectory::open_or_create(&settings.directories.runtime)?);
    let lock = ScopeLock::new(runtime);
    let registered = register(&lock, &settings, &options)?;
    let own = speaker(&registered.entry);
    build(settings, registered, options).inspect_err(|_| {
        let undone = lock.edit(None, |table| {
            lock.release(table, &own.life);
            Ok(())
        });
        if let Err(error) = undone {
            log::error!("the entry of \"{}\" stays: {error}", own.pod_id); // the next opener reclaims it
        }
    })
}

/// The settings of a pod, from all that says something of them.
struct Settings {
    directories: Directories,
    directory: PathBuf,
    manifest: Manifest,
    instruction: String,
    previous: Option<Previous>,
    /// Whether a resumed session gets another model now, which goes before one that was set in it.
    sets_model: bool,
}

impl Settings {
    fn gather(options: &StartOptions) -> Result<Settings> {
        let directories = Directories::from_environment()?;
        let previous =
            options.resume.as_ref().map(|pod_id| Previous::find(&directories, pod_id)).transpose()?;
        let current =
            std::env::current_dir().map_err(|source| Error::io("find the current directory", source))?;
        let before = previous.as_ref().map(|previous| previous.directory.as_path());
        let directory =
            canonical(options.directory.as_deref().or(before).unwrap_or(Path::new(".")), &current)?;
        if !directory.is_dir() {
            let reason = format!("working directory \"{}\" is no directory", directory.display());
            return Err(Error::Told(reason));
        }
        let settings_before = previous.iter().map(|previous| previous.settings.clone());
        let settings_now = overlays(options)?;
        let sets_model = previous.is_some() && settings_now.iter().any(Layer::gives_model);
        let layers = settings_before.chain(settings_now).collect();
        let mut manifest = manifest::gather(&directories.config, &directory, layers)?;
        let denied_before =
            previous.as_ref().map(|previous| previous.settings.denied_tools()).unwrap_or_default();
        toolbox::check_denied(manifest.tools.deny.iter().filter(|name| !denied_before.contains(name)))?;
        let given = std::mem::take(&mut manifest.provider);
        manifest.provider = Provider::choose(&given)?;
        for (key, is_chosen) in
            [("kind", given.kind.is_none()), ("base_url", given.base_url != manifest.provider.base_url)]
        {
            if is_chosen {
                manifest.sources.insert(format!("provider.{key}"), "the environment".into());
            }
        }
        let hidden = directories.hidden(manifest.provider.api_key_file.as_ref());
        let (name, warnings) = (&manifest.instruction, &mut manifest.warnings);
        let instruction = instruction::resolve(name, &directories.config, &directory, &hidden, warnings)?;
        Ok(Settings { directories, directory, manifest, instruction, previous, sets_model })
    }
}

fn overlays(options: &StartOptions) -> Result<Vec<Layer>> {
    let mut layers = Vec::new();
    if let Some(path) = &options.manifest {
        layers.push(manifest::named(path)?);
    }
    if let Some(text) = &options.overlay {
        let place = given_by(options);
        layers.push(Layer::parse(text, manifest::Source::Overlay, place, Path::new("/"))?);
    }
    Ok(layers)
}

/// Who has put together what this pod is started with.
fn given_by(options: &StartOptions) -> &'static str {
    if options.adopt.is_some() { "its spawner" } else { "the command line" }
}

/// Puts the pod's entry into the lock: a new one for a root, its own life in place of the reservation for a
/// spawned one, what nobody else holds by now for a resumed one.
fn register(lock: &ScopeLock, settings: &Settings, options: &StartOptions) -> Result<Registered> {
    let Settings { directories, directory, manifest, previous, .. } = settings;
    let pid = Pid::new(process::own_pid())?;
    let stat = process::process_stat(pid.get())
        .ok_or_else(|| Error::told("cannot read /proc/self/stat; is /proc there?"))?;
    let life = life::new_life()?;
    let name = options.name.clone().map_or_else(|| PodName::new("main"), Ok)?;
    let texts = if options.scope.is_empty() { &manifest.scope } else { &options.scope };
    let scope_allow: Vec<Rule> = canonical_rules(texts, directory)?;
    scope_allow.iter().try_for_each(|rule| directories.check_scope(rule))?;
    for path in &manifest.shell.writable {
        shell::further_writable(path, directories)?;
    }
    let edited = lock.edit(None, |table| {
        let root = |pod_id: PodId, name: PodName, scope_allow: Vec<Rule>| -> Result<Allocation> {
            Ok(Allocation {
                socket: directories.socket(&pod_id)?.to_string_lossy().into_owned(),
                pod_id,
                name,
                pid,
                start_time: stat.start_time,
                life: life.clone(),
                state: AllocationState::Live,
                spawned_by: None,
                scope_allow,
                delegated_from: None,
                since: clock::now_seconds(),
                extra: BTreeMap::new(),
            })
        };
        let (entry, lost) = if let Some(reservation) = &options.adopt {
            (table.adopt(reservation, life.clone(), pid, stat.start_time)?, Vec::new())
        } else if let Some(previous) = previous {
            let scope = if options.scope.is_empty() { previous.scope.clone() } else { scope_allow };
            let entry = root(previous.pod_id.clone(), previous.name.clone(), scope)?;
            let resumed = table.resume(entry, &session::session_name(&previous.folder), &manifest.limits)?;
            (resumed.entry, resumed.lost)
        } else {
            let entry = root(table.free_id(&name), name, scope_allow)?;
            let refused = |refusal| Error::told(format!("cannot start pod \"{}\": {refusal}", entry.pod_id));
            table.register(entry.clone(), &manifest.limits).map_err(refused)?;
            (entry, Vec::new())
        };
        let spawner = entry.delegated_from.as_ref().and_then(|id| table.get(id)).map(speaker);
        // Held before anyone can see the entry: the table is written after this returns.
        let life_file = HeldLife::create(lock.runtime(), &entry)?.keep_until_exit()?;
        lock.sweep(table);
        Ok(Registered { lock: lock.clone(), entry, spawner, lost, life_file })
    })?;
    Ok(edited.value)
}

/// A pod whose entry is in the lock.
struct Registered {
    lock: ScopeLock,
    entry: Allocation,
    /// Who spawned it.
    spawner: Option<Sender>,
    /// Why old rules of a resumed pod are gone.
    lost: Vec<Refusal>,
    /// The life file, which is held from now on.
    life_file: File,
}

/// The pod of an entry as it speaks for itself.
fn speaker(entry: &Allocation) -> Sender {
    Sender { pod_id: entry.pod_id.clone(), life: entry.life.clone() }
}

/// What can be wrong with the settings is found before there is a session folder.
fn build(settings: Settings, registered: Registered, options: StartOptions) -> Result<Pod, NotStarted> {
    let entry = &registered.entry;
    let private_dir = settings.directories.runtime.join(entry.pod_id.as_str());
    let listener = listen(&private_dir, Path::new(&entry.socket))?;
    let (pod_id, name, directory) = (entry.pod_id.clone(), entry.name.clone(), settings.directory.clone());
    let place = ProviderPlace { pod_id, name, directory, private_dir };
    let provider = Provider::new(&settings.manifest.provider, place)?;
    let state_dir = match &settings.previous {
        Some(previous) => previous.folder.clone(),
        None => session::create_folder(&settings.directories.state, &entry.pod_id, &entry.life)?,
    };
    let log = session::log_path(&state_dir);
    begin_log(&log)?;
    settings.manifest.warnings.iter().for_each(|warning| log::warn!("{warning}"));
    assemble(settings, registered, options, listener, provider, &state_dir)
        .map_err(|error| NotStarted { error, log: Some(log) })
}

fn assemble(
    settings: Settings,
    registered: Registered,
    options: StartOptions,
    listener: UnixListener,
    provider: Provider,
    state_dir: &Path,
) -> Result<Pod> {
    let Settings { directories, directory, mut manifest, instruction, previous, sets_model } = settings;
    let Registered { lock, entry, spawner, lost, life_file } = registered;
    let own = speaker(&entry);
    let session = Session::open(state_dir)?;
    session.append(Item::Session {
        pod_id: own.pod_id.clone(),
        name: entry.name.clone(),
        program: env!("CARGO_PKG_VERSION").to_owned(),
        directory: directory.to_string_lossy().into_owned(),
        scope: entry.scope_allow.clone(),
    })?;
    if sets_model {
        // Said now, it counts more than one that was set before.
        session.append(Item::ModelSet { model: manifest.provider.model.clone().unwrap_or_default() })?;
    }
    manifest.scope = entry.scope_allow.iter().map(ToString::to_string).collect();
    if options.adopt.is_some() || !options.scope.is_empty() {
        manifest.sources.insert("scope".into(), given_by(&options).into());
    }
    manifest::save(state_dir, &manifest)?;
    let life = spawner.as_ref().map(|spawner| spawner.life.clone());
    let callback = options.callback.map(|socket| Address { pod: "spawner".into(), socket, life });
    let (mailbox, events) = Mailbox::new();
    let instruction = introduce(&instruction, &entry, &directory, spawner.as_ref());
    let first_request_within = options.adopt.map(|_| manifest.limits.launch());
    let context = Arc::new(PodContext {
        name: entry.name.clone(),
        pid: entry.pid,
        socket: PathBuf::from(&entry.socket),
        view: ScopeView::new(lock.clone(), own.pod_id.clone(), own.life.clone()),
        registry: Registry::open(state_dir)?,
        events: EventSender::new(own.clone(), callback, lock.clone()),
        ending: AtomicBool::new(false),
        answering: AtomicUsize::new(0),
        own,
        spawner,
        directory,
        directories,
        manifest,
        lock,
        session,
        logging: Mutex::new(()),
        mailbox,
        sandbox: Sandbox::new(life_file),
    });
    if previous.is_some() {
        recover::recover(&context, &lost)?;
    }
    end_on_signals(&context)?;
    let worker = Worker::new(Arc::clone(&context), provider, instruction)?;
    let controller = Controller::start(Arc::clone(&context), events, worker, first_request_within)?;
    server::serve(listener, Arc::clone(&context)).map_err(|source| Error::io("start a thread", source))?;
    let (pod_id, pid) = (&context.own.pod_id, context.pid);
    log::info!("pod \"{pod_id}\" {pid} started in \"{}\"", context.directory.display());
    Ok(Pod { context, controller, task: options.task })
}

/// Makes the pod's folder and its socket. A dead socket is replaced; anything else in its place is not touched.
fn listen(folder: &Path, path: &Path) -> Result<UnixListener> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|source| Error::io(format!("create \"{}\"", folder.display()), source))?;
    match std::fs::symlink_metadata(path) {
        // The entry is ours, so nobody else can be listening there.
        Ok(metadata) if metadata.file_type().is_socket() => {
            std::fs::remove_file(path)
                .map_err(|source| Error::io(format!("replace dead socket \"{}\"", path.display()), source))?;
        }
        Ok(_) => {
            let reason = "is in the way of the socket and is no socket; move it away";
            return Err(Error::told(format!("\"{}\" {reason}", path.display())));
        }
        Err(_) => {} // nothing is there; if it cannot even be looked at, listening says why
    }
    socket::listen(path).map_err(|source| Error::io(format!("listen on \"{}\"", path.display()), source))
}

fn begin_log(path: &Path) -> Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let opened = std::fs::File::options().append(true).create(true).mode(0o600).open(path);
    let file = opened.map_err(|source| Error::io(format!("open log \"{}\"", path.display()), source))?;
    let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned());
    let target = env_logger::Target::Pipe(Box::new(file));
    // A second logger in one process happens in tests only; the first one stays.
    let line = |out: &mut env_logger::fmt::Formatter, record: &log::Record<'_>| {
        let at = clock::compact_utc(clock::now_millis());
        writeln!(out, "{at} {:5} {}", record.level(), record.args())
    };
    let _ = env_logger::Builder::new().parse_filters(&filter).format(line).target(target).try_init();
    Ok(())
}

/// The instruction text with who the pod is.
fn introduce(instruction: &str, entry: &Allocation, directory: &Path, spawner: Option<&Sender>) -> String {
    let rules: Vec<String> = entry.scope_allow.iter().map(|rule| format!("- {rule}\n")).collect();
    let scope = if rules.is_empty() { "- nothing: you may only read\n".to_owned() } else { rules.concat() };
    let origin = match spawner {
        Some(spawner) => format!(
            "You were spawned by pod \"{}\"; your first message is its task, and it reads your answers.",
            spawner.pod_id
        ),
        None => "You were started by a person, who reads your answers.".to_owned(),
    };
    format!(
        "{instruction}\n\n# You\n\nYou are pod \"{}\". {origin} Your working directory is \"{}\". Your scope:\n{scope}",
        entry.pod_id,
        directory.display()
    )
}

/// The first SIGTERM or SIGINT ends gracefully, the second one at once. A lost terminal changes nothing.
fn end_on_signals(context: &Arc<PodContext>) -> Result<()> {
    let mailbox = context.mailbox.clone();
    let mut was_asked = false;
    let handle = move |signal| {
        if signal == EndSignal::HangUp {
            return;
        }
        if std::mem::replace(&mut was_asked, true) {
            signal::exit_now(1);
        }
        mailbox.post(Event::Shutdown);
    };
    signal::on_end_signals(handle).map_err(|source| Error::io("listen for signals", source))
}

impl Pod {
    /// What the launch command says of it.
    pub fn ready(&self) -> Ready {
        Ready {
            pod_id: self.context.own.pod_id.clone(),
            socket: self.context.socket.clone(),
            pid: self.context.pid,
        }
    }

    /// The pod's log file.
    pub fn log_path(&self) -> PathBuf {
        session::log_path(self.context.session.directory())
    }

    /// Lives until somebody asks it to end, then hands everything back.
    pub fn live(self) {
        shell::find_level_meanwhile(&self.context);
        if let Some(text) = self.task {
            let mailbox = self.context.mailbox.clone();
            let (reply, _) = crossbeam_channel::bounded(1);
            mailbox.post(Event::Run { input: Input { text, from: None }, counts: false, reply });
        }
        let mut controller = self.controller;
        controller.run();
        if let Err(error) = thread::detach("ending", move || controller.refuse_until_exit()) {
            log::warn!("nobody answers during the end: {error}"); // clients see the connection close
        }
        say_goodbye(&self.context);
        // Their threads die with the process; one that does not read may not hold the end up for long.
        let last_words = Instant::now() + LAST_WORDS;
        while self.context.answering.load(Ordering::SeqCst) > 0 && Instant::now() < last_words {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Waits for reports in flight, gives the scope and the children back, and reports the end itself: a thread
/// would die with the process.
fn say_goodbye(context: &PodContext) {
    let deadline = Instant::now() + FAREWELL_DEADLINE;
    let left = || deadline.saturating_duration_since(Instant::now());
    if !context.events.wait_landed(left()) {
        log::warn!("ending while a report is on its way"); // its thread dies with the process
    }
    let released = context.lock.edit(None, |table| {
        let above: Vec<Allocation> = table.ancestors(&context.own.pod_id).into_iter().cloned().collect();
        context.lock.release(table, &context.own.life);
        Ok(above)
    });
    let above = released.map(|edited| edited.value).unwrap_or_else(|error| {
        log::error!("the entry stays until the next pod reclaims it: {error}");
        Vec::new()
    });
    context.events.send_inline(PodEvent::ShutDown { pod_name: context.own.pod_id.clone() }, left(), &above);
    log::info!("pod \"{}\" ended", context.own.pod_id);
}
