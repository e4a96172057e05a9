//! Fuzzes `words::pod_event`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::words::pod_event(bytes));
