"""The output of `dataflow plan`: predictions, advice and sweeps, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataflow.drawing.duration import seconds as duration
from dataflow.errors import ConfigError
from dataflow.planning.advice import advise
from dataflow.planning.config import WAKE_S, PlanConfig
from dataflow.planning.placing import sentences
from dataflow.planning.planner import ROWS, Prediction, Sweep, jobs, parse_sweep, predict, sweep
from dataflow.planning.simulation.outcomes import Job, Outcomes, processes
from dataflow.planning.sources.read import read_workload
from dataflow.planning.workload import Workload
from dataflow.policy import STREAM, SchedulingPolicy, preset
from dataflow.timeline.text import table

FAR_OFF = 0.2
"""Share by which a replay may be off the log before the plan says that it lacks something."""
_FAR_OFF = (
    ": this plan lacks something that the run waits for (compute_group and a user's own stages are not planned), or "
    "the run is so short that its start counts."
)


@dataclass(frozen=True)
class Plan:
    """A workload with its predictions, advice and sweeps.

    Attributes:
        replayed_s: predicted seconds of a step of the source's own run; None if its time was not logged.
    """

    workload: Workload
    rows: list[Prediction]
    advice: list[str]
    sweeps: list[Sweep]
    replayed_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON object described in docs/planning.md."""
        found: dict[str, Any] = {
            "source": self.workload.source,
            "steps": self.workload.steps,
            "assumptions": list(self.workload.assumptions),
            "policies": [row.as_dict() for row in self.rows],
            "advice": self.advice,
        }
        if self.workload.logged is not None:
            policy, seconds, steps = self.workload.logged
            found["logged"] = {"policy": policy, "total_s": seconds, "steps": steps}
        if self.replayed_s is not None:
            found["logged"]["predicted_step_s"] = self.replayed_s
        if self.workload.caution:
            found["caution"] = self.workload.caution
        if self.sweeps:
            found["sweeps"] = [s.as_dict() for s in self.sweeps]
        return found

    def text(self) -> str:
        """Returns the text for a terminal."""
        load = self.workload
        blocks = [f"caution: {load.caution}"] if load.caution else []
        blocks.append(
            f"{load.source}: {load.steps} steps of {load.prompts} x {load.responses} samples, "
            f"{load.mini_batches} mini-batches, {load.mean_s():.4g} s of GPU work a step"
        )
        if load.logged is not None and self.replayed_s is not None:
            policy, seconds, steps = load.logged
            logged = seconds / steps
            off = self.replayed_s / logged - 1
            blocks.append(
                f"as logged ({policy}, {steps} steps): predicted {self.replayed_s:.4g} s a step, "
                f"logged {logged:.4g} s, {off:+.1%}" + (_FAR_OFF if abs(off) > FAR_OFF else "")
            )
        blocks.append(_table(self.rows))
        if load.assumptions:
            blocks.append("assumed:\n" + "\n".join(f"- {sentence}" for sentence in load.assumptions))
        if self.advice:
            blocks.append("advice:\n" + "\n".join(f"- {sentence}" for sentence in self.advice))
        blocks += [_sweep_table(s) for s in self.sweeps]
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        """Returns the picture of the plan and its text, for notebooks."""
        from dataflow.drawing.notebook import shown
        from dataflow.planning.drawing.picture import draw_plan

        return shown(self.text(), lambda path: draw_plan(self.rows, self.sweeps, path), "predicted seconds a step")


def make_plan(source: str, arguments: Sequence[str], on_work: Callable[[str], None] = lambda text: None) -> Plan:
    """Reads a source and predicts it under every policy.

    Args:
        source: a run, a verl log or a costs.yaml.
        arguments: ``key=value``; ``policy=NAME`` adds a row and ``sweep=KNOB:LOW:HIGH`` a sweep; both may be
            repeated.
        on_work: called with a description of the current work, for a progress display.

    Raises:
        UserError: the source or an argument is wrong.
    """
    named = [a.partition("=")[2] for a in arguments if a.startswith("policy=")]
    sweeps = [a.partition("=")[2] for a in arguments if a.startswith("sweep=")]
    rest = [a for a in arguments if not a.startswith(("policy=", "sweep="))]
    on_work(f"reading {source}")
    workload, config = read_workload(source, rest)
    if config.gpus is None and (name := next((n for n, m in config.reward.models.items() if m.wake != WAKE_S), None)):
        raise ConfigError(f"reward.models.{name}.wake has no effect without gpus=N; give the number of GPUs in all.")
    for text in sweeps:
        parse_sweep(text, workload)
    policies = _policies(workload, config, named)
    own = _own(workload, policies)
    with Outcomes(processes()) as outcomes:
        outcomes.begin([*jobs(workload, policies), *([] if own is None else [own])])
        rows = predict(workload, policies, lambda name: on_work(f"predicting {name}"), outcomes)
        on_work("looking for advice")
        advice = advise(workload, rows, policies, outcomes)
        if config.gpus is not None:
            advice += sentences(workload, config.gpus, outcomes)
        found = [sweep(workload, text, [n for n in policies if n in ROWS], on_work, outcomes) for text in sweeps]
        replayed = None if own is None else outcomes.of(own.workload, own.policy).total_s / own.workload.steps
    return Plan(workload, rows, advice, found, replayed)


def _own(workload: Workload, policies: Mapping[str, SchedulingPolicy]) -> Job | None:
    """Returns the simulation of the source's own run; None if there is nothing to compare it with."""
    if workload.logged is None or workload.logged[0] not in policies:
        return None
    policy, _seconds, steps = workload.logged
    return Job.of(workload.loop or replace(workload, steps=steps), policies[policy])


def beside(plans: Sequence[Plan]) -> str:
    """Returns a table of several plans' seconds a step: a row for each source, a column for each policy."""
    names = list(dict.fromkeys(row.policy for plan in plans for row in plan.rows))
    lines = [("s/step", "logged", *names)]
    for plan in plans:
        step_s = {row.policy: f"{row.step_s:.4g}" for row in plan.rows}
        logged = plan.workload.logged
        took = "" if logged is None else f"{logged[1] / logged[2]:.4g} ({logged[0]})"
        lines.append((plan.workload.source, took, *(step_s.get(name, "") for name in names)))
    return str(table(lines))


def _policies(workload: Workload, config: PlanConfig, named: Sequence[str]) -> dict[str, SchedulingPolicy]:
    if "" in named:
        raise ConfigError("policy=: the name is missing; give policy=both, or another policy.")
    names = dict.fromkeys([*(n for n in ROWS if workload.pipeline.streaming or not n.endswith(STREAM)), *named])
    policies = {name: preset(name, workload.mini_batches) for name in names}
    if config.policy is not None:
        own = config.policy.resolve(workload.mini_batches)
        name = f"split={own.split} staleness={own.max_staleness}" + (STREAM if own.stream_rollout else "")
        policies[name] = own
    return policies


def _table(rows: Sequence[Prediction]) -> str:
    lines = [("policy", "s/step", "total", "change", "GPU idle", "exposed wait s/step", "bound s/step", "bound by")]
    for row in rows:
        causes = [f"{c} {s:.3g}" for c, s in row.exposed_wait_by_cause.items() if s >= 0.005 * row.step_s]
        lines.append(
            (
                row.policy,
                f"{row.step_s:.4g}",
                duration(row.total_s),
                f"{row.change:+.1%}",
                f"{row.gpu_idle:.0%}",
                f"{row.exposed_wait_s:.3g}" + (f" ({', '.join(causes)})" if causes else ""),
                f"{row.lower_bound_step_s:.4g}",
                row.bound_by,
            )
        )
    return str(table(lines))


def _sweep_table(found: Sweep) -> str:
    data = found.as_dict()
    lines = [(found.knob, *(p["policy"] for p in data["policies"]), "lower bound")]
    for at, value in enumerate(data["values"]):
        times = [f"{p['step_s'][at]:.4g}" for p in data["policies"]]
        lines.append((f"{value:g}", *times, f"{min(p['lower_bound_s'][at] for p in data['policies']):.4g}"))
    return f"seconds a step over {found.knob}:\n" + str(table(lines))
