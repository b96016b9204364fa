"""Hooks where pages change hands: allocation, prefix tree, free list.

Each is one attribute look-up where no guard is attached, and otherwise appends to the queue of the books. No value on
the device is read, unless something was wrong before: see `SchedulerGuard.audits`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvguard.adapters.sglang.plugin import ATTACHED
from kvguard.content_key import LANES
from kvguard.kernels.events import ANYBODY, UNSAID

# -- allocation -------------------------------------------------------------------------------------------------------


def around_alloc_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """New tokens of a prefill, or of a chunk of one; a fresh row adopts what the prefix tree had for it."""
    guard = getattr(batch.tree_cache, ATTACHED, None)
    if guard is None or not (guard.armed or guard.condemned_rows):
        return original(batch)
    # Known only now: afterwards every request holds its row.
    fresh = [not req.kv.holds_kv for req in batch.reqs]
    prefixes: list[Tensor] = []
    guard.prefixes = prefixes
    try:
        result = original(batch)
    finally:
        guard.prefixes = None
    with guard.contained():
        if guard.condemned_rows:
            for req, is_fresh in zip(batch.reqs, fresh, strict=True):
                if is_fresh:
                    guard.acquit(int(req.kv.req_pool_idx))
        if guard.armed:
            _stamp_extend(guard, batch, fresh, prefixes, result)
    return result


def _stamp_extend(guard: Any, batch: Any, fresh: list[bool], prefixes: list[Tensor], result: Any) -> None:
    books = guard.books
    slots, rows, _ = result
    count = len(batch.reqs)
    placed = np.zeros(2 * count + 1, np.int64)
    placed[:count] = batch.prefix_lens
    np.cumsum(batch.extend_lens, out=placed[count + 1 :])
    uploaded = books.upload(placed)
    adopted = content = None
    if any(fresh):
        if len(prefixes) != count:
            raise RuntimeError(f"{len(prefixes)} prefixes for {count} requests: not the allocation that is known")
        parts = []
        for is_fresh, prefix in zip(fresh, prefixes, strict=True):
            if not is_fresh:
                parts.append(books.goes_on)
            else:
                parts.append(prefix[-1:] if prefix.shape[0] else books.no_prefix)
        adopted = torch.cat(parts)
        if guard.contents is not None:
            content = _own_contents(guard, batch.reqs, fresh, prefixes)
    ends = placed[count + 1 :]
    names = [req.rid for req in batch.reqs]

    def name_of(place: int) -> str | None:
        at = int(np.searchsorted(ends, place, side="right"))
        return names[at] if at < count else None

    # A copy of what was allocated: what is wrong with the slots by the time of the forward is not to be believed.
    books.stamp(
        slots.clone(),
        rows,
        uploaded[:count],
        offset=uploaded[count:],
        adopted=adopted,
        content=content,
        names=name_of,
    )


def _own_contents(guard: Any, reqs: list[Any], fresh: list[bool], prefixes: list[Tensor]) -> Tensor:
    """int64 [batch, 2]: what each fresh request is itself, up to where the prefix ends that the tree had for it."""
    lanes = np.zeros((len(reqs), LANES), np.int64)
    for place, (req, is_fresh, prefix) in enumerate(zip(reqs, fresh, prefixes, strict=True)):
        if is_fresh:
            lanes[place] = guard.contents.at(guard.contents.identify(req), prefix.shape[0])
    content: Tensor = guard.books.upload(lanes.reshape(-1)).view(-1, LANES)
    return content


def after_prefix_kv_indices(result: Tensor, batch: Any, req: Any) -> None:
    """What SGLang is about to write into a row as its cached prefix: from the tree, not from the row."""
    guard = getattr(batch.tree_cache, ATTACHED, None)
    if guard is not None and guard.prefixes is not None:
        guard.prefixes.append(result)


def around_alloc_for_decode(original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
    """One new token for every request of a decode batch."""
    guard = getattr(batch.tree_cache, ATTACHED, None)
    if guard is None or not guard.armed:
        return original(batch, token_per_req)
    slots = original(batch, token_per_req)
    reqs = batch.reqs
    with guard.contained():
        # SGLang replaces rows and lengths in the next step and never writes into them. The slots are copied, see above.
        guard.books.stamp(
            slots.clone(),
            batch.req_pool_indices,
            batch.seq_lens,
            names=lambda place: reqs[place].rid if place < len(reqs) else None,
        )
    return slots


# -- free list --------------------------------------------------------------------------------------------------------


def around_token_free(original: Callable[..., Any], allocator: Any, free_index: Tensor) -> Any:
    """Page size 1: slots are pages. Inside a free group SGLang only collects, and calls again at its end."""
    guard = getattr(allocator, ATTACHED, None)
    if guard is None or not guard.armed or not free_index.shape[0]:
        return original(allocator, free_index)
    if guard.audits:
        free_index = guard.own_pages(free_index)
    count = free_index.shape[0]
    if allocator.free_group is not None:
        guard.group.append((guard.freeing, count))
        return original(allocator, free_index)
    if not count:
        return None
    original(allocator, free_index)
    with guard.contained():
        # Often a view of a row that is written again; its copy at the end of the free list is not.
        kept = allocator.release_pages if allocator.need_sort else allocator.free_pages
        guard.books.retire(kept[-count:], _holders(guard, count))
    return None


def around_free_page_ids(original: Callable[..., Any], allocator: Any, page_ids: Tensor) -> Any:
    """Larger pages, by id."""
    guard = getattr(allocator, ATTACHED, None)
    if guard is None or not guard.armed or not page_ids.shape[0]:
        return original(allocator, page_ids)
    if guard.audits:
        page_ids = guard.own_pages(page_ids)
    if allocator.free_group is not None:
        guard.group.append((guard.freeing, page_ids.shape[0]))
    return original(allocator, page_ids)


def around_paged_free(original: Callable[..., Any], allocator: Any, free_index: Tensor) -> Any:
    """Larger pages, by slots: SGLang finds out which pages they are, and nobody says whose."""
    guard = getattr(allocator, ATTACHED, None)
    if guard is None:
        return original(allocator, free_index)
    if allocator.free_group is not None:
        guard.plain_collected = True
    before, guard.plain_free = guard.plain_free, True
    try:
        return original(allocator, free_index)
    finally:
        guard.plain_free = before


def around_release_page_ids(original: Callable[..., Any], allocator: Any, *page_ids: Tensor) -> Any:
    """Larger pages: every real free ends here, with page ids that nobody writes into again."""
    guard = getattr(allocator, ATTACHED, None)
    if guard is None or not guard.armed:
        return original(allocator, *page_ids)
    if guard.audits and guard.plain_free:
        page_ids = tuple(guard.own_pages(pages) for pages in page_ids)
    original(allocator, *page_ids)
    with guard.contained():
        for pages in page_ids:
            count = pages.shape[0]
            if count:
                guard.books.retire(pages, _plain_holders(guard, count) if guard.plain_free else _holders(guard, count))
    return None


def _holders(guard: Any, count: int) -> Any:
    """Whose the pages of a free are: at the end of a free group what was noted on the way, else whoever frees now."""
    group, guard.group = guard.group, []
    if sum(number for _, number in group) == count:
        return group
    return ((guard.freeing if not group else UNSAID, count),)


def _plain_holders(guard: Any, count: int) -> Any:
    """The same for a free by slots; SGLang has made pages out of them, in whatever order."""
    collected, guard.plain_collected = guard.plain_collected, False
    return ((UNSAID if collected else guard.freeing, count),)


def after_clear(_: Any, allocator: Any) -> None:
    """SGLang emptied its cache."""
    guard = getattr(allocator, ATTACHED, None)
    if guard is None:
        return
    if guard.armed:
        guard.cleared()
    else:
        guard.audits = False


# -- prefix tree ------------------------------------------------------------------------------------------------------


def around_checkpoint(original: Callable[..., Any], tree: Any, req: Any, *, up_to: int, **kwargs: Any) -> Any:
    """A request's record goes into the tree, which may have the same tokens already: the row is then repointed."""
    guard = getattr(tree, ATTACHED, None)
    if guard is None or not guard.armed or tree.disable:
        return original(tree, req, up_to=up_to, **kwargs)
    kv, size = req.kv, guard.books.page_size
    row, before, end = kv.req_pool_idx, kv.cache_protected_len, kv.kv_allocated_len
    table = tree.req_to_token_pool.req_to_token
    old = place = None
    with guard.contained():
        # Before the tree's own frees: duplicates still carry the tags that the row was promised.
        old = table[row, before:end:size].clone()
        place = guard.books.reserve()
    guard.inserting = row + 1
    try:
        result = original(tree, req, up_to=up_to, **kwargs)
    finally:
        guard.inserting = ANYBODY
        if place is not None:
            guard.books.give_up(place)
    after = kv.cache_protected_len
    if place is not None and after > before:
        with guard.contained():
            if before % size or after % size:
                raise RuntimeError(f"tokens {before} to {after} of {req.rid} are no whole pages of {size}")
            new = table[row, max(before - size, 0) : after : size].clone()
            start, stop = before // size, after // size
            content = None
            if guard.contents is not None:
                lanes = guard.contents.of_columns(req, start, stop, size)
                content = guard.books.upload(lanes.reshape(-1)).view(-1, LANES)
                place.subject = lambda at: (req, (start + at + 1) * size)
            guard.books.publish(place, row=row, start=start, stop=stop, old=old, new=new, content=content)
            guard.published(place, row)
    return result


def around_tree_free(original: Callable[..., Any], tree: Any, action: Any) -> Any:
    """What the tree frees: evicted pages, and a request's duplicates of what it has already."""
    guard = getattr(tree, ATTACHED, None)
    if guard is None:
        return original(tree, action)
    # While a record is inserted, what the tree frees are the record's own duplicates.
    before, guard.freeing = guard.freeing, guard.holder_of(action)
    try:
        return original(tree, action)
    finally:
        guard.freeing = before


def around_free_kv_row(original: Callable[..., Any], tree: Any, kv: Any, ranges: Any) -> Any:
    """A request gives back the rest of its row; one whose proof failed gives back what is its own, and only that."""
    guard = getattr(tree, ATTACHED, None)
    # A guard that failed since still answers for the requests that it ended.
    if guard is None or not (guard.armed or guard.condemned_rows):
        return original(tree, kv, ranges)
    row = kv.req_pool_idx
    if row in guard.condemned_rows:
        with guard.contained():
            guard.release_own(row)
            return None
        return original(tree, kv, ranges)
    before, guard.freeing = guard.freeing, row + 1
    try:
        return original(tree, kv, ranges)
    finally:
        guard.freeing = before


def around_match_prefix(original: Callable[..., Any], tree: Any, params: Any) -> Any:
    """After a violation a cached prefix is compared with the books on the host, and cut where it does not hold.

    After new weights nothing of what was cached before is taken, and nothing is added, until the cache was emptied.
    """
    guard = getattr(tree, ATTACHED, None)
    if guard is not None and guard.outdated:
        if params.req is not None:
            params.req.skip_radix_cache_insert = True
        return original(tree, dataclasses.replace(params, key=params.key[:0]))
    result = original(tree, params)
    if guard is None or not guard.audits or tree.disable or not (guard.armed or guard.ranks > 1):
        return result
    return guard.audited_match(original, tree, params, result)
