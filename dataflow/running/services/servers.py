"""The inference servers that a run samples from: the host of their client, and the check before the start."""

from __future__ import annotations

import hashlib
import platform
import uuid
from pathlib import Path
from typing import Any

from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError, NotChecked
from dataflow.files import unmakable
from dataflow.running.services.nodes import model_files
from dataflow.stage import Hosted

SERVERS = "dataflow.engines.http.engine:HttpRollout"
_UNNAMED = uuid.uuid4().hex
"""Stands for the runs without a name of this process."""


def servers_host(config: Any, longest_prompt: int) -> Hosted:
    """Returns the host of the client of inference servers, named ``rollout``.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig` with ``engine.rollout=http``.
        longest_prompt: tokens of a prompt, earlier turns of its conversation included.
    """
    draw = config.engine
    own = _weights_directory(config)
    return Hosted(
        "rollout",
        SERVERS,
        {
            "model": config.model.path,
            "max_prompt_length": longest_prompt,
            "urls": list(draw.urls),
            "sampling": _sampling(config),
            "max_model_len": _longest(config),
            "api_key_env": draw.api_key_env,
            "slots": draw.max_num_seqs,
            "timeout": draw.request_timeout,
            "tries": draw.request_tries,
            "wait": draw.server_wait,
            "weights_dir": own,
            "in_flight": draw.in_flight,
        },
        concurrent=True,
        restarts=draw.restarts,
        here=True,  # it may reach servers that only this machine does
        run_directory=draw.weights_dir is None,
        **model_files(config.model.path, others={"tools.path": config.tools.path}),
    )


def check_weights_directory(directory: str) -> str:
    """Checks that ``engine.weights_dir`` can be written to.

    Raises:
        ConfigError: it cannot.
    """
    if (why := unmakable(directory)) is not None:
        raise ConfigError(f"engine.weights_dir={directory}: {why}")
    return f"{directory} can be written"


def _weights_directory(config: Any) -> str | None:
    """Returns the directory for the weights of a run, which is the same after a resume; None for a temporary one."""
    if not config.engine.weights_dir:
        return None if (own := config.run_file("weights")) is None else str(own)
    # Runs of one name in other folders, or on other machines, may share engine.weights_dir.
    run = f"{platform.node()}:{config.run_file('')}" if config.name else _UNNAMED
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    return str(Path(config.engine.weights_dir, f"{config.name or 'run'}-weights-{digest}"))


def check_rollout_servers(config: Any, patience_s: float | None) -> str:
    """Checks that the servers answer and serve the model of the run.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig` with ``engine.rollout=http``.
        patience_s: seconds in which they shall answer; None for ``engine.server_wait``.

    Raises:
        ConfigError: one does not answer, or cannot serve the run.
        NotChecked: they answer, but the model of the run, which theirs is compared with, is still to be made.
    """
    from dataflow.engines.http.check import check_servers

    draw, model = config.engine, config.model.path
    here = model is not None and Path(model, "config.json").is_file()
    wait_s = draw.server_wait if patience_s is None else patience_s
    found = check_servers(
        draw.urls, draw.api_key_env, model if here else None, _longest(config), _sampling(config), wait_s
    )
    if not here:
        raise NotChecked(
            f"they answer ({found}); what they serve is compared with the model of model.path, which is not there yet"
        )
    return found


def _sampling(config: Any) -> Sampling:
    """Returns what decides which log-probs the servers must report."""
    draw = config.engine
    names = ("temperature", "top_p", "top_k", "max_tokens", "min_p", "repetition_penalty")
    return Sampling(**{name: getattr(draw, name) for name in names})


def _longest(config: Any) -> int:
    return int(config.data.max_prompt_length + config.response_length)
