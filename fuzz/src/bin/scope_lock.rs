//! Fuzzes `words::scope_lock`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::words::scope_lock(bytes));
