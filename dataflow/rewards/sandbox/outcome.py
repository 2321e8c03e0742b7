"""What became of a program in a sandbox, and the errors that are not the program's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dataflow.errors import DataError, RewardFailed
from dataflow.system.secrets import redact

Status = Literal[
    "finished", "runtime_error", "timeout", "compile_error", "memory_limit", "process_limit", "output_limit"
]


@dataclass(frozen=True)
class Outcome:
    """The end of a program; whatever its status, the sandbox has worked.

    Attributes:
        status: ``finished`` if it ended with exit code 0; otherwise what ended it.
        stdout: its output.
        stderr: the end of its messages.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""


class SandboxError(RewardFailed):
    """The sandbox, not the program, failed; says nothing about the program.

    Attributes:
        status: HTTP status of the reply, if that is the error.
        retry: whether another try may succeed.
        retry_after: seconds to wait before it, if the service states them.
        fix: what the user can do.
    """

    status: int | None = None
    retry = True
    retry_after: float | None = None
    fix = "see the log of the sandbox service, or lower manager_kwargs.max_concurrent"

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(redact(message))
        vars(self).update(attributes)


def short(text: str) -> str:
    """Returns a text on one line of at most 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:197] + "..."


class BadCases(DataError):
    """The ground truth of a sample holds no test cases."""

    retry = False
    fix = (
        "give a ground truth of test cases as JSON or a dict: {inputs: [...], outputs: [...]}, with fn_name for a "
        "function, or {assert_case: [...]}"
    )
