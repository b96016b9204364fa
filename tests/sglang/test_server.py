"""SGLang's HTTP server with the guard in it: who gets an error, what it says, and that everything else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import pytest

from tests.sglang.scenarios import prompts
from tests.sglang.server import Reply, Server

CLIENTS = 8
PROMPTS = prompts(5, CLIENTS)
TOKENS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("guarded"), {"KVGUARD_LEVEL": "tags"}) as running:
        assert "sglang_attached" in running.log.read_text()
        yield running


def eight_clients(server: Server, wave: str) -> list[Reply]:
    """Eight clients at the same time, every other one streaming; their ids are <wave>-0 to <wave>-7."""

    def one(place: int) -> Reply:
        return server.generate(PROMPTS[place], TOKENS, stream=place % 2 == 0, name=f"{wave}-{place}")

    with ThreadPoolExecutor(CLIENTS) as threads:
        return list(threads.map(one, range(CLIENTS)))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What eight clients at once get from an unguarded server."""
    with Server(tmp_path_factory.mktemp("plain"), {}) as server:
        replies = eight_clients(server, "plain")
        assert "sglang_attached" not in server.log.read_text()
    assert [(reply.status, len(reply.tokens)) for reply in replies] == [(200, TOKENS)] * CLIENTS
    return [reply.tokens for reply in replies]


def last(reply: Reply) -> Any:
    """The error body, or a stream's last event."""
    return reply.body if reply.body is not None else reply.events[-1]


def check_error(error: Any) -> None:
    """It names the guard and the violation, and says that a retry is right."""
    while "error" in error:
        error = error["error"]
    assert int(error["code"]) == HTTPStatus.SERVICE_UNAVAILABLE, error
    assert error["message"].startswith("kvguard kvg-") and "aborted" in error["message"], error


@pytest.mark.parametrize("victim", [3, 4], ids=["whole", "stream"])
def test_one_fault_ends_one_of_eight_clients(server: Server, golden: list[list[int]], victim: int) -> None:
    """One gets an error after a clean prefix, seven the tokens of an unguarded server, then 100 more requests."""
    wave = f"fault-{victim}"
    server.break_row(f"{wave}-{victim}", len(PROMPTS[victim]) + 15)
    replies = eight_clients(server, wave)
    assert not server.order.exists(), "the fault was not injected"
    for place, reply in enumerate(replies):
        if place != victim:
            assert reply.status == 200 and reply.tokens == golden[place], place
    reply = replies[victim]
    if victim % 2:
        assert reply.status == HTTPStatus.SERVICE_UNAVAILABLE
        check_error(reply.body)
    else:
        reason = last(reply)["meta_info"]["finish_reason"]
        assert reply.status == 200 and reason["type"] == "abort" and reason["status_code"] == 503
        assert reason["message"].startswith("kvguard kvg-")
        assert reply.tokens == golden[victim][: len(reply.tokens)] and 10 <= len(reply.tokens) < TOKENS
    assert server.healthy()
    with ThreadPoolExecutor(CLIENTS) as threads:
        again = list(
            threads.map(
                lambda n: server.generate(PROMPTS[n % 8], 6, stream=n % 2 == 0, name=f"{wave}-again-{n}"), range(100)
            )
        )
    for number, reply in enumerate(again):
        assert reply.status == 200 and reply.tokens == golden[number % 8][:6], number
    assert server.healthy()


@pytest.mark.parametrize("endpoint", ["generate", "completions", "chat"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", ["before-the-first-token", "later"])
def test_what_the_client_sees(server: Server, endpoint: str, stream: bool, when: str) -> None:
    """503 with a JSON error where nothing was sent yet; in a stream an event that says the same."""
    name = f"{endpoint}-{stream}-{when}"
    server.break_row(name, 0 if when == "before-the-first-token" else 100)
    if endpoint == "generate":
        reply = server.generate(PROMPTS[0], 120, stream=stream, name=name)
    else:
        reply = server.openai(endpoint, 60, stream=stream, name=name)
    assert not server.order.exists(), "the fault was not injected"
    if not stream:
        assert reply.status == HTTPStatus.SERVICE_UNAVAILABLE
        check_error(reply.body)
    elif endpoint == "generate":
        # SGLang has sent its headers by then, in any case.
        reason = last(reply)["meta_info"]["finish_reason"]
        assert reason["type"] == "abort" and reason["status_code"] == 503 and "kvguard kvg-" in reason["message"]
        assert bool(reply.tokens) == (when == "later")
    else:
        errors = [event for event in reply.events if "error" in event]
        assert len(errors) == 1, reply.events[-3:]
        check_error(errors[0])
    assert server.healthy()
