//! What confining one command costs: a shell call beside the bare command, median of many, at level 1.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement speaks and stops where it fails")]

use std::fs::File;
use std::time::{Duration, Instant};

use insomnia::sys::confine::View;
use insomnia::sys::process::{ErrorOutput, Program};
use insomnia::wire::sandbox::{Kept, Means, Plan, Sandbox};

const ROUNDS: usize = 200;

fn main() {
    let far = || Instant::now() + Duration::from_secs(60);
    let place = tempfile::tempdir().unwrap();
    let scope = place.path().canonicalize().unwrap().join("scope");
    std::fs::create_dir_all(scope.join("a/lent")).unwrap();
    let life = File::create(place.path().join("life")).unwrap();
    let sandbox = Sandbox::with_program(env!("CARGO_BIN_EXE_pod").into(), life);
    let view = View {
        writable: [scope.clone()].into(),
        read_only: [scope.join("a/lent")].into(),
        hidden: ["/root".into()].into(),
        shown: [].into(),
        network: true,
    };
    let command = || vec!["/bin/sh".to_owned(), "-c".into(), "exit 0".into()];
    let bare = || {
        let mut running = Program::new("/bin/sh", ["-c", "exit 0"]).start(ErrorOutput::WithOutput).unwrap();
        running.read_to_end(1, None, far()).unwrap();
        running.wait(far()).unwrap();
    };
    let run = |means| {
        let (view, directory) = (view.clone(), scope.clone());
        let plan = Plan { means, view, command: command(), directory, variables: vec![] };
        sandbox.run(&plan, &mut Kept::default(), None, far()).unwrap();
    };
    let bare = median(bare);
    println!("bare command        {bare:>8.2?}");
    for (name, means) in [("supervised only", Means::Nothing), ("level 1, namespaces", Means::Namespaces)] {
        let cost = median(|| run(means));
        println!("{name:<19} {cost:>8.2?}  over the bare command: {:.2?}", cost.saturating_sub(bare));
    }
}

fn median(mut work: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times.swap_remove(ROUNDS / 2)
}
