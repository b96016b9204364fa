"""The books, next to vLLM's scheduler, in the engine-core process.

Blocks are learnt in one pass over the requests of a step, after vLLM has scheduled it; wrappers stand only where blocks
change hands, never on a call that every request makes in every step. Wrappers are set on the scheduler's own objects:
vLLM's classes keep their functions.

vLLM shares one block pool among all KV cache groups, block ids being unique across them. Each group is a pool of the
guard; a block belongs to the group of the request that took it, from then until it is freed or handed out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import ne
from typing import Any, NamedTuple

from kvguard.adapters.vllm.verdicts import VerdictHandler
from kvguard.config import GuardConfig
from kvguard.guard import Guard, GuardHalt
from kvguard.messages import StepDelta
from kvguard.pools import GuardSetup, PoolSpec
from kvguard.violation import Proof


class StepPayload(NamedTuple):
    """What rides on a SchedulerOutput: the delta and, with the first step, what a worker needs for its Verifier."""

    setup: GuardSetup | None
    delta: StepDelta


class GuardFault(RuntimeError):
    """A fault inside kvguard while `on_guard_error` is `abort`: the engine stops rather than serve unguarded."""


class SchedulerSide:
    """One vLLM Scheduler's guard."""

    def __init__(
        self,
        scheduler: Any,
        pools: tuple[PoolSpec, ...],
        config: GuardConfig,
        *,
        proofs: frozenset[Proof] | None = None,
    ) -> None:
        """`proofs`: as in Guard, for fault campaigns alone."""
        self.guard = Guard(pools, config, proofs=proofs)
        self._scheduler = scheduler
        manager = scheduler.kv_cache_manager
        self._block_pool = manager.block_pool
        self._groups = [spec.name for spec in pools]
        self._managers = list(manager.coordinator.single_type_managers)
        self._verdicts = VerdictHandler(self.guard, scheduler, pools)
        self._blocks_of = [single.req_to_blocks for single in self._managers]
        self._columns: dict[str, list[int]] = {}
        self._in_step: list[str] = []
        self._counts: list[list[int]] = []
        self._group_of: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._published: dict[str, list[tuple[int, int, Any]]] = {}
        self._key_in_pass: dict[int, Any] = {}
        self._wrap_pool()
        self._wrap_managers(manager)
        self._wrap_scheduler(scheduler)

    # -- wrappers -------------------------------------------------------------------------------------------------

    def _shielded(self, call: Callable[[], Any]) -> Any:
        """A fault of the guard must not surface in vLLM; what follows it is `on_guard_error`."""
        if not self.guard.armed:
            return None
        try:
            return call()
        except GuardHalt:
            raise
        except Exception as error:
            self.guard.fault(error)
            return None

    def _wrap_pool(self) -> None:
        pool = self._block_pool
        get_new_blocks, free_blocks = pool.get_new_blocks, pool.free_blocks
        cache_full_blocks, evict = pool.cache_full_blocks, pool._maybe_evict_cached_block

        def guarded_get_new_blocks(num_blocks: int, *args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(num_blocks, *args, **kwargs)
            return self._shielded(lambda: self._taken(blocks, get_new_blocks)) or blocks

        def guarded_free_blocks(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            blocks = list(ordered_blocks)
            result = free_blocks(blocks, *args, **kwargs)
            self._shielded(lambda: self._freed(blocks))
            return result

        def guarded_cache_full_blocks(
            request: Any,
            blocks: Any,
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            kv_cache_group_id: int,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            given = (request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)
            result = cache_full_blocks(*given, *args, **kwargs)
            for column in range(num_cached_blocks, num_full_blocks):
                key = blocks[column].block_hash
                if key is not None:
                    entry = (kv_cache_group_id, column, key)
                    self._published.setdefault(request.request_id, []).append(entry)
                    self._key_in_pass[blocks[column].block_id] = key
            return result

        def guarded_evict(block: Any, *args: Any, **kwargs: Any) -> Any:
            evicted = evict(block, *args, **kwargs)
            if evicted:
                self._shielded(lambda: self._unpublished(block.block_id))
            return evicted

        pool.get_new_blocks, pool.free_blocks = guarded_get_new_blocks, guarded_free_blocks
        pool.cache_full_blocks, pool._maybe_evict_cached_block = guarded_cache_full_blocks, guarded_evict

    def _wrap_managers(self, manager: Any) -> None:
        for name in ("free", "pop_blocks_for_free"):
            setattr(manager, name, self._finishing(getattr(manager, name)))
        manager.get_computed_blocks = self._vetting_hits(manager.get_computed_blocks)
        manager.reset_prefix_cache = self._resetting(manager.reset_prefix_cache)
        for group, single in enumerate(self._managers):
            if hasattr(single, "_remove_blocks_in_range"):
                single._remove_blocks_in_range = self._dropping(single._remove_blocks_in_range, group)

    def _finishing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
            # Before the blocks are freed: a block that a live ledger holds may not be.
            self._shielded(lambda: self._forget(request.request_id))
            return original(request, *args, **kwargs)

        return guarded

    def _forget(self, request: str) -> None:
        self._published.pop(request, None)
        self._in_step = []
        if self._columns.pop(request, None) is not None:
            self.guard.finish(request)

    def _dropping(self, original: Callable[..., Any], group: int) -> Callable[..., Any]:
        def guarded(request_id: str, start: int, stop: int, *args: Any, **kwargs: Any) -> Any:
            if request_id in self._columns:
                self._shielded(lambda: self.guard.drop(request_id, start, stop, pool=self._groups[group]))
            return original(request_id, start, stop, *args, **kwargs)

        return guarded

    def _vetting_hits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(request, *args, **kwargs)
            if result[1] and self._shielded(lambda: self._hits_refused(request, result[0].blocks)):
                # Nothing is adopted rather than a part: groups of a hybrid model must agree on a length.
                return (self._scheduler.kv_cache_manager.empty_kv_cache_blocks, 0, *((0,) * (len(result) - 2)))
            return result

        return guarded

    def _hits_refused(self, request: Any, groups: Any) -> bool:
        """Whether any cached block of a lookup is not what its key says; such entries are forgotten."""
        for group, blocks in enumerate(groups):
            hits = [
                (self._key(request, group, column), block.block_id)
                for column, block in enumerate(blocks)
                if not block.is_null
            ]
            # What was published earlier in this very pass reaches the books at its end.
            hits = [(key, page) for key, page in hits if self._key_in_pass.get(page) != key]
            accepted = self.guard.vet_hits(request.request_id, hits, pool=self._groups[group])
            if accepted < len(hits):
                self._drop_cache_entry(*hits[accepted])
                return True
        return False

    def _drop_cache_entry(self, key: Any, page: int) -> None:
        """Remove one stale mapping, and only it: the page may hold other content, rightly cached under another key."""
        self._block_pool.cached_block_hash_to_block.pop(key, page)

    def _resetting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._shielded(self._release_quarantine)
            done = original(*args, **kwargs)
            if done:
                self._shielded(self._reset)
            return done

        return guarded

    def _wrap_scheduler(self, scheduler: Any) -> None:
        schedule, update = scheduler.schedule, scheduler.update_from_output

        # These two run in every step: no closures, no second call where one will do.
        guard, verdicts = self.guard, self._verdicts

        def guarded_schedule(*args: Any, **kwargs: Any) -> Any:
            if not guard.armed:
                self._require_armed()
            output = schedule(*args, **kwargs)
            if guard.armed and output.num_scheduled_tokens:
                try:
                    output._kvguard = self._payload(output)
                except GuardHalt:
                    raise
                except Exception as error:
                    guard.fault(error)
                    self._require_armed()
            return output

        def guarded_update(output: Any, model_output: Any, *args: Any, **kwargs: Any) -> Any:
            payload = getattr(output, "_kvguard", None)
            if payload is None:
                return update(output, model_output, *args, **kwargs)
            ended = self._shielded(partial(verdicts.act, payload.delta, model_output)) or []
            if not guard.armed:
                self._require_armed()
                ended += verdicts.flagged_without_books(payload.delta, model_output)
            result = update(output, model_output, *args, **kwargs)
            if ended:
                verdicts.tell_clients(result, ended)
            return result

        scheduler.schedule, scheduler.update_from_output = guarded_schedule, guarded_update
        if hasattr(scheduler, "_handle_invalid_blocks"):
            scheduler._handle_invalid_blocks = self._rewinding(scheduler._handle_invalid_blocks)

    def _require_armed(self) -> None:
        if not self.guard.armed and self.guard.config.on_guard_error == "abort":
            raise GuardFault("kvguard has failed and on_guard_error is abort: nothing unproven may leave")

    def _rewinding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # A connector could not load some blocks: their requests compute these tokens again.
            affected = original(*args, **kwargs)
            for name in affected or ():
                request = self._scheduler.requests.get(name)
                if request is not None and name in self._columns:
                    tokens = request.num_computed_tokens
                    self._shielded(partial(self.guard.rewind, name, tokens))
            return affected

        return guarded

    # -- blocks change hands --------------------------------------------------------------------------------------

    def _taken(self, blocks: list[Any], get_new_blocks: Callable[..., Any]) -> list[Any]:
        """Blocks left the free queue. One that a request still holds is left to it, and another is drawn."""
        pages = [block.block_id for block in blocks]
        if len(self._groups) == 1 and self.guard.may_hand_out(pages):
            known = [page for page in pages if self._group_of.pop(page, None) is not None]
            if known:
                self.guard.retire(known)
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

    def _unpublished(self, page: int) -> None:
        group = self._group_of.get(page)
        if group is not None:
            self.guard.unpublish([page], pool=self._groups[group])

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
        drafts = output.scheduled_spec_decode_tokens
        names = list(output.num_scheduled_tokens)
        counts = [[len(blocks[name]) for name in names] for blocks in self._blocks_of]
        if self._published or counts != self._counts or names != self._in_step:
            self._catch_up_with_step(names, counts)
        ends = [requests[name].num_computed_tokens for name in names]
        if drafts:
            # Drafted tokens may be rejected: what they write is not counted as computed.
            ends = [end - len(drafts.get(name, ())) for name, end in zip(names, ends, strict=True)]
        if self._fresh or self._published:
            self._catch_up_with_waiting(requests)
        self._key_in_pass.clear()
        delta = self.guard.step(names, [0] * len(names), ends)
        return StepPayload(setup=self.guard.setup if delta.step == 1 else None, delta=delta)

    def _catch_up_with_step(self, names: list[str], counts: list[list[int]]) -> None:
        """Learn what is new of the step's requests; `counts`: the number of blocks of each, per group."""
        behind = names
        if names == self._in_step:
            grown = [map(ne, new, old) for new, old in zip(counts, self._counts, strict=True)]
            behind = [name for name, moved in zip(names, map(any, zip(*grown, strict=True)), strict=True) if moved]
        self._in_step, self._counts = [], []
        self._take_one_each(behind)
        if self._published or len(behind) < len(names):
            known = set(behind)
            behind = [name for name in names if name in known or name in self._published]
        for name in behind:
            self._catch_up(name, self._scheduler.requests[name])
            if self._published:
                self._publish(name, None)
        # Only now: a pass that failed half way must not be taken for one that learnt everything.
        self._in_step, self._counts = names, counts

    def _take_one_each(self, names: list[str]) -> None:
        """Requests that went on to one fresh block, as in decode: in one call for all of them."""
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
            if grown and self.guard.allocate_each(grown, pages, pool=self._groups[group]):
                raise RuntimeError(f"one of the blocks {pages} was refused after it was vetted")

    def _catch_up(self, name: str, request: Any) -> None:
        """The request's blocks, as vLLM has them now, into its ledgers."""
        columns = self._columns.get(name)
        if columns is None:
            self.guard.start(name)
            columns = self._columns[name] = [0] * len(self._managers)
        for group, manager in enumerate(self._managers):
            blocks = manager.req_to_blocks.get(name, ())
            if len(blocks) != columns[group]:
                self._learn(request, group, blocks, columns)

    def _catch_up_with_waiting(self, requests: Any) -> None:
        """Requests that got blocks without being scheduled: a connector loads their KV first, and may publish it."""
        holding = {name for manager in self._managers for name in manager.req_to_blocks}
        for name in holding & requests.keys():
            self._catch_up(name, requests[name])
        for name in list(self._published):
            if name in self._columns:
                # Loaded before it was published: no step of this request has to write it.
                self._publish(name, 0)
        self._published.clear()

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
        self.guard.adopt(
            request.request_id,
            [(self._key(request, group, column), block.block_id)],
            pool=self._groups[group],
            refusable=False,
        )

    def _key(self, request: Any, group: int, column: int) -> Any:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes

        size = self._managers[group].block_size
        hashes = resolve_block_hashes(request.block_hashes, self._block_pool.hash_block_size, size)
        return make_block_hash_with_group_id(hashes[column], group) if column < len(hashes) else None

    def _publish(self, name: str, tokens: int | None) -> None:
        for group, column, key in self._published.pop(name, ()):
            self.guard.publish(name, column, key, pool=self._groups[group], tokens=tokens)
