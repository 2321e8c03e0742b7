"""The profiler around a task: chosen steps, one at a time, what it leaves."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dataflow.engines.profiling import TaskProfiler, name_of
from dataflow.executors.calling import around
from dataflow.graph import Hosted, TaskInfo, stage


@stage(on="gpu", writes="x")
def compute(*, service: Any) -> None: ...


@stage(on="io", writes="y", role="saves")
def write(*, service: Any) -> None: ...


def hosted(directory: Path) -> Hosted:
    return Hosted("trainer", "a:b", around=TaskProfiler(frozenset({2}), str(directory)))


@pytest.mark.parametrize(("of", "step"), [(compute, 1), (write, 2)])
def test_other_steps_and_tasks_that_save_are_left_alone(of: Any, step: int, tmp_path: Path) -> None:
    info = TaskInfo(step, of.name)
    with around(of.bind(service=hosted(tmp_path)), info):
        pass
    assert (list(tmp_path.iterdir()), info.facts) == ([], {})


@pytest.mark.slow
def test_a_task_of_a_chosen_step_leaves_a_profile_of_all_threads(tmp_path: Path) -> None:
    import torch

    def work() -> None:
        torch.ones(64, 64) @ torch.ones(64, 64)

    info, other = TaskInfo(2, "compute", part=1, parts=4), TaskInfo(2, "compute")
    thread_begins, thread_ended = threading.Event(), threading.Event()

    def beside() -> None:
        assert thread_begins.wait(60)
        work()
        thread_ended.set()

    thread = threading.Thread(target=beside)
    thread.start()  # before the profiler, as that of the transformers engine
    profiled = compute.bind(service=hosted(tmp_path / "profile"))
    with around(profiled, info):
        thread_begins.set()
        assert thread_ended.wait(60)
        with around(profiled, other):  # torch has one profiler in a process
            work()
    thread.join()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["compute-2.2.json.gz"]
    assert info.facts["profile"] == "compute-2.2.json.gz"
    assert "aten::" in info.facts["operators"]
    assert other.facts == {}
    found = json.loads(gzip.decompress((tmp_path / "profile" / "compute-2.2.json.gz").read_bytes()))
    assert {event["tid"] for event in found["traceEvents"] if event.get("name") == "aten::mm"} >= {thread.native_id}


@pytest.mark.slow
def test_a_full_disk_costs_the_profile_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert name_of(TaskInfo(3, "actor_update")) == "actor_update-3-rank1"
    (tmp_path / "file").write_text("")
    info = TaskInfo(2, "compute")
    with around(compute.bind(service=hosted(tmp_path / "file")), info):
        pass
    assert info.facts == {}
