//! The agent process. Everything is in the library.

fn main() -> std::process::ExitCode {
    insomnia::doors::pod_command::main()
}
