"""Rollout with transformers: all rows of a batch generate together, with a KV cache, on CPU or one GPU.

A prompt is read once and its cache entries copied to its n samples; rows that have ended are removed from the batch
once half of them have. Each sample draws from random numbers of its own, fixed before the first token.

One thread computes, so calls take effect in their order: a weight sync after the samples in flight, later samples
after the sync.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DynamicCache,
)
from transformers.utils.logging import disable_progress_bar

from dataflow.batch import Batch
from dataflow.engines.attention import GROUPED
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.draw import draw, uniforms
from dataflow.engines.samples import check_sampling, check_turn, left_pad, prompt_ids, shown_of, to_batch, with_shown
from dataflow.engines.vocabulary import Vocabulary, loading, undrawn
from dataflow.engines.weights import WeightNames, auto_class
from dataflow.errors import Aborted, ConfigError, nearest

_DTYPES = ("float32", "bfloat16", "float16")
T = TypeVar("T")


@dataclass(frozen=True)
class _Row:
    """A sample to draw: its prompt, the numbers in [0, 1) that decide each token, which sample it is, its images."""

    prompt: Sequence[int]
    uniforms: np.ndarray
    group: int = 0
    index: int = 0
    shown: Any = None


class HfRollout:
    """A :class:`~dataflow.engines.base.RolloutEngine` over a Hugging Face causal LM.

    ``rollout_log_probs`` are ``log_softmax(logits / temperature)`` of the sampled tokens *before* the cuts of
    ``top_p`` and ``top_k``, which is what a trainer computes from the same weights; under greedy decoding
    (temperature 0) they are those at temperature 1.

    Args:
        model: directory or hub id of a causal LM with its tokenizer.
        max_prompt_length: P, tokens that every prompt is left-padded to.
        threads: CPU threads that this process computes with.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``cpu``, ``cuda``, ``cuda:1``.
        max_batch: rows that generate at once; more are done in chunks.

    Raises:
        ConfigError: an unknown dtype.
        ModelError: the model or its tokenizer cannot be loaded, or names no end-of-sequence token.
    """

    version: int

    def __init__(
        self,
        model: str,
        max_prompt_length: int,
        threads: int = 1,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch: int = 1024,
    ) -> None:
        if dtype not in _DTYPES:
            hint = nearest(dtype, _DTYPES) or f"; give one of {', '.join(_DTYPES)}."
            raise ConfigError(f"rollout dtype '{dtype}' is unknown{hint}")
        if max_prompt_length < 1 or max_batch < 1:
            raise ConfigError(
                f"rollout: max_prompt_length={max_prompt_length}, max_batch={max_batch}; both are 1 at least."
            )
        torch.set_num_threads(threads)
        disable_progress_bar()  # its lines would break the run's own progress display
        with loading(model):
            tokenizer = AutoTokenizer.from_pretrained(model)
            self.model = auto_class(AutoConfig.from_pretrained(model)).from_pretrained(
                model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
            )
        self.model.to(device).eval().requires_grad_(False)
        config = self.model.config.get_text_config()
        self._sees = hasattr(self.model.config, "vision_config")
        self._undrawn = undrawn(self.model.config)
        if not self._sees and getattr(config, "num_key_value_heads", None) not in (None, config.num_attention_heads):
            self.model.set_attn_implementation(GROUPED)
        self.max_prompt_length = max_prompt_length
        self.max_batch = max_batch
        self.device = torch.device(device)
        self.version = 0
        self.vocabulary = Vocabulary.of(model, tokenizer, self.model.generation_config, self.model.config)
        self._weights = WeightNames(self.model)
        self._thread = ThreadPoolExecutor(1, "rollout")
        self._turns: list[tuple[tuple[Sampling, int], _Row, asyncio.Future[Sample]]] = []
        self._aborts = 0
        self._in_flight = 0
        self._counts = {"samples": 0, "tokens": 0}

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncIterator[Sample]:
        """See :meth:`RolloutEngine.generate`. A batch of another size may round a logit otherwise, by about 1e-6."""
        check_sampling(sampling, self.vocabulary.size)
        ids = prompt_ids(prompts, self.max_prompt_length)
        shown = shown_of(prompts, self._sees)
        rows = [
            _Row(prompt, uniforms((seed, group, index), sampling.max_tokens), group, index, what)
            for group, prompt, what in zip(prompts.ids, ids, shown, strict=True)
            for index in range(sampling.n)
        ]
        loop = asyncio.get_running_loop()
        found: asyncio.Queue[Sample | None] = asyncio.Queue()
        unwanted, aborts = threading.Event(), self._aborts

        def work() -> None:
            try:
                for sample in self._draw_all(rows, sampling, aborts, unwanted):
                    loop.call_soon_threadsafe(found.put_nowait, sample)
            finally:
                loop.call_soon_threadsafe(found.put_nowait, None)

        self._in_flight += len(rows)
        left = len(rows)
        working = asyncio.ensure_future(self._run(work))
        try:
            while (sample := await found.get()) is not None:
                left -= 1
                self._in_flight -= 1
                self._count(sample)
                yield sample
            await working
        finally:
            self._in_flight -= left
            unwanted.set()
            working.cancel()

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        """See :meth:`RolloutEngine.sample`. Prompts that arrive while the engine computes are then sampled together."""
        check_sampling(sampling, self.vocabulary.size)
        (ids,) = prompt_ids(Batch([0], {"prompt_ids": [prompt]}), self.max_prompt_length)
        check_turn(self._sees)
        loop = asyncio.get_running_loop()
        row = _Row(ids, uniforms(seed, sampling.max_tokens))
        future: asyncio.Future[Sample] = loop.create_future()
        self._turns.append(((sampling, self._aborts), row, future))
        self._in_flight += 1
        try:
            await self._run(lambda: self._take_turns(loop))
            sample = await future
            self._count(sample)
            return sample
        finally:
            self._in_flight -= 1

    def _take_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        """Samples all queued prompts, those with equal options together."""
        turns, self._turns = self._turns, []
        for kind in dict.fromkeys(kind for kind, _row, _future in turns):
            mine = [(row, future) for other, row, future in turns if other == kind]
            rows = [replace(row, index=at) for at, (row, _future) in enumerate(mine)]
            try:
                for sample in self._draw_all(rows, *kind):
                    loop.call_soon_threadsafe(_settle, mine[sample.index][1], replace(sample, index=0), None)
            except Exception as error:
                for _row, future in mine:
                    loop.call_soon_threadsafe(_settle, future, None, error)

    def text(self, tokens: Sequence[int]) -> str:
        """See :meth:`Writes.text <dataflow.engines.base.Writes.text>`."""
        return self.vocabulary.text(tokens)

    def batch(self, prompts: Batch, samples: Sequence[Sample], length: int) -> Batch:
        """See :meth:`RolloutEngine.batch`."""
        return to_batch(prompts, samples, length, self.vocabulary.tokenizer, self.vocabulary.pad)

    async def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`: on a GPU the weights move to the host's memory."""
        if self.device.type != "cpu":
            await self._run(lambda: self._move("cpu"))

    async def wake(self) -> None:
        """See :meth:`RolloutEngine.wake`."""
        if self.device.type != "cpu":
            await self._run(lambda: self._move(self.device))

    def _move(self, device: Any) -> None:
        self.model.to(device)
        torch.cuda.empty_cache()

    async def abort(self) -> int:
        """See :meth:`RolloutEngine.abort`."""
        self._aborts += 1
        return self._in_flight

    def stats(self) -> dict[str, float]:
        """See :meth:`RolloutEngine.stats`."""
        return {**self._counts, "running": self._in_flight}

    def close(self) -> None:
        """Ends the thread after the current work is done or aborted."""
        self._aborts += 1
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _count(self, sample: Sample) -> None:
        self._counts["samples"] += 1
        self._counts["tokens"] += len(sample.tokens)

    def _draw_all(
        self, rows: Sequence[_Row], sampling: Sampling, aborts: int, unwanted: threading.Event | None = None
    ) -> Iterator[Sample]:
        """Yields the sample of each row as it ends, batch by batch.

        Raises:
            Aborted: ``abort`` has been called more than ``aborts`` times.
        """
        for start in range(0, len(rows), self.max_batch):
            for row, tokens, scores, live in self._sample(rows[start : start + self.max_batch], sampling):
                if unwanted is not None and unwanted.is_set():
                    return
                if self._aborts != aborts:
                    raise Aborted("rollout: the samples in flight were aborted.")
                if row is not None:
                    finish = "length" if live else "stop"
                    yield Sample(row.group, row.index, tokens, scores, self.version, finish)

    def _sample(
        self, rows: Sequence[_Row], sampling: Sampling
    ) -> Iterator[tuple[_Row | None, list[int], list[float], bool]]:
        """Generates the rows of one batch.

        Args:
            rows: rows of the same prompt must be adjacent.
            sampling: how to draw.

        Yields:
            Each row that has ended, with its tokens, their log-probs, and whether it was cut off at the maximum
            length; after each token also None as the row, so that the caller can stop.
        """
        prompts: list[_Row] = []
        owner: list[int] = []
        for row in rows:
            if not prompts or prompts[-1].prompt is not row.prompt:
                prompts.append(row)
            owner.append(len(prompts) - 1)
        with torch.inference_mode():
            yield from self._decode(rows, prompts, torch.tensor(owner), sampling)

    def _decode(
        self, rows: Sequence[_Row], prompts: Sequence[_Row], owner: torch.Tensor, sampling: Sampling
    ) -> Iterator[tuple[_Row | None, list[int], list[float], bool]]:
        """Decodes the rows together; ``owner`` int64 ``[rows]`` is the one of ``prompts`` that each begins with."""
        tokens, mask = left_pad([row.prompt for row in prompts], self.vocabulary.pad)
        places, inputs = (mask.cumsum(dim=1) - 1).clamp(min=0), {}
        if self._sees:
            shown = [row.shown for row in prompts]
            places, inputs = with_shown(places, shown, mask.shape[1]).transpose(0, 1), self._inputs(shown)
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(tokens, mask, places.to(self.device), cache, **inputs)
        pick = owner.to(self.device)
        cache.batch_select_indices(pick)
        logits, mask = logits[pick], mask[pick]
        # What follows a prompt counts on from its largest position: [rows], or [4, rows] for a model that takes images.
        place = mask.sum(dim=1)
        if self._sees:
            largest = places[1:].amax(dim=(0, 2)).to(self.device)[pick] + 1
            place = torch.stack([place, largest, largest, largest])

        shape = (len(rows), sampling.max_tokens)
        numbers = torch.from_numpy(np.stack([row.uniforms for row in rows])).to(self.device)
        ends = torch.tensor([*self.vocabulary.ends, *sampling.stop_token_ids], device=self.device)
        # Tokens for the repetition penalty; padding is replaced by a token of the prompt, which changes nothing.
        context = torch.where(mask.bool(), tokens[pick], tokens[pick, -1:])
        context = torch.cat([context, torch.full(shape, self.vocabulary.pad, device=self.device)], dim=1)
        wide = tokens.shape[1]
        drawn = context[:, wide:]
        scores = torch.zeros(shape, dtype=torch.float32, device=self.device)
        at = torch.arange(shape[0], device=self.device)  # the row in each place of the batch
        live = torch.ones_like(at, dtype=torch.bool)
        for t in range(shape[1]):
            token, score = draw(logits, numbers[at, t], sampling, context[at, : wide + t], self._undrawn)
            drawn[at, t], scores[at, t] = torch.where(live, token, self.vocabulary.pad), score
            ended = live & torch.isin(token, ends)
            live = live & ~ended
            last = t + 1 == shape[1]
            for over, going in ((ended, False), (live, True)):
                for row in at[over].tolist() if last or not going else ():
                    yield rows[row], drawn[row, : t + 1].tolist(), scores[row, : t + 1].tolist(), going
            left = int(live.sum())
            if not left or last:
                return
            yield None, [], [], True
            if 2 * left <= len(live):
                pick = live.nonzero().squeeze(1)
                cache.batch_select_indices(pick)
                at, token, mask, place, live = at[pick], token[pick], mask[pick], place[..., pick], live[pick]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = self._forward(token[:, None], mask, (place + t)[..., None], cache)

    def _inputs(self, shown: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Returns the images of several prompts as arguments of the model."""
        names = dict.fromkeys(name for one in shown for name in one.inputs)
        joined = {name: torch.cat([one.inputs[name] for one in shown if name in one.inputs]) for name in names}
        return {name: tensor.to(self.device) for name, tensor in joined.items()}

    def _forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, place: torch.Tensor, cache: Any, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits of the last position, ``[rows, vocabulary]``; the cache grows."""
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=place,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copies new weights into the model, by Hugging Face name; a tied ``lm_head.weight`` may be left out.

        Samples in flight finish first. Either all weights are replaced or, on an error, none.

        Raises:
            DataflowError: a name is unknown or missing, a shape differs, or two tied weights differ.
        """
        await self._run(lambda: self._load(weights, version))

    def _load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        picked = self._weights.pick(weights, version)
        own: dict[str, torch.Tensor] = self.model.state_dict()
        with torch.no_grad():
            for name, value in picked.items():
                own[name].copy_(value)
        self.version = version


def _settle(future: asyncio.Future[Sample], sample: Sample | None, error: Exception | None) -> None:
    if future.done():
        return  # the caller was cancelled
    if error is not None:
        future.set_exception(error)
    elif sample is not None:
        future.set_result(sample)
