"""The recipes are parsed, expanded, scheduled on the virtual clock, planned from and dry-run.

What they need is stood in for: the models by their config.json, with weights of zeros in sparse files and a tokenizer
of bytes (the check of weights against the architecture, which needs torch, is taken for passed); GPUs and vLLM for them
by what CUDA_VISIBLE_DEVICES and nvidia-smi say; CPU memory and disk by numbers; data by one problem, repeated.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dataflow.api import simulate
from dataflow.cli import main
from dataflow.config.loading.pipeline_file import pipeline_of
from dataflow.config.loading.saved import load
from dataflow.executors.ray.nodes import VISIBLE
from dataflow.planning.planner import predict
from dataflow.planning.sources.read import read_workload
from dataflow.policy import PRESETS, expand, preset
from dataflow.running.preparing import preparation
from tests.rigs.stand_ins import QWEN_05B, QWEN_7B, show_gpus, write_model

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
COSTS = sorted((ROOT / "recipes" / "costs").glob("*.yaml"))
GIB = 2**30
PROBLEM = {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}


async def no_list(*_: object) -> tuple[str, ...]:
    return ()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("stand-ins")
    return {"0.5B": write_model(place / "small", QWEN_05B), "7B": write_model(place / "large", QWEN_7B)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_run_it_and_is_scheduled_under_each_policy(recipe: Path) -> None:
    assert f"dataflow run recipes/{recipe.name} dry=true\n" in recipe.read_text()
    for policy in PRESETS:
        module, config = load(recipe, [f"policy={policy}", "steps=3", "name=x"])
        pipeline = pipeline_of(module, config)
        graph = expand(pipeline, config.policy.resolve(config.optimizer_steps), 3, config.optimizer_steps,
                       groups=config.step_groups)  # fmt: skip
        trace = simulate(graph, {stage.name: 1.0 for stage in pipeline.stages})
        assert {span.step for span in trace.spans} >= {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_on_the_gpus_that_it_is_for(
    recipe: Path,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = "0.5B" if "0.5b" in recipe.name else "7B"
    gpus = 1 if "1gpu" in recipe.name else 8
    show_gpus(monkeypatch, tmp_path / "bin", gpus)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-recipe-1234567890")
    monkeypatch.setattr(preparation, "free_disk", lambda place: 1000 * GIB)
    monkeypatch.setattr("dataflow.rewards.judge.client.models_of", no_list)
    (tmp_path / "data.jsonl").write_text((json.dumps(PROBLEM) + "\n") * 1319)
    keys = [f"data.train={tmp_path / 'data.jsonl'}", f"data.val={tmp_path / 'data.jsonl'}", f"runs={tmp_path / 'r'}"]
    code = main(["run", str(recipe), "dry=true", "--json", f"model.path={models[size]}", *keys])
    found = {each["what"]: each for each in json.loads(capsys.readouterr().out)}
    assert {each["state"] for each in found.values()} == {"ok"}, found
    assert code == 0
    assert found["GPUs"]["message"] == f"{gpus} of {gpus}"
    most = [float(text) for text in re.findall(r"at most ([\d.]+) GiB of 80", found["GPU memory"]["message"])]
    assert most
    assert max(most) < 76, "a recipe leaves some room"
    monkeypatch.setenv(VISIBLE, "")
    assert main(["run", str(recipe), "dry=true", "--json", f"model.path={models[size]}", "data.train=no.jsonl"]) == 2
    found = {each["what"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert (found["GPUs"], found["GPU memory"]) == ("problem", "not checked")


@pytest.mark.parametrize("costs", COSTS, ids=lambda path: path.stem)
def test_the_costs_of_a_recipe_are_of_its_job(costs: Path) -> None:
    workload, _config = read_workload(str(costs), [])
    _module, config = load(costs.parents[1] / costs.name, [])
    assert (workload.prompts, workload.responses) == (config.data.prompts, config.engine.n)
    assert workload.mini_batches == config.optimizer_steps
    service = workload.rewards
    assert (service.concurrency, service.rpm) == (config.reward.concurrency, config.reward.rpm)


PUBLISHED = {"baseline": 64_189, "both": 44_345}
"""Sums of timing_s/step, see docs/planning.md; of two runs, as each prediction takes seconds."""


@pytest.mark.heavy
def test_the_published_ablation_is_predicted_from_its_stage_times() -> None:
    table = (ROOT / "recipes" / "README.md").read_text()
    workload, _config = read_workload(str(COSTS[0]), [])
    for policy, seconds in PUBLISHED.items():
        row = predict(workload, {policy: preset(policy, 4)})[0]
        assert row.total_s == pytest.approx(seconds, rel=0.03), policy
        line = next(line for line in table.splitlines() if line.startswith(f"| `{policy}` |"))
        shown = float(line.split("|")[5].strip().removesuffix(" s").replace(",", ""))
        assert row.total_s == pytest.approx(shown, rel=0.001), (policy, row.total_s)
