"""Nothing that the guard does in a step of healthy traffic waits for the device.

Three ways to look. In a real scheduler every torch call that the guard makes is recorded, with the short ways for
tensors in host memory closed. On the `meta` device a tensor has no values, so that whoever asks for one gets an
exception: a step's path is driven over it. Where there is a GPU the same path runs under torch's sync debug mode.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvguard import kernels
from kvguard.adapters.sglang import pages as hooks
from kvguard.adapters.sglang.books import TokenBooks
from kvguard.adapters.sglang.plugin import ATTACHED
from kvguard.tags import TagCounter
from tests.sglang.apart import on
from tests.sglang.engine import Client, Engine
from tests.sglang.scenarios import assert_clean, at_step, send
from tests.waiting import Recorder

DEVICES = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]
CONTENTS = pytest.mark.parametrize("contents", [False, True], ids=["tags", "keys"])
LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
TORCH = torch.__path__[0]
GUARD = ("/adapters/sglang/", "/kernels/", "/kvguard/staging.py", "/kvguard/guard.py")
ON_THE_HOST = ("StepWords.__init__",)
"""Where it takes the NumPy view of words that are on the host already, in pinned memory."""


def nobody_runs(frame: Any) -> bool:
    """Whether this is called where SGLang has nothing to do: there the guard looks at the free list."""
    while frame is not None:
        if frame.f_code.co_name == "before_idle":
            return True
        frame = frame.f_back
    return False


class GuardRecorder(Recorder):
    """Notes the torch calls of the guard's own code alone; SGLang may wait as it likes."""

    def __init__(self) -> None:
        super().__init__(scalars=True)
        self.where: Counter[str] = Counter()
        self.waited: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and (
            frame.f_code.co_filename.startswith(TORCH) or frame.f_code.co_filename == __file__
        ):
            frame = frame.f_back
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not any(part in file for part in GUARD) or "/sglang/srt/" in file:
            return func(*args, **(kwargs or {}))
        self.where[f"{file.rsplit('/', 1)[1]}:{name}"] += 1
        before = len(self.waits)
        result = super().__torch_function__(func, types, args, kwargs)
        if len(self.waits) > before and frame.f_code.co_qualname not in ON_THE_HOST and not nobody_runs(frame):
            self.waited.append(f"{self.waits[-1]} in {file.rsplit('/', 1)[1]}:{name}")
        return result


@contextmanager
def without_the_ways_for_host_memory() -> Iterator[None]:
    """The kernels do as they would on a device: every one of them that has a short way asks `on_host` for it."""
    operations = [path.parent.name for path in Path(kernels.__path__[0]).glob("*/torch_op.py")]
    modules = [importlib.import_module(f"kvguard.kernels.{name}.torch_op") for name in operations]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "on_host", lambda tensor: False, raising=False)
        yield


@LOOPS
@pytest.mark.parametrize("page_size", [1, 16])
@on(max_total_tokens=640, schedule_conservativeness=0.05)
def test_a_real_scheduler_is_never_waited_for(engine: Engine, page_size: int, overlap: bool) -> None:
    """Every torch call of the guard in healthy traffic with chunks, hits, evictions and retraction."""
    never_waited_for(engine)


@LOOPS
@pytest.mark.parametrize("page_size", [1, 16])
@on(environment={"KVGUARD_LEVEL": "keys"}, max_total_tokens=640, schedule_conservativeness=0.05)
def test_nor_is_it_for_content_keys(engine: Engine, page_size: int, overlap: bool) -> None:
    """The same at level keys: what requests are made of is hashed on the host, from what the host has."""
    never_waited_for(engine)
    assert (engine.guard.books.page_content != 0).any()


def never_waited_for(engine: Engine) -> None:
    """Traffic; see above."""
    recorder = GuardRecorder()

    def scenario(engine: Engine) -> Client:
        send(engine, tokens=90, exact=False)
        return at_step(40, lambda engine: send(engine, seed=2, tokens=20))

    with without_the_ways_for_host_memory(), recorder:
        engine.run(scenario(engine))
    assert recorder.waited == []
    assert_clean(engine, 50)
    # It has seen each of the four kernels, hooks that copy, and the launch of a step.
    seen = {place.split(":")[0] for place in recorder.where}
    assert {"pages.py", "scheduler_guard.py", "torch_op.py"} <= seen, recorder.where
    assert sum(recorder.where.values()) > 50 * 50


@on()
def test_the_recorder_sees_what_it_is_there_for(engine: Engine) -> None:
    """One glance at a tensor inside a hook, and the check above is red."""
    stamp = TokenBooks.stamp

    def run(glance: Any) -> list[str]:
        def glancing(self: Any, slots: Any, *args: Any, **kwargs: Any) -> None:
            hooks_glance(glance, slots)
            stamp(self, slots, *args, **kwargs)

        TokenBooks.stamp = glancing  # type: ignore[method-assign]
        recorder = GuardRecorder()
        try:
            with without_the_ways_for_host_memory(), recorder:
                send(engine, count=2, tokens=3)
                engine.run()
        finally:
            TokenBooks.stamp = stamp  # type: ignore[method-assign]
        return recorder.waited

    # Code that claims to stand in the adapter.
    space: dict[str, Any] = {}
    exec(compile("def hooks_glance(glance, slots): glance(slots)", hooks.__file__, "exec"), space)
    hooks_glance = space["hooks_glance"]
    for glance in ("item", "tolist", "cpu", "nonzero"):
        code = f"def look(slots): slots[:1].{glance}()"
        exec(compile(code, hooks.__file__, "exec"), space)
        assert run(space["look"]) != [], glance
    for code in ("bool(slots[0] > 0)", "slots[slots > 0]", "int(slots[0])", "slots.numpy()"):
        exec(compile(f"def look(slots): {code}", hooks.__file__, "exec"), space)
        assert run(space["look"]) != [], code
    assert run(lambda slots: None) == []


def a_step(device: str, contents: bool) -> None:
    """What a prefill, a decode step, a publication, frees and an emptied cache enqueue, on this device."""
    size, rows = 16, 4
    books = TokenBooks(
        num_pages=64, page_size=size, rows=rows + 2, device=device, tags=TagCounter(1), key=12345, contents=contents
    )
    own = torch.ones((rows, 2), dtype=torch.int64, device=device) if contents else None
    table = torch.zeros((rows + 2, 128), dtype=torch.int32, device=device)
    tokens = torch.arange(size, size + rows * 32, device=device)
    at = torch.arange(rows, device=device)
    offset = torch.arange(rows + 1, device=device) * 32
    fresh = torch.cat([books.no_prefix] * rows)
    books.stamp(tokens, at, torch.zeros_like(at), offset=offset, adopted=fresh, content=own)
    books.stamp(tokens[:rows], at, torch.full_like(at, 33))
    place = books.reserve()
    books.retire(tokens[:3] // size, ((1, 3),))
    books.retire(tokens[:4] // size, ((1, 2), (-1, 2)))
    content = None if own is None else own[:1]
    books.publish(place, row=1, start=1, stop=2, old=tokens[:2], new=tokens[:2], content=content)
    found = torch.zeros((len(books) + rows, 4), dtype=torch.int64, device=device)
    books.run(books.take(), list(found[rows:]))
    for query_start, slots in ((offset, tokens), (None, tokens[:rows])):
        books.verify(
            table=table,
            rows=at,
            lengths=torch.full_like(at, 32),
            enforce=True,
            record=found[:rows],
            slot_mapping=slots.clone(),
            query_start=query_start,
        )
    books.clear()
    books.run(books.take(), list(found[rows:]))


@CONTENTS
@pytest.mark.parametrize("device", DEVICES)
def test_no_value_is_read_by_the_books(device: str, contents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tensors without values, and under the sync debug mode of a GPU."""
    if device == "meta":
        # Uploads of the host's own numbers.
        monkeypatch.setattr(
            "kvguard.adapters.sglang.books.Uploads",
            lambda device: SimpleNamespace(
                upload=lambda host: torch.empty(len(host), dtype=torch.int64, device=device)
            ),
        )
        a_step(device, contents)
        return
    a_step(device, contents)  # compiled and allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        a_step(device, contents)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@CONTENTS
@pytest.mark.parametrize("device", DEVICES)
def test_no_value_is_read_by_the_hooks(device: str, contents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of allocation and free, over stand-ins for SGLang's functions."""
    monkeypatch.setattr(
        "kvguard.adapters.sglang.books.Uploads",
        lambda device: SimpleNamespace(upload=lambda host: torch.from_numpy(np.array(host)).to(device)),
    )
    books = TokenBooks(
        num_pages=64, page_size=1, rows=6, device=device, tags=TagCounter(1), key=7, contents=contents
    )
    guard: Any = SimpleNamespace(
        books=books, armed=True, audits=False, condemned_rows={}, freeing=0, group=[], prefixes=None, plain_free=False
    )
    # At level tags nobody asks what requests are made of.
    guard.contents = None
    if contents:
        guard.contents = SimpleNamespace(identify=lambda req: req.rid, at=lambda content, tokens: [tokens, 1])
    guard.contained = lambda: pytest.MonkeyPatch.context()
    slots, at = torch.arange(5, device=device), torch.arange(2, device=device)
    batch = SimpleNamespace(
        tree_cache=SimpleNamespace(**{ATTACHED: guard}),
        reqs=[SimpleNamespace(rid="a", kv=SimpleNamespace(holds_kv=False)) for _ in range(2)],
        prefix_lens=[1, 0],
        extend_lens=[2, 3],
        req_pool_indices=at,
        seq_lens=at,
    )

    def extend(batch: Any) -> Any:
        for _ in batch.reqs:
            hooks.after_prefix_kv_indices(slots[:1], batch, None)
        return slots, at, at

    hooks.around_alloc_for_extend(extend, batch)
    hooks.around_alloc_for_decode(lambda batch, count: slots[:2], batch, 1)
    allocator: Any = SimpleNamespace(free_group=None, need_sort=False, free_pages=slots, **{ATTACHED: guard})
    hooks.around_token_free(lambda allocator, index: None, allocator, slots[:2])
    hooks.around_release_page_ids(lambda allocator, *ids: None, allocator, slots[:2])
    assert len(books) == 4
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        books.run(books.take(), list(torch.zeros((4, 4), dtype=torch.int64, device=device)))
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
