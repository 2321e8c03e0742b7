"""A process in place of ``vllm serve``: it listens, answers /health and /classify, and computes no model.

The score is the number of characters of the last message. ``--fails TEXT`` ends its start with an error,
``--never`` lets it never answer, ``--stubborn`` ignores SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-P", str(Path(__file__).resolve())]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/classify":
            self._answer({}, 404)
            return
        score = len(json.loads(text)["messages"][-1]["content"])
        self._answer({"data": [{"index": 0, "probs": [score]}]})

    def _answer(self, found: Any, status: int = 200) -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--fails")
    for switch in ("--never", "--stubborn"):
        parser.add_argument(switch, action="store_true")
    given, _others = parser.parse_known_args()
    if given.fails:
        print("loading", f"ValueError: {given.fails}", "EngineError: Engine core initialization failed.", sep="\n")
        sys.exit(1)
    if given.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if given.never:
        signal.pause()
    ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()
