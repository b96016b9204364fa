"""A short way out for a whole pool in host memory: does every row read its own pages, and every token go to its slot?

Almost every step is clean, and on a CPU a check costs less for its arithmetic than for the many objects that it
touches, with caches that the forward has emptied. So one call of a C extension says "all clean" of a pool, and writes
the records that `verify_pages` and `verify_slots` would. Whatever is not provably clean goes their way; where the
extension was not built, everything does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.kernels.native import extension

_native: Any = extension("kvguard.kernels.host_check._native")

__all__ = ["BoundCheck", "bind", "is_built"]

BoundCheck = Callable[[npt.NDArray[np.int64], int], bool]
"""Asked with a record int64 [pools, records, 4] without gaps and the index of the pool in it: the pool's records are
those of its rows' reads, then those of `verify_slots`, each where it is checked.

True: no row and no token has a flag, and all records of the pool are written. False says only: look closer; nothing is
written.
"""

_OF_READS = ("table", "page_tag", "row_index", "expected", "extent_offset", "extent_start", "extent_stop")
_OF_WRITES = ("slot_mapping", "query_start", "query_row", "lengths", "writer", "floor", "page_writer")
_NOTHING: Mapping[str, Any] = {}


def is_built() -> bool:
    """Whether the extension is there."""
    return _native is not None


def bind(reads: Mapping[str, Any] | None, writes: Mapping[str, Any] | None) -> BoundCheck | None:
    """The check of one pool, bound to what `verify_pages` and `verify_slots` are given of it; None: it is not checked.

    Arrays are NumPy arrays or torch tensors on the CPU. Their values are looked at anew in each call, and they are held
    as long as the check is. None where there is no extension, or one that does not take arrays of this kind or shape.
    """
    if _native is None:
        return None
    of_reads, of_writes = reads or _NOTHING, writes or _NOTHING
    null_page = (of_reads or of_writes)["null_page"]
    if of_reads and of_writes and of_writes["null_page"] != null_page:
        return None
    arrays = [of_reads.get(name) for name in _OF_READS] + [of_writes.get(name) for name in _OF_WRITES]
    try:
        check: BoundCheck = _native.HostCheck(
            tuple([array if array is None or isinstance(array, np.ndarray) else array.numpy() for array in arrays]),
            of_reads.get("columns", 0),
            of_reads.get("key", 0),
            of_reads.get("split", 1),
            null_page,
            of_writes.get("page_size", 1),
            of_writes.get("skip_slot", -1),
            of_writes.get("skip_allowed", False),
        ).check
    except (ValueError, OverflowError):
        return None
    return check
