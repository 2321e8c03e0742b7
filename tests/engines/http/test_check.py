"""What is found out about servers before a run starts: each error is one sentence with the fix."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.engines.http.engine import check_servers
from dataflow.engines.http.server import check_urls, servers_at
from dataflow.errors import ConfigError
from tests.engines.drawing import run
from tests.engines.tiny_models import save_model
from tests.rigs.inference_servers import FakeServer, serving

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model."""
    return save_model(tmp_path_factory.mktemp("model"), 1)


def made(model: str, **facts: Any) -> FakeServer:
    """Returns a fake server of a model with these attributes."""
    server = FakeServer(root=model)
    for name, value in facts.items():
        setattr(server, name, value)
    return server


def found(servers: list[FakeServer], model: str | None, longest: int = 64) -> str:
    """Returns what the check says about servers."""
    with serving(*servers):
        return check_servers([server.url for server in servers], None, model, longest, 5.0)


def test_servers_that_fit(model: str) -> None:
    servers = [made(model), made(model)]
    assert found(servers, model) == found(servers, None) == "2 x vLLM 0.31.0"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"dev": False}, "answered 404: .*started with VLLM_SERVER_DEV_MODE=1 in its environment"),
        ({"longest": 63}, "reads 63 tokens, and a prompt with its response may have 64; start it"),
        ({"shape": {"hidden_size": 4}}, r"serves another model \(hidden_size 4, of model\.path 64\)"),
        (
            {"extended": False},
            r"start it with --worker-extension-cls dataflow\.engines\.vllm\.worker\.RolloutWorker --log",
        ),
        ({"mode": "processed_logprobs"}, "--logprobs-mode processed_logits"),
        ({"key": "k"}, r"refuses the key \(GET /version answered 401: Unauthorized\); give engine\.api_key"),
    ],
)
def test_a_server_that_does_not_fit(model: str, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^engine\.urls: http://127\.0\.0\.1:\d+.*{message}"):
        found([made(model, **facts)], model)


def test_a_server_that_does_not_answer(model: str) -> None:
    server = made(model)
    with serving(server):
        url = server.url
    with pytest.raises(ConfigError, match=rf"engine\.urls: {url} does not answer within 0\.2 s \(.*refused"):
        check_servers([url], None, model, 64, 0.2)


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
        servers_at(["http://h:80"], "NO_SUCH", 1.0)
    with pytest.raises(ConfigError, match=r"engine\.urls also hold a password; give one of the two"):
        servers_at(["http://me:hush-hush-1@h:80"], "SERVERS_KEY", 1.0)
    login = "Basic bWU6cGFzcyB3b3Jk"
    servers = [FakeServer(key="Bearer sk-very-secret"), FakeServer(key=login)]

    async def version(url: str, variable: str | None) -> Any:
        (client,) = servers_at([url], variable, 5.0)
        try:
            return await client._get("/version")
        finally:
            await client.close()

    with serving(*servers):
        assert run(version(servers[0].url, "SERVERS_KEY")) == {"version": "0.31.0"}
        assert run(version(servers[1].url.replace("//", "//me:pass%20word@"), None)) == {"version": "0.31.0"}
