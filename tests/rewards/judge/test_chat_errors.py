"""Servers that answer with an error in an awkward way, or speak TLS in the wrong way, byte by byte over sockets."""

from __future__ import annotations

import asyncio
import gzip
import os
import ssl
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import RewardFailed
from dataflow.reward_agent import Retry, RewardAgent
from dataflow.rewards.judge.errors import JudgeError
from dataflow.rewards.judge.judge import Judge
from dataflow.system import http
from dataflow.system.secrets import keep_secret
from tests.rewards.judge import certificates

pytestmark = pytest.mark.timeout(60)

RIGHT = "#### 7"
ENDLESS = None
"""In place of bytes: nothing more comes, and the connection stays."""


def with_server(
    sent: list[bytes | None], use: Callable[[str], Any], tls: ssl.SSLContext | None = None, scheme: str = ""
) -> Any:
    """Runs ``use(url)`` beside a server that sends these pieces to each request, whatever it is, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await (reader.read(10) if scheme == "https" else reader.readuntil(b"\r\n\r\n"))
            for piece in sent:
                if piece is ENDLESS:
                    await reader.read(-1)  # until the client goes
                else:
                    writer.write(piece)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone, as some of these tests want
        finally:
            writer.close()

    async def body() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(40):
                return await use(f"{scheme or ('https' if tls else 'http')}://127.0.0.1:{port}")
        finally:
            server.close()

    return asyncio.run(body())


def asked(sent: list[bytes | None], tls: ssl.SSLContext | None = None, scheme: str = "", **options: Any) -> Any:
    """Returns the score, or the error if there is none."""

    async def use(url: str) -> Any:
        judge = Judge(url, **options)
        try:
            return (await judge.compute_score("d", RIGHT, "7"))["score"]
        except Exception as error:
            return error
        finally:
            await judge.close()

    return with_server(sent, use, tls, scheme)


def head(status: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", "Retry-After: 7", *headers, "", ""]).encode()


BOMB = gzip.compress(bytes(64 << 20), 1)
SAID = b'{"error": {"message": "no such luck"}}'
LENGTH = f"Content-Length: {len(SAID)}"

# What the server sends, and what is left of its text.
AWKWARD: dict[str, tuple[list[bytes | None], str]] = {
    "slow": ([head(503, "Content-Length: 100"), b"no such", ENDLESS], "no such"),
    "silent": ([head(503, "Content-Length: 100"), ENDLESS], "without a message"),
    "chunked": ([head(503, "Transfer-Encoding: chunked"), b"7\r\nno such\r\n", ENDLESS], "no such"),
    "endless": ([head(503), *[b"no such luck " * 8000] * 40], "no such luck"),
    "broken off": ([head(503, "Content-Length: 100"), b"no such"], "no such"),
    "empty": ([head(503, "Content-Length: 0")], "without a message"),
    "bomb": ([head(503, "Content-Encoding: gzip", f"Content-Length: {len(BOMB)}"), BOMB], "\\x00"),
    "packed": ([head(503, "Content-Encoding: gzip"), gzip.compress(SAID)], "no such luck"),
    "deflated": ([head(503, "Content-Encoding: deflate"), zlib.compress(SAID)], "no such luck"),
    "not packed": ([head(503, "Content-Encoding: gzip", LENGTH), SAID], "no such luck"),
    "half packed": ([head(503, "Content-Encoding: gzip"), gzip.compress(os.urandom(50) + SAID)[:70]], ""),
    "utf-16": (
        [head(503, "Content-Type: text/plain; charset=utf-16"), "no such luck".encode("utf-16")],
        "no such luck",
    ),
    "unknown charset": ([head(503, "Content-Type: text/plain; charset=klingon"), b"no such luck"], "no such luck"),
    "no text": ([head(503), b"no \xff\xfe\x00\x1b[2J luck"], "\\x00\\x1b[2J luck"),
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_an_error_keeps_its_status_whatever_its_text_is(kind: str) -> None:
    sent, left = AWKWARD[kind]
    tracemalloc.start()
    try:
        error = asked(sent, timeout=20.0)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(error, JudgeError), error
    assert (error.status, error.retry, error.retry_after) == (503, True, 7)
    assert "/v1/chat/completions answered 503: " in str(error)
    assert left in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 300
    assert peak < 8 << 20


def test_the_status_is_not_lost_to_the_agents_time_out() -> None:
    async def use(url: str) -> str:
        agent = RewardAgent(Judge(url), retry=Retry(tries=1, timeout_s=5.0))
        agent.submit(1, Batch([0], {"response_text": [RIGHT], "ground_truth": ["7"], "data_source": ["d"]}))
        with pytest.raises(RewardFailed) as error:
            await agent.collect(1)
        await agent.close()
        return str(error.value)

    story = with_server([head(401, "Content-Length: 100"), b"who are", ENDLESS], use)
    assert "answered 401: who are" in story
    assert "judge.api_key_env" in story
    assert "no answer within" not in story


def test_a_reply_that_is_packed_though_it_was_not_asked_to() -> None:
    text = b'{"choices": [{"message": {"content": "Score: 1"}}]}'
    for encoding, packed in (("gzip", gzip.compress(text)), ("deflate", zlib.compress(text)), ("gzip", text)):
        reply = [head(200, f"Content-Encoding: {encoding}", f"Content-Length: {len(packed)}"), packed]
        assert asked(reply) == 1
    error = asked([head(200, "Content-Encoding: gzip"), BOMB])
    assert "over 4,194,304 bytes" in str(error)
    error = asked([head(200, "Content-Encoding: br"), b"\x0b\x02\x80"])
    assert "in the encoding 'br', which was not requested" in str(error)


def test_a_secret_in_the_name_of_an_encoding_is_masked() -> None:
    keep_secret("Zq7Wm3Lk9pTx2vNb8RcYd5Hs4")
    error = asked([head(200, "Content-Encoding: Zq7Wm3Lk9pTx2vNb8RcYd5Hs4"), b"{}"])
    assert "in the encoding '***', which was not requested" in str(error)


# --- TLS -------------------------------------------------------------------------------------------------------


def context(tmp_path: Path, certificate: str) -> ssl.SSLContext:
    file = tmp_path / "server.pem"
    file.write_text(certificate + certificates.KEY)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(file)
    return made


OK = [head(200, "Content-Length: 51"), b'{"choices": [{"message": {"content": "Score: 1"}}]}']


def test_a_certificate_that_is_not_trusted_is_not_tried_again(tmp_path: Path) -> None:
    error = asked(OK, context(tmp_path, certificates.SELF))
    assert isinstance(error, JudgeError), error
    assert "/v1/chat/completions: ClientConnectorCertificateError: " in str(error)
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)
    assert "SSL_CERT_FILE" in error.fix
    assert not error.retry


@pytest.mark.heavy
def test_the_variable_that_the_fix_names_works(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(certificates.SELF)
    code = (
        "import asyncio, sys; from dataflow.rewards.judge.judge import Judge\n"
        "async def body():\n"
        "    judge = Judge(sys.argv[1])\n"
        "    print((await judge.compute_score('d', '#### 7', '7'))['score'])\n"
        "    await judge.close()\n"
        "asyncio.run(body())"
    )

    async def use(url: str) -> str:
        environment = {**os.environ, "SSL_CERT_FILE": str(tmp_path / "ca.pem")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, url, env=environment, stdout=asyncio.subprocess.PIPE
        )
        return (await process.communicate())[0].decode()

    assert with_server(OK, use, context(tmp_path, certificates.SELF)) == "1.0\n"


def test_the_wrong_scheme_is_told_by_the_address_and_the_error(tmp_path: Path) -> None:
    error = asked([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"], scheme="https")
    assert str(error).startswith("https://")
    assert "ClientConnectorSSLError" in str(error)
    assert "https:// or http://" in error.fix
    assert not error.retry
    error = asked(OK, context(tmp_path, certificates.SELF), scheme="http")
    assert str(error).startswith("http://")
    assert "judge.url" in error.fix


def test_no_error_of_the_http_client_is_chained() -> None:
    """They hold the headers of the request, and with them the key."""
    for sent in (
        [b"HTTP/1.1 200 X\r\n"],
        [head(200, "Content-Length: 5"), b"{"],
        [head(200, "Content-Length: 1"), b"{"],
    ):
        error = asked(sent)
        assert isinstance(error, JudgeError)
        assert (error.__cause__, error.__context__) == (None, None)
    assert http.ERROR_S < 1
