"""Every block and command of every page is run, or a table here names what covers it, or why it is not run."""

from __future__ import annotations

import ast
import gzip
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from dataflow.cli import is_dry, main, make_parser
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.saved import Saved, dump, load
from dataflow.config.run import RunConfig
from dataflow.planning.config import PlanConfig
from dataflow.running.saving.export import step_of
from dataflow.samples.files import file_of, write
from tests.rigs.events import write_events
from tests.rigs.pages import PROGRAMS, ROOT, Block, blocks, inline_commands

pytestmark = pytest.mark.timeout(120)

PYTHON = {
    "README.md": ("test_readme.py", 1),
    "docs/concepts.md": ("test_site.py", 3),
    "docs/dry_runs.md": ("test_pages.py", 1),
    "docs/extending.md": ("test_docs_extending.py", 2),
    "docs/pipelines.md": ("test_docs_pipelines.py", 4),
    "docs/rewards.md": ("test_shown.py", 3),
    "docs/tools.md": ("test_shown.py", 2),
}
"""Pages whose own test runs their Python, and how many blocks it knows."""

OTHERS = {
    ("CONTRIBUTING.md", "errors, "): "a picture of imports, which lint-imports checks",
    ("docs/architecture.md", "[run]      session"): "a picture of processes",
    ("docs/cluster.md", "export RAY_AUTH_MODE"): "starts Ray on several machines: benchmarks/machines.py",
    ("docs/checkpoints.md", "sync_weights[v]"): "a picture of tasks",
    ("docs/checkpoints.md", "runs/NAME/checkpoints/"): "a directory: test_pages.py makes one",
    ("docs/concepts.md", "rollout  on gpu"): "output: test_site.py",
    ("docs/dry_runs.md", "ok           pipeline"): "output on a machine without GPUs, shortened",
    ("docs/extending.md", "--- a/"): "test_docs_extending.py applies it",
    ("docs/extending.md", "[3.0, 2.0"): "output: test_docs_extending.py",
    ("docs/extending.md", "monitor 0 s"): "output: test_docs_extending.py",
    ("docs/pipelines.md", "baseline: 13.5 s"): "output: test_docs_pipelines.py",
    ("docs/planning.md", "policy: split=4"): "two log lines of a run of an hour",
    ("docs/reward_models.md", "body = "): "a part of a function, for a server of a model; compiled below",
    ("docs/rewards.md", "Rate how well"): "a file: test_shown.py",
    ("docs/rewards.md", "(0,) [1.0"): "output: test_shown.py",
    ("docs/rewards.md", "-- why requests"): "SQL: test_shown.py",
    ("docs/rollout.md", "VLLM_SERVER_DEV_MODE"): "starts a server: tests/engines/http/test_vllm_server.py",
    ("docs/timeline.md", "GPU pool idle"): "output of the trace of the README, compared below",
    ("docs/timeline.md", "gpu     R1===="): "output, shortened: tests/timeline/test_gaps.py",
    ("docs/tools.md", "prompt | <tool_call>"): "a picture of a mask",
    ("docs/tools.md", "[ToolCall("): "output: test_shown.py",
    ("docs/tour.md", '{"question"'): "rows of data: test_readme.py",
    ("docs/tour.md", "GPU pool idle"): "output of the trace of the README, compared below",
    ("docs/trace.md", "note: runs/NAME"): "a message of a run that was killed",
}
"""Blocks that are no commands and are not run here: page and beginning, and why."""

UNRUN = {
    "run": "trains, so its configuration is resolved alone",
    "resume": "trains, so its changes are resolved alone",
    "export": "needs a checkpoint: tests/running/saving",
    "import-verl": "needs a launch: tests/importing",
    "examples/costs.yaml": "takes 10 s and more to plan: tests/planning",
    "recipes/costs/gsm8k-ablation.yaml": "likewise: tests/project/test_recipes.py",
    "baseline.csv": "likewise, of a log that is not in the repository: benchmarks/prediction.py",
    "checkpoint.every=5": "needs a run that has saved: tests/running/saving",
    "PIPELINE": "`compare` of a pipeline trains, so its configuration is resolved alone",
}
"""Commands that are parsed to arguments and a configuration, but not run: a command or an option, and why."""

PLACEHOLDERS = {
    "PIPELINE.py": "pipelines/gsm8k_grpo.py",
    "SOURCE": "runs/NAME",
    "RUN": "runs/NAME",
}
OWN_FILES = "docs/pipelines.md"
"""Its commands name the files it shows; test_docs_pipelines.py runs each of them."""


def _is_argument(word: str) -> bool:
    return not word.startswith("-")


BLOCKS = list(blocks())
COMMANDS = {
    tuple(words): page
    for page, words in [
        *((block.page, words) for block in BLOCKS for words in block.commands()),
        *((page, words) for page, words in inline_commands() if any(_is_argument(word) for word in words[2:])),
    ]
    if page != OWN_FILES
}
"""Each command once, and a page that has it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the pages' commands name: runs, logs, and the files of the repository."""
    made = tmp_path_factory.mktemp("pages") / "place"
    assert main(["init", str(made)]) == 0
    for name in ("docs", "examples", "pipelines", "recipes"):
        (made / name).symlink_to(ROOT / name)
    trace = gzip.decompress((ROOT / "docs" / "traces" / "both.json.gz").read_bytes())
    for name in ("A", "B", "NAME"):
        run = made / "runs" / name
        run.mkdir(parents=True)
        (run / "trace.json").write_bytes(trace)
        (run / "config.yaml").write_text(dump(RunConfig(name=name), ROOT / "pipelines" / "gsm8k_grpo.py"))
    row = {"group": [0], "sample": [0], "prompt": ["1 + 1?"], "response": ["2"], "score": [0.25], "latency_s": [1.5]}
    for kind, step in (("step", 1), ("step", 12), ("val", 0)):
        told = {"step": [step], **row, "explanation": ["off by one"]}
        write(file_of(made / "runs" / "NAME" / "samples", kind, step), told)  # type: ignore[arg-type]
    for log in ("my_verl_run", "my_project/my_run"):
        row = {"timing_s/gen": 45.0, "timing_s/update_actor": 130.0, "timing_s/reward": 61.0}
        write_events(made / "tensorboard" / log, row, steps=3)
    return made


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def test_every_block_is_run_or_named() -> None:
    python: dict[str, int] = {}
    unnamed, named = [], set()
    for block in BLOCKS:
        entry = next((key for key in OTHERS if key[0] == block.page and block.first.startswith(key[1])), None)
        if entry is not None:
            named.add(entry)
        elif block.language == "python":
            python[block.page] = python.get(block.page, 0) + 1
        elif not block.commands():
            unnamed.append(f"{block.page}:{block.line} {block.first}")
    assert not unnamed, "neither commands nor Python, and not in OTHERS"
    assert named == set(OTHERS)
    assert python == {page: count for page, (_, count) in PYTHON.items()}, "PYTHON names the test that runs them"
    for page, (test, _) in PYTHON.items():
        source = (ROOT / "tests" / "docs" / test).read_text(encoding="utf-8")
        assert Path(page).name in source
        assert "exec(" in source or "subprocess.run(" in source


def test_a_command_is_nothing_but_a_command() -> None:
    """A line of a block of commands that starts with none would be taken for the end of the line before."""
    for block in BLOCKS:
        if block.commands():
            assert all(words[0] in (*PROGRAMS, "pip") for words in block.commands()), block


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.first.startswith("body = ")], ids=lambda b: b.page)
def test_a_part_of_a_function_is_python(block: Block) -> None:
    inside = "\n".join(f"    {line}" for line in block.text.splitlines())
    assert ast.parse(f"async def function():\n{inside}\n")


def _runs(words: list[str]) -> bool:
    if words[0] == "compare" and words[1].endswith((".py", ".yaml")):
        return False
    return not any(word in UNRUN for word in words)


def _resolved(words: list[str]) -> None:
    """Parses a command to its arguments and, if it takes keys, to a configuration."""
    options, rest = make_parser().parse_known_args(words)
    assert not [word for word in rest if word.startswith("-")], rest
    more = [*(getattr(options, "overrides", None) or ()), *rest]
    if words[0] in ("run", "show"):
        assert options.pipeline is None or load(options.pipeline, is_dry(more)[1])
    elif words[0] == "resume":
        assert Saved(Path(options.run) / "config.yaml").config(more)
    elif words[0] == "export":
        assert step_of(more) is None or step_of(more) == 20
    elif words[0] == "plan":
        assert parse_overrides(PlanConfig, [word for word in more if "=" in word and not word.startswith("sweep=")])
    elif words[0] == "compare":
        first, *keys = [*options.runs, *rest]
        assert load(first, keys) if first.endswith((".py", ".yaml")) else not keys or Path(first).exists()


@pytest.mark.heavy
@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "dataflow"], ids=" ".join)
def test_a_command_of_a_page(words: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [PLACEHOLDERS.get(word, word) for word in words[1:]]
    if "*" in "".join(arguments[1:2]):  # the shell's
        arguments[1:2] = sorted(str(path) for path in Path().glob(arguments[1]))
    if not _runs(arguments):
        _resolved(arguments)
        return
    shutil.rmtree(here / "my-project", ignore_errors=True)
    code = main(arguments)
    said = capsys.readouterr()
    assert code == 0 or words[1] == "doctor", said.err
    assert said.out
    if "-o" in arguments:
        assert (here / arguments[arguments.index("-o") + 1]).stat().st_size > 0


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] != "dataflow"], ids=" ".join)
def test_another_program_of_a_page(words: tuple[str, ...], here: Path) -> None:
    program, first = words[0], words[1]
    if program == "make":
        assert re.search(rf"^{first}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif "-m" in words:
        assert find_spec(words[words.index("-m") + 1]) is not None
    else:
        assert program in PROGRAMS
        assert (ROOT / first).is_file()


@pytest.mark.parametrize("page", ["docs/tour.md", "docs/timeline.md"])
def test_the_idle_time_of_the_first_trace_is_the_one_shown(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = [block for block in BLOCKS if block.page == page and block.first.startswith("GPU pool idle")]
    assert main(["timeline", str(ROOT / "docs" / "traces" / "baseline.json.gz")]) == 0
    assert " ".join(shown.text.split()) in " ".join(capsys.readouterr().out.split())
