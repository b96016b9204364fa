"""SGLang's real HTTP server over the tiny model, and the little HTTP that its tests need.

Its processes are forked off this one, where SGLang is imported already: launching them afresh takes a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sglang.engine import ARGUMENTS, checkpoint
from tests.sglang.server_fault import NAME, ORDER_VARIABLE, install
from tests.tokenizer import write_tokenizer

START_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One HTTP answer: `body` where it was no stream, `events` in order where it was one."""

    status: int
    body: Any = None
    events: tuple[Any, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The tokens that arrived, of /generate: every event of a stream has all tokens so far."""
        parts = self.events if self.body is None else (self.body,)
        return next((list(part["output_ids"]) for part in reversed(parts) if part.get("output_ids")), [])


class Server:
    """`launch_server` in processes of its own; use it in a `with`."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        """`settings`: KVGUARD_* variables; no others are passed on, so {} is an unguarded server."""
        import sglang.srt.entrypoints.http_server
        import sglang.srt.managers.detokenizer_manager
        import sglang.srt.managers.scheduler
        import sglang.srt.models.registry  # noqa: F401

        install(folder / "plugin")
        self.order, self.log, model = folder / "order.json", folder / "server.log", folder / "model"
        shutil.copytree(checkpoint(), model)
        write_tokenizer(model)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._ended = False
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._become(folder / "plugin", model, port, settings)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)

    def _become(self, plugin: Path, model: Path, port: int, settings: dict[str, str]) -> None:
        import multiprocessing

        from sglang.srt.entrypoints import engine
        from sglang.srt.entrypoints.http_server import launch_server
        from sglang.srt.server_args import ServerArgs

        os.setsid()
        log = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        for name in [name for name in os.environ if name.startswith("KVGUARD_")]:
            del os.environ[name]
        os.environ |= settings | {ORDER_VARIABLE: str(self.order), "SGLANG_PLUGINS": f"kvguard,{NAME}"}
        sys.path.insert(0, str(plugin))
        configure = engine._set_envs_and_config

        def and_fork(arguments: Any) -> None:
            configure(arguments)
            multiprocessing.set_start_method("fork", force=True)

        engine._set_envs_and_config = and_fork
        given = ARGUMENTS | {"model_path": str(model), "skip_tokenizer_init": False, "skip_server_warmup": True}
        launch_server(ServerArgs(**given, host="127.0.0.1", port=port))

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_S
        try:
            while not self.healthy():
                self._ended = self._ended or os.waitpid(self._pid, os.WNOHANG)[0] != 0
                if self._ended or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-6000:]}")
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and what it started: all are in a session of their own."""
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if not self._ended:
            os.waitpid(self._pid, 0)

    def healthy(self) -> bool:
        """Whether /health says 200."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """POST, and read everything that comes back."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                if not answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                    return Reply(status=answer.status, body=json.loads(answer.read()))
                lines = [line.decode().strip() for line in answer]
        except urllib.error.HTTPError as refusal:
            return Reply(status=refusal.code, body=json.loads(refusal.read()))
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events and events[-1] == "[DONE]", events[-3:]
        return Reply(status=200, events=tuple(json.loads(event) for event in events[:-1]))

    def generate(self, prompt: list[int], tokens: int, *, stream: bool, name: str) -> Reply:
        """/generate, greedy, on token ids."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": stream, "rid": name})

    def openai(self, kind: str, tokens: int, *, stream: bool, name: str) -> Reply:
        """/v1/completions or /v1/chat/completions, greedy."""
        text = "Speak, friend, and enter. " * 3
        options = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        options |= {"stream": stream, "rid": name}
        if kind == "chat":
            return self.post("/v1/chat/completions", options | {"messages": [{"role": "user", "content": text}]})
        return self.post("/v1/completions", options | {"prompt": text})

    def break_row(self, request: str, tokens: int) -> None:
        """Have the scheduler break this request's row once it has so much KV."""
        given = self.order.with_suffix(".new")
        given.write_text(json.dumps({"request": request, "tokens": tokens}))
        given.rename(self.order)
