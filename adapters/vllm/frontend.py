"""What an HTTP client sees of an aborted request, in vLLM's OpenAI server (the front-end process).

vLLM tells its serving layer only *that* a request ended with an error: every such client gets status 500 and "Internal
server error", and a streaming client gets even that after a status 200. Here the guard's message travels along, the
status becomes 503, which says that a retry is right, and a stream does not open before it is known whether the
request failed before its first token. Requests that end in any other way are vLLM's business and stay as they are.

Classes are patched once, when vLLM imports their modules. Without these patches guarding works, only less readably:
where a vLLM does not look as expected, that is logged as `frontend_not_attached` and nothing is changed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from http import HTTPStatus
from types import ModuleType
from typing import Any

from kvguard.adapters.vllm.layout import Unsupported, require, require_parameters
from kvguard.telemetry import emit

OUTPUT_MODULE = "vllm.v1.engine.output_processor"
SERVING_MODULE = "vllm.entrypoints.generate.base.serving"
COMPLETION_MODULE = "vllm.entrypoints.openai.completion.serving"
CHAT_MODULE = "vllm.entrypoints.openai.chat_completion.serving"
MESSAGE_PREFIX = "kvguard "
PATCHED = "_kvguard_attached"


class EndedByGuard(str):
    """The finish reason "error" of a request that kvguard ended; it is equal to "error" and remembers why."""

    message: str

    def __new__(cls, message: str) -> EndedByGuard:
        """The finish reason that carries this message."""
        reason = super().__new__(cls, "error")
        reason.message = message
        return reason


def attach(when_imported: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Patch each module once it is imported; in a process without an HTTP server most never are."""
    when_imported(OUTPUT_MODULE, _shielded(_mark_outputs))
    when_imported(SERVING_MODULE, _shielded(_explain_errors))
    when_imported(COMPLETION_MODULE, _shielded(_open_completions_late))
    when_imported(CHAT_MODULE, _shielded(_open_chats_late))


def _shielded(patch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def patch_or_log(module: ModuleType) -> None:
        try:
            patch(module)
        except (Unsupported, AttributeError) as error:
            emit("frontend_not_attached", severity="warning", module=module.__name__, reason=str(error))

    return patch_or_log


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(original)` in the method's place, once however often the plugin is loaded."""
    original = getattr(owner, name)
    if not hasattr(original, PATCHED):
        guarded = functools.wraps(original)(make(original))
        setattr(guarded, PATCHED, True)
        setattr(owner, name, guarded)


def _mark_outputs(module: ModuleType) -> None:
    """The scheduler side puts its message into `stop_reason`; the serving layer looks at `finish_reason` only."""

    def marking(original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if output.finish_reason == "error":
                reason = output.stop_reason
                if isinstance(reason, str) and reason.startswith(MESSAGE_PREFIX):
                    output.finish_reason = EndedByGuard(reason)
            return output

        return guarded

    require(module.RequestState, "_new_completion_output")
    _replace(module.RequestState, "_new_completion_output", marking)


def _explain_errors(module: ModuleType) -> None:
    """Where vLLM turns a finish reason into an exception, ours carries the message and status 503."""
    serving, generation_error = module.GenerateBaseServing, module.GenerationError
    require(serving, "_raise_if_error", "_convert_generation_error_to_streaming_response", "create_error_response")
    require_parameters(serving._raise_if_error, "finish_reason", "request_id")
    retryable = getattr(sys.modules[generation_error.__module__], "RetryableRequestError", generation_error)

    def explaining(original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(self: Any, finish_reason: str | None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(finish_reason, EndedByGuard):
                raise _retry(retryable, finish_reason.message)
            return original(self, finish_reason, *args, **kwargs)

        return guarded

    _replace(serving, "_raise_if_error", explaining)
    serving._kvguard_error = staticmethod(functools.partial(_retry, retryable))


def _retry(kind: Callable[[str], Any], message: str) -> Any:
    error = kind(message)
    error.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return error


def _open_completions_late(module: ModuleType) -> None:
    _open_late(module.OpenAIServingCompletion, "create_completion", "completion_stream_generator")


def _open_chats_late(module: ModuleType) -> None:
    _open_late(module.OpenAIServingChat, "create_chat_completion", "chat_completion_stream_generator")


class _Peekable:
    """The engine's outputs for one HTTP request; the first can be looked at before anybody consumes it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._first: Any = None
        self._first_error: Exception | None = None
        self._held = False

    async def message_of_first(self) -> str | None:
        """Wait for the first output; the guard's message, if that output says that the guard ended the request."""
        try:
            self._first = await anext(self._source)
        except Exception as error:  # the consumer gets it, where vLLM expects it
            self._first_error = error
        self._held = True
        output = self._first[1] if isinstance(self._first, tuple) else self._first
        reasons = [completion.finish_reason for completion in getattr(output, "outputs", ())]
        return next((reason.message for reason in reasons if isinstance(reason, EndedByGuard)), None)

    def __aiter__(self) -> _Peekable:
        return self

    async def __anext__(self) -> Any:
        if not self._held:
            return await anext(self._source)
        self._held = False
        first, error = self._first, self._first_error
        self._first = self._first_error = None
        if error is not None:
            raise error
        return first

    async def aclose(self) -> None:
        """Close the engine's outputs; what is still running for them is aborted by vLLM."""
        await self._source.aclose()


_sources: ContextVar[list[_Peekable] | None] = ContextVar("kvguard_sources", default=None)


def _open_late(serving: Any, create: str, stream: str) -> None:
    """A stream's response starts once the first output is there: before that, a status can still be an error's."""
    require(serving, create, stream)
    parameters = list(inspect.signature(getattr(serving, stream)).parameters)
    if "result_generator" not in parameters:
        raise Unsupported(f"{serving.__name__}.{stream} has no result_generator")
    place = parameters.index("result_generator")

    def making_peekable(original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            sources = _sources.get()
            if sources is not None and len(args) > place:
                sources.append(_Peekable(args[place]))
                args = (*args[:place], sources[-1], *args[place + 1 :])
            return original(*args, **kwargs)

        return guarded

    def opening_late(original: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded(self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
            if _sends_keep_alives(raw_request):
                return await original(self, request, raw_request, *args, **kwargs)
            sources: list[_Peekable] = []
            token = _sources.set(sources)
            try:
                answer = await original(self, request, raw_request, *args, **kwargs)
            finally:
                _sources.reset(token)
            if not sources or not isinstance(answer, AsyncGenerator):
                return answer
            message = await sources[0].message_of_first()
            if message is None or not hasattr(self, "_kvguard_error"):
                return answer
            await answer.aclose()
            await sources[0].aclose()
            return self.create_error_response(self._kvguard_error(message))

        return guarded

    _replace(serving, stream, making_peekable)
    _replace(serving, create, opening_late)


def _sends_keep_alives(raw_request: Any) -> bool:
    """Whether the operator asked for bytes while a request waits: then the response has to start at once."""
    state = getattr(getattr(raw_request, "app", None), "state", None)
    interval = getattr(getattr(state, "args", None), "sse_keep_alive_interval", 0)
    return bool(interval and interval > 0)
