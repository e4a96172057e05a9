//! Every limit in one table: nothing in a pod is unbounded, and a refusal names the limit and its setting.
//!
//! Pure. The defaults are those of the manifest; `limits` in a manifest changes them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The longest request line on a pod's socket, in bytes, newline included.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Each step on a socket (connect, one read, one write) is over after this time.
pub const WIRE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections served at once.
pub const MAX_CONNECTIONS: usize = 64;
/// Of these, connections that stream events.
pub const MAX_SUBSCRIBERS: usize = 16;
/// Event lines waiting for one slow subscriber before it is dropped.
pub const SUBSCRIBER_QUEUE: usize = 1024;
/// Life-cycle reports on their way to the spawner at once.
pub const MAX_EVENTS_IN_FLIGHT: usize = 16;
/// How long a change of `scope.lock` waits for whoever holds it.
pub const LOCK_WAIT: Duration = Duration::from_secs(5);
/// A pod that is ending exits after this time in any case.
pub const END_DEADLINE: Duration = Duration::from_secs(10);
/// One deadline for events in flight and the final `ShutDown`.
pub const FAREWELL_DEADLINE: Duration = Duration::from_secs(5);
/// A child's error message is cut at this length in its report, in bytes.
pub const MAX_EVENT_MESSAGE_BYTES: usize = 1024;
/// What one notice tells a model, in bytes.
pub const MAX_NOTICE_BYTES: usize = 8 << 10;
/// The rules of one pod. With paths of 4 KiB each, those of 64 pods fit into `scope.lock`.
pub const MAX_RULES: usize = 60;
/// `last_response` in `status` and `list_pods` is cut at this length, in bytes.
pub const MAX_LAST_RESPONSE_BYTES: usize = 400;
/// One answer of `get_history` or `read_output` holds about this many bytes; the rest follows by cursor.
pub const MAX_PAGE_BYTES: usize = 256 << 10;

/// The longest wait that a manifest may ask for, in seconds: a day. A clock overflows far above it.
const MAX_WAIT_SECONDS: u64 = 86_400;

/// The limits that a manifest may set, with their defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// How deep pods may spawn pods: a root pod is at depth 1.
    pub depth: usize,
    /// Running pods per spawner.
    pub pods_per_spawner: usize,
    /// Running pods per user.
    pub pods_per_user: usize,
    /// Seconds from the launch command to its ready line, and from adoption to the first request.
    pub launch_seconds: u64,
    /// Seconds that a pod has to obey a stop before it is killed.
    pub stop_seconds: u64,
    /// Model requests in one turn.
    pub steps: u64,
    /// Turns in a row that notices may start without a person saying anything.
    pub wake_turns: u64,
    /// Notices kept for the next turn; what overflows is counted and said.
    pub notices: usize,
    /// Bytes of one tool result that reach the model.
    pub tool_result_bytes: usize,
    /// Bytes of one page of a file.
    pub file_read_bytes: usize,
    /// Model requests tried again after a failure that may pass.
    pub retries: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            depth: 4,
            pods_per_spawner: 16,
            pods_per_user: 64,
            launch_seconds: 10,
            stop_seconds: 10,
            steps: 200,
            wake_turns: 100,
            notices: 256,
            tool_result_bytes: 16 << 10,
            file_read_bytes: 256 << 10,
            retries: 8,
        }
    }
}

impl Limits {
    /// The launch limit as a duration, at most a day.
    pub fn launch(&self) -> Duration {
        Duration::from_secs(self.launch_seconds.min(MAX_WAIT_SECONDS))
    }

    /// The stop limit as a duration, at most a day.
    pub fn stop(&self) -> Duration {
        Duration::from_secs(self.stop_seconds.min(MAX_WAIT_SECONDS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn no_limit_of_time_is_more_than_a_clock_can_add() {
        let endless = Limits { launch_seconds: u64::MAX, stop_seconds: u64::MAX, ..Limits::default() };
        for limit in [endless.launch(), endless.stop()] {
            assert!(Instant::now().checked_add(4 * limit).is_some(), "{limit:?}");
        }
        assert_eq!(Limits::default().launch(), Duration::from_secs(10));
    }
}
