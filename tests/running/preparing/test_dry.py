"""`dataflow run ... dry=true`: all problems at once, the exit code, and nothing left behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.config.loading.saved import load
from dataflow.config.run import RunConfig
from dataflow.running import dry as dry_run
from dataflow.running.preparing import preparation
from dataflow.running.preparing.check import make_all
from dataflow.running.preparing.preparation import Preparation, toy_settings
from dataflow.running.reporting.progress import Progress
from tests.rigs.logs import logged
from tests.rigs.stand_ins import QWEN_05B, show_gpus, write_model

ROOT = Path(__file__).parents[3]
PIPELINE = str(ROOT / "pipelines" / "gsm8k_grpo.py")
PROBLEM = {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}
SIZES = ("data.train_size=200", "data.val_size=8")
Dry = Callable[..., tuple[int, dict[str, str], list[str]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("stand-in") / "qwen", QWEN_05B)


@pytest.fixture
def dry(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Dry:
    """Makes a dry run; returns the exit code, what was found by what was checked, and the problems."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dry_run, "PATIENCE_S", 0.1)  # no test's servers start later

    def left() -> list[Path]:
        return sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts)  # Python's own

    def run(*keys: str, pipeline: str = PIPELINE) -> tuple[int, dict[str, str], list[str]]:
        before = left()
        code = main(["run", pipeline, "dry=true", "--json", *keys])
        found = json.loads(capsys.readouterr().out)
        assert left() == before, "a dry run leaves something behind"
        said = {each["what"]: f"{each['state']}: {each['message']}" for each in found}
        return code, said, [each["message"] for each in found if each["state"] == "problem"]

    return run


@pytest.mark.slow
def test_of_a_run_that_can_start_every_line_is_ok(dry: Dry, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = (f"model.path={model}", "engine.rollout=hf", *SIZES, "trainer.lr=1e-6", "engine.max_tokens=64")
    code, found, problems = dry(*keys)
    assert (code, problems) == (0, [])
    assert set(found) == {
        "configuration", "packages", "directory", "pipeline", "engine", "reward", "data", "model", "prompts",
        "disk",
    }  # fmt: skip
    assert found["pipeline"].startswith("ok: 16 stages, 30 steps under both (4 parts, max_staleness 1)")
    assert found["disk"].startswith("ok: 3 checkpoints of 5.5 GiB and a model of at most 1.8 GiB")
    assert main(["run", PIPELINE, *keys, "dry=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no problems; nothing was started"
    assert {line.split()[0] for line in lines[:-2]} == {"ok"}


def test_independent_problems_are_shown_at_once(dry: Dry, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, found, problems = dry(
        "stpes=3", "trainer.lr=fast", "data.train=no.jsonl", "model.path=no/such/dir", "runs=file/runs",
        "judge.url=http://127.0.0.1:9", "judge.api_key_env=NO_SUCH_KEY", "tracking.backends=[swanlab]",
        "ray.gpus_per_worker=1", "trainer.world_size=8",
    )  # fmt: skip
    assert code == 2
    words = (
        "unknown key 'stpes'; did you mean 'steps'?", "trainer.lr=fast: Input should be a", "tracking.backends: ",
        "runs=file/runs: ", "judge.api_key_env: the environment variable NO_SUCH_KEY is not set",
        "no.jsonl: there is no such file", "model.path=no/such/dir does not exist",
        "the run needs 8 GPUs, and finds none",
    )  # fmt: skip
    assert len(problems) == len(words), problems
    for sentence in words:
        assert any(sentence in problem for problem in problems), (sentence, problems)
    assert found["prompts"] == "not checked: it depends on the check 'data'"
    assert found["GPU memory"] == "not checked: it depends on the check 'memory'"


@pytest.mark.parametrize(
    ("pipeline", "key", "others"),
    [
        ("gsm8k_grpo", "reward.models.rm.path=no/such/dir", {"reward"}),
        ("distill", "teacher.path=no/such/dir", {"inputs", "memory", "prompts"}),
        ("ppo_critic", "critic.path=/no/where", {"memory"}),
        ("gsm8k_grpo", "engine.stop=nonsense", {"reward", "inputs"}),
    ],
)
def test_a_wrong_value_is_one_problem_and_what_depends_on_it_has_its_line(
    pipeline: str, key: str, others: set[str], dry: Dry, model: Path
) -> None:
    keys = [*SIZES, "engine.rollout=hf", f"model.path={model}", key]
    code, found, problems = dry(*keys, pipeline=str(ROOT / "pipelines" / f"{pipeline}.py"))
    assert code == 2
    assert len(problems) == 1, problems
    for name in others:
        assert found[name].startswith("not checked: it depends on the check "), (name, found[name])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["algorithm.lam=0.9"], "algorithm.lam has no effect with algorithm.adv_estimator=grpo; change"),
        (
            ["data.apply_chat_template_kwargs={message: 0, enable_thinkin: false}"],
            "data.apply_chat_template_kwargs.enable_thinkin has no effect: the chat template of model.path=",
        ),
        (["data.train=train.jsonl"], "data.val: no file is given, so that evaluations use generated word problems"),
        (["data.train=train.jsonl", "data.val=train.jsonl"], None),
    ],
)
def test_a_start_says_what_a_dry_run_says(
    keys: list[str], said: str | None, dry: Dry, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text((json.dumps(PROBLEM) + "\n") * 40)
    sizes = ("data.val_size=8",)
    sizes += () if any(key.startswith("data.train=") for key in keys) else ("data.train_size=200",)
    keys = [f"model.path={model}", "trainer.lr=1e-6", "engine.max_tokens=64", "engine.rollout=hf", *sizes, *keys]
    _code, found, problems = dry(*keys)
    assert problems == []
    if said is None:
        assert "settings" not in found
        return
    assert found["settings"].startswith(f"warning: {said}")
    module, config = load(PIPELINE, keys)
    with logged() as messages:
        make_all(Preparation(config, module, Progress(quiet=True)).checks())
    assert [f"warning: {message}" for message in messages] == [found["settings"]]


@pytest.mark.parametrize(
    ("pipeline", "keys", "wrong"),
    [
        ("gsm8k_grpo", (), {"trainer.lr=0.0002": "1e-06", "engine.max_tokens=24": "1024"}),
        ("gsm8k_grpo", ("trainer.lr=2e-4", "engine.max_tokens=24"), {}),  # what the user gave is no oversight
        ("ppo_critic", ("trainer.lr=1e-6", "engine.max_tokens=512"), {"critic.lr=0.001": "1e-05"}),
    ],
)
def test_a_real_model_with_defaults_of_the_tiny_one(
    pipeline: str, keys: tuple[str, ...], wrong: dict[str, str], model: Path
) -> None:
    _module, config = load(str(ROOT / "pipelines" / f"{pipeline}.py"), [f"model.path={model}", *keys])
    assert isinstance(config, RunConfig)
    found = list(toy_settings(config))
    assert len(found) == len(wrong)
    for said, (key, usual) in zip(found, wrong.items(), strict=True):
        assert said.startswith(f"{key} is the default for the tiny model, ")
        assert said.endswith(f"={usual} or the like.")


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_recipe_has_them(recipe: Path) -> None:
    _module, config = load(str(recipe), [])
    assert isinstance(config, RunConfig)
    assert list(toy_settings(config)) == []


def test_the_command_line_is_read_first(dry: Dry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", PIPELINE, "dry=maybe"]) == 2
    assert "dry" in capsys.readouterr().err
    (tmp_path / "broken.py").write_text("def pipeline(config:\n")
    code, found, problems = dry("steps=3", pipeline=str(tmp_path / "broken.py"))
    assert (code, list(found)) == (2, ["configuration", "all else"])
    assert "broken.py' cannot be loaded" in problems[0]


def test_a_model_that_a_start_makes_or_downloads_is_not_checked(dry: Dry) -> None:
    code, found, _problems = dry(*SIZES, pipeline=str(ROOT / "pipelines" / "distill.py"))
    assert code == 0
    assert found["model"].startswith("not checked: a tiny Qwen2")
    assert found["inputs"] == "not checked: it depends on the check 'prompts'"
    code, found, _problems = dry("model.path=org/model", *SIZES)
    assert code == 0
    assert "a start downloads it, and 'hf download org/model' does so now" in found["model"]


@pytest.fixture
def gpu_keys(model: Path) -> tuple[str, ...]:
    return (f"model.path={model}", "engine.rollout=vllm", "ray.gpus_per_worker=1", "trainer.max_tokens_per_gpu=8192",
            *SIZES)  # fmt: skip


@pytest.mark.slow
def test_memory_is_compared_with_what_is_free_on_the_gpus(
    dry: Dry, gpu_keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _code, found, _problems = dry(*gpu_keys)
    assert "not checked: this machine has no GPU to compare it with: rollout " in found["GPU memory"]
    show_gpus(monkeypatch, tmp_path / "bin", 1)
    code, found, problems = dry(*gpu_keys)
    assert (code, problems) == (0, []), problems
    assert found["GPUs"] == "ok: 1 of 1"
    assert "rollout 48.0 GiB" in found["GPU memory"]
    assert "at most 54.5 GiB of 80.0 GiB" in found["GPU memory"]
    show_gpus(monkeypatch, tmp_path / "bin", 1, used=50)
    _code, _found, (problem,) = dry(*gpu_keys)
    assert "of which other processes use 50.0 GiB: too much for GPU 0; give more ranks" in problem


def test_a_run_needs_room_for_its_checkpoints_and_its_model(
    dry: Dry, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (f"model.path={model}", "engine.rollout=hf", *SIZES)
    monkeypatch.setattr(preparation, "free_disk", lambda place: 2 << 30)
    _code, _found, (problem,) = dry(*keys)
    assert problem.startswith(
        "runs=runs: 3 checkpoints of 5.5 GiB and a model of at most 1.8 GiB need 18.4 GiB, and 2.0"
    )
    _code, found, problems = dry(*keys, "checkpoint.every=0", "checkpoint.export=false")
    assert problems == []
    assert found["disk"] == "ok: trace, samples and metrics; 2.0 GiB are free"


def test_servers_elsewhere_are_asked_and_no_password_is_shown(dry: Dry, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        _code, found, problems = dry(f"judge.url={url}", *SIZES)
    assert found["judge"].startswith(f"problem: judge.url={url}: the server does not answer GET /v1/models within")
    assert len(problems) == 1
    keys = ("engine.rollout=http", "engine.urls=[http://me:hunter2secretZ@127.0.0.1:9]")
    code, found, problems = dry(*keys)  # before the model is there
    assert (code, len(problems)) == (2, 1)
    assert found["servers"].startswith("problem: engine.urls: http://127.0.0.1:9 does not answer within 0.1 s")
    assert "127.0.0.1:9" in found["configuration"]
    assert "hunter2secretZ" not in str(found)
    _code, found, _problems = dry(*keys, "engine.weights_dir=/proc/nope")
    assert found["servers"].startswith("problem: engine.weights_dir=/proc/nope: /proc cannot be written")
