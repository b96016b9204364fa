"""Block managers with a bug each, as they happen: run the campaign on one to see it go red.

    TOY_ENGINE_MANAGER=reissuing pytest --kvguard-campaign
"""

from __future__ import annotations

from toy_engine.block_manager import BlockManager


class ReissuingManager(BlockManager):
    """Now and then a block stays in the free list although it was handed out: a double allocation."""

    taken = 0

    def take(self, seq_id: str) -> int | None:
        block_id = super().take(seq_id)
        self.taken += 1
        if block_id is not None and self.taken % 9 == 0:
            self.free_blocks.append(block_id)
        return block_id


class CarelessManager(BlockManager):
    """Who leaves frees its blocks, whoever else shares them: a shared page is freed under its users."""

    def drop_user(self, block_id: int) -> None:
        self.ref_count[block_id] = 0
        self.give_back(block_id)


MANAGERS = {"sound": BlockManager, "reissuing": ReissuingManager, "careless": CarelessManager}
