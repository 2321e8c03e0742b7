"""The weights versions that samples and tasks have."""

from __future__ import annotations

from dataflow.timeline.spans import Span, Trace


class Versions:
    """The weights versions that the samples of each step were generated with.

    Attributes:
        of_step: step -> version of its samples, the oldest if there are several.
    """

    def __init__(self, trace: Trace) -> None:
        self._trains, self._syncs = trace.with_role("trains"), trace.with_role("syncs")
        self.of_step: dict[int, int] = {}
        for span in trace.spans:
            version = span.args.get("weights_version")
            if isinstance(version, int) and not span.optional and span.stage not in self._syncs:
                self.of_step[span.step] = min(version, self.of_step.get(span.step, version))

    def of(self, span: Span) -> int | None:
        """Returns the version of the weights that generated a span's samples, or the samples it trains on."""
        version = span.args.get("weights_version")
        if version is None and span.stage in self._trains:
            version = self.of_step.get(span.step)
        return version if isinstance(version, int) else None

    def staleness(self, span: Span) -> int | None:
        """Returns how many steps older a task's samples are than the weights that its step's update starts from."""
        if span.optional or span.stage in self._syncs:
            return None
        if isinstance(given := span.args.get("staleness"), int | float):
            return round(given)
        version = self.of(span)
        return None if version is None else span.step - 1 - version
