"""One run with a LoRA adapter, and what is done with it when it has ended: exported, resumed, refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.errors import ConfigError
from dataflow.running.directory import locked
from dataflow.running.saving.export import step_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
KEYS = (
    "engine.rollout=hf", "executor=inline", "data.prompts=8", "engine.n=2", "engine.max_tokens=8",
    "data.max_prompt_length=200", "data.val_size=8", "policy.order=index", "checkpoint.every=2", "steps=3",
    "val.every=3", "trainer.lora.rank=2", "trainer.lr=1e-2",
    "data.apply_chat_template_kwargs.enable_thinking=false", "name=a", "--quiet",
)  # fmt: skip
ROWS = [json.dumps({"question": f"What is {n} + 2?", "answer": f"#### {n + 2}"}) for n in range(24)]


@dataclass
class Ended:
    """A run that has ended, the model that it began with, and the keys that began it."""

    run: Path
    start: Path
    keys: tuple[str, ...]

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "summary.json").read_text()))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, tiny_qwen: Path) -> Ended:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = tmp_path_factory.mktemp("ended")
    config = AutoModelForCausalLM.from_pretrained(tiny_qwen).config
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config).save_pretrained(place / "start")
    AutoTokenizer.from_pretrained(tiny_qwen).save_pretrained(place / "start")
    (place / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return len(solution_str) / 100\n"
    )
    (place / "train.jsonl").write_text("\n".join(ROWS))
    paths = (f"custom_reward_function.path={place / 'reward.py'}", f"data.train={place / 'train.jsonl'}")
    keys = (*KEYS, *paths, f"model.path={place / 'start'}", f"runs={place / 'runs'}")
    assert main(["run", PIPELINE, *keys]) == 0
    return Ended(place / "runs" / "a", place / "start", keys)


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command that ends with one sentence and code 2; returns the sentence."""
    capfd.readouterr()
    assert main(list(words)) == 2
    said = capfd.readouterr().err.strip()
    assert len(said.splitlines()) == 1, said
    return said


def digest_of(model: Any) -> str:
    """Returns the digest of the weights of a model of transformers, as a run's summary has it."""
    from dataflow.engines.verl.model import digest

    return digest(dict(model.named_parameters()))


def test_the_model_is_exported_at_the_end_and_of_any_checkpoint(
    ended: Ended, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    load, run, sha256 = AutoModelForCausalLM.from_pretrained, ended.run, ended.summary["weights_sha256"]
    assert digest_of(load(run / "model")) == sha256
    text = (run / "model" / "README.md").read_text()
    for words in ("# a, step 3", 'to serve it with as well: `{"enable_thinking": false}`.', "val-core/"):
        assert words in text
    assert main(["export", str(run), "-o", str(tmp_path / "mine")]) == 0
    assert digest_of(load(tmp_path / "mine")) == sha256
    assert main(["export", str(run), "step=2"]) == 0
    assert digest_of(load(run / "model-2")) != sha256
    # The adapter alone, beside the model that the run began with, is the run's model.
    assert main(["export", str(run), "--adapter"]) == 0
    names = {path.name for path in (run / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    whole = PeftModel.from_pretrained(load(ended.start), str(run / "adapter"))
    assert digest_of(whole.merge_and_unload()) == sha256

    assert f"{run / 'model'} is there already, from the end of the run" in refused(capfd, "export", str(run))
    assert "there are those of steps 2, 3" in refused(capfd, "export", str(run), "step=7")
    assert "no run at" in refused(capfd, "export", str(run) + "x")
    with pytest.raises(ConfigError, match=r"export takes step=N alone"):
        step_of(["steps=3"])


def test_other_data_is_refused_or_allowed(ended: Ended, capfd: pytest.CaptureFixture[str]) -> None:
    data = ended.run.parents[1] / "train.jsonl"
    check = ("run", PIPELINE, *ended.keys, "resume=auto", "steps=4", "dry=true")
    try:
        data.write_text("\n".join(reversed(ROWS)))
        for more in ((), ("resume.allow=[data.val]",)):
            said = refused(capfd, "resume", str(ended.run), "steps=4", "--quiet", *more)
            assert f"data.train={data}: its rows are not those that the run '{ended.run}' was begun with" in said
            assert "allow it with resume.allow=[data]" in said
        assert main([*check, "resume.allow=[data]"]) == 0
        data.write_text("\n\n".join(row.replace(": ", ":  ") for row in ROWS))
        assert main(list(check)) == 0, "the same rows, written in another way"
    finally:
        data.write_text("\n".join(ROWS))


def test_what_cannot_be_resumed_is_one_sentence(
    ended: Ended, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ignored = shutil.ignore_patterns("checkpoints", "model*", "summary.json")
    run = shutil.copytree(ended.run, tmp_path / "a", ignore=ignored)

    def said(*keys: str) -> str:
        before = sorted(run.rglob("*"))
        text = refused(capfd, "resume", str(run), *keys, "--quiet")
        assert sorted(run.rglob("*")) == before
        return text

    assert "has no checkpoint to resume from; begin it again with 'dataflow run' and resume=auto, which takes" in said()
    assert "leave it out, or allow it with resume.allow=[seed]" in said("seed=5")
    assert "engine.n=4: the run" in said("engine.n=4")
    assert "leave it out, or allow it" in said("policy=baseline")
    assert "unknown key 'stepz'" in said("stepz=5")
    assert "give name=" in refused(capfd, "run", PIPELINE, *ended.keys, "name=null", "resume=auto")
    with locked(run):
        assert "is still running (process" in said()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("pipelines/gsm8k_grpo.py", "pipelines/gone.py"))
    assert "its pipeline file" in said()
    (run / "config.yaml").write_text("[1")
    assert "cannot be read" in said()


def test_a_run_that_was_killed_after_its_last_checkpoint_is_finished_once(
    ended: Ended, capfd: pytest.CaptureFixture[str]
) -> None:
    run, whole = ended.run, ended.summary
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [row for row in rows if '"step": 3' not in row or "val-core/" not in row]
    assert len(kept) == len(rows) - 1
    (run / "metrics.jsonl").write_text("".join(kept))
    (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    assert main(["resume", str(run), "--quiet"]) == 0
    found = ended.summary
    for name in ("status", "steps", "weights_sha256", "evaluations"):
        assert found[name] == whole[name], name
    assert found["rewards"]["cached"] == 8, "the last evaluation is not asked again"
    assert (run / "model" / "config.json").exists()

    def times() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.name != ".lock"}

    before = times()
    capfd.readouterr()
    assert main(["run", PIPELINE, *ended.keys, "resume=auto"]) == 0
    assert capfd.readouterr().out == f"run '{run}' is complete: 3 steps.\n"
    assert "is complete: 3 steps; give a larger steps= to go on" in refused(capfd, "resume", str(run), "--quiet")
    assert times() == before
