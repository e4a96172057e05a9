//! Fuzzes `doors::tool_input`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| insomnia_fuzz::doors::tool_input(bytes));
