"""The block manager of an unmodified vLLM release: real hashing, pool and prefix cache, beside a stand-in model."""

from __future__ import annotations

from typing import Any

from kvguard.fault_injection.scenarios.stand_in import COLUMNS, PAGE, PAGES, Asked, StandIn

__all__ = ["ManagerRun"]


class ManagerRun(StandIn):
    """One run: requests are admitted, grown and freed through the release's own KVCacheManager."""

    def __init__(self, *, proofs: str | None, backend: str, seed: int, prefix_cache: bool = True) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        super().__init__(proofs=proofs, backend=backend, seed=seed)
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=PAGES, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(PAGE, sha256)
        self.manager: Any = KVCacheManager(
            config,
            max_model_len=COLUMNS * PAGE,
            scheduler_block_size=PAGE,
            hash_block_size=PAGE,
            enable_caching=prefix_cache,
        )
        self._published: set[int] = set()

    def blocks_of(self, asked: Asked) -> list[Any]:
        """The request's blocks, as the manager has them."""
        return list(self.manager.coordinator.single_type_managers[0].req_to_blocks[asked.name])

    def pages_of(self, asked: Asked) -> list[int]:
        return [block.block_id for block in self.blocks_of(asked)]

    def _admit(self, asked: Asked) -> int:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        asked.request = Request(
            asked.name,
            list(asked.prompt),
            SamplingParams(max_tokens=asked.new),
            None,
            lora_request=None if asked.lora is None else LoRARequest(*asked.lora),
            cache_salt=asked.salt,
            block_hasher=self._hasher,
        )
        found, count = self.manager.get_computed_blocks(asked.request)[:2]
        hits = [(block.block_hash, block.block_id) for block in found.blocks[0]]
        if self.guard is not None and hits:
            accepted = self.guard.adopt(asked.name, hits)
            found = self.manager.create_kv_cache_blocks((list(found.blocks[0])[:accepted],))
            count = accepted * PAGE
        self.run.counts.prefix_hits += count > 0
        self._allocate(asked, len(asked.tokens) - count, count, found)
        return int(count)

    def _grow(self, asked: Asked) -> None:
        self._allocate(asked, 1)

    def _allocate(self, asked: Asked, tokens: int, hit: int = 0, found: Any = None) -> None:
        held = len(self.blocks_of(asked)) if found is None else hit // PAGE
        if self.manager.allocate_slots(asked.request, tokens, hit, found) is None:
            raise RuntimeError("the pool of a replay is large enough for its input")
        blocks = self.blocks_of(asked)
        if self.guard is None:
            return
        self.guard.allocate(asked.name, [block.block_id for block in blocks[held:]])
        for column, block in enumerate(blocks):
            # vLLM hashes blocks before they are computed: a promise, kept by the step that writes them.
            if block.block_hash is not None and block.block_id not in self._published:
                self.guard.publish(asked.name, column, block.block_hash)
                self._published.add(block.block_id)

    def _computed(self, asked: Asked) -> None:
        asked.request.num_computed_tokens = asked.computed

    def _emit(self, asked: Asked, token: int, step: int) -> None:
        super()._emit(asked, token, step)
        asked.request.append_output_token_ids(token)

    def _give_back(self, asked: Asked) -> list[int]:
        blocks = self.blocks_of(asked)
        self._free(asked)
        # Cached blocks can still be found.
        return [block.block_id for block in blocks if block.ref_cnt == 0 and block.block_hash is None]

    def _free(self, asked: Asked) -> None:
        self.manager.free(asked.request)
