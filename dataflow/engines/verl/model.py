"""TrainedModel: a model that verl's TrainingWorker trains with FSDP2, on CPU and CUDA, one object per rank.

Every rank makes the same calls with the same whole batch, of which it reads and computes its share of the rows
(:mod:`dataflow.engines.verl.rows`); metrics are those of all ranks. An update first removes rows with an empty mask,
so that means over sequences, micro-batches and metrics only contain rows that train.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from dataflow.batch import Batch
from dataflow.columns import Ragged
from dataflow.engines.verl.loss import reduced, weighed
from dataflow.engines.verl.process import import_worker, join, quiet
from dataflow.engines.verl.rows import Division, Spans, halves, inputs_of, jagged
from dataflow.engines.verl.state import ADAPTER, Checkpointed
from dataflow.engines.verl.worker import build_worker
from dataflow.system import clock

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.engine_workers import TrainingWorker


class TrainedModel(Checkpointed):
    """A model with its optimizer. RANK, WORLD_SIZE, ... come from the environment.

    Args:
        model: directory of the initial weights.
        options: a :class:`~dataflow.config.training.TrainedConfig`.
        valued: whether it is a value model.
        total_steps: training steps of the run.
        temperature: that logits are divided by.
        seed: of everything random, such as weights that ``model`` lacks.
        device: "cpu" (gloo) or "cuda" (nccl).
        threads: CPU threads.
        shares_gpu: whether another service uses the GPU while this one is idle; torch's cached memory is freed then.
        max_tokens, balance: see :class:`~dataflow.engines.verl.rows.Division`.

    Raises:
        ConfigError: training is not possible with an option.
    """

    name: ClassVar[str]
    """Prefix of the names of its metrics."""
    loss_agg_mode: str
    """What its loss is a mean over."""

    def __init__(
        self,
        model: str,
        options: Any,
        *,
        valued: bool = False,
        total_steps: int = 1,
        temperature: float = 1.0,
        seed: int = 0,
        device: str = "cpu",
        threads: int = 1,
        shares_gpu: bool = False,
        max_tokens: int | None = None,
        balance: bool = False,
    ) -> None:
        self.temperature, self._shares_gpu = temperature, shares_gpu
        self.counts_flops = device == "cuda"  # verl knows what GPUs can do, not CPUs
        torch.set_num_threads(threads)
        with quiet():
            import_worker(device)
            self._joined = join(device)
            self._build = functools.partial(build_worker, model, options, total_steps, device, seed=seed, valued=valued)
            torch.manual_seed(seed)
            self.worker = self._build()
        super().__init__(self.worker.engine, model)
        self.division = Division(self.rank, self.world, options.micro_batch_size, max_tokens, balance)
        self.adapted = hasattr(self.worker.engine.module, "peft_config")

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns copies of all weights on CPU, by Hugging Face name, tied ones once; all ranks must call.

        A LoRA adapter is merged into them.

        Only the first rank returns them, the others {}: otherwise a machine would hold one copy per rank.
        """
        engine = self.worker.engine
        # A tied weight is one parameter with two names; the first is the embedding's.
        bare = engine.module.get_base_model() if self.adapted else engine.module
        every = {name for name, _ in bare.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in bare.named_parameters()}
        named = _merged(engine.module) if self.adapted else engine.get_per_tensor_param()[0]
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
        dist.broadcast_object_list(found, src=0)
        return str(found[0])

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

    def _update(
        self,
        batch: Batch,
        last: bool,
        columns: Mapping[str, str],
        reported: Callable[[Batch], dict[str, float]] = lambda _batch: {},
        **options: Any,
    ) -> dict[str, float]:
        """Takes an optimizer step on the rows that have a token to train on.

        If none has, no step is taken: weights and optimizer stay bit for bit, and only the LR scheduler may step. The
        metrics are verl's, the same on every rank, and the learning rate of this step; if no step was taken, as no row
        trains or the gradient is not finite, only this rate and ``skipped_updates``, which is 1.

        Args:
            last: whether it is the last one of the training step, after which the LR scheduler steps.
            columns: that the loss reads, by verl's name.
            reported: returns further metrics of the rows that train.
            **options: of verl's engine.
        """
        from verl.utils import tensordict_utils as tu

        lr = float(self.worker.engine.optimizer.param_groups[0]["lr"])
        skipped = {f"{self.name}/lr": lr, f"{self.name}/skipped_updates": 1.0}
        trains = batch.nonzero("response_mask") > 0
        if len(batch) and not trains.any():
            if last:
                self.worker.engine.lr_scheduler_step()
            return skipped
        batch = batch if trains.all() else batch.rows(np.flatnonzero(trains))
        lengths = batch.nonzero("attention_mask")
        slots = self.division.slots(lengths)
        mine, spans, rows = self._rows(inputs_of(batch, **columns), slots)
        mask = mine["response_mask"]
        mask[torch.from_numpy(self.division.mine(slots) < 0)] = 0
        more = {**halves(rows["input_ids"].values(), spans), "response_mask": mask, "loss_mask": mask}
        for name, column in (more | {name: mine[name] for name in columns}).items():
            rows[name] = column
        tu.assign_non_tensor(rows, update_lr_scheduler=last, **options)
        if self.counts_flops:
            from tensordict import NonTensorData

            tu.assign_non_tensor(rows, global_token_num=NonTensorData(lengths.tolist()))
        began = clock.now()
        with self._left_free():
            found = tu.get(self.worker.train_batch(rows), "metrics")
        found.pop("lr", None)  # that of the next step, present only if the scheduler stepped
        metrics = {f"{self.name}/lr": lr, **reduced(found, self.name), **reported(batch)}
        metrics |= self.division.imbalance(lengths, slots)
        if not math.isfinite(metrics[f"{self.name}/grad_norm"]):  # verl takes no step then
            return skipped
        tokens = int(batch.nonzero("response_mask").sum())
        return weighed(metrics, len(batch), tokens, clock.now() - began, self.loss_agg_mode)

    def _infer(self, worker: TrainingWorker, batch: Batch, names: Sequence[str], **options: Any) -> dict[str, Ragged]:
        """Returns outputs for all rows, on every rank, 0 where the mask is; without padding, as verl's engine does."""
        from verl.utils import tensordict_utils as tu

        spans = Spans.in_batch(batch)
        slots = self.division.slots(spans.tokens)
        mine, of_mine, rows = self._rows(inputs_of(batch), slots)
        rows["loss_mask"] = torch.from_numpy(of_mine.responses)  # verl takes its sum, which no loss divides by here
        at = of_mine.places()
        unused = None
        if (batch.nonzero("response_mask") != spans.responses).any():  # tokens of tools' answers, or rejected ones
            unused = mine["response_mask"][of_mine.inside()] == 0
        tu.assign_non_tensor(rows, compute_loss=False, **options)
        with self._left_free():
            output = worker.infer_batch(rows)
        columns = {}
        for name in names:
            found = tu.get(output, name)
            flat = (found.values() if found.is_nested else found).float()[at.to(found.device)]
            flat = flat if unused is None else flat.masked_fill(unused.to(flat.device), 0.0)
            columns[name] = self.division.gather(flat, spans, slots)
        return columns

    def _rows(self, batch: Batch, slots: np.ndarray) -> tuple[Batch, Spans, TensorDict]:
        """Returns this rank's rows, unread, with the first row in place of padding; their lengths; and verl's form."""
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        mine = batch.singles(np.maximum(self.division.mine(slots), 0))
        spans = Spans.in_batch(mine)
        rows = TensorDict(jagged(mine, spans), batch_size=[len(mine)])
        tu.assign_non_tensor(
            rows,
            max_seq_len=mine.shape("input_ids")[1],
            max_response_len=spans.room,
            temperature=self.temperature,
            micro_batch_size_per_gpu=slots.shape[1],
            global_batch_size=int((slots >= 0).sum()),
        )
        if self.division.max_tokens is not None:
            tu.assign_non_tensor(rows, use_dynamic_bsz=True, max_token_len_per_gpu=self.division.max_tokens)
        return mine, spans, rows


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 over names in order, dtypes, shapes and raw bytes, in hexadecimal."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _merged(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole weights by Hugging Face name, the adapter's product added; all ranks must iterate.

    The sum has the same bits on any number of ranks, in the weights' own type; verl's own merge yields bfloat16.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import transpose
    from verl.utils.device import get_device_id
    from verl.utils.fsdp_utils import normalize_peft_param_name
    from verl.utils.model import convert_weight_keys

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to(get_device_id())  # it may be in CPU memory (param_offload)
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]

    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    for name, tensor in module.state_dict().items():
        if not (plain := convert_weight_keys(normalize_peft_param_name({name: tensor}), module)):
            continue  # of the adapter
        found, layer = whole(tensor), layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            a, b = whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight)
            found = found + transpose(b @ a, layer.fan_in_fan_out) * layer.scaling[ADAPTER]
        yield next(iter(plain)), found
