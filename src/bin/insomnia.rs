//! The person's command. Everything is in the library.

fn main() {}
