"""Other pages in the place of those that the books refuse, drawn from the allocator that gave them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvguard.adapters.page_shapes import join, keep, page_list
from kvguard.adapters.wrapped_method import REQUEST_ARGUMENTS, Method
from kvguard.guard import UsageError

if TYPE_CHECKING:
    from kvguard.adapters.wrapping import AllocatorGuard

__all__ = ["draw", "given_pages", "places_of"]


def given_pages(answer: Any, page_id: str | None) -> list[int]:
    """The pages that an allocation gave. Negative numbers at the end are no pages: -1 for no memory, or padding."""
    listed = page_list(answer, page_id)
    while listed and listed[-1] < 0:
        listed.pop()
    return listed


def places_of(listed: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Where the accepted pages stand in the list; a page that is there twice was accepted at its first place."""
    if len(listed) == len(accepted):
        return list(range(len(listed)))
    places, left = [], list(accepted)
    for place, page in enumerate(listed):
        if page in left:
            left.remove(page)
            places.append(place)
    return places


def draw(
    owner: AllocatorGuard, method: Method, bound: inspect.BoundArguments, counted: str | None, name: str, answer: Any,
    taking: Method, by_page: str | None,
) -> Any:  # fmt: skip
    """Refuse pages that are somebody's and draw others in their place; a refused page stays off the free list.

    If the allocator has no others, everything of this call goes back, and its answer or exception is the engine's. It
    has none either if it gives a refused page again, or has been asked more often than there are pages: then the answer
    is the one that it last gave without pages, or None.
    """
    guard, pool, page_id = owner.guard, owner.pool, owner.page_id
    known = owner.known(name)
    listed = given_pages(answer, page_id)
    wanted, good, drawn, refused = len(listed), None, 0, set[int]()

    def back() -> None:
        if good is not None:
            owner.kept(None, lambda: _hand_back(owner, name, known, good, bound, taking, by_page))

    while True:
        accepted = guard.allocate(name, listed, pool=pool)
        places = places_of(listed, accepted)
        if len(places) == len(listed) and good is None:
            return answer
        if places:
            part = keep(answer, places, page_id)
            good = part if good is None else join(good, part)
        missing = wanted - (0 if good is None else len(page_list(good, page_id)))
        if missing <= 0:
            return good
        rejected = {listed[place] for place in set(range(len(listed))).difference(places)}
        if rejected & refused or drawn >= guard.num_pages(pool):
            back()
            return owner.without_pages.get(method.name)
        refused |= rejected
        drawn += 1
        if counted is not None:
            bound.arguments[counted] = missing
        try:
            answer, _ = owner.allocating(method, bound.args, bound.kwargs)
        except BaseException:
            back()
            raise
        found = owner.kept(None, functools.partial(given_pages, answer, page_id))
        if not found:
            back()
            return answer
        listed = found


def _hand_back(
    owner: AllocatorGuard, name: str, known: int, good: Any, bound: inspect.BoundArguments, taking: Method,
    by_page: str | None,
) -> None:  # fmt: skip
    """What was good goes back to the allocator, with what its `free` asks for besides, as far as `alloc` was told."""
    given_up = owner.guard.truncate(name, known, pool=owner.pool)
    listed = page_list(good, owner.page_id)
    places = places_of(listed, owner.guard.retire(given_up, pool=owner.pool).reusable)
    if not places or by_page is None:
        return
    told = next((bound.arguments[one] for one in REQUEST_ARGUMENTS if one in bound.arguments), None)
    back = taking.signature.bind_partial()
    for parameter in taking.parameters():
        if parameter == by_page:
            back.arguments[parameter] = keep(good, places, owner.page_id)
        elif parameter in REQUEST_ARGUMENTS and told is not None:
            back.arguments[parameter] = bound.arguments.get(parameter, told)
        elif taking.signature.parameters[parameter].default is inspect.Parameter.empty:
            if parameter not in bound.arguments:
                raise UsageError(f"{taking.what} needs {parameter}: pages {given_up} cannot go back to the allocator")
            back.arguments[parameter] = bound.arguments[parameter]
    owner.freeing(taking, back.args, back.kwargs)
