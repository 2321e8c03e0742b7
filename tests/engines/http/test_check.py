"""What is found out about servers before a run starts: each error is one sentence with the fix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dataflow.engines.base import Sampling
from dataflow.engines.http.check import check_servers, check_urls, clients
from dataflow.errors import ConfigError
from tests.engines.drawing import run
from tests.engines.tiny_models import save_model
from tests.rigs.inference_servers import FakeServer, FakeSglang, FakeVllm, serving

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]

UNCUT = "--worker-extension-cls dataflow.engines.vllm.worker.RolloutWorker --logprobs-mode processed_logits"
CUDA: dict[str, Any] = {"device": "cuda", "extended": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model."""
    return save_model(tmp_path_factory.mktemp("model"), 1)


def made(kind: type[FakeServer], model: str, **facts: Any) -> FakeServer:
    """Returns a fake server of a model with these attributes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    server = kind(root=model)
    server.text_tokens = lambda text: tokenizer.encode(text, add_special_tokens=False)
    for name, value in facts.items():
        setattr(server, name, value)
    return server


def found(servers: list[FakeServer], model: str | None, longest: int = 64, wait_s: float = 5.0, **sampling: Any) -> str:
    """Returns what the check says about servers."""
    with serving(*servers):
        return check_servers([server.url for server in servers], None, model, longest, Sampling(**sampling), wait_s)


def test_both_kinds_are_found_out(model: str) -> None:
    servers = [made(FakeVllm, model), made(FakeSglang, model), made(FakeVllm, model)]
    assert found(servers, model) == found(servers, None) == "2 x vLLM 0.31.0; 1 x SGLang"


@pytest.mark.parametrize(
    ("kind", "facts", "wanted", "message"),
    [
        (FakeVllm, {"dev": False}, {}, "cannot take weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment"),
        (FakeSglang, {}, {"longest": 513}, "reads 512 tokens, and a prompt with its response may have 513; start it"),
        (FakeVllm, {"text_tokens": lambda text: [3]}, {}, "has another tokenizer than model.path="),
        (FakeVllm, {"shape": {"hidden_size": 4}}, {}, "serves another model (MODEL: hidden_size 4, of model.path 64)"),
        (FakeVllm, {"extended": False, "mode": "raw_logprobs"}, {}, f"of the old weights; start it with {UNCUT}."),
        (FakeVllm, {**CUDA, "mode": "raw_logprobs"}, {"temperature": 0.7}, f"mode processed_logprobs or {UNCUT}."),
        (FakeVllm, {**CUDA, "mode": "processed_logprobs"}, {"top_p": 0.9}, f"start it with {UNCUT}."),
        (FakeVllm, {"key": "k"}, {}, "refuses the key (GET /version answered 401: Unauthorized); give engine.api_key"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_fit(
    model: str, kind: type[FakeServer], facts: dict[str, Any], wanted: dict[str, Any], message: str
) -> None:
    pattern = re.escape(message.replace("MODEL", model))
    with pytest.raises(ConfigError, match=rf"^engine\.urls: http://127\.0\.0\.1:\d+ .*{pattern}"):
        found([made(kind, model, **facts)], model, **wanted)


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [
        ("raw_logprobs", {}),
        ("processed_logprobs", {"temperature": 0.7, "repetition_penalty": 1.2}),
    ],
)
def test_log_probs_of_a_plain_server_that_are_those_of_the_trainer(
    model: str, mode: str, sampling: dict[str, Any]
) -> None:
    assert found([made(FakeVllm, model, **CUDA, mode=mode)], model, **sampling) == "1 x vLLM 0.31.0"


def test_a_server_that_does_not_answer(model: str) -> None:
    server = made(FakeVllm, model)
    with serving(server):
        url = server.url
    with pytest.raises(ConfigError, match=rf"engine\.urls: {url} does not answer within 0\.2 s \(.*refused"):
        check_servers([url], None, model, 64, Sampling(), 0.2)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], r"engine\.rollout=http needs the servers' addresses; give engine\.urls=\[http://host:port\]\."),
        (["h:80"], r"engine\.urls: h:80 is not an address; give http://host:port\."),
        (["http://h:80", "http://me:pw@h:80/v1/"], "names http://h:80 twice; give each server once"),
    ],
)
def test_bad_addresses(urls: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_urls(urls)


def test_keys_and_passwords_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", "sk-very-secret")
    with pytest.raises(ConfigError, match=r"engine\.api_key_env: the environment variable NO_SUCH is not set"):
        clients(["http://h:80"], "NO_SUCH", 1.0)
    with pytest.raises(ConfigError, match=r"engine\.urls also hold a password; give one of the two"):
        clients(["http://me:hush-hush-1@h:80"], "SERVERS_KEY", 1.0)
    login = "Basic bWU6cGFzcyB3b3Jk"
    servers = [FakeVllm(key="Bearer sk-very-secret"), FakeVllm(key=login)]

    async def version(url: str, variable: str | None) -> Any:
        (client,) = clients([url], variable, 5.0)
        try:
            return await client.get("/version")
        finally:
            await client.close()

    with serving(*servers):
        assert run(version(servers[0].url, "SERVERS_KEY")) == {"version": "0.31.0"}
        assert run(version(servers[1].url.replace("//", "//me:pass%20word@"), None)) == {"version": "0.31.0"}
