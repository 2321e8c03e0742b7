"""What a release is made of: one version everywhere, and workflows that run what the Makefile has."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import dataflow

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_stands_in_one_place_and_is_cited_and_described() -> None:
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    assert parser["metadata"]["version"] == "attr: dataflow.__version__"
    assert str(Version(dataflow.__version__)) == dataflow.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == dataflow.__version__
    headings = re.findall(r"^## (?:Unreleased: )?(\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == dataflow.__version__


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_uses_files_and_targets_that_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets
        for file in re.findall(r"(?<![\w/*])(?:\.ci|examples|tests)/[\w./]+", command):
            assert (ROOT / file).exists(), file
    assert workflow["permissions"] == {"contents": "read"}, "a workflow has no more rights than it needs"
