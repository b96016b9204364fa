"""Stands in for torchvision, whose published wheel does not load beside a CPU build of torch. SGLang imports names."""

__version__ = "0.28.0"
