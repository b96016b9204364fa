"""The wrappers that keep the books, next to vLLM's scheduler, in the engine-core process.

They stand only where blocks change hands and around a step as a whole, never on a call that every request makes in
every step. They are set on the scheduler's own objects: vLLM's classes keep their functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import zip_longest
from typing import Any

from kvguard.adapters.vllm.block_books import BlockBooks
from kvguard.adapters.vllm.verdicts import VerdictHandler
from kvguard.config import GuardConfig
from kvguard.guard import Guard, GuardHalt
from kvguard.pools import PoolSpec
from kvguard.violation import Proof


class GuardFault(RuntimeError):
    """A fault inside kvguard while `on_guard_error` is `abort`: the engine stops rather than serve unguarded."""


class SchedulerSide(BlockBooks):
    """One vLLM Scheduler's guard: the wrappers through which its books learn what happens."""

    def __init__(
        self,
        scheduler: Any,
        pools: tuple[PoolSpec, ...],
        config: GuardConfig,
        *,
        proofs: frozenset[Proof] | None = None,
    ) -> None:
        """`proofs`: as in Guard, for fault campaigns alone."""
        super().__init__(Guard(pools, config, proofs=proofs), scheduler, pools)
        self._verdicts = VerdictHandler(self.guard, scheduler, pools)
        self._wrap_pool()
        self._wrap_managers(scheduler.kv_cache_manager)
        self._wrap_scheduler(scheduler)

    def watch_weights(self, core: Any) -> None:
        """Learn from an EngineCore when the weights change; below level `keys` nothing depends on it."""
        if self._contents is not None:
            self._contents.watch_weights(core)

    # -- wrappers -------------------------------------------------------------------------------------------------

    def _shielded(self, call: Callable[..., Any], *args: Any) -> Any:
        """A fault of the guard must not surface in vLLM; what follows it is `on_guard_error`."""
        if not self.guard.armed:
            return None
        try:
            return call(*args)
        except GuardHalt:
            raise
        except Exception as error:
            self.guard.fault(error)
            return None

    def _wrap_pool(self) -> None:
        pool = self._block_pool
        get_new_blocks, free_blocks = pool.get_new_blocks, pool.free_blocks
        cache_full_blocks, evict = pool.cache_full_blocks, pool._maybe_evict_cached_block

        guard, taken, group_of = self.guard, self._taken, self._group_of
        names: list[str | None] = [None] if len(self._groups) == 1 else [*self._groups]

        # A block at a time in decode: what `_shielded` does, without the call.
        def guarded_get_new_blocks(num_blocks: int, *args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(num_blocks, *args, **kwargs)
            if not guard.armed:
                return blocks
            try:
                return taken(blocks, get_new_blocks)
            except GuardHalt:
                raise
            except Exception as error:
                guard.fault(error)
                return blocks

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
            if self.guard.armed:
                for column in range(num_cached_blocks, num_full_blocks):
                    block = blocks[column]
                    if block.block_hash is not None:
                        there = self._loads and (column + 1) * block_size <= request.num_computed_tokens
                        self._note_publication(request.request_id, kv_cache_group_id, column, block, there)
            return result

        def guarded_evict(block: Any, *args: Any, **kwargs: Any) -> Any:
            evicted = evict(block, *args, **kwargs)
            group = group_of.get(block.block_id) if evicted else None
            if group is not None and guard.armed:
                try:
                    guard.unpublish((block.block_id,), pool=names[group])
                except GuardHalt:
                    raise
                except Exception as error:
                    guard.fault(error)
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

    def _dropping(self, original: Callable[..., Any], group: int) -> Callable[..., Any]:
        def guarded(request_id: str, start: int, stop: int, *args: Any, **kwargs: Any) -> Any:
            # A request that was only looked up has no columns yet.
            if any(self._columns.get(request_id, ())):
                self._shielded(lambda: self.guard.drop(request_id, start, stop, pool=self._groups[group]))
            return original(request_id, start, stop, *args, **kwargs)

        return guarded

    def _vetting_hits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
            if self._contents is not None:
                self._shielded(lambda: self._start(request))
            result = found = original(request, *args, **kwargs)
            held_to = found[1] + 1
            while found[1]:
                limit = self._shielded(partial(self._first_wrong_hit, request, found[0].blocks, found[1]))
                if limit is None:
                    break
                if limit >= held_to:
                    # It has not kept to the last limit: it would say the same for ever.
                    found = (self._scheduler.kv_cache_manager.empty_kv_cache_blocks, *(0 for _ in found[1:]))
                    break
                held_to = limit
                # vLLM looks again, for less: groups of a hybrid model must agree on a length, which it sees to itself.
                found = self._looked_up_again(original, limit, request, *args, **kwargs)
            if found is not result:
                self._correct_statistics(request, result[1] - found[1])
            return found

        return guarded

    def _first_wrong_hit(self, request: Any, groups: Any, tokens: int) -> int | None:
        """The position in tokens before which the hits of a lookup are right; None if all are.

        The cache forgets what led to the first wrong one of each group. tokens: how many the lookup says it has found,
        which vLLM will not compute: each group must have blocks for them.
        """
        wrong = []
        for group, blocks in enumerate(groups):
            covered = len(blocks) * self._managers[group].block_size
            if covered < tokens and self.guard.vet_range(
                request.request_id, tokens, len(blocks), pool=self._groups[group]
            ):
                wrong.append(covered)
            hits: list[tuple[int, Any, int]] = []
            promised: list[tuple[int, Any, int]] = []
            for column, (block, key) in enumerate(zip_longest(blocks, self._keys(request, group, len(blocks)))):
                if not block.is_null:
                    page = block.block_id
                    # What was published earlier in this very pass reaches the books at its end.
                    (promised if self._key_in_pass.get(page) == key else hits).append((column, key, page))
            found = self._first_refused(request, group, hits)
            if self._contents is not None:
                for column, key, page in promised:
                    if found is not None and column > found[0]:
                        break
                    if not self._may_take_promised(request, group, column, page):
                        found = (column, key, page)
                        break
            if found is not None:
                self._drop_cache_entry(found[1], found[2])
                wrong.append(found[0] * self._managers[group].block_size)
        return min(wrong, default=None)

    def _first_refused(self, request: Any, group: int, hits: list[tuple[int, Any, int]]) -> tuple[int, Any, int] | None:
        accepted = self.guard.vet_hits(
            request.request_id,
            [(key, page) for _, key, page in hits],
            pool=self._groups[group],
            columns=[column for column, _, _ in hits],
        )
        return hits[accepted] if accepted < len(hits) else None

    def _may_take_promised(self, request: Any, group: int, column: int, page: int) -> bool:
        assert self._contents is not None
        publisher, published = self._place_in_pass[page]
        self._contents.learn(self._scheduler.requests[publisher], (published + 1) * self._managers[group].block_size)
        return self.guard.vet_promised(
            request.request_id, column, page, publisher, published, pool=self._groups[group]
        )

    def _looked_up_again(
        self, look_up: Callable[..., Any], limit: int, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """`get_computed_blocks` once more, for at most `limit` tokens; it counts in no statistics."""
        manager = self._scheduler.kv_cache_manager
        coordinator = manager.coordinator
        find, own = coordinator.find_longest_cache_hit, vars(coordinator).get("find_longest_cache_hit")
        counting = manager.log_stats

        def find_less(block_hashes: Any, max_cache_hit_length: int, *more: Any, **named: Any) -> Any:
            return find(block_hashes, min(max_cache_hit_length, limit), *more, **named)

        coordinator.find_longest_cache_hit, manager.log_stats = find_less, False
        try:
            return look_up(request, *args, **kwargs)
        finally:
            manager.log_stats = counting
            if own is None:
                del coordinator.find_longest_cache_hit
            else:
                coordinator.find_longest_cache_hit = own

    def _correct_statistics(self, request: Any, refused_tokens: int) -> None:
        """Releases that count hits in the lookup itself, and not at admission, have counted those that were refused."""
        manager = self._scheduler.kv_cache_manager
        if manager.log_stats and not hasattr(manager, "record_prefix_cache_stats"):
            stats, preempted = manager.prefix_cache_stats, request.num_preemptions > 0
            name = "preempted_hits" if preempted and hasattr(stats, "preempted_hits") else "hits"
            setattr(stats, name, getattr(stats, name) - refused_tokens)

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
            # Whoever drives an engine in his own process may do so from one thread after another.
            guard.change_thread()
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
            guard.change_thread()
            ended = self._shielded(partial(verdicts.act, payload.delta, model_output)) or []
            if not guard.armed:
                self._require_armed()
                ended += verdicts.flagged_without_books(payload.delta, model_output)
            result = update(output, model_output, *args, **kwargs)
            if self._published and guard.armed:
                self._shielded(self._publish_rest)
            if ended:
                verdicts.tell_clients(result, ended)
            return result

        scheduler.schedule, scheduler.update_from_output = guarded_schedule, guarded_update
        if self._contents is not None and hasattr(scheduler, "_update_request_as_session"):
            scheduler._update_request_as_session = self._contents.follow_session(scheduler._update_request_as_session)
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
                    self._shielded(partial(self._rewind, request))
            return affected

        return guarded

    def _rewind(self, request: Any) -> None:
        """vLLM leaves in the cache what the request is about to compute again: publications are promises once more."""
        name, tokens = request.request_id, request.num_computed_tokens
        self.guard.rewind(name, tokens)
        for group, (manager, blocks_of) in enumerate(zip(self._managers, self._blocks_of, strict=True)):
            blocks = blocks_of.get(name, ())
            for column in range(tokens // manager.block_size, len(blocks)):
                if blocks[column].block_hash is not None:
                    self._note_publication(name, group, column, blocks[column], False)
        self._publish_rest()
