"""Faults by what they break."""
