"""Extends vLLM's worker: it reports log-probs as the trainer computes them, and new weights reach a tied head.

vLLM mixes :class:`RolloutWorker` into its worker by name (``worker_extension_cls``), before it loads the model, and
calls it through ``collective_rpc``. Importing this imports vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.models import supports_multimodal

from dataflow.engines.vllm.images import MODEL, register

if model := os.environ.get(MODEL):  # set by the engine that has started this process
    from transformers import AutoConfig

    register(AutoConfig.from_pretrained(model))


class RolloutWorker:
    """Mixed into vLLM's worker, on CPU and GPU; must not use names that exist there."""

    model_runner: Any

    def prepare_sampler(self, undrawn: Sequence[int] = ()) -> None:
        """Makes the sampler return log-probs at the sampling temperature, before the cuts of top_p and top_k.

        Of vLLM's own modes, ``raw_logprobs`` is at temperature 1 and ``processed_logprobs`` after the cuts. In the
        processed modes vLLM reports whatever ``Sampler.sample`` returns besides the tokens. ``undrawn`` tokens are
        never drawn; they are a cut as the others are, so log-probs count them.
        """
        sampler = self.model_runner.sampler
        # The sampler of vLLM's second model runner, for one, has another `sample`.
        if type(sampler).__module__ != "vllm.v1.sample.sampler" or sampler.logprobs_mode != "processed_logits":
            raise RuntimeError(f"{type(sampler)} in mode {sampler.logprobs_mode} cannot report log-probs before cuts.")
        sample = sampler.sample
        if getattr(sample, "uncut", False):  # another run of the same server has prepared it
            return

        def report(logits: torch.Tensor, metadata: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, Any]:
            # First, as sampling changes the logits in place.
            wanted = metadata.max_num_logprobs is not None
            log_probs = uncut_log_probs(logits, metadata.temperature) if wanted else None
            logits[:, list(undrawn)] = float("-inf")
            return sample(logits, metadata, *args, **options)[0], log_probs

        report.uncut = True  # type: ignore[attr-defined]
        sampler.sample = report

    def shape_of_model(self, *names: str) -> dict[str, Any]:
        """Returns these entries of the model's configuration; vLLM cannot load weights again after it refused some."""
        config = self.model_runner.model_config.hf_config
        return {name: getattr(config, name, None) for name in names}

    def refresh_head(self) -> None:
        """Updates a tied head after vLLM has reloaded weights.

        On a CPU a layer computes with a packed copy of its weight, which vLLM repacks for each layer that it loads. It
        does not load a tied head, whose weight is the embedding's, so the head's packed copy would stay the old one.
        """
        model = self.model_runner.get_model()
        # A model that takes images holds one of text.
        head = getattr(model.get_language_model() if supports_multimodal(model) else model, "lm_head", None)
        if head is not None and getattr(head, "cpu_linear", None) is not None:
            head.quant_method.process_weights_after_loading(head)


def uncut_log_probs(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Returns log-probs at each row's temperature, float32 ``[rows, vocabulary]``.

    Greedy rows, whose temperature is below 1e-5, get those at 1; None means that all rows are greedy.
    """
    if temperature is not None:
        logits = logits / torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
    return logits.log_softmax(dim=-1, dtype=torch.float32)
