"""Which GPUs each server of a reward model gets, and which are left to the run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.models import gpus as module
from dataflow.rewards.models.gpus import VISIBLE, GpuPlan, Wanted, plan_gpus, visible_gpus
from dataflow.running.services.hosting import gpus_of
from dataflow.running.services.served_models import _visible
from dataflow.stage import Hosted

FOUR = ["0", "1", "2", "3"]


def test_servers_with_gpus_of_their_own_take_the_last_ones() -> None:
    wanted = {"a": Wanted(2, 1, own=True), "b": Wanted(1, 1, own=False), "c": Wanted(1, 1, own=True)}
    assert plan_gpus(wanted, 1, FOUR) == GpuPlan(["0"], {"a": ["1", "2"], "b": ["0"], "c": ["3"]})
    assert plan_gpus({"a": Wanted(1, 1, own=False)}, 1, FOUR).run == ["0"]
    assert plan_gpus({"a": Wanted(1, 2, own=True)}, 2, FOUR) == GpuPlan(["0", "1"], {"a": ["2,3"]})
    assert plan_gpus({"a": Wanted(2, 2, own=False)}, 4, FOUR) == GpuPlan(FOUR, {"a": ["0,1", "2,3"]})


@pytest.mark.parametrize(
    ("wanted", "needed", "words"),
    [
        (Wanted(4, 1, own=True), 1, "the servers need 4 GPUs and trainer and engine 1, and this machine has 4; lower"),
        (Wanted(1, 1, own=False), 5, "the servers need 0 GPUs and trainer and engine 5, and this machine has 4; lower"),
        (Wanted(3, 1, own=False), 2, "m.placement=colocated: its servers need 3 GPUs, and trainer and engine have 2"),
    ],
)
def test_too_few_gpus_are_one_sentence(wanted: Wanted, needed: int, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_gpus({"m": wanted}, needed, FOUR)


def test_the_gpus_of_a_machine_are_those_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(module, "_DEVICES", tmp_path)
    monkeypatch.delenv(VISIBLE, raising=False)
    assert visible_gpus() == ["2", "10"]
    for given, found in (("", []), ("-1", []), ("3, 1", ["3", "1"]), ("GPU-ab", ["GPU-ab"])):
        monkeypatch.setenv(VISIBLE, given)
        assert visible_gpus() == found


def test_the_run_sees_the_others_only_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    with _visible(["0", "1"]):
        assert os.environ[VISIBLE] == "0,1"
    assert VISIBLE not in os.environ
    monkeypatch.setenv(VISIBLE, "7")
    with _visible([]):
        assert os.environ[VISIBLE] == ""
    assert os.environ[VISIBLE] == "7"


def test_services_that_share_a_gpu_need_one() -> None:
    shared = [Hosted("trainer", "x:y", gpus=0.6, ranks=2), Hosted("rollout", "x:y", gpus=0.3, devices=2)]
    assert gpus_of(shared) == 2
    options = {"gpus": 1.0, "devices": 2, "replicas": 3}
    assert gpus_of([*shared, Hosted("more", "dataflow.engines.replicas.engine:Replicas", options)]) == 8
    assert gpus_of([Hosted("reward", "x:y")]) == 0
