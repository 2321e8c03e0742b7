"""Builds the agent of a run from its configuration, in the process that hosts it; and checks before that it can."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import ConfigError
from dataflow.files import sha256_of
from dataflow.models.tokenizer import load_tokenizer
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.functions import CONTEXT, build_reward, find_reward, load_reward
from dataflow.rewards.ledger import Ledger
from dataflow.rewards.managers import build_manager, check_manager, find_manager, limits_declared, scores_alone
from dataflow.rewards.naming import JUDGE, MAIN, SERVED, keyed
from dataflow.rewards.retry import Retry
from dataflow.rewards.slots import Limits
from dataflow.system.frozen import FrozenExit, frozen_exit
from dataflow.system.secrets import keep_secrets, redact_logs

if TYPE_CHECKING:
    from dataflow.config.reward import RewardConfig

_ASIDE = ("url", "api_key_env", "timeout", "max_tokens", "max_cost", "price_per_million", "slots", "routing")
"""Options of a judge that change how it is called, but not its prompt."""
_TEXTS = (".py", ".txt", ".md")
"""Files whose content is part of what scores."""
_LOCAL = "http://127.0.0.1"
"""Stands for the address of a judge that the run starts."""
_FROZEN_S = 10.0
"""Least default of ``reward.frozen_after``: a busy machine may keep the loop waiting for some seconds."""


def build_agent(
    custom: Mapping[str, Any] | None,
    default: Mapping[str, Any],
    options: RewardConfig | None = None,
    *,
    ledger: str | None = None,
    tokenizer: str | None = None,
    name: str = MAIN,
) -> RewardAgent:
    """Returns the agent of a run.

    Args:
        custom: ``path``, ``name`` and ``reward_kwargs`` of the user's function or class; None, or no path,
            means the default.
        default: ``target``, a function or class as ``"package.module:name"``, and its ``kwargs``; ``scoring``, what of
            them decides the scores, if not all of them.
        ledger: file of the run's ledger.
        tokenizer: path of the run's tokenizer, for managers that need one.
    """
    if options is None:
        from dataflow.config.reward import RewardConfig

        options = RewardConfig()
    if _in_ray_worker():
        redact_logs()
    keep_secrets([custom, default, options.manager_kwargs])
    reward: Any = None
    if custom is not None and custom.get("path"):
        kwargs = custom.get("reward_kwargs") or {}
        found = load_reward(custom["path"], custom.get("name") or "compute_score", kwargs)
        reward = build_reward(found, kwargs, context=_context(options))
    elif not scores_alone(options.manager, options.manager_path):
        reward = build_reward(find_reward(default["target"]), default.get("kwargs") or {}, context=_context(options))
    kept = Ledger(ledger) if ledger is not None and options.ledger else None
    if kept is not None and (count_before := getattr(reward, "count_before", None)) is not None:
        count_before(*kept.spent())  # what an earlier process of the run paid for counts against its budget
    if options.manager != "naive" or options.manager_path:
        given = {"tokenizer": tokenizer, **options.manager_kwargs}
        reward = build_manager(options.manager, reward, options.manager_path, **given)
    declared = limits_declared(reward)
    retry = retry_of(options, declared.get("timeout_s"))
    return RewardAgent(
        reward,
        limits=limits_of(options, declared),
        retry=retry,
        hedge_after=options.hedge_after,
        on_failure=options.on_failure,
        max_failed_share=options.max_failed_share,
        max_abandoned=options.max_abandoned,
        ledger=kept,
        share_equal=options.share_equal,
        scorer=_scorer(custom, default, options),
        frozen_exit=_frozen_exit(options, retry.timeout_s, name),
        name=name,
    )


def _in_ray_worker() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE


def check_reward(
    custom: Mapping[str, Any], default: Mapping[str, Any], options: RewardConfig, name: str = MAIN, **_other: Any
) -> Limits:
    """Checks that :func:`build_agent` can succeed with these arguments, without starting anything.

    A judge without ``url`` is the stand-in that the run starts. Returns the limits of the agent, without those that a
    user's class or manager may declare once it is built.
    """
    try:
        return limits_of(options, _check_reward(custom, default, options))
    except ConfigError as error:
        raise ConfigError(keyed(str(error), name)) from error


def _check_reward(custom: Mapping[str, Any], default: Mapping[str, Any], options: RewardConfig) -> Mapping[str, Any]:
    """Returns the limits that what scores declares."""
    kwargs, target = default.get("kwargs") or {}, default["target"]
    manager = (options.manager_path, options.manager_kwargs)
    keep_secrets([custom, kwargs, options.manager_kwargs])
    find_manager(options.manager, *manager)
    limits_of(options)
    retry_of(options)
    scorer = "custom_reward_function.path" if custom.get("path") else "reward.model" if target == SERVED else None
    if scores_alone(options.manager, options.manager_path):
        if scorer is not None:
            raise ConfigError(f"reward.manager={options.manager} scores alone; leave it or {scorer} out.")
        return limits_declared(build_manager(options.manager, None, **options.manager_kwargs))
    if not custom.get("path") and (custom.get("name", "compute_score") != "compute_score" or custom["reward_kwargs"]):
        raise ConfigError(
            "custom_reward_function has options, and its path names no file; give it, or leave them out to score "
            "without one."
        )
    if custom.get("path"):
        found = load_reward(custom["path"], custom["name"], custom["reward_kwargs"], _configured(options))
    else:
        found = find_reward(target)
    declared = check_manager(options.manager, found, options.manager_path, **options.manager_kwargs)
    if not custom.get("path") and target in (JUDGE, SERVED):
        found(**(kwargs if target == SERVED else {**kwargs, "url": kwargs.get("url") or _LOCAL}))
    return declared


def _frozen_exit(options: RewardConfig, timeout_s: float | None, name: str) -> FrozenExit | None:
    """Returns what ends a frozen agent in a process of its own, by default after the time-out of its calls."""
    after_s = options.frozen_after
    if after_s is None and timeout_s is not None:
        after_s = max(timeout_s, _FROZEN_S)
    fix = "run it in processes of its own with reward.manager=remote"
    return frozen_exit(after_s, "a reward function", *(keyed(text, name) for text in ("reward.frozen_after", fix)))


def limits_of(options: RewardConfig, declared: Mapping[str, Any] | None = None) -> Limits:
    """Returns the limits of the configuration; those that it does not set come from the reward object."""
    own = declared or {}
    given = options.model_fields_set

    def pick(name: str) -> Any:
        return own[name] if own.get(name) is not None and name not in given else getattr(options, name)

    return Limits(pick("concurrency"), pick("rpm"), pick("tpm"), options.adaptive, options.floor)


def retry_of(options: RewardConfig, timeout_s: float | None = None) -> Retry:
    """Returns the tries and time-outs of the configuration."""
    own = timeout_s if timeout_s is not None and "timeout" not in options.model_fields_set else options.timeout
    return Retry(options.tries, own, options.deadline, options.backoff, options.max_backoff)


def _scorer(custom: Mapping[str, Any] | None, default: Mapping[str, Any], options: RewardConfig) -> str:
    """Returns a text that identifies how samples are scored; it differs if a file or prompt has changed."""
    manager = [options.manager, _content(options.manager_path), dict(options.manager_kwargs)]
    if custom is not None and custom.get("path"):
        function = [custom.get("name"), custom.get("reward_kwargs"), options.model_tokenizer]
        # Which the function may ask.
        models = {name: _content(model.scoring(name)) for name, model in options.models.items()}
        what: list[Any] = [_content(custom["path"]), *function, models]
    else:
        kwargs = {name: value for name, value in (default.get("kwargs") or {}).items() if name not in _ASIDE}
        what = [default["target"], _content(default.get("scoring", kwargs))]
    return json.dumps([what, manager], sort_keys=True, default=repr)


def _content(value: Any, name: str = "") -> Any:
    """Returns a hash of the file or the model that a value names, or the value itself if it names none.

    It is the value of the option ``name``, or options by name; that of a template is a file whatever its ending.
    """
    if isinstance(value, Mapping):
        return {key: _model(each) if key == "path" else _content(each, key) for key, each in value.items()}
    if not isinstance(value, str) or not (value.endswith(_TEXTS) or name == "template"):
        return value
    file = Path(value).expanduser()
    return sha256_of(file) if file.is_file() else value


def _model(path: Any) -> Any:
    """Returns names, sizes and times of the files of the model in a directory; the path itself if there is none."""
    directory = Path(str(path)).expanduser()
    if path is None or not directory.is_dir():
        return path
    files = sorted(file for file in directory.iterdir() if file.is_file())
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [str(path), hashlib.sha256(json.dumps(facts).encode()).hexdigest()]


def _configured(options: RewardConfig) -> dict[str, Any]:
    """Returns the configured values of verl's further keywords; for the tokenizer, its path."""
    values = {name: getattr(options, key.removeprefix("reward.")) for name, key in CONTEXT.items()}
    return {name: value for name, value in values.items() if value is not None}


def _context(options: RewardConfig) -> dict[str, Any]:
    """Returns the arguments for verl's further keywords."""
    context, tokenizer = _configured(options), "reward_model_tokenizer"
    if tokenizer in context:
        context[tokenizer] = load_tokenizer(context[tokenizer], "reward.model_tokenizer")
    return context
