"""What the guard's books know of one vLLM Scheduler's requests and blocks, and the message of a step made of it.

Blocks are learnt in one pass over the requests of a step, after vLLM has scheduled it. vLLM shares one block pool among
all KV cache groups, block ids being unique across them. Each group is a pool of the guard; a block belongs to the group
of the request that took it, from then until it is freed or handed out again.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import compress, count
from operator import attrgetter, ne, sub
from typing import Any, NamedTuple

from kvguard.adapters.vllm.contents import RequestContents
from kvguard.guard import Guard
from kvguard.messages import StepDelta
from kvguard.onward import grown_by_one
from kvguard.pools import GuardSetup, PoolSpec

_COMPUTED_TOKENS = attrgetter("num_computed_tokens")
REPEATS_MAX = 64
"""Steps in a row that are taken for the last one, a token further; then one is looked at in full again."""


# Half of what a call of the named tuple's class takes, and every step of decode makes a few.
_new = tuple.__new__


class StepPayload(NamedTuple):
    """What rides on a SchedulerOutput: the delta and, with the first step, what a worker needs for its Verifier."""

    setup: GuardSetup | None
    delta: StepDelta


class BlockBooks:
    """Requests and blocks of one Scheduler as they stand, and what of it the guard has been told."""

    def __init__(self, guard: Guard, scheduler: Any, pools: tuple[PoolSpec, ...]) -> None:
        self.guard = guard
        self._scheduler = scheduler
        manager = scheduler.kv_cache_manager
        self._block_pool = manager.block_pool
        self._groups = [spec.name for spec in pools]
        self._managers = list(manager.coordinator.single_type_managers)
        self._blocks_of = [single.req_to_blocks for single in self._managers]
        config = getattr(scheduler, "vllm_config", None)
        self._speculates = getattr(config, "speculative_config", None) is not None
        self._columns: dict[str, list[int]] = {}
        self._in_step: list[str] = []
        self._counts: list[list[int]] = []
        self._row_of: dict[str, int] = {}
        """Of the requests of `_in_step`, as the following are."""
        self._floors_due = False
        self._group_of: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._published: dict[str, list[tuple[int, int, Any, Any, bool]]] = {}
        """request -> (group, column, key, block, whether its tokens were there already) since the books last looked."""
        self._key_in_pass: dict[int, Any] = {}
        self._ends: list[int] = []
        """Computed tokens of the requests of `_in_step`, as they were when those were last looked at in full."""
        self._repeats = REPEATS_MAX
        self._loads = getattr(scheduler, "connector", None) is not None
        """Whether anything but steps fills blocks."""
        self._contents: RequestContents | None = None
        """At level `keys` alone, and where there is a cache."""
        self._place_in_pass: dict[int, tuple[str, int]] = {}
        """At level `keys`: block -> (request, column) for which it was published since the books last looked."""
        if not self._loads:
            guard.all_is_told()
        if guard.wants_contents and manager.enable_caching:
            kv_groups = manager.kv_cache_config.kv_cache_groups
            self._contents = RequestContents(guard, config, kv_groups, self._block_pool.hash_block_size)

    # -- requests end, blocks are published -----------------------------------------------------------------------

    def _note_publication(self, request: str, group: int, column: int, block: Any, there: bool) -> None:
        entry = (group, column, block.block_hash, block, there)
        if self._contents is not None:
            if not self._contents.current(request):
                # What it computes from here on stands on KV of other weights: nobody else may have it.
                self._drop_cache_entry(block.block_hash, block.block_id)
                return
            self._place_in_pass[block.block_id] = (request, column)
        self._published.setdefault(request, []).append(entry)
        self._key_in_pass[block.block_id] = block.block_hash

    def _forget(self, name: str) -> None:
        self._in_step = []
        if name in self._published:
            # The last block of a request may be published in the very update that ends it, complete and verified.
            # What was published in this pass and will not be computed becomes a promise, which its end breaks.
            self._catch_up(name, self._scheduler.requests[name])
            for _, _, _, block, _ in self._published[name]:
                self._key_in_pass.pop(block.block_id, None)
            self._publish(name)
        if self._columns.pop(name, None) is not None:
            self.guard.finish(name)
        if self._contents is not None:
            self._contents.forget(name)

    def _drop_cache_entry(self, key: Any, page: int) -> None:
        """Remove one mapping, and only it: the page may hold other content, rightly cached under another key."""
        self._block_pool.cached_block_hash_to_block.pop(key, page)

    # -- blocks change hands --------------------------------------------------------------------------------------

    def _taken(self, blocks: list[Any], get_new_blocks: Callable[..., Any]) -> list[Any]:
        """Blocks left the free queue. One that a request still holds is left to it, and another is drawn."""
        # One in decode, in most calls.
        pages = [blocks[0].block_id] if len(blocks) == 1 else [block.block_id for block in blocks]
        if len(self._groups) == 1 and self.guard.may_take_over(pages):
            # One that was cached until now is taken over as it is, so that decode goes on the short way. It stays known
            # as the group's: given back by a request that never got to use it, it is retired then.
            self._fresh.update(pages)
            return blocks
        kept = []
        for block in blocks:
            page = block.block_id
            group = self._group_of.pop(page, None)
            name = self._groups[group or 0]
            if self.guard.vet([page], pool=name):
                if group is not None:
                    self._group_of[page] = group
                if self._block_pool.get_num_free_blocks() > 0:
                    # Its reference stands for the holder now; it leaves the free queue for good.
                    kept += self._taken(get_new_blocks(1), get_new_blocks)
                    continue
            elif group is not None:
                self.guard.retire([page], pool=name)
            self._fresh.add(page)
            kept.append(block)
        return kept

    def _freed(self, blocks: list[Any]) -> None:
        """After the reference counts went down: an uncached block without references is vacant."""
        for block in blocks:
            if block.ref_cnt != 0 or block.is_null or block.block_hash is not None:
                continue
            self._fresh.discard(block.block_id)
            group = self._group_of.get(block.block_id)
            if group is None:
                continue
            retired = self.guard.retire([block.block_id], pool=self._groups[group])
            if retired.reusable:
                del self._group_of[block.block_id]
            else:
                # Held by a running request, or suspect: out of the free queue, with the reference it should have kept.
                self._block_pool.free_block_queue.remove(block)
                block.ref_cnt = 1

    def _release_quarantine(self) -> None:
        """Give suspect blocks back before vLLM counts the blocks in use: a reset would fail on them."""
        for block in self._block_pool.blocks:
            group = self._group_of.get(block.block_id)
            name = self._groups[group or 0]
            if block.ref_cnt == 1 and self.guard.quarantined(block.block_id, pool=name):
                block.ref_cnt = 0
                self._block_pool.free_block_queue.append(block)

    def _reset(self) -> None:
        for name in self._groups:
            self.guard.reset(pool=name)
        self._group_of.clear()

    # -- a step ---------------------------------------------------------------------------------------------------

    def _payload(self, output: Any) -> StepPayload:
        """One pass over the step's requests: new blocks into their ledgers, then the message for the workers."""
        requests = self._scheduler.requests
        names = list(output.num_scheduled_tokens)
        if names == self._in_step and self._repeats < REPEATS_MAX:
            delta = self._another_token(output.total_num_scheduled_tokens, names)
            if delta is not None:
                return _new(StepPayload, (None, delta))
        drafts = output.scheduled_spec_decode_tokens
        counts = [list(map(len, map(blocks.__getitem__, names))) for blocks in self._blocks_of]
        steady = not self._published and counts == self._counts and names == self._in_step
        if not steady:
            self._catch_up_with_step(names, counts, output.num_scheduled_tokens)
        running = list(map(requests.__getitem__, names))
        ends = list(map(_COMPUTED_TOKENS, running))
        chunks = output.total_num_scheduled_tokens > len(names)
        self._ends, self._repeats = ends, REPEATS_MAX if self._speculates or chunks else 0
        starts = None
        # Where each request starts to write says which blocks it has filled: that changes as it gets another one, and
        # also within blocks that it got ahead: for drafts, or with the last tokens of a prompt.
        if not steady or self._speculates or self._floors_due:
            starts = list(map(sub, ends, output.num_scheduled_tokens.values()))
            if self._speculates:
                # Drafts of a step in flight may be rejected yet, and this step then starts at an earlier position, but
                # never before the last token that is known: a bound that does not go back as drafts come and go.
                starts = list(map(min, starts, [request.num_tokens - 1 for request in running]))
        if drafts:
            # Drafted tokens may be rejected: what they write is not counted as computed.
            ends = [end - len(drafts.get(name, ())) for name, end in zip(names, ends, strict=True)]
        if self._fresh:
            self._catch_up_with_waiting(requests)
        self._floors_due = chunks
        self._forget_pass()
        delta = self.guard.step(names, [0] * len(names), ends, starts)
        return StepPayload(setup=self.guard.setup if delta.step == 1 else None, delta=delta)

    def _another_token(self, scheduled: int, names: list[str]) -> StepDelta | None:
        """The message of a step in which the last one's requests each get one token more.

        Blocks change hands through the functions that are wrapped: where none of them had anything to note, every
        request has what it had. In turn, a request's progress is compared, too.
        """
        if scheduled != len(names):
            return None
        repeats = self._repeats + 1
        turn = repeats % scheduled
        if self._scheduler.requests[names[turn]].num_computed_tokens != self._ends[turn] + repeats:
            return None
        delta = self._crossing(names) if self._fresh or self._published else self.guard.step_again()
        if delta is not None:
            self._repeats = repeats
        return delta

    def _crossing(self, names: list[str]) -> StepDelta | None:
        """The same where some requests went on to a fresh block, and blocks are published that the step fills.

        None, with nothing noted, where that is not all there is to learn.
        """
        if len(self._groups) != 1:
            return None
        (blocks_of,), (counts,), fresh = self._blocks_of, self._counts, self._fresh
        crossed = grown_by_one(names, blocks_of, counts)
        if crossed is None or len(crossed) != len(fresh):
            return None
        grown = [(row, block.block_id) for row, block in crossed]
        for _, page in grown:
            if page not in fresh:
                return None
        published = []
        for name, entries in self._published.items():
            _, column, key, block, _ = entries[0]
            row = self._row_of.get(name)
            if len(entries) > 1 or block.block_hash != key or row is None:
                return None
            if self._contents is not None:
                self._contents.learn(self._scheduler.requests[name], (column + 1) * self._managers[0].block_size)
            published.append((row, column, key))
        delta = self.guard.step_onward(grown, published)
        if delta is not None:
            for row, page in grown:
                self._group_of[page] = 0
                self._columns[names[row]][0] += 1
                counts[row] += 1
            fresh.clear()
            self._forget_pass()
        return delta

    def _forget_pass(self) -> None:
        """The books know what was published since they last looked."""
        self._published.clear()
        self._key_in_pass.clear()
        self._place_in_pass.clear()

    def _catch_up_with_step(self, names: list[str], counts: list[list[int]], scheduled: Container[str]) -> None:
        """Learn what is new of the step's requests.

        counts: the number of blocks of each, per group; scheduled: the same names, where a look-up is quick.
        """
        behind = names
        if names == self._in_step:
            if len(counts) == 1:
                behind = list(compress(names, map(ne, counts[0], self._counts[0])))
            else:
                grown = [map(ne, new, old) for new, old in zip(counts, self._counts, strict=True)]
                behind = list(compress(names, map(any, zip(*grown, strict=True))))
        self._in_step, self._counts = [], []
        if self._published:
            self._publish_of_waiting(scheduled)
        if self._take_one_each(behind):
            # Nobody adopted anything: in which order the rest is learnt makes no difference.
            for name in [name for name in self._published if name in scheduled]:
                self._publish(name)
        else:
            if self._published or len(behind) < len(names):
                known = set(behind)
                behind = [name for name in names if name in known or name in self._published]
            for name in behind:
                self._catch_up(name, self._scheduler.requests[name])
                if self._published:
                    self._publish(name)
        # Only now: a pass that failed half way must not be taken for one that learnt everything.
        self._in_step, self._counts = names, counts
        self._row_of = dict(zip(names, count(), strict=False))

    def _take_one_each(self, names: list[str]) -> bool:
        """Requests that went on to one fresh block, as in decode: in one call for all of them.

        True if that was all there was to learn of these requests' blocks.
        """
        learnt = 0
        for group, blocks_of in enumerate(self._blocks_of):
            grown, pages = [], []
            for name in names:
                columns, blocks = self._columns.get(name), blocks_of.get(name, ())
                if columns is None or len(blocks) != columns[group] + 1 or blocks[-1].block_id not in self._fresh:
                    continue
                page = blocks[-1].block_id
                self._fresh.discard(page)
                self._group_of[page] = group
                columns[group] += 1
                grown.append(name)
                pages.append(page)
            learnt += len(grown)
            if grown and self.guard.allocate_each(grown, pages, pool=self._groups[group]):
                raise RuntimeError(f"one of the blocks {pages} was refused after it was vetted")
        return learnt == len(names) * len(self._blocks_of)

    def _catch_up(self, name: str, request: Any) -> None:
        """The request's blocks, as vLLM has them now, into its ledgers."""
        columns = self._columns.get(name) or self._start(request)
        for group, manager in enumerate(self._managers):
            blocks = manager.req_to_blocks.get(name, ())
            if len(blocks) != columns[group]:
                self._learn(request, group, blocks, columns)

    def _start(self, request: Any) -> list[int]:
        """A request that the guard may not know yet, and that holds no blocks yet; returns its columns per group."""
        name = request.request_id
        columns = self._columns.get(name)
        if columns is None:
            self.guard.start(name)
            columns = self._columns[name] = [0] * len(self._managers)
        if self._contents is not None:
            self._contents.identify(request)
        return columns

    def _catch_up_with_waiting(self, requests: Any) -> None:
        """Requests that got blocks without being scheduled: a connector loads their KV first."""
        holding = {name for manager in self._managers for name in manager.req_to_blocks}
        for name in holding & requests.keys():
            self._catch_up(name, requests[name])

    def _publish_of_waiting(self, scheduled: Container[str]) -> None:
        """Before the step's requests are looked at, which may have taken what a waiting one has published."""
        for name in [name for name in self._published if name not in scheduled]:
            request = self._scheduler.requests.get(name)
            if request is not None:
                self._catch_up(name, request)
                self._publish(name)

    def _publish_rest(self) -> None:
        """Publications that were made after the step was judged, whoever made them."""
        self._publish_of_waiting(())
        self._forget_pass()

    def _learn(self, request: Any, group: int, blocks: Any, columns: list[int]) -> None:
        name, pool = request.request_id, self._groups[group]
        known = columns[group]
        if len(blocks) < known:
            self.guard.truncate(name, len(blocks), pool=pool)
        for column in range(known, len(blocks)):
            block = blocks[column]
            page = block.block_id
            if block.is_null:
                self.guard.skip(name, 1, pool=pool)
            elif page in self._fresh:
                self._fresh.discard(page)
                self._group_of[page] = group
                if not self.guard.allocate(name, [page], pool=pool):
                    raise RuntimeError(f"block {page} of request {name} was refused after it was vetted")
            else:
                self._adopt(request, group, column, block)
        columns[group] = len(blocks)

    def _adopt(self, request: Any, group: int, column: int, block: Any) -> None:
        """A prefix hit; it is too late to refuse it here, so a wrong one is left to the device to flag."""
        (key,) = self._keys(request, group, column + 1, column) or [None]
        hit = (key, block.block_id)
        self.guard.adopt(request.request_id, [hit], pool=self._groups[group], refusable=False)

    def _keys(self, request: Any, group: int, stop: int, start: int = 0) -> list[Any]:
        """The cache keys of columns [start, stop) of a request, as many as it has."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes

        size = self._managers[group].block_size
        hashes = resolve_block_hashes(request.block_hashes, self._block_pool.hash_block_size, size)
        return [make_block_hash_with_group_id(hashes[column], group) for column in range(start, min(stop, len(hashes)))]

    def _publish(self, name: str) -> None:
        entries = self._published.pop(name, ())
        # No step of it has run or is under way: what is there already was loaded by a connector.
        loaded = any(there for *_, there in entries) and self.guard.scheduled_tokens(name) == 0
        for group, column, key, block, there in entries:
            if block.block_hash == key:
                if self._contents is not None:
                    end = (column + 1) * self._managers[group].block_size
                    self._contents.learn(self._scheduler.requests[name], end)
                tokens = 0 if loaded and there else None
                if not self.guard.publish(name, column, key, pool=self._groups[group], tokens=tokens):
                    self._drop_cache_entry(key, block.block_id)
