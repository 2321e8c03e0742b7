"""Pipeline files: how they load, and errors in them, which name the file and the line."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dataflow.config.base import PipelineConfig
from dataflow.config.loading.pipeline_file import inputs_of, load_pipeline_file, pipeline_of
from dataflow.errors import ConfigError, UserError

GOOD = '''
"""A pipeline."""
from __future__ import annotations
from dataflow import Pipeline, stage
from dataflow.config.run import RunConfig

class Config(RunConfig):
    extra: int = 3
    """Something of its own."""

def helper():
    return 7

def pipeline(config: Config):
    return Pipeline([])

def inputs(config):
    return {"own": lambda step: step + helper()}
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_a_pipeline_file_loads_and_its_functions_travel_by_value(file: Path) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    module = load_pipeline_file(file)
    config = module.Config(extra=4)
    assert pipeline_of(module, config).stages == ()
    assert inputs_of(module, config)["own"](1) == 8
    sent = cloudpickle.dumps(module.helper)
    file.unlink()
    assert pickle.loads(sent)() == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Config = 3\ndef pipeline(config): ...", "'Config' is 3; define 'class Config(PipelineConfig)', or"),
        (
            "from dataflow.config.run import RunConfig as Config",
            "lacks 'pipeline'; define pipeline(config) -> Pipeline.",
        ),
        ("x = 1\nimport no_such_module", "cannot be loaded (line 2): ModuleNotFoundError: No module named"),
        ("def pipeline(:", "cannot be loaded: SyntaxError: "),
        ("def pipeline(config): return [1]", "pipeline(config) returned [1]; return a Pipeline(...)."),
        ("def pipeline(config):\n    1 / 0", "pipeline(config) failed (line 2): ZeroDivisionError: division by zero."),
        (
            "def pipeline(config): ...\ndef inputs(config): return {'a': 3}",
            "inputs(config) returned {'a': 3}; return func",
        ),
        (
            "from dataflow import Pipeline, stage\n@stage(writes='a', on='gpu')\ndef f(b): ...\n"
            "def pipeline(config): return Pipeline([f])",
            "(line 4): stage 'f' reads field 'b', but no stage writes it",
        ),
    ],
)
def test_an_error_in_a_file_is_one_sentence_with_its_cause(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read(file)
    assert message in str(caught.value)
    assert f"pipeline file '{file}'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (caught.value.__cause__ is None) == ("Error: " not in message and "(line" not in message)


def read(file: Path) -> None:
    module = load_pipeline_file(file)
    inputs_of(module, PipelineConfig())
    pipeline_of(module, PipelineConfig())


def test_a_module_beside_a_pipeline_file_is_found_by_a_setting_that_the_error_names(file: Path) -> None:
    (file.parent / "helpers.py").write_text("")
    file.write_text("import helpers")
    with pytest.raises(ConfigError, match=rf"No module named .*; .*start with PYTHONPATH={file.parent} in the env"):
        load_pipeline_file(file)


def test_a_missing_pipeline_file_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pipeline file '.*mnie.py': there is no such file; give the path"):
        load_pipeline_file(file.with_name("mnie.py"))
    (file.parent / "x.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"is not a \.py file"):
        load_pipeline_file(file.parent / "x.yaml")
