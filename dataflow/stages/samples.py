"""Writes the samples of a step, or of an evaluation, to the run's directory, where people read them.

    responses, rewards, advantages -> write_samples    -> samples/step_000012.parquet
    val_responses, val_scores      -> write_val_samples -> samples/val_000012.parquet

Both stages are optional tasks on ``io``: no other task waits for them, and no step of training does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from loguru import logger

from dataflow.batch import Batch
from dataflow.graph import Stage, TaskInfo, stage
from dataflow.models.chat import text_of
from dataflow.samples.files import Kind, file_of, write
from dataflow.stages.rollout import cut_off

if TYPE_CHECKING:
    import torch

_REQUEST = ("request_begin", "request_end", "request_tries", "request_failed_tries", "request_how")
"""Columns of rewards that say how their requests went, see :func:`dataflow.stages.reward.reward_collect`."""
_LARGE = ("input_ids", "position_ids", "prompts", "responses", "returns", "rollout_log_probs")
"""Tensors that the file does not need, which are not copied."""
_KNOWN = ("raw_prompt", "prompt_ids", "response_text", "data_source", "ground_truth", "multi_modal_inputs")
"""Columns of responses that have a name of their own in the file."""


@stage(on="io")
async def write_samples(
    responses: Batch,
    rewards: Batch,
    advantages: Batch | None = None,
    *,
    directory: str | None,
    most: int | None = None,
    task: TaskInfo,
) -> None:
    """Writes the samples that a step trains on, all its parts in one file; all batches have the same groups.

    If the disk fails, only this file is lost: a warning is logged, and training continues.

    Args:
        responses: columns of a rollout.
        rewards: their scores, and further columns that the reward returned.
        advantages: None leaves the column out.
        directory: of the run's samples; None writes nothing, for a run without a name.
        most: samples to keep, see :func:`kept`; None for all.
        task: gives the step; notes the samples that were written and left out.
    """
    await _write("step", directory, task, most, responses, rewards, advantages)


@stage(on="io", role="validates")
async def write_val_samples(
    val_responses: Batch, val_scores: Batch, *, directory: str | None, most: int | None = None, task: TaskInfo
) -> None:
    """Writes the samples of an evaluation, as :func:`write_samples` does."""
    await _write("val", directory, task, most, val_responses, val_scores, None)


async def _write(
    kind: Kind,
    directory: str | None,
    task: TaskInfo,
    most: int | None,
    responses: Batch,
    rewards: Batch,
    advantages: Batch | None,
) -> None:
    if directory is None:
        return
    groups = kept(rewards, most)
    written = sum(size for group, size in rewards.sizes.items() if group in set(groups))
    task.note(written=written, left_out=len(rewards) - written)
    path = file_of(Path(directory), kind, task.step)

    def work() -> None:
        gained = None if advantages is None else _picked(advantages, groups)
        write(path, columns(task.step, _picked(responses, groups), _picked(rewards, groups), gained))

    try:
        await asyncio.to_thread(work)  # other stages without a service share the event loop
    except OSError as error:
        logger.warning(
            f"samples {path} cannot be written, training continues: {error.strerror or error}; make room there, "
            "or set samples.every=0."
        )


def _picked(batch: Batch, groups: Sequence[int]) -> Batch:
    """Returns the rows of these groups, without the tensors that no column is made of."""
    return batch.only(*(name for name in batch.names if name not in _LARGE)).select(groups)


def kept(batch: Batch, most: int | None) -> list[int]:
    """Returns the ids of the groups to keep: in ascending order, as long as their rows are not more than ``most``.

    The first one is kept even if it is larger.
    """
    ids, sizes = sorted(batch.ids), batch.sizes
    rows = 0
    for at, group in enumerate(ids):
        rows += sizes[group]
        if most is not None and rows > most and at:
            return ids[:at]
    return ids


def columns(step: int, responses: Batch, rewards: Batch, advantages: Batch | None) -> dict[str, Sequence[Any]]:
    """Returns the columns of a file of samples; all batches have the same groups in the same order.

    Returns:
        ``step``, ``group``, ``sample`` (index in the group), ``prompt``, ``response``, ``score``, ``advantage`` (mean
        over the tokens that the model sampled), ``tokens`` (that the model sampled), ``truncated`` (a limit cut the
        response off), ``weights_version``, ``begin`` and ``end`` of the request (unix time in seconds), ``latency_s``,
        ``tries``, ``failed_tries`` (why each failed, and the wait after it), ``how`` (it got its score, if not by a
        call of its own: ledger, shared, hedged, failed), and what else the reward returned and the prompts had, as far
        as there is any of it. A column of the reward whose name is taken is called ``reward_NAME``.
    """
    rows = len(responses)
    found: dict[str, Sequence[Any]] = {"step": [step] * rows, "group": responses.groups.tolist()}
    found["sample"] = [index for size in responses.sizes.values() for index in range(size)]
    if "raw_prompt" in responses:
        found["prompt"] = [_chat(messages) for messages in responses["raw_prompt"]]
    texts = {"data_source": "data_source", "ground_truth": "ground_truth", "response_text": "response"}
    found |= {ours: responses[name] for name, ours in texts.items() if name in responses}
    found["score"] = _numbers(rewards["score"])
    if advantages is not None:
        found["advantage"] = _advantage(advantages, responses)
    if "response_mask" in responses:
        found |= {"tokens": responses.nonzero("response_mask").tolist(), "truncated": cut_off(responses).tolist()}
    found["weights_version"] = [responses.meta.get("weights_version")] * rows
    if "request_begin" in rewards:
        begin, end = rewards["request_begin"], rewards["request_end"]
        found |= {"begin": begin.tolist(), "end": end.tolist(), "latency_s": (end - begin).tolist()}
        found["tries"] = rewards["request_tries"].tolist()
        found |= {name: rewards[f"request_{name}"] for name in ("failed_tries", "how")}
    if "kept" in rewards:
        found["kept"] = rewards["kept"].tolist()
    numbers = {name: rewards[name] for name in rewards.tensors if rewards[name].ndim == 1}
    for name, values in {**numbers, **rewards.arrays}.items():
        if name not in (*_REQUEST, "score", "kept"):
            found[name if name not in found else f"reward_{name}"] = _numbers(values)
    for name, values in responses.arrays.items():
        if name not in _KNOWN and name not in found:
            found[name] = values.tolist()
    return found


def _numbers(values: Any) -> list[Any]:
    """Returns a column as a list; numbers of float32 with the digits that tell them apart, as ``score=0.3`` asks."""
    numbers = values.numpy() if hasattr(values, "numpy") else values
    found: list[Any] = (numbers.astype(str).astype(float) if numbers.dtype == np.float32 else numbers).tolist()
    return found


def _advantage(advantages: Batch, responses: Batch) -> list[float]:
    values: torch.Tensor = advantages["advantages"]
    mask = (advantages if "response_mask" in advantages else responses)["response_mask"]
    mean = (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return [float(value) for value in mean]


def _chat(messages: Any) -> str:
    """Returns a prompt's messages as text; a single one without its role."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return str(messages)
    texts = [(str(message.get("role", "")), text_of(message.get("content"))) for message in messages]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)


def sample_stages(config: Any) -> list[Stage]:
    """Returns the stages that write the samples of a :class:`~dataflow.config.run.RunConfig`: one, two or none."""
    if not config.samples.every:
        return []
    how = {"directory": config.run_file("samples"), "most": config.samples.most}
    stages = [write_samples.bind(every=config.samples.every, **how)]
    if config.val.every:
        stages.append(write_val_samples.bind(every=config.val.every, **how))
    return stages
