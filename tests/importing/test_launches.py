"""Launches of verl for GSM8K and the published recipe's become configurations of the same training."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import ConfigError
from dataflow.importing.command import import_launch
from dataflow.importing.imported import Imported
from dataflow.importing.settings import defaults, of_launch
from dataflow.rewards.gsm8k import VERLS_STRICT
from pipelines import gsm8k_grpo, ppo_critic
from tests.importing.launches import GRPO, PPO, filled

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(120),
]
PIPELINES = {"pipelines/gsm8k_grpo.py": gsm8k_grpo, "pipelines/ppo_critic.py": ppo_critic}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with as many problems as GSM8K has for training."""
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    file.write_text("{}\n" * 7473)
    return file


def imported(launch: str, rows: Path, *more: str, name: str = "run.sh") -> Imported:
    script = rows.parent / name
    script.write_text(filled(launch, str(rows)))
    return import_launch([str(script), *more])


def built(found: Imported) -> Any:
    """Returns the configuration that the new script's pipeline itself makes of the overrides."""
    command = found.script().replace("\\\n", "")
    words = shlex.split(next(line for line in command.splitlines() if line.startswith("dataflow run ")))
    assert words[:2] == ["dataflow", "run"]
    assert words[-1] == "$@"
    assert words[3:-1] == found.arguments
    return parse_overrides(PIPELINES[words[2]].Config, words[3:-1])


def test_grpo(rows: Path) -> None:
    found = imported(GRPO, rows)
    config = built(found)
    assert found.pipeline == "pipelines/gsm8k_grpo.py"
    assert (config.steps, config.data.prompts, config.trainer.mini_batches, config.engine.n) == (105, 1024, 4, 5)
    assert (config.data.train, config.engine.max_tokens, config.data.max_prompt_length) == (str(rows), 1024, 512)
    assert (config.trainer.lr, config.trainer.weight_decay, config.trainer.betas) == (1e-6, 0.01, (0.9, 0.999))
    assert (config.trainer.world_size, config.trainer.micro_batch_size, config.trainer.warmup_steps) == (8, 32, 0)
    assert (config.engine.tensor_parallel, config.engine.replicas, config.ray.gpus_per_worker) == (2, 4, 1)
    assert (config.algorithm.adv_estimator, config.algorithm.use_kl_loss) == ("grpo", True)
    assert (config.val.every, config.checkpoint.every, config.name) == (5, 20, "qwen2_7b_grpo")
    assert (config.policy.preset, config.resume.mode, config.tracking.backends) == (
        "baseline",
        "auto",
        ["console", "wandb"],
    )
    assert config.custom_reward_function.path == "pkg://verl.utils.reward_score"
    assert config.custom_reward_function.name == "default_compute_score"
    assert f"#   {VERLS_STRICT}.\n" in found.script()
    assert found.lost == []
    assert config.trainer.gradient_checkpointing is True


def test_ppo_of_two_files(rows: Path) -> None:
    found = imported(PPO, rows)
    config = built(found)
    assert found.pipeline == "pipelines/ppo_critic.py"
    assert config.data.train == [str(rows), str(rows)]
    assert config.steps == 2 * 7473 // 1024 * 15
    assert (config.algorithm.adv_estimator, config.algorithm.whiten, config.algorithm.lam) == ("gae", "step", 1.0)
    assert (config.critic.path, config.critic.lr, config.critic.micro_batch_size) == (
        "Qwen/Qwen2-7B-Instruct",
        1e-5,
        32,
    )
    assert (config.critic.lora.rank, config.critic.param_offload, config.critic.lr_scheduler) == (
        None,
        False,
        "constant",
    )
    assert (config.critic.warmup, config.critic.mini_batches, config.engine.n) == (2, None, 1)
    assert config.trainer.max_tokens_per_gpu == 24000
    assert "critic.use_dynamic_bsz" in {each.key for each in found.lost}  # it follows the actor's in verl


def test_a_launch_that_trains_by_megatron_is_read(rows: Path) -> None:
    found = imported(GRPO.replace("fsdp_config", "megatron"), rows, "--config-name=ppo_megatron_trainer")
    assert built(found).steps == 105
    assert "training is FSDP2" in next(each.instead for each in found.lost if each.key.endswith("actor.strategy"))


def test_a_resolved_configuration_is_its_launch(rows: Path) -> None:
    from omegaconf import OmegaConf

    launch = imported(GRPO, rows)
    whole = OmegaConf.create(defaults("dp"))
    words = shlex.split(filled(GRPO, str(rows)).replace("\\\n", ""))
    for key, value in of_launch(words[words.index("verl.trainer.main_ppo") + 1 : -1], "x").values.items():
        OmegaConf.update(whole, key, value, force_add=True)
    file = rows.parent / "config.yaml"
    file.write_text(yaml.safe_dump(OmegaConf.to_container(whole, resolve=True)))
    found = import_launch([str(file)])
    assert found.overrides == launch.overrides
    assert {each.key for each in found.lost} == {each.key for each in launch.lost}


def test_a_reward_model(rows: Path) -> None:
    more = ["reward.reward_model.enable=True", "reward.reward_model.model_path=/rm"]
    more += ["reward.reward_model.rollout.tensor_model_parallel_size=4", "reward_model.reward_manager=dapo"]
    more += ["+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"]
    more += ["+reward_model.reward_kwargs.overlong_buffer_cfg.len=64"]
    config = built(imported(GRPO, rows, *more))
    model = config.reward.models["rm"]
    assert (model.path, model.kind, model.placement) == ("/rm", "classify", "colocated")
    assert (model.replicas, model.tensor_parallel, model.gpu_memory) == (2, 4, 0.5)
    assert (config.reward.manager, config.reward.manager_kwargs) == ("dapo", {"overlong_buffer_len": 64})
    assert config.custom_reward_function.path is None
    own = ["reward.reward_model.enable_resource_pool=True", "reward.reward_model.nnodes=1"]
    config = built(imported(GRPO, rows, *more, *own, "reward.reward_model.n_gpus_per_node=4"))
    assert (config.reward.models["rm"].placement, config.reward.models["rm"].replicas) == ("own", 1)


MODEL, OPTIM, FSDP = (f"actor_rollout_ref.{section}" for section in ("model", "actor.optim", "actor.fsdp_config"))


CONVERTED: list[dict[str, dict[str, Any]]] = [
    {
        "actor_rollout_ref.rollout.do_sample=False": {"engine.temperature": 0.0},
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True": {"val.temperature": 0.0},
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.7": {"val.top_p": 0.7, "val.top_k": -1},
        "+data.apply_chat_template_kwargs.enable_thinking=False": {
            "data.apply_chat_template_kwargs": {"enable_thinking": False}
        },
        "actor_rollout_ref.actor.ppo_epochs=2": {"trainer.epochs": 2, "trainer.epochs_over": "step"},
        "actor_rollout_ref.actor.clip_ratio=0.3": {"algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio": 0.3},
        f"{OPTIM}.lr_warmup_steps_ratio=0.1": {"trainer.warmup_steps": None, "trainer.warmup_ratio": 0.1},
        f"{OPTIM}.optimizer=SGD": {"trainer.optimizer": "SGD"},
        f"+{OPTIM}.override_optimizer_config.momentum=0.5": {"trainer.optimizer_kwargs": {"momentum": 0.5}},
        f"{OPTIM}.warmup_style=cosine": {"trainer.lr_scheduler": "cosine"},
        f"{OPTIM}.min_lr_ratio=0.1": {"trainer.min_lr_ratio": 0.1},
        f"{FSDP}.fsdp_size=4": {"trainer.fsdp_size": 4},
        f"{FSDP}.model_dtype=bf16": {"trainer.model_dtype": "bfloat16", "trainer.dtype": "auto"},
        f"{FSDP}.reshard_after_forward=False": {"trainer.reshard_after_forward": False},
        f"{MODEL}.enable_gradient_checkpointing=False": {"trainer.gradient_checkpointing": False},
        f"{MODEL}.enable_activation_offload=True": {"trainer.activation_offload": True},
        f"{MODEL}.lora_rank=64": {"trainer.lora.rank": 64, "trainer.lora.target_modules": "all-linear"},
        "trainer.resume_mode=disable": {"resume.mode": "never"},
        "trainer.save_freq=-1": {"checkpoint.every": 0},
        "trainer.max_actor_ckpt_to_keep=7": {"checkpoint.keep_last": 7},
        "trainer.default_local_dir=/data/runs": {"runs": "/data/runs"},
        "trainer.experiment_name=a/b": {"name": "a-b"},
        "data.val_max_samples=100": {"data.val_size": 100},
        "data.train_max_samples=2048": {"steps": 30},
        "data.max_response_length=99": {"engine.max_tokens": 99},
        "algorithm.rollout_correction.rollout_is=token": {"algorithm.rollout_is": "token"},
        "+reward.custom_reward_function.reward_kwargs.wrong=0.5": {
            "custom_reward_function.reward_kwargs": {"wrong": 0.5}
        },
    },
    {
        "actor_rollout_ref.rollout.val_kwargs.top_k=20": {"val.top_p": 1.0, "val.top_k": 20},
        f"{OPTIM}.lr_warmup_steps=7": {"trainer.warmup_steps": 7, "trainer.warmup_ratio": 0.0},
        f"{OPTIM}.min_lr_ratio=0.1": {"trainer.min_lr_ratio": 0.0},  # verl's schedule is constant
        f"{FSDP}.param_offload=False": {"trainer.param_offload": False},
        f"{FSDP}.fsdp_size=8": {"trainer.fsdp_size": None},
        f"{MODEL}.lora_alpha=32": {"trainer.lora.alpha": 16.0},  # of no adapter
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null": {},
        "actor_rollout_ref.actor.ppo_micro_batch_size=64": {"trainer.micro_batch_size": 8},
        "trainer.v1.trainer_mode=colocate_async": {"policy.preset": "off-policy", "placement": "colocated"},
        "trainer.device=cpu": {"ray.gpus_per_worker": 0.0},
        "actor_rollout_ref.rollout.response_length=98": {"engine.max_tokens": 98},
        "algorithm.filter_groups.enable=True": {"algorithm.filter_groups.metric": "score"},
        "reward.sandbox_fusion.url=http://h/run_code": {
            "reward.manager": "sandbox",
            "reward.manager_kwargs.max_concurrent": 64,
            "custom_reward_function.path": None,
        },
    },
]


@pytest.mark.parametrize("changes", CONVERTED)
def test_values_are_converted(rows: Path, changes: dict[str, dict[str, Any]]) -> None:
    config = built(imported(GRPO, rows, *changes))
    for key, value in ((key, value) for ours in changes.values() for key, value in ours.items()):
        at: Any = config
        for name in key.split("."):
            at = at[name] if isinstance(at, dict) else getattr(at, name)
        assert at == value, key


LOST = {
    "actor_rollout_ref.model.lora.rank=32": "trainer.lora.rank trains an adapter with FSDP2",
    "actor_rollout_ref.actor.fsdp_config.dtype=float16": "trainer.dtype is float32 or bfloat16",
    "actor_rollout_ref.rollout.name=sglang": "the engine is vLLM",
    "actor_rollout_ref.rollout.multi_turn.enable=True": "tools.path=FILE",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4": "without further options",
    "actor_rollout_ref.rollout.ignore_eos=True": "there is nothing like it here",
    f"{FSDP}.offload_policy=True": "param_offload and optimizer_offload keep",
    "trainer.logger=[console,rl_insight]": "there is no backend rl_insight",
    "reward.reward_manager.name=gdpo": "reward.manager_path",
    "trainer.of_a_fork=1": "verl 0.9 has no such key",
    "data.trian_files=x": "verl 0.9 has no such key; it has 'data.train_files'",
    "trainer.val_before_train=False": "evaluates before its first step",
}


def test_what_has_no_counterpart_is_listed_with_what_to_do(rows: Path) -> None:
    found = imported(GRPO, rows, *LOST)
    built(found)
    lost = {each.key: each.instead for each in found.lost}
    for change, instead in LOST.items():
        key = change.lstrip("+").partition("=")[0]
        assert instead in lost[key]
        assert f"#   {key}=" in found.script()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nonsense", "'nonsense' is not key=value as Hydra reads it"),
        ("trainer.nnodes=two", "trainer.nnodes=two: give a whole number of at least 1 in the launch."),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=300", "does not divide data.train_batch_size=1024"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "does not divide the 8 GPUs"),
        ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n becomes engine.n=1: 'grpo' compares"),
        ("data.train_batch_size=1,2", "is a sweep over several values"),
        ("--config-name=mine", "'mine' is no engine or configuration of verl itself; import what the launch prints"),
    ],
)
def test_a_wrong_launch_is_one_sentence(rows: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(GRPO, rows, change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_both_set_takes_the_value_of_the_launch() -> None:
    words = ["actor_rollout_ref.actor.optim.clip_grad=0.5", "trainer.total_training_steps=5"]
    config = built(import_launch(["python3", "-m", "verl.trainer.main_ppo", *words, "trainer.n_gpus_per_node=2"]))
    assert (config.trainer.grad_clip, config.name, config.resume.mode) == (0.5, None, "never")


def said(found: Imported, path: Path, *more: str, **environment: str) -> tuple[int, list[str]]:
    """Runs the new script with a program in the place of dataflow; returns its exit code and the keys of it."""
    path.write_text(found.script().replace("dataflow run", "printf '%s\\n'"))
    ran = subprocess.run(
        ["bash", str(path), *more, "more=1"], capture_output=True, text=True, timeout=60, env=environment
    )
    return ran.returncode, ran.stdout.splitlines()


def test_the_number_of_steps_is_asked_for_where_the_data_is_elsewhere(rows: Path) -> None:
    whole = imported(GRPO, rows, "trainer.total_training_steps=105")
    found = imported(GRPO, rows, "data.train_files=/elsewhere/train.parquet", "trainer.project_name='a\"c$HOME'")
    assert found.overrides.pop("tracking.project") == 'a"c$HOME'
    whole.overrides.pop("tracking.project")
    assert {**found.overrides, "steps": 105} == {**whole.overrides, "data.train": "/elsewhere/train.parquet"}
    assert (
        "#   steps=$STEPS: the rows of /elsewhere/train.parquet, which cannot be read here, divided by "
        "data.train_batch_size=1024, times trainer.total_epochs=15.\n"
    ) in found.script()
    assert said(found, rows.parent / "new.sh")[0] != 0
    assert said(found, rows.parent / "new.sh", STEPS="7") == (
        0,
        [found.pipeline, *found.arguments, "steps=7", "more=1"],
    )


ELSEWHERE = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \\
    data.train_files="['$DATA/a.parquet','$DATA/b.parquet']" actor_rollout_ref.model.path=${MODEL:?} \\
    trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l) data.train_batch_size=$BATCH trainer.total_epochs=1 \\
    actor_rollout_ref.actor.optim.lr=$LR custom_reward_function.path=$CODE/score.py trainer.test_freq=$EVERY $MORE
"""


def test_what_only_the_training_machine_has_is_left_to_its_shell(rows: Path) -> None:
    found = imported(ELSEWHERE, rows)
    assert set(found.missing) == {
        "steps", "trainer.mini_batches", "trainer.world_size", "engine.replicas", "val.every",
    }  # fmt: skip
    assert {"data.train", "model.path", "data.prompts", "trainer.lr", "custom_reward_function.path"} == set(found.open)
    assert found.overrides["engine.n"] == 4
    text = found.script()
    assert "#   $VALUE_1: line 2: it takes the output of a command.\n" in text
    assert "#   $MORE: line 5: it has no value here.\n" in text
    environment = dict.fromkeys(("STEPS", "TRAINER_MINI_BATCHES", "TRAINER_WORLD_SIZE", "ENGINE_REPLICAS"), "8")
    environment |= {"DATA": "/my data", "MODEL": "/q", "BATCH": "64", "LR": "1e-5", "CODE": "/c", "VAL_EVERY": "5"}
    code, keys = said(found, rows.parent / "new.sh", **environment)
    assert code == 0
    config = parse_overrides(gsm8k_grpo.Config, keys[1:-1])
    assert (config.data.train, config.model.path) == (["/my data/a.parquet", "/my data/b.parquet"], "/q")
    assert (config.data.prompts, config.trainer.lr, config.trainer.world_size) == (64, 1e-5, 8)
    assert config.custom_reward_function.path == "/c/score.py"
