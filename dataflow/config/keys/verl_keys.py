"""verl's configuration keys and their names here.

Keys of the same name and meaning (``algorithm.adv_estimator``, ``data.shuffle``) are not in the table. ``exact`` keys
take verl's value unchanged; for the others the note gives the conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dataflow.errors import alike


@dataclass(frozen=True)
class Meaning:
    """The equivalent of a verl key.

    Attributes:
        ours: the key, None if there is none.
        note: the difference, or the reason for having none.
    """

    ours: str | None
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether a value for verl's key is valid for ours unchanged."""
        return self.ours is not None and not self.note


_ACTOR = "actor_rollout_ref.actor."
_REF = "actor_rollout_ref.ref."
_ROLLOUT = "actor_rollout_ref.rollout."
_MODEL = "actor_rollout_ref.model."
_NO_CRITIC = "this pipeline has no critic; pipelines/ppo_critic.py trains one"
_WHOLE = "a checkpoint holds all that a resume needs; 'dataflow export' writes the model alone"
_ONE_MICRO = "log-probs are computed in micro-batches of trainer.micro_batch_size"
_SANDBOX = "with reward.manager=sandbox: {url: ..., max_concurrent: 64, memory_limit_mb: 1024}"
_SERVER = "'reward.models.NAME.path' serves a reward model in this run, 'judge.url' names a judge that runs elsewhere"
_FSDP = "FSDP2 is set up without options"
_VLLM = "vLLM is set up without it"

KEYS: dict[str, Meaning] = {
    # data
    "data.train_files": Meaning("data.train", "one file, .jsonl or .parquet"),
    "data.val_files": Meaning("data.val", "one file, .jsonl or .parquet"),
    "data.train_batch_size": Meaning("data.prompts"),
    "data.val_batch_size": Meaning(None, "held-out problems are evaluated together, data.val_size of them at most"),
    "data.train_max_samples": Meaning(None, "all rows of data.train are used"),
    "data.val_max_samples": Meaning("data.val_size"),
    "data.max_response_length": Meaning("engine.max_tokens"),
    "data.seed": Meaning("seed"),
    "data.prompt_key": Meaning(None, "the column is called 'prompt'"),
    "data.reward_fn_key": Meaning(None, "the column is called 'data_source'"),
    "data.video_key": Meaning(None, "videos are not passed to models"),
    "data.tokenizer": Meaning(None, "the model's own tokenizer is used"),
    "data.return_raw_chat": Meaning(None, "the chat is always kept, as 'raw_prompt'"),
    "data.custom_cls.path": Meaning(None, "define inputs(config) in the pipeline file"),
    "data.apply_chat_template_kwargs": Meaning(None, "the model's chat template is used without options"),
    "data.dataloader_num_workers": Meaning(None, "prompts are loaded before the first step"),
    # the model
    f"{_MODEL}path": Meaning("model.path"),
    f"{_MODEL}trust_remote_code": Meaning(None, "code that comes with a model is never run"),
    f"{_MODEL}enable_gradient_checkpointing": Meaning(None, "it cannot be chosen"),
    f"{_MODEL}use_remove_padding": Meaning(None, "it cannot be chosen"),
    f"{_MODEL}use_liger": Meaning(None, "it cannot be chosen"),
    f"{_MODEL}lora_rank": Meaning(None, "all weights are trained"),
    f"{_MODEL}lora_alpha": Meaning(None, "all weights are trained"),
    # training
    f"{_ACTOR}optim.lr": Meaning("trainer.lr"),
    f"{_ACTOR}optim.betas": Meaning("trainer.betas"),
    f"{_ACTOR}optim.weight_decay": Meaning("trainer.weight_decay"),
    f"{_ACTOR}optim.lr_warmup_steps": Meaning("trainer.warmup_steps"),
    f"{_ACTOR}optim.lr_warmup_steps_ratio": Meaning("trainer.warmup_steps", "steps, not a share of them"),
    f"{_ACTOR}optim.total_training_steps": Meaning("steps"),
    f"{_ACTOR}optim.clip_grad": Meaning("trainer.grad_clip"),
    f"{_ACTOR}optim.lr_scheduler_type": Meaning(None, "the learning rate is constant after the warm-up"),
    f"{_ACTOR}grad_clip": Meaning("trainer.grad_clip"),
    f"{_ACTOR}ppo_mini_batch_size": Meaning(
        "trainer.mini_batches", "the number of mini-batches in a step: data.prompts divided by verl's value"
    ),
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": Meaning("trainer.micro_batch_size"),
    f"{_ACTOR}ppo_micro_batch_size": Meaning("trainer.micro_batch_size", "rows per rank, not of all ranks"),
    f"{_ACTOR}ppo_epochs": Meaning(
        "trainer.epochs", "each mini-batch is used that often before the next one; verl's order is epochs_over=step"
    ),
    f"{_ACTOR}use_dynamic_bsz": Meaning("trainer.max_tokens_per_gpu", "a number of tokens turns it on"),
    f"{_ACTOR}ppo_max_token_len_per_gpu": Meaning("trainer.max_tokens_per_gpu"),
    f"{_ACTOR}ulysses_sequence_parallel_size": Meaning(None, "sequences are not split over GPUs"),
    f"{_ACTOR}strategy": Meaning(None, "training is FSDP2"),
    f"{_ACTOR}fsdp_config.param_offload": Meaning(None, _FSDP),
    f"{_ACTOR}fsdp_config.optimizer_offload": Meaning(None, _FSDP),
    f"{_ACTOR}fsdp_config.fsdp_size": Meaning(None, _FSDP),
    f"{_ACTOR}shuffle": Meaning(None, "groups form mini-batches as policy.order says"),
    f"{_ACTOR}clip_ratio": Meaning("algorithm.clip_ratio"),
    f"{_ACTOR}clip_ratio_low": Meaning("algorithm.clip_ratio_low"),
    f"{_ACTOR}clip_ratio_high": Meaning("algorithm.clip_ratio_high"),
    f"{_ACTOR}clip_ratio_c": Meaning("algorithm.clip_ratio_c"),
    f"{_ACTOR}loss_agg_mode": Meaning("algorithm.loss_agg_mode"),
    f"{_ACTOR}loss_scale_factor": Meaning("algorithm.loss_scale_factor"),
    f"{_ACTOR}tau_pos": Meaning("algorithm.tau_pos"),
    f"{_ACTOR}tau_neg": Meaning("algorithm.tau_neg"),
    f"{_ACTOR}calculate_sum_pi_squared": Meaning(None, "it is computed if algorithm.adv_estimator needs it"),
    f"{_ACTOR}entropy_coeff": Meaning("algorithm.entropy_coeff"),
    f"{_ACTOR}use_kl_loss": Meaning("algorithm.use_kl_loss"),
    f"{_ACTOR}kl_loss_coef": Meaning("algorithm.kl_loss_coef"),
    f"{_ACTOR}kl_loss_type": Meaning("algorithm.kl_loss_type"),
    f"{_ACTOR}policy_loss.loss_mode": Meaning("algorithm.policy_loss"),
    f"{_ACTOR}policy_loss.clip_cov_ratio": Meaning("algorithm.clip_cov_ratio"),
    f"{_ACTOR}policy_loss.clip_cov_lb": Meaning("algorithm.clip_cov_lb"),
    f"{_ACTOR}policy_loss.clip_cov_ub": Meaning("algorithm.clip_cov_ub"),
    f"{_ACTOR}policy_loss.kl_cov_ratio": Meaning("algorithm.kl_cov_ratio"),
    f"{_ACTOR}policy_loss.ppo_kl_coef": Meaning("algorithm.ppo_kl_coef"),
    f"{_ACTOR}policy_loss.dro_beta": Meaning("algorithm.dro_beta"),
    f"{_ACTOR}checkpoint.save_contents": Meaning(None, _WHOLE),
    f"{_ACTOR}checkpoint.load_contents": Meaning(None, _WHOLE),
    f"{_ACTOR}checkpoint.async_save": Meaning(None, "checkpoints are always written beside training"),
    f"{_REF}log_prob_micro_batch_size_per_gpu": Meaning(None, _ONE_MICRO),
    f"{_REF}fsdp_config.param_offload": Meaning(None, _FSDP),
    # rollout
    f"{_ROLLOUT}name": Meaning("engine.rollout", "hf, vllm or auto"),
    f"{_ROLLOUT}mode": Meaning(None, "the engine is always asynchronous"),
    f"{_ROLLOUT}n": Meaning("engine.n"),
    f"{_ROLLOUT}temperature": Meaning("engine.temperature"),
    f"{_ROLLOUT}top_p": Meaning("engine.top_p"),
    f"{_ROLLOUT}top_k": Meaning("engine.top_k"),
    f"{_ROLLOUT}do_sample": Meaning("engine.temperature", "0 is greedy"),
    f"{_ROLLOUT}seed": Meaning("seed"),
    f"{_ROLLOUT}response_length": Meaning("engine.max_tokens"),
    f"{_ROLLOUT}prompt_length": Meaning("data.max_prompt_length"),
    f"{_ROLLOUT}max_num_seqs": Meaning("engine.max_num_seqs"),
    f"{_ROLLOUT}max_model_len": Meaning(None, "it is data.max_prompt_length and engine.max_tokens together"),
    f"{_ROLLOUT}max_num_batched_tokens": Meaning(None, _VLLM),
    f"{_ROLLOUT}enforce_eager": Meaning(None, _VLLM),
    f"{_ROLLOUT}enable_chunked_prefill": Meaning(None, _VLLM),
    f"{_ROLLOUT}gpu_memory_utilization": Meaning("engine.gpu_memory"),
    f"{_ROLLOUT}tensor_model_parallel_size": Meaning("engine.tensor_parallel"),
    f"{_ROLLOUT}data_parallel_size": Meaning("engine.replicas", "engines that share a step's prompts"),
    f"{_ROLLOUT}dtype": Meaning(None, "it is bfloat16 on GPUs and float32 on CPUs"),
    f"{_ROLLOUT}free_cache_engine": Meaning(None, "placement=colocated frees the engine's memory while it trains"),
    f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu": Meaning(None, _ONE_MICRO),
    f"{_ROLLOUT}calculate_log_probs": Meaning(None, "the engine always returns them"),
    f"{_ROLLOUT}val_kwargs.n": Meaning("val.n"),
    f"{_ROLLOUT}val_kwargs.temperature": Meaning("val.temperature"),
    f"{_ROLLOUT}val_kwargs.do_sample": Meaning("val.temperature", "0 is greedy"),
    f"{_ROLLOUT}val_kwargs.top_p": Meaning(None, "evaluation draws from all tokens"),
    f"{_ROLLOUT}val_kwargs.top_k": Meaning(None, "evaluation draws from all tokens"),
    f"{_ROLLOUT}multi_turn.enable": Meaning("tools.names", "the tools to offer; without any, a response is one turn"),
    f"{_ROLLOUT}multi_turn.max_assistant_turns": Meaning("tools.max_turns"),
    f"{_ROLLOUT}multi_turn.tool_config_path": Meaning("tools.path", "a Python file that marks functions with @tool"),
    f"{_ROLLOUT}multi_turn.format": Meaning("tools.format"),
    # algorithm
    "algorithm.rollout_correction.rollout_is": Meaning("algorithm.rollout_is"),
    "algorithm.rollout_correction.rollout_is_threshold": Meaning("algorithm.rollout_is_threshold"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": Meaning("algorithm.rollout_is_batch_normalize"),
    "algorithm.rollout_correction.rollout_rs": Meaning("algorithm.rollout_rs"),
    "algorithm.rollout_correction.rollout_rs_threshold": Meaning("algorithm.rollout_rs_threshold"),
    "algorithm.rollout_correction.bypass_mode": Meaning("algorithm.bypass_mode"),
    "algorithm.rollout_correction.loss_type": Meaning("algorithm.bypass_loss"),
    "algorithm.use_pf_ppo": Meaning(None, "samples are not reweighted by preference feedback"),
    # the run
    "trainer.total_training_steps": Meaning("steps"),
    "trainer.total_epochs": Meaning("steps", "training steps, not passes over the data"),
    "trainer.project_name": Meaning("tracking.project"),
    "trainer.experiment_name": Meaning("name"),
    "trainer.logger": Meaning("tracking.backends"),
    "trainer.test_freq": Meaning("val.every", "0 never evaluates, as -1 does in verl"),
    "trainer.val_before_train": Meaning(None, "a run evaluates before its first step wherever val.every is set"),
    "trainer.val_only": Meaning(None, "a run always trains"),
    "trainer.n_gpus_per_node": Meaning("trainer.world_size", "training processes, on all nodes together"),
    "trainer.nnodes": Meaning("trainer.world_size", "training processes, on all nodes together"),
    "trainer.device": Meaning("ray.gpus_per_worker", "1 for GPUs, 0 for CPUs"),
    "trainer.save_freq": Meaning("checkpoint.every", "0 saves none, as -1 does in verl"),
    "trainer.resume_mode": Meaning("resume.mode", "auto, or never for verl's disable"),
    "trainer.resume_from_path": Meaning(None, "'dataflow resume runs/NAME' resumes from that run's last checkpoint"),
    "trainer.del_local_ckpt_after_load": Meaning(
        None, "the checkpoint that a run resumes from stays until a newer one"
    ),
    "trainer.esi_redundant_time": Meaning(None, "a run saves when a signal asks it to end (checkpoint.grace_s)"),
    "trainer.max_actor_ckpt_to_keep": Meaning(
        "checkpoint.keep_last", "the newest ones; checkpoint.keep_best and checkpoint.keep_every keep others"
    ),
    "trainer.max_critic_ckpt_to_keep": Meaning(None, _NO_CRITIC),
    "trainer.default_local_dir": Meaning(
        "runs", "the directory of all runs; each has one of its own there, with its checkpoints"
    ),
    "trainer.default_hdfs_dir": Meaning("runs", "a directory, which may be of a mounted file system"),
    "trainer.rollout_data_dir": Meaning(
        "samples.every", "samples are written to the run's directory; give the steps between"
    ),
    "trainer.validation_data_dir": Meaning("samples.every", "samples of evaluations are written with those of steps"),
    "trainer.log_val_generations": Meaning("samples.most", "samples are written to files; dataflow samples shows them"),
    "trainer.critic_warmup": Meaning(None, _NO_CRITIC),
    "ray_kwargs.ray_init.num_cpus": Meaning("ray.num_cpus"),
    # rewards
    "reward.num_workers": Meaning("reward.actors"),
    "reward.custom_reward_function.path": Meaning("custom_reward_function.path"),
    "reward.custom_reward_function.name": Meaning("custom_reward_function.name"),
    "reward.custom_reward_function.reward_kwargs": Meaning("custom_reward_function.reward_kwargs"),
    "reward.reward_manager.name": Meaning("reward.manager"),
    "reward.reward_manager.module.path": Meaning("reward.manager_path"),
    "reward.reward_model.enable": Meaning(None, f"{_SERVER} (or in the same cluster)"),
    "reward.reward_model.model_path": Meaning(None, _SERVER),
    "reward_model.reward_manager": Meaning("reward.manager"),
    "reward_model.num_workers": Meaning("reward.actors"),
    "reward_model.enable": Meaning(None, _SERVER),
    "reward_model.model.path": Meaning(None, _SERVER),
    "reward_model.launch_reward_fn_async": Meaning(None, "rewards are always requested as responses finish"),
    "reward_model.reward_kwargs": Meaning("reward.manager_kwargs"),
    "sandbox_fusion.url": Meaning("reward.manager_kwargs", _SANDBOX),
    "reward.sandbox_fusion.url": Meaning("reward.manager_kwargs", _SANDBOX),
}
"""verl's common keys, by their full names."""

SECTIONS = {
    "actor_rollout_ref.actor": "sections trainer and algorithm hold the options of training",
    "actor_rollout_ref.ref": "algorithm.use_kl_loss adds the reference model",
    "actor_rollout_ref.rollout": "section engine holds the options of rollout",
    "actor_rollout_ref.model": "section model holds the model's path",
    "actor_rollout_ref": "sections model, engine, trainer and algorithm hold these options",
    "critic": _NO_CRITIC,
    "reward_model": "sections reward, judge and custom_reward_function hold the options of rewards",
    "reward.reward_model": _SERVER,
    "reward.reward_manager": "'reward.manager' names the manager",
    "reward.sandbox_fusion": f"reward.manager_kwargs holds its options, {_SANDBOX}",
    "sandbox_fusion": f"reward.manager_kwargs holds its options, {_SANDBOX}",
    "ray_kwargs": "section ray holds the options of Ray",
    "global_profiler": "a run writes trace.json",
    "distillation": "there is no distillation",
    "transfer_queue": "there is none",
}
"""Messages for keys in sections that only verl has."""


COMMON: dict[str, tuple[str, str]] = {
    "batch_size": ("data.prompts", "the number of prompts in a step, each with engine.n responses"),
    "train_batch_size": ("data.prompts", "the number of prompts in a step, each with engine.n responses"),
    "epochs": ("steps", "the number of training steps; trainer.epochs counts the passes over a step's samples"),
    "num_epochs": ("steps", "the number of training steps"),
    "num_train_epochs": ("steps", "the number of training steps"),
    "max_steps": ("steps", "the number of training steps"),
    "learning_rate": ("trainer.lr", "the learning rate"),
    "num_generations": ("engine.n", "the number of responses to a prompt"),
    "gpus": ("trainer.world_size", "the number of training processes"),
    "num_gpus": ("trainer.world_size", "the number of training processes"),
}
"""What other trainers call a key, without a section: our key, and what it is."""


def hint(
    key: str,
    exactly: bool = False,
    keys: Mapping[str, Meaning] = KEYS,
    sections: Mapping[str, str] = SECTIONS,
) -> str | None:
    """Returns the name of a verl key here, as part of a message; None for a key that verl does not have.

    Args:
        key: as the user wrote it.
        exactly: ignore misspelt keys, and unknown keys of verl's sections.
        keys: those of verl, for a pipeline with sections of its own.
        sections: messages for keys in sections that only verl has.

    >>> hint("data.train_batch_size")
    "verl's 'data.train_batch_size' is 'data.prompts' here."
    >>> hint("data.train_batchsize")
    "verl's 'data.train_batch_size' is 'data.prompts' here."
    >>> hint("steps") is None
    True
    """
    key = key.lstrip("+~")  # Hydra's marks of keys to add or remove
    section, _, leaf = key.rpartition(".")
    name = key
    if key in COMMON:
        ours, meaning = COMMON[key]
        return f"'{ours}' is {meaning}."
    if key not in keys and exactly:
        return None
    if key not in keys:
        siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
        name = siblings.get(alike(leaf, siblings) or "", key) if section else key
    if (found := keys.get(name)) is not None:
        if found.ours is None:
            return f"verl's '{name}' has no counterpart here: {found.note}."
        return f"verl's '{name}' is '{found.ours}' here{f': {found.note}' if found.note else ''}."
    while section:
        if (found := keys.get(section)) is not None and found.ours is None and not exactly:
            return f"verl's '{section}' has no counterpart here: {found.note}."
        if section in sections:
            return f"verl's section '{section}' is not one here: {sections[section]}."
        section = section.rpartition(".")[0]
    return f"verl's section '{key}' is not one here: {sections[key]}." if key in sections else None
