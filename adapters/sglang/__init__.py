"""kvguard inside SGLang: books of pages on the device, verified before each forward.

Imported by SGLang through the entry point `sglang.srt.plugins`; see `plugin`.
"""
