"""Extends vLLM's worker: it replaces weights, and reports log-probs as the trainer computes them.

vLLM mixes :class:`RolloutWorker` into its worker by name (``worker_extension_cls``), before it loads the model, and
calls it through ``collective_rpc``. Importing this imports vLLM, and registers :class:`FileTransfer` with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models import supports_multimodal

FILE = "dataflow_file"
"""The name of :class:`FileTransfer` among vLLM's backends."""


class RolloutWorker:
    """Mixed into vLLM's worker, on CPU and GPU; must not use names that exist there."""

    model_runner: Any
    reload_weights: Any

    def prepare_sampler(self, undrawn: Sequence[int] = ()) -> None:
        """Makes the sampler return log-probs at the sampling temperature, before the cuts of top_p, top_k and min_p.

        Of vLLM's own modes, ``raw_logprobs`` is at temperature 1 and ``processed_logprobs`` after the cuts. In the
        processed modes vLLM reports whatever ``Sampler.sample`` returns besides the tokens.

        Args:
            undrawn: tokens that are never drawn; a cut as the others are, so log-probs count them.

        Raises:
            RuntimeError: the sampler has another interface.
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
        """Updates a tied head after vLLM has reloaded weights by itself; see :func:`remake_head`."""
        remake_head(self.model_runner.get_model())

    def take_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads weights in place, by Hugging Face name, tied ones once and under the name of the embedding."""
        with torch.no_grad():
            self.reload_weights(weights_iterator=iter(weights))
        remake_head(self.model_runner.get_model())


@dataclass
class WeightsFile(WeightTransferUpdateInfo):
    """All weights, by Hugging Face name, tied ones once and under the name of the embedding."""

    path: str


class FileTransfer(WeightTransferEngine[WeightTransferInitInfo, WeightsFile]):
    """Loads weights from a safetensors file in place; vLLM's own transfers work only between GPUs."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightsFile

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Does nothing: there is nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Unlike the base class, does not synchronize the accelerator: on a CPU torch would raise.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightsFile) -> None:
        with torch.no_grad():
            self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        with torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
        remake_head(self.model)

    def shutdown(self) -> None:
        """Does nothing: there is nothing to free."""


WeightTransferEngineFactory.register_engine(FILE, FileTransfer)


def remake_head(model: Any) -> None:
    """Updates a tied head after its weights were loaded.

    On a CPU a layer computes with a packed copy of its weight, which vLLM repacks for each layer that it loads. It does
    not load a tied head, whose weight is the embedding's, so the head's packed copy would stay the old one.
    """
    # A model that takes images holds one of text.
    head = getattr(model.get_language_model() if supports_multimodal(model) else model, "lm_head", None)
    if head is not None and getattr(head, "cpu_linear", None) is not None:
        head.quant_method.process_weights_after_loading(head)


def uncut_log_probs(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Returns log-probs at each row's temperature, float32 ``[rows, vocabulary]``.

    Args:
        logits: float32 ``[rows, vocabulary]``, with penalties.
        temperature: ``[rows]``, below 1e-5 for greedy rows, whose log-probs are at 1; None if all are greedy.
    """
    if temperature is not None:
        logits = logits / torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
    return logits.log_softmax(dim=-1, dtype=torch.float32)
