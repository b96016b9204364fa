"""The mutations of tools/mutate.py: what is taken out of the guard, and the quickest tests that must notice.

Each `old` is exact text that occurs once in its file; `new` takes its place. One that no longer matches is an error, so
whoever changes such a line looks after its mutation as well.
"""
# ruff: noqa: E501 -- a table whose rows are exact text

from __future__ import annotations

from typing import Final

from tools.mutation import Mutation, of_file
from tools.mutations_contents import CONTENT_MUTATIONS
from tools.mutations_kernels import KERNEL_MUTATIONS
from tools.mutations_native import NATIVE_MUTATIONS
from tools.mutations_scenarios import SCENARIO_MUTATIONS
from tools.mutations_steps import STEP_MUTATIONS

CORE: Final = "tests/core"
AGAIN: Final = f"{CORE}/test_step_again.py"
CONTROL: Final = f"{CORE}/test_guard_control_plane.py"
TAG: Final = f"{CORE}/test_guard_tag_proof.py"
PROMISES: Final = f"{CORE}/test_promises.py"
IN_FLIGHT: Final = f"{CORE}/test_steps_in_flight.py"
STEPS: Final = f"{CORE}/test_steps_and_messages.py"
POLICY: Final = f"{CORE}/test_policy.py"
REPORT: Final = f"{CORE}/test_report.py"
LEDGER: Final = f"{CORE}/test_ledger.py"
TAGS: Final = f"{CORE}/test_tags.py"
TABLE: Final = f"{CORE}/test_page_table.py"
GENERIC: Final = f"{CORE}/test_generic_adapter.py"
GIVEN_UP: Final = f"{CORE}/test_pages_given_up.py"
RESET: Final = f"{CORE}/test_reset.py"
REARMING: Final = f"{CORE}/test_rearming.py"
WRAPPED: Final = f"{CORE}/test_guard_allocator.py"
WRAPPED_ODD: Final = f"{CORE}/test_guard_allocator_odd.py"
DEVICE: Final = f"{CORE}/test_device_pages.py"
DEVICE_ODD: Final = f"{CORE}/test_device_pages_odd.py"
SHORT: Final = f"{CORE}/test_short_ways.py"
WRITES: Final = f"{CORE}/test_write_slots.py"
FLOORS: Final = f"{CORE}/test_write_floors.py"
BUFFER: Final = f"{CORE}/test_step_buffer.py"
PLAN: Final = f"{CORE}/test_plan.py"
FAMILIES: Final = f"{CORE}/test_plan_families.py"
FACTORIES: Final = "tests/campaign/test_pytest_factories.py"
FUSED: Final = f"{CORE}/test_fused.py"
STAGING: Final = f"{CORE}/test_staging.py"
TRANSFER: Final = f"{CORE}/test_transfers.py"
RECEIVED: Final = f"{CORE}/test_transfers_received.py"
COMPLETE: Final = f"{CORE}/test_transfers_complete.py"
MISUSED: Final = f"{CORE}/test_transfers_misused.py"

MUTATIONS: Final[tuple[Mutation, ...]] = (
    *of_file(
        "kvguard/judge.py",
        ("the rows whose writes were flagged", WRITES, "        flagged = sorted({*flagged, *rows_flagged(writes)})\n", "        pass\n"),
        ("what a writer that is ended has published", WRITES, "mismatches = _mismatches(books, state) if state.alive else []\n        return", "mismatches: list[_Mismatch] = []\n        return"),
        ("the padding that was flagged", WRITES, "        padding = padding_flagged(writes)\n", "        pass\n"),
        ("padding that stops the engine", WRITES, "halt = judgement.halt or any(violation.action is Action.HALTED", "halt = judgement.halt or any(violation.action is None"),
        ("the abort", TAG, "        if state.alive:\n            aborts.append(_abort(books, state", "        if False:\n            aborts.append(_abort(books, state"),
        ("the abort's aim: a successor of the same name", IN_FLIGHT, "        if state.alive:\n            aborts.append(_abort(books, state", "        if True:\n            aborts.append(_abort(books, state"),
        ("the withholding", TAG, "withheld=frozenset(pending.states[row].id for row in unproven)", "withheld=frozenset()"),
        ("the withholding of later steps in flight", IN_FLIGHT, "pending.condemned.update(pending.rows_of(state))", "pass"),
        ("the quarantine", TAG, "kept_out = books.quarantine_page(mismatch.pool, mismatch.page)", "kept_out = False"),
        ("the eviction of lost pages", TAG, "evict.update((books.tables[m.pool].spec.name, m.page) for m in mismatches)", "pass"),
        ("the dependency rule", PROMISES, "        _condemn_dependents(books, state, violation, violations, aborts, evict)\n", ""),
        ("dependents of dependents", PROMISES, "chain.append((dependent, violation))", "pass"),
        ("dependents that left with a step in flight", IN_FLIGHT, "        pending.incarnations[row] == incarnation\n", "        False\n"),
        ("promises broken while their reader is in flight", IN_FLIGHT, "        if promise.kept is False:\n            # Broken after", "        if False:\n            # Broken after"),
        ("the breaking of a flagged row's promises", PROMISES, "kept=row not in unproven and not promise.writer.stalled", "kept=True"),
        ("the stalling of a request that was only observed", PROMISES, "pending.states[row].stalled = True", "pass"),
        ("the progress of a stalled request", AGAIN, "if unproven and row in unproven or state.stalled:", "if unproven and row in unproven:"),
        ("progress counted for the same incarnation only", AGAIN, "if state.incarnation == batch.incarnations[row]:", "if True:"),
        ("the check that a verdict was written", STEPS, "if (flags == NOT_CHECKED).any():", "if False:"),
        ("the check that every row has a verdict", STEPS, "if shape != (len(books.tables), rows):", "if False:"),
        ("foreign pages", TAG, "setdefault(books.tables[mismatch.pool].spec.name, []).append(mismatch.page)", "setdefault(books.tables[mismatch.pool].spec.name, [])"),
        ("lost pages that the request gives back itself", TAG, "if mismatch.found != VACANT and not holders - {state.id}:", "if False:"),
        ("lost pages that somebody else holds", TAG, "if mismatch.found != VACANT and not holders - {state.id}:", "if mismatch.found != VACANT:"),
    ),
    *of_file(
        "kvguard/page_table.py",
        ("the check of publications", CONTROL, "record is None or record.tag != tag or tag", "record is None or tag"),
        ("the tag change at free", TABLE, "record.tag = self.changes[page] = VACANT", "self.changes[page] = VACANT"),
        ("the tag change at free, on the device", TAG, "record.tag = self.changes[page] = VACANT", "record.tag = VACANT"),
        ("the tag change at allocation", TAG, "tag = record.tag = changes[page] = take()", "tag = record.tag = changes[page] = record.tag or take()"),
        ("the tag change at allocation, on the device", STEPS, "tag = record.tag = changes[page] = take()", "tag = record.tag = take()"),
        ("the tag change at a revocation", RESET, "record.tag = self.changes[page] = self._tags.take()\n", "pass\n"),
        ("the writer of a revoked page", WRITES, "        self.writers.pop(page, None)\n        self._note(", "        self._note("),
        ("the change that takes a page from its writer", FLOORS, "        self.changes[page] = self.record(page).tag\n        self.writers", "        self.writers"),
        ("the tag change at a revocation, on the device", RESET, "record.tag = self.changes[page] = self._tags.take()\n", "record.tag = self._tags.take()\n"),
        ("the one time that a page may be given back after a reset", RESET, "if record.tag == VACANT and record.reset_free:", "if record.tag == VACANT:"),
        ("what a page was published as before", TABLE, "record.former = (record.publication, record.tag)", "pass"),
        ("the key that a former publication answers to", TABLE, "if record.former is not None and record.former[0] == key:", "if record.former is not None:"),
        ("the check of double allocation", CONTROL, "(Kind.DOUBLE_ALLOCATION if self.record(page).holders else None)", "None"),
        ("the check of double free", CONTROL, "return Kind.DOUBLE_FREE if record.was_used else Kind.FREE_UNOWNED", "return None"),
        ("the check of a free by a stranger", CONTROL, "            return Kind.FREE_UNOWNED\n        return", "            return None\n        return"),
        ("the check of a free while held", CONTROL, "return Kind.FREE_WHILE_HELD if record.holders - {by} else None", "return None"),
        ("the check of hits on vacant pages", CONTROL, "        if record.tag == VACANT:\n            return Kind.ADOPT_VACANT\n", ""),
        ("the publication key check", CONTROL, "return None if record.publication == key and key is not None else Kind.ADOPT_STALE", "return None"),
        ("the check of the null page", CONTROL, "return Kind.NULL_PAGE_USED if page == self.spec.null_page else None", "return None"),
        ("the check of the page range", CONTROL, "if not 0 <= page < self.spec.num_pages:", "if False:"),
        ("the closer look at pages that somebody holds", CONTROL, "if record.holders or record.promise is not None or page == null_page:", "if record.promise is not None or page == null_page:"),
        ("the closer look at pages that are still promised", TABLE, "if record.holders or record.promise is not None or page == null_page:", "if record.holders or page == null_page:"),
        ("the closer look at pages out of range", CONTROL, "            if not 0 <= page < num_pages:\n                break\n", ""),
        ("the closer look at the null page", CONTROL, "if record.holders or record.promise is not None or page == null_page:", "if record.holders or record.promise is not None:"),
        ("the closer look at a vacant page that is given back", CONTROL, "record is None or record.tag == VACANT or record.promise", "record is None or record.promise"),
        ("the closer look at a promised page that is given back", TABLE, "record.tag == VACANT or record.promise is not None or", "record.tag == VACANT or"),
        ("the closer look at a held page that is given back", CONTROL, "            if record.holders and (by not in record.holders or len(record.holders) > 1):\n                return place\n", ""),
        ("the closer look at held pages that are vetted", SHORT, " or (record is not None and record.holders):", ":"),
        ("the closer look at the null page that is given back", TABLE, " or page == self.spec.null_page:\n", ":\n"),
        ("the end of a broken promise's publication", TABLE, "            record.publication = record.content = None\n            self._note(promise.page, \"revoked\"", "            self._note(promise.page, \"revoked\""),
    ),
    *of_file(
        "kvguard/bookkeeping.py",
        ("the quarantine at adoption", TAG, "in books.quarantine and books.enforcing:\n                break", "in ():\n                break"),
        ("the list of who trusts a promise", PROMISES, "promise.dependents.append((state, state.incarnation))", "pass"),
        ("the list of what a request trusts", PROMISES, "state.depends.append(promise)", "pass"),
        ("the expectation that no page meets", TAG, "tag = table.promised_tag(page, key) if problem is not None", "tag = table.tag(page) if problem is not None"),
        ("tokens taken back by rewind, which may be written again", WRITES, "            state.floor = tokens - tokens % books.page_size_max\n", ""),
        ("the floors of a batch after a rewind", WRITES, "                books.batch.floors = None\n", "                pass\n"),
        ("promises taken back by rewind", IN_FLIGHT, "            if promise.need_tokens > tokens:\n                self._books.settle(promise, kept=False)", "            pass"),
        ("the verified length after a rewind", IN_FLIGHT, "state.computed = min(state.computed, tokens)", "pass"),
        ("the shift of steps in flight behind rejected tokens", IN_FLIGHT, "rejected = max(0, state.computed - tokens)", "rejected = 0"),
        ("steps of a former life, which no rewind moves", IN_FLIGHT, "                if pending.incarnations[row] != state.incarnation:\n                    continue\n", ""),
        ("the progress that a truncation takes back", GIVEN_UP, "self._move_back(state, columns * size", "(lambda *_, **__: None)(state, columns * size"),
        ("the word of a page that its writer gave up", FLOORS, "                table.take_writer(page)\n", "                pass\n"),
        ("the word of a page that an adopter gave up", FLOORS, "if tag not in state.adopted and table", "if table"),
        ("promises on pages that their writer gave up", GIVEN_UP, "                if promise.pool == table.spec.name and (promise.page, promise.tag) in gone:\n", "                if False:\n"),
        ("promises on other pages than those given up", GIVEN_UP, "                if promise.pool == table.spec.name and (promise.page, promise.tag) in gone:\n", "                if True:\n"),
        ("the end of trust in pages that were given up", GIVEN_UP, "            self._stop_depending(state, table.spec.name, gone)\n", ""),
        ("the trust in other pages than those given up", GIVEN_UP, "if promise.pool == pool and (promise.page, promise.tag) in gone and", "if"),
        ("the trust of a step in flight in pages that were given up", GIVEN_UP, " and promise not in read:", ":"),
        ("the check that a condemned request publishes nothing", PROMISES, "        if state.condemned is not None and not state.observed:\n            return False\n", ""),
        ("the word of a stalled writer", REARMING, "if state.stalled or need >", "if need >"),
        ("the fresh start of a stalled writer", REARMING, "        state.stalled = False\n", ""),
        ("publications that change nothing", PROMISES, "again = record.publication == key", "again = False"),
        ("the length that a publication without page size needs", PROMISES, "        if tokens is None and size is None:\n", "        if False:\n"),
        ("the length that a publication is complete at", PROMISES, "need = tokens if tokens is not None else", "need ="),
        ("the check that ids are strings", CONTROL, "        if not isinstance(request, str):\n", "        if False:\n"),
        ("the check of page ids at adoption", CONTROL, "pages = page_ids([page for _, page in hits])", "pages = [page for _, page in hits]"),
        ("pages let go of by a preempted request", IN_FLIGHT, "        self._books.release_all(state)\n        self._restart(state)\n        state.preempted", "        self._restart(state)\n        state.preempted"),
    ),
    *of_file(
        "kvguard/handover.py",
        ("the quarantine at allocation", TAG, "in books.quarantine and books.enforcing:\n            return False", "in ():\n            return False"),
        ("the quarantine at free", TAG, "in books.quarantine and books.enforcing:\n                result", "in ():\n                result"),
        ("the refusal that the report claims", CONTROL, "return self._books.control_violation(problem, index, page, request).action is not Action.OBSERVED", "self._books.control_violation(problem, index, page, request)\n        return self._books.enforcing"),
        ("promises kept by a step in flight", IN_FLIGHT, "if promise is not None and promise.step is None:", "if promise is not None:"),
        ("the leave to give pages back after a reset", RESET, "                table.record(page).reset_free = True\n", ""),
        ("the end of that leave", RESET, "table.record(page).reset_free = False", "pass"),
        ("the hold on pages that new weights made invalid", RESET, "self._revoke(table.revoke(page))", "self._revoke(table.retire(page, None))"),
        ("the check of page ids at allocation", CONTROL, "        pages = page_ids(pages)\n        state = self._books.state(request)\n", "        state = self._books.state(request)\n"),
        ("the check of page ids at many allocations", SHORT, "        pages = page_ids(pages)\n        if len(requests)", "        if len(requests)"),
        ("the check of page ids at free", CONTROL, "        pages = page_ids(pages)\n        books = self._books\n        index = books.index(pool)\n        table =", "        books = self._books\n        index = books.index(pool)\n        table ="),
        ("the quarantine at allocation of pages that nobody holds", TAG, "if not (books.quarantine and books.enforcing):", "if True:"),
        ("the quarantine of vetted pages", SHORT, "if not books.quarantine and table.may_be_handed_out(pages):", "if table.may_be_handed_out(pages):"),
        ("the quarantine of pages given back that nobody holds", TAG, "done = 0 if books.quarantine else table.retire_idle(pages, by)", "done = table.retire_idle(pages, by)"),
        ("the note that ledgers changed", SHORT, "        books.rows.touched.update(states)\n", ""),
        ("the quarantine of what may be handed out", SHORT, "return not books.quarantine.pages and table", "return table"),
    ),
    *of_file(
        "kvguard/books.py",
        ("promises that a step in flight would keep, taken back by rewind", IN_FLIGHT, "return scheduled + writer.promises", "return list(writer.promises)"),
        ("the check that page ids are integers", CONTROL, "    if all(isinstance(page, (int, np.integer)) for page in pages):\n", "    if True:\n"),
        ("the halt of a refused operation", CONTROL, "        if violation.action is Action.HALTED:\n            raise", "        if False:\n            raise"),
        ("content only for those who asked", REPORT, "if self.config.report_content and self.content_of", "if self.content_of"),
        ("the abort though the report fails", REPORT, "except Exception as error:\n                # Losing", "except ZeroDivisionError as error:\n                # Losing"),
        ("the breaker's fall back to observing", POLICY, "return not (self.breaker.tripped and self.config.breaker_action == \"observe\")", "return True"),
    ),
    *of_file(
        "kvguard/guard.py",
        ("the order of verdicts", STEPS, "if verdicts.step != first:", "if False:"),
        ("the check of the thread", STEPS, "elif self._thread != thread:", "elif False:"),
        ("the disarming", STEPS, "        self.armed = False\n        emit(", "        emit("),
        ("the heartbeat", STEPS, "alive=in_flight <= books.config.steps_in_flight_max", "alive=True"),
        ("promises of an abandoned step", IN_FLIGHT, "        for _, promise in pending.promises:\n            books.settle(promise, kept=False)\n", ""),
        ("later steps of an abandoned one's requests", IN_FLIGHT, "                if other.step > step:\n", "                if False:\n"),
        ("earlier steps of an abandoned one's requests", IN_FLIGHT, "                if other.step > step:\n", "                if True:\n"),
        ("later lives of an abandoned step's requests", IN_FLIGHT, "if state.incarnation != pending.incarnations[row] or not state.alive:", "if False:"),
    ),
    *of_file(
        "kvguard/policy.py",
        ("the quarantine's bound", POLICY, "        if self.full:\n", "        if False:\n"),
        ("the breaker's window", POLICY, "while now - self._times[0] > self._window_s:", "while False:"),
        ("the breaker", POLICY, "        self.tripped = True\n        return True", "        return True"),
    ),
    *of_file(
        "kvguard/ledger.py",
        ("the terms of several new columns", SHORT, "            terms = mix_array(", "            terms = 0 * mix_array("),
        ("the gaps among several new columns", SHORT, "int(terms[values != VACANT].sum(dtype=np.uint64))", "int(terms.sum(dtype=np.uint64))"),
        ("the digest of a dropped page", LEDGER, "                digest -= mix(self._key, column, self._tags[column])\n                self._pages", "                self._pages"),
        ("the extents of a dropped page", LEDGER, "            self._extents = extents\n", "            pass\n"),
        ("the cost of a drop, which is what it drops", LEDGER, "            self._extents = extents\n", "            self._rebuild()\n"),
    ),
    *of_file("kvguard/tags.py", ("a tag of its own for each allocation", TAGS, "self._next = tag + 1", "self._next = tag")),
    *of_file(
        "kvguard/requests.py",
        ("the fresh start of a new incarnation", IN_FLIGHT, "        state.computed = state.floor = state.loaded = 0\n", "        state.floor = state.loaded = 0\n"),
        ("a writer word for each incarnation", WRITES, "state.incarnation % WRITERS + 1", "1"),
    ),
    *of_file(
        "kvguard/handover.py",
        ("the writer of an allocated page", WRITES, "                    writers[page] = state.writer + state", "                    state"),
        ("the writer of a page that took a closer look", WRITES, "            table.writers[page] = state.writer + column\n", ""),
    ),
    *of_file(
        "kvguard/write_verdicts.py",
        ("rows that wrote to a wrong slot", WRITES, "np.flatnonzero((writes[:, :-1, FLAGS] > 0)", "np.flatnonzero((writes[:, :0, FLAGS] > 0)"),
        ("padding that wrote", WRITES, "writes[:, -1, FLAGS] > 0", "writes[:, -1, FLAGS] > 1 << 60"),
        ("padding that halts", WRITES, "    wanted = Action.HALTED if books", "    wanted = Action.REFUSED if books"),
        ("what was redirected, counted", WRITES, "        books.counters.writes_redirected += count\n", "        pass\n"),
        ("the owner of the slot, not its writer", WRITES, "record.holders - {state.id if state else \"\"}", "record.holders"),
    ),
    *of_file(
        "kvguard/pending_verdicts.py",
        ("the evidence", TAG, "                if row >= 0\n", "                if row < 0\n"),
        ("the look at the flags on their way back", TAG, "if self.clean or not np.count_nonzero(found[:, :, layout.FLAGS]):", "if True:"),
        ("rows that were flagged for what they write", WRITES, "for part in (of_reads, of_writes) for", "for part in (of_reads,) for"),
    ),
    *of_file(
        "kvguard/step_buffer.py",
        ("uploads used again for other expectations", BUFFER, "bool(sent[: len(packed)].tobytes() == packed.tobytes())", "True"),
        ("uploads used again for another layout", BUFFER, "if same_rows and self._row_spans == row_spans and self._says_that", "if same_rows and self._says_that"),
        ("uploads used again for other table rows", BUFFER, "if same_rows and self._row_spans == row_spans and self._says_that", "if self._row_spans == row_spans and self._says_that"),
        ("table rows converted anew", BUFFER, "            if not same_rows:\n", "            if not len(self._rows_array):\n"),
        ("views of an outgrown buffer", BUFFER, "2 * words)\n            self._views.clear()\n", "2 * words)\n"),
        ("the bound on views", BUFFER, "            if len(self._views) >= VIEWS_MAX:\n", "            if False:\n"),
    ),
    *of_file(
        "kvguard/verifier.py",
        ("the check for lost deltas", STEPS, "if delta.step != self._step + 1:", "if False:"),
        ("the check for a missing block table", STEPS, "                if given is None:\n", "                if False:\n"),
        ("the neutralising", TAG, "neutral_page=null_page if enforce else -1", "neutral_page=-1"),
        ("observing without neutralising", TAG, "neutral_page=null_page if enforce else -1", "neutral_page=null_page"),
        ("verdicts of a step's own", SHORT, "return blanks.pop()", "return blanks[-1]"),
        ("inputs looked at again for another object", STEPS, "known[0] is not given or", ""),
        ("inputs looked at again for more rows", SHORT, " or known[1] != rows:", ":"),
        ("the check of what is written", WRITES, "                verify_slots(record=parts[place + 1], **of_writes)\n", "                pass\n"),
        ("windows that write nowhere", WRITES, "            skip_allowed=pool.windowed,\n", "            skip_allowed=False,\n"),
        ("tokens that may not be lost", WRITES, "            skip_allowed=pool.windowed,\n", "            skip_allowed=True,\n"),
        ("the floor, on the device", WRITES, "            floor=view(section.floor),\n", "            floor=None,\n"),
        ("the mirror of the writers", WRITES, "page_tag=self._writers[pool], pages=pages, tags=view(section.tag_writers)", "page_tag=self._writers[pool], pages=pages[:0], tags=view(section.tag_writers)[:0]"),
        ("a batch without requests that writes", WRITES, " or (bool(inputs) and bool(writes))", ""),
        ("what cannot be seen, said", WRITES, "                    emit(\"writes_not_checked\"", "                    str(\"writes_not_checked\""),
    ),
    *of_file(
        "kvguard/fused.py",
        ("fused: the check of what is written", WRITES, "        if plan.writes:\n", "        if False:\n"),
        ("fused: windows that write nowhere", WRITES, "            skip_allowed=pool.windowed,\n", "            skip_allowed=False,\n"),
        ("fused: the floor", WRITES, "            floor=section.floor[0],\n", "            floor=None,\n"),
        ("fused: the mirror of the writers", WRITES, "            mirrors.append((self._writers, section.tag_writers))\n", "            pass\n"),
        ("fused: a plan that was kept though nothing is enforced any more", FUSED, "            and last.enforce == delta.enforce\n", ""),
        ("fused: words that were kept though they changed", FUSED, "same = last is not None and np.array_equal(last.prefix, prefix)", "same = last is not None"),
        ("fused: descriptors that were kept though they changed", FUSED, "(known is None or not np.array_equal(known[0], plan.words))", "known is None"),
        ("fused: words that were kept though the table rows moved", FUSED, " and last.source is delta.packed and last.table_rows == table_rows:", " and last.source is delta.packed:"),
    ),
    *of_file(
        "kvguard/staging.py",
        ("the event behind a copy", STAGING, "        buffer.event.record()\n", ""),
        ("the look at the event before a buffer is used again", STAGING, "if self._buffers and self._buffers[self._next].event.query():", "if self._buffers:"),
    ),
    *of_file(
        "adapters/generic.py",
        ("the abort after a fault of the guard", STEPS, "if guard is not None and not guard.armed and guard.config.on_guard_error == \"abort\":", "if False:"),
        ("the report of a fault of the guard", STEPS, "            guard.fault(error)\n            return unguarded\n\n    def _require_armed", "            return unguarded\n\n    def _require_armed"),
        ("the difference between an error of the adapter and a fault", GENERIC, "        except UsageError as error:\n", "        except ZeroDivisionError as error:\n"),
        ("rows that the device flagged before the guard failed", STEPS, "return self._salvage(pending, requests) if enforced else nothing", "return nothing"),
        ("rows that were only observed before the guard failed", STEPS, "return self._salvage(pending, requests) if enforced else nothing", "return self._salvage(pending, requests)"),
        ("the rest of a step with a request that nobody knows", WRAPPED_ODD, "            except UsageError:\n                places", "            except ZeroDivisionError:\n                places"),
        ("the places of rows in the batch beside one that is left out", WRAPPED_ODD, "        return replace(inputs, query_row=rows)\n", "        return inputs\n"),
        ("the halt", GENERIC, "        if judgement.halt:\n", "        if False:\n"),
        ("the requests of an unproven step", STEPS, "requests, enforced = self._in_flight.pop(pending.step, ((), False))", "requests, enforced = list(self._in_flight.values())[-1]"),
    ),
    *of_file(
        "kvguard/model_shape.py",
        ("plan: KV heads that cannot be divided are copied", PLAN, "self.layers * -(-self.heads // ranks) * self.elements", "self.layers * self.heads * self.elements // ranks"),
        ("plan: what each rank holds whole", PLAN, "(min(ranks, self.copies) if self.copies else ranks)", "ranks"),
    ),
    *of_file(
        "kvguard/model_families.py",
        ("plan: MLPs without a gate", FAMILIES, "return 2 if self.family in _PLAIN_MLP else 3", "return 3"),
        ("plan: embeddings that are tied by default", FAMILIES, "tied = self.family in _TIED", "tied = False"),
        ("plan: KV heads that do not fit", PLAN, "        if found > heads or heads % found:\n", "        if False:\n"),
        ("plan: keys that would be guessed", PLAN, "        if keys.given(key):\n", "        if False:\n"),
    ),
    *of_file(
        "fault_injection/pytest_campaign.py",
        ("the object of a factory that is a method", FACTORIES, "return id(factory.__self__), id(factory.__func__)", "return (id(factory.__func__),)"),
        ("keyword-only defaults of a factory", FACTORIES, "factory.__defaults__ or factory.__kwdefaults__)", "factory.__defaults__)"),
        ("golden runs of one test for another", FACTORIES, "key = (test, *_identity(factory))", "key = _identity(factory)"),
    ),
    *of_file(
        "kvguard/plan.py",
        ("plan: the page that a window's edge cuts", PLAN, "-(-(group.window - 1) // page_size) + 1)", "-(-group.window // page_size))"),
    ),
    *of_file(
        "adapters/wrapping.py",
        ("the refusal of frees from outside", WRAPPED, "            bound.arguments[by_page] = rest\n", ""),
        ("the free that is not called", WRAPPED, "            if not called:\n                return None\n", ""),
        ("the engine's own object where nothing is refused", WRAPPED_ODD, "                if len(accepted) == len(listed):\n                    return True, None\n", ""),
        ("the free of all pages of a request", WRAPPED_ODD, "            if pages_given is None:\n", "            if False:\n"),
        ("frees by iterator", WRAPPED_ODD, "            if isinstance(pages_given, Iterator):\n", "            if False:\n"),
        ("iterators in an answer", WRAPPED_ODD, "lazy = thawed and isinstance(answer, Iterator)", "lazy = False"),
        ("a free whose request is left out", WRAPPED_ODD, "return None if found is None else request_name(found)", "return request_name(found)"),
        ("publications of an earlier incarnation", WRAPPED_ODD, "                if known <= 0:\n", "                if False:\n"),
        ("foreign pages that stay when a request is freed", WRAPPED, "        listed[:] = keep(listed, places, self.page_id)\n", ""),
        ("what is vacant after a free by request", WRAPPED, "        self.guard.retire(self.guard.unused(own, pool=self.pool), pool=self.pool)\n", ""),
        ("calls of the allocator to itself", WRAPPED, "            if self._allocating:\n", "            if False:\n"),
        ("hits that are adopted under their keys", WRAPPED, "            self.guard.adopt(name, hits, pool=self.pool, refusable=False)\n", "            self.guard.allocate(name, fresh[:cached], pool=self.pool, refusable=False)\n"),
        ("the object that is left alone at level off", WRAPPED, "        if guard.is_off:\n            return\n", ""),
    ),
    *of_file(
        "adapters/drawing.py",
        ("the drawing of other pages", WRAPPED, "        places = places_of(listed, accepted)\n        if len(places)", "        places = list(range(len(listed)))\n        if len(places)"),
        ("pages that go back when others run out", WRAPPED, "            back()\n            raise", "            raise"),
        ("the end of drawing at a page that comes again", WRAPPED_ODD, "if rejected & refused or", "if"),
        ("the end of drawing after as many pages as there are", WRAPPED_ODD, "drawn >= guard.num_pages(pool)", "drawn >= 99"),
        ("-1 as no page", WRAPPED_ODD, "while listed and listed[-1] < 0:", "while False:"),
        ("the request of pages that go back", WRAPPED_ODD, "elif parameter in REQUEST_ARGUMENTS and told is not None:", "elif False:"),
    ),
    *of_file(
        "adapters/last_pages.py",
        ("the pages of a request that has ended", WRAPPED_ODD, "        if not self.ended(request):\n", "        if True:\n"),
        ("pages that were handed on after their request ended", WRAPPED_ODD, "return [page for page in tags if page not in moved], moved | before", "return list(tags), moved"),
    ),
    *of_file(
        "adapters/page_shapes.py",
        ("a block that can be iterated", WRAPPED_ODD, "    if _attribute(value, page_id) is not None:\n", "    if False:\n"),
        ("containers whose constructor is not known", WRAPPED_ODD, "if type(container) in (tuple, set, frozenset, deque):", "if not isinstance(container, list):"),
    ),
    *of_file(
        "adapters/device_books.py",
        ("a page in use, on the device", DEVICE, "(self._store[slots] != 0), DOUBLE_ALLOCATION, problem)", "(self._store[slots] != 0), 0, problem)"),
        ("a page twice in one allocation, on the device", DEVICE, "(self._store[slots] != tags), DOUBLE_ALLOCATION, problem)", "(self._store[slots] != tags), 0, problem)"),
        ("a page that is free already, on the device", DEVICE, "(self._store[slots] == 0), DOUBLE_FREE, problem)", "(self._store[slots] == 0), 0, problem)"),
        ("a page twice in one free, on the device", DEVICE, "(self._store[slots] != marks), DOUBLE_FREE, problem)", "(self._store[slots] != marks), 0, problem)"),
        ("the vacancy of a page freed on the device", DEVICE, "        self._store.index_fill_(0, slots, 0)\n", ""),
        ("the promise of a publication on the device", DEVICE, "self._promise(rows, columns, published)", "self._promise(rows, columns, found)"),
        ("the null page on the device", DEVICE, "problem = torch.where(pages == self._pool.null_page, NULL, problem)", "pass"),
        ("the row of a live request on the device", DEVICE_ODD, "        if row in self._taken:\n", "        if False:\n"),
        ("the shape of pages on the device", DEVICE_ODD, "    if pages.dim() != 1 or", "    if"),
        ("the row's promise on the device", DEVICE, "        self._promise(rows, columns, tags)\n", ""),
    ),
    *of_file(
        "adapters/device_pages.py",
        ("what is read past the promise on the device", DEVICE, "max(state.columns, -(-end // self._page_size))", "state.columns"),
        ("the withholding of a row on the device", DEVICE, "withheld=frozenset(state.id for state in pending.states if state.condemned)", "withheld=frozenset()"),
        ("rows of requests that are not live on the device", DEVICE_ODD, "            if len(known) < len(requests):\n", "            if False:\n"),
        ("the halt on the device", DEVICE, "        if judgement.halt:\n", "        if False:\n"),
        ("the abort after a fault of the device guard", DEVICE, "if guard is not None and not guard.armed and guard.config.on_guard_error == \"abort\":", "if False:"),
    ),
    *of_file(
        "kvguard/transfer_export.py",
        ("the rule that verified pages only leave", TRANSFER, " or state.computed < tokens or waits:", " or waits:"),
        ("the transfer of a request that a violation ended", TRANSFER, "if state.condemned is not None or state.stalled or", "if state.stalled or"),
        ("the tags of the source's pages", TRANSFER, "if tables[self._books.index(label.pool)].tag(page) != label.tag", "if page != label.page"),
        ("the look at each part of the copy", TRANSFER, "listed, \"while it was copied\")\n            if refused is not None:\n                return refused\n            labels", "[], \"while it was copied\")\n            labels"),
        ("the look at the tags after the copy", TRANSFER, "refused = self._compare(export, export.entries, pages,", "refused = self._compare(export, (), pages,"),
        ("the end of a copy whose request gave its pages up", TRANSFER, "return not self.state.alive or self.state.incarnation != self.incarnation", "return not self.state.alive"),
        ("every pool of a transfer", COMPLETE, "for pool, table in enumerate(books.tables):\n            listed = given.get(pool, [])", "for pool, listed in given.items():\n            table = books.tables[pool]"),
        ("every layer of a transfer at the source", COMPLETE, "                if copied == known:\n", "                if copied:\n"),
        ("a layer that is copied twice", MISUSED, " or before & set(layers)", ""),
        ("the end of transfers whose request is over", COMPLETE, "for name, one in self._exports.items() if not one.is_over}", "for name, one in self._exports.items()}"),
        ("the word of a source without the device check", COMPLETE, "VERIFIED if self._books.checks_tags else UNCHECKED", "VERIFIED"),
        ("the word of a source that only observed", TRANSFER, "            export.unverified = OBSERVED\n", "            pass\n"),
    ),
    *of_file(
        "kvguard/transfer_import.py",
        ("the ticket of a part", RECEIVED, " or expected.is_over or expected.state.id != request else", " or expected.is_over else"),
        ("the row of a request that decodes before its transfer is complete", RECEIVED, "            state.depends.append(promise)\n", ""),
        ("a part that came twice", RECEIVED, "        if part in expected.parts:\n", "        if False:\n"),
        ("the end of a transfer that was refused", RECEIVED, "            self._imports.pop(ticket, None)\n            return refused", "            return refused"),
        ("the end of a ticket by preemption", COMPLETE, "return not self.state.alive or self.state.incarnation != self.incarnation", "return not self.state.alive"),
        ("the pages that earlier parts were written to", COMPLETE, "            if before != (page, tag):\n", "            if False:\n"),
        ("the wait for steps in flight", COMPLETE, "if pending.next_tag <= newest]", "if False]"),
        ("the end of that wait", COMPLETE, "if pending.next_tag <= newest]", "]"),
        ("every layer of a transfer at the receiver", COMPLETE, "if lacking and tag not in expected.state.adopted:", "if False:"),
        ("the columns that a cache had", COMPLETE, "if lacking and tag not in expected.state.adopted:", "if lacking:"),
        ("layers that are written as others", COMPLETE, "if expected.layers.get(part, layers) != layers:", "if False:"),
        ("what an unchecked source is worth", COMPLETE, "as_here = manifest.unverified == UNCHECKED and not self._books.checks_tags", "as_here = False"),
        ("the first token", MISUSED, "if first_token is not None and manifest.first_token != first_token:", "if False:"),
        ("signed nonsense", MISUSED, "        except Exception as error:\n", "        except KeyboardInterrupt as error:\n"),
        ("labels that are none", MISUSED, "        if named is None:\n", "        if False:\n"),
        ("whose manifest it is", RECEIVED, "if (manifest.receiver, manifest.request, manifest.ticket) != wanted:", "if False:"),
        ("the layout", RECEIVED, "if manifest.layout != self._layout:", "if False:"),
        ("the length of a transfer", RECEIVED, "if manifest.tokens != expected.tokens:", "if False:"),
        ("pages that nobody vouches for", RECEIVED, "        if manifest.unverified and not as_here:\n", "        if False:\n"),
        ("pages of a guard that failed, where that is not accepted", TRANSFER, "manifest.unverified == DISARMED and self._books.config.on_guard_error == \"disarm\"", "manifest.unverified == DISARMED"),
        ("parts that never came", RECEIVED, "            if came is None:\n", "            if came is None:\n                continue\n            if False:\n"),
        ("the labels of what came", RECEIVED, "            if came != meant:\n", "            if False:\n"),
        ("the pages written to", RECEIVED, "if page != written or not table", "if not table"),
        ("the tags of the pages written to", RECEIVED, " or table.tag(page) != tag\n", "\n"),
        ("the look at the pages after the last part", RECEIVED, "            refused = self._compare(expected, request, pages, labels, whole=True)\n        if refused is None:\n            self._adopt", "            refused = None\n        if refused is None:\n            self._adopt"),
        ("the verified length after a transfer", TRANSFER, "expected.state.computed = max(expected.state.computed, expected.tokens)", "pass"),
    ),
    *of_file(
        "kvguard/transfer_manifest.py",
        ("the manifest's digest", RECEIVED, " or not manifest.is_signed(key):", ":"),
        ("what a transport made of tuples", MISUSED, "entries=entries,\n", "entries=manifest.entries,\n"),
        ("the check for labels", MISUSED, "    return read if sound else None\n", "    return read\n"),
        ("what the manifest's digest covers", RECEIVED, "{**asdict(self), \"digest\": \"\"}", "{\"request\": self.request}"),
        ("the withholding of what a refused request has in flight", TRANSFER, "        condemn(books, state, violation)\n", "        state.condemned = violation.id\n"),
    ),
    *of_file(
        "adapters/generic_transfer.py",
        ("the end of a transfer by a call that makes no sense", MISUSED, "return exporter.stop(request, error) or unguarded", "return unguarded"),
        ("the word of a guard that has not failed", MISUSED, "MISUSED if begun.misused or self._guard.armed else DISARMED", "DISARMED"),
        ("the word of a transfer that was unsound before the guard failed", MISUSED, "MISUSED if begun.misused or self._guard.armed else DISARMED", "MISUSED if self._guard.armed else DISARMED"),
        ("the end of a receiver's transfer by a call that makes no sense", MISUSED, "return importer.stop(request, ticket, error)", "return None"),
    ),
    *KERNEL_MUTATIONS,
    *STEP_MUTATIONS,
    *NATIVE_MUTATIONS,
    *CONTENT_MUTATIONS,
    *SCENARIO_MUTATIONS,
)  # fmt: skip
