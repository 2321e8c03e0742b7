"""The reward services of a dataflow run: what its trace shows of each agent's latencies and limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dataflow.distribution import Distribution
from dataflow.errors import ConfigError, counted, nearest
from dataflow.graph import Pipeline
from dataflow.planning.config import AgentPlan, PlanConfig
from dataflow.planning.rewards import Rewards
from dataflow.planning.roles import Roles
from dataflow.planning.sources.whatifs import changed
from dataflow.timeline.agents import concurrency_of, rates_of
from dataflow.timeline.spans import Mark, Trace


def further_services(
    trace: Trace, pipeline: Pipeline, roles: Roles, config: PlanConfig, assumed: list[str]
) -> dict[str, Rewards]:
    """Returns the services of the agents whose groups do not form the parts, and adds what is assumed of them.

    An agent whose requests the trace does not have takes the measured time of its tasks.

    Raises:
        ConfigError: a key is of an agent that the run does not have.
    """
    names = {pipeline.by_name[collect].on: collect for collect in roles.beside}
    if unknown := [name for name in config.agents if name not in names]:
        guess = nearest(unknown[0], names) or f"; it has {', '.join(names) or 'none beside the first'}."
        raise ConfigError(f"agents.{unknown[0]}: the run has no further reward agent of this name{guess}")
    found = {}
    for collect in roles.beside:
        agent = pipeline.by_name[collect].on
        plan = config.agents.get(agent, AgentPlan())
        own, known = service_of(trace, agent, (None, collect), bool(config.balance_batch))
        if known or plan.latency is not None:
            found[collect] = changed(own, plan, f"agents.{agent}")
            assumed += [f"agent '{agent}': {known} latencies are those of the run.", *taken(trace, agent, plan)]
    return found


def service_of(trace: Trace, agent: str, collectors: Collection[str | None], scattered: bool) -> tuple[Rewards, int]:
    """Returns an agent's service, with the latencies of the requests in a trace, and their number.

    Args:
        trace: of the run.
        agent: its name.
        collectors: what the requests' ``collector`` may be, where several agents collect on one resource.
        scattered: see :class:`~dataflow.planning.workload.Rewards`.
    """
    asked = _asked(trace, agent)
    trained = [m for m in asked if not m.args.get("validation")] or asked
    own = [m for m in trained if m.args.get("collector") in collectors]
    latencies, steps = tuple(m.end - m.begin for m in own), _by_step(own)
    distribution = Distribution("empirical", values=latencies) if latencies else Distribution("constant")
    concurrency, rpm = concurrency_of(trace, agent) or 64, rates_of(trace, agent)[0]
    return Rewards(distribution, concurrency, rpm, scattered=scattered, steps=steps), len(latencies)


def _by_step(marks: Iterable[Mark]) -> dict[int, tuple[float, ...]]:
    """Returns the seconds of the requests of each step, group by group."""
    steps: dict[int, list[Mark]] = {}
    for mark in marks:
        steps.setdefault(_number(mark, "step"), []).append(mark)
    return {step: tuple(m.end - m.begin for m in sorted(of, key=_place)) for step, of in steps.items()}


def _place(mark: Mark) -> tuple[int, int]:
    return _number(mark, "group"), _number(mark, "sample")


def _number(mark: Mark, name: str) -> int:
    """Returns a number among the facts of a request; 0 for anything else, which a user's own marks may have."""
    found = mark.args.get(name)
    return found if isinstance(found, int) else 0


def validation_latency(trace: Trace, agent: str) -> Distribution | None:
    """Returns the latencies of an agent's validation requests, which may be few at a time; None if there were none."""
    latencies = tuple(m.end - m.begin for m in _asked(trace, agent) if m.args.get("validation"))
    return Distribution("empirical", values=latencies) if latencies else None


def taken(trace: Trace, agent: str, plan: AgentPlan) -> list[str]:
    """Returns what a plan takes over from an agent of the run, and what it leaves out."""
    rpm, tpm = rates_of(trace, agent)
    said = []
    if rpm and plan.rpm is None:
        said.append(f"{agent}.rpm={rpm:g} is the run's.")
    if tpm:
        said.append(f"{agent}.tpm={tpm:g} of the run is not simulated.")
    if repeated := sum(_repeated(trace, m) for m in trace.marks if m.name == "reward" and m.resource == agent):
        said.append(
            f"{counted(repeated, 'answer')} that '{agent}' took from its ledger "
            f"{'is' if repeated == 1 else 'are'} left out: the run resumed, and asked for rewards again."
        )
    return said


def check_keys(config: PlanConfig, pipeline: Pipeline, source: str) -> None:
    """Checks the keys of the reward service where no stage sends it requests.

    Raises:
        ConfigError: no stage collects rewards, or the keys do not say what the stage that does would ask.
    """
    given = sorted(config.reward.model_fields_set)
    if not given:
        return
    if (collector := pipeline.collector) is None:
        raise ConfigError(f"reward.{given[0]}: the run of {source} collects no rewards; leave it out.")
    why = f"'{collector.name}' asks for its rewards itself, and the trace has the time of the whole stage alone: "
    config.need(source, {"reward.latency": "uniform:1:4", "reward.concurrency": 64}, why=why)


def _asked(trace: Trace, agent: str) -> list[Mark]:
    """Returns the requests of an agent, those of validations among them."""
    asked = [m for m in trace.marks if m.name == "reward" and m.resource == agent]
    return [m for m in asked if not _repeated(trace, m)]


def _repeated(trace: Trace, mark: Mark) -> bool:
    """Whether a request may be one that the run made before it was resumed, and whose answer the ledger has."""
    return bool(trace.meta.get("resumed")) and mark.args.get("how") == "ledger"
