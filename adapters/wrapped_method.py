"""One method of an allocator object: how its arguments are named, and how something else stands in its place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import numpy as np

__all__ = ["AttachError", "Method", "Where", "freed_argument", "request_name"]

REQUEST_ARGUMENTS = ("request_id", "req_id", "seq_id", "request", "req", "seq", "sequence")
REQUEST_ATTRIBUTES = ("request_id", "req_id", "seq_id", "id")
PAGES_ARGUMENTS = (
    "pages", "page_ids", "blocks", "block_ids", "page", "page_id", "block", "block_id", "free_index", "indices",
)  # fmt: skip

_NOT_PLAIN = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)

Where = str | int | Callable[[Mapping[str, Any]], Any]
"""Where a call says something: see `guard_allocator`."""


class AttachError(ValueError):
    """The allocator cannot be wrapped as asked; the message says what to name instead."""


class Method:
    """One method of the allocator: what it was, how its arguments are named, and what stands in its place."""

    def __init__(self, allocator: Any, name: str) -> None:
        what = f"{type(allocator).__name__}.{name}"
        original = getattr(allocator, name, None)
        if original is None:
            names = (other for other in dir(allocator) if not other.startswith("_"))
            methods = ", ".join(other for other in names if callable(getattr(allocator, other, None)))
            raise AttachError(f"{what} does not exist; this object has: {methods or 'no methods'}")
        if not callable(original):
            raise AttachError(f"{what} is a {type(original).__name__}, not a method")
        if hasattr(original, "_kvguard"):
            raise AttachError(f"{what} is guarded already: detach that guard first")
        if any(is_one(original) for is_one in _NOT_PLAIN):
            raise AttachError(f"{what} is a coroutine or a generator: wrap the plain function that it calls")
        try:
            self.signature = inspect.signature(original)
        except (TypeError, ValueError):
            raise AttachError(f"{what} has no signature that Python can see: call PagedGuard by hand there") from None
        self.allocator, self.name, self.what, self.original = allocator, name, what, original
        self.shadowed = vars(allocator).get(name) if hasattr(allocator, "__dict__") else None

    def parameters(self) -> list[str]:
        """The arguments that can be named; not *args and **kwargs."""
        open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [name for name, one in self.signature.parameters.items() if one.kind not in open_ended]

    def argument(self, where: str | int, what_for: str) -> str:
        """The name of an argument given by name or position. Raises AttachError if there is none."""
        names = self.parameters()
        listed = ", ".join(names) or "none by name"
        if isinstance(where, int):
            if not 0 <= where < len(names):
                raise AttachError(f"{what_for}={where}: {self.what} takes {len(names)} arguments ({listed})")
            return names[where]
        if where not in names:
            raise AttachError(f"{what_for}={where!r}: {self.what} has no such argument; it has {listed}")
        return where

    def finder(self, where: Where, what_for: str) -> Callable[[Mapping[str, Any]], Any]:
        """From a `Where` to a function of the call's values. Raises AttachError if the call has no such thing."""
        if callable(where):
            return where
        root: str | int = where
        path: list[str] = []
        if isinstance(where, str):
            root, *path = where.split(".")
        name = str(root) if root in ("self", "return") else self.argument(root, what_for)

        def find(values: Mapping[str, Any]) -> Any:
            found = values[name]
            for attribute in path:
                # An optional argument that was left out names nothing, and neither do its attributes.
                if found is None:
                    return None
                found = getattr(found, attribute)
            return found

        return find

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """The call's arguments by name, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def put(self, wrapper: Callable[..., Any]) -> None:
        """Shadow the method on this one object."""
        wrapped: Any = functools.wraps(self.original)(wrapper)
        wrapped._kvguard = True
        try:
            setattr(self.allocator, self.name, wrapped)
        except (AttributeError, TypeError):
            raise AttachError(
                f"{self.what} cannot be replaced on the object ({type(self.allocator).__name__} has __slots__, or is "
                "no Python class): call PagedGuard by hand there"
            ) from None

    def restore(self) -> None:
        """The object as it was: its class's method, or the function that it had itself."""
        if self.shadowed is not None:
            setattr(self.allocator, self.name, self.shadowed)
        else:
            delattr(self.allocator, self.name)


def freed_argument(taking: Method, freed: str | int | None, request: Where | None) -> str | None:
    """The argument of `free` that holds pages; None where it takes a request."""
    if freed is not None:
        if isinstance(freed, str) and "." in freed:
            raise AttachError(f"freed={freed!r}: it must be an argument itself, as some pages may be left out of it")
        return taking.argument(freed, "freed")
    names = taking.parameters()
    by_name = next((name for name in names if name in PAGES_ARGUMENTS), None)
    told = [name for name in names if name in REQUEST_ARGUMENTS]
    if by_name is not None or told:
        return by_name
    if isinstance(request, str) and request.partition(".")[0] in names or callable(request):
        return None
    if isinstance(request, int) and 0 <= request < len(names):
        return None
    listed = ", ".join(names) or "nothing by name"
    raise AttachError(f"{taking.what} takes {listed}: say freed= for the argument with pages, or name the request")


def request_name(found: Any) -> str:
    """A request as the books name it: `str` of a number, a UUID or bytes. TypeError for what names none."""
    for attribute in ("", *REQUEST_ATTRIBUTES):
        value = getattr(found, attribute, None) if attribute else found
        if isinstance(value, str):
            return value
        if isinstance(value, (int, np.integer, UUID, bytes)) and not isinstance(value, bool):
            return str(value)
    listed = ", ".join(REQUEST_ATTRIBUTES)
    raise TypeError(f"{found!r} names no request: a string, a number, a UUID, bytes or one of {listed}")
