"""The stages that write samples: the columns of the files, what is kept, and a disk that fails."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from dataflow.batch import Batch
from dataflow.config.run import parse_overrides
from dataflow.graph import Pipeline, TaskInfo
from dataflow.policy import expand, preset
from dataflow.samples.files import file_of, read
from dataflow.stages.samples import write_samples

pytest.importorskip("pyarrow")

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def batches(ids: list[int], n: int = 2) -> tuple[Batch, Batch, Batch]:
    """Responses, rewards and advantages of groups; responses of 4 tokens, the first of each group of 2."""
    groups = [g for g in ids for _ in range(n)]
    rows = len(groups)
    mask = torch.ones(rows, 4, dtype=torch.int64)
    mask[::n, 2:] = 0
    responses = Batch(
        groups,
        {
            "raw_prompt": [CHAT if g else CHAT[1:] for g in groups],
            "response_text": [f"{g}.{i % n}" for i, g in enumerate(groups)],
            "data_source": ["gsm8k"] * rows,
            "ground_truth": ["2"] * rows,
            "extra_info": [{"index": g} for g in groups],
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones(rows, 3, dtype=torch.int64), mask], dim=1),
            "input_ids": torch.zeros(rows, 7, dtype=torch.int64),
        },
        {"weights_version": 5},
    )
    rewards = Batch(
        groups,
        {
            "score": torch.arange(rows, dtype=torch.float32) + 0.3,
            "explanation": [f"judged {g}" for g in groups],
            "tokens": [99] * rows,
            "request_begin": torch.full((rows,), 1.7e9, dtype=torch.float64),
            "request_end": torch.full((rows,), 1.7e9 + 2.5, dtype=torch.float64),
            "request_tries": torch.ones(rows, dtype=torch.int64) * 3,
            "request_failed_tries": ["HTTP 429, 2 s; time-out, 0.5 s"] * rows,
            "request_how": ["ledger"] + [None] * (rows - 1),
        },
    )
    advantages = Batch(groups, {"advantages": mask * 1.5, "returns": mask * 1.5})
    return responses, rewards, advantages


def test_a_step_is_written_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    task = TaskInfo(step=12)
    asyncio.run(write_samples.fn(*batches([7, 0]), directory=str(tmp_path / "samples"), task=task))
    assert task.facts == {"written": 4, "left_out": 0}
    rows = read(file_of(tmp_path / "samples", "step", 12))
    assert [(row["group"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (7, 0), (7, 1)]
    assert rows[0]["prompt"] == "1 + 1?"
    assert rows[2] == {
        "step": 12,
        "group": 7,
        "sample": 0,
        "data_source": "gsm8k",
        "prompt": "system: Be brief.\n\nuser: 1 + 1?",
        "ground_truth": "2",
        "response": "7.0",
        "score": 0.3,
        "advantage": 1.5,
        "tokens": 2,
        "truncated": False,
        "weights_version": 5,
        "begin": 1.7e9,
        "end": 1.7e9 + 2.5,
        "latency_s": 2.5,
        "tries": 3,
        "failed_tries": "HTTP 429, 2 s; time-out, 0.5 s",
        "how": "ledger",
        "explanation": "judged 7",
        "reward_tokens": 99,
        "extra_info": '{"index": 7}',
    }
    assert rows[3]["truncated"] is True, "as long as can be, and nobody knows more"


def test_the_engine_says_which_response_was_cut_off_and_tools_words_are_not_counted(tmp_path: Path) -> None:
    responses, rewards, _ = batches([1])
    told = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]])  # a tool's answer between two turns; an end at the last place
    more = {"finish_reason": ["length", "stop"], "response_mask": told, "attention_mask": torch.ones(2, 7)}
    given = responses.merge(responses.like(**more)), rewards
    asyncio.run(write_samples.fn(*given, directory=str(tmp_path), kind="val", task=TaskInfo(step=0)))
    rows = read(file_of(tmp_path, "val", 0))
    found = [(row["tokens"], row["truncated"], row["finish_reason"]) for row in rows]
    assert found == [(2, True, "length"), (4, False, "stop")]


@pytest.mark.parametrize(("most", "found"), [(None, [1, 2, 5]), (6, [1, 2, 5]), (5, [1, 2]), (1, [1])])
def test_whole_groups_are_kept_by_their_ids(most: int | None, found: list[int], tmp_path: Path) -> None:
    given = batches([5, 1, 2])
    task = TaskInfo(step=1)
    asyncio.run(write_samples.fn(*given, directory=str(tmp_path), most=most, task=task))
    rows = read(file_of(tmp_path, "step", 1))
    assert [row["group"] for row in rows] == [group for group in found for _ in range(2)]
    assert task.facts == {"written": len(rows), "left_out": 6 - len(rows)}


def test_a_disk_that_fills_up_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    """The limit of a file's size fails in the middle of a write, as a full disk does."""
    given = batches(list(range(200)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said: list[Any] = []
    sink = logger.add(said.append, format="{message}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # Python ignores the signal that comes with it
    try:
        asyncio.run(write_samples.fn(*given, directory=str(tmp_path), task=TaskInfo(step=3)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logger.remove(sink)
    assert len(said) == 1
    assert "training continues" in said[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["baseline", "both+stream"])
def test_one_task_gathers_the_parts_and_nothing_waits_for_it(policy: str) -> None:
    from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of

    module = load_pipeline_file(str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py"))
    config = parse_overrides(module.Config, [f"policy={policy}", "samples.every=2"])
    pipeline: Pipeline = pipeline_of(module, config)
    graph = expand(pipeline, preset(policy, 4), 4, 4, groups=32).window(1, 4)
    mine = [task for task in graph if task.stage == "write_samples"]
    assert [(task.step, task.parts) for task in mine] == [(2, 1), (4, 1)]
    for task in mine:
        parts = {before for before in graph.predecessors(task) if before.stage == "advantage"}
        assert parts == {other for other in graph if other.stage == "advantage" and other.step == task.step}
        assert list(graph.successors(task)) == []
