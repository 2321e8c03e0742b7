"""The trained model of a run as a Hugging Face directory: by itself at the end, and of any checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.running.saving.export import step_of
from tests.running.test_resume import SMALL

PIPELINE = str(Path(__file__).parents[3] / "pipelines" / "gsm8k_grpo.py")


def digest_of(directory: Path, dtype: Any = None) -> str:
    """Loads a model with transformers; returns the digest of its weights, as a run's summary has it."""
    from transformers import AutoModelForCausalLM

    from dataflow.engines.verl.model import digest

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return digest(dict(model.named_parameters()))


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_the_model_of_a_run(tmp_path: Path, tiny_qwen: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import enable_progress_bar

    config = AutoModelForCausalLM.from_pretrained(tiny_qwen).config
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    start = tmp_path / "start"
    model.save_pretrained(start)
    AutoTokenizer.from_pretrained(tiny_qwen).save_pretrained(start)
    runs, run = tmp_path / "runs", tmp_path / "runs" / "a"
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return len(solution_str) / 100\n"
    )
    reward = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    lora = ("trainer.lora.rank=2", "trainer.lr=1e-2", "profile.steps=[2]")
    keys = (*SMALL, *lora, "steps=3", "val.every=3", f"model.path={start}", reward, f"runs={runs}", "name=a", "--quiet")
    keys += ("data.apply_chat_template_kwargs.enable_thinking=false",)
    assert main(["run", PIPELINE, *keys]) == 0
    sha256 = json.loads((run / "summary.json").read_text())["weights_sha256"]

    assert digest_of(run / "model") == sha256
    text = (run / "model" / "README.md").read_text()
    assert "# a, step 3" in text
    assert 'Options of the chat template, to serve it with as well: `{"enable_thinking": false}`.' in text
    assert "val-core/" in text
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer("1 + 1")["input_ids"] == AutoTokenizer.from_pretrained(tiny_qwen)("1 + 1")["input_ids"]

    enable_progress_bar()
    capfd.readouterr()
    assert main(["export", str(run), "-o", str(tmp_path / "mine")]) == 0
    assert "%|" not in capfd.readouterr().err, "no progress bar off a terminal"
    assert digest_of(tmp_path / "mine") == sha256
    assert main(["export", str(run), "step=2"]) == 0
    assert digest_of(run / "model-2") != sha256

    check_adapter(run, start, sha256)
    check_profile(run, capfd)

    def refused(*words: str) -> str:
        capfd.readouterr()
        assert main(["export", *words]) == 2
        said = capfd.readouterr().err.strip()
        assert len(said.splitlines()) == 1, said
        return said

    assert f"{run / 'model'} is there already, from the end of the run or an earlier export" in refused(str(run))
    assert "there are [2, 3]" in refused(str(run), "step=7")
    assert "no run at" in refused(str(run) + "x")
    (run / "checkpoints" / "step_000003" / "states.pkl").write_bytes(b"")
    assert "no whole checkpoint of that step" in refused(str(run), "step=3", "-o", str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def check_adapter(run: Path, start: Path, sha256: str) -> None:
    """The adapter alone, beside the model that the run began with, is the run's model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from dataflow.engines.verl.model import digest

    assert main(["export", str(run), "--adapter"]) == 0
    names = {path.name for path in (run / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert f"base_model: {start}" in (run / "adapter" / "README.md").read_text()
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), str(run / "adapter"))
    assert digest(dict(whole.merge_and_unload().named_parameters())) == sha256


def check_profile(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The tasks of step 2 that compute on the GPUs are profiled, and shown."""
    found = {path.name for path in (run / "profile").iterdir()}
    assert {"rollout-2.json.gz", "old_log_prob-2.json.gz", "actor_update-2.1.json.gz"} <= found
    assert not any("-1." in name or "-3." in name or name.startswith(("stage_", "write_")) for name in found)
    capfd.readouterr()
    assert main(["timeline", str(run)]) == 0
    text = capfd.readouterr().out
    line = next(line for line in text.splitlines() if line.strip().startswith("actor_update[2.1]"))
    assert "aten::" in line
    assert "%" in line


@pytest.mark.parametrize("words", [["step=x"], ["steps=3"], ["step=1", "step=2"], ["3"]])
def test_only_a_step_can_be_given(words: list[str]) -> None:
    from dataflow.errors import ConfigError

    with pytest.raises(ConfigError, match=r"export takes step=N alone"):
        step_of(words)


def test_a_directory_without_a_run_does_not_suggest_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    for command in ("export", "resume"):
        assert main([command, str(tmp_path / "a")]) == 2
        said = capsys.readouterr().err
        assert said == f"ConfigError: no run at '{tmp_path / 'a'}'; give a run directory (runs/NAME).\n"
