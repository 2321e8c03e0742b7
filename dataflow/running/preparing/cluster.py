"""Asks the Ray cluster that a run is to join what it has, and compares that with what the run's services need."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from dataflow.errors import ConfigError, counted
from dataflow.executors.ray.nodes import Node, NodeRule, alive, bundle_of, lacking
from dataflow.running.services.hosting import REPLICAS, gpus_of
from dataflow.running.services.nodes import node_rules
from dataflow.stage import Hosted
from dataflow.system.children import command

PATIENCE_S = 30.0
"""Seconds in which a cluster shall answer; to join one takes a few."""


def check_cluster(config: Any, hosts: Mapping[str, Hosted], patience_s: float = PATIENCE_S) -> str:
    """Checks that the cluster at ``ray.address`` answers and has what the services need; returns what it has.

    Resources that other processes use count as there, since a run waits for them; the answer says what is free.

    Args:
        config: a :class:`~dataflow.config.base.BaseConfig` with ``ray.address``.
        hosts: of the pipeline's services, by name.
        patience_s: seconds in which it shall answer.

    Raises:
        ConfigError: it does not, or a service does not fit on it.
    """
    nodes, free = _asked(config.ray.address, patience_s)
    for name, host in hosts.items():
        rule = node_rules(config).get(name, NodeRule())
        number, share, devices = _processes(host)
        if clause := lacking(rule, number, bundle_of(share, devices), nodes):
            raise ConfigError(f"ray.address={config.ray.address}: '{name}' does not fit on the cluster: {clause}.")
    has = sum(node["Resources"].get("GPU", 0.0) for node in nodes)
    if (gpus := gpus_of(hosts.values())) > has:
        raise ConfigError(
            f"ray.address={config.ray.address}: the run needs {counted(gpus, 'GPU')}, and the cluster has {has:g}; "
            "give fewer ranks (trainer.world_size), or add nodes."
        )
    cpus = sum(node["Resources"].get("CPU", 0.0) for node in nodes)
    words = f"{counted(len(nodes), 'node')} with {counted(cpus, 'CPU')} ({free.get('CPU', 0.0):g} free)"
    return f"{words} and {counted(has, 'GPU')} ({free.get('GPU', 0.0):g} free)" if has else f"{words} and no GPU"


def _processes(host: Hosted) -> tuple[int, float, int]:
    """Returns the number of processes of a service, and the share and number of GPUs of each."""
    if host.factory == REPLICAS:
        return host.options["number"], host.options["gpus"], host.options["devices"]
    return host.ranks, host.gpus, host.devices


def _asked(address: str, patience_s: float) -> tuple[list[Node], Mapping[str, float]]:
    """Returns the nodes of a cluster that are alive, and the resources that no process uses."""
    asking = command("dataflow.executors.ray", address)
    try:
        done = subprocess.run(asking, capture_output=True, text=True, timeout=patience_s, stdin=subprocess.DEVNULL)
        found = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"ray.address={address}: the cluster does not answer within {patience_s:g} s; look at it with 'ray "
            "status', or correct the address."
        ) from None
    except ValueError:
        why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise ConfigError(f"ray.address={address}: the cluster could not be asked ({why[:300]}).") from None
    if "error" in found:
        raise ConfigError(found["error"])
    return alive(found["nodes"]), found["free"]
