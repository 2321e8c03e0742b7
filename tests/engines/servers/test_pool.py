"""The pool over servers that fail in each way, with real sockets: every sample arrives, from the right weights."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataflow.engines.base import Sample, Sampling
from dataflow.engines.samples import seed_of
from dataflow.engines.servers import recovery
from dataflow.engines.servers.connect import Wanted, clients
from dataflow.engines.servers.pool import Pool
from dataflow.engines.sync_queue import Job, SampleQueue, SamplingCall
from dataflow.engines.vocabulary import Vocabulary
from dataflow.errors import ConfigError, DataError, RunError
from tests.engines.drawing import run
from tests.rigs.inference_servers import FakeServer, FakeSglang, FakeVllm, serving, tokens_of

pytestmark = pytest.mark.timeout(60)

GROUPS, N, SEED = 6, 4, 7
SAMPLING = Sampling(n=N, max_tokens=9)
KINDS = pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])


class Tokenizer:
    """Counts the characters of a text, as the fake servers do."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [len(text)]


class Rig:
    """A queue over a pool; its weights are notes in files.

    Args:
        place: for them.
        servers: of the pool.
        slots, wait_s, timeout_s: of the pool and its requests.
        size: tokens of the vocabulary.
    """

    def __init__(
        self, place: Path, servers: Sequence[FakeServer], slots: int = 8, wait_s: float = 20.0, timeout_s: float = 20.0,
        size: int = 61, longest: int = 64,
    ) -> None:  # fmt: skip
        self.place, self.servers, self.size = place, servers, size
        self.queue = SampleQueue()
        wanted = Wanted("mine", Vocabulary(Tokenizer(), [1, 5, 11], 0, size), longest, SAMPLING)
        opened = clients([server.url for server in servers], None, timeout_s)
        self.pool = self.queue.backend = Pool(opened, wanted, self.queue, slots, wait_s)

    async def sync(self, version: int, redraw: bool = False) -> None:
        """Makes the servers load weights."""
        directory = self.place / f"v{version}"
        directory.mkdir(exist_ok=True)
        (directory / "note").write_text(f"weights {version}")
        errors: list[Exception] = []

        async def work() -> None:
            await self.pool.settled()
            try:
                await self.pool.sync(directory, f"run:{version}")
            except (RunError, ConfigError) as error:
                errors.append(error)
            else:
                self.queue.version = version

        await self.queue.pause(work, redraw=redraw)
        if errors:
            raise errors[0]

    def jobs(self, groups: int = GROUPS, seed: int | tuple[int, ...] = SEED) -> list[Job]:
        """Returns the samples of a call."""
        call, inbox = SamplingCall(SAMPLING, seed), asyncio.Queue[Any]()
        return [Job(group, index, prompt_of(group), call, inbox) for group in range(groups) for index in range(N)]

    async def draw(self, groups: int = GROUPS) -> list[Sample]:
        """Returns all samples."""
        async with contextlib.aclosing(self.queue.draw(self.jobs(groups))) as samples:
            return [sample async for sample in samples]

    def check(self, samples: Sequence[Sample], version: int, groups: int = GROUPS) -> None:
        """Checks that each sample is there once, and was drawn from the weights of a version."""
        assert sorted((s.group, s.index) for s in samples) == [(g, i) for g in range(groups) for i in range(N)]
        for sample in samples:
            seed = seed_of(SEED, sample.group, sample.index)
            seed = seed % 2**31 if isinstance(self.servers[0], FakeSglang) else seed
            prompt = prompt_of(sample.group)
            assert list(sample.tokens) == tokens_of(f"weights {version}", prompt, seed, 9, self.size, [1, 5, 11])
            assert list(sample.log_probs) == [-0.5] * len(sample.tokens)
            assert sample.finish == ("stop" if sample.tokens[-1] in (1, 5, 11) else "length")
            assert sample.version == version


def prompt_of(group: int) -> list[int]:
    """Returns the prompt of a group."""
    return [2 + group, 3, 4]


@contextlib.asynccontextmanager
async def rigged(place: Path, servers: Sequence[FakeServer], **options: Any) -> AsyncIterator[Rig]:
    """Makes a rig whose servers hold version 1."""
    rig = Rig(place, servers, **options)
    try:
        await rig.sync(1)
        yield rig
    finally:
        await rig.pool.close()


def on(place: Path, servers: Sequence[FakeServer], test: Callable[[Rig], Coroutine[Any, Any, None]], **o: Any) -> None:
    """Runs a test on a rig of these servers."""

    async def whole() -> None:
        async with rigged(place, servers, **o) as rig:
            await test(rig)

    with serving(*servers):
        run(whole())


async def in_thread(work: Callable[[], None]) -> None:
    """Does what waits for a server's thread beside the loop."""
    await asyncio.to_thread(work)


@KINDS
def test_samples_depend_on_their_seed_alone(tmp_path: Path, kind: type[FakeServer]) -> None:
    servers = [kind(), kind(), kind()]

    async def test(rig: Rig) -> None:
        rig.check(await rig.draw(), 1)
        await rig.sync(2)
        rig.check(await rig.draw(), 2)
        assert rig.queue.counts["cached_tokens"] == 2 * GROUPS * N * 3

    on(tmp_path, servers, test)
    assert all(server.asked for server in servers)


def test_a_request_has_all_sampling_options(tmp_path: Path) -> None:
    """The server would otherwise take those of the model's generation_config.json."""
    vllm, sglang = FakeVllm(), FakeSglang()

    async def test(rig: Rig) -> None:
        call = SamplingCall(Sampling(1, 0.7, 0.9, 20, 9, 0.1, 1.2, (8,)), SEED)
        await rig.queue.draw_one(Job(0, 0, [2, 3], call, asyncio.Queue()))

    on(tmp_path / "..", [vllm], test)
    on(tmp_path / "..", [sglang], test)
    mine = {
        "model": "served", "prompt": [2, 3], "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 20,
        "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop_token_ids": [1, 5, 11, 8], "seed": seed_of(SEED, 0, 0), "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    assert vllm.asked == [mine]
    options = {
        "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2,
        "stop_token_ids": [1, 5, 11, 8], "skip_special_tokens": False, "sampling_seed": seed_of(SEED, 0, 0) % 2**31,
    }  # fmt: skip
    assert sglang.asked == [{"input_ids": [2, 3], "return_logprob": True, "sampling_params": options}]


def test_a_group_goes_to_one_server_and_the_slots_are_kept(tmp_path: Path) -> None:
    servers = [FakeVllm(), FakeVllm()]

    async def test(rig: Rig) -> None:
        rig.check(await rig.draw(20), 1, 20)

    on(tmp_path, servers, test, slots=3)
    groups = [{body["prompt"][0] for body in server.asked} for server in servers]
    assert not groups[0] & groups[1]
    assert 4 <= len(groups[0]) <= 16
    assert [server.most for server in servers] == [3, 3]


def test_the_turns_of_a_group_go_to_one_server(tmp_path: Path) -> None:
    servers = [FakeVllm(), FakeVllm(), FakeVllm()]

    async def test(rig: Rig) -> None:
        for turn in range(4):
            await asyncio.gather(*(
                rig.queue.draw_one(
                    Job(0, 0, [20 + group, 3], SamplingCall(SAMPLING, (SEED, group, index, turn)), asyncio.Queue())
                )
                for group in range(3) for index in range(2)
            ))  # fmt: skip

    on(tmp_path, servers, test)
    groups = [{body["prompt"][0] for body in server.asked} for server in servers]
    assert sorted(map(len, groups)) == [1, 1, 1]


@KINDS
@pytest.mark.parametrize("fault", ["500", "half", "short", "abort", "die"])
def test_lost_samples_are_drawn_elsewhere(tmp_path: Path, kind: type[FakeServer], fault: str) -> None:
    servers = [kind(fault=lambda number: fault if number in (2, 5) else ""), kind()]

    async def test(rig: Rig) -> None:
        rig.check(await rig.draw(), 1)
        assert rig.pool.counts["lost"] >= 1

    on(tmp_path, servers, test)


@KINDS
def test_a_single_server_tries_again(tmp_path: Path, kind: type[FakeServer]) -> None:
    servers = [kind(fault=lambda number: "500" if number == 1 else "short" if number == 3 else "")]

    async def test(rig: Rig) -> None:
        rig.check(await rig.draw(), 1)

    on(tmp_path, servers, test)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (FakeVllm, "token_logprobs", [-(10**400)]),
        (FakeVllm, "cached_tokens", "abc"),
        (FakeVllm, "cached_tokens", float("nan")),
        (FakeVllm, "prompt_tokens_details", "x"),
        (FakeSglang, "cached_tokens", float("nan")),
        (FakeSglang, "meta_info", "x"),
    ],
)
def test_odd_replies_are_lost_samples(tmp_path: Path, kind: type[FakeServer], name: str, value: Any) -> None:
    server = kind()
    reply = server.reply

    async def test(rig: Rig) -> None:
        server.reply = lambda *facts: _replaced(reply(*facts), name, value)  # type: ignore[method-assign]
        drawing = asyncio.ensure_future(rig.draw(1))
        while not rig.pool.counts["lost"]:
            await asyncio.sleep(0.001)
        server.reply = reply  # type: ignore[method-assign]
        rig.check(await drawing, 1, 1)

    on(tmp_path, [server], test, slots=1)


def _replaced(found: Any, name: str, value: Any) -> Any:
    """Returns JSON in which each entry of a name has another value; of a list, only the first elements."""
    if isinstance(found, list):
        return [_replaced(one, name, value) for one in found]
    if not isinstance(found, dict):
        return found
    changed = {key: _replaced(one, name, value) for key, one in found.items()}
    if name in found:
        changed[name] = [*value, *found[name][len(value) :]] if isinstance(value, list) else value
    return changed


def test_a_server_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "QUIET_S", 0.2)
    monkeypatch.setattr(recovery, "PROBE_S", 0.3)
    servers: list[FakeVllm] = [FakeVllm(fault=lambda number: "hang"), FakeVllm()]
    develop = servers[0].develop

    def hanging(path: str, body: dict[str, Any]) -> Any:
        if path == "/weight_info" and servers[0].asked:
            threading.Event().wait(1.0)
        return develop(path, body)

    async def test(rig: Rig) -> None:
        servers[0].develop = hanging  # type: ignore[method-assign]
        rig.check(await rig.draw(), 1)
        assert rig.pool.up == 1

    on(tmp_path, servers, test)


def test_slow_samples_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "QUIET_S", 0.1)
    server = FakeVllm(fault=lambda number: "hang" if number == 0 else "")

    async def test(rig: Rig) -> None:
        rig.queue.put(rig.jobs(1))
        await asyncio.sleep(0.5)
        assert rig.pool.up == 1
        assert rig.pool.counts["lost"] == 0
        assert server.running == 1

    on(tmp_path, [server], test)
    assert server.calls.count("/weight_info") > 3


def test_a_request_may_not_take_longer_than_its_limit(tmp_path: Path) -> None:
    servers = [FakeVllm(fault=lambda number: "hang" if number == 1 else "")]

    async def test(rig: Rig) -> None:
        rig.check(await rig.draw(), 1)
        assert rig.pool.counts["lost"] == 1

    on(tmp_path, servers, test, timeout_s=0.5)


@KINDS
def test_a_throttled_server_is_paused(tmp_path: Path, kind: type[FakeServer]) -> None:
    servers = [kind(fault=lambda number: "429 0.2" if number in (1, 2, 6) else "")]

    async def test(rig: Rig) -> None:
        begin = asyncio.get_running_loop().time()
        rig.check(await rig.draw(), 1)
        assert asyncio.get_running_loop().time() - begin >= 0.4
        assert rig.pool.counts == {"lost": 0, "throttled": 3}

    on(tmp_path, servers, test, slots=2)


def test_a_server_that_only_rejects(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(RunError, match=r"none of the 1 servers.*answered 429: not now"):
            await rig.draw()

    on(tmp_path, [FakeVllm(fault=lambda number: "429 0.1")], test, wait_s=0.5)


def test_a_sample_that_fails_everywhere(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(RunError, match=r"sample \d of group \d failed at 4 tries, the last at http.*500: not now"):
            await rig.draw()

    on(tmp_path, [FakeVllm(fault=lambda number: "500"), FakeVllm(fault=lambda number: "500")], test)


def test_a_prompt_that_is_refused(tmp_path: Path) -> None:
    server = FakeVllm()

    async def test(rig: Rig) -> None:
        server.longest = 11
        with pytest.raises(
            DataError, match=r"http\S+ refuses the prompt of group 0 \(3 tokens\).*context length is 11"
        ):
            await rig.draw()

    on(tmp_path, [server], test)


def test_dropped_samples_leave_their_slots(tmp_path: Path) -> None:
    held = threading.Event()
    server = FakeVllm(fault=lambda number: "" if held.is_set() else "hang")

    async def test(rig: Rig) -> None:
        jobs = rig.jobs()
        rig.queue.put(jobs)
        while server.running < 8:
            await asyncio.sleep(0.01)
        rig.queue.drop(jobs)
        await rig.pool.settled()
        while server.running:
            await asyncio.sleep(0.01)
        held.set()
        rig.check(await rig.draw(), 1)

    on(tmp_path, [server], test)
