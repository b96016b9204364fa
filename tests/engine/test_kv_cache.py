"""Paged storage: what is written is read, in every dtype, and wild ids land where the docstrings say."""

import pytest
import torch

from kvguard.fault_injection.engine.kv_cache import KVDtype, KVScales, PagedKV

DTYPES: tuple[KVDtype, ...] = ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2")
RELATIVE_ERROR = {"fp32": 0.0, "bf16": 2**-8, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}


def _kv(dtype: KVDtype, page_size: int = 4, num_pages: int = 6, scales: KVScales | None = None) -> PagedKV:
    return PagedKV(
        layers=2, num_pages=num_pages, page_size=page_size, kv_heads=3, head_dim=8, dtype=dtype, scales=scales
    )


def _random(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 3, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_read_returns_what_was_written(dtype: KVDtype, page_size: int) -> None:
    """Keys and values written through slots come back through the block table within the dtype's rounding."""
    kv = _kv(dtype, page_size, 48 // page_size, KVScales(keys=(0.02, 0.01), values=(0.03, 0.01)))
    columns = 16 // page_size
    table = torch.randperm(48 // page_size)[:columns].to(torch.int32).unsqueeze(0)
    slots = kv.slots(table, columns)[0]
    key, value = _random(16, 1), _random(16, 2)
    kv.write(1, key, value, slots)
    read_key, read_value = kv.read(1, table, columns)
    assert read_key.shape == (1, 16, 3, 8)
    for written, read in ((key, read_key[0]), (value, read_value[0])):
        assert ((written - read).abs() <= RELATIVE_ERROR[dtype] * written.abs() + 1e-4).all()
    assert not kv.read(0, table, columns)[0].any(), "another layer was written"


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_byte_decodes_as_torch_does(dtype: KVDtype) -> None:
    """The bit-moving conversion equals PyTorch's for all 256 bytes, NaN and infinity included."""
    kv = PagedKV(
        layers=1,
        num_pages=2,
        page_size=16,
        kv_heads=1,
        head_dim=8,
        dtype=dtype,
        scales=KVScales(keys=(0.5,), values=(3.0,)),
    )
    for pages in (kv.keys[0], kv.values[0]):
        pages.view(torch.uint8).view(-1).copy_(torch.arange(256, dtype=torch.uint8))
    key, value = kv.read(0, torch.tensor([[0, 1]]), 2)
    expected = kv.keys[0].to(torch.float32).view(1, 32, 1, 8)
    assert torch.equal((expected * 0.5).nan_to_num(nan=12345.0), key.nan_to_num(nan=12345.0))
    assert torch.equal((expected * 3.0).nan_to_num(nan=12345.0), value.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_storage_saturates_and_is_finite(dtype: KVDtype) -> None:
    """Huge, infinite and NaN inputs are stored as finite FP8 numbers."""
    kv = _kv(dtype)
    states = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), float("nan"), 0.0, 1.0, -1.0]).expand(1, 3, 8)
    kv.write(0, states, states, torch.tensor([5]))
    stored = kv.keys[0].to(torch.float32).view(-1, 3, 8)[5, 0]
    limit = torch.finfo(kv.keys[0].dtype).max
    assert stored.tolist() == [limit, -limit, limit, -limit, 0.0, 0.0, 1.0, -1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_slots_go_to_the_null_page(dtype: KVDtype) -> None:
    """A write with a negative slot touches slot 0 of page 0 and nothing else."""
    kv = _kv(dtype)
    kv.write(0, _random(3), _random(3), torch.tensor([-1, -5, 9]))
    touched = kv.keys[0].to(torch.float32).flatten(2).abs().sum(dim=2).nonzero().tolist()
    assert touched == [[0, 0], [2, 1]]


def test_wild_ids_wrap_round_the_pool() -> None:
    """Slots past the pool and page ids outside it land modulo the pool."""
    kv = _kv("fp32")
    kv.write(0, _random(1), _random(1), torch.tensor([24 + 7]))
    assert torch.equal(kv.keys[0].view(-1, 3, 8)[7], _random(1)[0])
    right = kv.read(0, torch.tensor([[1]]), 1)[0]
    for page in (1 + 6, 1 - 6, 1 + 600):
        assert torch.equal(kv.read(0, torch.tensor([[page]], dtype=torch.int32), 1)[0], right)


def test_zero_pages_clears_named_pages_only() -> None:
    """Zeroing clears the named pages in all layers and leaves the others; a foreign page id raises."""
    kv = _kv("fp8_e4m3")
    for layer in range(2):
        kv.write(layer, _random(24), _random(24), torch.arange(24))
    kv.zero_pages([1, 3])
    for storage in (*kv.keys, *kv.values):
        alive = storage.to(torch.float32).flatten(1).abs().sum(dim=1) > 0
        assert alive.tolist() == [True, False, True, False, True, True]
    with pytest.raises(IndexError, match="page 6"):
        kv.zero_pages([6])


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 384), ("bf16", 192), ("fp8_e4m3", 96), ("fp8_e5m2", 96)])
def test_bytes_per_token(dtype: KVDtype, expected: int) -> None:
    """A token takes 2 (key, value) * layers * heads * head size * element size bytes."""
    assert _kv(dtype).bytes_per_token == expected


def test_pages_changed_in_place_are_what_is_read() -> None:
    """A bit flipped in `keys` shows in the next read: the public tensors are the storage itself."""
    kv = _kv("fp8_e5m2")
    kv.write(0, _random(24), _random(24), torch.arange(24))
    before = kv.read(0, torch.tensor([[2]]), 1)[0]
    kv.keys[0].view(torch.uint8)[2, 1, 0, 3] ^= 0x40
    after = kv.read(0, torch.tensor([[2]]), 1)[0]
    assert (before != after).nonzero().tolist() == [[0, 1, 0, 3]]


def test_impossible_settings_are_refused() -> None:
    """Empty pools, unknown dtypes and scales that do not fit raise ValueError."""
    with pytest.raises(ValueError, match="positive"):
        _kv("fp32", num_pages=0)
    with pytest.raises(ValueError, match="fp4"):
        _kv("fp4")  # type: ignore[arg-type]
    for keys in ((1.0,), (1.0, 0.0), (1.0, float("nan"))):
        with pytest.raises(ValueError, match=r"scales\.keys"):
            _kv("fp8_e4m3", scales=KVScales(keys=keys, values=(1.0, 1.0)))
