"""One actor of a remote agent: how it is started, what it is sent, and what it still owes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dataflow.batch import Batch
from dataflow.cluster.answer import cause
from dataflow.errors import ConfigError, RunError
from dataflow.graph import Hosted
from dataflow.rewards.remote.host import RewardHost
from dataflow.rewards.requests import Step, StepRequests

if TYPE_CHECKING:
    from dataflow.reward_agent import RewardAgent

_COLUMNS = ("data_source", "ground_truth", "extra_info", "raw_prompt", "response_mask")
_BUILD_S = 600.0


@dataclass(eq=False)
class Part:
    """A step's groups in one actor, of all its sets."""

    owed: dict[int, Any] = field(default_factory=dict)
    """The groups that have not come back, each with the handle of the samples of its set."""
    sends: list[asyncio.Task[None]] = field(default_factory=list)
    """They end when the actor has a set."""


@dataclass(eq=False)
class Shard:
    """One actor, or the one that took its place."""

    name: str
    actor: Any
    parts: dict[Step, Part] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def owed(self) -> int:
        """How many groups have not come back."""
        return sum(len(part.owed) for part in self.parts.values())

    def submit(self, state: StepRequests, owed: Mapping[int, Any]) -> list[Any]:
        """Sends the samples of groups, set by set; returns the handles of the answers."""
        sets: dict[Any, list[int]] = {}
        for group, samples in owed.items():
            sets.setdefault(samples, []).append(group)
        submit = self.actor.submit.remote
        return [submit(state.key, samples, groups, state.more) for samples, groups in sets.items()]


def needed(samples: Batch) -> Batch:
    """Returns the columns that a reward is made of, as small as they get; the others need not travel."""
    import torch

    text = "response_text" if "response_text" in samples else "responses"
    columns = {name: samples[name] for name in (*_COLUMNS, text) if name in samples}
    for name, small in (("responses", torch.int32), ("response_mask", torch.bool)):
        if isinstance(columns.get(name), torch.Tensor):
            columns[name] = columns[name].to(small)
    return samples.like(**columns)


def hosted(factory: Callable[[], RewardAgent]) -> Hosted:
    """Returns what an actor builds its agent from."""
    if isinstance(factory, partial):
        module, factory = factory.func.__module__, partial(factory)
        factory.__module__ = module  # whose functions travel whole where the actors could not import it
    return Hosted("reward", factory)


def start(options: Mapping[str, Any]) -> Any:
    """Starts an actor, without an agent yet.

    Raises:
        ConfigError: Ray does not run.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        raise ConfigError("reward agent: Ray does not run here; call ray.init() before, or use RewardAgent.")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    chosen = {"num_cpus": 0, "scheduling_strategy": here, **options}
    return ray.remote(RewardHost).options(**chosen).remote()


def answers(refs: Sequence[Any]) -> list[Any]:
    """Waits for actors that start, and raises what went wrong there.

    Raises:
        RunError: they are not up in time.
    """
    import ray

    try:
        return list(ray.get(list(refs), timeout=_BUILD_S))
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"reward agent: its actors are not up after {_BUILD_S:g} s; see 'ray status'.") from None
    except Exception as error:
        raise cause(error) from None
