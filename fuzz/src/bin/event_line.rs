//! Fuzzes `words::event_line`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::words::event_line(bytes));
