//! Fuzzes `disk::proc_stat`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::disk::proc_stat(bytes));
