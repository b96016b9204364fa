"""Histories in which pages come from another server or from the host, right or wrong, and a clean one."""

from __future__ import annotations

from typing import Any

import torch

from bench.canary_world import PAGE, World, prompt, transfer

SHARED = 2 * PAGE
CHUNKED = 6 * PAGE


def damage(world: World, slots: Any, layer: int) -> None:
    """Other values in K of these slots in one layer."""
    world.pool.k_buffer[layer][slots] += 1.0


def _handed_over(world: World, damaged: int | None) -> None:
    """A is prefilled on another server, and its pages are transferred."""
    other, tokens = world.peer(), prompt(1, 11)
    there = other.start("A", tokens)
    a = world.request("A", tokens)
    # Pages are taken by the ordinary call, to tell both watches; no forward runs here, the bytes are transferred.
    world.start("C", prompt(5, 5))
    world.allocate(a)
    pairs = [(int(other.slots(there, k)[0]) // PAGE, int(world.slots(a, k)[0]) // PAGE) for k in range(3)]
    transfer(other, world, pairs)
    if damaged is not None:
        damage(world, world.slots(a, 1), damaged)
    a.output_ids.append(there.output_ids[0])
    world.live(a)
    world.decode(a)
    world.decode(a)


def handed_over(world: World) -> None:
    """Right."""
    _handed_over(world, None)


def handed_first(world: World) -> None:
    """A page arrives wrong in layer 0."""
    _handed_over(world, 0)


def handed_later(world: World) -> None:
    """A page arrives wrong in another layer."""
    _handed_over(world, 2)


def _loaded_back(world: World, damaged: int | None) -> None:
    """A's pages go to the host and come back into other pages, by the pool's own copies; B used the old ones."""
    a = world.start("A", prompt(1, 11))
    length = a.kv.kv_committed_len
    kept = world.allocator.get_cpu_copy(world.table[world.row(a), :length].to(torch.int64))
    tokens, output = [*a.origin_input_ids], a.output_ids[0]
    world.finish(a)
    world.evict_all()
    world.start("B", prompt(2, 9))
    again = world.request("A again", tokens)
    world.allocate(again)
    if damaged is not None:
        kept[damaged][0][0][PAGE : 2 * PAGE] += 1.0
    world.allocator.load_cpu_copy(kept, world.table[world.row(again), :length].to(torch.int64))
    again.output_ids.append(output)
    world.live(again)
    world.decode(again)
    world.decode(again)
    world.finish(again)
    # And whoever hits the cache on them.
    world.start("A hit", [*tokens, 5, 6], outputs=2)


def loaded_back(world: World) -> None:
    """Right."""
    _loaded_back(world, None)


def loaded_first(world: World) -> None:
    """A page comes back wrong in layer 0."""
    _loaded_back(world, 0)


def loaded_later(world: World) -> None:
    """A page comes back wrong in another layer."""
    _loaded_back(world, 2)


def clean(world: World) -> None:
    """Sharing, chunks, two requests that compute the same, a retraction, eviction under pressure, A-B-A reuse."""
    for turn in range(3):
        a = world.start(f"a{turn}", [*prompt(1, SHARED), *prompt(10 + turn, 5)], outputs=6)
        b = world.start(f"b{turn}", [*prompt(1, SHARED), *prompt(20 + turn, 3)], outputs=2)
        twins = [world.request(f"t{turn}{twin}", prompt(40 + turn, 14)) for twin in "xy"]
        world.prefill(*twins)
        chunked = world.request(f"c{turn}", prompt(30 + turn, CHUNKED))
        for upto in (PAGE * 2 + 1, PAGE * 4, CHUNKED):
            world.prefill(chunked, upto=upto)
        for _ in range(5):
            world.decode(a, b, chunked, *twins)
        world.retract(b)
        for _ in range(3):
            world.decode(a, *twins)
        for req in (a, chunked, *twins):
            world.finish(req)
        again = world.start(f"again{turn}", [*prompt(1, SHARED), *prompt(20 + turn, 3)], outputs=3)
        world.finish(again)
    missing = [name for name, count in world.counts.items() if not count]
    if missing:
        raise RuntimeError(f"the clean history had no {', '.join(missing)}")
