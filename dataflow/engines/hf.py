"""Rollout with transformers: all rows of a batch generate together, with a KV cache, on CPU or one GPU.

A prompt is read once and its cache entries copied to its n samples; rows that have ended leave the batch once
half of it has. Each sample draws from random numbers of its own, fixed before the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils.logging import disable_progress_bar

from dataflow.batch import Batch
from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError, DataError, DataflowError, ModelError, nearest

_GROUPED = "sdpa_grouped"
_DTYPES = ("float32", "bfloat16", "float16")


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
        # A missing path would be taken for a hub id, and the hub asked about it for a minute.
        if (model.startswith(("/", ".", "~")) or model.count("/") > 1) and not Path(model).is_dir():
            raise ModelError(f"model directory '{model}' does not exist.")
        torch.set_num_threads(threads)
        disable_progress_bar()  # two lines of it would break the run's own
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model)
            self.model = AutoModelForCausalLM.from_pretrained(
                model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
            )
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"model '{model}' cannot be loaded: {reason}") from error
        self.model.to(device).eval().requires_grad_(False)
        config = self.model.config.get_text_config()
        if getattr(config, "num_key_value_heads", None) not in (None, config.num_attention_heads):
            self.model.set_attn_implementation(_GROUPED)
        self.max_prompt_length = max_prompt_length
        self.max_batch = max_batch
        self.device = torch.device(device)
        self.version = 0
        ends = self._ends()
        if not ends:
            raise ModelError(f"model '{model}' names no eos_token_id; set it in its generation_config.json.")
        self._eos = torch.tensor(ends, device=self.device)
        pad = self.tokenizer.pad_token_id
        self._pad: int = ends[0] if pad is None else pad

    def _ends(self) -> list[int]:
        """Returns the ids that end a response: the tokenizer's and those of the generation config."""
        ends = [self.tokenizer.eos_token_id]
        for config in (self.model.generation_config, self.model.config):
            ids = getattr(config, "eos_token_id", None)
            ends += ids if isinstance(ids, list) else [ids]
        return list(dict.fromkeys(int(end) for end in ends if end is not None))

    def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> Batch:
        """Samples responses; the columns are those of :meth:`RolloutEngine.generate`.

        A sample depends on (seed, group id, its index in the group) and the weights alone, up to rounding: a
        batch of another size may round a logit otherwise, by about 1e-6 in float32.

        Raises:
            DataError: a prompt is empty or longer than ``max_prompt_length``.
            DataflowError: a group with more than one prompt, or a sampling value out of range.
        """
        ids = [[int(token) for token in prompt] for prompt in prompts["prompt_ids"]]
        self._check(prompts, ids, sampling)
        n, wide, long = sampling.n, max(map(len, ids)), sampling.max_tokens
        rows = len(ids) * n
        uniforms = torch.from_numpy(_uniforms(prompts.groups, n, long, seed))
        owner = torch.arange(len(ids)).repeat_interleave(n)
        responses = torch.full((rows, long), self._pad, dtype=torch.int64)
        response_mask = torch.zeros((rows, long), dtype=torch.int64)
        log_probs = torch.zeros((rows, long), dtype=torch.float32)
        for start in range(0, rows, self.max_batch):
            chunk = slice(start, start + self.max_batch)
            tokens, mask, scores = self._sample(ids, owner[chunk], uniforms[chunk], sampling)
            responses[chunk] = torch.where(mask, tokens, self._pad)
            response_mask[chunk] = mask.long()
            log_probs[chunk] = torch.where(mask, scores, 0.0)

        padded, prompt_mask = self._left_pad(ids, wide)
        padded, prompt_mask = padded[owner], prompt_mask[owner]
        attention = torch.cat([prompt_mask, response_mask], dim=1)
        lengths = response_mask.sum(dim=1).tolist()
        texts = self.tokenizer.batch_decode(
            [row[:length] for row, length in zip(responses.tolist(), lengths, strict=True)],
            skip_special_tokens=True,
        )
        repeated = prompts.repeat(n)
        carried = {name: column for name, column in repeated.columns.items() if name != "prompt_ids"}
        return Batch(
            repeated.groups,
            carried
            | {
                "prompts": padded,
                "responses": responses,
                "input_ids": torch.cat([padded, responses], dim=1),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
                "response_mask": response_mask,
                "rollout_log_probs": log_probs,
                "response_text": texts,
            },
            {**prompts.meta, "weights_version": self.version},
        )

    def _check(self, prompts: Batch, ids: Sequence[Sequence[int]], sampling: Sampling) -> None:
        if not ids:
            raise DataflowError("rollout: the batch holds no prompt.")
        if len(prompts.ids) != len(ids):
            raise DataflowError(f"rollout: {len(ids)} prompts in {len(prompts.ids)} groups; give one prompt a group.")
        if sampling.n < 1 or sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise ConfigError(
                f"rollout: {sampling} is out of range (n, max_tokens >= 1; temperature >= 0; 0 < top_p <= 1)."
            )
        for group, prompt in zip(prompts.ids, ids, strict=True):
            if not prompt:
                raise DataError(f"rollout: the prompt of group {group} is empty.")
            if len(prompt) > self.max_prompt_length:
                raise DataError(
                    f"rollout: the prompt of group {group} has {len(prompt)} tokens, more than "
                    f"max_prompt_length={self.max_prompt_length}; raise it or set data.truncation."
                )

    def _left_pad(self, ids: Sequence[Sequence[int]], wide: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns token ids and mask, int64 ``[len(ids), wide]``."""
        tokens = torch.full((len(ids), wide), self._pad, dtype=torch.int64)
        mask = torch.zeros((len(ids), wide), dtype=torch.int64)
        for row, prompt in enumerate(ids):
            tokens[row, wide - len(prompt) :] = torch.tensor(prompt)
            mask[row, wide - len(prompt) :] = 1
        return tokens, mask

    @torch.inference_mode()
    def _sample(
        self, ids: Sequence[Sequence[int]], owner: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Generates one chunk.

        Args:
            ids: all prompts.
            owner: the prompt of each row, ascending, ``[rows]``.
            uniforms: float64 ``[rows, R]``.

        Returns:
            Tokens int64, mask bool and log-probs float32, each ``[rows, R]`` on CPU; what the mask leaves out
            is rubbish.
        """
        first, last = int(owner[0]), int(owner[-1])
        chunk = ids[first : last + 1]
        tokens, mask = self._left_pad(chunk, max(map(len, chunk)))
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(tokens, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), cache)
        pick = (owner - first).to(self.device)
        cache.batch_select_indices(pick)
        logits, mask = logits[pick], mask[pick]
        place = mask.sum(dim=1)

        shape = uniforms.shape
        uniforms = uniforms.to(self.device)
        drawn = torch.zeros(shape, dtype=torch.int64, device=self.device)
        kept = torch.zeros(shape, dtype=torch.bool, device=self.device)
        scores = torch.zeros(shape, dtype=torch.float32, device=self.device)
        row = torch.arange(shape[0], device=self.device)  # which row each place of the batch belongs to
        live = torch.ones_like(row, dtype=torch.bool)
        for t in range(shape[1]):
            token, score = _draw(logits, uniforms[row, t], sampling)
            drawn[row, t], kept[row, t], scores[row, t] = token, live, score
            live = live & ~torch.isin(token, self._eos)
            left = int(live.sum())
            if not left or t + 1 == shape[1]:
                break
            if 2 * left <= len(live):
                pick = live.nonzero().squeeze(1)
                cache.batch_select_indices(pick)
                row, token, mask, place, live = row[pick], token[pick], mask[pick], place[pick], live[pick]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = self._forward(token[:, None], mask, (place + t)[:, None], cache)
        return drawn.cpu(), kept.cpu(), scores.cpu()

    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, place: torch.Tensor, cache: Any) -> torch.Tensor:
        """Returns the logits of the last position, ``[rows, vocabulary]``; the cache grows."""
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=place,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copies new weights into the model, by Hugging Face name; a tied ``lm_head.weight`` may be left out.

        Either all weights are taken over or, on an error, none.

        Raises:
            DataflowError: an unknown or missing name, another shape, or two tied weights that differ.
        """
        own: dict[str, torch.Tensor] = self.model.state_dict()
        given: dict[int, str] = {}  # storage of this model -> the name that fills it
        for name, value in weights.items():
            if name not in own:
                raise DataflowError(
                    f"weight sync {version}: the model has no weight '{name}'{nearest(name, own) or '.'}"
                )
            if own[name].shape != value.shape:
                raise DataflowError(
                    f"weight sync {version}: '{name}' has shape {tuple(value.shape)}, "
                    f"the model wants {tuple(own[name].shape)}."
                )
            twin = given.setdefault(own[name].data_ptr(), name)
            if twin != name and not torch.equal(weights[twin], value):
                raise DataflowError(f"weight sync {version}: '{twin}' and '{name}' are tied but differ.")
        missing = [name for name, weight in own.items() if weight.data_ptr() not in given]
        if missing:
            raise DataflowError(f"weight sync {version}: {len(missing)} weights are missing, first '{missing[0]}'.")
        with torch.no_grad():
            for name in given.values():
                own[name].copy_(weights[name])
        self.version = version


def _grouped_sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa, but in decoding the query heads that share a key head stand in for positions.

    With a mask, transformers copies the whole cache once for each head that shares it, in every step: a third
    of the time of a rollout on CPU.
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


def _uniforms(groups: np.ndarray, n: int, long: int, seed: int) -> np.ndarray:
    """Returns the numbers in [0, 1) that decide each token, float64 ``[groups x n, long]``.

    Row (g, i) is a stream of (seed, g, i): its t-th number depends on nothing else, not even on ``long``.
    """
    return np.stack(
        [
            np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**64, int(group), i]))).random(long)
            for group in groups
            for i in range(n)
        ]
    )


def _draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a token for each row, by inverting the distribution function, and its log-prob before cuts."""
    logits = logits.float()
    if sampling.temperature == 0:
        token = logits.argmax(dim=-1)
        return token, logits.log_softmax(dim=-1).gather(1, token[:, None]).squeeze(1)
    scaled = logits / sampling.temperature
    cut: Any = scaled
    if 0 < sampling.top_k < scaled.shape[-1]:
        cut = TopKLogitsWarper(sampling.top_k)(None, cut)
    if sampling.top_p < 1:
        cut = TopPLogitsWarper(sampling.top_p)(None, cut)
    # In float64: a float32 sum over 150,000 tokens would be off by more than a rare token's share.
    mass = cut.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = mass[:, -1:]
    # Strictly below the total, so that the first entry above it is a token with a share.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(mass, target, right=True)
    return token.squeeze(1), scaled.log_softmax(dim=-1).gather(1, token).squeeze(1)
