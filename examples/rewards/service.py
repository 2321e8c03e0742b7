"""A scoring service of your own, behind HTTP. One call is one request: the agent adds retries, time-outs and limits."""

from __future__ import annotations

from typing import Any

import aiohttp

from dataflow.rewards.retry import is_transient


class EmptyReply(Exception):
    """The service returned nothing; another try usually succeeds."""


class Service:
    """Calls ``POST URL/score``, which answers ``{"score": 0.5, "why": "...", "tokens": 312}``."""

    def __init__(self, url: str, scale: float = 1.0) -> None:
        self._url, self._scale = url, scale
        self._session: aiohttp.ClientSession | None = None

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the score and two further columns; whatever goes wrong is raised, never scored 0."""
        if self._session is None:  # made here: it belongs to the running event loop
            # aiohttp alone would stop at 100 connections and after 300 s.
            none = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=none)
        task = {"response": solution_str, "reference": ground_truth, "prompt": extra_info.get("raw_prompt")}
        async with self._session.post(f"{self._url}/score", json=task) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        if not answer:
            raise EmptyReply
        return {"score": answer["score"] * self._scale, "explanation": answer["why"], "tokens": answer["tokens"]}

    def tokens(self, solution_str: str, **_: Any) -> int:
        """Estimates the tokens of the call, for reward.tpm; the column 'tokens' corrects it afterwards."""
        return 200 + len(solution_str) // 4

    def retry_on(self, error: BaseException) -> bool:
        """Returns whether to try again; replaces the agent's rule, and therefore calls it as well."""
        return isinstance(error, EmptyReply) or is_transient(error)

    def post_process_scores(self, scores: list[float]) -> list[float]:
        """Changes the scores of one whole group: here the best response gets a bonus."""
        best = max(scores)
        return [score + 0.1 if score == best else score for score in scores]

    def log(
        self,
        timestamps: list[float],
        queries: list[Any],
        results: list[float],
        latencies: list[float],
        group_uids: list[int],
    ) -> None:
        """Called with all collected samples, one entry each: here it prints slow ones."""
        for group, seconds in zip(group_uids, latencies, strict=True):
            if seconds > 60:
                print(f"group {group}: a reward took {seconds:.0f} s")

    async def close(self) -> None:
        """Called at the end of the run."""
        if self._session is not None:
            await self._session.close()
