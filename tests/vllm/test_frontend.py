"""The front-end patches on stand-ins for vLLM's classes: what they must leave alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvguard.adapters.vllm import frontend

MESSAGE = "kvguard kvg-1-1: request r lost a page; aborted"


def output(finish_reason: str | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=finish_reason)])


class Serving:
    """As vLLM's OpenAIServingCompletion: an async generator of chunks over an async iterator of engine outputs."""

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs
        self.consumed = 0

    async def engine(self) -> AsyncIterator[Any]:
        for item in self._outputs:
            self.consumed += 1
            if isinstance(item, Exception):
                raise item
            yield item

    async def completion_stream_generator(self, request: Any, result_generator: Any) -> AsyncIterator[str]:
        try:
            async for result in result_generator:
                yield str(result.outputs[0].finish_reason)
        except ValueError as error:
            yield f"told: {error}"

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        return self.completion_stream_generator(request, self.engine())

    def create_error_response(self, error: Exception) -> str:
        return f"error {error}"

    @staticmethod
    def _kvguard_error(message: str) -> Exception:
        return RuntimeError(message)


@pytest.fixture
def serving() -> type[Any]:
    """A fresh patched class."""
    patched = type("Patched", (Serving,), dict(Serving.__dict__))
    module = ModuleType(frontend.COMPLETION_MODULE)
    module.OpenAIServingCompletion = patched  # type: ignore[attr-defined]
    for _ in range(2):  # the plugin may be loaded twice
        frontend._open_completions_late(module)
    return patched


def read(server: Any, raw_request: Any = None) -> Any:
    """The chunks of a stream, or the error response in its place."""

    async def collect() -> Any:
        answer = await server.create_completion(None, raw_request)
        return answer if isinstance(answer, str) else [chunk async for chunk in answer]

    return asyncio.run(collect())


@pytest.mark.parametrize("outputs", [[], [None], [None, None, "stop"], ["error"]], ids=len)
def test_a_stream_keeps_every_output_in_order(serving: type[Any], outputs: list[str | None]) -> None:
    """Looking at the first output loses, repeats and changes nothing; an error that is not ours is vLLM's to tell."""
    assert read(serving([output(reason) for reason in outputs])) == [str(reason) for reason in outputs]


def test_an_exception_reaches_the_stream_that_expects_it(serving: type[Any]) -> None:
    """vLLM tells the client about a refused request inside the stream; so it does still."""
    assert read(serving([ValueError("too long")])) == ["told: too long"]


def test_a_request_that_fails_before_its_first_token_gets_a_status(serving: type[Any]) -> None:
    """The stream is not opened."""
    assert read(serving([output(frontend.EndedByGuard(MESSAGE))])) == f"error {MESSAGE}"


def test_a_stream_with_keep_alives_opens_at_once(serving: type[Any]) -> None:
    """Whoever asks for bytes while a request waits does not get a late response."""
    arguments = SimpleNamespace(sse_keep_alive_interval=5)
    raw_request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(args=arguments)))
    server = serving([output(frontend.EndedByGuard(MESSAGE))])
    assert read(server, raw_request) == ["error"]


def test_only_the_guards_errors_are_marked() -> None:
    """`finish_reason` stays equal to "error"; another error keeps vLLM's plain string."""
    outputs = {
        MESSAGE: SimpleNamespace(finish_reason="error", stop_reason=MESSAGE),
        "else": SimpleNamespace(finish_reason="error", stop_reason="else"),
        "stop": SimpleNamespace(finish_reason="stop", stop_reason=MESSAGE),
    }

    class RequestState:
        def _new_completion_output(self, key: str) -> Any:
            return outputs[key]

    frontend._mark_outputs(SimpleNamespace(RequestState=RequestState))  # type: ignore[arg-type]
    reasons = {key: RequestState()._new_completion_output(key).finish_reason for key in outputs}
    assert reasons == {MESSAGE: "error", "else": "error", "stop": "stop"}
    assert isinstance(reasons[MESSAGE], frontend.EndedByGuard) and reasons[MESSAGE].message == MESSAGE
    assert not any(isinstance(reasons[key], frontend.EndedByGuard) for key in ("else", "stop"))


def test_an_unknown_front_end_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged, and vLLM starts."""
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(frontend, "emit", lambda event, **fields: events.append((event, fields["module"])))
    frontend.attach(lambda name, action: action(ModuleType(name)))
    names = (frontend.OUTPUT_MODULE, frontend.SERVING_MODULE, frontend.COMPLETION_MODULE, frontend.CHAT_MODULE)
    assert events == [("frontend_not_attached", name) for name in names]
