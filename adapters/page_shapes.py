"""The shapes in which allocators hand pages about: one number, one object, or several of either in some container."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvguard.guard import UsageError

__all__ = ["is_single", "join", "keep", "page_list", "thaw"]

PAGE_ATTRIBUTES = ("page_id", "block_id")
_CONTAINERS = (list, tuple, set, frozenset, range)


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "device")


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _container(value: Any, page_id: str | None = None) -> bool:
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return len(value.shape) > 0
    if _attribute(value, page_id) is not None:
        # A block may be a named tuple: what has a page number is a page, whatever else it can be iterated as.
        return False
    return isinstance(value, _CONTAINERS) or (hasattr(value, "__iter__") and hasattr(value, "__len__"))


def thaw(value: Any) -> Any:
    """An iterator as a list, as it can be read once only; anything else as it is."""
    return list(value) if isinstance(value, Iterator) else value


def is_single(value: Any, page_id: str | None = None) -> bool:
    """Whether this is one page and no container of pages."""
    return value is not None and not _container(value, page_id)


def page_list(value: Any, page_id: str | None = None) -> list[int]:
    """The page numbers in `value`, in order; None and False hold none.

    `page_id`: the attribute of a page object that is its number. TypeError for anything else, and UsageError for page
    numbers on a device: to read them would wait for the device.
    """
    if value is None or value is False:
        return []
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return _numbers(value)
    if _container(value, page_id):
        return [_number(item, page_id) for item in value]
    return [_number(value, page_id)]


def _numbers(value: Any) -> list[int]:
    if _is_tensor(value):
        if value.device.type != "cpu":
            raise UsageError(
                f"page numbers on {value.device} cannot be read without waiting for it: use "
                "kvguard.adapters.device_pages.DevicePagedGuard"
            )
        value = value.numpy()
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"page numbers are integers, not {value.dtype}")
    listed: list[int] = value.reshape(-1).tolist()
    return listed


def _attribute(page: Any, page_id: str | None) -> int | None:
    for name in PAGE_ATTRIBUTES if page_id is None else (page_id,):
        number: Any = getattr(page, name, None)
        if _is_integer(number):
            return int(number)
    return None


def _number(page: Any, page_id: str | None) -> int:
    if _is_integer(page):
        return int(page)
    if (isinstance(page, np.ndarray) or _is_tensor(page)) and len(page.shape) == 0:
        return _numbers(page)[0]
    number = _attribute(page, page_id)
    if number is None:
        names = PAGE_ATTRIBUTES if page_id is None else (page_id,)
        raise TypeError(f"a {type(page).__name__} is no page: it has no number as {' or '.join(names)} (give page_id=)")
    return number


def keep(value: Any, places: Sequence[int], page_id: str | None = None) -> Any:
    """The same shape with only the pages at these places, in order; a list where the container's type is not known.

    An array or a tensor of several dimensions becomes flat.
    """
    if not _container(value, page_id):
        return value
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return value.reshape(-1)[list(places)]
    items = list(value)
    return _like(value, [items[place] for place in places])


def join(first: Any, second: Any) -> Any:
    """Two containers of one shape after each other."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.concatenate([first, second])
    if _is_tensor(first) and _is_tensor(second):
        import torch

        return torch.cat([first, second])
    return _like(first, [*first, *second])


def _like(container: Any, items: list[Any]) -> Any:
    """Only containers whose constructors are known: any other might want more than the items, or do more with them."""
    if isinstance(container, array.array):
        return array.array(container.typecode, items)
    if type(container) in (tuple, set, frozenset, deque):
        return type(container)(items)
    return items
