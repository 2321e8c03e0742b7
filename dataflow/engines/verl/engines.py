"""What verl's engines lack, as engines of verl's registry: log-probs on CPUs, and values with any attention.

Importing this module registers them; verl's platform must be set before (:mod:`dataflow.engines.verl.cpu`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nested import nested_tensor_from_jagged
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_vendor
from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from dataflow.engines.verl.state import HEADS


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuEngine(FSDPEngineWithLMHead):
    """verl's engine, which without its GPU kernel would call logsumexp for each token."""

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Returns ``log_probs``, and if asked for ``entropy`` and ``sum_pi_squared``, jagged as ``input_ids``."""
        offsets = micro_batch["input_ids"].offsets()
        inside = torch.arange(output.logits.shape[1]) < offsets.diff()[:, None]
        every = torch.log_softmax(output.logits[inside].float() / micro_batch["temperature"], dim=-1)
        drawn = output_args["input_ids_rmpad_rolled"]  # after each token
        found = {"log_probs": every.gather(1, drawn[:, None]).squeeze(1)}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False):
            found["entropy"] = -(every.exp() * every).sum(dim=-1)
        if tu.get_non_tensor_data(micro_batch, "calculate_sum_pi_squared", default=False):
            found["sum_pi_squared"] = calculate_sum_pi_squared_from_logits(every)
        return {name: nested_tensor_from_jagged(values, offsets) for name, values in found.items()}


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device=get_device_name(), vendor=get_vendor())
class ValueEngine(FSDPEngineWithValueHead):
    """A causal LM's body with a new head of one number per token.

    verl's own engine loads it with flash attention, whatever its options, and needs trl if that is missing. This one is
    loaded as a language model, with the attention that the options name.
    """

    def __init__(self, model_config: Any, **options: Any) -> None:
        config = model_config.hf_config
        config.architectures = [config.architectures[0].replace("ForCausalLM", "ForTokenClassification")]
        config.num_labels, config.classifier_dropout = 1, 0.0  # transformers would take 0.1
        model_config.model_type = "language_model"
        super().__init__(model_config=model_config, **options)

    def initialize(self) -> None:
        """Builds the model and its optimizer."""
        super().initialize()
        for name, module in self.module.named_modules():
            if name.rpartition(".")[2] == "score":
                # It returns a view, at which FSDP2 warns that nobody must write into it.
                module.register_forward_hook(lambda _head, _inputs, output: output.clone())

    def _build_lora_module(self, module: Any) -> Any:
        """Returns the model with adapters; its new head is trained as a whole beside them."""
        if not hasattr(module, "prepare_inputs_for_generation"):
            module.prepare_inputs_for_generation = None  # peft keeps it, and verl calls it a causal LM
        module = super()._build_lora_module(module)
        for name in HEADS:
            if (head := getattr(module.get_base_model(), name, None)) is not None:
                head.requires_grad_(True)
        return module
