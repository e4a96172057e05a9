//! What is known to go wrong in programs of this kind, and where each of it is tested, or why it cannot happen here.
//!
//! The first list names public faults of other programs by kind: P paths and file tools, S scope and sandbox, L lock
//! file, U socket and protocol, R processes and secrets, T shell output and the model. The second one holds lessons
//! of an earlier system of pods. Below each stand its tests, `module::name` of this crate or `floor::file::name` of
//! the sources, or the reason why there is none.

use std::path::{Path, PathBuf};

/// P10: a directory without case needs a file system made for it, which tests cannot count on. A second name of one
/// directory, which is what the kernel makes of it, can be had with a mount.
const FAULTS: &str = "
P01 a sibling that begins alike
    files::p01_a_sibling_with_the_same_beginning_is_refused
    words::scope::p01_and_s04_a_sibling_with_the_same_beginning_is_outside
P02 a link out of the scope
    files::p02_a_link_that_leaves_the_scope_is_refused_and_one_inside_survives
    shell::every_attempt_of_the_battery_comes_out_as_wanted_at_level_1
P03 two dots behind what does not exist
    files::p03_two_dots_behind_a_directory_that_does_not_exist
    store::paths::p03_and_p09_every_spelling_becomes_one_path
P04 a lent place under another name
    files::p04_what_is_lent_is_refused_by_whatever_name
P05 checked by name, opened later
    files::p05_a_link_swapped_in_between_is_not_followed
    files::p05_a_walk_and_a_last_name_do_not_follow_a_swapped_link_either
P06 only the last name guarded
    files::p06_an_earlier_directory_swapped_for_a_link_is_not_followed
P07 a hard link to a file outside
    files::p07_a_hard_link_is_replaced_by_name_and_the_other_name_keeps_its_content
P08 emptied, then refused
    files::p08_whatever_is_refused_keeps_every_byte
P09 needless slashes in a rule
    files::p09_a_rule_with_needless_slashes_is_no_rule_yet
    lock_races::s03_and_p09_every_overlap_is_refused_in_every_spelling
P10 names without case
    files::p10_other_letters_are_another_place_or_refused
    files::p10_a_second_name_of_one_directory_is_judged_as_that_directory
P11 the long way round through /proc
    files::p11_the_long_way_round_through_proc
P12 a pipe without end
    files::p12_a_pipe_that_never_ends_is_not_opened
P13 a device without end
    files::p13_an_endless_device_is_refused
P14 a very large file
    files::p14_a_very_large_file_is_read_in_pages
P15 line ends rewritten
    files::p15_line_ends_are_not_rewritten
    tools::edit::p15_line_ends_are_kept
P16 names that are not UTF-8
    files::p16_names_that_are_not_utf8_are_shown_and_taken_back
P17 loops of links
    files::p17_loops_of_links_are_not_walked
P18 a change written over
    files::p18_a_change_nobody_saw_is_not_written_over
S01 a manifest that appears later
    store::manifest::s01_a_project_cannot_widen_rights
    spawning::a_spawn_into_a_project_that_would_widen_rights_is_refused_in_the_childs_words
    shell::every_attempt_of_the_battery_comes_out_as_wanted_at_level_1
S02 git configuration as a way out
    files::s02_git_hooks_and_configuration_are_protected
    shell::s02_git_cannot_be_led_to_another_configuration
S03 overlap seen in equal texts only
    lock_races::s03_and_p09_every_overlap_is_refused_in_every_spelling
    words::scope::s03_overlap_is_found_both_ways
S04 a conflict where there is none
    lock_races::s04_siblings_that_begin_alike_do_not_conflict
S05 a child less confined
    spawning::s05_a_child_is_never_less_confined_than_its_spawner
    shell::s05_a_child_is_never_confined_less_than_its_spawner
S06 the working directory as a permission
    shell::s06_the_working_directory_is_no_permission
S07 read-only undone from inside
    shell::every_attempt_of_the_battery_comes_out_as_wanted_at_level_1
S08 a socket behind a read-only directory
    shell::every_attempt_of_the_battery_comes_out_as_wanted_at_level_1
S09 a sandbox that cannot start
    shell::s09_where_nothing_can_confine_there_is_no_shell_and_everybody_is_told_why
    shell::s09_where_namespaces_are_refused_an_ordinary_user_has_the_reduced_level
    shell::s09_inside_its_own_shell_a_pod_is_confined_or_says_why_not
    shell::a_call_that_fails_during_the_set_up_never_runs_the_command_unconfined
S10 an empty list read as everything
    files::s10_an_empty_scope_writes_nothing
    lock_races::s10_no_scope_is_nothing_and_an_empty_path_is_refused
    words::scope::s10_an_empty_scope_writes_nothing
S11 a directory above what is lent renamed
    shell::every_attempt_of_the_battery_comes_out_as_wanted_at_level_1
L01 several writers, half a file
    lock_kills::l01_and_l02_killed_writers_break_nothing_and_lose_nobody
L02 killed while writing
    lock_kills::l01_and_l02_killed_writers_break_nothing_and_lose_nobody
    spawn_kills::a_spawner_killed_at_any_step_leaves_a_table_that_fits_and_a_child_that_is_found
L03 a full disk
    lock_faults::l03_a_full_disk_breaks_nothing_at_33_levels
    lock_faults::without_inodes_nothing_changes
L04 a lock on a deleted file
    lock_races::l04_a_file_that_is_replaced_during_a_change_is_not_overwritten
    store::scope_lock::l04_a_missing_file_while_a_pod_lives_is_no_first_start
    store::repair::l04_a_missing_file_comes_back
L05 unlocked, then deleted
    lock_races::l05_no_registration_is_lost_and_the_file_is_never_deleted
L06 a process number used again
    lock_races::l06_a_process_number_used_again_is_dead_and_the_very_process_alive
L07 my own number in the file
    lock_races::l07_the_number_of_a_dead_pod_may_be_my_own
L08 a lock inherited by a child
    shell::l08_only_the_life_file_is_shared_with_the_helpers
L09 a link in place of the file
    lock_races::l09_links_and_places_of_others_are_refused
    store::paths::l09_a_runtime_directory_that_others_control_is_refused
    store::repair::l09_a_link_in_its_place_is_moved_away_and_not_followed
L10 waiting for ever
    lock_races::l10_a_stopped_holder_delays_changes_for_five_seconds_and_readers_not_at_all
    lock_races::l10_what_only_looks_needs_no_lock_and_signals_do_not_hurry_a_turn_that_waits
    stopping::a_cancel_ends_the_wait_for_the_lock_and_nobody_else_waits_for_it
L11 content that makes no sense
    lock_races::l11_no_start_and_no_change_while_the_content_makes_no_sense
    words::allocation::l11_content_that_makes_no_sense_is_refused
    store::repair::l11_the_table_comes_back_and_each_bad_file_is_kept
L12 two reclaim the same dead entry
    lock_races::l12_twenty_starters_reclaim_one_dead_entry_and_one_wins
L13 a number from a file gets a signal
    lock_races::l13_a_foreign_number_in_the_file_gets_no_signal
    stopping::l13_r08_a_number_in_the_table_is_never_killed
    stopping::l13_a_number_that_is_no_process_makes_the_table_invalid
U01 a socket path cut off
    spawning::u01_a_socket_path_that_is_too_long_is_refused_before_anything_is_made
    store::paths::u01_a_socket_path_is_never_cut
U02 a socket left by a crash
    spawning::a_dead_pods_socket_is_replaced_and_anything_else_in_its_place_is_not_touched
U03 starters remove each other's socket
    lock_races::u03_ten_starters_of_one_name_each_answer_on_their_own_socket
U04 open for a moment
    strangers::u04_at_no_moment_of_a_start_does_another_user_get_in
    spawning::u04_nobody_else_can_reach_a_pod_whatever_the_umask
    sys::socket::u04_the_socket_is_private_and_knows_its_peer
U05 nobody asks who is calling
    strangers::u05_another_user_who_reaches_the_socket_is_refused_before_a_line_is_read
    strangers::u05_root_is_served_by_the_pod_of_a_user
U06 a line without end
    protocol::u06_a_line_without_end_costs_less_than_two_mebibytes
    protocol::u06_a_line_full_of_small_values_costs_no_more_than_its_length
    protocol::a_line_of_one_mebibyte_is_taken_and_one_byte_more_is_not
U07 half-open clients
    protocol::u07_silent_clients_keep_nobody_waiting
U08 one slow client
    protocol::u08_a_client_that_does_not_read_holds_up_nobody
    protocol::u08_a_subscriber_that_overflows_is_told_and_goes_on_from_its_cursor
U09 deep nesting
    protocol::u09_each_bad_line_gets_its_error_and_the_pod_serves_the_next
    protocol::an_answer_that_is_nested_or_endless_is_an_error_for_the_asker
U10 the other end is gone
    protocol::u10_ten_thousand_clients_that_do_not_wait_cost_no_descriptor
    people::u10_a_closed_pipe_is_a_quiet_end
    people::u10_no_command_minds_where_its_output_goes
    telling::a_spawner_that_hangs_or_is_dead_does_not_hinder_its_child
U11 a name used as a path
    words::identity::a_name_is_one_strict_rule
    words::identity::a_refusal_shows_the_name_harmlessly
    spawning::a_spawn_with_wrong_input_says_what_is_wrong
    spawning::no_pod_can_have_the_name_of_what_lies_beside_its_folder
    people::what_is_not_there_is_said_clearly
U12 an end that does not reach who waits
    stopping::u12_each_way_to_end_reaches_a_pod_whose_model_never_answers
    launch::u12_sigterm_ends_an_idle_pod_and_leaves_nothing
    shell::a_cancel_kills_the_command_and_keeps_what_it_said
R01 dead children never collected
    shell::r01_no_zombie_is_left
R02 dying with a thread
    because nothing asks for a signal at its parent's death: whoever watches over a command reads from a
        lifeline that the pod's process holds open, and commands run on the turn's thread, never on a
        connection's
R03 the terminal closed
    stopping::r03_a_lost_terminal_does_not_end_a_pod
    people::r03_pods_live_on_when_the_terminal_of_their_start_is_gone
    spawning::a_spawned_pod_is_a_process_of_its_own_that_outlives_its_spawner
R04 descriptors leaked into the sandbox
    shell::r06_and_r04_keys_and_open_files_are_not_handed_down
R05 a key on the command line
    people::r05_a_key_is_nowhere_to_be_found
    providers::r05_the_key_is_in_no_argument_and_a_cancel_leaves_nothing_behind
    wire::provider::curl::r05_hidden_variables_do_not_reach_curl
R06 the environment handed down
    shell::r06_and_r04_keys_and_open_files_are_not_handed_down
R07 a key in the log
    people::r05_a_key_is_nowhere_to_be_found
    providers::r07_a_server_that_echoes_the_key_does_not_get_it_into_our_words
    wire::provider::key::r07_a_key_and_its_parts_are_masked
R08 the wrong process killed
    stopping::l13_r08_a_number_in_the_table_is_never_killed
    stopping::l13_r08_a_dead_pods_number_that_somebody_else_has_now_is_left_alone
R09 a signal to everyone
    stopping::r09_signals_go_to_what_was_started_here_and_to_nobody_else
    sys::process::tells_itself_from_a_process_that_is_not_there
R10 the second signal swallowed
    stopping::r10_a_second_signal_ends_a_pod_at_once_and_its_scope_is_reclaimed
    stopping::r10_a_second_signal_is_an_exit_that_says_so
R11 the process table read wrongly
    sys::process::r11_the_process_table_is_read_after_the_last_bracket
T01 a background process holds the pipe
    shell::t01_the_call_ends_with_the_command_and_nothing_stays
T02 output floods the conversation
    files::t02_many_hits_are_cut_and_counted
    words::text::t02_long_text_keeps_head_and_tail_and_says_how_much_is_missing
    shell::t03_endless_output_fills_neither_memory_nor_time
T03 output fills the memory
    shell::t03_endless_output_fills_neither_memory_nor_time
T04 a command waits for an answer
    shell::t04_nothing_waits_for_an_answer
T05 typing into the human's terminal
    shell::t05_a_command_never_has_the_terminal_of_the_pod
    shell::every_attempt_of_the_battery_comes_out_as_wanted_at_level_1
T06 control sequences shown to the human
    shell::t06_escapes_never_reach_a_terminal_raw
    words::text::t06_control_sequences_are_shown_not_obeyed
T07 a child in the system's voice
    telling::t07_a_child_speaks_as_data_only
    telling::t07_what_a_child_says_carries_none_of_the_systems_marks
    asking::t07_no_text_of_another_pod_can_close_its_marks_on_the_way_to_a_model
    words::notification::t07_a_child_cannot_speak_in_the_systems_voice
T08 the end is cut off
    shell::t08_the_end_of_the_output_and_the_way_it_ended_are_always_told
";

const LESSONS: &str = "
# Callbacks, events, sockets
reports lost while a turn runs
    telling::a_burst_of_reports_makes_one_turn
    lessons::sixty_four_reports_at_once_make_one_turn_and_none_is_lost
the last report dies with its process
    telling::a_graceful_end_gives_the_scope_back_and_is_told_once
children of a dead pod report to nobody
    telling::the_root_takes_over_when_the_one_in_the_middle_dies
    tree::whoever_is_killed_its_nearest_living_ancestor_alone_hears_of_it_once
a provider's error of several KB in the spawner's conversation
    telling::a_turn_that_fails_is_cancelled_or_meets_a_limit_is_told_with_its_reason
a message to a busy pod claims success and is lost
    talking::what_is_sent_in_mid_turn_reaches_the_model_before_its_next_request
running, idle, stopped not on the wire
    talking::the_list_tells_running_idle_paused_stopped_and_silent_pods_apart
a stop frees the scope before the process is gone
    stopping::a_pod_that_hangs_keeps_its_scope_until_it_is_killed
    shell::after_a_kill_nothing_survives_and_the_scope_is_not_free_before
a spawn is done and its task never runs
    spawning::a_spawned_pod_is_a_process_of_its_own_that_outlives_its_spawner
    spawning::an_adopted_pod_that_hears_nothing_ends_itself
a report lost to a greeting of the receiver
    because a pod writes nothing to a connection before it has read the request line, and every sender
        waits for the reply
a shutdown request lost the same way
    stopping::a_pod_is_stopped_in_mid_turn_a_hundred_times_in_a_row
a client that went away taken for a bad request
    protocol::a_client_that_leaves_early_is_a_close_and_one_that_only_reads_is_served
a refusal reaches every client
    lessons::a_refusal_reaches_only_who_asked
each look costs descriptors
    lessons::a_list_that_is_asked_for_often_costs_no_descriptor_and_no_thread
    protocol::u10_ten_thousand_clients_that_do_not_wait_cost_no_descriptor
a slow pod shown as unknown or down
    talking::pods_that_hang_are_asked_in_parallel
    talking::the_list_tells_running_idle_paused_stopped_and_silent_pods_apart
a line without end
    protocol::u06_a_line_without_end_costs_less_than_two_mebibytes
a subscriber cut off silently in a burst
    protocol::u08_a_subscriber_that_overflows_is_told_and_goes_on_from_its_cursor
no end after a failed turn
    protocol::each_accepted_turn_has_exactly_one_end
the end of another turn taken for one's own
    protocol::each_accepted_turn_has_exactly_one_end
    people::the_second_terminal_sees_sends_reads_and_stops
# Spawn and process life
a child without its spawner's provider
    lessons::a_child_has_the_provider_of_its_spawner_though_no_manifest_names_one
what the child said goes nowhere
    spawning::a_pod_command_that_fails_is_told_and_leaves_nothing
a dead child is waited for
    lessons::a_pod_command_that_dies_is_not_waited_for
a working directory the child may not read
    spawning::s05_a_child_is_never_less_confined_than_its_spawner
    spawning::a_spawn_with_wrong_input_says_what_is_wrong
a name too long for the socket's path
    spawning::u01_a_socket_path_that_is_too_long_is_refused_before_anything_is_made
a name that is a path
    words::identity::a_name_is_one_strict_rule
SIGTERM leaves entry, socket and directory
    launch::u12_sigterm_ends_an_idle_pod_and_leaves_nothing
the name of a zombie stays taken
    shell::r01_no_zombie_is_left
    spawning::a_dead_pods_socket_is_replaced_and_anything_else_in_its_place_is_not_touched
    store::life::without_a_life_file_only_the_very_process_counts
a number used again keeps a dead entry alive
    lock_races::l06_a_process_number_used_again_is_dead_and_the_very_process_alive
one end in ten leaves its directory
    lessons::every_end_by_a_signal_leaves_nothing
a pod whose program was rebuilt cannot spawn
    lessons::a_pod_whose_program_was_replaced_or_deleted_can_still_spawn
launcher and program drift apart
    spawning::a_pod_command_named_by_the_environment_comes_first
    spawning::a_child_that_started_but_gave_a_wrong_ready_line_is_stopped
the reason of a failed spawn is hidden
    spawning::a_child_without_curl_says_so
    people::run_reads_only_when_told_and_the_refusal_offers_it
a claim stays after a failed launch
    spawning::a_pod_command_that_fails_is_told_and_leaves_nothing
    spawning::a_reservation_dies_with_its_spawner_and_a_late_adopter_says_why
another name than the one that was wanted
    spawning::a_name_in_use_gets_a_number
no fresh start under a used name
    store::session::a_new_session_never_overwrites_an_older_one
# Scope and the lock
the spawner stays locked out after the child's end
    spawning::what_is_lent_is_refused_to_the_spawner_until_it_comes_back
the same when the entry had gone before
    telling::a_crash_is_told_once_as_an_end_without_a_word
    telling::a_graceful_end_gives_the_scope_back_and_is_told_once
a restart conflicts with one's own child
    resuming::children_that_live_come_back_and_those_that_died_are_told_once
    spawn_kills::a_spawner_killed_at_any_step_leaves_a_table_that_fits_and_a_child_that_is_found
the spawner writes into what it has lent
    spawning::what_is_lent_is_refused_to_the_spawner_until_it_comes_back
a table that others can read
    spawning::u04_nobody_else_can_reach_a_pod_whatever_the_umask
paths put together in many places
    because store::paths is the one module that knows where things lie
a misleading name of the lock file
    because a name only; README says that it is the table
the whole pod waits for the lock
    stopping::a_cancel_ends_the_wait_for_the_lock_and_nobody_else_waits_for_it
a stop of a running child blocks its spawner
    stopping::a_pod_is_stopped_in_mid_turn_a_hundred_times_in_a_row
a conflict without the rule
    spawning::conflicts_name_pod_process_and_rule
a used name shown twice
    store::registry::a_name_used_again_shows_once_and_the_end_of_the_old_life_is_spoken_of_once
    telling::a_crash_is_told_although_the_name_was_taken_again_at_once
lent with two dots or through a link
    spawning::s05_a_child_is_never_less_confined_than_its_spawner
    store::paths::p03_and_p09_every_spelling_becomes_one_path
one that only reads cannot hand out writing
    because not built: a pod lends from what it may write itself
no way to hand back without an end
    because accepted and documented: what is lent comes back when the child ends; lend narrowly
settings replaced where they should add up
    store::manifest::later_layers_win_and_denied_tools_add_up
rules pile up in the process
    because no rules are kept in the process: the effective scope is computed from the table each time
a grandchild known to the lock only
    telling::the_root_takes_over_when_the_one_in_the_middle_dies
    spawn_kills::a_spawner_killed_at_any_step_leaves_a_table_that_fits_and_a_child_that_is_found
# Notices and the model
woken by what it can do nothing about
    telling::a_grandchild_is_known_without_waking_anybody
turns nobody asked for, up the whole tree
    telling::what_a_person_began_in_a_child_wakes_nobody
    telling::two_pods_that_answer_each_other_come_to_rest
a notice that is not in the history
    telling::a_finished_turn_wakes_the_spawner_and_is_told_once
a turn that starts from nowhere
    people::run_streams_and_prints_the_final_answer_and_ends_its_tree
a notice answered as if a person had spoken
    telling::t07_a_child_speaks_as_data_only
    wire::provider::conversation::a_message_of_a_pod_names_the_pod
no notice without a wake-up
    telling::notices_beyond_the_bound_are_counted_and_said
an idle spawner is not woken
    telling::a_finished_turn_wakes_the_spawner_and_is_told_once
notices lost when saving fails
    lessons::what_a_turn_could_not_save_is_heard_in_the_next_one
    words::notification::what_is_put_back_comes_first_and_stays_bounded
a notice shown twice
    telling::a_report_sent_twice_is_told_once
    telling::what_the_model_has_learned_by_itself_is_not_told_again
a notice during the last request is never shown
    telling::a_notice_that_comes_during_the_last_request_starts_the_next_turn
a burst makes many turns, or loses some silently
    lessons::sixty_four_reports_at_once_make_one_turn_and_none_is_lost
    lessons::three_hundred_reports_make_one_turn_and_what_did_not_fit_is_said
a late end of an old life takes its successor away
    telling::a_late_report_of_an_earlier_life_does_nothing_to_its_successor
    talking::a_pod_of_the_same_name_gets_no_message_meant_for_the_dead_one
two pods thank each other for ever
    telling::two_pods_that_answer_each_other_come_to_rest
# History, restore, persistence
a restarted spawner knows no children
    resuming::children_that_live_come_back_and_those_that_died_are_told_once
old output of a child is read again
    talking::the_cursor_of_one_reading_is_where_the_next_goes_on
an unknown shape of item skipped by a reader
    words::message::every_item_survives_a_round_trip_as_one_line
    readme::every_documented_item_and_event_is_understood
a history that is stale in mid-turn
    protocol::the_history_is_served_in_mid_turn_and_in_pages
a late client misses or doubles an item
    protocol::a_subscription_from_any_cursor_in_mid_turn_brings_each_item_once
the first input missing in the live view
    protocol::a_subscription_from_any_cursor_in_mid_turn_brings_each_item_once
a restored session shows nothing
    resuming::a_pod_goes_on_with_its_session_and_its_scope
an ended child is not visible any more
    talking::the_output_of_a_pod_that_has_ended_can_still_be_read
living pods cut from a list
    because lists of living pods are not cut: the table bounds how many there are
a torn line makes a session unusable
    store::session::an_unfinished_tail_is_cut_on_open
    store::session::a_damaged_line_is_named
    resuming::a_pod_killed_at_any_moment_of_a_turn_can_go_on
memory ahead of the disk
    lessons::no_tool_runs_whose_call_is_not_saved
    lessons::an_input_that_cannot_be_kept_is_refused_and_costs_no_other
    lessons::half_an_input_on_a_full_disk_costs_no_other
two ways to append
    because there is one, Session::append, and PodContext::log calls it for all that live together
a call without arguments saved as null
    wire::provider::reply::arguments_are_always_an_object
a chain of sums over the records
    because there is none
a turn without an answer taken for a finished one
    lessons::a_turn_without_an_answer_has_failed
    compaction::a_context_that_stays_too_small_ends_the_turn_and_is_asked_no_further
compaction between a call and its result
    words::compaction::compactions_keep_pairs_the_task_and_all_that_is_new
    history::a_working_day_with_compactions_and_kills_ends_with_the_right_answer
calls without results after a cancel or a crash
    resuming::a_pod_killed_at_any_moment_of_a_turn_can_go_on
    wire::provider::conversation::the_sides_speak_by_turns_and_every_call_is_answered
an empty turn stays after an early cancel
    because the history keeps what happened; a cancelled turn has its end and its reason
an input repeated or lost by a restart
    resuming::a_text_that_was_accepted_in_mid_turn_survives_a_kill
    lessons::what_a_turn_could_not_save_is_heard_in_the_next_one
a pod killed in mid-turn cannot be restored
    resuming::a_pod_killed_at_any_moment_of_a_turn_can_go_on
    resuming::a_pod_killed_before_any_write_of_a_turn_can_go_on
";

/// A case and what stands below it.
struct Case {
    what: &'static str,
    tests: Vec<&'static str>,
    reason: String,
}

fn cases(text: &'static str) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let Some(rest) = line.strip_prefix("    ") else {
            cases.push(Case { what: line, tests: Vec::new(), reason: String::new() });
            continue;
        };
        let case = cases.last_mut().unwrap();
        if rest.starts_with("because ") || !case.reason.is_empty() {
            case.reason.push_str(rest);
        } else {
            case.tests.push(rest);
        }
    }
    cases
}

/// The file in which a test of this name must stand.
fn file_of(module: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    match module.contains("::") {
        true => root.join("src").join(module.replace("::", "/")).with_extension("rs"),
        false => root.join("tests/it").join(module).with_extension("rs"),
    }
}

/// The tests of a file: functions below `#[test]`, with nothing but attributes and comments in between.
fn tests_of(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let (mut found, mut is_test) = (Vec::new(), false);
    for line in text.lines().map(str::trim_start) {
        if let Some(rest) = line.strip_prefix("fn ") {
            let name = rest.split(['(', '<']).next().unwrap();
            found.extend(is_test.then(|| name.to_owned()));
            is_test = false;
        } else if line == "#[test]" {
            is_test = true;
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            is_test = false;
        }
    }
    found
}

/// Whether there is a test of this name: `module::name` of this crate, or `floor::file::name` of the sources.
pub fn is_a_test(test: &str) -> bool {
    let (module, name) = test.rsplit_once("::").unwrap();
    tests_of(&file_of(module)).iter().any(|found| found == name)
}

fn check(cases: &[Case]) {
    let mut missing = Vec::new();
    for Case { what, tests, reason } in cases {
        assert!(tests.is_empty() != reason.is_empty(), "{what}: tests or a reason");
        for test in tests {
            if !is_a_test(test) {
                missing.push(format!("{what}: {test}"));
            }
        }
    }
    assert!(missing.is_empty(), "these tests do not exist: {missing:#?}");
}

#[test]
fn every_known_fault_has_its_tests_or_a_reason() {
    let counts = [("P", 18), ("S", 11), ("L", 13), ("U", 12), ("R", 11), ("T", 8)];
    let expected = counts.iter().flat_map(|(kind, count)| (1..=*count).map(move |n| format!("{kind}{n:02}")));
    let cases = cases(FAULTS);
    let ids: Vec<&str> = cases.iter().map(|case| &case.what[..3]).collect();
    assert_eq!(ids, expected.collect::<Vec<_>>());
    check(&cases);
}

#[test]
fn every_lesson_has_its_tests_or_a_reason() {
    let cases = cases(LESSONS);
    assert_eq!(cases.len(), 84, "a lesson is missing");
    check(&cases);
}
