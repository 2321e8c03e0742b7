"""Ray's workers as copies of a process that has imported what they need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from dataflow.cluster.fork_server import ForkServer, available
from dataflow.cluster.local import LocalRay
from tests.rigs.processes import command

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not available(), reason="no copies on this machine"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["numpy", "no_such_module", "dataflow.executors.ray.host"])
    yield server
    server.close()


@pytest.fixture(scope="module")
def ray(server: ForkServer) -> Iterator[Any]:
    local = LocalRay(1, server)
    local.open(logging_level="ERROR", log_to_driver=False, configure_logging=False)
    import ray

    yield ray
    local.close()


def started(ray: Any, count: int, **options: Any) -> list[Any]:
    class Worker:
        def facts(self) -> dict[str, Any]:
            import os
            import random
            import resource
            import signal
            import sys
            from pathlib import Path

            loaded = "numpy" in sys.modules and "dataflow.executors.ray.host" in sys.modules
            import numpy as np
            from ray import WorkerID

            return {
                "pid": os.getpid(),
                "loaded": loaded,
                "drawn": (random.random(), float(np.random.rand()), WorkerID.from_random().hex()),
                "like": {
                    # Ray starts some workers by bash, which drops the prompt of an activated environment.
                    "environment": {name: value for name, value in os.environ.items() if name != "PS1"},
                    "main": sys.modules["__main__"].__file__,
                    "path": sys.path,
                    "directory": os.getcwd(),
                    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
                    "ignores": [signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGINT, signal.SIGCHLD)],
                    "out of memory": Path("/proc/self/oom_score_adj").read_text(),
                    "nice": os.nice(0),
                    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
                    "leads": os.getpgid(0) == os.getpid(),
                },
            }

    kind = ray.remote(num_cpus=0)(Worker)
    return [kind.options(**options).remote() for _ in range(count)]


def copied(facts: dict[str, Any]) -> bool:
    """Whether a worker is a copy of this process's server."""
    parent = psutil.Process(psutil.Process(facts["pid"]).ppid())
    return bool(facts["loaded"]) and "dataflow.cluster.fork_server" in command(parent) and parent.ppid() == os.getpid()


def test_workers_are_copies_that_differ_and_die_alone(ray: Any, server: ForkServer) -> None:
    actors = started(ray, 3)
    facts = ray.get([actor.facts.remote() for actor in actors])
    assert all(copied(each) for each in facts)
    assert len({drawn for each in facts for drawn in each["drawn"]}) == 9

    os.kill(facts[0]["pid"], signal.SIGKILL)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actors[0].facts.remote())
    ray.kill(actors[1])
    (again,) = ray.get([actor.facts.remote() for actor in started(ray, 1)])
    assert copied(again)
    assert ray.get(actors[2].facts.remote())["pid"] == facts[2]["pid"]


def test_other_workers_start_on_their_own_and_are_like_copies(ray: Any, server: ForkServer) -> None:
    """Those with an environment of their own, and all without the server. Last: it ends the module's server."""
    variables = {"env_vars": {"SOMETHING": "else"}}
    # Kept until the end, as Ray reuses workers.
    actors = [*started(ray, 1), *started(ray, 1, runtime_env=variables)]
    copy, other = ray.get([actor.facts.remote() for actor in actors])
    assert copied(copy)
    assert not other["loaded"]
    assert other["like"]["environment"].pop("SOMETHING") == "else"
    server.close()
    actors += started(ray, 1)
    own = ray.get(actors[-1].facts.remote())
    assert not own["loaded"]
    assert own["like"] == copy["like"] == other["like"]


ALONE = """
import psutil
from dataflow.cluster.fork_server import ForkServer
server = ForkServer(["json"])
print(psutil.Process().children()[0].pid, flush=True)
input()
"""


def test_the_server_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ALONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.kill()
    gone, _alive = psutil.wait_procs([server], timeout=60)
    assert gone
