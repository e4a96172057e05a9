//! Fuzzes `disk::manifest`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::disk::manifest(bytes));
