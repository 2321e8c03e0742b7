"""What is found out about a server before it samples: each error is one sentence with the fix."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataflow.engines.base import Sampling
from dataflow.engines.servers.client import Client, ServerError
from dataflow.engines.servers.connect import Wanted, check, check_urls, clients, connect
from dataflow.engines.vocabulary import Vocabulary
from dataflow.errors import ConfigError
from dataflow.system.secrets import redact
from tests.engines.drawing import run
from tests.engines.servers.test_pool import Tokenizer
from tests.rigs.inference_servers import FakeServer, FakeSglang, FakeVllm, serving

pytestmark = pytest.mark.timeout(60)


def found(server: FakeServer, model: str = "mine", longest: int = 64, size: int = 61, **sampling: Any) -> str:
    """Returns the kind of a server after all checks."""

    async def whole() -> str:
        wanted = Wanted(model, Vocabulary(Tokenizer(), [1], 0, size), longest, Sampling(**sampling))
        client = Client(server.url, None, 10.0)
        try:
            return (await check(await connect(client, 5.0), wanted)).kind
        finally:
            await client.close()

    with serving(server):
        return run(whole())


def made(kind: Callable[[], FakeServer], **facts: Any) -> FakeServer:
    """Returns a fake server with these attributes."""
    server = kind()
    for name, value in facts.items():
        setattr(server, name, value)
    return server


def test_the_protocol_is_found_out() -> None:
    assert found(FakeVllm()) == "vLLM 0.31.0"
    assert found(FakeSglang()) == "SGLang 0.5.6"
    assert found(made(FakeSglang, old=True)) == "SGLang 0.5.6"


UNCUT = "--worker-extension-cls dataflow.engines.vllm.worker.RolloutWorker --logprobs-mode processed_logits"
CUDA: dict[str, Any] = {"device": "cuda", "extended": False}


@pytest.mark.parametrize(
    ("server", "wanted", "message"),
    [
        (made(FakeVllm, dev=False), {}, "cannot take weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment"),
        (FakeVllm(), {"longest": 513}, "reads 512 tokens, and a prompt with its response may have 513; start it"),
        (FakeSglang(), {"longest": 513}, "reads 512 tokens, and a prompt with its response may have 513; start it"),
        (made(FakeVllm, text_tokens=lambda text: [3]), {}, "has another tokenizer than model.path=mine; start it with"),
        (FakeVllm(size=40), {}, "has a smaller vocabulary than the 61 tokens of model.path=mine; start it"),
        (made(FakeVllm, extended=False, mode="raw_logprobs"), {}, f"old weights; start it with {UNCUT}."),
        (made(FakeVllm, **CUDA, mode="raw_logprobs"), {"temperature": 0.7}, f"-mode processed_logprobs or {UNCUT}."),
        (made(FakeVllm, **CUDA, mode="processed_logprobs"), {"top_p": 0.9}, f"start it with {UNCUT}."),
        (made(FakeVllm, **CUDA, mode="raw_logits"), {}, "does not report the log-probs of what these settings sample"),
        (made(FakeVllm, key="k"), {}, r"refuses the key .*401: Unauthorized.*; give engine.api_key_env=VARIABLE"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_fit(server: FakeServer, wanted: dict[str, Any], message: str) -> None:
    pattern = message if r".*" in message else re.escape(message)
    with pytest.raises(ConfigError, match=rf"^engine\.urls: http://127\.0\.0\.1:\d+ .*{pattern}"):
        found(server, **wanted)


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [
        ("raw_logprobs", {}),
        ("raw_logprobs", {"temperature": 0.0}),
        ("processed_logprobs", {"temperature": 0.7, "repetition_penalty": 1.2}),
    ],
)
def test_log_probs_of_a_plain_server_that_are_those_of_the_trainer(mode: str, sampling: dict[str, Any]) -> None:
    assert found(made(FakeVllm, **CUDA, mode=mode), **sampling) == "vLLM 0.31.0"


def test_models_on_this_machine_are_compared(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for place, layers in ((theirs, 2), (ours, 3)):
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"vocab_size": 61, "num_hidden_layers": layers}))
    with pytest.raises(ConfigError, match=rf"serves another model \({theirs}: num_hidden_layers 2, of model.path 3\)"):
        found(FakeVllm(root=str(theirs)), model=str(ours))
    with pytest.raises(ConfigError, match=r"serves another model \(a/model: num_hidden_layers 4, of model.path 3\)"):
        found(made(FakeVllm, shape={"num_hidden_layers": 4, "hidden_size": None}), model=str(ours))


@pytest.mark.parametrize(
    ("path", "reply", "message"),
    [
        ("/is_paused", [1], "GET /is_paused is answered without is_paused"),
        ("/v1/models", {"data": [{"id": "served", "max_model_len": "512"}]}, "max_model_len '512', which is no number"),
        ("/v1/models", ["served"], "is not answered as vLLM"),
        ("/v1/models", {"error": {"code": 429}}, "GET /v1/models answered 429 in a reply of status 200"),
    ],
)
def test_odd_pages(path: str, reply: Any, message: str) -> None:
    server = FakeVllm()
    answer = server.answer
    server.answer = lambda method, at, body: reply if at == path else answer(method, at, body)  # type: ignore[method-assign]
    with pytest.raises(ServerError, match=message):
        found(server)


class Other(FakeServer):
    """A web server of another kind."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """Knows no page."""
        return {"hello": 1} if path == "/version" else None


def test_another_kind_of_server() -> None:
    with pytest.raises(ConfigError, match=r"is neither vLLM's OpenAI server nor SGLang's; give the address of one"):
        found(Other())


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], r"engine\.rollout=server needs the servers' addresses; give engine\.urls=\[http://host:port\]\."),
        (["h:80"], r"engine\.urls: h:80 is not an address; give http://host:port\."),
        (["http://h:80?key=1"], "has a query; put a key into the variable of engine.api_key_env"),
        (["http://h:80", "http://h:80/v1/"], "names http://h:80 twice; give each server once"),
        (["http://h:80", "http://h"], "names http://h:80 twice; give each server once"),
        (["http://b", "http://h", "HTTP://H./v1"], "names http://h twice; give each server once"),
        (["https://h", "https://me:pw@h:443"], "names https://h twice; give each server once"),
        (["http://[::1]:8000", "http://[0:0::1]:8000"], "twice; give each server once"),
    ],
)
def test_bad_addresses(urls: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_urls(urls)


def test_keys_and_passwords_are_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", "sk-very-secret")
    with pytest.raises(ConfigError, match=r"engine\.api_key_env: the environment variable NO_SUCH is not set"):
        clients(["http://h:80"], "NO_SUCH", 1.0)
    with pytest.raises(ConfigError, match=r"engine\.urls also hold a password; give one of the two"):
        clients(["http://me:hush-hush-1@h:80"], "SERVERS_KEY", 1.0)
    (client,) = clients(["http://me:hush-hush-1@h:80/v1"], None, 1.0)
    assert client.url == "http://h:80"
    server = FakeVllm(key="sk-very-secret")

    async def version() -> Any:
        (mine,) = clients([server.url], "SERVERS_KEY", 5.0)
        try:
            return await mine.get("/version")
        finally:
            await mine.close()

    with serving(server):
        assert run(version()) == {"version": "0.31.0"}
    assert "very-secret" not in str(ServerError("it said sk-very-secret"))
    assert "hush-hush-1" not in redact("hush-hush-1")
