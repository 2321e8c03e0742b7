"""Where the services of a run are on a cluster: the rules of its configuration, and the files that their nodes need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dataflow.config.base import BaseConfig
from dataflow.config.reward import Source, model_of
from dataflow.config.served import PromptConfig
from dataflow.errors import ConfigError, nearest
from dataflow.executors.ray.connection import running
from dataflow.executors.ray.nodes import NodeRule
from dataflow.rewards.judge.rubric import is_file
from dataflow.rewards.naming import keyed
from dataflow.stage import Hosted

CONTROLLER = "controller"
"""The service of stages that no other hosts."""


def on_cluster(config: BaseConfig) -> bool:
    """Whether the run joins a cluster, of one node or several."""
    return config.executor == "ray" and (config.ray.address is not None or running())


def node_rules(config: Any) -> dict[str, NodeRule]:
    """Returns the rules for the nodes of services on a cluster, by service.

    Args:
        config: a :class:`~dataflow.config.base.BaseConfig`.
    """
    rules = {name: NodeRule(each.labels, each.strategy) for name, each in config.ray.nodes.items()}
    models = getattr(getattr(config, "reward", None), "models", {})
    served = {name: model for name, model in models.items() if name in rules}
    return {**rules, **{f"{name}-{n}": rules[name] for name, model in served.items() for n in range(model.replicas)}}


def check_nodes(config: Any, hosts: Mapping[str, Hosted]) -> None:
    """Checks the rules for the nodes of services and of the reward models that the run serves.

    Args:
        config: a :class:`~dataflow.config.base.BaseConfig`.
        hosts: of the pipeline's services, by name.

    Raises:
        ConfigError: a rule is for no service and no reward model, or has no effect.
    """
    models = getattr(getattr(config, "reward", None), "models", {})
    services = {CONTROLLER, *hosts}
    known = services | {name for name, model in models.items() if model.url is None}
    for name in config.ray.nodes:
        key = f"ray.nodes.{name}"
        if name in services and name in models:
            raise ConfigError(
                f"{key}: a service and a reward model have that name; give section reward.models.{name} another one."
            )
        if name in models and config.ray.nodes[name].strategy != "pack":
            raise ConfigError(f"{key}.strategy has no effect: Ray places each server by itself; leave it out.")
        if name not in known and name in models:
            raise ConfigError(f"{key} has no effect: reward.models.{name}.url names servers elsewhere; leave it out.")
        if name not in known:
            raise ConfigError(
                f"{key}: the run has no service of that name"
                f"{nearest(name, known) or '; it has ' + ', '.join(sorted(known)) + '.'}"
            )
        if config.executor != "ray":
            raise ConfigError(
                f"{key} has no effect with executor={config.executor}; give executor=ray, or leave it out."
            )
        if not on_cluster(config):
            raise ConfigError(
                f"{key} has no effect on a Ray of the run's own, which is on this machine alone; give ray.address, or "
                "leave it out."
            )


def model_files(
    path: str | None, key: str = "model.path", others: Mapping[str, str | None] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the arguments of a :class:`~dataflow.stage.Hosted` that name the files of its service.

    Args:
        path: of its model; None if it has none, or none yet.
        key: that gives the model.
        others: paths of further files, by key; None for those that are not given.
    """
    files = {name: _absolute(value) for name, value in others.items() if value is not None}
    local = Path(path or "").expanduser()
    if path is None or not os.path.isdir(local):  # still to be made, or downloaded; or a name that is too long
        return {"files": files}
    return {"files": {**files, key: str(local.absolute())}}


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def agent_place(config: Any, source: Source, judged: bool) -> dict[str, Any]:
    """Returns the arguments of a Hosted that place a reward agent beside the command, with the files that it needs.

    There are its ledger, and the servers that the run starts for it.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`; the agent reads its model's tokenizer.
        source: of the agent.
        judged: whether the judge scores where neither a function nor a reward model does.
    """
    options = source.options
    paths = {
        "custom_reward_function.path": source.custom.path,
        "reward.manager_path": options.manager_path,
        "reward.model_tokenizer": options.model_tokenizer,
        **_asked_files(config, source, judged),
    }
    files = model_files(config.model.path, others={keyed(key, source.name): path for key, path in paths.items()})
    own = options.ledger and options.cache is None
    cache = {} if options.cache is None else {keyed("reward.cache", source.name): _absolute(options.cache)}
    return {"here": True, "run_directory": own, "writes": cache, **files}


def _asked_files(config: Any, source: Source, judged: bool) -> dict[str, str | None]:
    """Returns the files, by key, of which an agent makes its requests to a reward model or to the judge."""
    if source.custom.path is not None:
        return {}
    name = model_of(config, source)
    if (model := config.reward.models.get(name)) is None:
        return _prompt_files(source.judge, "judge") if judged else {}
    key = f"reward.models.{name}"
    if model.kind == "chat":
        return _prompt_files(model.prompt, f"{key}.prompt")
    return {f"{key}.path": model.path, f"{key}.template": model.template}


def _prompt_files(prompt: PromptConfig, section: str) -> dict[str, str | None]:
    texts = {f"{section}.template": prompt.template, f"{section}.system": prompt.system}
    return {key: text for key, text in texts.items() if text is not None and is_file(text)}
