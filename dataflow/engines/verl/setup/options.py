"""A run's options of a trained model as verl's configurations: model, FSDP2 engine, optimizer."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any, Literal

from dataflow.engines.verl.setup.value_engine import HEADS
from dataflow.errors import ConfigError

Kind = Literal["language_model", "value_model"]
_FUSED = ("Adam", "AdamW")
"""torch's optimizers that have one kernel per weight on CPUs, also for DTensors."""
_A_HEAD = rf"(?:.*\.)?(?:{'|'.join(HEADS)})"
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def worker_config(
    model: str, kind: Kind, options: Any, total_steps: int, seed: int, device: str, offload: bool = False
) -> Any:
    """Returns verl's ``TrainingWorkerConfig`` of a trained model.

    Args:
        model: directory of the initial weights.
        kind: which of verl's engines computes with it.
        options: a :class:`~dataflow.config.training.trained.TrainedConfig`.
        total_steps: training steps of the run.
        seed: of everything random.
        device: "cpu" or "cuda".
        offload: whether weights are in CPU memory while idle, whatever the options say.

    Raises:
        ConfigError: an option needs GPUs, or the optimizer is not there or takes no such argument.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import TrainingWorkerConfig

    options.check_device(device)
    flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return TrainingWorkerConfig(
        model_type=kind,
        model_config=_model(model, kind, options, device, flash),
        engine_config=_engine(options, seed, device, flash, offload),
        optimizer_config=_optimizer(options, total_steps, device),
        checkpoint_config=CheckpointConfig(),
    )


def _model(model: str, kind: Kind, options: Any, device: str, flash: bool) -> Any:
    from verl.workers.config import HFModelConfig

    lora, again = options.lora, options.gradient_checkpointing
    apart = lora.exclude_modules
    if kind == "value_model":  # whose new head is trained as a whole
        apart = f"(?:{apart})|{_A_HEAD}" if isinstance(apart, str) else [*(apart or ()), *HEADS]
    return HFModelConfig(
        path=model,
        load_tokenizer=False,
        use_remove_padding=flash,
        enable_gradient_checkpointing=device == "cuda" if again is None else again,
        enable_activation_offload=options.activation_offload,
        lora_rank=lora.rank or 0,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules,
        exclude_modules=apart,
        lora_adapter_path=lora.adapter,
        override_config={
            "attn_implementation": "flash_attention_2" if flash else "sdpa",
            "attention_dropout": 0.0,
        },
    )


def _engine(options: Any, seed: int, device: str, flash: bool, offload: bool) -> Any:
    from verl.workers.config import FSDPEngineConfig

    auto = "bfloat16" if device == "cuda" else "float32"
    compute = _SHORT[auto if options.dtype == "auto" else options.dtype]
    return FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype=_SHORT[options.model_dtype],
        mixed_precision={"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        param_offload=options.param_offload or offload,
        optimizer_offload=options.optimizer_offload,
        fsdp_size=options.fsdp_size or -1,
        reshard_after_forward=options.reshard_after_forward,
        forward_prefetch=options.forward_prefetch,
        use_torch_compile=False,
        use_remove_padding=flash,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=options.micro_batch_size,
        infer_micro_batch_size_per_gpu=options.micro_batch_size,
        seed=seed,
    )


def _optimizer(options: Any, total_steps: int, device: str) -> Any:
    from verl.workers.config import FSDPOptimizerConfig

    more = dict(options.optimizer_kwargs)
    check_optimizer(options)
    if device == "cpu" and options.in_torch and options.optimizer in _FUSED and not {"fused", "foreach"} & set(more):
        # One kernel per weight: plain AdamW over DTensors is a tenth of a small model's update.
        more["fused"] = True
    warmup = options.warmup_in(total_steps)
    return FSDPOptimizerConfig(
        **_of_class(options, more),
        clip_grad=options.grad_clip,
        lr_warmup_steps=warmup,
        lr_scheduler_type=options.lr_scheduler,
        min_lr_ratio=options.min_lr_ratio,
        num_cycles=options.lr_cycles,
        total_training_steps=total_steps + skipped(warmup),
    )


def skipped(warmup: int) -> int:
    """Returns how many steps of verl's schedule a run leaves out at its beginning.

    verl's warm-up begins at a learning rate of zero, so that the first step would have no effect.
    """
    return 1 if warmup else 0


def check_optimizer(options: Any) -> None:
    """Checks that the optimizer exists and takes its arguments.

    Args:
        options: a :class:`~dataflow.config.training.trained.TrainedConfig`.

    Raises:
        ConfigError: its module cannot be imported, has no such class, or the class does not take its arguments.
    """
    name, key = options.optimizer, f"{options.section}.optimizer"
    kind = _optimizer_class(options)
    try:
        known = inspect.signature(kind).parameters
    except (TypeError, ValueError) as error:  # a class of C's
        raise ConfigError(f"{key}={name}: its arguments cannot be read ({error}); give another.") from error
    taken = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    strange = [each for each in options.optimizer_kwargs if each not in known and not taken]
    if strange or "lr" in options.optimizer_kwargs:
        given = strange[0] if strange else "lr"
        why = f"{name} has no such argument; it has {', '.join(list(known)[1:])}" if strange else f"give {key[:-9]}lr"
        raise ConfigError(f"{key}_kwargs.{given}: {why}.")
    _check_built(options, key)


def _optimizer_class(options: Any) -> type:
    import torch

    name, key = options.optimizer, f"{options.section}.optimizer"
    try:
        module = importlib.import_module(options.optimizer_impl)
    except (ImportError, TypeError, ValueError) as error:  # the last two of a name such as ".torch"
        raise ConfigError(
            f"{key}_impl={options.optimizer_impl} cannot be imported ({error}); install its package, or leave it out."
        ) from error
    kind = getattr(module, name, None)
    if not inspect.isclass(kind):
        there = sorted(each for each, of in vars(module).items() if inspect.isclass(of) and not each.startswith("_"))
        raise ConfigError(f"{key}={name}: {options.optimizer_impl} has no such class; it has {', '.join(there)}.")
    if not issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(f"{key}={name}: this class of {options.optimizer_impl} is no optimizer of torch; give one.")
    return kind


def _of_class(options: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that the class of an optimizer takes, by verl's names."""
    return {
        "optimizer": options.optimizer,
        "optimizer_impl": options.optimizer_impl,
        "override_optimizer_config": arguments or None,
        "lr": options.lr,
        "betas": tuple(options.betas),
        "weight_decay": options.weight_decay,
    }


def _check_built(options: Any, key: str) -> None:
    """Builds the optimizer of one weight, as verl does: only the class knows which values it takes."""
    import torch
    from verl.workers.config import FSDPOptimizerConfig
    from verl.workers.config.optimizer import build_optimizer

    arguments = dict(options.optimizer_kwargs)
    settings = FSDPOptimizerConfig(**_of_class(options, arguments))
    try:
        build_optimizer([torch.nn.Parameter(torch.zeros(1))], settings)
    except Exception as error:
        given = f"{key}_kwargs={arguments}" if arguments else f"{key}={options.optimizer}"
        why = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{given}: {options.optimizer} does not take this ({type(error).__name__}: {why}); correct it."
        ) from error
