"""The engine of a value model for verl's worker: a causal LM's body with a new head of one number per token.

verl's own engine loads the model with flash attention, whatever its options, and needs trl if that is missing. This one
loads it as verl loads a language model, with the attention that the options name, on any device.
"""

from __future__ import annotations

from typing import Any

from dataflow.errors import ConfigError

HEADS = ("score", "classifier")
"""Names of the layer that computes the values, in transformers' models."""


def register() -> None:
    """Registers the engine for this process's device; call it once verl's engines can be imported."""
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
                module = super()._build_module()
            except ValueError as error:
                raise ConfigError(
                    f"critic: transformers makes no value model of {self.model_config.local_path} "
                    f"({type(config).__name__}); give critic.path a model such as Qwen, Llama or Mistral."
                ) from error
            finally:
                self.model_config.model_type = kind
            if (head := getattr(module, "score", None)) is not None:
                # It returns a view, at which FSDP2 warns that nobody must write into it.
                head.register_forward_hook(lambda _head, _inputs, output: output.clone())
            return module

        def _build_lora_module(self, module: Any) -> Any:
            """Returns the model with adapters; its new head is trained as a whole beside them."""
            if not hasattr(module, "prepare_inputs_for_generation"):
                module.prepare_inputs_for_generation = None  # peft keeps it, and verl calls it a causal LM
            module = super()._build_lora_module(module)
            for name in HEADS:
                if (head := getattr(module.get_base_model(), name, None)) is not None:
                    head.requires_grad_(True)
            return module

    return ValueEngine
