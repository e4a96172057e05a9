//! The person's command. Everything is in the library.

fn main() -> std::process::ExitCode {
    insomnia::doors::cli::main()
}
