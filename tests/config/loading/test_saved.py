"""A run's config.yaml: what it says of its origin, and how it is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from loguru import logger

from dataflow.config.loading.saved import ORIGIN, Saved, dump, load
from dataflow.config.run import RunConfig, parse_overrides
from dataflow.errors import ConfigError
from dataflow.running.resume import check_changes

FILE = """
from dataflow.config.run import RunConfig
from dataflow.graph import Pipeline

class Config(RunConfig):
    mine: int = 3

def pipeline(config):
    return Pipeline([])
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The configuration of a run of a pipeline file."""
    (tmp_path / "own.py").write_text(FILE)
    config = parse_overrides(RunConfig, ["policy=both", "trainer.lr=1e-5", "name=x", "seed=7"])
    (tmp_path / "config.yaml").write_text(dump(config, tmp_path / "own.py"))
    return tmp_path / "config.yaml"


def test_it_names_what_the_run_was_made_by(path: Path) -> None:
    origin = yaml.safe_load(path.read_text())[ORIGIN]
    assert origin["pipeline"] == str(path.parent / "own.py")
    assert len(origin["sha256"]) == 64
    assert {"python", "numpy"} <= set(origin["versions"])


def test_it_is_read_as_it_was_and_with_changes(path: Path) -> None:
    saved = Saved(path)
    assert (saved.before().seed, saved.before().name, saved.before().mine) == (7, "x", 3)  # type: ignore[attr-defined]
    config = saved.config(["seed=8", "mine=4"])
    assert (config.seed, config.mine, config.trainer.lr) == (8, 4, 1e-5)  # type: ignore[attr-defined]
    assert config.name == "x"
    assert saved.again([]).name is None


def test_another_policy_brings_its_own_numbers(path: Path) -> None:
    assert Saved(path).config(["policy=baseline"]).policy.resolve(4).split == 1
    assert Saved(path).config(["policy.max_staleness=2"]).policy.resolve(4).max_staleness == 2


def test_a_file_written_by_hand_names_its_pipeline_from_its_own_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    recipe = path.parent / "recipes" / "mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text("origin: {pipeline: ../own.py}\npolicy: baseline\ntrainer: {lr: 1.0e-6, betas: [0.9, 0.95]}\n")
    monkeypatch.chdir("/")
    module, config = load(recipe, ["trainer.lr=2e-6"])
    assert (module.__file__, config.policy.preset) == (str(path.parent / "own.py"), "baseline")
    assert (config.trainer.lr, config.trainer.betas) == (2e-6, (0.9, 0.95))  # type: ignore[attr-defined]
    assert load(recipe, ["policy.order=index"])[1].policy.preset == "baseline"
    assert load(recipe, ["policy=both"])[1].policy.preset == "both"
    recipe.write_text("origin: {pipeline: ../own.py}\nresume: auto\nname: x\nalgorithm: gspo\n")
    config = load(recipe, ["policy=both"])[1]
    assert (config.resume.mode, config.algorithm.policy_loss) == ("auto", "gspo")  # type: ignore[attr-defined]
    assert load(recipe, ["algorithm=drgrpo"])[1].algorithm.policy_loss == "vanilla"  # type: ignore[attr-defined]
    assert warned == []
    recipe.write_text("origin: {pipeline: ../own.py}\npolicy: [1]\n")
    with pytest.raises(ConfigError, match="policy"):
        load(recipe, ["seed=1"])


def test_a_changed_pipeline_file_is_a_warning_and_a_missing_one_an_error(path: Path) -> None:
    said: list[str] = []
    sink = logger.add(lambda message: said.append(str(message)), format="{message}")
    try:
        (path.parent / "own.py").write_text(FILE + "\nMORE = 1\n")
        Saved(path).config([])
    finally:
        logger.remove(sink)
    assert ["has changed since" in line for line in said] == [True]
    (path.parent / "own.py").unlink()
    with pytest.raises(ConfigError, match=r"its pipeline file .*own\.py is gone"):
        Saved(path)


def test_a_secret_has_to_be_given_again(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    values["judge"]["url"] = "https://***@judge.example.com/v1"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"does not hold the secret in 'judge\.url'; give it again: judge\.url="):
        Saved(path).config([])
    assert Saved(path).before().judge.url == "https://***@judge.example.com/v1"
    assert Saved(path).config(["judge.url=https://a:b@judge.example.com/v1"]).judge.url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "is not the configuration of a run"),
        ("seed: 1\norigin: own.py", "does not name its pipeline file"),
        ("seed: 1\nseed: 2", r"cannot be read: key 'seed' is given twice; give it once \(line 2\)"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Saved(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="No such file"):
        Saved(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 1.5", "steps=1.5: Input should be a valid integer"),
        ("reward: {extra-groups: 3}", "unknown key 'reward.extra-groups'; did you mean 'reward.extra_groups'"),
        ("reward: 3", "reward=3: Input should be a valid dictionary"),
    ],
)
def test_a_value_that_does_not_fit_is_named_by_its_key(path: Path, text: str, said: str) -> None:
    recipe = path.parent / "recipe.yaml"
    recipe.write_text(f"origin: {{pipeline: {path.parent / 'own.py'}}}\n{text}")
    with pytest.raises(ConfigError, match=said):
        load(recipe, [])


def test_an_empty_section_has_its_defaults(path: Path) -> None:
    recipe = path.parent / "recipe.yaml"
    recipe.write_text(f"origin: {{pipeline: {path.parent / 'own.py'}}}\npolicy:\nreward:\njudge:\nsteps: 7\n")
    config = load(recipe, [])[1]
    assert (config.steps, config.policy, config.reward) == (7, RunConfig().policy, RunConfig().reward)  # type: ignore[attr-defined]
    assert load(recipe, ["reward.rpm=3"])[1].reward.rpm == 3  # type: ignore[attr-defined]


LIKE_NUMBERS = {"a": "1e5", "b": "08", "c": ["1:30", "010"], "1e5": 1e-5, "d": "2001-01-01", "e": "yes"}


def test_a_text_that_looks_like_a_number_is_kept(path: Path) -> None:
    given = {"reward": {"manager_kwargs": LIKE_NUMBERS}, "name": "08", "model": {"path": "1e5"}}
    path.write_text(dump(parse_overrides(RunConfig, [], given), path.parent / "own.py"))
    before = Saved(path).before()
    assert (before.name, before.model.path) == ("08", "1e5")  # type: ignore[attr-defined]
    assert before.reward.manager_kwargs == LIKE_NUMBERS  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["steps=60", "reward.concurrency=4", "trainer.world_size=2"])
def test_what_changes_no_sample_may_change(key: str) -> None:
    check_changes(RunConfig(), parse_overrides(RunConfig, [key]), Path("runs/a"))


@pytest.mark.parametrize("key", ["seed=5", "policy=baseline", "trainer.lr=1"])
def test_what_makes_another_run_must_be_allowed(key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=r"would be another run; leave it out, or allow it with resume\.allow="):
        check_changes(RunConfig(), parse_overrides(RunConfig, [key]), Path("runs/a"))
    check_changes(RunConfig(), parse_overrides(RunConfig, [key, f"resume.allow=[{name}]"]), Path("runs/a"))


@pytest.mark.parametrize("keys", [["policy=both"], ["policy=both", "policy.split=2"], ["policy.preset=off-policy"]])
def test_the_arguments_of_a_run_are_no_change_of_it(keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE)
    (tmp_path / "config.yaml").write_text(dump(parse_overrides(RunConfig, keys), tmp_path / "own.py"))
    saved = Saved(tmp_path / "config.yaml")
    check_changes(saved.before(), saved.config(keys), tmp_path)
    with pytest.raises(ConfigError, match=r"policy\.preset=baseline"):
        check_changes(saved.before(), saved.config(["policy=baseline"]), tmp_path)
