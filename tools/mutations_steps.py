"""Mutations of how a step is made, and made again: see tools/mutations.py."""
# ruff: noqa: E501 -- a table whose rows are exact text

from __future__ import annotations

from typing import Final

from tools.mutation import Mutation, of_file

CORE: Final = "tests/core"
TAG: Final = f"{CORE}/test_guard_tag_proof.py"
PROMISES: Final = f"{CORE}/test_promises.py"
SHORT: Final = f"{CORE}/test_short_ways.py"
STEPS: Final = f"{CORE}/test_steps_and_messages.py"
WRITES: Final = f"{CORE}/test_write_slots.py"
FLOORS: Final = f"{CORE}/test_write_floors.py"
REARMING: Final = f"{CORE}/test_rearming.py"
SHARED: Final = f"{CORE}/test_shared_rows.py"
AGAIN: Final = f"{CORE}/test_step_again.py"
ONWARD: Final = f"{CORE}/test_onward.py"
LEDGER: Final = f"{CORE}/test_ledger.py"
NATIVE: Final = "tests/kernels/test_host_check.py"
IN_C: Final = f"{CORE}/test_host_check_steps.py"

STEP_MUTATIONS: Final[tuple[Mutation, ...]] = (
    *of_file(
        "kvguard/steps.py",
        ("the withholding of a request that is not ended yet", TAG, "                pending.condemned.add(row)\n            elif", "                pass\n            elif"),
        ("a batch that was kept though the roster changed", SHORT, "        and last.roster == books.roster\n", ""),
        ("a batch that was kept though other requests run", SHORT, "        and last.requests == requests\n", ""),
        ("a batch that was kept though its table rows moved", SHORT, "        and last.table_rows == table_rows\n", ""),
        ("what was kept of ledgers that changed", SHORT, "        batch.capacities = batch.floors = batch.body = None\n", "        pass\n"),
        ("a look at requests that were marked", PROMISES, "        state for state in marked if state.alive and (", "        state for state in marked if False and ("),
        ("the check of reads past the ledger", TAG, "            _check_coverage(books, pending)\n", "            pass\n"),
        ("the check of promises before a step", PROMISES, "            elif state.depends and books.checks_tags:\n", "            elif False:\n"),
        ("floors that were kept though they changed", WRITES, "batch.capacities = batch.floors = batch.body = None", "batch.capacities = batch.body = None"),
        ("again: steps with rows that are unproven", AGAIN, "if not (pending.suspects or pending.condemned):", "if True:"),
    ),
    *of_file(
        "kvguard/onward.py",
        ("again: requests that are looked at", AGAIN, "batch.body is None or books.marked or books.rows.touched:", "batch.body is None or books.rows.touched:"),
        ("again: ledgers that changed", AGAIN, " or books.rows.touched:", ":"),
        ("again: rows without room", AGAIN, "    if further > (_look_for_room(books, batch, again) if again.room is None else again.room):\n        return None\n", ""),
        ("again: the narrowest row", AGAIN, "= rooms, min(rooms, default=0)", "= rooms, max(rooms, default=0)"),
        ("again: rows that cross a page", FLOORS, "        rooms = list(map(min, rooms, to_next))\n", ""),
        ("again: what is enforced", AGAIN, "    if again.enforce is not books.enforcing:\n        return None\n", ""),
        ("again: tags that changed", AGAIN, "    for table in books.tables:\n        if table.changes:\n            return None\n", ""),
        ("again: how far the last step went", AGAIN, "    again.further = further\n", ""),
        ("onward: other pools", ONWARD, "len(books.tables) != 1 or books.quarantine.pages:", "books.quarantine.pages:"),
        ("onward: pages in quarantine", ONWARD, "len(books.tables) != 1 or books.quarantine.pages:", "len(books.tables) != 1:"),
        ("onward: contents that are compared", ONWARD, "    if books.checks_contents:\n        contents = _contents_of(books, batch, published)\n", ""),
        ("onward: requests that are listed twice", ONWARD, "rooms is None or not again.distinct:", "rooms is None:"),
        ("onward: the room of rows that grew", ONWARD, "        rooms[row] = room\n", "        pass\n"),
        ("onward: rows that need a page and get none", ONWARD, "    if further > room:\n        return None\n", ""),
        ("onward: two rows of one page, two pages of one row", ONWARD, "not len({row for row, _ in grown}) == len(set(pages)) == len(pages) or", ""),
        ("onward: pages that somebody holds", ONWARD, " or not books.tables[0].unclaimed(pages):", ":"),
        ("onward: ledgers with a gap at the end", ONWARD, "        if not ledger.in_one_run:\n            return None\n", ""),
        ("onward: the page that the row holds besides", ONWARD, "room = (len(ledger) + 1) * size - end", "room = len(ledger) * size - end"),
        ("onward: where the row starts to write", ONWARD, "            floor = start - start % size\n", ""),
        ("onward: the room in the page", ONWARD, "            room = min(room, floor + size - end)\n", ""),
        ("onward: pages that are published", ONWARD, "record is None or record.publication is not None or", "record is None or"),
        ("onward: requests that have stalled", ONWARD, " or state.stalled:", ":"),
        ("onward: the step that keeps the promise", ONWARD, "            step_that_writes.promises.append((row, promise))\n", ""),
        ("onward: the step that the promise waits for", ONWARD, "            promise.step = step_that_writes.step\n", ""),
        ("onward: pages that a later step fills", ONWARD, "        if need > again.ends[row] + further:\n            return None\n", ""),
        ("onward: pages that an earlier step has filled", ONWARD, "        if need <= again.ends[row] + again.further:\n", "        if False:\n"),
        ("onward: pages that are complete", ONWARD, "            if need <= state.computed:\n", "            if False:\n"),
        ("onward: progress before it is asked for", ONWARD, "            books.write_progress()\n", ""),
        ("onward: a page that is published twice", ONWARD, "    return found if len({page for _, page, *_ in found}) == len(found) else None\n", "    return found\n"),
        ("onward: the digest on the device", ONWARD, "        cells[first + DIGEST * rows + row] = digest\n", ""),
        ("onward: the end of the row on the device", ONWARD, "        cells[first + STOP * rows + row] = stop\n", ""),
        ("onward: the floor on the device", ONWARD, "        cells[first + (FIELDS + FLOOR) * rows + row] = floor\n", ""),
        ("onward: the writer of the page", ONWARD, "page, tag, state.writer + stop - 1\n", "page, tag, state.writer + stop\n"),
        ("onward: the longest row", ONWARD, "            stop_max = stop\n", "            pass\n"),
        ("onward: what was kept of rooms", ONWARD, "            capacities[row] = state.capacity\n", "            pass\n"),
        ("onward: what was kept of floors", ONWARD, "            floors[row] = floor\n", "            pass\n"),
        ("onward: tag changes sent once", ONWARD, "    table.changes, table.writers = {}, {}\n", ""),
        ("onward: the seal on what several deltas share", ONWARD, "    packed.setflags(write=False)\n", ""),
        ("onward: the body of later steps", ONWARD, "    batch.body = packed[:words]\n", ""),
        ("onward: sections of other columns", ONWARD, "kept is None or kept[0] is not plain or kept[1] != count:", "kept is None or kept[1] != count:"),
        ("onward: sections of other changes", ONWARD, "kept is None or kept[0] is not plain or kept[1] != count:", "kept is None or kept[0] is not plain:"),
        ("onward: rows of the books", ONWARD, "        books.rows.write_run(state, digest, stop)\n", ""),
    ),
    *of_file(
        "kvguard/page_table.py",
        ("onward: pages that are promised", ONWARD, "(record.holders or record.promise is not None):", "record.holders:"),
        ("onward: pages that somebody has", ONWARD, "(record.holders or record.promise is not None):", "record.promise is not None:"),
        ("onward: the null page", ONWARD, "            if page == null_page or not 0 <= page < num_pages:\n                return False\n            if", "            if not 0 <= page < num_pages:\n                return False\n            if"),
        ("onward: pages of the pool", ONWARD, "            if page == null_page or not 0 <= page < num_pages:\n                return False\n            if", "            if page == null_page:\n                return False\n            if"),
    ),
    *of_file(
        "kvguard/ledger.py",
        ("onward: terms that were not summed yet", LEDGER, "        if self._summed != column:\n            return self.digest\n", ""),
        ("onward: a run that ends before the last column", LEDGER, " and self._extents[0][1] == len(self._pages)", ""),
    ),
    *of_file(
        "kvguard/write_floors.py",
        ("the floor of a row that crosses a page", WRITES, "            state.floor = starts[row] - starts[row] % size\n", "            pass\n"),
        ("drafts that are written again", WRITES, "state.floor = starts[row] - starts[row] % size", "state.floor = starts[row]"),
        ("rows that go back", WRITES, "    if any(map(lt, starts, batch.floors)):\n", "    if False:\n"),
        ("others who read what is written again", WRITES, "            if others:\n", "            if False:\n"),
        ("rows that go on to a page that they had before", FLOORS, "    if any(map(ge, map(sub, starts, batch.floors), repeat(size))):\n", "    if False:\n"),
        ("where the next page of a row begins", FLOORS, "            if start - floor >= size:\n", "            if start - floor > 2 * size:\n"),
    ),
    *of_file(
        "kvguard/packing.py",
        ("the neutralising of rows that the host suspects", PROMISES, "packed[slice(*spans.expected)][suspects] ^= 1", "pass"),
        ("the copy before a row's expectation is spoilt", SHORT, "        packed = packed.copy()\n", "        packed.flags.writeable = True\n"),
        ("sections that fit other columns", SHORT, " or made_for[1] != batch.columns:", ":"),
        ("sections that fit another layout", SHORT, " or made_for[0] is not batch.spans or", " or"),
        ("the seal on what several deltas share", SHORT, "    packed.flags.writeable = False\n", ""),
        ("several extents", STEPS, "        return _gather_ragged(books, batch)\n", "        pass\n"),
        ("tag changes sent once", STEPS, "            table.changes, table.writers = {}, {}\n", ""),
        ("the writers of pages that changed hands", WRITES, "changes += [writers.get(page, 0) if tag else 0 for", "changes += [0 for"),
        ("no writer for a vacant page", WRITES, "writers.get(page, 0) if tag else 0 for", "writers.get(page, 0) for"),
        ("suspects that may write nowhere", WRITES, "            packed[slice(*spans.writer)][suspects] = NO_WRITER\n", ""),
        ("rows that changed, in the body", SHORT, "            fields[:, row] = now\n", ""),
        ("the copy before rows are changed", SHORT, "    body = body.copy()\n", "    body.flags.writeable = True\n"),
        ("rows that lost columns", SHORT, "                if stop < fields[pool * FIELDS + STOP, row]:\n                    return False\n", ""),
        ("rows that got columns", SHORT, "                if stop > columns[pool]:\n                    columns[pool] = stop\n", ""),
        ("rows with several extents now", SHORT, "        if state.slot in rows.ragged:\n            return False\n", ""),
        ("rows with several extents before", SHORT, " or batch.spans is not batch.regular:", ":"),
        ("the room of rows that changed", AGAIN, "capacities[row] = state.capacity", "pass"),
        ("the floor of rows that changed", WRITES, "floors[row] = state.floor", "pass"),
    ),
    *of_file(
        "kvguard/judge.py",
        ("progress of steps whose rows were moved", AGAIN, "if pending.unmoved and (before is None", "if (before is None"),
        ("progress that another batch would overwrite", AGAIN, "if pending.unmoved and (before is None or before.base is pending.base):", "if pending.unmoved:"),
        ("progress that was noted", AGAIN, "            books.progress = pending\n", "            pass\n"),
        ("progress before a row is flagged", AGAIN, "    # What was verified before stands, also of requests that stall now.\n    books.write_progress()\n", ""),
    ),
    *of_file(
        "kvguard/books.py",
        ("progress of the same incarnation", SHORT, "end + further > state.computed and state.incarnation == incarnation", "end + further > state.computed"),
        ("progress of a request that has stalled", REARMING, "state.incarnation == incarnation and not state.stalled:", "state.incarnation == incarnation:"),
        ("progress that is written when asked for", AGAIN, "        if self.progress is not None:\n            self.write_progress()\n        try:", "        try:"),
    ),
    *of_file(
        "kvguard/bookkeeping.py",
        ("again: tokens taken back", AGAIN, "            self._books.batch.again = None\n", "            pass\n"),
    ),
    *of_file(
        "kvguard/guard.py",
        ("again: steps that were abandoned", AGAIN, "            books.batch.again = None\n", "            pass\n"),
    ),
    *of_file(
        "kvguard/step_buffer.py",
        ("rows that two requests share: what they read", SHARED, "        words[slice(*section.expected)][shared] ^= 1\n", "        pass\n"),
        ("rows that two requests share: what they write", SHARED, "        words[slice(*span)][shared] = NO_WRITER\n", "        pass\n"),
        ("rows that a request shares with itself", SHARED, "if len(owners[row]) > 1]", "if owners[row]]"),
        ("rows that two requests share, step by step", SHARED, "            self._rows_distinct = spoil_shared_rows(self._host, delta, table_rows)\n", "            pass\n"),
        ("rows that two requests share, kept from the step before", SHARED, "if not (same_rows and self._rows_distinct and", "if not (same_rows and"),
        ("rows that are shared since", SHARED, "if not (same_rows and self._rows_distinct and", "if not (self._rows_distinct and"),
    ),
    *of_file(
        "kvguard/verifier.py",
        ("again: a delta that says something else", AGAIN, "if not delta.again or delta.step", "if delta.step"),
        ("again: a check that failed or was left out", AGAIN, "        self._checked = False\n        if self._fused", "        if self._fused"),
        ("again: a delta that was lost", AGAIN, "if not delta.again or delta.step != self._step + 1 or", "if not delta.again or"),
        ("launches kept for other arrays", SHORT, " or not all(map(operator.is_, kept[0], arrays)):", ":"),
        ("launches kept for other spans", AGAIN, "kept is None or kept[1] != spans or", "kept is None or"),
        ("native: every pool", IN_C, "if not launch.bound(view, pool):", "if not pool and not launch.bound(view, pool):"),
        ("native: which pool it is", IN_C, "if not launch.bound(view, pool):", "if not launch.bound(view, 0):"),
        ("native: pools of which nobody says what is written", IN_C, "whole = launch.of_writes is not None or not writes", "whole = True"),
        ("native: the answer", IN_C, "                if not launch.bound(view, pool):  # type: ignore[misc]  # all are bound, or none is\n                    break\n", "                launch.bound(view, pool)  # type: ignore[misc]\n"),
        ("native: what is done where it is not clean", IN_C, "for part in (of_pool[:reads], of_pool[reads:])]", "for part in (of_pool[:reads].clone(), of_pool[reads:].clone())]"),
        ("again: after a step that was not checked", AGAIN, " or not self._checked:\n            return None\n", ":\n            return None\n"),
    ),
    *of_file(
        "kvguard/step_arrays.py",
        ("native: tensors on a device", IN_C, " and self.on_host(looked_at)", ""),
    ),
    *of_file(
        "kernels/host_check/__init__.py",
        ("native: two null pages", NATIVE, "of_writes[\"null_page\"] != null_page", "False"),
        ("native: what is bound of the writes", NATIVE, "(\"slot_mapping\", \"query_start\", \"query_row\", \"lengths\", \"writer\", \"floor\", \"page_writer\")", "(\"slot_mapping\", \"query_start\", \"query_row\", \"lengths\", \"writer\", \"nothing\", \"page_writer\")"),
    ),
    *of_file(
        "kvguard/fused.py",
        ("fused: rows that two requests share", SHARED, "            spoil_shared_rows(prefix, delta, table_rows)\n", ""),
    ),
)
