"""The reward manager ``sandbox``: runs the program in a response on test cases, and scores how many it passes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from dataflow.errors import ConfigError, nearest
from dataflow.rewards.retry import Retry
from dataflow.rewards.sandbox.cases import Case, cases_of, code_of
from dataflow.rewards.sandbox.local import LATEST, LocalSandbox
from dataflow.rewards.sandbox.outcome import BadCases, Outcome
from dataflow.rewards.sandbox.remote import RemoteSandbox
from dataflow.rewards.user.managers import register

SCORES = ("share", "all")
_EXPLAINED = 500  # characters
_LEAST_MB = 64
_NUMBERS: Mapping[str, tuple[type[float], float, float, bool]] = {
    "max_concurrent": (int, 1, 10_000, True),
    "memory_limit_mb": (int, 1, 1 << 24, False),
    # A process needs a part of a second to start, more on a busy machine.
    "timeout": (float, 1, 86_400, False),
    "max_cases": (int, 1, 1_000_000, True),
    "tries": (int, 1, 1_000, False),
}
"""Options that are numbers: of which kind, from what to what, and whether they may be None."""


@register("sandbox")
class Sandbox:
    """Scores the program in a response, in place of a reward function, on the test cases of the ground truth.

    A program that fails, runs too long or answers wrongly is scored 0 for that case, and the column ``status`` says
    why. A failure of the sandbox itself is an error, which is retried, never a score.

    Args:
        reward: not used.
        url: of a service that speaks SandboxFusion's protocol; None runs the programs on this machine.
        max_concurrent: programs that run at a time; None for 64 at a service, and one per core on this machine.
        memory_limit_mb: of a program.
        timeout: seconds that a program may take.
        score: ``share`` of the cases that pass, or ``all``: 1 if all pass, else 0.
        max_cases: cases of a sample that are run, the first ones; None for all.
        language: of the programs; another than ``python`` needs a service.
        tries: of one program at a service.

    Attributes:
        alone: that it needs no reward function.
        limits: ``concurrency``: as many samples as programs; ``timeout_s``: enough for all cases, one after the other.

    Raises:
        ConfigError: an option is out of range, or this system has no sandbox.
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
        tries: int = 3,
    ) -> None:
        what = "reward manager 'sandbox'"
        _check_numbers(
            what,
            max_concurrent=max_concurrent,
            memory_limit_mb=memory_limit_mb,
            timeout=timeout,
            max_cases=max_cases,
            tries=tries,
        )
        if score not in SCORES:
            hint = nearest(str(score), SCORES) or f"; give {' or '.join(SCORES)}."
            raise ConfigError(f"{what}: score '{score}' is unknown{hint}")
        if not isinstance(language, str) or not language:
            raise ConfigError(f"{what}: language={language!r} is no name; give python, or what the service names it.")
        if url is None and memory_limit_mb < _LEAST_MB:
            raise ConfigError(
                f"{what}: memory_limit_mb={memory_limit_mb}; Python itself needs memory, so give {_LEAST_MB} or more."
            )
        if url is None and language != "python":
            raise ConfigError(
                f"{what}: language={language}; this machine runs python only, so give the url of a service."
            )
        if url is None and sys.platform != "linux":
            raise ConfigError(f"{what}: the sandbox of this machine needs Linux, so give the url of a service.")
        self._box: LocalSandbox | RemoteSandbox
        if url is None:
            self._box = LocalSandbox(timeout, memory_limit_mb)
        else:
            self._box = RemoteSandbox(url, timeout, memory_limit_mb, language, Retry(tries, timeout_s=None))
        running = max_concurrent or (64 if url is not None else os.cpu_count() or 1)
        self._slots = asyncio.Semaphore(running)
        self._all, self._most, self._language = score == "all", max_cases, language
        self._counts = {"programs": 0, "programs_timed_out": 0}
        longest = timeout * (LATEST if url is None else 1)
        self.limits = {"concurrency": running, "rpm": None, "tpm": None, "timeout_s": 60 + (max_cases or 50) * longest}

    def check_truth(self, truth: Any) -> None:
        """Checks a ground truth before a run starts.

        Raises:
            BadCases: it holds no test cases.
        """
        cases_of("", truth, self._most, self._language)

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
        try:
            cases = cases_of(code or "", ground_truth, self._most, self._language)
        except BadCases as error:
            index = (extra_info or {}).get("index")
            raise error if index is None else BadCases(f"{error} (of the row with extra_info.index={index})") from None
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
        """Returns how many programs were run, how many of them took too long, and how often a service was retried."""
        return {**self._counts, "programs_retried": self._box.retried}

    async def close(self) -> None:
        """Closes the connections to a service."""
        await self._box.close()


def _check_numbers(what: str, **given: Any) -> None:
    for option, value in given.items():
        kind, least, most, optional = _NUMBERS[option]
        if value is None and optional:
            continue
        if not isinstance(value, int | kind) or isinstance(value, bool) or not least <= value <= most:
            wanted = f"{'a whole number' if kind is int else 'a number'} from {least:,} to {most:,}"
            raise ConfigError(f"{what}: {option}={value!r}; give {wanted}{', or null' if optional else ''}.")
