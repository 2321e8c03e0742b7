"""Launches as verl's users write them: GSM8K by GRPO and PPO with FSDP, and the published recipe's run."""

from __future__ import annotations

COMMON = """\
    data.train_files={train} \\
    data.val_files={val} \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name='verl_example_gsm8k' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 \\
"""

GRPO = f"""\
set -x

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    algorithm.use_kl_in_reward=False \\
{COMMON}    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.critic_warmup=0 \\
    trainer.experiment_name='qwen2_7b_grpo' $@
"""

PPO = f"""\
set -x
files="['{{train}}', '{{train}}']"

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=gae \\
{COMMON.replace("{train}", '"$files"')}    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \\
    critic.optim.lr=1e-5 \\
    critic.model.path=Qwen/Qwen2-7B-Instruct \\
    critic.model.enable_gradient_checkpointing=True \\
    critic.ppo_micro_batch_size_per_gpu=32 \\
    critic.fsdp.param_offload=False \\
    trainer.critic_warmup=3 \\
    trainer.experiment_name=qwen2_7b_ppo $@
"""


def filled(launch: str, train: str, val: str = "val.jsonl") -> str:
    """Returns a launch with the names of its data files."""
    return launch.replace("{train}", train).replace("{val}", val)
