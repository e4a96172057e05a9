//! Fuzzes `doors::command_line`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::doors::command_line(bytes));
