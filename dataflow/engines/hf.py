"""Rollout with transformers, for CPUs and small models: all samples that wait generate together, with a KV cache.

A prompt is read once and its cache entries copied to its n samples; rows that have ended are removed from the batch
once half of them have. Each sample draws from random numbers of its own, fixed before the first token. One thread
computes; samples requested meanwhile are generated together when it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from dataflow.engines.attention import GROUPED
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.draw import draw, uniforms
from dataflow.engines.rollout import Request, Rollout
from dataflow.engines.samples import with_shown
from dataflow.engines.vocabulary import loading, undrawn
from dataflow.engines.weights import add_mean, auto_class


@dataclass(frozen=True, eq=False)
class _Row:
    """A sample to draw; ``ended`` gets it, and is cancelled if nobody wants it any more."""

    request: Request
    uniforms: np.ndarray
    ended: asyncio.Future[Sample]


class HfRollout(Rollout):
    """A :class:`~dataflow.engines.base.RolloutEngine` over a Hugging Face causal LM, in float32.

    ``rollout_log_probs`` are ``log_softmax(logits / temperature)`` of the sampled tokens *before* the cuts of
    ``top_p`` and ``top_k``, which is what a trainer computes from the same weights; under greedy decoding
    (temperature 0) they are those at temperature 1.

    Args:
        model, max_prompt_length: see :class:`~dataflow.engines.rollout.Rollout`, as for errors.
        threads: CPU threads that this process computes with.
        device: ``cpu``, ``cuda``, ``cuda:1``.
        max_batch: rows that generate at once; more are done in chunks.
    """

    def __init__(
        self, model: str, max_prompt_length: int, threads: int = 1, device: str = "cpu", max_batch: int = 1024
    ) -> None:
        super().__init__(model, max_prompt_length, "transformers", sleeps=device != "cpu")
        torch.set_num_threads(threads)
        disable_progress_bar()  # its lines would break the run's own progress display
        with loading(model):
            self.model = auto_class(self._config).from_pretrained(
                model, dtype=torch.float32, attn_implementation="sdpa"
            )
        self.model.to(device).eval().requires_grad_(False)
        heads = self._config.get_text_config()
        if self._sees:
            add_mean(self.model)
        elif getattr(heads, "num_key_value_heads", None) not in (None, heads.num_attention_heads):
            self.model.set_attn_implementation(GROUPED)
        self._undrawn = undrawn(self.model.config)
        self._max_batch = max_batch
        self._device = torch.device(device)
        self._thread = ThreadPoolExecutor(1, "rollout")
        self._waiting: SimpleQueue[_Row] = SimpleQueue()
        self._started = False

    async def _draw(self, request: Request) -> Sample:
        loop = asyncio.get_running_loop()
        row = _Row(request, uniforms(request.seed, request.sampling.max_tokens), loop.create_future())
        self._waiting.put(row)
        if not self._started:
            self._started = True
            loop.call_soon(self._start, loop)  # after the other samples of this call
        return await row.ended

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._started = False
        self._thread.submit(self._generate, loop)

    def _generate(self, loop: asyncio.AbstractEventLoop) -> None:
        """Generates all rows that wait, those with equal options together."""
        rows: list[_Row] = []
        while True:
            try:
                rows.append(self._waiting.get_nowait())
            except Empty:
                break
        try:
            for sampling in dict.fromkeys(row.request.sampling for row in rows):
                same = [row for row in rows if row.request.sampling == sampling]
                for start in range(0, len(same), self._max_batch):
                    with torch.inference_mode():
                        for row, sample in self._decode(same[start : start + self._max_batch], sampling):
                            loop.call_soon_threadsafe(_settle, row.ended, sample)
        except Exception as error:
            for row in rows:
                loop.call_soon_threadsafe(_settle, row.ended, error)

    def _decode(self, rows: Sequence[_Row], sampling: Sampling) -> Iterator[tuple[_Row, Sample]]:
        """Yields each row with its sample, as it ends; rows of the same prompt must be adjacent."""
        first: list[Request] = []
        owner: list[int] = []
        for row in rows:
            if not first or first[-1].prompt is not row.request.prompt:
                first.append(row.request)
            owner.append(len(first) - 1)
        given = [torch.tensor(request.prompt) for request in first]
        tokens = pad_sequence(given, True, self.vocabulary.pad, padding_side="left")
        mask = pad_sequence([torch.ones_like(prompt) for prompt in given], True, padding_side="left")
        places, inputs = (mask.cumsum(dim=1) - 1).clamp(min=0), {}
        if self._sees:
            shown = [request.shown for request in first]
            places, inputs = with_shown(places, shown, mask.shape[1]).transpose(0, 1), self._inputs(shown)
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(tokens, mask, places.to(self._device), cache, **inputs)
        pick = torch.tensor(owner, device=self._device)
        cache.batch_select_indices(pick)
        logits, mask = logits[pick], mask[pick]
        # What follows a prompt counts on from its largest position: [rows], or [4, rows] for a model that takes images.
        place = mask.sum(dim=1)
        if self._sees:
            largest = places[1:].amax(dim=(0, 2)).to(self._device)[pick] + 1
            place = torch.stack([place, largest, largest, largest])

        shape = (len(rows), sampling.max_tokens)
        numbers = torch.from_numpy(np.stack([row.uniforms for row in rows])).to(self._device)
        ends = torch.tensor([*self.vocabulary.ends, *sampling.stop_token_ids], device=self._device)
        # Tokens for the repetition penalty; padding is replaced by a token of the prompt, which changes nothing.
        context = torch.where(mask.bool(), tokens[pick], tokens[pick, -1:])
        context = torch.cat([context, torch.full(shape, self.vocabulary.pad, device=self._device)], dim=1)
        wide = tokens.shape[1]
        drawn = context[:, wide:]
        scores = torch.zeros(shape, dtype=torch.float32, device=self._device)
        at = torch.arange(shape[0], device=self._device)  # the row in each place of the batch
        live = torch.ones_like(at, dtype=torch.bool)
        for t in range(shape[1]):
            token, score = draw(logits, numbers[at, t], sampling, context[at, : wide + t], self._undrawn)
            drawn[at, t], scores[at, t] = torch.where(live, token, self.vocabulary.pad), score
            ended = live & torch.isin(token, ends)
            live = live & ~ended
            last = t + 1 == shape[1]
            for which, finish in ((ended, "stop"), (live & last, "length")):
                for row in at[which].tolist():
                    request, found = rows[row].request, drawn[row, : t + 1].tolist()
                    log_probs = scores[row, : t + 1].tolist()
                    yield rows[row], Sample(request.group, request.index, found, log_probs, self.version, finish)
            unwanted = [row.ended.cancelled() for row in rows]
            if any(unwanted):
                live = live & ~torch.tensor(unwanted, device=self._device)[at]
            left = int(live.sum())
            if not left or last:
                return
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
        return {name: tensor.to(self._device) for name, tensor in joined.items()}

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

    async def _load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        def copy() -> None:
            own: dict[str, torch.Tensor] = self.model.state_dict()
            with torch.no_grad():
                for name, value in weights.items():
                    own[name].copy_(value)

        await self._in_thread(copy)

    async def _free(self) -> None:
        await self._in_thread(partial(self._move, "cpu"))

    async def _allocate(self) -> None:
        await self._in_thread(partial(self._move, self._device))

    def _move(self, device: Any) -> None:
        self.model.to(device)
        torch.cuda.empty_cache()

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Aborts the samples in flight and ends the thread."""
        self._gate.close()
        self._thread.shutdown(wait=True, cancel_futures=True)


def _settle(ended: asyncio.Future[Sample], found: Sample | Exception) -> None:
    if ended.done():  # nobody wants it any more
        return
    if isinstance(found, Sample):
        ended.set_result(found)
    else:
        ended.set_exception(found)
