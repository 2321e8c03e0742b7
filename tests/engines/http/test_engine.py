"""The engine over servers that fail in each way, with real sockets: every sample arrives, from the right weights."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.engines.base import Sample, Sampling
from dataflow.engines.http import engine as engine_module
from dataflow.engines.http.engine import HttpRollout
from dataflow.engines.samples import seed_of
from dataflow.errors import Aborted, DataError, RunError
from tests.engines.drawing import run
from tests.engines.tiny_models import ENDS, VOCAB, load, prompts, save_model
from tests.rigs.inference_servers import START, FakeServer, held_of, serving, tokens_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

P, R, N, SEED = 40, 12, 4, 7
SAMPLING = Sampling(N, 0.7, 0.9, max_tokens=R)
PROMPTS = prompts([5, 9, 17, 3, 8, 30])
Test = Callable[[HttpRollout], Awaitable[None]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of one shape, with tied weights."""
    place = tmp_path_factory.mktemp("models")
    return [save_model(place / name, seed) for seed, name in enumerate(("first", "second"), 1)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_BACKOFF_S", 0.02)


@pytest.fixture
def on(models: list[str], tmp_path: Path) -> Callable[..., None]:
    """Runs a test with an engine over servers of the first model."""

    def on(servers: Sequence[FakeServer], test: Test, **options: Any) -> None:
        async def whole() -> None:
            wanted = {"timeout": 20.0, "wait": 20.0, "weights_dir": str(tmp_path / "weights"), **options}
            engine = HttpRollout(models[0], P, [server.url for server in servers], P + R, **wanted)
            try:
                await test(engine)
            finally:
                await engine.close()
            assert not (tmp_path / "weights").exists()

        for server in servers:
            server.size, server.ends, server.root = VOCAB, ENDS, models[0]
        with serving(*servers):
            run(whole())

    return on


async def drawn(engine: HttpRollout, seed: int = SEED) -> list[Sample]:
    """Returns all samples of the prompts."""
    return [sample async for sample in engine.generate(PROMPTS, SAMPLING, seed)]


def check(samples: Sequence[Sample], model: str, version: int) -> None:
    """Checks that each sample is there once, and was drawn from the weights of a model."""
    assert sorted((s.group, s.index) for s in samples) == [(g, i) for g in PROMPTS.ids for i in range(N)]
    for sample in samples:
        seed = seed_of(SEED, sample.group, sample.index)
        tokens = tokens_of(held_of(Path(model)), PROMPTS["prompt_ids"][sample.group], seed, R, VOCAB, ENDS)
        assert list(sample.tokens) == tokens
        assert list(sample.log_probs) == [-0.5] * len(tokens)
        assert sample.finish == ("stop" if tokens[-1] in ENDS else "length")
        assert sample.version == version


def in_use(engine: HttpRollout) -> int:
    """Returns the number of servers that get samples."""
    return len(engine._choice.open)


def weights_of(model: str) -> dict[str, torch.Tensor]:
    return dict(load(model).state_dict())


async def until(found: Callable[[], object]) -> None:
    while not found():
        await asyncio.sleep(0.005)


def test_samples_follow_the_weights(on: Any, models: list[str], tmp_path: Path) -> None:
    servers = [FakeServer(), FakeServer()]

    async def test(engine: HttpRollout) -> None:
        for version, model in enumerate(models):
            if version:
                await engine.sync(weights_of(model), version)
            samples = await drawn(engine)
            check(samples, model, version)
            assert {server.held for server in servers} == {held_of(Path(model))}
            assert engine.batch(PROMPTS, samples, R).meta["weights_version"] == engine.version == version
        (directory,) = (tmp_path / "weights").iterdir()  # one version of the weights is on the disk
        assert [file.name for file in directory.iterdir()] == ["model.safetensors"]
        turn = await engine.sample([3, 4], SAMPLING, (1, 2, 3))
        assert (turn.group, turn.index, turn.version) == (0, 0, 1)
        assert in_use(engine) == 2
        await engine.close()
        with pytest.raises(Aborted):
            await engine.sample([3], SAMPLING, (1, 2, 3))
        with pytest.raises(Aborted):
            await engine.sync(weights_of(model), 2)

    on(servers, test)
    assert all(server.asked for server in servers)


def test_a_request_has_all_sampling_options(on: Any) -> None:
    """The server would otherwise take those of the model's generation_config.json."""
    server = FakeServer()

    async def test(engine: HttpRollout) -> None:
        await engine.sample([2, 3], Sampling(1, 0.7, 0.9, 20, 9, (8,)), (1, 2, 3))

    on([server], test)
    assert server.asked == [{
        "model": "served", "prompt": [2, 3], "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 20,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop_token_ids": [*ENDS, 8], "seed": seed_of(1, 2, 3), "logprobs": 0, "return_token_ids": True,
    }]  # fmt: skip


def test_groups_and_conversations_stay_on_one_server_with_slots_for_them(on: Any, models: list[str]) -> None:
    servers = [FakeServer(), FakeServer(), FakeServer()]

    async def test(engine: HttpRollout) -> None:
        check(await drawn(engine), models[0], 0)
        groups = [{tuple(body["prompt"]) for body in server.asked} for server in servers]
        assert sum(map(len, groups)) == 6
        assert all(groups)
        assert max(server.most for server in servers) <= 8
        before = [len(server.asked) for server in servers]
        for turn in range(4):
            turns = ((SEED, 99, index, turn) for index in range(3))
            await asyncio.gather(*(engine.sample([2 + turn], SAMPLING, seed) for seed in turns))
        assert sorted(len(server.asked) - n for server, n in zip(servers, before, strict=True)) == [0, 0, 12]

    on(servers, test, slots=8)


@pytest.mark.parametrize("fault", ["die", "half", "short", "500"])
def test_samples_that_fail_are_drawn_on_another_server(on: Any, models: list[str], fault: str) -> None:
    servers = [FakeServer(fault=lambda number: fault if number == 3 else ""), FakeServer()]

    async def test(engine: HttpRollout) -> None:
        check(await drawn(engine), models[0], 0)
        if fault == "die":
            assert in_use(engine) == 1
            await engine.sync(weights_of(models[1]), 1)  # while it is away
            check(await drawn(engine), models[1], 1)
            await asyncio.to_thread(servers[0].start)
            servers[0].fault = lambda number: ""
        await until(lambda: in_use(engine) == 2)
        assert servers[0].held == servers[1].held

    on(servers, test)


def test_a_restarted_server_gets_the_weights_again(on: Any, models: list[str]) -> None:
    """It answers with those of its start before anybody notices, so only its label tells."""
    servers = [FakeServer(), FakeServer()]

    async def test(engine: HttpRollout) -> None:
        await engine.sync(weights_of(models[1]), 1)
        await asyncio.to_thread(servers[0].restart)
        check(await drawn(engine), models[1], 1)
        servers[1].held, servers[1].label = "weights of others", "other:1"
        check(await drawn(engine), models[1], 1)
        await until(lambda: in_use(engine) == 2)
        assert {server.held for server in servers} == {held_of(Path(models[1]))}

    on(servers, test)


def test_a_server_that_comes_back_as_another_is_not_used(on: Any, models: list[str]) -> None:
    servers = [FakeServer(), FakeServer()]

    async def test(engine: HttpRollout) -> None:
        check(await drawn(engine), models[0], 0)
        servers[0].shape = {"hidden_size": 4}
        await asyncio.to_thread(servers[0].restart)
        await engine.sync(weights_of(models[1]), 1)
        check(await drawn(engine), models[1], 1)
        assert (servers[0].held, in_use(engine)) == (START, 1)
        servers[0].shape = {}
        await until(lambda: in_use(engine) == 2)

    on(servers, test)


def test_a_request_may_not_take_longer_than_its_limit(on: Any, models: list[str]) -> None:
    async def test(engine: HttpRollout) -> None:
        check(await drawn(engine), models[0], 0)

    on([FakeServer(fault=lambda number: "hang" if number == 1 else "")], test, timeout=0.5)


def test_a_throttled_server_is_paused(on: Any, models: list[str]) -> None:
    async def test(engine: HttpRollout) -> None:
        begin = asyncio.get_running_loop().time()
        check(await drawn(engine), models[0], 0)
        assert asyncio.get_running_loop().time() - begin >= 0.4

    on([FakeServer(fault=lambda number: "429 0.2" if number in (1, 2, 6) else "")], test, slots=1)


def test_a_sample_that_fails_everywhere(on: Any) -> None:
    async def test(engine: HttpRollout) -> None:
        said = r"(sample \d of group \d failed at 3 tries|none of the 2 servers).*the last .*http.*500: not now"
        with pytest.raises(RunError, match=said):
            await drawn(engine)

    on([FakeServer(fault=lambda number: "500"), FakeServer(fault=lambda number: "500")], test, tries=3, wait=0.5)


def test_what_does_not_fit_ends_the_run(on: Any) -> None:
    server = FakeServer()

    async def test(engine: HttpRollout) -> None:
        await engine.sample([3, 4, 5], SAMPLING, (1, 2, 3))
        server.longest = 14
        with pytest.raises(DataError, match=r"http\S+ refuses the prompt of group 0 \(3 tokens\).*length is 14"):
            await engine.sample([3, 4, 5], SAMPLING, (1, 2, 3))

    on([server], test)


def test_no_server_is_left(on: Any, models: list[str]) -> None:
    servers = [FakeServer(), FakeServer()]

    async def test(engine: HttpRollout) -> None:
        check(await drawn(engine), models[0], 0)
        for server in servers:
            await asyncio.to_thread(server.stop)
        with pytest.raises(RunError, match=r"none of the 2 servers of engine\.urls took a sample for 0\.4 s") as caught:
            await drawn(engine)
        assert "start them, then resume the run" in str(caught.value)
        with pytest.raises(RunError, match=r"none of the 2 servers.* the last with .* GET /\S+: Connection refused"):
            await engine.sync(weights_of(models[1]), 1)
        await asyncio.to_thread(servers[0].start)
        await until(lambda: in_use(engine))
        check(await drawn(engine), models[0], 0)  # the sync has failed

    on(servers, test, wait=0.4)


def test_weights_that_servers_refuse(on: Any, models: list[str]) -> None:
    servers = [FakeServer(), FakeServer()]

    async def test(engine: HttpRollout) -> None:
        await engine.sample([3, 4], SAMPLING, (1, 2, 3))
        servers[0].broken = "no parameter named 'layers.2'"
        await engine.sync(weights_of(models[1]), 1)  # the other goes on
        await drawn(engine)
        assert in_use(engine) == 1
        servers[0].broken = ""
        await until(lambda: in_use(engine) == 2)
        for server in servers:
            server.broken = "disk full"
        with pytest.raises(RunError, match=r"http\S+ does not take the weights: .*disk full.*engine\.weights_dir"):
            await engine.sync(weights_of(models[0]), 2)
        assert engine.version == 1

    on(servers, test)


@pytest.mark.parametrize("number", [1, 3, 7])
def test_a_load_whose_reply_is_lost_is_made_again(on: Any, models: list[str], number: int) -> None:
    """Whichever of its requests it is; a paused server never passes for one that draws samples."""
    server = FakeServer()
    answer, asked = server.answer, list[str]()

    def failing(method: str, path: str, body: dict[str, Any]) -> Any:
        reply = answer(method, path, body)
        if method == "GET" or path == "/v1/completions" or body.get("method") == "shape_of_model":
            return reply
        asked.append(path)
        assert not (server.paused and re.fullmatch(r"version-1-\w+", server.label))
        return (502, {"error": "of a proxy"}) if len(asked) == number + 1 else reply

    async def test(engine: HttpRollout) -> None:
        await engine.sample([3, 4], SAMPLING, (1, 2, 3))
        server.answer = failing  # type: ignore[method-assign]
        await engine.sync(weights_of(models[1]), 1)
        assert len(asked) > 8 or number == 7
        check(await drawn(engine), models[1], 1)

    on([server], test)


def test_closing_during_a_write_leaves_no_files(on: Any, models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, write = threading.Event(), threading.Event(), engine_module._write_weights

    def slow(*facts: Any) -> Path:
        began.set()
        assert go.wait(20)
        return write(*facts)

    monkeypatch.setattr(engine_module, "_write_weights", slow)

    async def test(engine: HttpRollout) -> None:
        syncing = asyncio.ensure_future(engine.sync(weights_of(models[1]), 1))
        await asyncio.to_thread(began.wait, 20)
        asyncio.get_running_loop().call_later(0.05, go.set)
        await engine.close()
        with pytest.raises(Aborted):
            await syncing

    on([FakeServer()], test)


def test_files_of_others_stay_and_those_of_a_killed_engine_do_not(on: Any, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    for name in ("notes", "version-7-0123456789ab"):
        (place / name).mkdir(parents=True)

    async def test(engine: HttpRollout) -> None:
        await engine.sample([3, 4], SAMPLING, (1, 2, 3))

    on([FakeServer()], test, weights_dir=str(place))
    assert [file.name for file in place.iterdir()] == ["notes"]


def test_weights_that_cannot_be_written(on: Any) -> None:
    async def test(engine: HttpRollout) -> None:
        with pytest.raises(RunError, match=r"the weights cannot be written to /dev/full/.*engine\.weights_dir"):
            await engine.sample([3, 4], SAMPLING, (1, 2, 3))

    on([FakeServer()], test, weights_dir="/dev/full")
