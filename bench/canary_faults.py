"""The rows of the matrix: a history each, with one thing wrong in it or nothing.

A history acts through the World's calls, which are SGLang's, and breaks the engine's state by hand, the way the bug
would. It says `live` right before the first forward that reads what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.canary_arrivals import (
    clean,
    damage,
    handed_first,
    handed_later,
    handed_over,
    loaded_back,
    loaded_first,
    loaded_later,
)
from bench.canary_world import PAGE, World, prompt

SHARED = 2 * PAGE


@dataclass(frozen=True)
class Case:
    """One row. needs: what kvguard needs for it beyond tags; None: a tag can see it.

    prior   what the table of prior art says of kv_canary under D, B and T; None: it has no such row
    control a case without the fault, whose hits are not hits of this one
    """

    name: str
    title: str
    play: Callable[[World], None]
    needs: str | None = None
    healthy: bool = False
    prior: tuple[str, str, str] | None = None
    control: str | None = None

    def needed_beyond(self, level: str) -> str:
        """What sees it and is not in a level, `tags` or `keys`; "" where the level has what it takes."""
        return "" if self.needs in (None, level) else str(self.needs)


def _private(world: World, name: str = "A", seed: int = 1) -> Any:
    """A request with 8 tokens of prompt, which the tree takes, and 9 of its own: columns 2, 3 and 4 are its alone."""
    return world.start(name, prompt(seed, SHARED), outputs=9)


def _give_away(world: World, slots: Any) -> None:
    """The engine frees a page that is still used, by the slots of its tokens."""
    world.allocator.free(slots[slots > 0])


# -- pages that change hands ------------------------------------------------------------------------------------------


def refilled(world: World) -> None:
    """A's middle page is freed; B gets it and fills it."""
    a = _private(world)
    _give_away(world, world.slots(a, 3))
    world.start("B", prompt(2, 10))
    world.live(a)
    world.decode(a)
    world.decode(a)


def not_rewritten(world: World) -> None:
    """A's middle page is freed and given to B, whose forward is still to come when A reads."""
    a = _private(world)
    _give_away(world, world.slots(a, 3))
    waiting = world.request("B", prompt(2, 10))
    world.allocate(waiting)
    world.live(a)
    world.decode(a)


def not_reused(world: World) -> None:
    """A's middle page is freed and nobody has it."""
    a = _private(world)
    _give_away(world, world.slots(a, 3))
    world.live(a)
    world.decode(a)


def _tail(world: World, give: Callable[[World, Any], None]) -> None:
    a = world.start("A", prompt(1, SHARED), outputs=2)
    give(world, world.slots(a, 2))
    b = world.start("B", [*prompt(1, SHARED), *prompt(7, 2)])
    if int(world.slots(b, 2)[0]) != int(world.slots(a, 2)[0]):
        raise RuntimeError("B did not get A's page")
    world.live(a)
    for _ in range(2):
        world.decode(a, b)


def tail_freed(world: World) -> None:
    """A and B share a prompt; A's last page is freed and becomes B's last page."""
    _tail(world, _give_away)


def tail_twice(world: World) -> None:
    """A and B share a prompt; the free list holds A's last page as well."""

    def list_twice(world: World, slots: Any) -> None:
        world.allocator.free_pages = torch.cat([slots[:1] // PAGE, world.allocator.free_pages])

    _tail(world, list_twice)


def tree_page(world: World) -> None:
    """A cached page that nobody reads is freed, B fills it, and then A has a cache hit on it."""
    c = world.start("C", prompt(3, 12))
    pages = world.slots(c, 1)
    world.finish(c)
    _give_away(world, pages)
    world.start("B", prompt(2, 10))
    a = world.request("A", [*prompt(3, 12), *prompt(8, 3)])
    world.live(a)
    world.prefill(a)
    world.decode(a)


def tree_sibling(world: World) -> None:
    """A cached page is freed; B, with the same first page, fills it and publishes it; A has a hit on the old node."""
    c = world.start("C", [*prompt(3, PAGE), *prompt(4, PAGE), 1])
    page = world.slots(c, 1)
    world.finish(c)
    _give_away(world, page)
    b = world.start("B", [*prompt(3, PAGE), *prompt(5, PAGE), 2])
    if int(world.slots(b, 1)[0]) != int(page[0]):
        raise RuntimeError("B did not get C's page")
    a = world.request("A", [*prompt(3, PAGE), *prompt(4, PAGE), 3])
    world.live(a)
    world.prefill(a)
    if a.prefix_len != SHARED:
        raise RuntimeError("A had no hit on C's pages")
    world.decode(a)


# -- rows of the block table ------------------------------------------------------------------------------------------


def stale_row(world: World) -> None:
    """A's row holds what C's row holds."""
    a, c = _private(world, "A", 1), _private(world, "C", 5)
    length = a.kv.kv_allocated_len
    world.table[world.row(a), :length] = world.table[world.row(c), :length]
    world.live(a)
    world.decode(a)
    world.decode(a)


def zeroed(world: World) -> None:
    """A page's entries in the middle of A's row are 0."""
    a = _private(world)
    world.table[world.row(a), 2 * PAGE : 3 * PAGE] = 0
    world.live(a)
    world.decode(a)
    world.decode(a)


def swapped(world: World) -> None:
    """Two pages of A stand in each other's place."""
    a = _private(world)
    second, third = world.slots(a, 2), world.slots(a, 3)
    world.table[world.row(a), 2 * PAGE : 4 * PAGE] = torch.cat([third, second]).to(torch.int32)
    world.live(a)
    world.decode(a)
    world.decode(a)


# -- prefix hits ------------------------------------------------------------------------------------------------------


def _as_if(world: World, a: Any, tokens: list[int], tenant: str | None) -> None:
    """A is matched as if it had these tokens and that tenant; then it is itself again."""
    from array import array

    own, own_tenant = a.origin_input_ids, a.extra_key
    a.origin_input_ids, a.extra_key = array("q", tokens), tenant
    world.match(a)
    a.origin_input_ids, a.extra_key = own, own_tenant
    a.full_untruncated_fill_ids = array("q", own)
    world.match = lambda req: None  # type: ignore[method-assign]
    world.live(a)
    world.prefill(a)
    world.decode(a)


def phantom(world: World) -> None:
    """The tree takes A's prompt for C's: other tokens, the same places."""
    world.finish(world.start("C", prompt(3, 13)))
    a = world.request("A", prompt(4, 15))
    _as_if(world, a, prompt(3, 15), None)


def other_tenant(world: World) -> None:
    """The tree gives A the pages of another tenant (or salt, or LoRA adapter) with the same tokens."""
    world.finish(world.start("C", prompt(3, 13), tenant="one"))
    a = world.request("A", prompt(3, 15), tenant="two")
    _as_if(world, a, prompt(3, 15), "one")


def _hit(world: World, a: Any, change: Callable[[Any], Any]) -> None:
    """A's cached prefix comes out of the tree changed."""
    indices, changed = world.tree.prefix_device_indices, []

    def broken(req: Any) -> Any:
        changed.append(change(indices(req).clone()))
        return changed[0]

    world.tree.prefix_device_indices = broken
    batch = world.allocate(a)
    world.tree.prefix_device_indices = indices
    if len(changed) != 1 or changed[0].shape[0] != SHARED:
        raise RuntimeError("A had no cache hit of two pages")
    world.live(a)
    world.run_prefill(batch)
    world.decode(a)


def other_place(world: World) -> None:
    """A hit of two pages gives C's third page as the second."""
    c = world.start("C", prompt(3, 13))
    third = world.slots(c, 2)
    world.finish(c)
    a = world.request("A", [*prompt(3, SHARED), *prompt(6, 3)])
    _hit(world, a, lambda slots: torch.cat([slots[:PAGE], third]))


def other_prefix(world: World) -> None:
    """A hit gives a page with A's tokens at A's places that was computed after another first page."""
    second = prompt(9, PAGE)
    y = world.start("Y", [*prompt(5, PAGE), *second, 1])
    page = world.slots(y, 1)
    world.finish(y)
    world.finish(world.start("X", [*prompt(4, PAGE), *second, 2]))
    a = world.request("A", [*prompt(4, PAGE), *second, *prompt(6, 3)])
    _hit(world, a, lambda slots: torch.cat([slots[:PAGE], page]))


# -- writes and bytes -------------------------------------------------------------------------------------------------


def _stray(world: World, layer: int) -> None:
    a, b = _private(world, "A", 1), _private(world, "B", 2)
    slots = world.slots(a, 3)
    world.stray = lambda: damage(world, slots, layer)
    # Within a layer, K and V are stored before attention reads: this very forward reads it.
    world.live(a)
    world.decode(a, b)
    world.decode(a, b)


def stray_first(world: World) -> None:
    """A kernel writes past its place, into A's page, in layer 0."""
    _stray(world, 0)


def stray_later(world: World) -> None:
    """The same in another layer only."""
    _stray(world, 2)


def wrong_mapping(world: World) -> None:
    """The slot mapping of B's token names a slot of A's page."""
    a, b = _private(world, "A", 1), _private(world, "B", 2)
    world.misdirected = {int(world.slots(b, 4)[0]) + 1: int(world.slots(a, 3)[1])}
    world.live(a, b)
    world.decode(b)
    world.decode(a, b)


def lost_write(world: World) -> None:
    """K and V of one of A's tokens are never stored."""
    a = _private(world)
    world.unwritten = {int(world.slots(a, 4)[0]) + 1}
    world.live(a)
    world.decode(a)
    world.decode(a)


def _flip(world: World, layer: int) -> None:
    a = _private(world)
    slot = int(world.slots(a, 3)[1])
    world.pool.k_buffer[layer].view(torch.int16)[slot, 1, 3] ^= 1 << 9
    world.live(a)
    world.decode(a)
    world.decode(a)


def flip_first(world: World) -> None:
    """A bit of A's page flips between two steps, in layer 0."""
    _flip(world, 0)


def flip_later(world: World) -> None:
    """The same in another layer."""
    _flip(world, 2)


def wrong_scale(world: World) -> None:
    """A chunk of A is stored with another quantisation scale than it is read with, in all layers."""
    a = world.request("A", prompt(1, 11))
    world.scale = 0.5
    world.prefill(a)
    world.live(a)
    world.decode(a)
    world.decode(a)


NEVER, YES = ("no", "no", "no"), ("yes", "yes", "yes")
TOKENS_ONLY = ("no", "no", "yes")

CASES = (
    Case("refilled", "use-after-free, middle page refilled by another request", refilled, prior=YES),
    Case("not_rewritten", "use-after-free, page reallocated, not rewritten yet", not_rewritten, prior=NEVER),
    Case("not_reused", "page freed while in use, not reused", not_reused),
    Case("tail_freed", "use-after-free of the tail page, shared system prompt", tail_freed, prior=TOKENS_ONLY),
    Case("tail_twice", "double allocation of the tail page, shared system prompt", tail_twice, prior=TOKENS_ONLY),
    Case("tree_page", "tree-owned page freed and reused, then a cache hit", tree_page),
    Case("tree_sibling", "the same, reused and published behind the same prefix, hit ends there", tree_sibling),
    Case("stale_row", "stale block-table row (a whole other row)", stale_row, prior=TOKENS_ONLY),
    Case("zeroed", "row entries zeroed (null slot) in mid-row", zeroed, prior=NEVER),
    Case("swapped", "swapped pages of one request", swapped, prior=YES),
    Case("other_place", "phantom hit, page from another position", other_place, prior=YES),
    Case("other_prefix", "same tokens, different earlier prefix", other_prefix, prior=YES),
    Case("phantom", "phantom prefix hit or hash collision of a whole prefix", phantom, "keys", prior=TOKENS_ONLY),
    Case("other_tenant", "cross-tenant, salt, LoRA reuse", other_tenant, "keys", prior=NEVER),
    Case("wrong_mapping", "slot mapping names another request's page", wrong_mapping),
    Case("stray_first", "wild write touching layer 0", stray_first, "seals", prior=("no", "late", "late")),
    Case("stray_later", "wild write, other layers only", stray_later, "seals", prior=NEVER),
    Case("lost_write", "lost KV write", lost_write, "write receipts", prior=NEVER),
    Case("flip_first", "bit flip in layer 0", flip_first, "seals", prior=("no", "late", "late")),
    Case("flip_later", "bit flip in another layer", flip_later, "seals", prior=NEVER),
    Case("wrong_scale", "wrong quantisation scale", wrong_scale, "seals", prior=NEVER),
    Case("handed_first", "P/D hand-over wrong in layer 0", handed_first, "seals", prior=("no", "yes", "yes")),
    Case("handed_later", "P/D hand-over wrong in another layer", handed_later, "seals", prior=NEVER),
    Case(
        "loaded_first",
        "host load-back wrong in layer 0",
        loaded_first,
        "seals",
        prior=("no", "yes", "yes"),
        control="loaded_back",
    ),
    Case(
        "loaded_later",
        "host load-back wrong in another layer",
        loaded_later,
        "seals",
        prior=NEVER,
        control="loaded_back",
    ),
    Case("clean", "healthy: sharing, chunks, eviction, reuse, retraction", clean, healthy=True),
    Case("handed_over", "healthy: correct P/D hand-over", handed_over, healthy=True),
    Case("loaded_back", "healthy: correct host load-back", loaded_back, healthy=True, prior=("false hit",) * 3),
)
