"""Engines as fault campaigns see them."""
