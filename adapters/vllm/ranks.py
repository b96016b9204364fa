"""Tensor parallel ranks agree on a step's verdicts before anyone acts on them.

Each rank checks its own copy of the block table, and vLLM returns the answer of one rank only. A fixed-size gather of
all ranks' records, launched in every step on the forward's stream, lets that one speak for all. A rank whose guard
failed takes part with records that say "not checked", so that nobody waits for it and nothing counts as clean.
"""

from __future__ import annotations

from typing import Any

import torch

from kvguard.kernels.verify_pages.layout import FLAGS, NOT_CHECKED, RECORD_WORDS
from kvguard.messages import StepDelta
from kvguard.pools import GuardSetup
from kvguard.verifier import PendingVerdicts, record_rows


class RankVerdicts:
    """The verdicts of all tensor parallel ranks as one.

    answers       whether vLLM returns this rank's output
    here_already  there is no other rank, and what this one finds is in host memory: nothing is left to be done with it
    """

    def __init__(self, device: Any, setup: GuardSetup) -> None:
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        self._device, self._setup = device, setup
        self._world = int(group.world_size)
        self._group = group.device_group
        self.answers = int(group.rank_in_group) == 0
        self.here_already = self._world == 1 and torch.device(device).type == "cpu"

    def combine(self, pending: PendingVerdicts | None, delta: StepDelta) -> PendingVerdicts | None:
        """Replace a step's record by the worst of all ranks; `pending` is None where this rank's guard failed."""
        if self._world == 1:
            return pending
        reads, writes = record_rows(self._setup, len(delta.requests))
        shape = (len(delta.sections), reads + writes, RECORD_WORDS)
        if pending is None or pending.record is None:
            record = torch.full(shape, NOT_CHECKED, dtype=torch.int64, device=self._device)
            pending = PendingVerdicts(step=delta.step, record=record, reads=reads)
        # Gloo wants the ranks side by side in the first dimension; NCCL takes either form.
        gathered = torch.empty((self._world * shape[0], *shape[1:]), dtype=torch.int64, device=self._device)
        torch.distributed.all_gather_into_tensor(gathered, pending.record, group=self._group)
        # What this rank found on its host is not what the others did.
        return pending._replace(record=worst_of(gathered.view(self._world, *shape)), view=None, clean=False)


def worst_of(gathered: Any) -> Any:
    """int64 [pools, records, 4] from [ranks, pools, records, 4]: a rank that did not check, else one that flagged."""
    flags = gathered[..., FLAGS]
    weight = torch.where(flags == NOT_CHECKED, torch.iinfo(torch.int64).max, flags)
    place = weight.argmax(0)[None, ..., None].expand(1, *gathered.shape[1:])
    return gathered.gather(0, place)[0]
