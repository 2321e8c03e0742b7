"""What the engines of a run share: requests become samples through a gate, weights are checked before a sync."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.gate import Gate
from dataflow.engines.pretrained import WeightNames, loading, read_vocabulary
from dataflow.engines.samples import SHOWN, to_batch
from dataflow.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Request:
    """A requested sample.

    ``shown`` is what the prompt shows beside its text, in the engine's own form; None for a model of text.
    """

    prompt: list[int]
    sampling: Sampling
    seed: tuple[int, ...]
    group: int = 0
    index: int = 0
    shown: Any = None


class Rollout:
    """A :class:`~dataflow.engines.base.RolloutEngine`, but for :meth:`_draw`, :meth:`_load` and what frees memory.

    Args:
        model: directory or hub id of a causal LM with its tokenizer.
        max_prompt_length: P, tokens that a prompt may have.
        engine: its name, for error messages.
        sleeps: whether the engine frees memory while it sleeps; samples requested meanwhile wait until it wakes.
        in_flight: what a sync does with samples in flight: ``wait`` lets them finish, ``abort`` draws them again.

    Raises:
        ModelError: the model's tokenizer or configuration cannot be read, or names no token that ends a response.
    """

    version: int

    def __init__(
        self,
        model: str,
        max_prompt_length: int,
        engine: str,
        sleeps: bool = False,
        in_flight: Literal["wait", "abort"] = "wait",
    ) -> None:
        self.version = 0
        self.in_flight = in_flight
        self.max_prompt_length = max_prompt_length
        self.vocabulary, self._config = read_vocabulary(model)
        with loading(model):
            self._weights = WeightNames(self._config)
        self._sees = hasattr(self._config, "vision_config")
        self._engine_name, self._sleeps = engine, sleeps
        self._gate = Gate(self._lost)

    async def _draw(self, request: Request) -> Sample:
        """Draws a sample; cancelled if it is aborted, or if nobody wants it any more."""
        raise NotImplementedError

    def _shown(self, prompt: list[int], shown: Any, group: int) -> Any:
        """Returns what a prompt shows in the engine's own form."""
        return shown

    async def _ready(self) -> None:
        """Makes the engine ready to draw; awaited when a request was checked."""

    async def _load(self, weights: Any, version: int) -> None:
        """Replaces all weights by what :meth:`_shared` returned, while nothing is in flight."""
        raise NotImplementedError

    async def _shared(self, weights: dict[str, torch.Tensor], version: int) -> Any:
        """Returns weights, tied ones once under the embedding's name, as :meth:`_load` takes them."""
        return weights

    async def _free(self) -> None:
        """Frees the device memory that only sampling needs."""

    async def _allocate(self) -> None:
        """Allocates it again."""

    def _lost(self, cause: Exception) -> str | None:
        """Returns what to say if an error leaves the engine unusable; None if it does not."""
        reason = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
        return f"rollout: {self._engine_name} failed ({reason}); the engine has to be rebuilt."

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncGenerator[Sample, None]:
        """See :meth:`RolloutEngine.generate`. A batch of another size may round a logit otherwise, by about 1e-6.

        Closing the generator early (``aclose``, cancellation) aborts the samples in flight.
        """
        requests = []
        for at, (group, tokens) in enumerate(zip(prompts.ids, prompts["prompt_ids"], strict=True)):
            prompt = self._prompt(group, tokens)
            shown = self._shown(prompt, prompts[SHOWN][at], group) if self._sees else None
            indices = range(sampling.n)
            requests += [Request(prompt, sampling, (seed, group, i), group, i, shown) for i in indices]
        await self._ready()
        async with aclosing(self._gate.draw_all([partial(self._draw, each) for each in requests])) as samples:
            async for sample in samples:
                yield sample

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        """See :meth:`RolloutEngine.sample`."""
        if self._sees:
            raise ConfigError("rollout: conversations cannot show images yet; leave out the tools.")
        ids = self._prompt(0, prompt)
        await self._ready()
        return await self._gate.draw(partial(self._draw, Request(ids, sampling, tuple(seed))))

    def _prompt(self, group: int, tokens: Sequence[int]) -> list[int]:
        """Returns a prompt's token ids, after a check: at an unknown one vLLM's process would end."""
        ids = list(map(int, tokens))
        if not 0 < len(ids) <= self.max_prompt_length:
            raise DataError(
                f"rollout: the prompt of group {group} has {len(ids)} tokens; give 1 to "
                f"data.max_prompt_length={self.max_prompt_length}, or set data.truncation."
            )
        if not 0 <= min(ids) <= max(ids) < self.vocabulary.size:
            raise DataError(
                f"rollout: the prompt of group {group} has tokens {min(ids)} to {max(ids)}, and the model 0 to "
                f"{self.vocabulary.size - 1}; make prompts with its own tokenizer."
            )
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """See :meth:`Writes.text <dataflow.engines.base.Writes.text>`."""
        return self.vocabulary.text(tokens)

    def batch(self, prompts: Batch, samples: Sequence[Sample], length: int) -> Batch:
        """See :meth:`RolloutEngine.batch`."""
        return to_batch(prompts, samples, length, self.vocabulary.tokenizer, self.vocabulary.pad)

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See :meth:`RolloutEngine.sync`; checks names and shapes first; a tied ``lm_head.weight`` may be left out.

        Raises:
            DataflowError: a name is unknown or missing, or a shape differs; the old weights stay.
            ServiceLost: the weights could not be loaded.
        """
        shared = await self._shared(self._weights.pick(weights, version), version)  # while samples in flight finish

        async def work() -> None:
            await self._load(shared, version)
            self.version = version

        # A third rule, which keeps samples in flight and lets them continue with the new weights, would not wait here
        # for the gate: vLLM's `pause_generation(mode="keep")` freezes them.
        await self._gate.alone(work, redraw=self.in_flight == "abort")

    async def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`."""

        async def work() -> None:
            if self._sleeps:
                self._gate.asleep = True  # first, so that a wake waits for a sleep whose caller was cancelled
                await self._free()

        await self._gate.alone(work)

    async def wake(self) -> None:
        """See :meth:`RolloutEngine.wake`."""

        async def work() -> None:
            await self._allocate()
            self._gate.asleep = False

        if self._gate.asleep:
            await self._gate.alone(work)
