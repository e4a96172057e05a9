//! The agent process. Everything is in the library.

fn main() {}
