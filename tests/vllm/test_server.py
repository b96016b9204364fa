"""vLLM's OpenAI server with the guard in it: who gets an error, what it says, and that everything else goes on."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer import write_tokenizer
from tests.vllm.server import Reply, Server
from tests.vllm.tiny import traffic, write_checkpoint

VICTIM = 3
CLIENTS = 8
PROMPTS, LENGTHS = traffic(5, CLIENTS)
SETTINGS = {
    "row": {"KVGUARD_LEVEL": "tags"},
    # With the control plane the free would be refused, and nobody would notice.
    "free": {"KVGUARD_LEVEL": "tags", "KVGUARD_CONTROL_PLANE": "false"},
}
TEXT = "Speak, friend, and enter. " * 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def golden(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """What eight clients at once get from an unguarded server."""
    with Server(checkpoint, tmp_path_factory.mktemp("plain"), {}) as server:
        replies = eight_clients(server)
        server.post("/reset_prefix_cache")
        assert not server.order.with_suffix(".reset").exists(), "this server is guarded"
    for reply, length in zip(replies, LENGTHS, strict=True):
        assert reply.error is None and len(reply.token_ids) == length
    return [reply.token_ids for reply in replies]


@pytest.fixture(scope="module", params=SETTINGS)
def fault(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(fault: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A guarded server that lets this fault happen."""
    with Server(checkpoint, tmp_path_factory.mktemp("guarded"), SETTINGS[fault]) as running:
        yield running


def eight_clients(server: Server) -> list[Reply]:
    """Eight streaming clients at the same time; their request ids are client-0 to client-7."""

    def one(place: int) -> Reply:
        return server.complete(PROMPTS[place], LENGTHS[place], stream=True, request_id=f"client-{place}")

    with ThreadPoolExecutor(CLIENTS) as threads:
        return list(threads.map(one, range(CLIENTS)))


def order(server: Server, fault: str, request: str, tokens: int) -> None:
    """Have the server inject this fault into the request once it has so much KV."""
    given = server.order.with_suffix(".new")
    given.write_text(json.dumps({"fault": fault, "request": request, "tokens": tokens}))
    given.rename(server.order)


def check_error(error: Any) -> None:
    """It names the guard and the violation, and says that a retry is right."""
    assert error["code"] == HTTPStatus.SERVICE_UNAVAILABLE
    assert error["message"].startswith("kvguard kvg-") and "aborted" in error["message"], error


def test_one_fault_ends_one_of_eight_streams(server: Server, fault: str, golden: list[tuple[int, ...]]) -> None:
    """One client gets an SSE error event after a clean prefix, seven get the tokens of an unguarded server, and the
    server goes on: 100 more requests, a healthy replica, a prefix cache that can be reset with pages in quarantine."""
    order(server, fault, f"client-{VICTIM}", len(PROMPTS[VICTIM]) + 20)
    replies = eight_clients(server)
    assert not server.order.exists(), "the fault was not injected"
    assert [reply.status for reply in replies] == [200] * CLIENTS
    for place, (reply, wanted) in enumerate(zip(replies, golden, strict=True)):
        if place == VICTIM:
            check_error(reply.error)
            assert reply.token_ids == wanted[: len(reply.token_ids)] and 18 <= len(reply.token_ids) < len(wanted)
        else:
            assert reply.error is None and reply.token_ids == wanted, place
    assert server.healthy()
    assert server.post("/reset_prefix_cache").body == {"success": True}
    found = json.loads(server.order.with_suffix(".reset").read_text())
    assert (found["before"] > 0) == (fault == "free") and found["after"] == 0, found
    assert found["violations"] == found["aborted"] == 1, found
    with ThreadPoolExecutor(CLIENTS) as threads:
        again = list(threads.map(lambda n: server.complete(PROMPTS[n % 8], 8, stream=n % 2 == 0), range(100)))
    for number, reply in enumerate(again):
        assert reply.status == 200 and reply.token_ids == golden[number % 8][:8], number
    assert server.healthy()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", ["before-the-first-token", "later"])
def test_what_the_client_sees(server: Server, fault: str, endpoint: str, stream: bool, when: str) -> None:
    """A status with a JSON error as long as nothing was sent; in a stream under way an event with the same message."""
    name = f"{endpoint}-{stream}-{when}"
    if fault == "free" and when == "before-the-first-token":
        fault = "row"  # a request has no block that could be freed before its first step
    order(server, fault, name, 0 if when == "before-the-first-token" else 100)
    if endpoint == "chat":
        reply = server.chat(TEXT, 60, stream=stream, request_id=name)
    else:
        reply = server.complete(PROMPTS[0], 60, stream=stream, request_id=name)
    assert not server.order.exists(), "the fault was not injected"
    check_error(reply.error)
    begun = stream and when == "later"
    assert reply.status == (200 if begun else HTTPStatus.SERVICE_UNAVAILABLE)
    assert bool(reply.token_ids) == begun
    assert server.healthy()


def test_a_refused_request_is_as_before(server: Server) -> None:
    """Errors of the client keep vLLM's own status, in a stream too."""
    for stream in (True, False):
        reply = server.complete([1] * 500, 8, stream=stream)
        assert reply.status == 400 and "kvguard" not in reply.error["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_library_retries_by_itself(server: Server, golden: list[tuple[int, ...]], stream: bool) -> None:
    """The caller of OpenAI's library does not notice a request that was aborted before its first token."""
    openai = importlib.import_module("openai")
    name = f"library-{stream}"
    order(server, "row", name, 0)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2)
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPTS[0],
        max_tokens=LENGTHS[0],
        temperature=0,
        stream=stream,
        extra_headers={"X-Request-Id": name},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens = tuple(token for part in (answer if stream else [answer]) for token in part.choices[0].token_ids or ())
    assert not server.order.exists(), "the fault was not injected"
    assert tokens == golden[0]
