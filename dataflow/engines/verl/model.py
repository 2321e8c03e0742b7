"""TrainedModel: a model that verl's TrainingWorker trains with FSDP2, on CPU and CUDA, one object per rank.

Every rank makes the same calls with the same whole batch, of which it reads and computes its share of the rows:

    rows 0..n ── divided evenly into world x micro-batches pieces ──▶ rank r takes consecutive pieces
             ◀── outputs are gathered, so that each rank returns all rows; metrics are averaged over ranks

All micro-batches have the same size, as verl requires. If the rows do not divide evenly, a piece is padded with a row
whose response mask is empty: it contributes nothing to loss and gradient, and its outputs are dropped. An update
first removes rows with an empty mask, so that means over sequences, micro-batches and metrics only contain rows that
train.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from dataflow.batch import Batch
from dataflow.columns import Ragged
from dataflow.engines.verl.lora import has_adapter, merged
from dataflow.engines.verl.measures import count_flops, reduced, weighed
from dataflow.engines.verl.rows import INPUTS, Spans, halves, inputs_of, jagged
from dataflow.engines.verl.setup import value_engine, vision
from dataflow.engines.verl.setup.options import Kind, skipped, worker_config
from dataflow.engines.verl.setup.process import import_worker, join, quiet
from dataflow.engines.verl.state import TrainerState
from dataflow.errors import ConfigError, DataflowError
from dataflow.system import clock

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.engine_workers import TrainingWorker


class TrainedModel:
    """A model with its optimizer. RANK, WORLD_SIZE, ... come from the environment.

    Args:
        model: directory of the initial weights.
        options: a :class:`~dataflow.config.training.trained.TrainedConfig`.
        kind: which of verl's engines computes with it.
        total_steps: training steps of the run.
        temperature: that logits are divided by.
        seed: of everything random, such as weights that ``model`` lacks.
        device: "cpu" (gloo) or "cuda" (nccl).
        threads: CPU threads.
        shares_gpu: whether another service uses the GPU while this one is idle; torch's cached memory is freed then.
        max_tokens: most tokens of a micro-batch, which then has as many rows as fit, by verl's dynamic batches; None
            for micro-batches of a fixed number of rows.
        balance: whether ranks get rows of about the same number of tokens together, by verl's partitions.

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
        kind: Kind,
        total_steps: int,
        temperature: float,
        seed: int,
        device: str,
        threads: int,
        shares_gpu: bool,
        max_tokens: int | None = None,
        balance: bool = False,
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"trainer: device '{device}' is neither 'cpu' nor 'cuda'.")
        self.temperature = temperature
        self.micro_batch_size = options.micro_batch_size
        self.max_tokens, self.balance = max_tokens, balance
        self._shares_gpu = shares_gpu
        self.counts_flops = device == "cuda"  # verl knows what GPUs can do, not CPUs
        torch.set_num_threads(threads)
        with quiet():
            worker_type = import_worker(device)
            if kind == "value_model":
                value_engine.register()
            self._joined = join(device)
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._build = functools.partial(_build, worker_type, model, kind, options, total_steps, seed, device)
            torch.manual_seed(seed)
            self.worker = self._build()
            for _ in range(skipped(options.warmup_in(total_steps))):
                self.worker.engine.lr_scheduler_step()
        self._model = model
        # One thread, as memory that a thread has freed stays with it: a new one for each step takes 250 MB more.
        self._aside = ThreadPoolExecutor(1, f"{self.name} metrics")
        self.adapted = has_adapter(self.worker.engine.module)
        self._state = TrainerState(self.worker.engine, model)

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
        named = merged(engine) if self.adapted else engine.get_per_tensor_param()[0]
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

    def close(self) -> None:
        """Leaves the process group, if this object joined it. No call is possible afterwards."""
        self._aside.shutdown()
        if self._joined:
            dist.destroy_process_group()
            self._joined = False

    @contextlib.contextmanager
    def _left_free(self) -> Iterator[None]:
        """Frees torch's cached GPU memory at the end, if the GPU is shared with another service."""
        yield
        if self._shares_gpu:
            torch.cuda.empty_cache()

    def _trainable(self, batch: Batch) -> Batch | None:
        """Returns the rows that have a token to train on; None if there is none. Every rank holds the whole batch."""
        trains = batch.nonzero("response_mask") > 0
        if len(batch) and not trains.any():
            return None
        return batch if trains.all() else batch.rows(np.flatnonzero(trains))

    def _skip(self, last: bool) -> dict[str, float]:
        """Skips an optimizer step; called on all ranks or on none."""
        lr = self._lr()
        if last:
            self.worker.engine.lr_scheduler_step()
        return self._skipped(lr)

    def _skipped(self, lr: float) -> dict[str, float]:
        return {f"{self.name}/lr": lr, f"{self.name}/skipped_updates": 1.0}

    def _lr(self) -> float:
        return float(self.worker.engine.optimizer.param_groups[0]["lr"])

    def _step(
        self, batch: Batch, last: bool, beside: Callable[[], Mapping[str, float]] = dict, **options: Any
    ) -> dict[str, float]:
        """Takes an optimizer step.

        Args:
            batch: with the columns of :func:`inputs_of`; the others are for the loss.
            last: whether it is the last one of the training step, after which the LR scheduler steps.
            beside: returns further metrics; called in a thread while verl computes.
            **options: of verl's engine.

        Returns:
            verl's metrics, the same on every rank, the learning rate of this step, and the further ones. If the
            gradient is not finite, for which verl takes no step, what :meth:`_skip` returns: the others are NaN.
        """
        from verl.utils import tensordict_utils as tu

        lr = self._lr()
        lengths = batch.nonzero("attention_mask")
        slots = self._slots(lengths)
        mine, spans = self._mine(batch, slots)
        rows = self._rank_rows(mine, spans, slots)
        ids, mask = rows["input_ids"].values(), mine["response_mask"]
        mask[torch.from_numpy(self._places(slots) < 0)] = 0
        for name, column in {**halves(ids, spans), "response_mask": mask, "loss_mask": mask}.items():
            rows[name] = column
        for name in mine.tensors:
            if name not in INPUTS:
                rows[name] = mine[name]
        tu.assign_non_tensor(rows, update_lr_scheduler=last, **options)
        if self.counts_flops:
            count_flops(rows, lengths)
        began = clock.now()
        with self._left_free():
            more = self._aside.submit(lambda: {**self._imbalance(lengths, slots), **beside()})
            found = tu.get(self.worker.train_batch(rows), "metrics")
        found.pop("lr", None)  # that of the next step, present only if the scheduler stepped
        metrics = {f"{self.name}/lr": lr, **reduced(found, self.name), **more.result()}
        if not math.isfinite(metrics[f"{self.name}/grad_norm"]):
            return self._skipped(lr)
        tokens = int(batch.nonzero("response_mask").sum())
        return weighed(metrics, len(batch), tokens, clock.now() - began, self.loss_agg_mode)

    def _infer(self, worker: TrainingWorker, batch: Batch, names: Sequence[str], **options: Any) -> dict[str, Ragged]:
        """Returns outputs of the model for all rows, on every rank, float32 ``[rows, R]``, 0 where the mask is.

        They have no padding yet, as verl's engine returns them without.
        """
        from verl.utils import tensordict_utils as tu

        spans = Spans.in_batch(batch)
        slots = self._slots(spans.tokens)
        mine, of_mine = self._mine(inputs_of(batch), slots)
        rows = self._rank_rows(mine, of_mine, slots)
        rows["loss_mask"] = rows["response_tokens"]  # verl takes its sum, which no loss divides by here
        at = of_mine.places()
        unused = None
        if (batch.nonzero("response_mask") != spans.responses).any():  # tokens of tools' answers, or rejected ones
            within = torch.arange(spans.room) < torch.from_numpy(of_mine.responses)[:, None]
            unused = mine["response_mask"][within] == 0
        tu.assign_non_tensor(rows, compute_loss=False, **options)
        with self._left_free():
            output = worker.infer_batch(rows)
        columns = {}
        for name in names:
            found = tu.get(output, name)
            flat = (found.values() if found.is_nested else found).float()[at.to(found.device)]
            flat = flat if unused is None else flat.masked_fill(unused.to(flat.device), 0.0)
            columns[name] = self._gather(flat, spans, slots)
        return columns

    def _slots(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the row in each place of each micro-batch, -1 for padding, ``[world x micro-batches, size]``.

        With ``max_tokens`` there is one piece a rank, of which verl makes micro-batches.

        Args:
            lengths: tokens of each row, prompt included.

        Raises:
            ConfigError: a row is longer than ``max_tokens``.
            DataflowError: there are no rows.
        """
        rows = len(lengths)
        if rows < 1:
            raise DataflowError("trainer: a batch without rows can be neither scored nor trained on.")
        if self.max_tokens is not None and max(lengths) > self.max_tokens:
            raise ConfigError(
                f"trainer.max_tokens_per_gpu={self.max_tokens}: a sample has {max(lengths)} tokens, prompt included; "
                "give at least as many."
            )
        micro_batches = 1 if self.max_tokens is not None else math.ceil(rows / (self.world * self.micro_batch_size))
        pieces = self.world * micro_batches
        split = np.array_split(np.arange(rows), pieces)
        if self.balance and self.world > 1 and rows % self.world == 0:
            ranks = _balanced(tuple(lengths.tolist()), self.world)
            split = [piece for mine in ranks for piece in np.array_split(np.array(mine), micro_batches)]
        slots = np.full((pieces, math.ceil(rows / pieces)), -1)
        for slot, piece in zip(slots, split, strict=True):
            slot[: len(piece)] = piece
        return slots

    def _imbalance(self, lengths: np.ndarray, slots: np.ndarray) -> dict[str, float]:
        """Returns verl's ``global_seqlen/*``: tokens of the ranks with consecutive rows, and with theirs (balanced)."""
        if len(lengths) < self.world:
            return {}
        from verl.utils.seqlen_balancing import log_seqlen_unbalance

        ranks = [[int(row) for row in mine if row >= 0] for mine in slots.reshape(self.world, -1)]
        found = log_seqlen_unbalance(lengths.tolist(), ranks, "global_seqlen")
        return {name: float(value) for name, value in found.items()}

    def _places(self, slots: np.ndarray) -> np.ndarray:
        """Returns this rank's rows, -1 for padding."""
        return slots.reshape(self.world, -1)[self.rank]  # type: ignore[no-any-return]

    def _mine(self, batch: Batch, slots: np.ndarray) -> tuple[Batch, Spans]:
        """Returns this rank's rows, unread, with the first row in place of padding, and their lengths."""
        mine = batch.singles(np.maximum(self._places(slots), 0))
        return mine, Spans.in_batch(mine)

    def _rank_rows(self, mine: Batch, spans: Spans, slots: np.ndarray) -> TensorDict:
        """Returns this rank's rows in the form of verl's engine: jagged, without padding."""
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        lengths = {"response_tokens": torch.from_numpy(spans.responses)}
        rows = TensorDict({**jagged(mine, spans), **lengths}, batch_size=[len(mine)])
        tu.assign_non_tensor(
            rows,
            max_seq_len=mine.shape("input_ids")[1],
            max_response_len=spans.room,
            temperature=self.temperature,
            micro_batch_size_per_gpu=slots.shape[1],
            global_batch_size=int((slots >= 0).sum()),
        )
        if self.max_tokens is not None:
            tu.assign_non_tensor(rows, use_dynamic_bsz=True, max_token_len_per_gpu=self.max_tokens)
        return rows

    def _gather(self, mine: torch.Tensor, spans: Spans, slots: np.ndarray) -> Ragged:
        """Returns the rows of all ranks in the batch's order, without the rows that pad pieces.

        Args:
            mine: of this rank, the values of its rows one after another.
            spans: the lengths of all rows.
            slots: see :meth:`_slots`.
        """
        flat = slots.reshape(-1)
        lengths = spans.responses[np.maximum(flat, 0)]
        parts = [mine]
        if self.world > 1:
            sizes = lengths.reshape(self.world, -1).sum(axis=1).tolist()
            sent = mine.new_zeros(max(sizes))
            sent[: len(mine)] = mine
            parts = [torch.empty_like(sent) for _ in range(self.world)]
            dist.all_gather(parts, sent)
            parts = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        values = torch.cat(parts).cpu().numpy()
        order = np.empty(int((flat >= 0).sum()), dtype=np.int64)
        order[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        begins, starts = np.cumsum(lengths) - lengths, np.zeros_like(lengths)
        return Ragged(values, begins, lengths, starts, spans.room, np.dtype(np.float32)).rows(order)


@functools.lru_cache(maxsize=4)
def _balanced(lengths: tuple[int, ...], ranks: int) -> list[list[int]]:
    """Returns the rows of each rank by verl's partitions, in ascending order; the same rows are often asked for again.

    Args:
        lengths: tokens of each row.
        ranks: that divide their number.
    """
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    return [sorted(mine) for mine in get_seqlen_balanced_partitions(list(lengths), k_partitions=ranks, equal_size=True)]


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
    kind: Kind,
    options: Any,
    total_steps: int,
    seed: int,
    device: str,
    offload: bool = False,
) -> TrainingWorker:
    """Returns a worker with its model loaded; see :func:`dataflow.engines.verl.setup.options.worker_config`."""
    worker = worker_type(worker_config(model, kind, options, total_steps, seed, device, offload))
    if hasattr(worker.engine.model_config.hf_config, "vision_config"):
        vision.install()
    worker.reset()
    for module in worker.engine.module.modules():
        if isinstance(module, torch.nn.Dropout):
            # The ratio to the old log-probs must be 1 before a step, and runs must repeat bit for bit.
            module.p = 0.0
    return worker
