//! Whole-program tests: real files, locks, sockets and processes in temporary directories.

mod files;
