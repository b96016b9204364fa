"""`scatter_tags` for all pools of a step in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels.scatter_tags import descriptor
from kvguard.kernels.scatter_tags.descriptor import ScatterWord

WORDS = tl.constexpr(len(ScatterWord))
PAGE_TAG, NUM_PAGES = tl.constexpr(int(ScatterWord.PAGE_TAG)), tl.constexpr(int(ScatterWord.NUM_PAGES))
PAGES, TAGS = tl.constexpr(int(ScatterWord.PAGES)), tl.constexpr(int(ScatterWord.TAGS))
CHANGES = tl.constexpr(int(ScatterWord.CHANGES))


# One binary, however the arrays are aligned.
@triton.jit(do_not_specialize_on_alignment=["descriptors", "packed"])
def scatter_kernel(descriptors, packed, BLOCK: tl.constexpr):
    """Grid (blocks of changes, pools). See `descriptor.ScatterWord`."""
    pool = descriptors + tl.program_id(1) * WORDS
    change = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = change < tl.load(pool + CHANGES)
    pages = tl.load(packed + tl.load(pool + PAGES) + change, mask=mask, other=-1)
    tags = tl.load(packed + tl.load(pool + TAGS) + change, mask=mask, other=0)
    page_tag = tl.load(pool + PAGE_TAG).to(tl.pointer_type(tl.int64))
    tl.store(page_tag + pages, tags, mask=(pages >= 0) & (pages < tl.load(pool + NUM_PAGES)))


def scatter_step(*, pools: int, changes: int, descriptors: Tensor, packed: Tensor) -> None:
    """See `kvguard.kernels.scatter_tags.scatter_step` for the contract."""
    blocks = -(-changes // descriptor.BLOCK)
    scatter_kernel[(blocks, pools)](descriptors, packed, BLOCK=descriptor.BLOCK, num_warps=4)
