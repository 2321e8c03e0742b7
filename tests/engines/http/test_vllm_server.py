"""vLLM's real server on the CPU: one start for all that only it can show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.engines.base import Sampling
from dataflow.engines.http.engine import HttpRollout, check_servers
from dataflow.engines.http.server import EXTENSION
from dataflow.errors import ConfigError, DataError
from dataflow.rewards.models.server import flags, server_environment
from dataflow.system.children import command
from dataflow.system.serving import Child, Port
from tests.engines.drawing import run
from tests.engines.tiny_models import ENDS, greedy, load, log_probs, prompts, save_model

pytestmark = [pytest.mark.vllm, pytest.mark.heavy, pytest.mark.timeout(240)]

P, R = 40, 12
GREEDY = Sampling(1, 0.0, max_tokens=R)
CUT = Sampling(4, 0.7, 0.8, 20, R)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two tied models of one shape, and a wider one."""
    place = tmp_path_factory.mktemp("models")
    return [
        save_model(place / "first", 1),
        save_model(place / "second", 2),
        save_model(place / "wide", 3, hidden_size=128),
    ]


@pytest.fixture(scope="module")
def url(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that was started as docs/rollout.md says."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = {
        "model": paths[0], "dtype": "float32", "enforce-eager": True,
        "max-model-len": P + R, "worker-extension-cls": EXTENSION, "logprobs-mode": "processed_logits",
        "uvicorn-log-level": "warning",
    }  # fmt: skip
    words = command("vllm.entrypoints.openai.api_server", *flags(options))
    variables = server_environment("cpu") | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    with Child(words, Port(), log, variables, 180.0, "the server") as server:
        yield server.url


def opened(url: str, paths: list[str], place: Path, **options: Any) -> HttpRollout:
    """Returns a client of the server."""
    return HttpRollout(paths[0], P, [url], P + R, weights_dir=str(place / "weights"), **options)


def test_the_server_is_checked_and_follows_syncs_of_a_tied_model(url: str, paths: list[str], tmp_path: Path) -> None:
    assert check_servers([url], None, paths[0], P + R, 10.0).startswith("1 x vLLM 0.")
    with pytest.raises(ConfigError, match=rf"engine\.urls: {url} reads {P + R} tokens, and .* may have {P + R + 1}"):
        check_servers([url], None, paths[0], P + R + 1, 10.0)
    with pytest.raises(ConfigError, match=r"serves another model .*hidden_size 64, of model.path 128.*; start it with"):
        check_servers([url], None, paths[2], P + R, 10.0)
    models, batch = [load(path) for path in paths[:2]], prompts([5, 9, 17, 30])

    async def test() -> None:
        engine = opened(url, paths, tmp_path)
        try:
            # Of version 0, of other weights (a tied head stays out, or not), and of the first again.
            for version, model in ((0, models[0]), (1, models[1]), (2, models[0])):
                if version:
                    weights = dict(model.state_dict())
                    if version == 2:
                        del weights["lm_head.weight"]
                    await engine.sync(weights, version)
                samples = [sample async for sample in engine.generate(batch, GREEDY, seed=0)]
                expected = {g: greedy(model, ids, R) for g, ids in zip(batch.ids, batch["prompt_ids"], strict=True)}
                assert {sample.group: list(sample.tokens) for sample in samples} == expected
                assert {sample.version for sample in samples} == {version}
                drawn = [sample async for sample in engine.generate(batch, CUT, seed=3)]
                for sample in drawn:
                    prompt = batch["prompt_ids"][sample.group]
                    mine = log_probs(model, prompt, list(sample.tokens), CUT.temperature)
                    torch.testing.assert_close(torch.tensor(sample.log_probs), mine, atol=1e-4, rtol=0)
                    assert sample.finish == ("stop" if sample.tokens[-1] in ENDS else "length")
                again = [sample async for sample in engine.generate(batch, CUT, seed=3)]
                assert sorted((s.group, s.index, *s.tokens) for s in drawn) == sorted(
                    (s.group, s.index, *s.tokens) for s in again
                )
            assert len({tuple(sample.tokens) for sample in drawn}) > 8
            # Nothing is left in flight by those that are dropped.
            async for _sample in engine.generate(batch, CUT, seed=4):
                break
            drawing = asyncio.ensure_future(_all(engine, batch))
            await asyncio.sleep(0.05)
            await engine.sync(dict(models[1].state_dict()), 3)
            assert {sample.version for sample in await drawing} == {2}
            turn = await engine.sample(batch["prompt_ids"][0], GREEDY, (1, 2, 3))
            assert list(turn.tokens) == greedy(models[1], batch["prompt_ids"][0], R)
            engine.max_prompt_length = 50  # only the server refuses it then
            with pytest.raises(DataError, match=r"refuses the prompt of group 0 \(41 tokens\).*maximum context length"):
                await engine.sample([3] * 41, GREEDY, (1, 2, 3))
        finally:
            await engine.close()
        assert not (tmp_path / "weights").exists()

    run(test())


async def _all(engine: HttpRollout, batch: Any) -> list[Any]:
    return [sample async for sample in engine.generate(batch, CUT, seed=5)]
