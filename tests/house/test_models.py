"""Prepared models: where they are looked for, and how weights are packed."""

from pathlib import Path

import pytest
import torch

from kvguard.fault_injection.models import CACHE_VARIABLE, STAMP, cache_folder, smollm2_folder
from tools.prepare_smollm2 import GROUP, hf_name, pack, quantize, unrotate


def test_the_cache_folder_can_be_chosen(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable names it; without, it is .cache in the repository, which git ignores."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert cache_folder() == root / ".cache"
    assert ".cache/" in (root / ".gitignore").read_text().splitlines()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_model_that_is_not_finished_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the command; a folder without its stamp does not count."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make models"):
        smollm2_folder("bf16")
    folder = tmp_path / "models" / "smollm2-135m-instruct-bf16"
    folder.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="make models"):
        smollm2_folder("bf16")
    (folder / STAMP).touch()
    assert smollm2_folder("bf16") == folder
    with pytest.raises(ValueError, match="int8"):
        smollm2_folder("int8")  # type: ignore[arg-type]


def test_packed_numbers_can_be_read_back() -> None:
    """Eight to a word, the first in the lowest bits, 8 added."""
    numbers = torch.randint(-8, 8, (5, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    words = pack(numbers)
    assert words.dtype == torch.int32 and words.shape == (5, 8)
    unpacked = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=-1).reshape(5, 64) - 8
    assert torch.equal(unpacked.to(torch.int8), numbers)


def test_weights_on_the_grid_are_kept_and_others_come_close() -> None:
    """What 4 bits can express is expressed; nothing is further off than a group's step."""
    numbers = torch.randint(-8, 8, (4, 2 * GROUP), generator=torch.Generator().manual_seed(2))
    numbers[:, ::GROUP] = -8
    found, scales = quantize(numbers * 0.25)
    assert torch.equal(found, numbers.to(torch.int8)) and torch.all(scales == 0.25)
    weights = torch.randn(4, 2 * GROUP, generator=torch.Generator().manual_seed(3))
    found, scales = quantize(weights)
    steps = scales.float().repeat_interleave(GROUP, dim=1)
    assert torch.all((found * steps - weights).abs() <= steps)
    assert not quantize(torch.zeros(1, GROUP))[0].any()


def test_rotary_pairs_come_apart() -> None:
    """GGUF: the pair (0, 0'), (1, 1') of each head side by side; Hugging Face: 0, 1, then 0', 1'."""
    side_by_side = torch.tensor([0, 10, 1, 11, 2, 12, 3, 13]).unsqueeze(1)
    assert unrotate(side_by_side, heads=2).squeeze(1).tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_names() -> None:
    """Of layers, and of what stands outside them."""
    assert hf_name("blk.3.attn_output.weight") == "model.layers.3.self_attn.o_proj.weight"
    assert hf_name("output_norm.weight") == "model.norm.weight"
