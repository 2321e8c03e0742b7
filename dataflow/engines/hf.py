"""Rollout with transformers, for CPUs and small models: all samples that wait generate together, with a KV cache.

A prompt is read once and its cache entries copied to its n samples; rows that have ended are removed from the batch
once half of them have. Each sample draws from random numbers of its own, fixed before the first token. One thread
computes; samples requested meanwhile are generated together when it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, DynamicCache, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils.logging import disable_progress_bar

from dataflow.engines.base import Sample, Sampling
from dataflow.engines.pretrained import add_mean, auto_class, loading, undrawn
from dataflow.engines.rollout import Request, Rollout
from dataflow.engines.samples import with_shown


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
        device: ``cpu``, ``cuda``, ``cuda:1``; the weights stay on it.
        max_batch: rows that generate at once; more are done in chunks.
    """

    def __init__(
        self, model: str, max_prompt_length: int, threads: int = 1, device: str = "cpu", max_batch: int = 1024
    ) -> None:
        super().__init__(model, max_prompt_length, "transformers")
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
            self.model.set_attn_implementation(_GROUPED)
        self._undrawn = undrawn(self.model.config)
        self._max_batch = max_batch
        self._device = torch.device(device)
        self._thread = ThreadPoolExecutor(1, "rollout")
        self._waiting: SimpleQueue[_Row] = SimpleQueue()
        self._started = False

    async def _draw(self, request: Request) -> Sample:
        loop = asyncio.get_running_loop()
        row = _Row(request, _uniforms(request.seed, request.sampling.max_tokens), loop.create_future())
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
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of the KV cache, for a trainer on the same GPU

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
        drawn = torch.full(shape, self.vocabulary.pad, device=self._device)
        scores = torch.zeros(shape, dtype=torch.float32, device=self._device)
        at = torch.arange(shape[0], device=self._device)  # the row in each place of the batch
        live = torch.ones_like(at, dtype=torch.bool)
        for t in range(shape[1]):
            token, score = _draw_tokens(logits, numbers[at, t], sampling, self._undrawn)
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

        await asyncio.get_running_loop().run_in_executor(self._thread, copy)

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


def _uniforms(seed: Sequence[int], long: int) -> np.ndarray:
    """Returns the numbers in [0, 1) that decide each token; the t-th depends on the seed, not even on ``long``."""
    entropy = [part % 2**64 for part in seed]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy))).random(long)


def _draw_tokens(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling, undrawn: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row by inverting the distribution function at its number in [0, 1) in ``uniform``.

    Returns the tokens, and their log-probs before any cut. ``undrawn`` tokens are never drawn; they are a cut as the
    others are, so log-probs count them.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    allowed = scaled
    if undrawn:
        allowed = scaled.index_fill(1, torch.tensor(undrawn, device=scaled.device), float("-inf"))
    if sampling.temperature == 0:
        token = allowed.argmax(dim=-1, keepdim=True)
    else:
        cuts = LogitsProcessorList()
        if 0 < sampling.top_k < scaled.shape[-1]:
            cuts.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            cuts.append(TopPLogitsWarper(sampling.top_p))
        cut: Any = cuts(None, allowed)
        # In float64, as the error of a float32 sum over 150,000 tokens exceeds the probability of rare tokens.
        mass = cut.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        total = mass[:, -1:]
        # Strictly below the total, so that the first entry above it is a token of non-zero probability.
        target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(mass, target, right=True)
    return token.squeeze(1), scaled.log_softmax(dim=-1).gather(1, token).squeeze(1)


_GROUPED = "sdpa_grouped"
"""The name of :func:`_grouped_sdpa` in transformers."""


def _grouped_sdpa(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa, but while decoding, the query heads that share a key head are passed as query positions.

    Given a mask, transformers copies the whole cache once per query head in every step, which takes a third of the time
    of a rollout on a CPU.
    """
    rows, heads, positions, width = query.shape
    if positions != 1:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return out, None
    shared = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    out = scaled_dot_product_attention(shared, key, value, attn_mask=attention_mask, scale=options.get("scaling"))
    return out.reshape(rows, 1, heads, width), None


AttentionInterface.register(_GROUPED, _grouped_sdpa)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)
