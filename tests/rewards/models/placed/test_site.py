"""Servers on other nodes, with a stand-in for Ray's calls: what is said when one cannot go on, and what stays."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.errors import ConfigError, RunError
from dataflow.rewards.models.keeper import ModelServers
from dataflow.rewards.models.placed import site as placed
from dataflow.rewards.models.site import ServerPlan
from dataflow.running.services import placed_models
from dataflow.system.loopback import ADDRESS

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]

LACKS = "reward.models.rm.path=/m: node b, where 'rm' runs, does not have this directory; copy it there."
PLAN = ServerPlan(lambda port, host: [], "cpu")


class Method:
    """A method of an actor, which runs when its result is fetched."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def remote(self, *_: object) -> Callable[[], Any]:
        return self._work

    def options(self, **_: object) -> Method:
        return self


async def fits(_actor: Any, _where: placed.Where) -> None: ...


class Site(placed.PlacedSite):
    """Has actors whose servers end as ``end`` says; from the second one on their node fails its check."""

    def __init__(self, end: Callable[[], placed.End], second: Exception | None = None) -> None:
        super().__init__("reward model 'rm': server 0", PLAN, {}, ADDRESS, fits, lambda: "", 5)
        self._ends, self._second, self.actors = end, second, 0

    def _actor(self) -> Any:
        self.actors += 1
        works: dict[str, Callable[[], Any]] = {
            "start": lambda: (1, 1), "answered": lambda: True, "end": self._ends, "close": lambda: None
        }  # fmt: skip
        return SimpleNamespace(**{name: Method(work) for name, work in works.items()})

    def settled(self, actor: Any) -> placed.Where:
        if self.actors > 1 and self._second is not None:
            raise self._second
        return placed.Where("n", "a", "v")


def lost_of(site: Site, logs: Path, monkeypatch: pytest.MonkeyPatch, restarts: int) -> tuple[str, int]:
    """Lets the servers of a site end until there is no other; returns what is said, and the restarts."""
    import ray

    def no_nodes() -> None:
        raise ray.exceptions.RaySystemError("timed out")

    for name, work in (("get", lambda ref, timeout=None: ref()), ("kill", lambda actor: None), ("nodes", no_nodes)):
        monkeypatch.setattr(ray, name, work)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    losses: queue.Queue[RunError] = queue.Queue()
    with ModelServers("rm", [site], logs=logs, start_s=5, restarts=restarts, on_lost=losses.put) as servers:
        return str(losses.get(timeout=20)), servers.restarted


def test_a_node_that_does_not_fit_ends_the_restarts_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(lambda: placed.End(True, "node a, where it ran, is gone"), ConfigError(LACKS))
    said, restarts = lost_of(site, tmp_path, monkeypatch, 3)
    assert said == f"reward model 'rm': server 0 could not be placed: {LACKS}"
    assert (restarts, site.actors) == (1, 2)


def test_a_death_is_reported_while_ray_does_not_know_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import ActorDiedError

    def end() -> placed.End:
        raise ActorDiedError

    said, _restarts = lost_of(Site(end), tmp_path, monkeypatch, 0)
    assert "server 0 ended (the process beside it died: " in said


def test_places_that_cannot_all_be_made_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Places:
        released = False

        def __init__(self, *_: object, **_options: object) -> None:
            self.gpus = [SimpleNamespace(options={})] * 3
            made.append(self)

        def release(self) -> None:
            self.released = True

    class Half(placed.PlacedSite):
        closed = False

        def __init__(self, *arguments: Any) -> None:
            if len(made) == 3:
                raise RunError("too many files")
            made.append(self)

        def close(self) -> None:
            self.closed = True
            raise OSError("it cannot be closed, either")

    monkeypatch.setattr(placed_models, "Places", Places)
    monkeypatch.setattr(placed_models, "PlacedSite", Half)
    monkeypatch.setattr(placed_models, "node_rules", lambda config: {})
    config = SimpleNamespace(ray=SimpleNamespace(nodes={}, start_timeout=5))
    model: Any = SimpleNamespace(replicas=3, tensor_parallel=1, path="/m", template=None)
    with pytest.raises(OSError, match="cannot be closed, either"):
        placed_models.PlacedModel("rm", model, config, PLAN, Path(), ADDRESS)
    assert made[0].released
    assert all(site.closed for site in made[1:])
