"""The tables of the pages are those of the code, and the keys that they name are keys."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from dataflow.config.base import CheckpointConfig
from dataflow.config.keys import verl_keys
from dataflow.config.keys.overrides import fields, refusal
from dataflow.config.run import RunConfig, TrainerConfig
from dataflow.planning.config import PlanConfig
from dataflow.rewards.sandbox import local
from dataflow.rewards.sandbox.cases import Status
from dataflow.rewards.sandbox.manager import Sandbox
from dataflow.running.preparing import preparation
from dataflow.running.resume import MAY_CHANGE, MODEL_MAY_CHANGE
from dataflow.running.saving.checkpoints import CheckpointStore
from dataflow.stages import checkpoint
from dataflow.testing import grpo_pipeline
from pipelines import ppo_critic, two_judges
from tests.rigs.critic import hosted
from tests.rigs.pages import PAGES, ROOT

CONFIGS = (RunConfig, PlanConfig, ppo_critic.Config, two_judges.Config)
SECTIONS = "|".join(sorted({path[0] for config in CONFIGS for path, _ in fields(config) if len(path) > 1}))


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def rows(page: str, head: str) -> list[list[str]]:
    """Returns the rows of the table whose first cell is ``head``."""
    whole = text(page)
    lines = whole[whole.index(f"| {head} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(page: str, head: str) -> set[str]:
    """Returns the names in backticks in the first column of a table."""
    return {name for row in rows(page, head) for name in re.findall(r"`([\w ]+)`", row[0])}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/decisions")])
def test_keys_that_a_page_names_are_keys(page: str) -> None:
    prose = re.sub(r"^( *)```.*?^\1```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+[a-z_])(?:=[^`]*)?`", prose))
    files = r"\.(?:py|md|yaml|html|jsonl?|png|sqlite|parquet)$"
    unknown = [key for key in named if all(refusal(config, key) for config in CONFIGS)]
    assert [key for key in unknown if verl_keys.find(key) is None and not re.search(files, key)] == []


def test_checkpoints(tmp_path: Path) -> None:
    page = text("docs/checkpoints.md")
    defaults = {f"checkpoint.{name}": info.get_default() for name, info in CheckpointConfig.model_fields.items()}
    defaults["trainer.restarts"] = TrainerConfig().restarts
    shown = rows("docs/checkpoints.md", "key")
    assert {key.strip("` "): yaml.safe_load(default) for key, default, _meaning in shown} == defaults
    named = [key for _what, keys in rows("docs/checkpoints.md", "what") for key in re.findall(r"`([\w.]+)`", keys)]
    assert sorted(named) == sorted(MAY_CHANGE)
    models = text("docs/reward_models.md")
    sentence = models[models.index("starts the servers again. ") : models.index(" may change there")]
    assert sorted(re.findall(r"`(\w+)`", sentence)) == sorted(MODEL_MAY_CHANGE)
    source = inspect.getsource(checkpoint)
    assert all(f'"{name}"' in source for name in re.findall(r"`(checkpoint/\w+)`", page))
    stages = checkpoint.checkpoint_stages(hosted(grpo_pipeline().stages), every=1, store=None, steps=1)  # type: ignore[arg-type]
    drawn = page[page.index("sync_weights[v]") :].partition("\n\n")[0]
    assert all(s.name in drawn for s in stages)
    store = CheckpointStore(tmp_path / "checkpoints")
    store.keep(13, {"responses": []})
    aside = store.begin(12)
    (aside / "trainer").mkdir()
    store.link(13, aside)
    store.save_states(aside, {"actor": 12})
    store.commit(12)
    files = re.findall(r"^      ([\w.]+)/? +\w", page, re.MULTILINE)
    assert sorted(files) == sorted(path.name for path in (store.directory / "step_000012").iterdir())


@pytest.mark.slow
def test_each_line_of_a_dry_run_is_explained_and_its_python_finds_the_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    page = text("docs/dry_runs.md")
    source = "".join(Path(str(module.__file__)).read_text() for module in (preparation,))
    named = set(re.findall(r'Check\("([\w ]+)"', source))
    explained = set(re.findall(r"`([\w ]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE))))
    assert {"engine", "GPU memory", "prompts"} <= named <= explained | {"judge of "}
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(ROOT)
    found: dict[str, list[str]] = {}
    exec(code[1], found)
    assert found["problems"] == ["train.jsonl: there is no such file; give a data file."]


def test_recipes() -> None:
    listed = set(re.findall(r"\]\(([\w.+-]+\.yaml)\)", text("recipes/README.md")))
    assert listed == {path.name for path in (ROOT / "recipes").glob("*.yaml")}
    found_rows = re.finditer(
        r"^\| \[`(\w+)\.py`\]\(\.\./pipelines/\1\.py\) \| (.*) \|$", text("docs/recipes.md"), re.MULTILINE
    )
    shown = {found[1]: found[2].split(" | ") for found in found_rows}
    curves = json.loads(text("docs/recipes.json"))
    assert set(shown) == set(curves) == {path.stem for path in (ROOT / "pipelines").glob("*.py")}
    for recipe, seeds in curves.items():
        assert set(seeds) == {"0", "1", "2"}
        after = [(curve["15"] + curve["20"]) / 2 for curve in seeds.values()]
        before = [curve["0"] for curve in seeds.values()]
        assert shown[recipe] == [f"{before[0]:.2f}", *(f"{each:.2f}" for each in after)], recipe
        assert min(after) - max(before) >= 0.10, f"{recipe} has learned"


@pytest.mark.slow
def test_sandbox() -> None:
    page = text("docs/sandbox.md")
    shown = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE)
    parameters = list(inspect.signature(Sandbox).parameters.values())[1:]
    assert [(name, yaml.safe_load(value)) for name, value in shown] == [
        (each.name, each.default) for each in parameters
    ]
    for status in {*get_args(Status), "passed", "no_code", "wrong_answer"} - {"finished"}:
        assert f"`{status}`" in page, status
    assert f"{local._FILE_MB} MB for a file and {local._FILES} open files" in page
    assert f"wall clock {local.WALL} times" in page
    assert all(f"`{name}`" in page for name in local._ISOLATED if name != "rlimits")
    command = [sys.executable, "examples/rewards/programs.py"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert made.stdout.splitlines() == [
        "1.0 2 of 2: passed", "0.5 1 of 2: wrong_answer", "0.0 0 of 2: timeout", "0.0 0 of 2: no_code"
    ], made.stderr  # fmt: skip


def test_each_example_is_named_on_its_page() -> None:
    for folder, page in (("tools", "docs/tools.md"), ("rewards", "docs/rewards.md"), ("cluster", "docs/cluster.md")):
        for file in (ROOT / "examples" / folder).iterdir():
            assert not file.is_file() or f"examples/{folder}/{file.name}" in text(page), file.name
    for recipe in (ROOT / "pipelines").glob("*.py"):
        assert f"](../pipelines/{recipe.name})" in text("docs/pipelines.md")
