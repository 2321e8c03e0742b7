"""What became of a program in a sandbox, and the errors that are not the program's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dataflow.errors import RewardFailed
from dataflow.system.secrets import redact

Status = Literal["finished", "runtime_error", "timeout", "compile_error", "memory_limit", "output_limit"]
STDERR = 2000
"""Characters of a program's messages that are kept, the last ones."""


@dataclass(frozen=True)
class Outcome:
    """The end of a program; whatever its status, the sandbox has worked. It is ``finished`` if the exit code was 0."""

    status: Status
    stdout: str = ""
    stderr: str = ""


class SandboxError(RewardFailed):
    """The sandbox, not the program, failed; says nothing about the program.

    Attributes:
        retry: whether another try may succeed.
        retry_after: seconds to wait before it, if the service states them.
        status: HTTP status of the reply, if that is the error.
        fix: what the user can do.
    """

    retry = True
    retry_after: float | None = None
    status: int | None = None
    fix = "see the log of the sandbox service, or lower manager_kwargs.max_concurrent"

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(redact(message))
        vars(self).update(attributes)
