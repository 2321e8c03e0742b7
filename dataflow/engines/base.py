"""Protocols of the engines. A rollout engine samples, a trainer scores and updates; both hold weights."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch

    from dataflow.batch import Batch


@dataclass(frozen=True)
class Sampling:
    """Sampling options, under vLLM's names.

    Attributes:
        n: responses per prompt.
        temperature: 0 is greedy.
        top_p: nucleus mass kept, 1.0 keeps all.
        top_k: most likely tokens kept, -1 or 0 keeps all.
        max_tokens: longest response, eos included.
        stop_token_ids: tokens that end a response besides the model's own; kept in the response, as eos is.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 24
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        group: id of the prompt's group.
        index: of the sample within its group.
        tokens: ids, including the one that ended the response.
        log_probs: of each token; of the model's distribution at the sampling temperature (at 1 when greedy), before the
            cuts of top_p and top_k. 0 for tokens not sampled by the model.
        version: of the weights that it was sampled with.
        finish: ``stop`` at a token that ends a response, even if it is the last of max_tokens; ``length`` if the
            response was cut off before one.
        mask: 1 for each token that the model sampled, 0 for tokens of a tool's answer; None if it sampled all.
        facts: further columns of the sample's row, by name.
        text: of its tokens, without special ones; None if it is still to be written.
    """

    group: int
    index: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    version: int
    finish: Literal["stop", "length"]
    mask: Sequence[int] | None = None
    facts: Mapping[str, Any] | None = None
    text: str | None = None

    def compact(self) -> Sample:
        """Returns the same sample with arrays of numbers.

        They take a tenth of the memory of lists, and a batch is made of them in a tenth of the time. So samples are
        converted as they arrive, while others are still being drawn.
        """
        fields: dict[str, Any] = {
            "tokens": np.asarray(self.tokens, dtype=np.int32),
            "log_probs": np.asarray(self.log_probs, dtype=np.float32),
            "mask": None if self.mask is None else np.asarray(self.mask, dtype=np.int8),
        }
        return replace(self, **fields)


class RolloutEngine(Protocol):
    """Samples responses from its own copy of the actor weights. Its methods are called on one event loop.

    An engine that writes texts early is also a :class:`Writes`.
    """

    version: int
    """Version of the weights it holds: 0 at the start, n after step n's sync."""

    def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncGenerator[Sample, None]:
        """Samples ``sampling.n`` responses for every prompt; yields each as soon as it is finished.

        Args:
            prompts: a row per prompt, with a column ``prompt_ids`` (lists of token ids) and any others.
            sampling: options.
            seed: sample i of group g depends on random numbers of (seed, g, i) alone: not on the rest of the batch, on
                the replica, or on the order in which samples finish.

        Raises:
            DataError: a prompt is empty or too long.
            Aborted: the engine was closed meanwhile.
            ServiceLost: it has to be rebuilt.
        """
        ...

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        """Samples one response to one prompt, such as a turn of a conversation, with the random numbers of ``seed``.

        Its ``group`` and ``index`` are 0, and ``sampling.n`` is ignored. Raises the errors of :meth:`generate`.
        """
        ...

    def batch(self, prompts: Batch, samples: Sequence[Sample], length: int) -> Batch:
        """Returns samples, in any order, as rows by group and index.

        Args:
            prompts: the prompts of these samples, and possibly others.
            samples: whole groups of equal size; those with a ``text`` keep it.
            length: R, tokens that responses are padded to.

        Returns:
            The samples of a group side by side, the other columns of ``prompts`` repeated:
            ``prompts`` int64 ``[rows, P]``, left-padded to the longest of all prompts given; ``responses`` int64
            ``[rows, R]``, right-padded; ``input_ids``, ``attention_mask``, ``position_ids`` int64 ``[rows, P+R]``
            (``[rows, 4, P+R]`` for a model that takes images);
            ``response_mask`` int64 ``[rows, R]``, 1 for tokens that the model sampled, including eos;
            ``rollout_log_probs`` float32 ``[rows, R]``, 0 after the end; ``response_text`` (str, without special
            tokens); ``finish_reason``, each sample's ``finish``. ``meta["weights_version"]`` is the oldest of the
            samples'.
        """
        ...

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Loads new weights, by the parameter names of the Hugging Face model.

        Samples in flight finish first, with the weights they began with; samples requested meanwhile wait.

        Raises:
            DataflowError: a name is unknown or missing, or a shape differs; the old weights stay.
        """
        ...

    async def sleep(self) -> None:
        """Frees the device memory that only sampling needs, once nothing is in flight. Idempotent."""
        ...

    async def wake(self) -> None:
        """Allocates that memory again. Idempotent."""
        ...

    def close(self) -> Any:
        """Aborts the samples in flight, whose callers get :class:`Aborted`, and frees the engine."""
        ...


@runtime_checkable
class Writes(Protocol):
    """An engine that writes the text of each sample as it arrives; others write all of them in ``batch``."""

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of a response, without special tokens."""
        ...


class Trained(Protocol):
    """A trained model: one object per rank, all of which make the same calls (SPMD).

    Every rank gets the whole batch and computes its share of the rows; results come back whole on rank 0
    (and may on the others).
    """

    rank: int
    """Of this object; the first is 0."""

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        """Takes one optimizer step on all rows; the LR scheduler steps if it is the step's ``last`` one.

        Ignores rows with an empty ``response_mask`` (dropped samples); if all are empty, takes no step.

        Returns:
            verl's metrics: ``actor/pg_loss``, ``actor/grad_norm``, ``actor/lr``, ...; ``actor/skipped_updates`` is 1
            if no step was taken, as there are no rows or the gradient is not finite. Those of a critic begin with
            ``critic/``.
        """
        ...

    async def snapshot(self, wait: bool) -> bool:
        """Copies weights, optimizer, LR scheduler and random state to CPU memory, for :meth:`write`.

        Args:
            wait: whether to wait until the previous copy is written; otherwise no copy is made meanwhile.

        Returns:
            Whether there is a new copy; the same on all ranks.
        """
        ...

    async def write(self, directory: str) -> None:
        """Writes the copy, while other calls are served; all ranks must call, with the same directory.

        Raises:
            OSError: a file cannot be written; on all ranks.
        """
        ...

    async def settle(self) -> None:
        """Waits for a write in progress, and discards a copy whose write has not begun; all ranks must call."""
        ...

    def load(self, directory: str) -> None:
        """Restores what :meth:`write` wrote, with any number of ranks; all must call.

        Raises:
            ConfigError: it is of another model.
        """
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the full weights on CPU, by Hugging Face parameter name, tied ones once."""
        ...

    def digest(self) -> str:
        """Returns a hash of the weights; all ranks must call."""
        ...

    def close(self) -> Any: ...


class Trainer(Trained, Protocol):
    """The trained actor."""

    def old_log_probs(self, batch: Batch) -> Batch:
        """Returns ``old_log_probs`` float32 ``[rows, R]`` (and ``entropy`` if configured) of the current weights."""
        ...

    def ref_log_probs(self, batch: Batch) -> Batch:
        """Returns ``ref_log_prob`` float32 ``[rows, R]`` of the frozen initial weights."""
        ...


class Critic(Trained, Protocol):
    """The trained value model of PPO."""

    def values(self, batch: Batch) -> Batch:
        """Returns ``values`` float32 ``[rows, R]``: the return expected before each token."""
        ...


class Teacher(Protocol):
    """A frozen model that scores what another one samples: one object per rank, which all make the same calls."""

    def log_probs(self, batch: Batch) -> Batch:
        """Returns ``teacher_log_probs``, float32 ``[rows, R]``, of the responses' tokens; 0 where the mask is."""
        ...

    def close(self) -> Any: ...
