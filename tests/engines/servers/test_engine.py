"""The engine over servers: weights of a real model, the contract of all rollout engines, the check before a start."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.engines.base import Sampling
from dataflow.engines.servers.engine import ServerRollout
from dataflow.engines.servers.probe import check_servers
from dataflow.engines.servers.weights_files import MARKER, WeightsFiles
from dataflow.errors import Aborted, ConfigError, DataError, DataflowError, RunError
from tests.engines.drawing import run
from tests.engines.tiny_models import ENDS, VOCAB, load, prompts, save_model
from tests.rigs.inference_servers import FakeServer, FakeSglang, FakeVllm, serving, tokens_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

P, R = 40, 12
SAMPLING = Sampling(4, 0.7, 0.9, max_tokens=R)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of one shape, with tied weights."""
    place = tmp_path_factory.mktemp("models")
    return [save_model(place / name, seed) for seed, name in enumerate(("first", "second"), 1)]


def sum_of(path: str) -> str:
    """Returns what a fake server holds that has loaded a model."""
    weights = {name: value for name, value in load(path).state_dict().items() if name != "lm_head.weight"}
    return f"{sum(float(value.double().sum()) for value in weights.values()):.6f}"


def fake(kind: type[FakeServer], path: str) -> FakeServer:
    """Returns a fake server of a model."""
    from transformers import AutoTokenizer

    server = kind(VOCAB, ENDS, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    server.text_tokens = lambda text: tokenizer.encode(text, add_special_tokens=False)
    return server


def opened(servers: list[FakeServer], paths: list[str], place: Path, **options: Any) -> ServerRollout:
    """Returns a client of the servers."""
    urls = [server.url for server in servers]
    return ServerRollout(paths[0], P, urls, SAMPLING, P + R, weights_dir=str(place / "weights"), **options)


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
def test_samples_follow_the_weights(paths: list[str], tmp_path: Path, kind: type[FakeServer]) -> None:
    servers = [fake(kind, paths[0]), fake(kind, paths[0])]
    batch = prompts([5, 9, 17])

    async def test() -> None:
        engine = opened(servers, paths, tmp_path)
        try:
            for version, path in enumerate(paths):
                if version:
                    await engine.sync(dict(load(path).state_dict()), version)
                samples = [sample async for sample in engine.generate(batch, SAMPLING, seed=3)]
                assert {server.held for server in servers} == {sum_of(path)}
                assert engine.version == version
                assert len(samples) == 12
                for sample in samples:
                    prompt = batch["prompt_ids"][sample.group]
                    held, seeds = sum_of(path), [body_seed(body) for server in servers for body in server.asked]
                    assert any(
                        list(sample.tokens) == tokens_of(held, prompt, seed, R, VOCAB, ENDS) for seed in seeds
                    ), "it was drawn from other weights"
                    assert sample.version == version
                made = engine.batch(batch, samples, R)
                assert made.meta["weights_version"] == version
                assert made["responses"].shape == (12, R)
            # One version of the weights is on the disk, with what SGLang reads beside them.
            (directory,) = (tmp_path / "weights").glob("version-*")
            assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in directory.iterdir()}
            turn = await engine.sample(batch["prompt_ids"][0], SAMPLING, (1, 2, 3))
            assert (turn.group, turn.index, turn.version) == (0, 0, 1)
            assert engine.stats() == {
                "samples": 25, "tokens": engine.stats()["tokens"], "prompt_tokens": 2 * 4 * 31 + 5,
                "cached_tokens": 75, "running": 0, "servers": 2, "lost": 0, "throttled": 0,
            }  # fmt: skip
        finally:
            await engine.close()
            await engine.close()
        assert not (tmp_path / "weights").exists()
        with pytest.raises(Aborted):
            await engine.sample([3], SAMPLING, (1, 2, 3))

    with serving(*servers):
        run(test())


def body_seed(body: dict[str, Any]) -> int:
    """Returns the seed of a request."""
    return int(body["seed"] if "seed" in body else body["sampling_params"]["sampling_seed"])


def test_a_first_sync_spares_the_weights_of_the_start(paths: list[str], tmp_path: Path) -> None:
    """As after a resume, or when the engine's process was rebuilt: the servers hold those of the run before."""
    server = fake(FakeVllm, paths[0])
    server.label = "another run"

    async def test() -> None:
        left = tmp_path / "weights" / "version-7-abcdef"
        left.mkdir(parents=True)
        (tmp_path / "weights" / MARKER).write_text("the engine before")
        engine = opened([server], paths, tmp_path)
        assert not left.exists()
        await engine.sync(dict(load(paths[1]).state_dict()), 7)
        assert server.held == sum_of(paths[1])
        assert server.calls.count("/pause") == 1
        sample = await engine.sample([3, 4], SAMPLING, (1, 2, 3))
        assert sample.version == engine.version == 7
        await engine.close()

    with serving(server):
        run(test())


def test_what_does_not_fit_changes_nothing(paths: list[str], tmp_path: Path) -> None:
    server = fake(FakeVllm, paths[0])

    async def test() -> None:
        engine = opened([server], paths, tmp_path)
        await engine.sample([3, 4], SAMPLING, (1, 2, 3))
        weights = dict(load(paths[1]).state_dict())
        with pytest.raises(DataflowError, match="the model has no weight 'extra'"):
            await engine.sync({**weights, "extra": torch.zeros(1)}, 1)
        with pytest.raises(DataError, match=r"the prompt of group 0 has token 61; the model has 0 to 60"):
            await engine.sample([61], SAMPLING, (1, 2, 3))
        with pytest.raises(DataError, match="the prompt of group 0 has 41 tokens"):
            await engine.sample([3] * 41, SAMPLING, (1, 2, 3))
        with pytest.raises(ConfigError, match=r"temperature=0\.001; inference servers take 0 \(greedy\) or 0\.01 to 2"):
            await engine.sample([3], Sampling(temperature=0.001), (1, 2, 3))
        server.broken = "disk full"
        with pytest.raises(RunError, match=r"http\S+ does not take the weights: .*disk full"):
            await engine.sync(weights, 1)
        assert engine.version == 0
        await engine.close()

    with serving(server):
        run(test())


def test_weights_that_cannot_be_written(paths: list[str]) -> None:
    server = fake(FakeVllm, paths[0])

    async def test() -> None:
        engine = opened([server], paths, Path("/dev/full"))
        with pytest.raises(RunError, match=r"\(.* MiB\) cannot be written to /dev/full/.*engine\.weights_dir"):
            await engine.sample([3, 4], SAMPLING, (1, 2, 3))
        await engine.close()

    with serving(server):
        run(test())


def test_closing_during_a_write_leaves_nothing(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, began, go = fake(FakeVllm, paths[0]), threading.Event(), threading.Event()
    written = WeightsFiles.write

    def write(files: WeightsFiles, weights: Any, name: str) -> Path:
        began.set()
        assert go.wait(20)
        return written(files, weights, name)

    monkeypatch.setattr(WeightsFiles, "write", write)

    async def test() -> None:
        engine = opened([server], paths, tmp_path)
        syncing = asyncio.ensure_future(engine.sync(dict(load(paths[1]).state_dict()), 1))
        await asyncio.to_thread(began.wait, 20)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        go.set()
        await closing
        with pytest.raises(Aborted):
            await syncing
        with pytest.raises(Aborted):
            await engine.sync(dict(load(paths[1]).state_dict()), 2)
        assert not (tmp_path / "weights").exists()

    with serving(server):
        run(test())


def test_abort_and_closing_early(paths: list[str], tmp_path: Path) -> None:
    server = fake(FakeVllm, paths[0])
    server.fault = lambda number: "hang"

    async def test() -> None:
        engine = opened([server], paths, tmp_path, slots=3)
        drawing = asyncio.ensure_future(_all(engine))
        while server.running < 3:
            await asyncio.sleep(0.01)
        assert await engine.abort() == 12
        with pytest.raises(Aborted):
            await drawing
        drawing = asyncio.ensure_future(_all(engine))
        while server.running < 3:
            await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(Aborted):
            await drawing
        while server.running:
            await asyncio.sleep(0.01)

    with serving(server):
        run(test())


async def _all(engine: ServerRollout) -> list[Any]:
    return [sample async for sample in engine.generate(prompts([5, 9, 17]), SAMPLING, seed=5)]


def test_servers_are_checked_before_a_start(paths: list[str]) -> None:
    servers = [fake(FakeVllm, paths[0]), fake(FakeSglang, paths[0]), fake(FakeVllm, paths[0])]
    with serving(*servers):
        urls = [server.url for server in servers]
        said = check_servers(urls, None, paths[0], P + R, SAMPLING, 5.0)
        assert said == "2 x vLLM 0.31.0; 1 x SGLang 0.5.6"
        assert check_servers(urls, None, None, P + R, SAMPLING, 5.0) == said
        servers[2].stop()
        with pytest.raises(ConfigError, match=rf"engine\.urls: {urls[2]} does not answer within 0\.2 s \(.*refused"):
            check_servers(urls, None, paths[0], P + R, SAMPLING, 0.2)
