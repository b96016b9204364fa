"""The mutations of tools/mutate.py: what is taken out of the guard, and the quickest tests that must notice.

Each `old` is exact text that occurs once in its file; `new` takes its place. One that no longer matches is an error, so
whoever changes such a line looks after its mutation as well.
"""
# ruff: noqa: E501 -- a table whose rows are exact text

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CORE: Final = "tests/core"
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
SHORT: Final = f"{CORE}/test_short_ways.py"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One exact replacement in one file, and the test files of which one must go red."""

    name: str
    path: str
    tests: tuple[str, ...]
    old: str
    new: str


def _of(path: str, *rows: tuple[str, str, str, str]) -> tuple[Mutation, ...]:
    """Rows of (name, test file, old, new) for one file."""
    return tuple(Mutation(name=name, path=path, tests=(test,), old=old, new=new) for name, test, old, new in rows)


MUTATIONS: Final[tuple[Mutation, ...]] = (
    *_of(
        "kvguard/judge.py",
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
        ("the breaking of a stalled writer's promises", REARMING, "kept=not promise.writer.stalled)\n        return", "kept=True)\n        return"),
        ("the stalling of a request that was only observed", PROMISES, "pending.states[row].stalled = books.stalled = True", "pass"),
        ("the progress of a stalled request", REARMING, "if unproven and row in unproven or state.stalled:", "if unproven and row in unproven:"),
        ("the progress of a stalled request, the long way round", REARMING, "if not unproven and not books.stalled and", "if not unproven and"),
        ("progress counted for the same incarnation only", IN_FLIGHT, "if state.incarnation == batch.incarnations[row]:", "if True:"),
        ("progress counted for an unchanged roster only", SHORT, "and batch.roster == books.roster:", "and True:"),
        ("the check that a verdict was written", STEPS, "if (flags == NOT_CHECKED).any():", "if False:"),
        ("the check that every row has a verdict", STEPS, "if shape != (len(books.tables), len(pending.states)):", "if False:"),
        ("foreign pages", TAG, "setdefault(books.tables[mismatch.pool].spec.name, []).append(mismatch.page)", "setdefault(books.tables[mismatch.pool].spec.name, [])"),
        ("lost pages that the request gives back itself", TAG, "if mismatch.found != VACANT and not holders - {state.id}:", "if False:"),
        ("lost pages that somebody else holds", TAG, "if mismatch.found != VACANT and not holders - {state.id}:", "if mismatch.found != VACANT:"),
    ),
    *_of(
        "kvguard/steps.py",
        ("the withholding of a request that is not ended yet", TAG, "                pending.condemned.add(row)\n            elif", "                pass\n            elif"),
        ("the neutralising of rows that the host suspects", PROMISES, "packed[slice(*spans.expected)][suspects] ^= 1", "pass"),
        ("the copy before a row's expectation is spoilt", SHORT, "        packed = packed.copy()\n", "        packed.flags.writeable = True\n"),
        ("a batch that was kept though the roster changed", SHORT, "        and last.roster == books.roster\n", ""),
        ("a batch that was kept though other requests run", SHORT, "        and last.requests == requests\n", ""),
        ("a batch that was kept though its table rows moved", SHORT, "        and last.table_rows == table_rows\n", ""),
        ("what was kept of ledgers that changed", SHORT, "        batch.capacities = batch.body = None\n", "        pass\n"),
        ("sections that fit other tag changes", SHORT, "        or made_for[2] != counts\n", ""),
        ("sections that fit other columns", SHORT, "        or made_for[1] != batch.columns\n", ""),
        ("sections that fit another layout", SHORT, "        or made_for[0] is not batch.spans\n", ""),
        ("the seal on what several deltas share", SHORT, "    packed.flags.writeable = False\n", ""),
        ("a look at requests that were marked", PROMISES, "        state for state in marked if state.alive and (", "        state for state in marked if False and ("),
        ("the check of reads past the ledger", TAG, "            _check_coverage(books, pending)\n", "            pass\n"),
        ("the check of promises before a step", PROMISES, "            elif state.depends:\n", "            elif False:\n"),
        ("several extents", STEPS, "        return _gather_ragged(books, batch)\n", "        pass\n"),
        ("tag changes sent once", STEPS, "            table.changes = {}\n", ""),
    ),
    *_of(
        "kvguard/page_table.py",
        ("the tag change at free", TABLE, "record.tag = self.changes[page] = VACANT", "self.changes[page] = VACANT"),
        ("the tag change at free, on the device", TAG, "record.tag = self.changes[page] = VACANT", "record.tag = VACANT"),
        ("the tag change at allocation", TAG, "tag = record.tag = changes[page] = take()", "tag = record.tag = changes[page] = record.tag or take()"),
        ("the tag change at allocation, on the device", STEPS, "tag = record.tag = changes[page] = take()", "tag = record.tag = take()"),
        ("the tag change at a revocation", RESET, "record.tag = self.changes[page] = self._tags.take()\n        self._note", "pass\n        self._note"),
        ("the tag change at a revocation, on the device", RESET, "record.tag = self.changes[page] = self._tags.take()\n        self._note", "record.tag = self._tags.take()\n        self._note"),
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
        ("the end of a broken promise's publication", TABLE, "            record.publication = None\n            self._note(promise.page, \"revoked\"", "            self._note(promise.page, \"revoked\""),
    ),
    *_of(
        "kvguard/bookkeeping.py",
        ("the check of publications", CONTROL, " or table.tag(page) != tag:", ":"),
        ("the quarantine at adoption", TAG, "in books.quarantine and books.enforcing:\n                break", "in ():\n                break"),
        ("the list of who trusts a promise", PROMISES, "promise.dependents.append((state, state.incarnation))", "pass"),
        ("the list of what a request trusts", PROMISES, "state.depends.append(promise)", "pass"),
        ("the expectation that no page meets", TAG, "                ledger.append(page, table.promised_tag(page, key))\n                accepted += 1", "                ledger.append(page, table.tag(page))\n                accepted += 1"),
        ("promises taken back by rewind", IN_FLIGHT, "            if promise.need_tokens > tokens:\n                self._books.settle(promise, kept=False)", "            pass"),
        ("the verified length after a rewind", IN_FLIGHT, "state.computed = min(state.computed, tokens)", "pass"),
        ("the shift of steps in flight behind rejected tokens", IN_FLIGHT, "rejected = max(0, state.computed - tokens)", "rejected = 0"),
        ("steps of a former life, which no rewind moves", IN_FLIGHT, "                if pending.incarnations[row] != state.incarnation:\n                    continue\n", ""),
        ("the progress that a truncation takes back", GIVEN_UP, "self._move_back(state, columns * size", "(lambda *_, **__: None)(state, columns * size"),
        ("promises on pages that their writer gave up", GIVEN_UP, "                if promise.pool == table.spec.name and (promise.page, promise.tag) in gone:\n", "                if False:\n"),
        ("promises on other pages than those given up", GIVEN_UP, "                if promise.pool == table.spec.name and (promise.page, promise.tag) in gone:\n", "                if True:\n"),
        ("the end of trust in pages that were given up", GIVEN_UP, "            self._stop_depending(state, table.spec.name, gone)\n", ""),
        ("the trust in other pages than those given up", GIVEN_UP, "if promise.pool == pool and (promise.page, promise.tag) in gone and", "if"),
        ("the trust of a step in flight in pages that were given up", GIVEN_UP, " and promise not in read:", ":"),
        ("the check that a condemned request publishes nothing", PROMISES, "        if state.condemned is not None and not state.observed:\n            return False\n", ""),
        ("the word of a stalled writer", REARMING, "if state.stalled or need >", "if need >"),
        ("the fresh start of a stalled writer", REARMING, "        state.stalled = False\n", ""),
        ("publications that change nothing", PROMISES, "if table.record(page).publication == key:", "if False:"),
        ("the length that a publication without page size needs", PROMISES, "        if tokens is None and size is None:\n", "        if False:\n"),
        ("the length that a publication is complete at", PROMISES, "need = tokens if tokens is not None else", "need ="),
        ("the check that ids are strings", CONTROL, "        if not isinstance(request, str):\n", "        if False:\n"),
        ("the check of page ids at adoption", CONTROL, "pages = page_ids([page for _, page in hits])", "pages = [page for _, page in hits]"),
        ("pages let go of by a preempted request", IN_FLIGHT, "        self._books.release_all(state)\n        self._restart(state)\n        state.preempted", "        self._restart(state)\n        state.preempted"),
    ),
    *_of(
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
        ("the quarantine of what may be handed out", SHORT, "return not books.quarantine and books", "return books"),
    ),
    *_of(
        "kvguard/books.py",
        ("promises that a step in flight would keep, taken back by rewind", IN_FLIGHT, "return scheduled + writer.promises", "return list(writer.promises)"),
        ("the check that page ids are integers", CONTROL, "    if all(isinstance(page, (int, np.integer)) for page in pages):\n", "    if True:\n"),
        ("the halt of a refused operation", CONTROL, "        if violation.action is Action.HALTED:\n            raise", "        if False:\n            raise"),
        ("content only for those who asked", REPORT, "if self.config.report_content and self.content_of", "if self.content_of"),
        ("the abort though the report fails", REPORT, "except Exception as error:\n                # Losing", "except ZeroDivisionError as error:\n                # Losing"),
        ("the breaker's fall back to observing", POLICY, "return not (self.breaker.tripped and self.config.breaker_action == \"observe\")", "return True"),
    ),
    *_of(
        "kvguard/guard.py",
        ("the order of verdicts", STEPS, "if verdicts.step != first:", "if False:"),
        ("the check of the thread", STEPS, "elif self._thread != thread:", "elif False:"),
        ("the disarming", STEPS, "        self.armed = False\n        emit(", "        emit("),
        ("the heartbeat", STEPS, "alive=in_flight <= books.config.steps_in_flight_max", "alive=True"),
        ("promises of an abandoned step", IN_FLIGHT, "        for _, promise in pending.promises:\n            books.settle(promise, kept=False)\n", ""),
        ("later steps of an abandoned one's requests", IN_FLIGHT, "                if other.step > step:\n", "                if False:\n"),
        ("earlier steps of an abandoned one's requests", IN_FLIGHT, "                if other.step > step:\n", "                if True:\n"),
        ("later lives of an abandoned step's requests", IN_FLIGHT, "if state.incarnation != pending.incarnations[row] or not state.alive:", "if False:"),
        ("the count of errors of the adapter", GENERIC, "        self._books.counters.adapter_errors += 1\n", ""),
    ),
    *_of(
        "kvguard/policy.py",
        ("the quarantine's bound", POLICY, "        if self.full:\n", "        if False:\n"),
        ("the breaker's window", POLICY, "while now - self._times[0] > self._window_s:", "while False:"),
        ("the breaker", POLICY, "        self.tripped = True\n        return True", "        return True"),
    ),
    *_of(
        "kvguard/ledger.py",
        ("the terms of several new columns", SHORT, "            terms = mix_array(", "            terms = 0 * mix_array("),
        ("the gaps among several new columns", SHORT, "int(terms[values != VACANT].sum(dtype=np.uint64))", "int(terms.sum(dtype=np.uint64))"),
        ("the digest of a dropped page", LEDGER, "                digest -= mix(self._key, column, self._tags[column])\n                self._pages", "                self._pages"),
        ("the extents of a dropped page", LEDGER, "            self._extents = extents\n", "            pass\n"),
        ("the cost of a drop, which is what it drops", LEDGER, "            self._extents = extents\n", "            self._rebuild()\n"),
    ),
    *_of("kvguard/tags.py", ("a tag of its own for each allocation", TAGS, "self._next = tag + 1", "self._next = tag")),
    *_of("kvguard/requests.py", ("the fresh start of a new incarnation", IN_FLIGHT, "        state.computed = 0\n", "        pass\n")),
    *_of(
        "kvguard/verifier.py",
        ("the check for lost deltas", STEPS, "if delta.step != self._step + 1:", "if False:"),
        ("the check for a missing block table", STEPS, "            if missing:\n", "            if False:\n"),
        ("the neutralising", TAG, "neutral_page=null_page if enforce else -1", "neutral_page=-1"),
        ("observing without neutralising", TAG, "neutral_page=null_page if enforce else -1", "neutral_page=null_page"),
        ("uploads used again for other expectations", SHORT, "            and last.sent == sent\n", ""),
        ("uploads used again for another layout", SHORT, "            and last.spans == spans\n", ""),
        (
            "uploads used again for other table rows", SHORT,
            "            and last.table_rows == table_rows\n        ):\n            self", "        ):\n            self",
        ),
        (
            "uploads of the very same delta used again for other table rows", SHORT,
            "            and last.table_rows == table_rows\n        ):\n            # In", "        ):\n            # In",
        ),
        ("uploads used again without tag changes only", SHORT, "            and len(delta.packed) == end\n", ""),
        ("verdicts of a step's own", SHORT, "return blanks.pop()", "return blanks[-1]"),
        ("inputs looked at again for another object", STEPS, "known[0] is not given or", ""),
        ("inputs looked at again for more rows", SHORT, " or known[1] != rows:", ":"),
        ("the evidence", TAG, "if np.count_nonzero(records[:, :, layout.FLAGS]):", "if False:"),
    ),
    *_of(
        "kernels/verify_pages/reference.py",
        ("numpy: the digest comparison", TAG, "if digest != int(expected[row]) & ((1 << 64) - 1):", "if False:"),
        ("numpy: the null page", TAG, "elif page == null_page:", "elif False:"),
        ("numpy: the range", TAG, "                    if not 0 <= page < len(page_tag):\n", "                    if False:\n"),
        ("numpy: the pieces of a split page", TAG, "flag |= FLAG_SPLIT", "pass"),
        ("numpy: the neutralising of reads", TAG, "table[table_row, start:stop] = neutral_page * split", "pass"),
        ("numpy: the neutralising of writes", STEPS, "slot_mapping[int(query_start[place]) : int(query_start[place + 1])] = skip_slot", "pass"),
    ),
    *_of(
        "kernels/verify_pages/torch_op.py",
        ("torch: the digest comparison", TAG, "torch.where(digest != expected, FLAG_DIGEST, 0)", "0"),
        ("torch: the null page", TAG, "null = in_range & (page == null_page)", "null = in_range & (page == -5)"),
        ("torch: the pieces of a split page", TAG, "flag = flag | torch.where(displaced, FLAG_SPLIT, 0)", "pass"),
        ("torch: the neutralising of reads", TAG, "_neutralise_reads(table, row_index, flagged, live, split, neutral_page * split)", "pass"),
        ("torch: the neutralising of writes", "tests/kernels/test_verify_pages.py", "slot_mapping.copy_(torch.where(drop, skip_slot, slot_mapping))", "pass"),
    ),
    *_of("kernels/verify_pages/host_op.py", ("torch on a CPU: the digest comparison", TAG, "if not np.array_equal(digest, expected):", "if False:")),
    *_of("kernels/scatter_tags/reference.py", ("numpy: the tag mirror", STEPS, "page_tag[page] = tag", "pass")),
    *_of("kernels/scatter_tags/torch_op.py", ("torch: the tag mirror", STEPS, "page_tag.index_add_(0, target, torch.where(inside, tags - page_tag[target], 0))", "pass")),
    *_of("kernels/mixing.py", ("the column in the digest", GENERIC, "(columns * _COLUMN_MULTIPLIER + np.array(key, np.uint64))", "np.array(key, np.uint64)")),
    *_of(
        "adapters/generic.py",
        ("the abort after a fault of the guard", STEPS, "if guard is not None and not guard.armed and guard.config.on_guard_error == \"abort\":", "if False:"),
        ("the report of a fault of the guard", STEPS, "            guard.fault(error)\n            return unguarded\n\n    def _require_armed", "            return unguarded\n\n    def _require_armed"),
        ("the difference between an error of the adapter and a fault", GENERIC, "        except UsageError as error:\n", "        except ZeroDivisionError as error:\n"),
        ("rows that the device flagged before the guard failed", STEPS, "return self._salvage(pending, requests) if enforced else nothing", "return nothing"),
        ("rows that were only observed before the guard failed", STEPS, "return self._salvage(pending, requests) if enforced else nothing", "return self._salvage(pending, requests)"),
        ("the halt", GENERIC, "        if judgement.halt:\n", "        if False:\n"),
        ("the requests of an unproven step", STEPS, "requests, enforced = self._in_flight.pop(pending.step, ((), False))", "requests, enforced = list(self._in_flight.values())[-1]"),
    ),
)  # fmt: skip
