"""Whether a judge answers is asked without a score: its list of models, with the key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.judge.probe import check_judge


class Handler(BaseHTTPRequestHandler):
    status = 200
    reply = b'{"data": [{"id": "judge"}]}'
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.reply)))
        self.end_headers()
        self.wfile.write(self.reply)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    kind = type("Own", (Handler,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}", kind
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "reply", "said"),
    [
        (200, b'{"data": [{"id": "judge"}]}', ""),
        (200, b'{"data": [{"id": "a"}, {"id": "b"}]}', ", but does not list judge.model=judge (it has a, b)"),
        (200, b"<html>", ""),
        (404, b"", ""),
        (429, b"", ""),
    ],
)
def test_a_server_that_answers(server: tuple[str, type[Handler]], status: int, reply: bytes, said: str) -> None:
    url, kind = server
    kind.status, kind.reply = status, reply
    assert check_judge([f"{url}/v1"], "judge", None, 5.0) == f"{url}/v1 answers{said}"
    assert kind.asked == [("/v1/models", None)]


@pytest.mark.parametrize(
    ("status", "key", "words"),
    [
        (401, None, r"refuses GET /v1/models \(401\); give judge.api_key_env=VARIABLE"),
        (403, "KEY", r"\(403\); give another key in the variable of judge.api_key_env"),
        (503, None, r"does not answer \(503 to GET /v1/models\); start it, or correct the url"),
    ],
)
def test_a_server_that_refuses(
    server: tuple[str, type[Handler]], monkeypatch: pytest.MonkeyPatch, status: int, key: str | None, words: str
) -> None:
    url, kind = server
    kind.status = status
    monkeypatch.setenv("KEY", "sk-probe-1234567890")
    with pytest.raises(ConfigError, match=words):
        check_judge([url], "judge", key, 5.0)
    assert kind.asked == [("/v1/models", "Bearer sk-probe-1234567890" if key else None)]


def test_a_login_in_the_address_is_sent_and_not_shown(server: tuple[str, type[Handler]]) -> None:
    url, kind = server
    said = check_judge([url.replace("//", "//user:sesame@")], "judge", None, 5.0)
    assert "sesame" not in said
    assert kind.asked[0][1] == "Basic dXNlcjpzZXNhbWU="
