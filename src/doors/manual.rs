//! What is generated from the table of commands for other programs: completions of three shells, and the manual
//! page. Pure.

use crate::doors::commands::{COMMANDS, Command, Flag};
use crate::doors::pod_command;
use crate::doors::terminal::listed;

/// The living pods, as a shell finds them: from the lock, which answers at once.
const PODS: &str = "insomnia scope list 2>/dev/null | awk 'NR > 1 { print $1 }'";

/// The text that completes `insomnia` in this shell; `None` for one that is not known.
pub(super) fn completions(shell: &str) -> Option<String> {
    match shell {
        "bash" => Some(format!(
            "_insomnia() {{\n  local known= line=\"${{COMP_WORDS[*]:1:COMP_CWORD-1}} \" cur=\"${{COMP_WORDS[COMP_CWORD]}}\"\n\
             {}  COMPREPLY=($(compgen -W \"$known\" -- \"$cur\"))\n}}\ncomplete -o default -F _insomnia insomnia\n",
            cases()
        )),
        "zsh" => Some(format!(
            "#compdef insomnia\n_insomnia() {{\n  local known= line=\"${{(j: :)words[2,CURRENT-1]}} \"\n\
             {}  compadd -- ${{=known}} || _files\n}}\ncompdef _insomnia insomnia\n",
            cases()
        )),
        "fish" => Some(fish()),
        _ => None,
    }
}

/// Sets `known` to what may follow `line`, in the words that bash and zsh share. A value of an option is a file.
fn cases() -> String {
    let flags = COMMANDS.iter().flat_map(|command| &command.flags);
    let with_value =
        flags.filter(|flag| !flag.value.is_empty()).map(|flag| format!("*\" --{} \"", flag.name));
    let with_value = listed(with_value, "|").unwrap_or_default();
    let mut text = format!("  case \"$line\" in\n    {with_value}) known= ;;\n");
    for command in COMMANDS.iter() {
        let flags = command.flags.iter().map(|flag| format!("--{}", flag.name));
        let known = listed(flags.chain(words(command, "$")), " ").unwrap_or_default();
        text.push_str(&format!("    \"{} \"*) known=\"{known}\" ;;\n", command.name));
    }
    text.push_str("    \"scope \") known=\"list who repair\" ;;\n");
    let mut first: Vec<&str> =
        COMMANDS.iter().map(|command| command.name.split(' ').next().unwrap_or_default()).collect();
    first.dedup();
    text.push_str(&format!("    \" \") known=\"{} help\" ;;\n  esac\n", first.join(" ")));
    text
}

/// The words that may be given, or how a shell finds them; `before` begins the output of a command in it.
fn words(command: &Command, before: &str) -> Option<String> {
    let choices = Some(command.arguments).filter(|arguments| arguments.contains('|'));
    let choices = choices.map(|choices| choices.replace('|', " "));
    choices.or_else(|| command.arguments.contains("POD").then(|| format!("{before}({PODS})")))
}

fn fish() -> String {
    let quote = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    let mut text = String::new();
    let mut line = |before: &str, rest: String| {
        let condition = format!("string match -q \"insomnia {before}\" -- (commandline -cp)");
        text.push_str(&format!("complete -c insomnia -n {} {rest}\n", quote(&condition)));
    };
    for command in COMMANDS.iter() {
        let (name, about) = (command.name, quote(command.about));
        match name.split_once(' ') {
            None => line("*", format!("-n __fish_use_subcommand -f -a {name} -d {about}")),
            Some((first, second)) => {
                line("*", format!("-n __fish_use_subcommand -f -a {first}"));
                line(&format!("{first} *"), format!("-f -a {second} -d {about}"));
            }
        }
        let within = format!("{name} *");
        for Flag { name, value, about } in &command.flags {
            let value = if value.is_empty() { "" } else { "-r " };
            line(&within, format!("{value}-l {name} -d {}", quote(about)));
        }
        if let Some(words) = words(command, "") {
            line(&within, format!("-f -a {}", quote(&words)));
        }
    }
    text
}

/// The manual page in the language of man(7).
pub(super) fn manual() -> String {
    let mut text = format!(
        ".TH INSOMNIA 1 \"\" \"insomnia {}\"\n.SH NAME\ninsomnia \\- several LLM agents on one machine, never two writers on one path\n\
         .SH SYNOPSIS\n.B insomnia\n.I COMMAND\n[OPTIONS]\n.SH COMMANDS\n\
         POD is a pod_id or the path of a socket.\n",
        env!("CARGO_PKG_VERSION")
    );
    COMMANDS.iter().for_each(|command| add(&mut text, "insomnia ", command));
    text.push_str(".SH THE AGENT PROCESS\n");
    add(&mut text, "", &pod_command::COMMAND);
    text.push_str(
        ".SH ENVIRONMENT\n\
         .TP\n.B ANTHROPIC_API_KEY, OPENAI_API_KEY\nThe key of the provider; the first that is set chooses it, before OPENAI_BASE_URL alone.\n\
         .TP\n.B ANTHROPIC_BASE_URL, OPENAI_BASE_URL\nAnother server of that kind.\n\
         .TP\n.B INSOMNIA_RUNTIME_DIR\nWhere sockets and scope.lock are, in place of $XDG_RUNTIME_DIR/insomnia.\n\
         .TP\n.B INSOMNIA_POD_COMMAND\nThe command that starts each pod, in place of pod beside insomnia.\n\
         .TP\n.B XDG_CONFIG_HOME, XDG_STATE_HOME\nIn place of \\(ti/.config and \\(ti/.local/state.\n\
         .TP\n.B RUST_LOG\nHow much is logged, such as debug.\n\
         .SH EXIT STATUS\n0 done, 1 the answer is no or it failed (of run: its last turn), 2 usage.\n.SH FILES\n\
         \\(ti/.config/insomnia/manifest.json, \\(ti/.local/state/insomnia, $XDG_RUNTIME_DIR/insomnia; \
         \"insomnia doctor\" tells those in use.\n",
    );
    text
}

fn add(text: &mut String, program: &str, command: &Command) {
    let usage = format!("{program}{} {}", command.name, command.arguments);
    text.push_str(&format!(".SS {}\n{}\n", roff(usage.trim()), roff(command.about)));
    for Flag { name, value, about } in &command.flags {
        text.push_str(&format!(".TP\n.B {}\n{}\n", roff(format!("--{name} {value}").trim()), roff(about)));
    }
    text.push_str(&format!(".PP\nExample:\n.nf\n{}\n.fi\n", roff(command.example)));
}

/// Text that roff takes as text. Source: groff(7), "Escape sequences" and "Control characters".
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    if text.starts_with('.') { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_and_option_is_in_each_text() {
        for text in [completions("bash"), completions("zsh"), completions("fish"), Some(manual())] {
            let text = text.unwrap().replace("\\-", "-");
            for command in COMMANDS.iter() {
                assert!(text.contains(command.name), "{}", command.name);
                for flag in &command.flags {
                    let forms = [format!("--{}", flag.name), format!("-l {} ", flag.name)];
                    assert!(forms.iter().any(|form| text.contains(form)), "{}", flag.name);
                }
            }
        }
        assert_eq!(completions("tcsh"), None);
        assert_eq!(roff(".a-b 'c' \\"), "\\&.a\\-b \\(aqc\\(aq \\e");
    }
}
