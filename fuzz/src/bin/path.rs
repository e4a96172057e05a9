//! Fuzzes `disk::path`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::disk::path(bytes));
