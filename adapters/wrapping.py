"""A guard around an allocator object whose code stays as it is: two of its methods are wrapped on the instance.

    guarded = guard_allocator(guard, manager, alloc="allocate", free="free", request="seq.seq_id", pages="return")

Everything that can be wrong with the names is said when they are given: a missing method, an argument that it does not
have, a coroutine. At level `off` the object is not touched. `detach` puts back what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kvguard.adapters.drawing import draw, given_pages, places_of
from kvguard.adapters.last_pages import LastPages
from kvguard.adapters.page_shapes import is_single, keep, page_list, thaw
from kvguard.adapters.wrapped_method import (
    REQUEST_ARGUMENTS,
    AttachError,
    Method,
    Where,
    freed_argument,
    request_name,
)
from kvguard.guard import GuardHalt, UsageError

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard

__all__ = ["AllocatorGuard", "AttachError", "guard_allocator"]

T = TypeVar("T")


def guard_allocator(
    guard: PagedGuard,
    allocator: Any,
    *,
    alloc: str | Sequence[str] = "alloc",
    free: str = "free",
    request: Where | None = None,
    pages: Where = "return",
    freed: str | int | None = None,
    count: str | int | None = None,
    hits: Where | None = None,
    keys: Where | None = None,
    page_id: str | None = None,
    pool: str | None = None,
) -> AllocatorGuard:
    """Keep the books of `guard` from the calls that an engine makes to its allocator anyway. Raises AttachError.

    A `Where` names a thing of a call: an argument ("seq_id") or a position (0), attributes of one ("seq.block_table"),
    of the allocator ("self.current") or of the answer ("return", "return.blocks"); or it is a function of all of them
    by name.

    alloc    methods that give pages to a request; None or nothing given back is no allocation, an exception changes
             nothing in the books. A request that is not known yet is started.
    free     the method that takes pages back, by page or by request (then the request is over, or preempted)
    request  whose pages they are: a string, a number or an object with `request_id`, `req_id`, `seq_id` or `id`.
             None: an argument that is called so; where there is none, `AllocatorGuard.request` says it
    pages    the pages that a call of `alloc` gave ("return", "return.blocks"), or the list of all pages of the request,
             to which it added some ("seq.block_table", or a function)
    freed    the argument of `free` with the pages; None: what is called so, else `free` is by request
    count    the argument of `alloc` with the number of pages. With it, and where one page is given at a time, a page
             that is still somebody's is refused and another one drawn. Otherwise it cannot be refused: whoever had it
             before is ended by the device check.
    hits, keys  a prefix cache inside of `alloc`: how many leading pages came from it, and the cache keys of the
             request's full pages from its first on (None: not in the cache)
    page_id  the attribute of a page object that is its number; None: `page_id` or `block_id`
    pool     the guard's pool; None: its first
    """
    return AllocatorGuard(
        guard,
        allocator,
        alloc=(alloc,) if isinstance(alloc, str) else tuple(alloc),
        free=free,
        request=request,
        pages=pages,
        freed=freed,
        count=count,
        hits=hits,
        keys=keys,
        page_id=page_id,
        pool=pool,
    )


class AllocatorGuard:
    """What `guard_allocator` made: ends with `detach`, or as a context manager."""

    def __init__(
        self,
        guard: PagedGuard,
        allocator: Any,
        *,
        alloc: tuple[str, ...],
        free: str,
        request: Where | None,
        pages: Where,
        freed: str | int | None,
        count: str | int | None,
        hits: Where | None,
        keys: Where | None,
        page_id: str | None,
        pool: str | None,
    ) -> None:
        """See `guard_allocator`. Every name is checked before anything is replaced."""
        if guard.wants_contents:
            raise AttachError("an allocator's calls do not say which tokens pages are for: level keys needs `identify`")
        self.guard = guard
        self.pool, self.page_id = pool, page_id
        self._allocator = allocator
        self._current: str | None = None
        self._allocating = self._freeing = False
        self._published: dict[str, int] = {}
        self.without_pages: dict[str, Any] = {}
        """What each wrapped method last answered when it gave no pages."""
        self._last = LastPages(guard, pool)
        self._methods: list[Method] = []
        if isinstance(allocator, type):
            raise AttachError(f"{allocator.__name__} is a class: give the object that the engine allocates from")
        if (hits is None) != (keys is None):
            raise AttachError("hits and keys go together: how many pages came from the cache, and under which keys")
        giving = [Method(allocator, name) for name in alloc]
        taking = Method(allocator, free)
        if guard.is_off:
            return
        if pool is not None and pool not in guard.pool_names:
            raise AttachError(f"no pool {pool!r}: this guard has {', '.join(guard.pool_names)}")
        by_page = freed_argument(taking, freed, request)
        if count is not None and (by_page is None or pages != "return"):
            raise AttachError("count= needs alloc to return pages and free to take pages: some may have to go back")
        wrappers = [self._giving(method, request, pages, count, hits, keys, taking, by_page) for method in giving]
        wrappers.append(self._taking(taking, request, pages, by_page))
        try:
            for method, wrapper in zip([*giving, taking], wrappers, strict=True):
                method.put(wrapper)
                self._methods.append(method)
        except AttachError:
            self.detach()
            raise
        if by_page is None or set(REQUEST_ARGUMENTS) & set(taking.parameters()):
            guard.watch(self._last.remember)

    @property
    def attached(self) -> bool:
        """Whether the allocator's methods are wrapped; at level `off` they never are."""
        return bool(self._methods)

    def detach(self) -> None:
        """Give the allocator its own methods back; the books stay as they are."""
        while self._methods:
            self._methods.pop().restore()
        self.guard.unwatch(self._last.remember)

    def __enter__(self) -> AllocatorGuard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Allocations and frees inside are those of request `name`, for allocators that are not told."""
        before, self._current = self._current, name
        try:
            yield
        finally:
            self._current = before

    # -- what stands in the allocator's place ---------------------------------------------------------------------

    def _giving(
        self,
        method: Method,
        request: Where | None,
        pages: Where,
        count: str | int | None,
        hits: Where | None,
        keys: Where | None,
        taking: Method,
        by_page: str | None,
    ) -> Callable[..., Any]:
        request_of = self._request_finder(method, request)
        pages_of = method.finder(pages, "pages")
        hits_of = None if hits is None else method.finder(hits, "hits")
        keys_of = None if keys is None else method.finder(keys, "keys")
        counted = None if count is None else method.argument(count, "count")
        from_answer = pages == "return"
        given = isinstance(pages, str) and pages.partition(".")[0] == "return"

        def alloc(*args: Any, **kwargs: Any) -> Any:
            if self._allocating:
                # The allocator calls itself: the outer call sees all that it gave.
                return method.original(*args, **kwargs)
            answer, lazy = self.allocating(method, args, kwargs, thawed=from_answer)
            if given and (answer is None or answer is False):
                self.without_pages[method.name] = answer
                return answer
            bound = method.bind(args, kwargs)
            values = {**bound.arguments, "self": self._allocator, "return": answer}

            if from_answer and (counted is not None or is_single(answer, self.page_id)):
                # What the allocator itself raises must reach the engine: it is called outside of what is contained.
                name = self.kept(None, lambda: request_of(values) if given_pages(answer, self.page_id) else "")
                if name:
                    answer = draw(self, method, bound, counted, name, answer, taking, by_page)
                elif name == "":
                    self.without_pages[method.name] = answer
                return iter(answer) if lazy and isinstance(answer, list) else answer

            def book() -> None:
                name = request_of(values)
                known = self.guard.columns(name, pool=self.pool)
                if known <= 0:
                    # A new incarnation: what an earlier one published says nothing of its pages.
                    self._published.pop(name, None)
                elif self._published.get(name, 0) > known:
                    self._published[name] = known
                fresh = self._fresh(name, given_pages(pages_of(values), self.page_id), whole=not given)
                cached = 0 if hits_of is None or known > 0 else min(int(hits_of(values)), len(fresh))
                self._take(name, fresh, cached, () if keys_of is None else keys_of(values))

            self.kept(None, book)
            return iter(answer) if lazy else answer

        return alloc

    def _taking(self, method: Method, request: Where | None, pages: Where, by_page: str | None) -> Callable[..., Any]:
        names = method.parameters()
        told = isinstance(request, str) and request.partition(".")[0] in (*names, "self")
        if isinstance(request, int):
            told = request < len(names) and names[request] != by_page
        find_name = None
        if by_page is None or told or (request is None and set(REQUEST_ARGUMENTS) & set(names)):
            find_name = self._name_finder(method, request)
        own_list = pages if isinstance(pages, str) and not pages.startswith("return") else None
        if by_page is not None and own_list is not None and own_list.partition(".")[0] not in (*names, "self"):
            own_list = None
        list_of = None if own_list is None else method.finder(own_list, "pages")

        def free_request(values: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def named() -> str:
                name = self._current if find_name is None else find_name(values) or self._current
                if name is None:
                    raise KeyError(f"{method.what} is not told for whom")
                return name

            name = self.kept(None, named)
            if name is not None and list_of is not None:
                find = list_of
                self.kept(None, lambda: self._spare_foreign(name, find(values)))
            answer = self.freeing(method, args, kwargs)
            if name is not None:
                self.kept(None, lambda: self._end(name))
            return answer

        def free(*args: Any, **kwargs: Any) -> Any:
            if self._freeing:
                return method.original(*args, **kwargs)
            bound = method.bind(args, kwargs)
            values = {**bound.arguments, "self": self._allocator, "return": None}
            if by_page is None:
                return free_request(values, args, kwargs)
            pages_given = values[by_page]
            if pages_given is None:
                # All pages of the request, if the call says whose; else the allocator knows what it means.
                if find_name is None and self._current is None:
                    return self.freeing(method, args, kwargs)
                return free_request(values, args, kwargs)
            if isinstance(pages_given, Iterator):
                pages_given = thaw(pages_given)
                bound.arguments[by_page] = iter(pages_given)
                args, kwargs = bound.args, bound.kwargs

            def vetted() -> tuple[bool, Any]:
                """Whether the allocator is to be called, and with which pages."""
                by = (None if find_name is None else find_name(values)) or self._current
                if by is not None and self.guard.columns(by) < 0:
                    by = None
                listed = page_list(pages_given, self.page_id)
                accepted = self.guard.retire(listed, by=by, pool=self.pool).reusable
                if len(accepted) == len(listed):
                    return True, None
                return bool(accepted), keep(pages_given, places_of(listed, accepted), self.page_id)

            called, rest = self.kept((True, None), vetted)
            if not called:
                return None
            if rest is None:
                return self.freeing(method, args, kwargs)
            bound.arguments[by_page] = rest
            return self.freeing(method, bound.args, bound.kwargs)

        return free

    def allocating(
        self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], *, thawed: bool = True
    ) -> tuple[Any, bool]:
        """The allocator's own answer, and whether it was an iterator; what it calls of itself is not seen.

        `thawed`: an iterator is read to its end, into a list; only then is the allocator done.
        """
        self._allocating = True
        try:
            answer = method.original(*args, **kwargs)
            lazy = thawed and isinstance(answer, Iterator)
            return thaw(answer) if lazy else answer, lazy
        finally:
            self._allocating = False

    def freeing(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The allocator's own `free`; what it calls of itself is not seen."""
        self._freeing = True
        try:
            return method.original(*args, **kwargs)
        finally:
            self._freeing = False

    # -- what goes into the books ---------------------------------------------------------------------------------

    def kept(self, unguarded: T, call: Callable[[], T]) -> T:
        """A request or a page that cannot be made out is an error of the adapter: counted, and the engine goes on.

        What the guard itself does wrong is contained in its own calls; here only names and functions of the user fail.
        """

        def careful(_: object) -> T:
            try:
                return call()
            except (GuardHalt, UsageError):
                raise
            except Exception as error:
                raise UsageError(f"guard_allocator on {type(self._allocator).__name__}: {error}") from error

        return self.guard.kept(unguarded, careful)

    def known(self, name: str) -> int:
        """Columns that the request has; it is started if nobody knows it."""
        columns = self.guard.columns(name, pool=self.pool)
        if columns < 0:
            self.guard.start(name)
        if columns <= 0:
            self._last.forget(name)
        return max(0, columns)

    def _fresh(self, name: str, listed: list[int], whole: bool) -> list[int]:
        """The pages that this call gave. `whole`: all pages of the request are listed, the books know the first."""
        if not listed:
            return []
        known = self.known(name)
        if not whole:
            return listed
        if len(listed) < known:
            raise UsageError(f"request {name!r} lists {len(listed)} pages and had {known}: truncate or drop them first")
        return listed[known:]

    def _take(self, name: str, fresh: list[int], cached: int, keys: Sequence[Any]) -> None:
        """The first `cached` of the pages came from the prefix cache; what has a key since can be found in it."""
        if cached:
            if len(keys) < cached:
                raise UsageError(f"request {name!r} took {cached} cached pages and names {len(keys)} keys")
            hits = list(zip(keys, fresh[:cached], strict=False))
            self.guard.adopt(name, hits, pool=self.pool, refusable=False)
            self._published[name] = cached
        if fresh[cached:]:
            self.guard.allocate(name, fresh[cached:], pool=self.pool, refusable=False)
        done = self._published.get(name, 0)
        while done < len(keys) and keys[done] is not None and done < self.guard.columns(name, pool=self.pool):
            self.guard.publish(name, done, keys[done], pool=self.pool)
            done += 1
        if keys:
            self._published[name] = done

    def _spare_foreign(self, name: str, listed: Any) -> None:
        """Pages that are somebody else's by now must not be freed with the request: they leave its list."""
        _, foreign = self._last.held(name)
        if not foreign:
            return
        if not isinstance(listed, list):
            raise TypeError(f"the pages of {name!r} are a {type(listed).__name__}: foreign pages cannot leave it")
        places = [place for place, page in enumerate(page_list(listed, self.page_id)) if page not in foreign]
        listed[:] = keep(listed, places, self.page_id)

    def _end(self, name: str) -> None:
        """The request gave everything back: what nobody else has and no cache names is vacant."""
        own, _ = self._last.held(name)
        if not self._last.ended(name):
            self.guard.finish(name)
        self._last.forget(name)
        self._published.pop(name, None)
        self.guard.retire(self.guard.unused(own, pool=self.pool), pool=self.pool)

    # -- what the names mean --------------------------------------------------------------------------------------

    def _request_finder(self, method: Method, request: Where | None) -> Callable[[Mapping[str, Any]], str]:
        """Whose pages a call is about, as the books name it."""
        find = self._name_finder(method, request)

        def request_of(values: Mapping[str, Any]) -> str:
            name = find(values) or self._current
            if name is None:
                raise KeyError(f"{method.what} is not told for whom: give request=, or call it in `request(name)`")
            return name

        return request_of

    def _name_finder(self, method: Method, request: Where | None) -> Callable[[Mapping[str, Any]], str | None]:
        """The request that a call names; None where it names none, as an optional argument may."""
        where = request
        if where is None:
            where = next((name for name in REQUEST_ARGUMENTS if name in method.parameters()), None)
        if where is None:
            return lambda values: None
        find = method.finder(where, "request")

        def name_of(values: Mapping[str, Any]) -> str | None:
            found = find(values)
            return None if found is None else request_name(found)

        return name_of
