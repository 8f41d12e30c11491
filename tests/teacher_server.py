"""A teacher on this machine that answers as SGLang does, unless a test says otherwise."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[[int], tuple[int, Any] | None]
"""Maps the number of a request, from 0, to status and answer; None: as a teacher answers."""


@dataclass
class TeacherServer:
    """A server, and the bodies that it got. A token's logprob is its id over -8."""

    url: str = ""
    fault: Fault = lambda number: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    hold: Callable[[int], object] = lambda number: None
    """Called with the number of a request before it is answered."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(dict(body))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.hold(number)
        with self.lock:
            self.at_once -= 1
        tokens, start = body["input_ids"], body["logprob_start_len"]
        entries = [[None, tokens[start], None], *([-token / 8, token, None] for token in tokens[start + 1 :])]
        return self.fault(number) or (200, {"meta_info": {"input_token_logprobs": entries}})


@contextmanager
def teacher_server(**values: Any) -> Iterator[TeacherServer]:
    server = TeacherServer(**values)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200 if self.path == "/model_info" else 404, {"model_path": "models/teacher"})

        def do_POST(self) -> None:
            server.keys.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(*(server.answer(body) if self.path == "/generate" else (404, {})))

        def send(self, status: int, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            try:
                self.wfile.write(data)
            except OSError:  # nobody waits for it any more
                return

        def log_message(self, *given: Any) -> None:
            """Says nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
