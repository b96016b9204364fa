"""A real OpenAI server of vLLM in its own process, over the tiny model; and the little HTTP that its tests need."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvguard.fault_injection.targets.vllm_engine import ENVIRONMENT
from tests.vllm.server_fault import ORDER_VARIABLE, install

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One HTTP answer. `events` are the JSON events of a stream, in order; `body` is set where it was no stream."""

    status: int
    body: Any = None
    events: tuple[Any, ...] = ()

    @property
    def error(self) -> Any:
        """The error of the body, or of the stream's last event; None where there is none."""
        last = self.body if self.body is not None else (self.events[-1] if self.events else None)
        return last.get("error") if isinstance(last, dict) else None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that arrived."""
        parts = self.events if self.body is None else (self.body,)
        choices = [part["choices"][0] for part in parts if part.get("choices")]
        return tuple(token for choice in choices for token in choice.get("token_ids") or ())


class Server:
    """`python -m vllm.entrypoints.openai.api_server`; use it in a `with`."""

    def __init__(self, checkpoint: Path, folder: Path, settings: dict[str, str]) -> None:
        """`settings`: KVGUARD_* variables; no others are passed on, so {} is an unguarded server."""
        install(folder / "plugin")
        self.order = folder / "order.json"
        self.log = folder / "server.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}
        path = os.environ["PYTHONPATH"].split(os.pathsep) if os.environ.get("PYTHONPATH") else []
        environment |= ENVIRONMENT | {
            "PYTHONPATH": os.pathsep.join([*path, str(folder / "plugin"), str(ROOT)]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            ORDER_VARIABLE: str(self.order),
            **settings,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        command += ["--max-model-len", "384", "--block-size", "32", "--num-gpu-blocks-override", "100"]
        command += ["--max-num-seqs", "8", "--enforce-eager", "--seed", "0", "--enable-request-id-headers"]
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
            )

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_S
        try:
            while not self.healthy():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-6000:]}")
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and the engine core that it started: both are in a session of their own."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def healthy(self) -> bool:
        """Whether /health says 200."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any] | None = None, request_id: str = "") -> Reply:
        """POST, and read everything that comes back."""
        headers = {"Content-Type": "application/json"} | ({"X-Request-Id": request_id} if request_id else {})
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, headers=headers, method="POST")
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

    def complete(self, prompt: list[int], tokens: int, *, stream: bool, request_id: str = "") -> Reply:
        """/v1/completions, greedy, on token ids."""
        return self.post("/v1/completions", {"prompt": prompt, **self._options(tokens, stream)}, request_id)

    def chat(self, text: str, tokens: int, *, stream: bool, request_id: str = "") -> Reply:
        """/v1/chat/completions, greedy, one message."""
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, **self._options(tokens, stream)}, request_id)

    @staticmethod
    def _options(tokens: int, stream: bool) -> dict[str, Any]:
        options = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        return {**options, "return_token_ids": True}
