"""The child process of a plan: a job that raises is answered, too, and the process that asks makes it again."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass

from dataflow.planning.simulation.workers import serve


@dataclass
class Division:
    """A job of two numbers."""

    dividend: int
    divisor: int

    def run(self) -> float:
        return self.dividend / self.divisor


def test_each_job_is_answered_in_turn_until_no_more_come() -> None:
    jobs = io.BytesIO(b"".join(pickle.dumps(Division(6, divisor)) for divisor in (2, 0, 3)))
    results = io.BytesIO()
    serve(jobs, results)
    results.seek(0)
    assert [pickle.load(results) for _ in range(3)] == [3.0, None, 2.0]
    assert not results.read()
