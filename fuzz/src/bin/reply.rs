//! Fuzzes `words::reply`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::words::reply(bytes));
