//! Fuzzes `doors::edit`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::doors::edit(bytes));
