"""docs/ppo.md names the commands, keys, stages and metrics that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from dataflow.config.keys.overrides import fields, parse_overrides
from dataflow.planning.workload import CRITIC
from dataflow.running.reporting.timings import FIELDS
from pipelines.ppo_critic import Config, pipeline

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")
KEYS = {".".join(path) for path, _ in fields(Config)}


def test_its_commands_are_accepted() -> None:
    lines = re.findall(r"^    dataflow run (.*)$", TEXT, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        file, *keys = shlex.split(line)
        assert (ROOT / file).is_file()
        config = parse_overrides(Config, [*keys, "model.path=x"] if "model.path=DIR" not in keys else keys)
        assert {"values", "critic_update"} <= pipeline(config).by_name.keys()


def test_keys_and_stages_exist() -> None:
    named = set(re.findall(r"`((?:critic|algorithm|policy)\.[\w.]+)(?:=[\w-]+)?`", TEXT)) - {"critic.optim.lr"}
    assert len(named) >= 6
    assert named <= KEYS
    rows = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert set(rows) == {"advantage", *CRITIC}
    assert rows[0] in pipeline(Config()).by_name
    assert set(re.findall(r"`stages\.(\w+)=", TEXT.replace(" stages.", "` `stages."))) == set(CRITIC)
    timings = set(re.findall(r"`timing_s/(\w+)`", TEXT))
    assert timings <= set(FIELDS.values())


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
