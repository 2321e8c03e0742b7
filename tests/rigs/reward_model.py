"""What the reward agent ought to do, said once more without an event loop: the model that the state machine compares.

Every event is told to the model first, with the time it happens at; what may run then is the agent's own choice.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dataflow.rewards.failure import parse_rule

TRIES, TIMEOUT, DEADLINE = 3, 10.0, 25.0 + 1 / 64
"""Of the agent under test, in seconds of its clock; the fraction keeps the ends of tries and deadlines apart."""
POST = 4096.0
"""What post_process_scores adds."""
PASSING = ("lost", "throttled", "timed out")
"""Ends of a call that another try may mend."""


@dataclass(eq=False)
class Row:
    step: int | str
    group: int
    sample: int
    text: str
    score: float
    """The one and only right one."""
    state: str = "open"
    got: float = math.nan
    kept: bool = True
    post: float = 0.0

    @property
    def at(self) -> tuple[int | str, int, int]:
        return self.step, self.group, self.sample

    def __str__(self) -> str:
        return f"sample {self.sample} of group {self.group} of step {self.step}"


@dataclass(eq=False)
class Ask:
    rows: list[Row]
    tries: int = 0
    refused: int = 0
    """How many of its tries used up none of the agent's."""
    begin: float = 0.0
    running: bool = False
    until: float = 0.0
    """No new try before then."""

    @property
    def deadline(self) -> float:
        return self.begin + DEADLINE


@dataclass(eq=False)
class Waiter:
    take: int
    order: str
    task: Any = None
    groups: list[int] | None = None


@dataclass(eq=False)
class Step:
    key: int | str
    kind: str
    spare: int
    groups: dict[int, list[Row]]
    unfinished: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    over: str = ""
    """Part of the report of a later collect."""

    @property
    def left(self) -> int:
        return len(self.unfinished) + len(self.arrived) - self.spare - sum(waiter.take for waiter in self.waiters)


class Model:
    """One life of an agent.

    Args:
        rule: ``reward.on_failure``.
        share_equal: as the agent's.
        max_failed_share: as the agent's.
        post: whether scores are post-processed.
        journal: answers by place; outlives the agent.
        cache: whether answers are known by their text too.
    """

    def __init__(
        self,
        rule: str,
        share_equal: bool,
        max_failed_share: float,
        post: bool,
        journal: dict[Any, float],
        cache: bool,
    ) -> None:
        self.rule, self.share_equal, self.max_failed_share = parse_rule(rule), share_equal, max_failed_share
        self.post, self.journal, self.cache = post, journal, cache
        self.steps: dict[int | str, Step] = {}
        self.asks: dict[Any, Ask] = {}
        self.counts: Counter[str] = Counter()
        self.halted = ""
        self.paused = 0.0
        self.asked_twice: list[str] = []
        self.ends: list[bool] = []

    def key_of(self, row: Row) -> Any:
        return row.text if self.share_equal else row.at

    @property
    def open(self) -> list[Row]:
        return [row for ask in self.asks.values() for row in ask.rows]

    def runnable(self, now: float) -> int:
        """Returns how many asks run or may run."""
        return sum(ask.running or ask.until <= now for ask in self.asks.values())

    def submit(self, key: int | str, groups: dict[int, list[Row]], spare: int) -> None:
        kind = "drop_group" if isinstance(key, str) and self.rule.kind == "replace_group" else self.rule.kind
        step = self.steps[key] = Step(key, kind, spare, dict(groups), list(groups))
        rows = [row for rows in groups.values() for row in rows]
        self.counts["requested"] += len(rows)
        known = {row.at for row in rows if row.at in self.journal or (self.cache and row.text in self.journal)}
        for row in rows:
            if row.at in known:
                self.counts["cached"] += 1
                self._scored(step, row)
            elif (ask := self.asks.get(self.key_of(row))) is not None:
                self.counts["shared"] += 1
                ask.rows.append(row)
            else:
                self.asks[self.key_of(row)] = Ask([row])

    def started(self, key: Any, now: float) -> float:
        """The agent has begun a call; returns when its time is over."""
        ask = self.asks.get(key)
        if ask is None or ask.running or ask.until > now:
            self.asked_twice.append(
                f"{key} was asked though {'nobody wants it' if ask is None else 'it runs or waits'}"
            )
            return math.inf
        ask.begin = ask.begin if ask.tries else now
        self.counts["retried"] += ask.tries > 0
        ask.tries += 1
        ask.running = True
        return now + min(TIMEOUT, max(0.0, ask.begin + DEADLINE - now))

    def ended(self, key: Any, how: str, now: float, wait: float = 0.0) -> None:
        """A call has ended."""
        ask = self.asks[key]
        ask.running = False
        self.counts["throttled"] += how == "throttled"
        self.counts["timed_out"] += how == "timed out"
        if how == "throttled":
            ask.refused += 1
            self.paused = max(self.paused, now + wait)
        if how in PASSING and ask.tries - ask.refused < TRIES and now + wait < ask.begin + DEADLINE:
            ask.until = now + wait
            return
        del self.asks[key]
        for row in ask.rows:
            step = self.steps[row.step]
            if how == "scored":
                self.journal[row.at] = self.journal[row.text] = row.score
                self._scored(step, row)
            elif row.state == "open":
                self._failed(step, row, fatal=how == "fatal")

    def late(self, now: float) -> None:
        """Jobs that are queued for another try when their deadline passes fail."""
        for key, ask in list(self.asks.items()):
            if ask.tries and not ask.running and ask.until <= now and ask.deadline <= now and key in self.asks:
                del self.asks[key]
                for row in ask.rows:
                    if row.state == "open":
                        self._failed(self.steps[row.step], row, fatal=False)

    def rest(self) -> None:
        """Ends an event: steps whose groups were all returned are done."""
        for step in self.steps.values():
            if not step.over and len(step.unfinished) + len(step.arrived) <= step.spare:
                self.end(step, "has been collected in full")

    def _scored(self, step: Step, row: Row) -> None:
        self.counts["scored"] += 1
        self.ends.append(False)
        row.state, row.got = "scored", row.score
        self._one_less(step, row)

    def _failed(self, step: Step, row: Row, fatal: bool) -> None:
        self.counts["failed"] += 1
        self.ends.append(True)
        row.state = "failed"
        if fatal or step.kind == "fail":
            self.halt(str(row)) if fatal else self.end(step, str(row))
            return
        if step.kind == "score":
            row.got = self.rule.score
            self._one_less(step, row)
        elif step.kind == "drop_sample":
            row.kept = False
            self._one_less(step, row)
        else:
            self._lose(step, row.group)
        requested = self.counts["requested"]
        latest = min(requested, max(100, *(sum(map(len, each.groups.values())) for each in self.steps.values())))
        if sum(self.ends[-latest:]) > self.max_failed_share * latest:
            self.halt("allows; the last one: ")

    def _lose(self, step: Step, group: int) -> None:
        for row in step.groups[group]:
            row.kept, row.got = False, math.nan
            self._cancel(row)
        step.unfinished.remove(group)
        if step.kind == "drop_group":
            step.arrived.append(group)
        else:
            step.spare -= 1
        if step.spare < 0:
            self.end(step, "one more than reward.extra_groups can replace")
        else:
            self.serve(step)

    def _one_less(self, step: Step, row: Row) -> None:
        rows = step.groups[row.group]
        if any(row.state == "open" for row in rows):
            return
        for row in rows:
            row.post = POST if self.post and row.kept else 0.0
        step.unfinished.remove(row.group)
        step.arrived.append(row.group)
        self.serve(step)

    def _cancel(self, row: Row) -> None:
        if row.state != "open":
            return
        row.state = "cancelled"
        self.counts["cancelled"] += 1
        ask = self.asks.get(self.key_of(row))
        if ask is not None and row in ask.rows:
            ask.rows.remove(row)
            if not ask.rows:
                del self.asks[self.key_of(row)]

    def serve(self, step: Step) -> None:
        """Gives whole groups to the waiters, first come, first served."""
        while step.waiters:
            waiter = step.waiters[0]
            wanted = step.arrived if waiter.order == "arrival" else sorted(step.unfinished + step.arrived)
            chosen = sorted(wanted[: waiter.take])
            if len(chosen) < waiter.take or not set(chosen) <= set(step.arrived):
                return
            step.arrived = [group for group in step.arrived if group not in chosen]
            waiter.groups = chosen
            del step.waiters[0]

    def end(self, step: Step, why: str) -> None:
        """The step ends: what is left of it is cancelled."""
        if step.over:
            return
        step.over = why
        for rows in step.groups.values():
            for row in rows:
                self._cancel(row)

    def halt(self, why: str) -> None:
        self.halted = self.halted or why
        for step in self.steps.values():
            self.end(step, why)
