"""Servers elsewhere are asked before a run starts: that they answer, and that they have the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.models.probe import check_servers
from dataflow.system.loopback import ADDRESS
from dataflow.system.serving import Port

pytestmark = pytest.mark.timeout(60)
LIST = (200, '{"data": [{"id": "other"}, {"id": "rm"}]}')


class Handler(BaseHTTPRequestHandler):
    replies: list[tuple[int, str]]

    def do_GET(self) -> None:
        status, text = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.send_response(status if self.path == "/v1/models" else 418)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer((ADDRESS, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{ADDRESS}:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def check(url: str, name: str = "rm", limit_s: float = 20.0) -> None:
    check_servers([(name, url, limit_s)])


@pytest.mark.parametrize("replies", [[LIST], [(503, "loading"), LIST], [(404, "")]], ids=["there", "later", "silent"])
def test_a_server_that_has_the_model_is_waited_for(url: str, replies: list[tuple[int, str]]) -> None:
    Handler.replies = list(replies)
    check(f"{url}/v1")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (LIST, "has no model 'judge' but other, rm; start it with --served-model-name judge"),
        ((200, "<html>"), "is not answered with a list of models"),
        ((401, ""), r"asks for a login \(401\)"),
    ],
)
def test_a_server_without_the_model_is_one_sentence(url: str, reply: tuple[int, str], words: str) -> None:
    Handler.replies = [reply]
    with pytest.raises(ConfigError, match=words):
        check(url, "judge")


def test_a_server_that_does_not_answer_is_one_sentence_without_its_password() -> None:
    port, words = Port(), r"GET /v1/models \(.*\) within 0.1 s; start it"
    try:
        with pytest.raises(ConfigError, match=words) as error:
            check(f"http://me:hush@{ADDRESS}:{port.number}", limit_s=0.1)
    finally:
        port.close()
    assert "hush" not in str(error.value)
