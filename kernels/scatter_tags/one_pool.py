"""`scatter_tags` of one pool on a GPU: the step's launch with a single pool, made up afresh for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvguard.kernels.arrays import upload_beside, words_from
from kvguard.kernels.scatter_tags.descriptor import describe_scatter


def scatter_tags(launch_step: Callable[..., None], *, page_tag: Any, pages: Any, tags: Any) -> None:
    """See `kvguard.kernels.scatter_tags.scatter_tags`. `launch_step`: a backend's `scatter_step`."""
    changes = int(pages.shape[0])
    if changes == 0 or page_tag.shape[0] == 0:
        return
    words_from(page_tag, pages)
    described = describe_scatter(page_tag=page_tag, pages=0, tags=words_from(pages, tags), changes=changes)
    descriptors = upload_beside(page_tag, np.array([described], np.int64))
    launch_step(pools=1, changes=changes, descriptors=descriptors, packed=pages)
