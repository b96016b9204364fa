"""An allocator whose page numbers never reach the host: one tensor of free pages on the device, sliced by `alloc`."""

from __future__ import annotations

import torch
from torch import Tensor


class SlicingAllocator:
    """Pages 1 .. num_pages - 1; page 0 takes what padding writes."""

    def __init__(self, num_pages: int, device: str = "cpu") -> None:
        self.free_pages = torch.arange(1, num_pages, device=device)

    def alloc(self, count: int) -> Tensor | None:
        """`count` pages, int64 [count] on the device, or None if there are not as many."""
        if count > self.free_pages.shape[0]:
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken

    def free(self, pages: Tensor) -> None:
        """Pages [any number] on the device are free again."""
        self.free_pages = torch.cat([self.free_pages, pages])
