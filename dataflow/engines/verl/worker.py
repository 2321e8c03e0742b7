"""verl's TrainingWorker of a trained model, from a run's options: model, FSDP2 engine, optimizer."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from dataflow.engines.pretrained import add_mean
from dataflow.engines.verl.process import import_worker
from dataflow.engines.verl.state import HEADS

if TYPE_CHECKING:
    from verl.workers.engine_workers import TrainingWorker

_A_HEAD = rf"(?:.*\.)?(?:{'|'.join(HEADS)})"
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def build_worker(model: str, options: Any, total_steps: int, device: str, **settings: Any) -> TrainingWorker:
    """Returns a worker with its model loaded; see :func:`worker_config`."""
    worker = import_worker(device)(worker_config(model, options, total_steps, device, **settings))
    worker.reset()
    add_mean(worker.engine.module)
    for module in worker.engine.module.modules():
        if isinstance(module, torch.nn.Dropout):
            # The ratio to the old log-probs must be 1 before a step, and runs must repeat bit for bit.
            module.p = 0.0
    if _first_rate_is_zero(options, total_steps):
        worker.engine.lr_scheduler_step()
    return worker


def worker_config(
    model: str,
    options: Any,
    total_steps: int,
    device: str,
    *,
    seed: int = 0,
    valued: bool = False,
    offload: bool = False,
) -> Any:
    """Returns verl's ``TrainingWorkerConfig`` of a :class:`~dataflow.engines.verl.model.TrainedModel`.

    With ``offload`` weights are in CPU memory while idle, whatever the options say.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, HFModelConfig, TrainingWorkerConfig

    flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    lora, again = options.lora, options.gradient_checkpointing
    apart = lora.exclude_modules
    if valued:
        apart = f"(?:{apart})|{_A_HEAD}" if isinstance(apart, str) else [*(apart or ()), *HEADS]
    auto = "bfloat16" if device == "cuda" else "float32"
    compute = _SHORT[auto if options.dtype == "auto" else options.dtype]
    return TrainingWorkerConfig(
        model_type="value_model" if valued else "language_model",
        model_config=HFModelConfig(
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
        ),
        engine_config=FSDPEngineConfig(
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
        ),
        optimizer_config=_optimizer(options, total_steps),
        checkpoint_config=CheckpointConfig(),
    )


def _first_rate_is_zero(options: Any, total_steps: int) -> bool:
    """Whether the first step of verl's schedule, which begins at a rate of 0, is left out: it would have no effect."""
    return bool(options.warmup_in(total_steps))


def _optimizer(options: Any, total_steps: int) -> Any:
    from verl.workers.config import FSDPOptimizerConfig

    return FSDPOptimizerConfig(
        optimizer=options.optimizer,
        optimizer_impl=options.optimizer_impl,
        override_optimizer_config=dict(options.optimizer_kwargs) or None,
        lr=options.lr,
        betas=tuple(options.betas),
        weight_decay=options.weight_decay,
        clip_grad=options.grad_clip,
        lr_warmup_steps=options.warmup_in(total_steps),
        lr_scheduler_type=options.lr_scheduler,
        min_lr_ratio=options.min_lr_ratio,
        num_cycles=options.lr_cycles,
        total_training_steps=total_steps + _first_rate_is_zero(options, total_steps),
    )
