"""The inference servers that a run samples from: the host of their client, and the check before the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError, NotChecked
from dataflow.files import unmakable
from dataflow.running.services.nodes import model_files
from dataflow.stage import Hosted

SERVERS = "dataflow.engines.servers.engine:ServerRollout"


def servers_host(config: Any, longest_prompt: int) -> Hosted:
    """Returns the host of the client of inference servers, named ``rollout``.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig` with ``engine.rollout=server``.
        longest_prompt: tokens of a prompt, earlier turns of its conversation included.
    """
    draw = config.engine
    own = Path(draw.weights_dir, f"{config.name or 'run'}-weights") if draw.weights_dir else config.run_file("weights")
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
            "wait": draw.server_wait,
            "weights_dir": None if own is None else str(own),
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


def check_rollout_servers(config: Any, patience_s: float | None) -> str:
    """Checks that the servers answer and serve the model of the run.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig` with ``engine.rollout=server``.
        patience_s: seconds in which they shall answer; None for ``engine.server_wait``.

    Raises:
        ConfigError: one does not answer, or cannot serve the run.
        NotChecked: the model of the run is still to be made.
    """
    from dataflow.engines.servers.probe import check_servers

    draw, model = config.engine, config.model.path
    if model is None or not Path(model, "config.json").is_file():
        raise NotChecked("what the servers serve is compared with the model of model.path, which is not there yet")
    wait_s = draw.server_wait if patience_s is None else patience_s
    return check_servers(draw.urls, draw.api_key_env, model, _longest(config), _sampling(config), wait_s)


def _sampling(config: Any) -> Sampling:
    """Returns what decides which log-probs the servers must report."""
    draw = config.engine
    names = ("temperature", "top_p", "top_k", "max_tokens", "min_p", "repetition_penalty")
    return Sampling(**{name: getattr(draw, name) for name in names})


def _longest(config: Any) -> int:
    return int(config.data.max_prompt_length + config.response_length)
