//! A tree of pods heals itself: whoever is killed, one model hears of it, and the lock holds exactly the living.

#![allow(clippy::print_stdout, reason = "the slowest notice is a figure to be read")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::{World, wait_until};

fn spawn(name: &str, scope: &str) -> Value {
    json!({ "name": "SpawnPod", "input": { "name": name, "task": "work", "scope": [scope] } })
}

/// Three levels, twelve pods: root, three below it, and two or three below each of those.
fn family() -> World {
    let wait = json!({ "name": "WaitPods", "input": {} });
    let middle = |name: &str, count: usize| {
        let mut calls: Vec<Value> =
            (0..count).map(|n| spawn(&format!("{name}{n}"), &format!("{name}/{n}:write"))).collect();
        calls.push(wait.clone());
        json!([{ "tool_calls": calls }, { "text": "ready" }])
    };
    let root = [spawn("a", "a:write"), spawn("b", "b:write"), spawn("c", "c:write"), wait.clone()];
    let world = World::with_script(json!({
        "root": [{ "tool_calls": root }, { "text": "ready" }],
        "a": middle("a", 3), "b": middle("b", 3), "c": middle("c", 2),
        "*": [{ "text": "ready" }]
    }));
    world.start(&["--name", "root", "--scope", ".:write"]);
    world.turn("root", "grow");
    world
}

fn living(world: &World) -> BTreeSet<String> {
    let table = world.table();
    table["allocations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["pod_id"].as_str().unwrap().to_owned())
        .collect()
}

fn spawner_of(world: &World, pod: &str) -> Option<String> {
    world.entry(pod)?["delegated_from"].as_str().map(str::to_owned)
}

/// How often this pod's model has read of the crash of that one.
fn told(world: &World, pod: &str, of: &str) -> usize {
    world.notices(pod).matches(&format!("pod \"{of}\" ended without saying so")).count()
}

#[test]
fn whoever_is_killed_its_nearest_living_ancestor_alone_hears_of_it_once() {
    let rounds = if std::env::var_os("INSOMNIA_LONG").is_some() { 100 } else { 20 };
    let mut seed: usize = 7;
    let mut slowest = Duration::ZERO;
    for _ in 0..rounds {
        let world = family();
        let mut alive = living(&world);
        assert_eq!(alive.len(), 12, "{alive:?}");
        // Ten kills in each tree, until only the root and one other are left.
        while alive.len() > 2 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let candidates: Vec<&String> = alive.iter().filter(|pod| *pod != "root").collect();
            let victim = candidates[(seed >> 33) % candidates.len()].clone();
            let heir = spawner_of(&world, &victim).expect("all but the root have a spawner");
            let orphans: Vec<String> = alive
                .iter()
                .filter(|pod| spawner_of(&world, pod).as_ref() == Some(&victim))
                .cloned()
                .collect();
            world.kill(&victim);
            let killed = Instant::now();
            wait_until("the heir's model has been told", || told(&world, &heir, &victim) == 1);
            slowest = slowest.max(killed.elapsed());
            alive.remove(&victim);
            wait_until("the lock holds exactly the living", || living(&world) == alive);
            for orphan in &orphans {
                assert_eq!(spawner_of(&world, orphan), Some(heir.clone()), "{orphan} goes to {heir}");
            }
            for other in alive.iter().filter(|pod| **pod != heir) {
                assert_eq!(told(&world, other, &victim), 0, "{other} is told of {victim}");
            }
        }
        alive.remove("root");
        wait_until("the root knows exactly who lives below it", || {
            let known = world.ok("root", "list_pods", Value::Null);
            let ids = known["pods"]
                .as_array()
                .unwrap()
                .iter()
                .map(|pod| pod["pod_id"].as_str().unwrap().to_owned());
            ids.collect::<BTreeSet<String>>() == alive
        });
        assert_eq!(world.insomnia(["stop", "root", "--tree"]).code, Some(0));
        assert_eq!(world.processes(), Vec::<i32>::new());
        assert_eq!(living(&world), BTreeSet::new());
    }
    println!("{} kills; the slowest notice came after {slowest:?}", rounds * 10);
}

#[test]
fn usage_is_summed_for_a_pod_and_for_its_subtree() {
    let world = family();
    let pods = world.ok("root", "list_pods", Value::Null);
    let a = pods["pods"].as_array().unwrap().iter().find(|pod| pod["pod_id"] == "a").unwrap();
    assert!(a["usage"]["input_tokens"].is_u64() && a["usage_tree"]["input_tokens"].is_u64());
    assert_eq!(pods["pods"].as_array().unwrap().len(), 11, "the whole subtree is listed");
}
