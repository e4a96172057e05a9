//! Links the unwinder into the programs where the C compiler has it as an archive. Loading it as a library costs each
//! start of a program 0.1 ms, and a shell call starts one.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let var = |name| std::env::var(name).unwrap_or_default();
    let is_static = var("CARGO_CFG_TARGET_FEATURE").contains("crt-static"); // has it already
    if is_static || var("CARGO_CFG_TARGET_ENV") != "gnu" || var("TARGET") != var("HOST") {
        return;
    }
    let linker = std::env::var("RUSTC_LINKER").unwrap_or_else(|_| "cc".into());
    #[allow(clippy::disallowed_methods, reason = "the floors are those of the library")]
    let found = std::process::Command::new(linker).arg("-print-file-name=libgcc_eh.a").output();
    // A compiler that has none answers with the bare name.
    if found.is_ok_and(|found| found.stdout.starts_with(b"/")) {
        println!("cargo:rustc-link-arg=-Wl,--push-state,-Bstatic,--whole-archive,-lgcc_eh,--pop-state");
    }
}
