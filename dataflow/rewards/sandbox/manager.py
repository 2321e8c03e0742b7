"""The reward manager ``sandbox``: runs the program in a response on test cases, and scores how many it passes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from dataflow.errors import ConfigError
from dataflow.rewards.sandbox.cases import Case, Outcome, cases_of, code_of
from dataflow.rewards.sandbox.local import WALL, LocalSandbox
from dataflow.rewards.sandbox.remote import RemoteSandbox

_EXPLAINED = 500  # characters
_LARGEST = 1 << 24  # of a number among the options


class Sandbox:
    """Scores the program in a response, in place of a reward function, on the test cases of the ground truth.

    Args:
        reward: not used.
        url: of a service that speaks SandboxFusion's protocol; None runs the programs on this machine. This and the
            other options: docs/sandbox.md.

    Attributes:
        alone: that it needs no reward function.
        limits: ``concurrency``: as many samples as programs; ``timeout_s``: enough for all cases, one after the other.

    Raises:
        ConfigError: an option is out of range, or no program can be run on this machine.
    """

    alone: ClassVar[bool] = True

    def __init__(
        self,
        reward: Any = None,
        url: str | None = None,
        max_concurrent: int | None = None,
        memory_limit_mb: int = 1024,
        timeout: float = 10.0,
        score: str = "share",
        max_cases: int | None = 10,
        language: str = "python",
    ) -> None:
        what = "reward manager 'sandbox'"
        numbers = {"max_concurrent": max_concurrent, "memory_limit_mb": memory_limit_mb, "max_cases": max_cases}
        for option, value in {**numbers, "timeout": timeout}.items():
            kind, number = (int, "whole number") if option in numbers else ((int, float), "number")
            if value is not None and not (isinstance(value, kind) and 1 <= value <= _LARGEST):
                raise ConfigError(f"{what}: {option}={value!r}; give a {number} from 1 to {_LARGEST:,}.")
        if score not in ("share", "all"):
            raise ConfigError(f"{what}: score '{score}' is unknown; give share or all.")
        if url is None and (language != "python" or sys.platform != "linux"):
            raise ConfigError(
                f"{what}: language={language} on {sys.platform}; without a service only python is run, and only on "
                "Linux, so give the url of a service."
            )
        self._box: LocalSandbox | RemoteSandbox
        if url is None:
            self._box = LocalSandbox(timeout, memory_limit_mb)
        else:
            self._box = RemoteSandbox(url, timeout, memory_limit_mb, language)
        running = max_concurrent or (64 if url is not None else os.cpu_count() or 1)
        self._slots = asyncio.Semaphore(running)
        self._all, self._most, self._language = score == "all", max_cases, language
        self._counts = {"programs": 0, "programs_timed_out": 0}
        longest = timeout * (WALL if url is None else 2)
        self.limits = {"concurrency": running, "rpm": None, "tpm": None, "timeout_s": 60 + (max_cases or 50) * longest}

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Runs the program of a response.

        Returns:
            ``score``; ``passed`` and ``cases``, their numbers; ``status``: ``passed``, ``no_code``, or what became of
            the first case that failed; ``explanation``: the end of that program's messages.

        Raises:
            SandboxError: the sandbox failed.
            BadCases: the ground truth holds no test cases.
        """
        code = code_of(solution_str)
        cases = cases_of(code or "", ground_truth, self._most, self._language)
        if code is None:
            return {"score": 0.0, "passed": 0, "cases": len(cases), "status": "no_code", "explanation": ""}
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run(case)) for case in cases]
        except ExceptionGroup as errors:  # the other programs have been ended
            raise errors.exceptions[0] from None
        outcomes = [task.result() for task in running]
        verdicts = [case.verdict(outcome) for case, outcome in zip(cases, outcomes, strict=True)]
        passed = verdicts.count("passed")
        failed = next((at for at, verdict in enumerate(verdicts) if verdict != "passed"), None)
        return {
            "score": float(passed == len(cases)) if self._all else passed / len(cases),
            "passed": passed,
            "cases": len(cases),
            "status": "passed" if failed is None else verdicts[failed],
            "explanation": "" if failed is None else outcomes[failed].stderr.strip()[-_EXPLAINED:],
        }

    async def _run(self, case: Case) -> Outcome:
        async with self._slots:
            outcome = await self._box.run(case.source, case.stdin)
        self._counts["programs"] += 1
        self._counts["programs_timed_out"] += outcome.status == "timeout"
        return outcome

    def usage(self) -> dict[str, float]:
        """Returns how many programs were run, and how many of them took too long."""
        return dict(self._counts)

    async def close(self) -> None:
        """Closes the connections to a service."""
        await self._box.close()
