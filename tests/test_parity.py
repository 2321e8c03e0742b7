"""Parity with verl: the same tensors through our configuration and stages, and through verl's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from dataflow.algorithms import BYPASS, ESTIMATORS, LOSSES, REJECTIONS
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig, Kl, KlLoss
from dataflow.graph import TaskInfo
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.log_prob import kl_penalty, rollout_correction

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

GROUPS, N, P, R = 6, 4, 3, 7
KEYS = {
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 2.5,
    "tau_pos": 1.2,
    "tau_neg": 1.5,
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "loss_scale_factor": 11,
    "entropy_coeff": 0.01,
}
POLICY_LOSS = {
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": 0.01,
    "clip_cov_ub": 9.0,
    "kl_cov_ratio": 0.2,
    "ppo_kl_coef": 0.7,
    "dro_beta": 0.3,
}
CORRECTION = {
    "rollout_is": "sequence",
    "rollout_is_threshold": "0.5_1.5",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "0.5_1.8,0.2",
}
CORRECTED = {*CORRECTION, "bypass_mode", "loss_type"}
Found = Mapping[str, Any]
Case = tuple[Callable[[], Found], Callable[[], Found]]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> None:
    """Modules of verl's trainer import its engine, which reads the device once."""
    from dataflow.engines.verl.cpu import install

    install()


def samples() -> dict[str, torch.Tensor]:
    """Log-probs of three models, advantages, scores and values of random responses, by name."""
    draw = torch.Generator().manual_seed(5)
    rows = GROUPS * N
    length = torch.randint(1, R + 1, (rows, 1), generator=draw)
    mask = (torch.arange(R) < length).long()

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn((rows, R), generator=draw) * mask

    old = (-2 + normal(0.5)) * mask
    return {
        "response_mask": mask,
        "old_log_probs": old,
        "log_prob": old + normal(0.3),
        "rollout_log_probs": old + normal(0.3),
        "ref_log_prob": old + normal(0.2),
        "advantages": torch.randn((rows, 1), generator=draw) * mask,
        "values": normal(1.0),
        "sum_pi_squared": torch.rand((rows, R), generator=draw) * mask,
        "score": torch.rand(rows, generator=draw),
        "reward_baselines": torch.rand(rows, generator=draw),
    }


def batch() -> Batch:
    """The samples as a rollout returns them."""
    found = samples()
    rows = GROUPS * N
    prompts = torch.full((rows, P), 7)
    whole = torch.cat([torch.ones(rows, P, dtype=torch.long), found["response_mask"]], dim=1)
    columns = {"prompts": prompts, "responses": found["response_mask"] * 8, "attention_mask": whole}
    return Batch(np.repeat(np.arange(GROUPS), N), {**columns, **found}, {"weights_version": 0})


def _loss(config: Any, name: str) -> Found:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    found = samples()
    log_prob = found["log_prob"].requires_grad_()
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(found["response_mask"].sum()),
        global_batch_size=GROUPS * N,
        loss_scale_factor=config.loss_scale_factor,
    )
    torch.manual_seed(0)  # clip_cov draws the tokens that it leaves out
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=found["rollout_log_probs" if BYPASS in name else "old_log_probs"],
        log_prob=log_prob,
        advantages=found["advantages"],
        response_mask=found["response_mask"].bool(),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None if BYPASS in name else torch.full((GROUPS * N, R), 1.5),
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return {"loss": loss.detach(), "gradient": gradient, **metrics}


def loss_case(name: str, **bypass: Any) -> Case:
    def ours() -> Found:
        from dataflow.engines.verl.loss import actor_config

        keys = {**KEYS, **POLICY_LOSS, **bypass, **({} if bypass else {"policy_loss": name})}
        config = actor_config(SimpleNamespace(micro_batch_size=4), AlgorithmConfig(**keys), response_length=R)
        return _loss(config, config.policy_loss.loss_mode)

    def verls() -> Found:
        from verl.trainer.config import RolloutCorrectionConfig
        from verl.workers.config import FSDPActorConfig
        from verl.workers.config.actor import PolicyLossConfig

        correction = {key: value for key, value in bypass.items() if key != "bypass_loss"}
        corrections = RolloutCorrectionConfig(**correction, loss_type=bypass.get("bypass_loss", "ppo_clip"))
        config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=4,
            policy_loss=PolicyLossConfig(loss_mode=name, **POLICY_LOSS, rollout_correction=corrections),
            **KEYS,
        )
        return _loss(config, name)

    return ours, verls


def correction_case(**keys: Any) -> Case:
    def ours() -> Found:
        task = TaskInfo(step=1)
        data = batch()
        found = rollout_correction(data, data, algorithm=AlgorithmConfig(**keys), task=task)
        mask = found["response_mask"] if "response_mask" in found else data["response_mask"]
        weights = {"weights": found["rollout_is_weights"]} if "rollout_is_weights" in found else {}
        return {"mask": mask, **weights, **task.metrics}

    def verls() -> Found:
        from verl import DataProto
        from verl.trainer.config import RolloutCorrectionConfig
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

        config = RolloutCorrectionConfig(**{"rollout_is": None, **keys})
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        data, metrics = compute_rollout_correction_and_add_to_batch(
            DataProto.from_dict({name: samples()[name] for name in names}), config
        )
        weights = {"weights": data.batch["rollout_is_weights"]} if "rollout_is_weights" in data.batch else {}
        return {"mask": data.batch["response_mask"], **weights, **metrics}

    return ours, verls


def estimator_case(name: str, in_reward: bool = False) -> Case:
    def ours() -> Found:
        algorithm = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, use_kl_in_reward=in_reward)
        stage, data = advantage_stage(algorithm), batch()
        penalty = data.like(kl_penalty=penalties())
        fields = {read.field: penalty if read.field == "kl_penalty" else data for read in stage.reads}
        scores = data.like(score=data["score"])
        found = stage(data, scores, *list(fields.values())[2:], algorithm=algorithm, task=TaskInfo(step=1))
        return {"advantages": found["advantages"], "returns": found["returns"]}

    def verls() -> Found:
        from verl import DataProto
        from verl.trainer.config import AlgoConfig
        from verl.trainer.ppo.ray_trainer import compute_advantage

        tensors = samples()
        mask = tensors["response_mask"]
        scores = torch.zeros(mask.shape)
        scores[torch.arange(len(mask)), mask.sum(dim=1) - 1] = tensors.pop("score")
        tensors["token_level_rewards"] = scores - penalties() if in_reward else scores
        if name != "remax":
            del tensors["reward_baselines"]  # some estimators refuse what they do not need
        uid = np.array([str(row // N) for row in range(GROUPS * N)], dtype=object)
        data = DataProto.from_dict(tensors, {"uid": uid})
        if name == "gdpo":  # verl's own trainer wants the names of several rewards
            from verl.trainer.ppo.core_algos import get_adv_estimator_fn

            advantages, returns = get_adv_estimator_fn(name)(
                token_level_rewards=tensors["token_level_rewards"], response_mask=mask, index=uid
            )
            return {"advantages": advantages, "returns": returns}
        config = AlgoConfig(adv_estimator=name, gamma=0.9, lam=0.8)
        found = compute_advantage(data, name, gamma=0.9, lam=0.8, config=config).batch
        return {column: found[column] * mask for column in ("advantages", "returns")}  # GAE leaves numbers behind it

    return ours, verls


def penalties() -> torch.Tensor:
    """Penalties on each token, for the comparison of estimators."""
    return 0.1 * (samples()["old_log_probs"] - samples()["ref_log_prob"])


def kl_case(estimator: str, control: str, coefficient: float | None) -> Case:
    keys = {"type": control, "kl_coef": 0.3, "horizon": 100, "target_kl": 0.05}

    def ours() -> Found:
        algorithm = AlgorithmConfig(use_kl_in_reward=True, kl_penalty=estimator, kl_ctrl=keys)
        task = TaskInfo(step=1)
        penalty, after = kl_penalty(batch(), batch(), batch(), coefficient, algorithm=algorithm, task=task)
        return {"rewards": 0.5 - penalty["kl_penalty"], "after": after, **task.metrics}

    def verls() -> Found:
        from verl import DataProto
        from verl.trainer.config import KLControlConfig
        from verl.trainer.ppo.core_algos import get_kl_controller
        from verl.trainer.ppo.ray_trainer import apply_kl_penalty

        tensors = samples()
        tensors["token_level_scores"] = torch.full((GROUPS * N, R), 0.5)
        controller = get_kl_controller(KLControlConfig(**keys))
        controller.value = coefficient or controller.value
        data, metrics = apply_kl_penalty(DataProto.from_dict(tensors), controller, kl_penalty=estimator)
        return {"rewards": data.batch["token_level_rewards"], "after": controller.value, **metrics}

    return ours, verls


def kl_loss_case(name: str) -> Case:
    def kl(kind: str) -> Found:
        from verl.trainer.ppo.core_algos import kl_penalty as verls_kl

        log_prob = samples()["log_prob"].requires_grad_()
        found = verls_kl(log_prob, samples()["ref_log_prob"], kind)
        (gradient,) = torch.autograd.grad(found.sum(), log_prob)
        return {"kl": found.detach(), "gradient": gradient}

    def ours() -> Found:
        from dataflow.engines.verl.loss import actor_config

        section = AlgorithmConfig(use_kl_loss=True, kl_loss_type=name, kl_loss_coef=0.7)
        config = actor_config(SimpleNamespace(micro_batch_size=4), section, response_length=R)
        assert (config.use_kl_loss, config.kl_loss_coef) == (True, 0.7)
        return kl(config.kl_loss_type)

    return ours, lambda: kl(name)


CASES: dict[str, Case] = {
    **{f"estimator {name}": estimator_case(name) for name in ESTIMATORS},
    **{f"estimator {name} with kl": estimator_case(name, in_reward=True) for name in ("gae", "grpo", "remax", "rloo")},
    **{f"kl in reward {kind}": kl_case(kind, "fixed", None) for kind in get_args(Kl)},
    "kl in reward adaptive": kl_case("kl", "adaptive", None),
    "kl in reward later": kl_case("kl", "adaptive", 0.2),
    **{f"kl loss {kind}": kl_loss_case(kind) for kind in get_args(KlLoss)},
    **{f"loss {name}": loss_case(name) for name in LOSSES},
    **{
        f"loss {BYPASS} {loss}": loss_case(BYPASS, **CORRECTION, bypass_mode=True, bypass_loss=loss)
        for loss in ("ppo_clip", "reinforce")
    },
    "correction off": correction_case(),
    "correction whole": correction_case(**CORRECTION),
    "correction normalised": correction_case(rollout_is="token", rollout_is_batch_normalize=True),
    **{
        f"correction {kind}": correction_case(
            rollout_rs=kind, rollout_rs_threshold="0.7_1.3" if "k1" in kind else ".05"
        )
        for kind in REJECTIONS
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_tensors_give_the_same_numbers_as_verl(name: str) -> None:
    ours, verls = (call() for call in CASES[name])
    assert ours.keys() == verls.keys()
    for key, value in verls.items():
        same = {"rtol": 1e-6, "atol": 1e-7, "check_dtype": False}
        torch.testing.assert_close(torch.as_tensor(ours[key]), torch.as_tensor(value), **same)


def test_the_cases_of_losses_and_corrections_do_something() -> None:
    found = {name: CASES[name][0]() for name in CASES}
    values = {float(found[f"loss {name}"]["loss"]) for name in LOSSES}
    assert len(values) >= len(LOSSES) - 1  # at ratios this small, two may agree
    whole = samples()["response_mask"].sum()
    for name, case in found.items():
        if name.startswith("correction ") and name.split()[1] in (*REJECTIONS, "whole"):
            assert 0 < case["mask"].sum() < whole, name
