"""kvguard: proves that every KV-cache page a request reads is its own.

It sits beside an LLM serving engine that keeps its KV cache in pages. Where a proof fails, that one request is aborted
before its token leaves, the pages involved are quarantined, and the operator gets a report.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("kvguard")
except PackageNotFoundError:
    __version__ = "0+uninstalled"
