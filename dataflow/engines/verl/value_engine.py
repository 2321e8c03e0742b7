"""The engine of a value model for verl's worker: a causal LM's body with a new head of one number per token.

verl's own engine loads the model with flash attention, whatever its options, and needs trl if that is missing. This one
loads it as verl loads a language model, with the attention that the options name, on any device.
"""

from __future__ import annotations

import warnings
from typing import Any


def register() -> None:
    """Registers the engine for this process's device; call it once verl's engines can be imported."""
    # Its output is a view, which neither verl nor this package writes into.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine import EngineRegistry

    device, vendor = get_device_name(), get_vendor()
    backends = EngineRegistry._engines["value_model"]
    if (device, vendor) not in backends["fsdp2"]:
        EngineRegistry.register(model_type="value_model", backend="fsdp2", device=device, vendor=vendor)(_engine())


def _engine() -> type:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

    class ValueEngine(FSDPEngineWithValueHead):
        def _build_module(self) -> Any:
            """Returns the model for token classification with one label, which is the value."""
            kind, config = self.model_config.model_type, self.model_config.hf_config
            config.architectures = [config.architectures[0].replace("ForCausalLM", "ForTokenClassification")]
            config.num_labels, config.classifier_dropout = 1, 0.0  # transformers would take 0.1
            self.model_config.model_type = "language_model"  # verl's branch that keeps attn_implementation
            try:
                return super()._build_module()
            finally:
                self.model_config.model_type = kind

    return ValueEngine
