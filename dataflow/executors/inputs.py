"""The inputs of a step, such as its prompts: fetched and handed to the executor once, for all tasks that read them.

The functions of a user's own inputs are called when a task needs them: what they return may depend on what stages have
done before, or on the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dataflow.batch import Batch
from dataflow.errors import DataflowError, RunError
from dataflow.executors.parts import Parts
from dataflow.usercode.copies import readable_once
from dataflow.usercode.failures import is_ours, named


@dataclass(frozen=True)
class Ahead:
    """An input that depends on the step alone, so that it can be made while the step before runs.

    Attributes:
        function: from step to value.
    """

    function: Callable[[int], Any]

    def __call__(self, step: int) -> Any:
        return self.function(step)


class StepInputs:
    """The inputs of the unfinished steps and of the next one.

    Args:
        functions: for each input field a function from step to value.
        parts: of the run, which records the groups that an input holds.
        put: of the executor; returns a handle for a value.
        handles: of fields and steps that another runner of the same executor has fetched.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[[int], Any]],
        parts: Parts,
        put: Callable[[Any], Any],
        handles: Mapping[tuple[str, int], Any],
    ) -> None:
        self._functions, self._parts, self._put, self._handles = functions, parts, put, handles
        self.ahead = {name for name, function in functions.items() if isinstance(function, Ahead)}
        """The fields that can be fetched before their step begins."""
        self._fetched: dict[int, dict[str, Any]] = {}
        self._failed: dict[tuple[str, int], Exception] = {}

    def find(self, field: str, step: int) -> list[Any]:
        """Returns the handle of an input, fetched now unless it is there already; [] if the run has no such input.

        Raises:
            RunError: its function, which may be the user's, raised, or returned no value that several stages can read.
        """
        if (field, step) in self._handles:
            return [self._handles[field, step]]
        if field not in self._functions:
            return []
        if (failed := self._failed.get((field, step))) is not None:
            raise failed
        fetched = self._fetched.setdefault(step, {})
        if field not in fetched:
            fetched[field] = self._fetch(field, step)
        return [fetched[field]]

    def fetch_ahead(self, step: int, fields: Iterable[str]) -> None:
        """Fetches those of the fields that may be, of a step that has not begun.

        What one raises is raised when a task needs it: the step may never begin.
        """
        for field in sorted(self.ahead.intersection(fields)):
            try:
                self.find(field, step)
            except Exception as error:
                self._failed[field, step] = error

    def release(self, step: int) -> None:
        """Forgets a finished step."""
        self._fetched.pop(step, None)

    def _fetch(self, field: str, step: int) -> Any:
        where = f"input '{field}' of step {step}"
        try:
            value = self._functions[field](step)
        except BaseException as error:
            raise RunError(f"{where}: its function raised {_raised(error)}; correct it.") from error
        if (once := readable_once(value)) is not None:
            raise RunError(f"{where}: its function returned {once}; return the value itself.")
        if isinstance(value, Batch):
            self._parts.written(step, field, value.ids)
        try:
            return self._put(value)
        except BaseException as error:
            why = _raised(error)
            raise RunError(f"{where}: its value cannot be copied ({why}); return one that can be pickled.") from error


def _raised(error: BaseException) -> str:
    """Returns an error of user code in words; raises it if it is an interrupt, or a sentence already."""
    if isinstance(error, DataflowError) or is_ours(error):
        raise error
    return named(error)
