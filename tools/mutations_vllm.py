"""Mutations of the vLLM adapter, tried by tests/vllm/test_mutations.py in the environment that has vLLM.

The tests of each are single ones where that will do: every engine start takes seconds.
"""
# ruff: noqa: E501 -- a table whose rows are exact text

from __future__ import annotations

from typing import Final

from tools.mutation import Mutation

SIDE: Final = "adapters/vllm/scheduler_side.py"
BOOKS: Final = "adapters/vllm/block_books.py"
VERDICTS: Final = "adapters/vllm/verdicts.py"
WORKER: Final = "adapters/vllm/worker_side.py"
RANKS: Final = "adapters/vllm/ranks.py"
CONTENTS: Final = "adapters/vllm/contents.py"
LAYOUT: Final = "adapters/vllm/layout.py"

LIFE: Final = "tests/vllm/test_life.py"
FAULTS: Final = "tests/vllm/test_guard_faults.py"
RUNNER: Final = "tests/vllm/test_runner_v1.py"
SETUPS: Final = "tests/vllm/test_setups.py"
IDENTITY: Final = "tests/vllm/test_content_identity.py"
HITS: Final = "tests/vllm/test_contents.py"
WRITES: Final = "tests/vllm/test_write_slots.py"
_SETUP: Final = f"{SETUPS}::test_healthy_traffic_is_unchanged_and_a_fault_has_one_victim"
_FAULT: Final = f"{RUNNER}::test_a_fault_ends_its_victim_or_is_refused"
TWINS: Final = f"{LIFE}::test_a_flagged_writer_takes_along_who_shares_its_step[2-async]"

UNWRITTEN: Final = "tests/vllm/test_unwritten.py"
_FIRST: Final = "test_a_request_that_starts_behind_what_it_was_given_is_ended"
_AGREE: Final = "test_whatever_two_engines_must_agree_on_is_in_the_domain"
GIVEN_BACK: Final = "tests/vllm/test_given_back.py::test_a_page_that_several_took_from_a_stale_entry_is_free_in_the_end"
CROSSING: Final = "tests/vllm/test_crossing.py"

VLLM_MUTATIONS: Final = (
    Mutation(
        name="vllm-cached-blocks-that-are-drawn", path=BOOKS, tests=(CROSSING,),
        old="if len(self._groups) == 1 and self.guard.may_take_over(pages):",
        new="if False:",
    ),
    Mutation(
        name="vllm-cached-blocks-that-were-not-evicted", path="kvguard/handover.py", tests=(CROSSING,),
        old="table.unclaimed(pages, unpublished=True)",
        new="table.unclaimed(pages)",
    ),
    Mutation(
        name="vllm-crossing-to-a-block-of-others", path=BOOKS, tests=(CROSSING,),
        old="            if page not in fresh:\n                return None\n",
        new="            pass\n",
    ),
    Mutation(
        name="vllm-crossing-beside-a-connector", path=BOOKS, tests=(CROSSING,),
        old="if crossed is None or len(crossed) != len(fresh):",
        new="if crossed is None:",
    ),
    Mutation(
        name="vllm-crossing-with-two-publications", path=BOOKS, tests=(CROSSING,),
        old="if len(entries) > 1 or block.block_hash != key or",
        new="if block.block_hash != key or",
    ),
    Mutation(
        name="vllm-crossing-with-a-publication-that-is-gone", path=BOOKS, tests=(CROSSING,),
        old="if len(entries) > 1 or block.block_hash != key or",
        new="if len(entries) > 1 or",
    ),
    Mutation(
        name="vllm-crossing-of-a-request-that-waits", path=BOOKS, tests=(CROSSING,),
        old="            row = self._row_of.get(name)\n",
        new="            row = self._row_of.get(name, 0)\n",
    ),
    Mutation(
        name="vllm-crossing-of-what-nobody-told", path=BOOKS, tests=(CROSSING,),
        old="                self._contents.learn(self._scheduler.requests[name], (column + 1) * self._managers[0].block_size)\n            published",
        new="                pass\n            published",
    ),
    Mutation(
        name="vllm-crossing-that-forgets-its-blocks", path=BOOKS, tests=(CROSSING,),
        old="                self._columns[names[row]][0] += 1\n",
        new="",
    ),
    Mutation(
        name="vllm-crossing-of-one-that-did-not-go-on", path=BOOKS, tests=(CROSSING,),
        old="        if self._scheduler.requests[names[turn]].num_computed_tokens != self._ends[turn] + repeats:\n            return None\n",
        new="",
    ),
    Mutation(
        name="vllm-publications-unrecorded", path=BOOKS, tests=(TWINS,),
        old="        self._published.setdefault(request, []).append(entry)\n",
        new="        pass\n",
    ),
    Mutation(
        name="vllm-late-loads-not-learnt", path=BOOKS,
        tests=(f"{LIFE}::test_kv_that_a_connector_loads_is_healthy[LateConnector-full-tags]",),
        old="            self._publish_of_waiting(scheduled)\n",
        new="            pass\n",
    ),
    Mutation(
        name="vllm-windows-not-dropped", path=SIDE, tests=(f"{_SETUP}[sliding-window]",),
        old="            if any(self._columns.get(request_id, ())):\n                self._shielded(lambda: self.guard.drop",
        new="            if False:\n                self._shielded(lambda: self.guard.drop",
    ),
    Mutation(
        name="vllm-frees-not-retired", path=SIDE, tests=(f"{_FAULT}[tag-only-freed-not-reused]",),
        old="            self._shielded(lambda: self._freed(blocks))\n",
        new="",
    ),
    Mutation(
        name="vllm-quarantine-not-released", path=SIDE,
        tests=(f"{LIFE}::test_a_reset_releases_a_block_that_was_given_back_in_quarantine",),
        old="            self._shielded(self._release_quarantine)\n",
        new="",
    ),
    Mutation(
        name="vllm-drafts-counted", path=BOOKS, tests=(f"{_SETUP}[ngram]",),
        old="        if drafts:\n            # Drafted",
        new="        if False:\n            # Drafted",
    ),
    Mutation(
        name="vllm-preempted-not-withheld", path=VERDICTS,
        tests=(f"{LIFE}::test_a_request_preempted_while_its_flagged_step_is_in_flight_emits_nothing",),
        old="        for name in judgement.withheld - messages.keys():\n",
        new="        for name in ():\n",
    ),
    Mutation(
        name="vllm-foreign-blocks-freed", path=VERDICTS, tests=(f"{_FAULT}[tag-only-use-after-free]",),
        old="                    if block.block_id in pages and listed[block.block_id] > block.ref_cnt:\n",
        new="                    if False:\n",
    ),
    Mutation(
        name="vllm-counted-blocks-kept-out", path=VERDICTS, tests=(f"{GIVEN_BACK}[3-sync]",),
        old=" and listed[block.block_id] > block.ref_cnt:\n",
        new=":\n",
    ),
    Mutation(
        name="vllm-blocks-taken-off-all-lists", path=VERDICTS, tests=("tests/vllm/test_given_back.py::test_of_several_lists_as_many_keep_a_page_as_vllm_has_counted",),
        old="                        listed[block.block_id] -= 1\n",
        new="                        pass\n",
    ),
    Mutation(
        name="vllm-flagged-leaves-when-books-fail", path=VERDICTS,
        tests=(f"{FAULTS}::test_a_row_flagged_while_the_guard_fails_is_ended_all_the_same",),
        old="            if flagged[row] and name in requests",
        new="            if False and name in requests",
    ),
    Mutation(
        name="vllm-worker-trouble-swallowed", path=WORKER,
        tests=(f"{FAULTS}::test_a_guard_that_fails_disarms_and_says_so[attention-backend]",),
        old="                result._kvguard_trouble = trouble\n",
        new="                pass\n",
    ),
    Mutation(
        name="vllm-ranks-of-which-one-was-clean", path=RANKS,
        tests=("tests/vllm/test_no_sync.py::test_what_one_rank_found_clean_is_not_what_all_found",),
        old=", view=None, clean=False)",
        new=")",
    ),
    Mutation(
        name="vllm-first-rank-speaks-alone", path=RANKS, tests=("tests/vllm/test_no_sync.py::test_the_worst_rank_speaks_for_all",),
        old="    place = weight.argmax(0)[None",
        new="    place = (weight * 0).argmax(0)[None",
    ),
    Mutation(
        name="vllm-abort-setting-ignored", path=SIDE, tests=(f"{FAULTS}::test_with_abort_nothing_unproven_leaves[books]",),
        old='        if not self.guard.armed and self.guard.config.on_guard_error == "abort":\n',
        new="        if False:\n",
    ),
    Mutation(
        name="vllm-last-publication-forgotten", path=BOOKS, tests=(f"{LIFE}::test_the_next_turn_of_a_talk_is_healthy",),
        old="        if name in self._published:\n",
        new="        if False:\n",
    ),
    Mutation(
        name="vllm-recomputed-blocks-unpublished", path=SIDE,
        tests=(f"{LIFE}::test_blocks_that_a_connector_failed_to_load_are_computed_again",),
        old="                if blocks[column].block_hash is not None:\n",
        new="                if False:\n",
    ),
    Mutation(
        name="vllm-lengths-not-given", path=WORKER, tests=(f"{WRITES}::test_groups_with_windows_and_without_are_both_checked",),
        old="lengths=lengths, place_is_row=True",
        new="lengths=None, place_is_row=True",
    ),
    Mutation(
        name="vllm-stale-lanes-judged", path=WORKER,
        tests=(f"{WRITES}::test_padding_is_covered_to_the_last_lane_that_vllm_hands_over",),
        old="slots[group].shape[0], group)",
        new="table.slot_mapping.gpu.shape[0], group)",
    ),
    Mutation(
        name="vllm-windows-unmarked", path=LAYOUT, tests=(f"{WRITES}::test_groups_with_windows_and_without_are_both_checked",),
        old="                windowed=type(spec).__name__ in WINDOWED_SPECS,\n",
        new="",
    ),
    Mutation(
        name="vllm-starts-not-said", path=BOOKS, tests=(f"{WRITES}::test_a_step_never_starts_later_than_the_device_may",),
        old="[0] * len(names), ends, starts)",
        new="[0] * len(names), ends)",
    ),
    Mutation(
        name="vllm-no-floors-behind-a-prompt", path=BOOKS, tests=(f"{WRITES}::test_where_a_step_starts_is_said_once_more_behind_a_prompt",),
        old="        self._floors_due = chunks\n",
        new="",
    ),
    Mutation(
        name="vllm-no-floors-where-blocks-come-ahead", path=BOOKS, tests=(f"{WRITES}::test_a_step_never_starts_later_than_the_device_may",),
        old="if not steady or self._speculates or self._floors_due:",
        new="if not steady or self._floors_due:",
    ),
    Mutation(
        name="vllm-drafts-in-flight-forgotten", path=BOOKS, tests=(f"{WRITES}::test_a_step_never_starts_later_than_the_device_may",),
        old="        if self._speculates:\n",
        new="        if False:\n",
    ),
    Mutation(
        name="vllm-wrong-writes-leave-when-books-fail", path=VERDICTS,
        tests=(f"{WRITES}::test_a_wrong_write_that_was_found_while_the_guard_failed_ends_its_writer",),
        old="            flagged[rows_flagged(verdicts.writes)] = True\n",
        new="            pass\n",
    ),
    Mutation(
        name="vllm-failed-rank-forgets-writes", path=RANKS,
        tests=(f"{WRITES}::test_a_rank_that_failed_takes_part_with_records_of_both_kinds",),
        old="reads + writes, RECORD_WORDS)",
        new="reads, RECORD_WORDS)",
    ),
    Mutation(
        name="vllm-salt-not-told", path=CONTENTS,
        tests=(f"{IDENTITY}::test_content_keys_tell_apart_what_vllm_does_and_nothing_that_it_does_not",),
        old="                tenant=request.cache_salt or None,\n",
        new="",
    ),
    Mutation(
        name="vllm-empty-salt-is-one", path=CONTENTS,
        tests=(f"{IDENTITY}::test_adapters_are_told_apart_by_name_and_by_path",),
        old="tenant=request.cache_salt or None",
        new="tenant=request.cache_salt",
    ),
    Mutation(
        name="vllm-adapter-not-told", path=CONTENTS,
        tests=(f"{IDENTITY}::test_adapters_are_told_apart_by_name_and_by_path",),
        old="                lora=None if lora is None else lora.lora_name,\n",
        new="",
    ),
    Mutation(
        name="vllm-adapter-path-not-told", path=CONTENTS,
        tests=(f"{IDENTITY}::test_adapters_are_told_apart_by_name_and_by_path",),
        old="    return \" \".join([*written, path])\n",
        new="    return \" \".join(written)\n",
    ),
    Mutation(
        name="vllm-images-not-told", path=CONTENTS,
        tests=(f"{IDENTITY}::test_content_keys_tell_apart_what_vllm_does_and_nothing_that_it_does_not",),
        old="            [*inputs_of(request, 0), *embeddings_of",
        new="            [*embeddings_of",
    ),
    Mutation(
        name="vllm-embeddings-not-told", path=CONTENTS,
        tests=(f"{IDENTITY}::test_a_prompt_of_embeddings_shares_its_common_beginning",),
        old=", *embeddings_of(request, self._hash_block_size)]",
        new="]",
    ),
    Mutation(
        name="vllm-adapter-files-not-looked-at", path=CONTENTS,
        tests=(f"{IDENTITY}::test_an_adapter_that_was_written_again_is_another_one",),
        old='        written.append(f"{file} {found.st_mtime_ns} {found.st_size}")\n',
        new="        pass\n",
    ),
    Mutation(
        name="vllm-adapter-settings-not-looked-at", path=CONTENTS,
        tests=(f"{IDENTITY}::test_an_adapter_that_was_written_again_is_another_one",),
        old='ADAPTER_FILES = ("adapter_config.json", ',
        new="ADAPTER_FILES = (",
    ),
    Mutation(
        name="vllm-readers-of-weights-begin-an-epoch", path=CONTENTS,
        tests=(f"{IDENTITY}::test_calls_that_change_weights_are_known_by_their_names",),
        old=" and not method.startswith(READING)\n",
        new="\n",
    ),
    *(
        Mutation(name=f"vllm-domain-without-{field}", path=CONTENTS, tests=(f"{IDENTITY}::{_AGREE}",), old=old, new=new)
        for field, old, new in (
            ("model", "        model=repr(tuple(None if value is None else str(value) for value in said)),\n", '        model="",\n'),
            ("revision", '("model", "revision", "quantization", "dtype")', '("model", "quantization", "dtype")'),
            ("layout", '        kv_layout=";".join(layouts),\n', '        kv_layout="",\n'),
            ("groups", "    for group in groups:\n", "    for group in groups[:1]:\n"),
            ("dtype", '        kv_dtype=str(getattr(cache, "cache_dtype", "")),\n', '        kv_dtype="",\n'),
        )
    ),
    Mutation(
        name="vllm-tokens-of-a-lookup-not-compared", path=SIDE, tests=(f"{UNWRITTEN}::test_a_lookup_that_finds_more_tokens_than_pages_is_not_believed[sync]",),
        old="            if covered < tokens and self.guard.vet_range(\n",
        new="            if False and self.guard.vet_range(\n",
    ),
    Mutation(
        name="vllm-stubborn-lookups", path=SIDE, tests=(f"{UNWRITTEN}::test_a_lookup_that_keeps_to_no_limit_finds_nothing[sync]",),
        old="                if limit >= held_to:\n",
        new="                if False:\n",
    ),
    Mutation(
        name="vllm-first-steps-not-looked-at", path=BOOKS, tests=(f"{UNWRITTEN}::{_FIRST}[sync]",),
        old="            guard.all_is_told()\n",
        new="            pass\n",
    ),
    Mutation(
        name="vllm-blocks-that-nobody-loads-are-there", path=SIDE, tests=(f"{UNWRITTEN}::{_FIRST}[sync]",),
        old="there = self._loads and (column + 1)",
        new="there = (column + 1)",
    ),
    Mutation(
        name="vllm-hashed-without-a-cache", path=BOOKS, tests=(f"{UNWRITTEN}::test_without_a_cache_nothing_is_hashed",),
        old="        if guard.wants_contents and manager.enable_caching:\n",
        new="        if guard.wants_contents:\n",
    ),
    Mutation(
        name="vllm-weights-not-watched", path=CONTENTS,
        tests=(f"{HITS}::test_new_weights_are_another_epoch[sync]",),
        old="                if changes_weights(name):\n                    self.epoch += 1\n",
        new="                pass\n",
    ),
    Mutation(
        name="vllm-sleep-not-watched", path=CONTENTS,
        tests=(f"{HITS}::test_sleep_that_discards_the_weights_is_another_epoch",),
        old="                self.epoch += level >= 2\n",
        new="                pass\n",
    ),
    Mutation(
        name="vllm-sessions-not-followed", path=CONTENTS,
        tests=(f"{IDENTITY}::test_a_session_is_what_its_next_input_makes_of_it",),
        old="                if known.tokens > kept:\n",
        new="                if False:\n",
    ),
    Mutation(
        name="vllm-images-of-sessions-not-told", path=CONTENTS,
        tests=(f"{IDENTITY}::test_a_session_is_what_its_next_input_makes_of_it",),
        old="                if len(session.mm_features) > known.inputs:\n",
        new="                if False:\n",
    ),
    Mutation(
        name="vllm-published-under-old-weights", path=BOOKS,
        tests=(f"{HITS}::test_new_weights_are_another_epoch[sync]",),
        old="            if not self._contents.current(request):\n",
        new="            if False:\n",
    ),
    Mutation(
        name="vllm-waiting-requests-kept", path=BOOKS,
        tests=(f"{HITS}::test_a_request_that_leaves_while_it_waits_is_finished",),
        old="            self._contents.forget(name)\n",
        new="            pass\n",
    ),
    Mutation(
        name="vllm-tokens-not-learnt", path=BOOKS,
        tests=(f"{HITS}::test_streaming_sessions_are_healthy[sync]",),
        old="                    self._contents.learn(self._scheduler.requests[name], end)\n",
        new="                    pass\n",
    ),
    Mutation(
        name="vllm-hits-of-this-pass-not-compared", path=SIDE,
        tests=(f"{HITS}::test_hits_on_what_is_published_in_the_same_pass_are_compared[sync]",),
        old="                    if not self._may_take_promised(request, group, column, page):\n",
        new="                    if False:\n",
    ),
    Mutation(
        name="vllm-good-prefix-not-kept", path=SIDE,
        tests=(f"{HITS}::test_a_refused_hit_keeps_the_good_prefix",),
        old="min(max_cache_hit_length, limit)",
        new="min(max_cache_hit_length, 0 * limit)",
    ),
    Mutation(
        name="vllm-lookups-counted-twice", path=SIDE,
        tests=(f"{HITS}::test_a_refused_hit_keeps_the_good_prefix[keys]",),
        old="            manager.log_stats = counting\n",
        new="            pass\n",
    ),
    Mutation(
        name="vllm-refused-entry-kept", path=SIDE,
        tests=(f"{HITS}::test_a_refused_hit_keeps_the_good_prefix[keys]",),
        old="                self._drop_cache_entry(found[1], found[2])\n",
        new="                pass\n",
    ),
)  # fmt: skip
