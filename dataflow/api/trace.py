"""A trace with its files: saved as a page, a picture, a text or JSON, and loaded."""

from __future__ import annotations

from pathlib import Path

from dataflow.errors import DataError
from dataflow.timeline import spans


class Trace(spans.Trace):
    """All spans of a run or of a simulation."""

    @classmethod
    def load(cls, run: str | Path) -> Trace:
        """Returns the trace of a run.

        Args:
            run: its directory, or its ``trace.json``.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        from dataflow.timeline import perfetto

        return cls.of(perfetto.load(str(run)))

    @classmethod
    def of(cls, trace: spans.Trace) -> Trace:
        """Returns a trace with the items of another one."""
        return cls(trace.spans, trace.marks, trace.levels, trace.meta)

    def save(self, path: str | Path) -> Path:
        """Writes the trace; the extension selects the kind.

        Args:
            path: ``.html`` is an interactive page, ``.png`` and ``.svg`` are pictures, ``.txt`` is a text, and
                ``.json`` opens in Perfetto, and that of a run of a pipeline file can be planned from. An existing file
                is replaced.

        Returns:
            The path.

        Raises:
            DataError: another extension, or the file cannot be written.
        """
        from dataflow.files import replaced, unwritable
        from dataflow.timeline import files, perfetto

        target = Path(path)
        kinds = (*files.KINDS, ".txt", ".json")
        if target.suffix.lower() not in kinds:
            raise DataError(f"save('{path}'): no such kind, '{target.suffix}'; give a name in {', '.join(kinds)}.")
        if (why := unwritable(target)) is not None:
            raise DataError(f"save('{path}'): {why}")
        if target.suffix.lower() == ".json":
            perfetto.write(self, target)
        elif target.suffix.lower() == ".txt":
            with replaced(target) as temporary:
                temporary.write_text(self.text() + "\n", encoding="utf-8")
        else:
            files.draw({target.stem: self}, target)
        return target

    def text(self, width: int = 100) -> str:
        """Returns the timeline as text, ``width`` columns wide."""
        from dataflow.timeline.text import gantt, idle_lines

        return "\n".join([gantt(self, width), *idle_lines(self)])

    def _repr_html_(self) -> str:
        """Returns the picture of the timeline, and what its GPUs waited for, for notebooks."""
        from dataflow.drawing.notebook import shown
        from dataflow.timeline import files
        from dataflow.timeline.text import idle_lines

        policy = str(self.meta.get("policy") or "timeline")
        if not self.spans:
            return shown("no task has ended yet")
        return shown("\n".join(idle_lines(self)), lambda path: files.draw({policy: self}, path), "timeline")
