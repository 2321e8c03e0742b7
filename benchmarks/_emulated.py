"""Services for benchmarks/real_size.py that compute nothing and take a given time, with Batches of the real size.

What the services do around their computation is real: the engine's samples become a batch by ``engines.samples``, the
trainer picks and packs its rank's rows by ``engines.verl.model``, and gathers outputs over the ranks.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.samples import to_batch
from dataflow.engines.verl.process import import_worker, join
from dataflow.engines.verl.rows import Division
from dataflow.engines.verl.trainer import VerlTrainer
from dataflow.graph import Stage, TaskInfo
from dataflow.models.tiny import tiny_model
from dataflow.system import clock

PAD, LAST = 0, 676
"""Tokens: that of the padding, and the number of those that are sampled."""


def memory() -> dict[str, float]:
    """Returns the memory of this process alone, now and at its peak (with shared memory), in MB."""
    with open("/proc/self/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return {name: int(lines[key].split()[0]) / 1024 for name, key in (("now", "RssAnon"), ("peak", "VmHWM"))}


class Slept:
    """Remembers when a service worked."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def report(self) -> tuple[list[tuple[float, float]], dict[str, float]]:
        """Returns the begin and end of each piece of work so far, and the process's memory."""
        return self.times, memory()


VERL = {
    "verl.trainer.ppo.metric_utils": ("compute_data_metrics",),
    "verl.trainer.ppo.core_algos": ("agg_loss",),
}
"""Functions of verl that stages call with whole matrices."""


def noting(stage: Stage) -> Stage:
    """Returns a stage that notes when verl computed in it, in the facts of its span."""

    @functools.wraps(stage.fn)
    def run(*fields: Any, task: TaskInfo, **options: Any) -> Any:
        from verl.trainer.ppo import core_algos

        times: list[tuple[float, float]] = []
        restored = []
        for module, names in VERL.items():
            for name in names:
                holder = importlib.import_module(module)
                restored.append((holder, name, getattr(holder, name)))
                setattr(holder, name, _timed(getattr(holder, name), times))
        known = core_algos.ADV_ESTIMATOR_REGISTRY
        restored_known = dict(known)
        known |= {name: _timed(function, times) for name, function in known.items()}
        try:
            return stage.fn(*fields, task=task, **options)
        finally:
            known |= restored_known
            for holder, name, function in restored:
                setattr(holder, name, function)
            task.note(verl=times)

    return replace(stage, fn=run)


def _timed(function: Any, times: list[tuple[float, float]]) -> Any:
    @functools.wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        begin = clock.now()
        try:
            return function(*arguments, **options)
        finally:
            times.append((begin, clock.now()))

    return timed


class Engine(Slept):
    """A rollout engine: samples end evenly over the time of a rollout, the last ones at its end.

    Args:
        seconds: of a rollout.
        longest: response, in tokens.
    """

    def __init__(self, seconds: float, longest: int) -> None:
        super().__init__()
        self.version, self._seconds, self._longest = 0, seconds, longest
        self._made: list[Sample] = []
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(tiny_model()))

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncIterator[Sample]:
        if not self._made:
            self._made = list(self._samples(len(prompts), sampling.n))
        begin = clock.now()
        pieces = np.array_split(np.arange(len(self._made)), 50)
        for number, piece in enumerate(pieces, 1):
            await asyncio.sleep(max(0.0, begin + self._seconds * number / len(pieces) - clock.now()))
            if number == len(pieces):
                self.times.append((begin, clock.now()))
            for at in piece:
                made = self._made[at]
                yield Sample(made.group, made.index, made.tokens, made.log_probs, self.version, made.finish)

    def _samples(self, prompts: int, n: int) -> Any:
        dice = random.Random(0)
        numbers = np.random.default_rng(0)
        rows = [(group, index) for group in range(prompts) for index in range(n)]
        dice.shuffle(rows)
        for group, index in rows:
            # Lengths as of a trained model: half of the responses below 400 tokens of 1,024, a few of them cut.
            tokens = max(1, min(self._longest, int(dice.lognormvariate(0.0, 0.6) * self._longest * 0.39)))
            ids = numbers.integers(1, LAST, tokens).tolist()
            log_probs = (-numbers.random(tokens)).tolist()
            yield Sample(group, index, ids, log_probs, 0, "length" if tokens == self._longest else "stop")

    def batch(self, prompts: Batch, samples: list[Sample], length: int) -> Batch:
        return to_batch(prompts, samples, length, self._tokenizer, PAD)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    async def sync(self, weights: Mapping[str, Any], version: int) -> None:
        self.version = version

    def close(self) -> None: ...


class Trainer(VerlTrainer, Slept):
    """A trainer without a model; all else of it is the real one's.

    Args:
        seconds: of log-probs of all rows, and of an update.
        options: the section ``trainer``.
        algorithm: the section ``algorithm``.
    """

    def __init__(self, seconds: tuple[float, float], options: Any, algorithm: Any) -> None:
        Slept.__init__(self)
        import_worker("cpu")
        self._joined = join("cpu")
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.algorithm, self.temperature, self.counts_flops = algorithm, 1.0, False
        self.adapted, self.loss_agg_mode = False, algorithm.loss_agg_mode
        self.division = Division(
            self.rank, self.world, options.micro_batch_size, options.max_tokens_per_gpu, options.balance_batch
        )
        self._shares_gpu = False
        optimizer = SimpleNamespace(param_groups=[{"lr": options.lr}])
        self.worker = self.reference = Worker(
            self, *seconds, SimpleNamespace(optimizer=optimizer, lr_scheduler_step=lambda: None)
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(4)}


class Worker:
    """Stands for verl's TrainingWorker: sleeps, and returns outputs of the right shapes."""

    def __init__(self, slept: Slept, infer_s: float, train_s: float, engine: Any) -> None:
        self._slept, self._infer_s, self._train_s, self.engine = slept, infer_s, train_s, engine

    def _sleep(self, seconds: float, begin: float) -> None:
        time.sleep(max(0.0, begin + seconds - clock.now()))
        self._slept.times.append((begin, clock.now()))

    def infer_batch(self, rows: Any) -> Any:
        from tensordict import TensorDict

        begin = clock.now()
        ids = rows["input_ids"]
        found = torch.nested.nested_tensor_from_jagged(-(ids.values() % 97).float() / 97, offsets=ids.offsets())
        self._sleep(self._infer_s, begin)
        return TensorDict({"log_probs": found, "entropy": found}, batch_size=[len(rows)])

    def train_batch(self, rows: Any) -> Any:
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        begin = clock.now()
        found = TensorDict({}, batch_size=[])
        tu.assign_non_tensor(found, metrics={"loss": [float(rows["input_ids"].values().sum() % 97)], "grad_norm": 1.0})
        self._sleep(self._train_s, begin)
        return found


def rewarding() -> Any:
    """Returns an agent whose rewards come at once."""
    from dataflow.reward_agent import RewardAgent
    from dataflow.rewards.slots import Limits

    class Agent(RewardAgent, Slept):
        def __init__(self) -> None:
            RewardAgent.__init__(self, self._score, limits=Limits(1024))
            Slept.__init__(self)
            self._left = self._submitted = 0

        def submit(self, step: Any, samples: Batch, **options: Any) -> Any:
            self._left = self._submitted = len(samples)
            return RewardAgent.submit(self, step, samples, **options)

        async def _score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
            now = clock.now()
            begin = self.times.pop()[0] if self._left < self._submitted else now
            self.times.append((begin, now))
            self._left -= 1
            return float(len(solution_str) % 7)

    return Agent()
