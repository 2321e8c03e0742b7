"""What a release is made of: one version everywhere, and workflows that run what the Makefile has."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
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


@pytest.mark.heavy
def test_the_source_distribution_has_every_file_of_the_repository(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pytest.importorskip("setuptools")
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for name in names:  # a build leaves files beside what it builds
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    build = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", build, str(tmp_path)],
        cwd=tmp_path / "source", capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as packed:
        has = {member.name.partition("/")[2] for member in packed if member.isfile()}
    made = {name for name in has if name.startswith("dataflow_rl.egg-info/")} | {"PKG-INFO"}
    assert has - made == names
