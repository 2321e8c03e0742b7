"""Writes the samples of a step, or of an evaluation, to the run's directory, where people read them.

    responses, rewards, advantages -> write_samples    -> samples/step_000012.parquet
    val_responses, val_scores      -> write_val_samples -> samples/val_000012.parquet

Both stages are optional tasks on ``io``: no other task waits for them, and no step of training does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from loguru import logger

from dataflow.batch import Batch
from dataflow.graph import Read, Stage, TaskInfo, stage
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
    kind: Kind = "step",
    task: TaskInfo,
) -> None:
    """Writes the samples that a step trains on, all its parts in one file; all batches have the same groups.

    If the disk fails, only this file is lost: a warning is logged, and training continues.

    Args:
        responses: columns of a rollout.
        rewards: their scores, and further columns that the reward returned.
        advantages: None leaves the column out.
        directory: of the run's samples; None writes nothing, for a run without a name.
        most: samples to keep: whole groups in ascending order, the first one even if it is larger; None for all.
        kind: ``val`` for the samples of an evaluation.
        task: gives the step; notes the samples that were written and left out.
    """
    if directory is None:
        return
    ids = sorted(rewards.ids)
    ends = np.cumsum([rewards.sizes[group] for group in ids])
    groups = ids if most is None else ids[: max(1, int((ends <= most).sum()))]
    written = int(ends[len(groups) - 1])
    task.note(written=written, left_out=len(rewards) - written)
    path = file_of(Path(directory), kind, task.step)

    def picked(batch: Batch) -> Batch:
        return batch.only(*(name for name in batch.names if name not in _LARGE)).select(groups)

    def work() -> None:
        gained = None if advantages is None else picked(advantages)
        write(path, columns(task.step, picked(responses), picked(rewards), gained))

    try:
        await asyncio.to_thread(work)  # other stages without a service share the event loop
    except OSError as error:
        logger.warning(
            f"samples {path} cannot be written, training continues: {error.strerror or error}; make room there, "
            "or set samples.every=0."
        )


def columns(step: int, responses: Batch, rewards: Batch, advantages: Batch | None) -> dict[str, Sequence[Any]]:
    """Returns the columns of a file of samples; all batches have the same groups in the same order.

    They are ``step``, ``group``, ``sample`` (index in the group), ``prompt``, ``response``, ``score``, ``advantage``
    (mean over the tokens that the model sampled), ``tokens`` (that the model sampled), ``truncated`` (a limit cut the
    response off), ``weights_version``, ``begin`` and ``end`` of the request (unix time in seconds), ``latency_s``,
    ``tries``, ``failed_tries`` (why each failed, and the wait after it), ``how`` (it got its score, if not by a call of
    its own: ledger, shared, hedged, failed), and what else the reward returned and the prompts had, as far as there is
    any of it. A column of the reward whose name is taken is called ``reward_NAME``.
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
    writing = write_samples.bind(
        every=config.samples.every, directory=config.run_file("samples"), most=config.samples.most
    )
    if not config.val.every:
        return [writing]
    val = writing.bind(name="write_val_samples", every=config.val.every, kind="val")
    return [writing, replace(val, reads=(Read("val_responses"), Read("val_scores")), role="validates")]
