"""Mutations of the SGLang adapter, tried by tests/sglang/test_mutations.py in the environment that has SGLang.

The tests of each are single ones where that will do: every run imports SGLang and starts a scheduler.
"""
# ruff: noqa: E501 -- a table whose rows are exact text

from __future__ import annotations

from typing import Final

from tools.mutation import Mutation

AUDIT: Final = "adapters/sglang/audit.py"
GUARD: Final = "adapters/sglang/scheduler_guard.py"
PAGES: Final = "adapters/sglang/pages.py"
PLUGIN: Final = "adapters/sglang/plugin.py"
STEPS: Final = "adapters/sglang/steps.py"
PUBLISH: Final = "kernels/publish_row/torch_op.py"

BOOKS: Final = "tests/sglang/test_books.py"
LIFE: Final = "tests/sglang/test_life.py"
VICTIMS: Final = "tests/sglang/test_victims.py"
FAULTS: Final = "tests/sglang/test_guard_faults.py"
_FAULT: Final = f"{VICTIMS}::test_a_fault_ends_its_victim_and_nobody_else"
_TREE: Final = f"{VICTIMS}::test_a_page_of_the_tree_that_is_given_away"
_WRITE: Final = "tests/sglang/test_write_slots.py::test_a_wild_write_ends_its_writer_and_nobody_else"
_PLAIN: Final = f"{LIFE}::test_plain_traffic"

CAMPAIGN: Final = "tests/sglang/test_key_campaign.py"
KEY_WATCH: Final = "fault_injection/targets/sglang_key_watch.py"

CONTENTS: Final = "tests/sglang/test_contents.py"
CONTENTS_OF: Final = "adapters/sglang/contents.py"
_COLLISION: Final = f"{CONTENTS}::test_a_collision_ends_its_first_victim_and_the_next_ones_compute"
_WEIGHTS: Final = f"{CONTENTS}::test_new_weights_find_nothing_that_was_computed_with_old_ones"

SGLANG_MUTATIONS: Final = (
    Mutation(
        name="sglang-free-hook-dropped", path=PLUGIN, tests=(f"{_FAULT}[freed-not-reused-16-normal]",),
        old='        (f"{_PAGED}_release_page_ids", pages.around_release_page_ids, "around"),\n',
        new="",
    ),
    Mutation(
        name="sglang-publication-drops-its-error", path=PUBLISH, tests=(BOOKS,),
        old="    error = of_row - before - terms.sum()\n",
        new="    error = torch.zeros_like(of_row)\n",
    ),
    Mutation(
        name="sglang-adopted-prefix-ignored", path=PAGES, tests=(f"{_PLAIN}[normal-16]",),
        old="                parts.append(prefix[-1:] if prefix.shape[0] else books.no_prefix)\n",
        new="                parts.append(books.no_prefix)\n",
    ),
    Mutation(
        name="sglang-victim-frees-by-its-row", path=PAGES, tests=(f"{_FAULT}[stale-row-16-normal]",),
        old="    if row in guard.condemned_rows:\n        with guard.contained():\n",
        new="    if False:\n        with guard.contained():\n",
    ),
    Mutation(
        name="sglang-foreign-pages-given-back", path=AUDIT, tests=(f"{_FAULT}[stale-row-16-normal]",),
        old="            self._give_back(self.books.page_owner >> ROW_SHIFT == row + 1)\n",
        new="            self.freeing = ANYBODY\n            self._give_back(self.books.page_owner > 0)\n",
    ),
    Mutation(
        name="sglang-victim-enters-the-tree", path=GUARD, tests=(f"{_FAULT}[stale-row-16-normal]",),
        old="        req.skip_radix_cache_insert = True\n",
        new="",
    ),
    Mutation(
        name="sglang-token-of-the-step-sent", path=GUARD, tests=(f"{_FAULT}[stale-row-16-normal]", f"{_FAULT}[null-entry-16-normal]"),
        old="            req.to_finish, req.finished_len = reason, len(req.output_ids)\n",
        new="            req.to_finish, req.finished_len = reason, len(req.output_ids) + 1\n",
    ),
    Mutation(
        name="sglang-ranks-keep-to-themselves", path=GUARD, tests=("tests/sglang/test_tp.py::test_a_fault_on_one_rank_is_everyones[normal]",),
        old="                self.combine(self._pending.words.words, self._pending.words.verdicts)\n",
        new="                pass\n",
    ),
    Mutation(
        name="sglang-failed-rank-counts-for-nothing", path=AUDIT, tests=("tests/sglang/test_tp.py::test_a_fault_on_one_rank_is_everyones[normal]",),
        old="        shared = torch.where(shared < 0, NO_VERDICT, shared)\n",
        new="",
    ),
    Mutation(
        name="sglang-bad-hits-not-cut", path=AUDIT, tests=(f"{_TREE}[16-normal]",),
        old="        return bad[0] * size if bad else length\n",
        new="        return length\n",
    ),
    Mutation(
        name="sglang-cache-not-emptied-when-idle", path=STEPS, tests=(f"{_FAULT}[null-entry-16-normal]",),
        old="        scheduler.flush_cache(empty_cache=False)\n",
        new="        pass\n",
    ),
    Mutation(
        name="sglang-events-not-read", path=GUARD, tests=(f"{_FAULT}[use-after-free-16-normal]",),
        old="            if not code:\n",
        new="            if True:\n",
    ),
    Mutation(
        name="sglang-unexplained-rows-go-on", path=GUARD, tests=(f"{FAULTS}::test_a_fault_while_a_victim_is_being_ended",),
        old="                self._end_unexplained(batch",
        new="                False and self._end_unexplained(batch",
    ),
    Mutation(
        name="sglang-abort-setting-ignored", path=GUARD, tests=(f"{FAULTS}::test_with_abort_nothing_unproven_leaves[verify-normal]",),
        old='        if not self.guard.armed and self.guard.config.on_guard_error == "abort":\n',
        new="        if False:\n",
    ),
    Mutation(
        name="sglang-off-hooks-all-the-same", path=PLUGIN, tests=("tests/sglang/test_off.py::test_nothing_is_touched_without_a_level[off]",),
        old="    if config.is_off:\n        return\n",
        new="",
    ),
    Mutation(
        name="sglang-ids-that-begin-alike", path=GUARD, tests=("tests/sglang/test_attacks.py::test_requests_whose_ids_begin_like_the_victims_go_on",),
        old="        if self.scheduler.chunked_req is req:\n",
        new="        if True:\n",
    ),
    Mutation(
        name="sglang-hits-seen-at-page-starts", path=AUDIT, tests=("tests/sglang/test_attacks.py::test_a_bad_slot_in_mid_page_of_the_tree_has_one_victim",),
        old="(self._sound(pages, None) & whole)",
        new="self._sound(pages, None)",
    ),
    Mutation(
        name="sglang-writes-not-looked-at", path=GUARD, tests=(f"{_WRITE}[tree-tokens]",),
        old="                writes=words.writes if self._checks_writes else None,\n",
        new="                writes=None,\n",
    ),
    Mutation(
        name="sglang-slots-as-they-are-by-then", path=PAGES, tests=(f"{_WRITE}[another's-tokens]",),
        old="            slots.clone(),\n",
        new="            slots,\n",
    ),
    Mutation(
        name="sglang-writers-not-spoiled", path="kernels/verify_rows/torch_op.py", tests=(f"{_WRITE}[swapped-tokens]",),
        old="torch.where(writes[:batch, FLAGS] != 0, FLAG_WRITE, 0)",
        new="0",
    ),
    Mutation(
        name="sglang-own-content-not-compared", path=PAGES, tests=(f"{_COLLISION}[16-normal]",),
        old="            content = _own_contents(guard, batch.reqs, fresh, prefixes)\n",
        new="            pass\n",
    ),
    Mutation(
        name="sglang-salt-as-the-engine-has-it", path=CONTENTS_OF, tests=(f"{CONTENTS}::test_a_tenant_whose_salt_got_lost_reads_nobody_elses_pages[16-normal]",),
        old='        setattr(req, SAID, (kwargs.get("extra_key"), kwargs.get("cache_salt")))\n',
        new="        pass\n",
    ),
    Mutation(
        name="sglang-domains-not-named", path=CONTENTS_OF, tests=(f"{CONTENTS}::test_a_tenant_whose_salt_got_lost_reads_nobody_elses_pages[16-normal]",),
        old="            self._domains[domain] = None\n",
        new="            pass\n",
    ),
    Mutation(
        name="sglang-answers-not-learnt", path=CONTENTS_OF, tests=(f"{CONTENTS}::test_healthy_tenants_hit_what_is_their_own[16-normal]",),
        old="            if known < stop * page_size:\n",
        new="            if False:\n",
    ),
    Mutation(
        name="sglang-later-hits-not-compared", path=AUDIT, tests=(f"{_COLLISION}[16-normal]",),
        old="self._own_length(params.req, path[: self._sound_length(path)])",
        new="self._sound_length(path)",
    ),
    Mutation(
        name="sglang-wrong-records-not-reported", path=GUARD, tests=(f"{CONTENTS}::test_a_record_that_is_put_on_other_pages_ends_its_request[16-normal]",),
        old="                found = self._content_event(operation, page, at, enforce)\n",
        new="                found = None\n",
    ),
    Mutation(
        name="sglang-contents-not-looked-for", path="adapters/sglang/reports.py", tests=(f"{_COLLISION}[16-normal]",),
        old="        if violation is not None:\n",
        new="        if False:\n",
    ),
    Mutation(
        name="sglang-adapter-left-out-of-the-domain", path=CONTENTS_OF, tests=("tests/sglang/test_lora.py::test_adapters_share_no_pages_and_a_key_that_is_an_adapters_id_finds_nothing_of_it[normal]",),
        old="            lora=req.lora_id,\n",
        new="            lora=None,\n",
    ),
    Mutation(
        name="sglang-campaign-compares-no-tenants", path=KEY_WATCH, tests=(f"{CAMPAIGN}::test_a_page_is_ones_own_by_what_was_written_into_it",),
        old="        if (mine.tenant, mine.lora) != (theirs.tenant, theirs.lora):\n",
        new="        if False:\n",
    ),
    Mutation(
        name="sglang-campaign-takes-freed-pages-for-sound", path=KEY_WATCH, tests=(f"{CAMPAIGN}::test_a_page_is_ones_own_by_what_was_written_into_it",),
        old="        if is_free:\n",
        new="        if False:\n",
    ),
    Mutation(
        name="sglang-campaign-switches-no-proof-off", path="fault_injection/targets/sglang_runs.py", tests=(f"{CAMPAIGN}::test_with_all_proofs_off_nothing_is_found",),
        old="        if engine.guard is not None and self.proofs in ALONE:\n",
        new="        if False:\n",
    ),
    Mutation(
        name="sglang-campaign-keeps-the-cache-over-new-weights", path=KEY_WATCH, tests=(f"{CAMPAIGN}::test_clean_runs_are_clean_and_contain_what_they_must",),
        old='load_format="auto", flush_cache=True)',
        new='load_format="auto", flush_cache=False)',
    ),
    Mutation(
        name="sglang-contents-blamed-on-a-later-chunk", path="adapters/sglang/reports.py", tests=(f"{CONTENTS}::test_a_collision_at_the_start_of_a_prompt_in_chunks_is_named[16-overlap]",),
        old="where.column if where.found else None",
        new="0 if where.found else None",
    ),
    Mutation(
        name="sglang-hits-of-old-weights", path=GUARD, tests=(f"{_WEIGHTS}[kept-normal]",),
        old="            self.outdated = self.outdated or any(\n",
        new="            self.outdated = False and any(\n",
    ),
    Mutation(
        name="sglang-empty-cache-outdated", path=GUARD, tests=("tests/sglang/test_paused_update.py",),
        old="            self.outdated = self.outdated or any(\n",
        new="            self.outdated = True or any(\n",
    ),
    Mutation(
        name="sglang-hashed-without-a-tree", path=GUARD, tests=(f"{CONTENTS}::test_without_a_tree_nothing_is_hashed",),
        old=" and not scheduler.tree_cache.disable:\n",
        new=":\n",
    ),
    *(
        Mutation(name=f"sglang-domain-without-{field}", path=CONTENTS_OF, tests=("tests/sglang/test_domain.py",), old=old, new=new)
        for field, old, new in (
            ("model", "        model=repr(tuple(None if value is None else str(value) for value in said)),\n", '        model="",\n'),
            ("layout", '        kv_layout=",".join(layout),\n', '        kv_layout="",\n'),
            ("page-size", ', f"page_size={scheduler.token_to_kv_pool_allocator.page_size}"]', "]"),
            ("dtype", """        kv_dtype=f"{getattr(server, 'kv_cache_dtype', '')} {getattr(pool, 'dtype', '')}",\n""", '        kv_dtype="",\n'),
        )
    ),
)  # fmt: skip
