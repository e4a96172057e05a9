//! The TUI as a person meets it: a real program in a real terminal (tmux), keys sent, screens read as text.

#[cfg(not(feature = "tui"))]
#[test]
fn a_build_without_the_tui_says_how_to_get_it_and_what_to_use_instead() {
    let ran = crate::world::World::new().insomnia(["tui"]);
    assert_eq!(ran.code, Some(1));
    for part in ["cargo install --path . --features tui", "insomnia attach POD"] {
        assert!(ran.stderr.contains(part), "{}", ran.stderr);
    }
}

#[cfg(feature = "tui")]
mod with_a_terminal {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};

    use crate::world::{PATIENCE, World, calls, has_tool, ran, read, spawn, wait_until};

    /// A terminal of its own in which one shell command runs.
    struct Terminal<'a> {
        world: &'a World,
        /// Of a server of its own: one that is ending takes no new session.
        socket: String,
    }

    impl Terminal<'_> {
        fn open<'a>(world: &'a World, (width, height): (u16, u16), command: &str) -> Terminal<'a> {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let name = format!("tmux{}", NUMBER.fetch_add(1, Ordering::Relaxed));
            let terminal = Terminal { world, socket: world.path(&name).to_str().unwrap().to_owned() };
            let (width, height) = (width.to_string(), height.to_string());
            // What a command leaves behind stays on the screen while the shell waits.
            let command = format!("{command}; echo left $?; stty -a | grep -o '.icanon'; exec cat");
            let size = ["new-session", "-d", "-x", &width, "-y", &height, "sh", "-c", &command];
            terminal.tmux(&size);
            terminal
        }

        fn tmux(&self, args: &[&str]) -> String {
            let common = ["-u", "-f", "/dev/null", "-S", &self.socket];
            let ran = ran(self.world.program("tmux", common.iter().chain(args)));
            assert_eq!(ran.code, Some(0), "tmux {args:?}: {}", ran.stderr);
            ran.stdout
        }

        fn keys(&self, keys: &[&str]) {
            self.tmux(&[&["send-keys"], keys].concat());
        }

        fn screen(&self) -> String {
            self.tmux(&["capture-pane", "-p"])
        }

        /// Waits until the screen shows all of this, and returns it.
        fn shows(&self, parts: &[&str]) -> String {
            let deadline = Instant::now() + PATIENCE;
            loop {
                let screen = self.screen();
                if parts.iter().all(|part| screen.contains(part)) {
                    return screen;
                }
                assert!(Instant::now() < deadline, "waited in vain for {parts:?}:\n{screen}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }

        fn resize(&self, width: &str, height: &str) {
            self.tmux(&["resize-window", "-x", width, "-y", height]);
        }

        /// The terminal is as a shell wants it: no other screen, a cursor, lines as they are typed.
        fn is_given_back(&self, last_words: &str) {
            let screen = self.shows(&[last_words, " icanon"]);
            assert!(!screen.contains("pods"), "{screen}");
            assert_eq!(self.tmux(&["display", "-p", "#{alternate_on} #{cursor_flag}"]).trim(), "0 1");
        }
    }

    impl Drop for Terminal<'_> {
        fn drop(&mut self) {
            ran(self.world.program("tmux", ["-S", &self.socket, "kill-server"]));
        }
    }

    const PROGRAM: &str = env!("CARGO_BIN_EXE_insomnia");

    fn tui(arguments: &str) -> String {
        format!("{PROGRAM} tui {arguments}")
    }

    /// A world with `main` and the pod `coder` below it, both idle after a first turn.
    fn family(main: &[Value]) -> World {
        let mut replies = vec![calls(&[spawn("coder", &["src:write"])]), json!({ "text": "始めました。" })];
        replies.extend(main.iter().cloned());
        let world = World::with_settings(
            json!({ "main": replies, "coder": [{ "text": "直しました。\u{1b}[2Jテストも通ります。" }] }),
            json!({ "wake_on_events": false }),
        );
        let scope = format!("{}:write", world.project().display());
        world.start(&["--name", "main", "--scope", &scope, "--task", "始めてください"]);
        world.wait_turns("main", 1);
        world.wait_turns("coder", 1);
        world
    }

    /// The right part of a screen of 80 columns: the conversation.
    fn conversation(screen: &str) -> Vec<&str> {
        screen.lines().filter_map(|line| line.split_once('│')).map(|(_, right)| right.trim_end()).collect()
    }

    #[test]
    fn a_person_chooses_reads_sends_cancels_resizes_stops_and_leaves() {
        if !has_tool("tmux") {
            return;
        }
        let world = family(&[
            json!({ "text": "二つ目の返事です。" }),
            json!({ "text": "never said", "delay_ms": 600_000 }),
            json!({ "text": "再開しました。" }),
        ]);
        let terminal = Terminal::open(&world, (120, 30), &tui(""));
        terminal.shows(&["root pods", "main idle", "始めました。", "choose a pod"]);
        terminal.keys(&["Enter"]);
        terminal.shows(&["pods of main", " coder idle", "> 始めてください", "-- turn 1 finished"]);

        terminal.keys(&["次を", "M-Enter", "どうぞ", "Enter"]);
        terminal.shows(&["> 次を", "二つ目の返事です。", "-- turn 2 finished", "turn 2 of main has begun"]);
        terminal.keys(&["もう一度", "Enter"]);
        terminal.shows(&["> もう一度", "main running"]);
        wait_until("the model is asked", || world.status("main")["detail"] == "waiting for the model");
        terminal.keys(&["Escape"]);
        terminal.shows(&["c cancel"]);
        terminal.keys(&["c"]);
        terminal.shows(&["-- turn 3 cancelled", "the turn of main is cancelled", "main paused"]);
        terminal.keys(&["r"]);
        terminal.shows(&["再開しました。", "-- turn 4 finished", "main idle"]);

        terminal.resize("80", "24");
        let screen = terminal.shows(&["main idle", "-- turn 4 finished", "> もう一度"]);
        let shown = conversation(&screen);
        let from = shown.iter().position(|line| *line == "> 次を").unwrap();
        assert_eq!(
            shown[from..],
            [
                "> 次を",
                "どうぞ",
                "二つ目の返事です。",
                "-- turn 2 finished",
                "-- turn 3 (run)",
                "> もう一度",
                "the model could not be asked: cancelled before the",
                "reply was whole",
                "-- turn 3 cancelled: somebody cancelled the turn",
                "-- turn 4 (resume)",
                "再開しました。",
                "-- turn 4 finished",
            ]
        );
        assert_eq!(screen.lines().count(), 24);
        terminal.resize("120", "30");
        terminal.shows(&["== session of pod main", "-- turn 4 finished"]);

        terminal.keys(&["BTab", "Down", "Enter"]);
        terminal.shows(&["to coder", "直しました。\\x1b[2Jテストも通ります。", "-- turn 1 finished"]);
        world.kill("coder");
        terminal.shows(&[
            "coder, ended without saying so",
            " coder ended without saying so",
            "テストも通ります。",
        ]);
        terminal.keys(&["BTab", "BTab", "Up", "S"]);
        terminal.shows(&["stop pod main", "? y / n"]); // with what is below it, until the dead one is reclaimed
        terminal.keys(&["y"]);
        terminal.shows(&["main has ended", "stopped: main"]);
        assert!(world.entry("main").is_none());
        terminal.keys(&["q"]);
        terminal.is_given_back("left 0");
    }

    #[test]
    fn tools_fold_turns_are_jumped_between_and_the_scope_is_shown() {
        if !has_tool("tmux") {
            return;
        }
        let world = family(&[]);
        let terminal = Terminal::open(&world, (80, 24), &tui("main"));
        terminal.shows(&["pods of main", "+ SpawnPod", "始めました。"]);
        terminal.keys(&["Escape"]);
        terminal.shows(&["c cancel"]); // an Escape with a key right behind it would be an Alt
        terminal.keys(&["Space"]);
        terminal.shows(&["- SpawnPod", "\"name\": \"coder\""]);
        terminal.keys(&["f", "f", "["]);
        terminal.shows(&["+ SpawnPod"]);
        terminal.keys(&["/"]);
        terminal.keys(&["nowhere", "Enter"]);
        terminal.shows(&["\"nowhere\" is not found above"]);
        terminal.keys(&["w"]);
        terminal.shows(&["who may write what", "│  but not", "│    coder"]);
        terminal.keys(&["x"]);
        terminal.keys(&["?"]);
        terminal.shows(&["stop it and all below it", "the pods go on"]);
        terminal.keys(&["x"]);
        terminal.tmux(&["set-buffer", "貼り付け\nof two lines"]);
        terminal.tmux(&["paste-buffer", "-p"]);
        terminal.shows(&["> 貼り付け", "\n  of two lines", "Enter sends"]);
        terminal.keys(&["C-c"]);
        terminal.is_given_back("left 0");
        assert!(world.entry("main").is_some(), "leaving stops nobody");
    }

    #[test]
    fn a_pod_that_hangs_freezes_nothing() {
        if !has_tool("tmux") {
            return;
        }
        let world = family(&[json!({ "text": "still here" })]);
        world.signal("coder", "STOP");
        let terminal = Terminal::open(&world, (100, 30), &tui("coder"));
        terminal.shows(&["pods of coder", "> pod main: task of coder"]);
        for shown in ["c cancel", "main idle"] {
            terminal.keys(&["Escape"]);
            terminal.shows(&[shown]);
        }
        terminal.keys(&["Enter"]);
        terminal.shows(&["pods of main", "coder idle?", "-- turn 1 finished"]);
        terminal.keys(&["hello", "Enter"]);
        terminal.shows(&["still here"]);
        terminal.keys(&["Tab", "Down", "Enter"]);
        terminal.shows(&["to coder", "直しました。", "coder, not followed: "]);
        terminal.keys(&["sent into the void", "Enter", "Tab", "Up", "Enter"]);
        terminal.shows(&["to main", "still here"]);
        world.signal("coder", "CONT");
        terminal.shows(&["coder idle "]);
    }

    #[test]
    fn an_ended_pod_is_read_from_its_log() {
        if !has_tool("tmux") {
            return;
        }
        let world = family(&[]);
        assert_eq!(world.insomnia(["stop", "coder"]).code, Some(0));
        let terminal = Terminal::open(&world, (100, 30), &tui("coder"));
        terminal.shows(&["coder, has ended; this is its log", "直しました。", "this pod has ended"]);
        terminal.keys(&["x", "Enter"]);
        terminal.shows(&["pod coder has ended; \"insomnia resume coder\" starts it again"]);
        terminal.keys(&["Escape"]);
        terminal.shows(&["c cancel"]);
        terminal.keys(&["r"]);
        terminal.shows(&["pod coder has ended; \"insomnia resume coder\" starts it again"]);
    }

    #[test]
    fn the_terminal_is_given_back_after_a_signal() {
        if !has_tool("tmux") {
            return;
        }
        let world = family(&[]);
        for signal in ["TERM", "HUP", "INT"] {
            let terminal = Terminal::open(&world, (80, 24), &tui("main"));
            terminal.shows(&["始めました。"]);
            let pid = pid_of_tui(&world).to_string();
            assert_eq!(ran(world.program("kill", [format!("-{signal}"), pid])).code, Some(0));
            terminal.is_given_back("left 0");
        }
    }

    #[test]
    fn a_terminal_that_goes_takes_the_program_with_it_but_no_pod() {
        if !has_tool("tmux") {
            return;
        }
        let world = family(&[]);
        let terminal = Terminal::open(&world, (80, 24), &format!("trap '' HUP; {}", tui("main")));
        terminal.shows(&["始めました。"]);
        pid_of_tui(&world);
        drop(terminal);
        wait_until("the program is gone", || find_tui(&world).is_none());
        assert!(world.entry("main").is_some() && world.entry("coder").is_some());
    }

    #[test]
    fn the_terminal_is_given_back_after_a_panic() {
        if !has_tool("tmux") {
            return;
        }
        let world = World::new();
        let myself = std::env::current_exe().unwrap();
        let test = "tui::with_a_terminal::panics_with_the_screen_taken";
        let command = format!("{} --ignored --exact {test} --nocapture", myself.display());
        let terminal = Terminal::open(&world, (80, 24), &command);
        terminal.is_given_back("left 101");
        terminal.shows(&["something went very wrong"]);
    }

    #[test]
    #[ignore = "the other half of the test above, to be run in a terminal"]
    fn panics_with_the_screen_taken() {
        let (sender, _events) = crossbeam_channel::bounded(16);
        let _screen = insomnia::doors::tui::Screen::enter(&sender).unwrap();
        let other = std::thread::Builder::new().spawn(|| panic!("something went very wrong")).unwrap();
        let _ = other.join();
        std::thread::sleep(PATIENCE); // the program is over before
    }

    #[test]
    fn no_color_means_no_colour() {
        if !has_tool("tmux") {
            return;
        }
        let world = family(&[]);
        for (variable, is_coloured) in [("NO_COLOR=1", false), ("NO_COLOR=", true)] {
            let terminal = Terminal::open(&world, (80, 24), &format!("env {variable} {}", tui("main")));
            terminal.shows(&["始めました。", "coder idle"]);
            let text = terminal.tmux(&["capture-pane", "-p", "-e"]);
            let has_colour = ["[3", ";3"].iter().any(|code| text.contains(&format!("{code}8;5;")));
            assert_eq!(has_colour, is_coloured, "{text:?}");
        }
    }

    #[test]
    fn without_a_terminal_it_names_what_works_without_one() {
        let ran = World::new().insomnia(["tui"]);
        assert_eq!(ran.code, Some(1));
        assert!(ran.stderr.contains("\"insomnia attach POD\" works without one"), "{}", ran.stderr);
    }

    #[test]
    fn the_picture_of_the_readme_is_a_real_run() {
        if !has_tool("tmux") {
            return;
        }
        let world = World::new();
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let (before, copy) = (read(root.join("README.md")), world.path("README.md"));
        std::fs::write(&copy, &before).unwrap();
        let script = root.join(".ci/picture");
        let ran = ran(world.program("bash", [script.as_os_str(), PROGRAM.as_ref(), copy.as_os_str()]));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        for text in [before, read(&copy)] {
            let picture = text.split("<!-- made by .ci/picture -->\n```text\n").nth(1).unwrap();
            let picture = picture.split("\n```\n").next().unwrap();
            assert_eq!(picture.lines().count(), 26, "{picture}");
            for part in
                ["pods of main", "  coder running", "+ SpawnPod", "テストを", "> leave the docs alone"]
            {
                assert!(picture.contains(part), "{part}: {picture}");
            }
        }
    }

    fn find_tui(world: &World) -> Option<i32> {
        let is_tui = |pid: &i32| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            text.starts_with(&format!("{PROGRAM}\0tui"))
        };
        world.processes().into_iter().find(is_tui)
    }

    fn pid_of_tui(world: &World) -> i32 {
        find_tui(world).expect("the program runs")
    }
}
