"""VerlTrainer: the actor trained by verl's TrainingWorker with FSDP2, on CPU and CUDA, one object per rank.

Every rank makes the same calls with the same whole batch and computes its share of the rows:

    rows 0..n ── divided evenly into world x micro-batches pieces ──▶ rank r takes consecutive pieces
             ◀── log-probs are gathered, so that each rank returns all rows; metrics are averaged over ranks

All micro-batches have the same size, as verl requires. If the rows do not divide evenly, a piece is padded with a row
whose response mask is empty: it contributes nothing to loss and gradient, and its log-probs are dropped. An update
first removes rows with an empty mask, so that means over sequences, micro-batches and metrics only contain rows that
train.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from dataflow.batch import Batch
from dataflow.engines.verl.export import write_model
from dataflow.engines.verl.loss import loss_of
from dataflow.engines.verl.process import import_worker, join, quiet
from dataflow.engines.verl.state import TrainerState
from dataflow.errors import ConfigError, DataflowError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.engine_workers import TrainingWorker

INPUTS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")


class VerlTrainer:
    """Trains the actor; implements the Trainer Protocol. RANK, WORLD_SIZE, ... come from the environment.

    Args:
        model: directory or Hugging Face id of a causal LM.
        trainer: the options of section ``trainer``: micro_batch_size (rows per rank), lr, betas,
            weight_decay, warmup_steps, grad_clip, threads.
        algorithm: the options of section ``algorithm``: the clip ratios, loss_agg_mode, the KL loss,
            entropy_coeff, rollout_is and its threshold.
        total_steps: training steps of the run.
        response_length: longest response, in tokens; what ``seq-mean-token-sum-norm`` divides by.
        temperature: of the rollout; log-probs are those of the logits divided by it.
        seed: of everything random.
        device: "cpu" (gloo, fp32) or "cuda" (nccl, bf16 with fp32 weights).
        reference: whether to hold the frozen initial weights as well, for ``ref_log_probs``.
        shares_gpu: whether another service uses the GPU while this one is idle; torch's cached memory is freed then.

    Raises:
        ConfigError: training is not possible with an option.
    """

    def __init__(
        self,
        model: str,
        trainer: Any,
        algorithm: Any,
        total_steps: int,
        response_length: int,
        temperature: float = 1.0,
        seed: int = 0,
        device: str = "cpu",
        reference: bool = False,
        shares_gpu: bool = False,
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"trainer: device '{device}' is neither 'cpu' nor 'cuda'.")
        if temperature <= 0:
            raise ConfigError(f"engine.temperature={temperature}: training divides by it; give more than 0.")
        if algorithm.use_kl_loss and not reference:
            raise ConfigError("algorithm.use_kl_loss needs the reference: build the trainer with reference=True.")
        self.algorithm, self.temperature = algorithm, temperature
        self.micro_batch_size = trainer.micro_batch_size
        self._shares_gpu = shares_gpu
        torch.set_num_threads(trainer.threads)
        with quiet():
            worker_type = import_worker(device)
            self._joined = join(device)
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            torch.manual_seed(seed)
            build = functools.partial(_build, worker_type, model, trainer, total_steps, seed, device)
            self.worker = build()
            # A second copy of the weights, which is never trained.
            self.reference = build(offload=device == "cuda") if reference else None
            # verl's warm-up begins at a learning rate of zero, so that the first step would have no effect.
            self.worker.engine.lr_scheduler_step()
        self.worker.set_loss_fn(loss_of(trainer, algorithm, response_length))
        self._model = model
        self._state = TrainerState(self.worker.engine, model)

    def old_log_probs(self, batch: Batch) -> Batch:
        """Returns ``old_log_probs`` and ``entropy`` of the current weights, float32 ``[rows, R]``."""
        columns = self._infer(self.worker, batch, entropy=True)
        return batch.like(old_log_probs=columns["log_probs"], entropy=columns["entropy"])

    def ref_log_probs(self, batch: Batch) -> Batch:
        """Returns ``ref_log_prob``, float32 ``[rows, R]``, of the frozen initial weights.

        Raises:
            ConfigError: the trainer was built without the reference.
        """
        if self.reference is None:
            raise ConfigError("ref_log_probs needs the reference: build the trainer with reference=True.")
        return batch.like(ref_log_prob=self._infer(self.reference, batch)["log_probs"])

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        """Takes one optimizer step on all rows that have a token to train on.

        If none has, no step is taken: weights and optimizer stay bit for bit, and only the LR scheduler may step.

        Args:
            batch: columns of the responses, ``old_log_probs``, ``advantages``; ``ref_log_prob`` for the KL
                loss; ``rollout_log_probs`` for the correction; ``entropy`` (optional) is only reported.
            last: whether it is the last one of the training step, after which the LR scheduler steps.

        Returns:
            verl's metrics, the same on every rank; ``actor/lr`` is the learning rate of this step. If no step was
            taken, only this rate and ``actor/skipped_updates``, which is 1.
        """
        from verl.trainer.ppo.core_algos import agg_loss
        from verl.utils import tensordict_utils as tu

        trains = batch["response_mask"].any(dim=1).numpy()
        if len(batch) and not trains.any():
            return self._skip(last)
        if not trains.all():
            batch = batch.rows(np.flatnonzero(trains))
        columns = {name: batch[name] for name in (*INPUTS, "old_log_probs", "advantages")}
        if self.algorithm.use_kl_loss:
            columns["ref_log_prob"] = batch["ref_log_prob"]
        metrics: dict[str, float] = {"actor/lr": self.worker.engine.optimizer.param_groups[0]["lr"]}
        if self.algorithm.rollout_is is not None:
            columns["rollout_is_weights"] = self._correction(batch, metrics)
        share = self._share(columns, self._slots(len(batch)))
        tu.assign_non_tensor(
            share,
            calculate_entropy=self.algorithm.entropy_coeff != 0 or "entropy" not in batch,
            update_lr_scheduler=last,
        )
        with self._left_free():
            found = tu.get(self.worker.train_batch(share), "metrics")
        found.pop("lr", None)  # that of the next step, present only if the scheduler stepped
        metrics |= _reduce(found)
        if "entropy" in batch:
            metrics["actor/entropy"] = agg_loss(
                loss_mat=batch["entropy"],
                loss_mask=batch["response_mask"],
                loss_agg_mode=self.algorithm.loss_agg_mode,
            ).item()
        else:
            metrics["actor/entropy"] = metrics["actor/entropy_loss"]
        return metrics

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns copies of all weights on CPU, by Hugging Face name, tied ones once; all ranks must call.

        Only the first rank returns them, the others {}: otherwise a machine would hold one copy per rank.
        """
        engine = self.worker.engine
        # A tied weight is one parameter with two names; the first is the embedding's.
        every = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in engine.module.named_parameters()}
        named, _ = engine.get_per_tensor_param()
        found = {}
        with self._left_free():
            for name, tensor in named:  # each is gathered here, by all ranks together
                if name not in tied and self.rank == 0:
                    found[name] = tensor.detach().to("cpu", copy=True)
        return found

    def digest(self) -> str:
        """Returns the SHA-256 of the weights (names, dtypes, shapes, bytes) on every rank; all ranks must call."""
        weights = self.weights()
        found = [digest(weights) if self.rank == 0 else ""]
        if self.world > 1:
            dist.broadcast_object_list(found, src=0)
        return str(found[0])

    async def snapshot(self, wait: bool) -> bool:
        """See :meth:`dataflow.engines.base.Trainer.snapshot`."""
        return await self._state.snapshot(wait)

    async def write(self, directory: str) -> None:
        """See :meth:`dataflow.engines.base.Trainer.write`."""
        await self._state.write(directory)

    async def settle(self) -> None:
        """See :meth:`dataflow.engines.base.Trainer.settle`."""
        await self._state.settle()

    def load(self, directory: str) -> None:
        """See :meth:`dataflow.engines.base.Trainer.load`."""
        self._state.load(directory)

    def export(self, directory: str, card: str) -> None:
        """Writes the weights as a Hugging Face directory, replacing one that exists; all ranks must call."""
        weights = self.weights()
        if self.rank == 0:
            write_model(weights, self._model, Path(directory), card, replace=True)

    def close(self) -> None:
        """Leaves the process group, if this object joined it. No call is possible afterwards."""
        if self._joined:
            dist.destroy_process_group()
            self._joined = False

    @contextlib.contextmanager
    def _left_free(self) -> Iterator[None]:
        """Frees torch's cached GPU memory at the end, if the GPU is shared with another service."""
        yield
        if self._shares_gpu:
            torch.cuda.empty_cache()

    def _skip(self, last: bool) -> dict[str, float]:
        """Skips the optimizer step. All ranks do, or none, as each holds the whole batch."""
        metrics = {"actor/lr": self.worker.engine.optimizer.param_groups[0]["lr"], "actor/skipped_updates": 1.0}
        if last:
            self.worker.engine.lr_scheduler_step()
        return metrics

    def _infer(self, worker: TrainingWorker, batch: Batch, entropy: bool = False) -> dict[str, torch.Tensor]:
        """Returns ``log_probs`` (and ``entropy``) of all rows, on every rank, float32 ``[rows, R]``."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        slots = self._slots(len(batch))
        share = self._share({name: batch[name] for name in INPUTS}, slots)
        tu.assign_non_tensor(share, compute_loss=False, calculate_entropy=entropy)
        with self._left_free():
            output = worker.infer_batch(share)
        mask = batch["response_mask"]
        columns = {}
        for name in ("log_probs", "entropy") if entropy else ("log_probs",):
            mine = no_padding_2_padding(tu.get(output, name), share).float()
            whole = self._gather(mine, slots)
            columns[name] = whole.masked_fill(mask == 0, 0.0)
        return columns

    def _slots(self, rows: int) -> np.ndarray:
        """Returns the row in each place of each micro-batch, -1 for padding, ``[world x micro-batches, size]``."""
        if rows < 1:
            raise DataflowError("trainer: a batch without rows can be neither scored nor trained on.")
        pieces = self.world * math.ceil(rows / (self.world * self.micro_batch_size))
        slots = np.full((pieces, math.ceil(rows / pieces)), -1)
        for slot, piece in zip(slots, np.array_split(np.arange(rows), pieces), strict=True):
            slot[: len(piece)] = piece
        return slots

    def _share(self, columns: Mapping[str, torch.Tensor], slots: np.ndarray) -> TensorDict:
        """Returns this rank's rows in the form of verl's engine: jagged, without padding."""
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import left_right_2_no_padding

        mine = torch.from_numpy(slots.reshape(self.world, -1)[self.rank])
        share = TensorDict(
            {name: column[mine.clamp(min=0)] for name, column in columns.items()}, batch_size=[len(mine)]
        )
        share["response_mask"][mine < 0] = 0
        share = left_right_2_no_padding(share)
        tu.assign_non_tensor(
            share,
            temperature=self.temperature,
            micro_batch_size_per_gpu=slots.shape[1],
            global_batch_size=int((slots >= 0).sum()),
        )
        return share

    def _gather(self, mine: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Returns the rows of all ranks in the batch's order, without the rows that pad pieces."""
        parts = [mine]
        if self.world > 1:
            parts = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(parts, mine.contiguous())
        flat = torch.from_numpy(slots.reshape(-1))
        order = flat[flat >= 0]
        whole = mine.new_empty((len(order), mine.shape[1]))
        whole[order] = torch.cat(parts)[flat >= 0]
        return whole

    def _correction(self, batch: Batch, metrics: dict[str, float]) -> torch.Tensor:
        """Returns verl's importance weights of the rollout, float32 ``[rows, R]``, and adds its metrics."""
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

        weights, _, found = compute_rollout_correction_and_rejection_mask(
            old_log_prob=batch["old_log_probs"],
            rollout_log_prob=batch["rollout_log_probs"],
            response_mask=batch["response_mask"],
            rollout_is=self.algorithm.rollout_is,
            rollout_is_threshold=self.algorithm.rollout_is_threshold,
        )
        metrics.update({name: float(value) for name, value in found.items()})
        return weights.batch["rollout_is_weights"]


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 over names in order, dtypes, shapes and raw bytes, in hexadecimal."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _build(
    worker_type: type[TrainingWorker],
    model: str,
    options: Any,
    total_steps: int,
    seed: int,
    device: str,
    offload: bool = False,
) -> TrainingWorker:
    """Returns a worker with its model loaded; ``offload`` keeps the weights in CPU memory when idle."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    cuda = device == "cuda"
    flash = cuda and importlib.util.find_spec("flash_attn") is not None
    compute = "bf16" if cuda else "fp32"
    worker = worker_type(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=model,
                load_tokenizer=False,
                use_remove_padding=flash,
                enable_gradient_checkpointing=cuda,
                override_config={
                    "attn_implementation": "flash_attention_2" if flash else "sdpa",
                    "attention_dropout": 0.0,
                },
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                model_dtype="fp32",
                mixed_precision={"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                param_offload=offload,
                use_torch_compile=False,
                use_remove_padding=flash,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=options.micro_batch_size,
                infer_micro_batch_size_per_gpu=options.micro_batch_size,
                seed=seed,
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=options.lr,
                betas=tuple(options.betas),
                weight_decay=options.weight_decay,
                clip_grad=options.grad_clip,
                lr_warmup_steps=options.warmup_steps,
                lr_scheduler_type="constant",
                total_training_steps=total_steps,
                # One kernel per weight: plain AdamW over DTensors is a tenth of a small model's update.
                override_optimizer_config=None if cuda else {"fused": True},
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    for module in worker.engine.module.modules():
        if isinstance(module, torch.nn.Dropout):
            # The ratio to the old log-probs must be 1 before a step, and runs must repeat bit for bit.
            module.p = 0.0
    return worker


def _reduce(found: Mapping[str, Any]) -> dict[str, float]:
    """Returns one float per metric, under verl's names, from the values of each rank and micro-batch."""
    from verl.utils.metric import Metric

    metrics: dict[str, float] = {}
    for name, value in found.items():
        if name.startswith("perf/"):
            continue  # memory statistics of the device, zero on a CPU
        if isinstance(value, list) and isinstance(value[0], Metric):
            value = Metric.aggregate_dp(value)
        metrics[name if "/" in name else f"actor/{name}"] = float(np.mean(value))
    return metrics
