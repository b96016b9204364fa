"""What a guard must answer, said again with dictionaries, lists and sets: the oracle of the random-operation tests.

It shares no code with the guard. A page's *life* is a number that each allocation increases; a promise to a request is
a (page, life) pair, so a page is the request's own exactly while the page's life is the promised one. No digests, no
tags, no device: what the device must see is computed from the lives as they are when a step is made.
"""

from __future__ import annotations

from typing import Any

PAGE_SIZE = 2
NULL = 0

Entry = tuple[int, int] | None


class PlainModel:
    """The books of one pool. `enforce`: abort mode, else observe; `control`: operations are checked on the host."""

    def __init__(self, num_pages: int, quarantine_max: int, *, enforce: bool, control: bool) -> None:
        self.num_pages, self.quarantine_max = num_pages, quarantine_max
        self.enforce, self.control = enforce, control
        self.lives = 0
        self.life: dict[int, int] = {}
        self.holders: dict[int, set[str]] = {}
        self.key: dict[int, Any] = {}
        self.promise: dict[int, dict[str, Any]] = {}
        self.former: dict[int, tuple[Any, int]] = {}
        self.free_again: set[int] = set()
        self.quarantine: set[int] = set()
        self.requests: dict[str, dict[str, Any]] = {}
        self.steps: list[dict[str, Any]] = []
        self.violations = 0
        self.step_number = 0
        self.era = 0

    # -- pages ----------------------------------------------------------------------------------------------------

    def state(self, page: int) -> str:
        if not self.life.get(page):
            return "vacant"
        if page in self.promise:
            return "promised"
        return "complete" if page in self.key else "allocated"

    def fresh(self) -> int:
        self.lives += 1
        return self.lives

    def bad_id(self, page: int) -> bool:
        return page == NULL or not 0 <= page < self.num_pages

    def refuse(self) -> bool:
        """An operation is wrong: whether it is refused (else it is let through, seen or not)."""
        if not self.control:
            return False
        self.violations += 1
        return self.enforce

    def kept_out(self, page: int) -> bool:
        return self.enforce and page in self.quarantine

    def allocate(self, name: str, pages: list[int]) -> list[int]:
        accepted = []
        for page in pages:
            if self.kept_out(page):
                continue
            if (self.bad_id(page) or self.holders.get(page)) and self.refuse():
                continue
            accepted.append(page)
            if not 0 <= page < self.num_pages:
                self.requests[name]["ledger"].append((page, self.fresh()))
                continue
            self.new_life(page, self.fresh())
            self.free_again.discard(page)
            self.holders[page] = {name}
            self.requests[name]["ledger"].append((page, self.life[page]))
        return accepted

    def new_life(self, page: int, life: int) -> None:
        """The page is another one from now on (0: nobody's); what it was published as is remembered, once."""
        if page in self.key:
            self.former[page] = (self.key[page], self.life[page])
        self.moved_on(page)
        self.life[page] = life

    def promised_life(self, page: int, key: Any) -> int:
        """What the finder of a cache entry that is out of date goes by: never the life that the page has now."""
        known, life = self.former.get(page, (None, 0))
        return life if known == key else self.fresh()

    def moved_on(self, page: int) -> None:
        """The page leaves cache and promise; a promise that no step was made for will never be kept."""
        promise = self.promise.pop(page, None)
        self.key.pop(page, None)
        if promise is not None and promise["step"] is None and promise["kept"] is None:
            promise["kept"] = False

    def settle(self, promise: dict[str, Any], kept: bool) -> None:
        if promise["kept"] is not None:
            return
        promise["kept"] = kept
        page = promise["page"]
        if self.promise.get(page) is promise:
            del self.promise[page]
            if not kept:
                self.key.pop(page, None)

    def retire(self, pages: list[int], by: str | None) -> tuple[list[int], list[int], list[int]]:
        reusable: list[int] = []
        refused: list[int] = []
        quarantined: list[int] = []
        for page in pages:
            holders = self.holders.get(page, set())
            nobodys = not self.life.get(page) and page not in self.free_again
            wrong = self.bad_id(page) or nobodys or bool(holders - {by})
            if wrong and self.refuse():
                refused.append(page)
                continue
            self.free_again.discard(page)
            if not self.bad_id(page) and self.life.get(page):
                self.new_life(page, 0)
                self.holders[page] = set()
            (quarantined if self.kept_out(page) else reusable).append(page)
        return reusable, refused, quarantined

    def publish(self, name: str, column: int, key: Any) -> bool:
        request = self.requests[name]
        entry: Entry = request["ledger"][column] if 0 <= column < len(request["ledger"]) else None
        if entry is None or self.bad_id(entry[0]) or self.life.get(entry[0], 0) != entry[1]:
            return not self.refuse()
        if self.enforce and request["condemned"]:
            return False
        page, need = entry[0], (column + 1) * PAGE_SIZE
        if page in self.key and self.key[page] == key:
            return True
        promise = None
        if request["stalled"] or need > request["computed"]:
            promise = {
                "page": page, "life": entry[1], "writer": request, "need": need, "step": None, "kept": None,
                "trusting": [],
            }  # fmt: skip
            for step in self.steps:
                for row in step["rows"]:
                    same = row["request"] is request and row["era"] == request["era"]
                    if same and row["end"] >= need and promise["step"] is None:
                        promise["step"] = step["number"]
                        row["promises"].append(promise)
            if promise["step"] is None:
                request["promises"].append(promise)
        self.moved_on(page)
        self.key[page] = key
        if promise is not None:
            self.promise[page] = promise
        return True

    def adopt(self, name: str, hits: list[tuple[Any, int]]) -> int:
        request = self.requests[name]
        for count, (key, page) in enumerate(hits):
            right = not self.bad_id(page) and bool(self.life.get(page)) and page in self.key and self.key[page] == key
            if right and self.kept_out(page):
                return count
            if not right:
                if self.refuse():
                    return count
                request["ledger"].append((page, self.promised_life(page, key)))
                continue
            promise = self.promise.get(page)
            if promise is not None and promise["writer"] is not request:
                promise["trusting"].append((request, request["era"]))
                request["trusts"].append(promise)
            self.holders[page].add(name)
            request["ledger"].append((page, self.life[page]))
        return len(hits)

    def unpublish(self, pages: list[int]) -> None:
        for page in pages:
            promise = self.promise.pop(page, None)
            self.key.pop(page, None)
            if promise is not None and not promise["trusting"] and promise["kept"] is None:
                promise["kept"] = False

    def take_out(self, name: str, start: int, stop: int | None) -> list[tuple[int, int]]:
        """Columns from `start` are no longer held: to `stop`, leaving a gap, or all of them (None)."""
        ledger = self.requests[name]["ledger"]
        end = len(ledger) if stop is None else min(stop, len(ledger))
        out = [entry for entry in ledger[start:end] if entry is not None]
        if stop is None:
            del ledger[start:]
        else:
            ledger[start:end] = [None] * len(ledger[start:end])
        for page, _ in out:
            self.holders.get(page, set()).discard(name)
        return out

    def cut(self, name: str, start: int, stop: int | None) -> list[int]:
        """Columns are given up by a request that goes on: it writes none of their pages, and trusts in none.

        Without a `stop`, what it computed past `start` is gone too, whatever a step in flight still writes there.
        """
        request = self.requests[name]
        out = self.take_out(name, start, stop)
        if stop is None:
            self.move_back(request, start * PAGE_SIZE)
            for step in self.steps:
                for row in step["rows"]:
                    if row["request"] is request and row["era"] == request["era"]:
                        row["end"] = min(row["end"], start * PAGE_SIZE)
        if not out:
            return []
        for promise in request["promises"]:
            if (promise["page"], promise["life"]) in out:
                self.settle(promise, False)
        request["promises"] = [promise for promise in request["promises"] if promise["kept"] is None]
        rows = [row for step in self.steps for row in step["rows"] if row["request"] is request]
        for promise in list(request["trusts"]):
            read = any(promise is other for row in rows for other in row["trusted"])
            if (promise["page"], promise["life"]) in out and not read:
                request["trusts"].remove(promise)
                promise["trusting"] = [who for who in promise["trusting"] if who[0] is not request]
        return [page for page, _ in out]

    def reset(self, revoke_held: bool) -> list[int]:
        released, self.quarantine = sorted(self.quarantine), set()
        for page in range(self.num_pages):
            if not self.life.get(page):
                continue
            if not self.holders[page]:
                self.new_life(page, 0)
                self.free_again.add(page)
            elif revoke_held:
                self.new_life(page, self.fresh())
            else:
                self.promise.pop(page, None)
                self.key.pop(page, None)
        return [page for page in released if not self.holders.get(page)]

    # -- requests -------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.era += 1
        self.requests[name] = {
            "name": name, "era": self.era, "ledger": [], "computed": 0, "promises": [], "trusts": [],
            "condemned": False, "stalled": False, "alive": True, "preempted": False,
        }  # fmt: skip

    def leave(self, name: str) -> None:
        """The request gives up all it holds and all it promised that no step was made for."""
        request = self.requests[name]
        self.take_out(name, 0, None)
        for promise in request["promises"]:
            self.settle(promise, False)
        request["promises"], request["trusts"] = [], []

    def finish(self, name: str) -> None:
        self.leave(name)
        self.requests.pop(name)["alive"] = False

    def preempt(self, name: str) -> None:
        self.leave(name)
        self.new_era(name)
        self.requests[name]["preempted"] = True

    def resume(self, name: str) -> None:
        self.new_era(name)
        self.requests[name]["preempted"] = False

    def new_era(self, name: str) -> None:
        self.era += 1
        self.requests[name].update(era=self.era, computed=0, stalled=False)

    def rewind(self, name: str, tokens: int) -> None:
        request = self.requests[name]
        self.move_back(request, tokens)
        late = list(request["promises"])
        for step in self.steps:
            for row in step["rows"]:
                late += [promise for promise in row["promises"] if promise["writer"] is request]
        for promise in late:
            if promise["need"] > tokens:
                self.settle(promise, False)
        request["promises"] = [promise for promise in request["promises"] if promise["kept"] is None]
        for entry in request["ledger"][tokens // PAGE_SIZE :]:
            if entry and self.life.get(entry[0], 0) == entry[1] and self.holders.get(entry[0]) == {name}:
                self.promise.pop(entry[0], None)
                self.key.pop(entry[0], None)

    def move_back(self, request: dict[str, Any], tokens: int) -> None:
        """So much is verified at most; what runs behind rejected tokens ends by as many earlier."""
        rejected = max(0, request["computed"] - tokens)
        request["computed"] -= rejected
        for step in self.steps:
            for row in step["rows"]:
                if row["request"] is request and row["era"] == request["era"]:
                    row["end"] = max(0, row["end"] - rejected) if rejected else min(row["end"], tokens)

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, names: list[str], ends: list[int], table_rows: list[list[int]]) -> None:
        """A step is made: `table_rows` is what each request's row of the block table holds when it is checked."""
        self.step_number += 1
        rows = []
        for name, end, table_row in zip(names, ends, table_rows, strict=True):
            request = self.requests[name]
            row = {"request": request, "era": request["era"], "end": end, "promises": [], "trusted": []}
            wrong = False
            for column, entry in enumerate(request["ledger"]):
                found = table_row[column] if column < len(table_row) else -1
                wrong |= entry is not None and (self.bad_id(found) or self.life.get(found, 0) != entry[1])
            row["bad"] = wrong or end > len(request["ledger"]) * PAGE_SIZE
            rows.append(row)
        for row in rows:
            request = row["request"]
            due = [promise for promise in request["promises"] if promise["need"] <= row["end"]]
            for promise in due:
                promise["step"] = self.step_number
                row["promises"].append(promise)
            request["promises"] = [promise for promise in request["promises"] if promise["need"] > row["end"]]
        for row in rows:
            trusts = row["request"]["trusts"] = [p for p in row["request"]["trusts"] if p["kept"] is not True]
            lost = [p for p in trusts if p["kept"] is False or p["step"] is None or p["writer"]["stalled"]]
            row["bad"] |= bool(lost)
            row["trusted"] = [promise for promise in trusts if promise not in lost and promise["kept"] is None]
        self.steps.append({"number": self.step_number, "rows": rows})

    def abandon(self, number: int) -> list[str]:
        """A step failed to run; what its requests run after it builds on nothing."""
        (step,) = [step for step in self.steps if step["number"] == number]
        self.steps.remove(step)
        for row in step["rows"]:
            for promise in row["promises"]:
                self.settle(promise, False)
            request = row["request"]
            for later in self.steps:
                for other in later["rows"]:
                    if later["number"] > number and request["alive"] and row["era"] == request["era"]:
                        other["bad"] |= other["request"] is request
        return [row["request"]["name"] for row in step["rows"]]

    def judge(self) -> tuple[list[str], set[str], list[str], set[int]]:
        """The oldest step: (requests reported, requests withheld, requests to abort, pages to evict)."""
        step = self.steps[0]
        reported: list[str] = []
        aborts: list[str] = []
        evict: set[int] = set()
        for row in step["rows"]:
            request = row["request"]
            row["bad"] |= any(promise["kept"] is False for promise in row["trusted"])
        bad_rows = [row for row in step["rows"] if row["bad"]]
        for row in bad_rows:
            if row["request"]["condemned"]:
                continue
            request = row["request"]
            for page in self.lost(request):
                evict.add(page)
                if self.enforce and page not in self.quarantine and len(self.quarantine) < self.quarantine_max:
                    self.quarantine.add(page)
            self.condemn(request, reported, aborts, evict)
        any_bad = bool(bad_rows) or any(row["request"]["condemned"] for row in step["rows"])
        withheld = set()
        for row in step["rows"]:
            request = row["request"]
            failed = row["bad"] or request["condemned"]
            if failed:
                withheld.add(request["name"])
                request["stalled"] |= not self.enforce
            whole = not failed and not request["stalled"]
            if whole and request["era"] == row["era"] and request["alive"]:
                request["computed"] = max(request["computed"], row["end"])
            for promise in row["promises"]:
                self.settle(promise, whole)
                if any_bad and promise["kept"] is False:
                    evict.add(promise["page"])
        self.steps.pop(0)
        self.violations += len(reported)
        if not self.enforce:
            return reported, set(), [], set()
        return reported, withheld, aborts, evict

    def lost(self, request: dict[str, Any]) -> list[int]:
        """Pages of a live request's ledger that are not its own any more, by column."""
        if not request["alive"]:
            return []
        return [entry[0] for entry in request["ledger"] if entry and self.life.get(entry[0], 0) != entry[1]]

    def foreign(self, request: dict[str, Any]) -> list[int]:
        """Those of its lost pages that it must not give back: nobody's, or somebody else's."""
        holders = self.holders
        return [p for p in self.lost(request) if not self.life.get(p) or holders.get(p, set()) - {request["name"]}]

    def condemn(self, request: dict[str, Any], reported: list[str], aborts: list[str], evict: set[int]) -> None:
        """The request is over, and whoever trusted an open promise of its with it."""
        request["condemned"] = True
        reported.append(request["name"])
        if request["alive"]:
            aborts.append(request["name"])
        rows = [row for step in self.steps for row in step["rows"]]
        mine = list(request["promises"]) + [p for row in rows for p in row["promises"] if p["writer"] is request]
        for promise in mine:
            if promise["kept"] is not None and promise not in request["promises"]:
                continue
            self.settle(promise, False)
            evict.add(promise["page"])
            for other, era in promise["trusting"]:
                holds = other["alive"] and other["era"] == era
                runs = any(row["request"] is other and row["era"] == era for row in rows)
                if not other["condemned"] and (holds or runs):
                    self.condemn(other, reported, aborts, evict)
        request["promises"] = []
