//! Fuzzes `models::openai`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::models::openai(bytes));
