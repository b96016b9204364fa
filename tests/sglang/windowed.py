"""A tiny Llama, half of whose layers have a sliding window, in SGLang's two pools.

SGLang takes any architecture whose configuration says `is_hybrid_swa` and `hybrid_layer_pattern`. Two things are done
for it here, before the engines are forked: `LlamaAttention` gives no layer a window, and the reads of the torch_native
backend are led through SGLang's mapping, as its other backends do by themselves: in 0.5.23 that backend writes to the
window slots and reads the full ones.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.sglang.engine import checkpoint

WINDOW = 40
PATTERN = [0, 1, 0, 1]
"""1: a layer with a window."""


@lru_cache(maxsize=1)
def window_checkpoint() -> str:
    """The same weights as `checkpoint`."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-window-"))
    for path in checkpoint().iterdir():
        shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {"is_hybrid_swa": True, "hybrid_layer_pattern": PATTERN[:layers], "sliding_window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def install() -> None:
    """See the module; once, in the process that forks."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.llama import LlamaAttention

    if hasattr(LlamaAttention, "_with_windows"):
        return
    LlamaAttention._with_windows = True
    make = LlamaAttention.__init__

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        make(self, config, *args, **kwargs)
        pattern = getattr(config, "hybrid_layer_pattern", None)
        if pattern and pattern[self.attn.layer_id]:
            self.attn.sliding_window_size = config.sliding_window

    LlamaAttention.__init__ = init
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, _translating(getattr(TorchNativeAttnBackend, name)))


def _translating(run: Any) -> Any:
    def translated(self: Any, query: Any, out: Any, keys: Any, values: Any, table: Any, *args: Any, **kw: Any) -> Any:
        if self.use_sliding_window_kv_pool and kw.get("sliding_window_size") is not None:
            table = self.token_to_kv_pool.full_to_swa_index_mapping[table.long()]
        return run(self, query, out, keys, values, table, *args, **kw)

    return translated
