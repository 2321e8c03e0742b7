"""The output of `dataflow plan`: predictions, advice and sweeps, as text and as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataflow.drawing.duration import figure
from dataflow.drawing.duration import seconds as duration
from dataflow.drawing.notebook import shown
from dataflow.drawing.page import shell
from dataflow.errors import ConfigError, counted
from dataflow.files import replaced
from dataflow.planning.advice import advise
from dataflow.planning.config import PlanConfig
from dataflow.planning.picture import draw_plan
from dataflow.planning.planner import AS_LOGGED, ROWS, Prediction, Sweep, numbers_of, parse_sweep, predict, sweep
from dataflow.planning.simulation import Outcomes
from dataflow.planning.sources.read import read_workload
from dataflow.planning.workload import Workload
from dataflow.policy import STREAM, SchedulingPolicy, preset
from dataflow.timeline.text import table

FAR_OFF = 0.2
"""Share by which a replay may be off the log before the plan says what may be the reason."""
_DOUBT = (
    "; others were in flight (log.concurrency), it overlaps steps already, or it waits for what this plan lacks "
    "(compute_group, a user's own stages)."
)


@dataclass(frozen=True)
class Plan:
    """A workload with its predictions, advice and sweeps.

    Attributes:
        replay: the source's own run, predicted as it ran; None if its time was not logged, or its policy is unknown.
    """

    workload: Workload
    rows: list[Prediction]
    advice: list[str]
    sweeps: list[Sweep]
    replay: Prediction | None = None

    @property
    def drawn(self) -> list[Prediction]:
        """The rows of a drawing: the source's own run, then the policies."""
        return [*([] if self.replay is None else [self.replay]), *self.rows]

    @property
    def logged_step_s(self) -> float | None:
        """Seconds of a step of the source's own run, as it was logged."""
        logged = self.workload.logged
        return None if logged is None else logged.seconds / logged.steps

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON object described in docs/planning.md."""
        found: dict[str, Any] = {
            "source": self.workload.source,
            "steps": self.workload.steps,
            **({"ran_with": self.workload.ran_with} if self.workload.ran_with else {}),
            "assumptions": list(self.workload.assumptions),
            "policies": [row.as_dict() for row in self.rows],
            "advice": self.advice,
        }
        if self.workload.logged is not None:
            logged = self.workload.logged
            found["logged"] = {"policy": logged.policy, "total_s": logged.seconds, "steps": logged.steps}
        if self.replay is not None:
            found["logged"]["predicted_step_s"] = self.replay.step_s
        if self.sweeps:
            found["sweeps"] = [s.as_dict() for s in self.sweeps]
        return found

    def text(self) -> str:
        """Returns the text for a terminal."""
        load = self.workload
        blocks = [f"{load.source}: {self.size()}", self.replayed(), table(self.cells())]
        if load.assumptions:
            blocks.append("assumed:\n" + "\n".join(f"- {sentence}" for sentence in load.assumptions))
        if self.advice:
            blocks.append("advice:\n" + "\n".join(f"- {sentence}" for sentence in self.advice))
        blocks += [f"seconds a step over {s.knob}:\n{table(s.cells())}" for s in self.sweeps]
        return "\n\n".join(filter(None, blocks))

    def size(self) -> str:
        """Returns what the source ran with, and how large the planned job is, in words."""
        load = self.workload
        ran = f"it ran with {load.ran_with}; planned are " if load.ran_with else ""
        return (
            f"{ran}{counted(load.steps, 'step')} of {load.prompts} x {load.responses} samples, "
            f"{counted(load.mini_batches, 'mini-batch')}, "
            f"{figure(load.mean_s())} s of GPU work a step" + (", validation included" if load.validation else "")
        )

    def replayed(self) -> str:
        """Returns how near the prediction comes to the log; "" if the log does not say how long it took."""
        step_s, logged = self.logged_step_s, self.workload.logged
        if step_s is None or logged is None:
            return ""
        steps = counted(logged.steps, "step")
        if self.replay is None:
            return (
                f"{AS_LOGGED}: {figure(step_s)} s a step over {steps}, not replayed: its policy changed during the run."
            )
        off = self.replay.step_s / step_s - 1
        said = f"predicted {figure(self.replay.step_s)} s a step, logged {figure(step_s)} s, {off:+.1%}"
        return f"{AS_LOGGED}: {said} ({logged.policy}, {steps}){_DOUBT if abs(off) > FAR_OFF else ''}"

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the table of policies with its head, the log itself first."""
        rows = [_cells(row) for row in self.drawn]
        if self.replay is not None:
            rows[0][3] = ""  # a change is against the baseline as it is predicted
        elif (logged := self.workload.logged) is not None and (step_s := self.logged_step_s) is not None:
            rows.insert(0, [AS_LOGGED, figure(step_s), duration(logged.seconds), *[""] * 5])
        head = ("policy", "s/step", "total", "change", "GPU idle", "exposed wait s/step", "bound s/step", "bound by")
        return [head, *map(tuple, rows)]

    def save(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Draws the plan into a file, which is replaced atomically.

        Args:
            path: a name in ``.html``, one file that opens offline, with all that the text says; ``.png`` or ``.svg``.
            title: over the whole drawing; none if empty.

        Raises:
            DataError: the file name has another ending.
        """
        target = Path(path)
        if target.suffix.lower() != ".html":
            draw_plan(self.drawn, self.sweeps, target, title)
            return
        with replaced(target) as temporary:
            temporary.write_text(shell(title or "plan", self._repr_html_()), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Returns the picture of the plan and its text, for pages and notebooks."""
        return shown(self.text(), lambda path: draw_plan(self.drawn, self.sweeps, path), "predicted seconds a step")


def make_plan(source: str, arguments: Sequence[str], on_work: Callable[[str], None] = lambda text: None) -> Plan:
    """Reads a source (a run, a verl log or a costs.yaml) and predicts it under every policy.

    The argument ``policy=NAME`` adds a row and ``sweep=KNOB:LOW:HIGH`` a sweep; both may be repeated. ``on_work`` is
    called with a description of the current work, for a progress display.
    """
    named = [a.partition("=")[2] for a in arguments if a.startswith("policy=")]
    sweeps = [a.partition("=")[2] for a in arguments if a.startswith("sweep=")]
    rest = [a for a in arguments if not a.startswith(("policy=", "sweep="))]
    on_work(f"reading {source}")
    workload, config = read_workload(source, rest)
    for text in sweeps:
        parse_sweep(text, workload)
    policies = _policies(workload, config, named)
    outcomes, replay = Outcomes(), None
    logged = workload.logged
    if logged is not None and logged.under is not None:
        on_work("replaying the log")
        own = workload.loop or replace(workload, steps=logged.steps)
        replay = predict(own, {AS_LOGGED: logged.under}, outcomes=outcomes)[0]
    rows = predict(workload, policies, lambda name: on_work(f"predicting {name}"), outcomes)
    on_work("looking for advice")
    advice = advise(workload, rows, policies, outcomes)
    found = [sweep(workload, text, [n for n in policies if n in ROWS], on_work, outcomes) for text in sweeps]
    return Plan(workload, rows, advice, found, replay)


def _policies(workload: Workload, config: PlanConfig, named: Sequence[str]) -> dict[str, SchedulingPolicy]:
    if "" in named:
        raise ConfigError("policy=: the name is missing; give policy=both, or another policy.")
    names = dict.fromkeys([*(n for n in ROWS if workload.pipeline.streaming or not n.endswith(STREAM)), *named])
    policies = {name: preset(name, workload.mini_batches) for name in names}
    if config.policy is not None:
        own = config.policy.resolve(workload.mini_batches)
        policies[numbers_of(own)] = own
    return policies


def _cells(row: Prediction) -> list[str]:
    causes = [f"{c} {figure(s, 3)}" for c, s in row.exposed_wait_by_cause.items() if s >= 0.005 * row.step_s]
    return [
        row.policy,
        figure(row.step_s),
        duration(row.total_s),
        f"{row.change:+.1%}",
        f"{row.gpu_idle:.0%}",
        figure(row.exposed_wait_s, 3) + (f" ({', '.join(causes)})" if causes else ""),
        figure(row.lower_bound_step_s),
        row.bound_by,
    ]
