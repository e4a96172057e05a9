//! Fuzzes `models::command`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::models::command(bytes));
