"""Which reward models a run serves, and the sentences about those that it cannot serve."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.reward import model_of, source_of
from dataflow.errors import ConfigError
from dataflow.rewards.naming import JUDGE, SERVED
from dataflow.running.resume import check_changes
from dataflow.running.services import served_models
from dataflow.running.services.agent import _scorer
from dataflow.running.services.hosting import reward_host
from dataflow.running.services.served_models import check_models

PIPELINE = load_pipeline_file(Path(__file__).parents[3] / "pipelines" / "two_judges.py")
AGENTS = ("reward", "rule")
FUNCTION = """
async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    return 0.0
"""


def save_model(path: Path, architecture: str, **config: Any) -> Path:
    """Writes as much of a model as the checks read."""
    path.mkdir()
    labels = {"0": "score"}
    facts = {"model_type": "qwen2", "architectures": [architecture], "max_position_embeddings": 512, "id2label": labels}
    facts |= config
    (path / "config.json").write_text(json.dumps(facts))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    save_file({"score.weight": np.zeros((1, 4), dtype=np.float32)}, path / "model.safetensors")
    return path


@pytest.fixture
def rm(tmp_path: Path) -> Path:
    return save_model(tmp_path / "rm", "Qwen2ForSequenceClassification")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return save_model(tmp_path / "chat", "Qwen2ForCausalLM", quantization_config={"quant_method": "awq"})


@pytest.fixture(autouse=True)
def _vllm_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "vllm_device", lambda: "cpu")


def config(*keys: str) -> Any:
    return parse_overrides(PIPELINE.Config, ["name=a", *keys])


def scorers(found: Any) -> list[str]:
    """Returns what scores for each agent."""
    hosts = [reward_host(found), reward_host(found, "rule", default=PIPELINE.RULE)]
    return [host.options["default"]["target"] for host in hosts]


def test_the_only_model_scores_for_agent_reward_unless_another_agent_names_it(rm: Path, tmp_path: Path) -> None:
    only = f"reward.models.rm.path={rm}"
    assert scorers(config()) == [JUDGE, PIPELINE.RULE]
    assert scorers(config(only)) == [SERVED, PIPELINE.RULE]
    assert scorers(config(only, "rule.model=rm")) == [JUDGE, SERVED]
    assert scorers(config(only, "rule.model=rm", "reward.model=rm")) == [SERVED, SERVED]
    assert scorers(config(only, "judge.url=http://judge", "rule.model=rm")) == [JUDGE, SERVED]
    (tmp_path / "own.py").write_text(FUNCTION)
    own = config(only, f"custom_reward_function.path={tmp_path / 'own.py'}")
    assert model_of(own, source_of(own, "reward")) is None


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        ({"path": "RM"}, (), None),
        ({"path": "CHAT", "kind": "chat"}, (), None),
        ({"path": "RM"}, ("judge.url=http://j", "rule.custom_reward_function.path=ASKS"), None),
        ({"url": ["http://elsewhere", "http://there"], "kind": "pooling"}, (), None),
        ({"path": "no"}, (), "reward.models.m: model no: config.json cannot be read (No such file"),
        ({"path": "RM", "template": "no.jinja"}, (), "there is no file no.jinja"),
        ({"path": "CHAT"}, (), "is a Qwen2ForCausalLM; give one whose config.json names"),
        ({"path": "RM", "kind": "chat"}, (), "is a Qwen2ForSequenceClassification; give one"),
        ({"path": "RM"}, ("ray.gpus_per_worker=1",), "serves its models on device cuda"),
        ({"path": "RM", "placement": "colocated"}, (), "placement=colocated: 1 servers sleep on the GPUs"),
        (
            {"path": "RM", "placement": "colocated", "replicas": 3},
            ("ray.gpus_per_worker=1", "executor=ray"),
            "placement=colocated: 3 servers sleep on the GPUs that trainer and engine share",
        ),
        ({"path": "RM"}, ("rule.model=mm",), "rule.model=mm: there is no reward model of that name; did you mean 'm'?"),
        ({"path": "TWO"}, (), "answers 2 numbers (labels), where a score is one"),
        ({"path": "RM"}, ("judge.url=http://judge",), "reward.models.m: no reward agent uses it"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_sentence(
    model: dict[str, Any],
    keys: tuple[str, ...],
    words: str | None,
    rm: Path,
    chat: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(FUNCTION)
    places = {"RM": str(rm), "CHAT": str(chat)}
    facts = {"id2label": {"0": "x", "1": "x"}}
    places["TWO"] = str(save_model(tmp_path / "TWO", "Qwen2ForSequenceClassification", **facts))
    given = {key: places.get(value, value) if isinstance(value, str) else value for key, value in model.items()}
    keys = tuple(key.replace("ASKS", str(tmp_path / "own.py")) for key in keys)
    refused = pytest.raises(ConfigError, match=re.escape(words)) if words else contextlib.nullcontext()
    with refused:
        check_models(config(f"reward.models={json.dumps({'m': given})}", *keys), AGENTS)


@pytest.mark.parametrize(
    ("found", "words"), [(None, "vLLM is not installed"), ("cuda", "installed is for device cuda")]
)
def test_without_vllm_for_this_device_a_sentence(
    found: str | None, words: str, rm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "vllm_device", lambda: found)
    with pytest.raises(ConfigError, match=words):
        check_models(config(f"reward.models.rm.path={rm}"), AGENTS)


def test_where_a_model_is_served_may_change_when_a_run_resumes(rm: Path) -> None:
    before = config(f"reward.models.rm.path={rm}")
    for key in ("replicas=2", "url=http://rm", "gpu_memory=0.5", "max_num_seqs=9", "routing=cache_aware"):
        check_changes(before, config(f"reward.models.rm.path={rm}", f"reward.models.rm.{key}"), Path("a"))
    for key in ("kind=pooling", "normalize=sigmoid", "template=t.jinja", "dtype=float16"):
        with pytest.raises(ConfigError, match="it would be another run"):
            check_changes(before, config(f"reward.models.rm.path={rm}", f"reward.models.rm.{key}"), Path("a"))


def test_rewards_are_known_again_by_what_scores_not_by_where_it_runs(rm: Path, tmp_path: Path) -> None:
    def scorer(*keys: str, url: list[str] | None = None, path: Path | None = rm) -> str:
        found = config(*([f"reward.models.rm.path={path}"] if path else []), *keys)
        found.reward.models["rm"].url = url or found.reward.models["rm"].url
        options = reward_host(found).options
        return _scorer(None, options["default"], options["options"])

    first = scorer()
    assert scorer("reward.models.rm.replicas=2", url=["http://x"]) == first
    template = tmp_path / "template"
    template.write_text("a")
    other = scorer(f"reward.models.rm.template={template}")
    template.write_text("b")
    texts = {first, other, scorer(f"reward.models.rm.template={template}"), scorer("reward.models.rm.kind=pooling")}
    texts.add(scorer("reward.models.rm.normalize=sigmoid"))
    texts |= {scorer(f"reward.models.rm.{key}") for key in ("dtype=float16", "engine_kwargs={seed: 1}")}
    texts |= {scorer(f"reward.models.rm.url=http://{at}", path=None) for at in ("x", "y")}
    assert len(texts) == 9
    save_file({"score.weight": np.zeros((1, 5), dtype=np.float32)}, rm / "model.safetensors")
    assert scorer() not in texts


def test_a_function_gets_the_address_of_its_model_and_is_known_again_by_them(rm: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTION)
    own = f"rule.custom_reward_function.path={tmp_path / 'own.py'}"

    def options(*keys: str) -> Any:
        return reward_host(config(own, *keys), "rule").options

    def scorer(*keys: str) -> str:
        found = options(*keys)
        return _scorer(found["custom"], found["default"], found["options"])

    model = f"reward.models.rm.path={rm}"
    assert options()["options"].router_address is None
    assert options(model)["options"].router_address == "127.0.0.1:0"
    assert options(model, "rule.router_address=host:1")["options"].router_address == "host:1"
    assert scorer(model) == scorer(model, "reward.models.rm.replicas=2")
    assert len({scorer(), scorer(model), scorer(model, "reward.models.rm.kind=pooling")}) == 3
