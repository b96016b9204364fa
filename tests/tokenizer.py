"""A tokenizer for the tiny models of the server tests: bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tokenizer(folder: Path) -> None:
    """Bytes 0 to 255 in the order of the byte-level alphabet, then begin and end, as the tiny model has them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<begin>", "<end>")])
    wrapper: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    wrapped = wrapper(tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
