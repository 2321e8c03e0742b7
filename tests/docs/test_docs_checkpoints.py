"""docs/checkpoints.md names the commands, keys, files and metrics that exist."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml

from dataflow.cli import make_parser
from dataflow.config.base import CheckpointConfig
from dataflow.config.keys.overrides import fields, parse_overrides
from dataflow.config.run import RunConfig, TrainerConfig
from dataflow.planning.config import PlanConfig
from dataflow.running.resume import MAY_CHANGE, check_changes
from dataflow.running.saving.checkpoints import CheckpointStore
from dataflow.running.saving.export import step_of
from dataflow.stages import checkpoint
from dataflow.testing import grpo_pipeline
from tests.rigs.critic import hosted

DOC = Path(__file__).parents[2] / "docs" / "checkpoints.md"
TEXT = DOC.read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^    dataflow (.*?)(?:  +.*)?$", TEXT, re.MULTILINE)]
PLANS = [shlex.split(line) for line in re.findall(r"`dataflow (plan [^`]*)`", TEXT)]


def rows(head: str) -> list[list[str]]:
    """Returns the rows of the table whose first cell is ``head``."""
    lines = TEXT[TEXT.index(f"| {head} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("words", [*COMMANDS, *PLANS], ids=" ".join)
def test_commands_are_read(words: list[str]) -> None:
    options = make_parser().parse_args(words)
    if words[0] == "export":
        assert step_of(options.overrides) == 20
        return
    config = parse_overrides(PlanConfig if words[0] == "plan" else RunConfig, options.overrides)
    if words[0] == "resume":
        assert isinstance(config, RunConfig)
        check_changes(RunConfig(), config, Path("runs/NAME"))


def test_each_command_is_shown() -> None:
    assert {words[0] for words in COMMANDS} == {"resume", "run", "export"}
    assert len(PLANS) == 1


def test_the_table_of_keys_is_that_of_the_configuration() -> None:
    defaults = {f"checkpoint.{name}": info.get_default() for name, info in CheckpointConfig.model_fields.items()}
    defaults["trainer.restarts"] = TrainerConfig().restarts
    assert {key.strip("`"): yaml.safe_load(default) for key, default, _meaning in rows("key")} == defaults


def test_the_keys_that_may_change_are_those_that_may() -> None:
    named = [key for _what, keys in rows("what") for key in re.findall(r"`([\w.]+)`", keys)]
    assert sorted(named) == sorted(MAY_CHANGE)


def test_keys_in_the_text_are_keys() -> None:
    keys = {".".join(path) for path, _ in fields(RunConfig)}
    sections = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key}))
    named = set(re.findall(rf"`((?:{sections})\.\w+)(?:=[^`]*)?`", TEXT))
    assert len(named) > 40
    assert named <= keys


def test_the_files_it_shows_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.keep(13, {"responses": []})
    aside = store.begin(12)
    assert re.fullmatch(r"\.step_000012\.\d+", aside.name)
    (aside / "trainer").mkdir()
    (aside / "trainer" / "weights").write_bytes(b"0")
    store.link(13, aside)
    store.save_states(aside, {"actor": 12})
    store.commit(12)
    shown = re.findall(r"^      ([\w.]+)/? +\w", TEXT, re.MULTILINE)
    assert "runs/NAME/checkpoints/step_000012/" in TEXT
    assert sorted(shown) == sorted(path.name for path in (store.directory / "step_000012").iterdir())


def test_stages_and_metrics_it_names_exist() -> None:
    source = inspect.getsource(checkpoint)
    for name in re.findall(r"`(checkpoint/\w+)`", TEXT):
        assert f'"{name}"' in source, name
    stages = checkpoint.checkpoint_stages(hosted(grpo_pipeline().stages), every=1, store=None, steps=1)  # type: ignore[arg-type]
    drawn = TEXT[TEXT.index("sync_weights[v]") :].partition("\n\n")[0]
    assert all(s.name in drawn for s in stages)


def test_links_lead_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", TEXT):
        path = DOC.parent / target
        assert path.exists(), target
        heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
    for path in re.findall(r"`(tests/[\w/]+\.py)`", TEXT):
        assert (DOC.parents[1] / path).is_file()
