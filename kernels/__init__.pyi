"""Namespace portion: see docs/design.md, "Layout", for why there is no __init__.py here."""
