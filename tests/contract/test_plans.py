"""Plans: what each policy would take, from costs, logs of verl and traces, before a GPU is rented."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.rig import ROOT, command

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

PUBLISHED = ROOT.parent / "shared" / "data" / "traces"
TRACES = ROOT / "docs" / "traces"
COSTS = """
steps: 20
prompts: 16
responses: 4
mini_batches: 4
stages: {rollout: 10, old_log_prob: 4, actor_update: 8, sync_weights: 1}
reward: {latency: uniform:1:40, concurrency: 32}
"""
SECONDS = {"gen": 10.0, "old_log_prob": 4.0, "adv": 0.5, "update_actor": 8.0}
WAITS = (30.0, 32.0, 29.0, 31.0, 33.0, 28.0)


def plan(*arguments: str | Path) -> dict[str, Any]:
    done = command("plan", *arguments, "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def seconds(found: dict[str, Any]) -> dict[str, float]:
    """Returns the predicted seconds of the whole run by policy."""
    return {row["policy"]: row["total_s"] for row in found["policies"]}


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    (tmp_path / "costs.yaml").write_text(COSTS)
    return tmp_path / "costs.yaml"


def test_costs_predict_every_policy_and_what_bounds_it(costs: Path) -> None:
    """A user would have to rent the GPUs to learn which policy is worth it."""
    found = plan(costs)
    took = seconds(found)
    assert took["baseline"] > took["mini-batch"] > took["both"]
    assert took["baseline"] > took["off-policy"] >= took["both"]
    for row in found["policies"]:
        assert row["total_s"] >= row["lower_bound_s"] * 0.999
        assert row["bound_by"] in row["bounds_s"]


def test_the_same_plan_comes_out_each_time(costs: Path) -> None:
    """Two plans could not be compared, as chance would change them."""
    assert plan(costs) == plan(costs)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published logs are not part of the project")
@pytest.mark.parametrize("policy", ["baseline", "mini-batch", "off-policy", "both"])
def test_the_published_runs_are_predicted_within_two_percent(policy: str) -> None:
    """A decision about weeks of GPUs would rest on a wrong number."""
    log = PUBLISHED / f"qwen2-7b_megatron_{policy}.csv"
    with log.open() as file:
        steps = [float(row["timing_s/step"]) for row in csv.DictReader(file) if row.get("timing_s/step")]
    found = plan(
        PUBLISHED / "qwen2-7b_megatron_baseline.csv", "prompts=1024", "responses=5", "mini_batches=4",
        "log.latency=uniform:1:40", "log.concurrency=256", "reward.agent=per-step", "validation.samples=1319",
        f"validation.pool={'shared' if policy == 'off-policy' else 'own'}", "steps=104",
    )  # fmt: skip
    assert abs(seconds(found)[policy] / sum(steps[:104]) - 1) < 0.02


def console(path: Path) -> Path:
    lines = []
    for step, wait in enumerate(WAITS, 1):
        timing = {**SECONDS, "reward": wait, "step": sum(SECONDS.values()) + wait}
        lines.append(f"step:{step} - " + " - ".join(f"timing_s/{name}:{value}" for name, value in timing.items()))
    (path / "train.log").write_text("\n".join(lines) + "\n")
    return path / "train.log"


def table(path: Path) -> Path:
    timing = [{**SECONDS, "reward": wait, "step": sum(SECONDS.values()) + wait} for wait in WAITS]
    with (path / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["global_step", *(f"timing_s/{name}" for name in timing[0])])
        writer.writeheader()
        for step, row in enumerate(timing, 1):
            writer.writerow({"global_step": step, **{f"timing_s/{name}": value for name, value in row.items()}})
    return path / "log.csv"


def jsonl(path: Path) -> Path:
    lines = []
    for step, wait in enumerate(WAITS, 1):
        timing = {**SECONDS, "reward": wait, "step": sum(SECONDS.values()) + wait}
        lines.append({"step": step, "data": {f"timing_s/{name}": value for name, value in timing.items()}})
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path / "log.jsonl"


def events(path: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(path / "events"))
    for step, wait in enumerate(WAITS, 1):
        for name, value in {**SECONDS, "reward": wait, "step": sum(SECONDS.values()) + wait}.items():
            writer.add_scalar(f"timing_s/{name}", value, step)
    writer.close()
    return path / "events"


FACTS = ("prompts=16", "responses=4", "mini_batches=4", "log.concurrency=32")


@pytest.mark.parametrize("form", [console, table, jsonl, events], ids=lambda form: form.__name__)
def test_a_log_of_verl_is_read_in_the_form_it_has(form: Callable[[Path], Path], tmp_path: Path) -> None:
    """A verl user would have to convert the log, or get another answer from another form of it."""
    found = plan(form(tmp_path), *FACTS)
    took = seconds(found)
    logged = sum(WAITS) / len(WAITS) + sum(SECONDS.values())
    assert abs(took["baseline"] / found["steps"] / logged - 1) < 0.1
    assert took["both"] < took["baseline"]


def test_what_the_log_ran_with_is_asked_for_and_is_no_what_if(tmp_path: Path) -> None:
    """A budget would be decided on a number that answers another question."""
    log = console(tmp_path)
    asked = command("plan", log, *FACTS[:3])
    assert asked.code == 2
    assert "log.concurrency" in asked.err
    same, more = (seconds(plan(log, *FACTS, *keys)) for keys in ((), ("reward.concurrency=64",)))
    assert more["both"] < same["both"]


def test_a_setting_is_swept_and_advice_names_its_gain(costs: Path, tmp_path: Path) -> None:
    """The number of requests in flight would be found by trial, on rented GPUs."""
    page = tmp_path / "plan.html"
    done = command("plan", costs, "sweep=reward.concurrency:16:64", "-o", page)
    assert done.code == 0, done.err
    assert "reward.concurrency" in done.out
    assert "<html" in page.read_text()
    few, many = (seconds(plan(costs, f"reward.concurrency={n}"))["baseline"] for n in (16, 64))
    assert many < few


def test_a_trace_is_replayed_and_predicts_the_other_policies(tmp_path: Path) -> None:
    """A short run of the baseline would not say what the other policies take."""
    (tmp_path / "trace.json").write_bytes(gzip.decompress((TRACES / "baseline.json.gz").read_bytes()))
    took = seconds(plan(tmp_path))
    replayed = json.loads(command("timeline", TRACES / "baseline.json.gz", "--json").out)
    assert abs(took["baseline"] / replayed["wall_s"] - 1) < 0.05
    assert took["both"] < took["baseline"]


def test_a_timeline_names_the_causes_of_idle_time(tmp_path: Path) -> None:
    """Idle GPUs would be seen, but not why."""
    for name in ("x.txt", "x.html"):
        done = command("timeline", TRACES / "baseline.json.gz", "-o", tmp_path / name)
        assert done.code == 0, done.err
        assert (tmp_path / name).stat().st_size > 500
    assert "rewards" in command("timeline", TRACES / "baseline.json.gz").out


def test_runs_are_compared_on_one_axis(tmp_path: Path) -> None:
    """Four runs would be four pictures of four scales."""
    runs = [TRACES / f"{policy}.json.gz" for policy in ("baseline", "both")]
    done = command("compare", *runs, "-o", tmp_path / "beside.html")
    assert done.code == 0, done.err
    assert "baseline" in done.out
    assert "both" in done.out
    assert (tmp_path / "beside.html").is_file()
