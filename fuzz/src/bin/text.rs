//! Fuzzes `words::text`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::words::text(bytes));
