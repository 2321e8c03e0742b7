"""Calls the judge only if a rule cannot decide: a response that ends in '#### <reference>' is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataflow.rewards.judge.judge import Judge


class CheapFirst(Judge):
    """Takes the options of Judge (url, model, template, ...) and one more."""

    def __init__(self, url: str, longest: int = 4000, **options: Any) -> None:
        super().__init__(url, **options)
        self._longest = longest

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the rule's score if it can decide, else the judge's."""
        if solution_str.rstrip().endswith(f"#### {ground_truth}"):
            return {"score": 1.0, "tokens": 0, "by": "rule"}
        if len(solution_str) > self._longest:
            return {"score": 0.0, "tokens": 0, "by": "length"}
        return {**await super().compute_score(data_source, solution_str, ground_truth, extra_info), "by": "judge"}
