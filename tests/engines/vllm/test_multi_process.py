"""vLLM in processes of its own, a model cut over two of them; most of it is tested with the engine in this process.

Few tests, as starting it takes half a minute.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from dataflow.engines.base import Sample, Sampling
from dataflow.engines.vllm.multi_process import AsyncVllmRollout, Stderr
from dataflow.errors import Aborted, ConfigError, RunError
from tests.engines.tiny_models import greedy, load, log_probs, prompts, save_model
from tests.rigs.listening import listeners
from tests.rigs.processes import below, command, environment

pytestmark = [pytest.mark.heavy, pytest.mark.vllm, pytest.mark.timeout(300)]
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

P, R = 80, 24
GREEDY = Sampling(temperature=0.0, max_tokens=R)


def cores() -> list[psutil.Process]:
    """Returns the processes in which vLLM computes."""
    return [process for process in psutil.Process().children() if "EngineCore" in " ".join(command(process))]


def test_it_draws_syncs_aborts_and_fails_as_a_whole(tmp_path: Path) -> None:
    paths = [save_model(tmp_path / str(seed), seed) for seed in range(2)]
    models = [load(path) for path in paths]
    me = psutil.Process()
    others, listening = set(below()), set(listeners(me))
    engine = AsyncVllmRollout(paths[0], P, R, max_num_seqs=8, kv_cache_bytes=32 << 20, tensor_parallel=2)
    batch, sampling = prompts([3, 40, 17] * 4), Sampling(n=2, temperature=0.8, top_p=0.9, max_tokens=R)

    async def collect(found: list[Sample], asked: Sampling = sampling) -> None:
        found.extend([sample async for sample in engine.generate(batch, asked, seed=3)])

    def check(samples: Sequence[Sample], temperature: float) -> None:
        for sample in samples:
            expected = log_probs(models[sample.version], batch["prompt_ids"][sample.group], sample.tokens, temperature)
            torch.testing.assert_close(expected, torch.tensor(sample.log_probs), atol=1e-3, rtol=0)

    async def body() -> None:
        for version, model in enumerate(models):
            if version:
                await engine.sync(model.state_dict(), version)
            best: list[Sample] = []
            await collect(best, GREEDY)
            # All that vLLM starts stays on this machine, and imports nothing from the working directory.
            assert not [each for each in set(listeners(me)) - listening if not each.loopback]
            started = [p for p in set(below()) - others if "-c" in command(p)]
            assert all("-P" in command(p) or environment(p).get("PYTHONSAFEPATH") for p in started if p.is_running())
            for sample in best:
                assert list(sample.tokens) == greedy(model, batch["prompt_ids"][sample.group], R)
            check(best, 1.0)
        for rule in ("wait", "abort"):
            engine.in_flight = rule
            before: list[Sample] = []
            after: list[Sample] = []
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(collect(before))
                await asyncio.sleep(0)
                tasks.create_task(engine.sync(models[0].state_dict(), 0))
                await asyncio.sleep(0)
                tasks.create_task(collect(after))
            assert [s.version for s in before] == [1 if rule == "wait" else 0] * 24
            assert [s.version for s in after] == [0] * 24
            check([*before, *after], 0.8)
            if rule == "abort":
                tokens = [{(s.group, s.index): s.tokens for s in samples} for samples in (before, after)]
                assert tokens[0] == tokens[1], "the seed alone decides"
            await engine.sync(models[1].state_dict(), 1)
        waiter = asyncio.ensure_future(collect([]))
        await asyncio.sleep(0)
        assert await engine.abort() == 24
        with pytest.raises(Aborted):
            await waiter
        await engine.sleep()
        await engine.wake()
        assert (await engine.sample(batch["prompt_ids"][0], GREEDY, (0,))).version == 1
        assert engine.stats()["running"] == 0
        waiter = asyncio.ensure_future(collect([]))
        await asyncio.sleep(0)
        for process in cores():
            process.kill()
        for _ in range(2):
            with pytest.raises(RunError, match="vLLM failed"):
                await waiter
            waiter = asyncio.ensure_future(collect([]))

    async def limited() -> None:
        async with asyncio.timeout(200):
            await body()

    try:
        asyncio.run(limited())
    finally:
        engine.close()


def test_syncs_of_an_untied_model_in_chunks_too_and_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from dataflow.engines.vllm import transfer as vllm_transfer

    paths = [save_model(tmp_path / str(seed), seed, tie=False) for seed in range(3)]
    models = [load(path) for path in paths]
    engine = AsyncVllmRollout(paths[0], P, R, max_num_seqs=8, kv_cache_bytes=32 << 20)
    batch = prompts([3, 40, 17])

    async def check(version: int, model: Any) -> None:
        samples = [sample async for sample in engine.generate(batch, GREEDY, seed=3)]
        assert len(samples) == 3
        for sample in samples:
            assert sample.version == version
            assert list(sample.tokens) == greedy(model, batch["prompt_ids"][sample.group], R)

    def in_chunks(client: vllm_transfer.Client, source: vllm_transfer.Weights) -> None:
        """As on a GPU, where a layer that is one of several weights may come in two chunks."""
        weights = dict(source)
        client.start_weight_update()
        for at in range(3):
            chunk = tmp_path / f"{at}.safetensors"
            save_file({name: weights[name].contiguous() for name in list(weights)[at::3]}, chunk)
            client.update_weights({"path": str(chunk)})
        client.finish_weight_update()

    def corrupt(weights: Any, path: str) -> None:
        Path(path).write_bytes(b"no tensors at all")

    async def body() -> None:
        await check(0, models[0])
        await engine.sync(models[1].state_dict(), 1)
        await engine.sync(models[2].state_dict(), 2)
        await check(2, models[2])
        monkeypatch.setattr(vllm_transfer, "send_file", in_chunks)
        await engine.sync(models[1].state_dict(), 3)
        await check(3, models[1])
        monkeypatch.undo()
        monkeypatch.setattr(vllm_transfer, "save_file", corrupt)
        for _ in range(2):
            with pytest.raises(RunError, match=r"update_weights failed: .*header too large.* rebuilt"):
                await engine.sync(models[0].state_dict(), 4)
        with pytest.raises(RunError, match="vLLM failed"):
            await check(4, models[0])
        assert engine.version == 3
        # If its process dies during a call, vLLM itself never returns.
        (process,) = cores()
        os.kill(process.pid, signal.SIGSTOP)
        # Of the backend itself, as the engine refuses all calls since its update failed.
        asked = asyncio.ensure_future(engine._backend.load([]))
        await asyncio.sleep(0.1)
        assert not asked.done()
        process.kill()
        with pytest.raises(EngineDeadError):
            await asked

    try:
        asyncio.run(asyncio.wait_for(body(), 200))
    finally:
        engine.close()


def test_heads_that_cannot_be_shared(tmp_path: Path) -> None:
    path = save_model(tmp_path, 0)
    with pytest.raises(ConfigError, match="tensor_parallel=3 does not divide the model's 2"):
        AsyncVllmRollout(path, P, R, tensor_parallel=3)


def test_the_error_of_a_dead_process_is_its_root_cause(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"vLLM does not start with .*: ValueError: .*cache blocks") as failure:
        AsyncVllmRollout(save_model(tmp_path / "model", 0), P, R, kv_cache_bytes=1 << 10)
    assert "root cause" not in str(failure.value)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("a line\n(Worker pid=3) torch.OutOfMemoryError: CUDA out\n", "torch.OutOfMemoryError: CUDA out"),
        ("KeyError: 'x'\nException: WorkerProc initialization failed, see the root cause above\n", "KeyError: 'x'"),
        ("nothing of the kind\n", ""),
        ("", ""),
    ],
)
def test_the_last_error_on_stderr_that_is_one(written: str, found: str, tmp_path: Path) -> None:
    kept = os.dup(2)
    try:
        with open(tmp_path / "stderr", "w") as file:
            os.dup2(file.fileno(), 2)
        os.write(2, b"ValueError: of before\n")
        stderr = Stderr()
        os.write(2, written.encode())
        assert stderr.root_cause() == found
        elsewhere = RuntimeError("See the root cause above")
        assert str(stderr.explained(elsewhere)) == (f"its process ended: {found}" if found else str(elsewhere))
        assert str(stderr.explained(ValueError("bad"))) == "bad"
    finally:
        os.dup2(kept, 2)
        os.close(kept)
