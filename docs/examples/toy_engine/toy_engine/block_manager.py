"""Blocks of KV memory: a free list, reference counts, and a cache of full blocks by the tokens up to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Seq:
    """A request.

    block_table    its blocks by column; written: how many of them stand in its row of the engine's table
    cached_tokens  how many of its tokens have their KV; published: how many of its blocks the cache was offered
    """

    seq_id: str
    tokens: list[int]
    prompt_tokens: int
    max_new_tokens: int
    block_table: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    published: int = 0
    row: int = -1
    written: int = 0


class BlockManager:
    """Blocks 1 .. num_blocks - 1; padding points to block 0.

    share    asked before cached blocks are taken: (seq_id, [(key, block), ...]) -> how many leading ones may be
    publish  asked before a full block enters the cache: (seq_id, column, key) -> whether it may
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks: deque[int] = deque(range(1, num_blocks))
        self.ref_count = [0] * num_blocks
        self.cached: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.idle: dict[int, None] = {}  # cached blocks without a user, longest unused first
        self.share: Callable[[str, Sequence[tuple[int, int]]], int] = lambda seq_id, hits: len(hits)
        self.publish: Callable[[str, int, int], bool] = lambda seq_id, column, key: True

    def keys(self, tokens: Sequence[int]) -> list[int]:
        """The cache key of each full block of `tokens`: it covers everything before it as well."""
        keys, key = [], 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            key = hash((key, *tokens[end - self.block_size : end]))
            keys.append(key)
        return keys

    # -- one block ------------------------------------------------------------------------------------------------

    def take(self, seq_id: str) -> int | None:
        """A block for the request, None if there is none left; unused cached blocks go last."""
        for block_id in list(self.idle):
            if self.free_blocks:
                break
            self.give_back(block_id)
        return self.free_blocks.popleft() if self.free_blocks else None

    def give_back(self, block_id: int) -> None:
        """The block is free, and the cache knows it no more."""
        self.idle.pop(block_id, None)
        key = self.key_of.pop(block_id, None)
        if key is not None and self.cached.get(key) == block_id:
            del self.cached[key]
        self.free_blocks.append(block_id)

    # -- a request ------------------------------------------------------------------------------------------------

    def allocate(self, seq: Seq) -> bool:
        """Blocks for all tokens of the request, from the cache as far as it goes; False if there are not as many."""
        hits: list[tuple[int, int]] = []
        # The last token is always computed: somebody wants to know what follows it.
        for key in self.keys(seq.tokens[:-1]):
            if key not in self.cached:
                break
            hits.append((key, self.cached[key]))
        for _, block_id in hits[: self.share(seq.seq_id, hits) if hits else 0]:
            self.ref_count[block_id] += 1
            self.idle.pop(block_id, None)
            seq.block_table.append(block_id)
        seq.cached_tokens = len(seq.block_table) * self.block_size
        seq.published = len(seq.block_table)
        return self.grow(seq)

    def grow(self, seq: Seq) -> bool:
        """Blocks for the tokens that have none yet; False if there are not as many, those taken stay."""
        while len(seq.block_table) * self.block_size < len(seq.tokens):
            block_id = self.take(seq.seq_id)
            if block_id is None:
                return False
            self.ref_count[block_id] = 1
            seq.block_table.append(block_id)
        return True

    def publish_full(self, seq: Seq) -> None:
        """Full blocks of the request can be found by others from now on."""
        keys = self.keys(seq.tokens)
        for column in range(seq.published, len(keys)):
            if keys[column] not in self.cached and self.publish(seq.seq_id, column, keys[column]):
                self.cached[keys[column]] = seq.block_table[column]
                self.key_of[seq.block_table[column]] = keys[column]
        seq.published = len(keys)

    def deallocate(self, seq: Seq, but: Sequence[int] = ()) -> None:
        """The request gives its blocks up, except those in `but`, which are not its own any more."""
        for block_id in reversed(seq.block_table):
            if block_id not in but:
                self.drop_user(block_id)
        seq.block_table = []
        seq.cached_tokens = seq.published = 0

    def drop_user(self, block_id: int) -> None:
        """One user less; the last one's block is free, or waits in the cache for the next."""
        self.ref_count[block_id] -= 1
        if self.ref_count[block_id] > 0:
            return
        if block_id in self.key_of:
            self.idle[block_id] = None
        else:
            self.give_back(block_id)
