"""The pool: which server draws a sample, and what happens to the samples of one that fails.

A group goes as a whole to the server with the fewest outstanding samples, as its samples share their prompt in that
server's prefix cache. The turns of a conversation go where the earlier ones of their group went. A server has at most
``slots`` requests in flight.

A sample depends on its seed and the weights alone, so one that is lost is drawn again, by another server if possible:

* A server whose request fails, or that answers nothing for a time, is *probed* at once
  (:mod:`~dataflow.engines.servers.recovery`): the version of its weights is read. Until then it gets no samples. If it
  holds the current weights, it goes on.
* If it does not answer, all its samples in flight go to the other servers, and it is probed at growing intervals.
* A server that answers with other weights was restarted, or changed by another client: its samples are drawn again,
  and it gets the current weights. So does one that comes back.
* A server that rejects requests for its load (429, 503, 529) is paused for as long as it asks.

Each sample is delivered only after its server has shown that it holds the current weights: a label, new for each sync,
which a restart loses, is in the reply or is read after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from dataflow.engines.samples import seed_of
from dataflow.engines.servers.client import Client, ServerError
from dataflow.engines.servers.connect import Wanted, explained
from dataflow.engines.servers.protocol import DrawnSample
from dataflow.engines.servers.recovery import PROBE_S, Callbacks, Recovery
from dataflow.engines.servers.server import Server
from dataflow.engines.sync_queue import FinishedSample, Job, SampleQueue, SamplingCall, by_group
from dataflow.errors import DataError, RunError

TRIES = 4
"""Tries of a sample, at all servers together; rejections for load are not counted."""
_REFUSED = (400, 413, 422)
"""Statuses of a request that the server cannot read, or whose prompt is too long."""
_HOMES = 10_000
"""Conversations whose server is remembered."""


class Pool:
    """Draws samples from servers: a :class:`~dataflow.engines.sync_queue.Backend`.

    Args:
        clients: of the servers.
        wanted: what each must be.
        queue: gets the samples.
        slots: requests in flight at one server.
        wait_s: seconds that samples may wait while no server takes them.
    """

    def __init__(
        self, clients: Sequence[Client], wanted: Wanted, queue: SampleQueue, slots: int, wait_s: float
    ) -> None:
        self._servers = [Server(client) for client in clients]
        self._vocabulary, self._queue, self._slots = wanted.vocabulary, queue, slots
        self._waiting: deque[list[Job]] = deque()
        self._failed_at: dict[Job, list[Server]] = {}
        self._homes: dict[tuple[int, ...], Server] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        callbacks = Callbacks(self._on_out, self._on_given_up, self._send, self._on_none)
        self._recovery = Recovery(self._servers, wanted, wait_s, callbacks)
        self.counts = {"lost": 0, "throttled": 0}

    @property
    def up(self) -> int:
        """Number of servers in use."""
        return sum(server.up for server in self._servers)

    # --- samples ------------------------------------------------------------------------------------------------

    def start(self, jobs: Sequence[Job]) -> None:
        """See :meth:`Backend.start`."""
        self._waiting.extend(by_group(jobs))
        self._send()
        self._recovery.limit_wait()

    def cancel(self, ids: Sequence[int]) -> None:
        """See :meth:`Backend.cancel`."""
        gone = set(ids)
        self._waiting = deque(left for group in self._waiting if (left := [job for job in group if job.id not in gone]))
        for server in self._servers:
            server.assigned = deque(job for job in server.assigned if job.id not in gone)
            server.unconfirmed = [entry for entry in server.unconfirmed if entry[0].id not in gone]
            server.checked = [entry for entry in server.checked if entry[0].id not in gone]
            self._abort(server, [job for job in server.calls if job.id in gone])
        for job in [job for job in self._failed_at if job.id in gone]:
            del self._failed_at[job]
        self._send()

    async def settled(self) -> None:
        """Waits until the connections of all cancelled samples are closed."""
        await asyncio.gather(*self._cancelled, return_exceptions=True)

    def _abort(self, server: Server, jobs: Iterable[Job]) -> None:
        for job in jobs:
            task = server.calls.pop(job)
            task.cancel()
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)

    def _send(self) -> None:
        """Assigns waiting groups to servers, and sends what there are slots for."""
        while self._waiting and (server := self._choose(self._waiting[0])) is not None:
            server.assigned.extend(self._waiting.popleft())
            self._fill(server)
        for server in self._servers:
            self._fill(server)

    def _choose(self, group: Sequence[Job]) -> Server | None:
        """Returns the server that takes a group next; None if all are busy or out of use."""
        # A server that has failed one of these samples is the last resort.
        failed = {server for job in group for server in self._failed_at.get(job, ())}
        able = [server for server in self._servers if server.available and server not in failed]
        able = able or [server for server in self._servers if server.available]
        free = [server for server in able if server.load < self._slots]
        if not free:
            return None
        key = _conversation(group[0])
        home = self._homes.get(key) if key else None
        server = home if home in free else min(free, key=lambda server: server.load)
        if key:
            self._homes[key] = server
            if len(self._homes) > _HOMES:
                del self._homes[next(iter(self._homes))]
        return server

    def _fill(self, server: Server) -> None:
        while server.assigned and server.available and len(server.calls) < self._slots:
            job = server.assigned.popleft()
            server.calls[job] = asyncio.get_running_loop().create_task(self._draw(server, job))
            if server.quiet is None:
                self._recovery.listen(server)

    async def _draw(self, server: Server, job: Job) -> None:
        call: SamplingCall = job.params
        seed = seed_of(*call.seed) if isinstance(call.seed, tuple) else seed_of(call.seed, job.group, job.index)
        ends = self._vocabulary.ends
        try:
            drawn = await server.spoken().sample(job.prompt, call.sampling, ends, seed)
            if max(drawn.tokens) >= self._vocabulary.size:
                raise ServerError(f"the reply has token {max(drawn.tokens)}, which the model lacks")
        except ServerError as error:
            server.calls.pop(job, None)
            self._on_failed(server, job, error)
        except Exception as error:
            server.calls.pop(job, None)
            self._refuse(job, error)
        else:
            server.calls.pop(job, None)
            self._on_drawn(server, job, drawn)
        self._send()

    def _on_drawn(self, server: Server, job: Job, drawn: DrawnSample) -> None:
        server.failures = server.throttles = 0
        self._recovery.listen(server)
        if drawn.version is None:
            server.unconfirmed.append((job, drawn))
            if server.confirming is None:
                server.confirming = asyncio.get_running_loop().create_task(self._confirm(server))
        elif drawn.version == self._recovery.label:
            self._deliver([(job, drawn)])
        else:
            self._lose(server, [job], self._recovery.stale(drawn.version))

    async def _confirm(self, server: Server) -> None:
        """Delivers samples that came before the server showed that it holds the current weights."""
        try:
            while server.unconfirmed:
                server.checked, server.unconfirmed = server.unconfirmed, []
                try:
                    version = await server.spoken().version(PROBE_S)
                    error = None if version == self._recovery.label else self._recovery.stale(version)
                except ServerError as failure:
                    error = failure
                entries, server.checked = server.checked, []
                if error is None:
                    self._deliver(entries)
                else:
                    self._lose(server, [job for job, _drawn in entries], error)
                self._send()
        finally:
            server.confirming = None

    def _deliver(self, entries: Sequence[tuple[Job, DrawnSample]]) -> None:
        self._recovery.end_limit()
        for job, _drawn in entries:
            self._failed_at.pop(job, None)
        self._queue.on_finished(
            [FinishedSample(job.id, one.tokens, one.log_probs, one.finish, one.cached) for job, one in entries]
        )

    # --- failures -----------------------------------------------------------------------------------------------

    def _on_failed(self, server: Server, job: Job, error: ServerError) -> None:
        self._recovery.note(server, error)
        if error.throttled:
            self._throttle(server, error)
            self._waiting.appendleft([job])
        elif (known := explained(server.url, error)) is not error:
            self._refuse(job, known)
        elif error.status in _REFUSED:
            self._refuse(
                job,
                DataError(
                    f"rollout: {server.url} refuses the prompt of group {job.group} ({len(job.prompt)} tokens): "
                    f"{error}; correct what it objects to: the prompt, or a setting of engine."
                ),
            )
        else:
            self._lose(server, [job], error)

    def _lose(self, server: Server, jobs: Sequence[Job], error: ServerError) -> None:
        """Draws samples again that a server has lost, and probes it."""
        again = []
        for job in jobs:
            tried = self._failed_at.setdefault(job, [])
            tried.append(server)
            self.counts["lost"] += 1
            if len(tried) < TRIES:
                again.append(job)
                continue
            self._refuse(
                job,
                RunError(
                    f"rollout: sample {job.index} of group {job.group} failed at {TRIES} tries, the last at "
                    f"{server.url}: {error}; see the log of that server."
                ),
            )
        self._waiting.extendleft(reversed(by_group(again)))
        self._recovery.suspend(server, error)

    def _refuse(self, job: Job, error: Exception) -> None:
        self._failed_at.pop(job, None)
        self._queue.on_refused(job.id, error)

    def _throttle(self, server: Server, error: ServerError) -> None:
        server.throttles += 1
        self.counts["throttled"] += 1
        wait_s = error.wait_s or server.wait_s(server.throttles)
        if server.pause is not None:
            server.pause.cancel()

        def end() -> None:
            server.pause = None
            self._send()

        server.pause = asyncio.get_running_loop().call_later(wait_s, end)
        self._on_out(server)
        self._recovery.limit_wait()

    # --- callbacks of the recovery ------------------------------------------------------------------------------

    def _on_out(self, server: Server) -> None:
        self._waiting.extendleft(reversed(by_group(server.take_assigned())))

    def _on_given_up(self, server: Server, error: ServerError) -> int:
        # Those not confirmed, too: the label that is read later may be that of weights loaded since.
        done = [job for job, _drawn in (*server.checked, *server.unconfirmed)]
        server.checked, server.unconfirmed = [], []
        jobs = [*done, *server.calls]
        self._abort(server, list(server.calls))
        self._lose(server, jobs, error)
        self._send()
        return len(jobs)

    def _on_none(self, error: RunError) -> None:
        waiting, self._waiting = list(self._waiting), deque()
        for job in (job for group in waiting for job in group):
            self._refuse(job, error)

    async def sync(self, directory: Path, label: str) -> None:
        """See :meth:`Recovery.sync`."""
        await self._recovery.sync(directory, label)

    async def close(self) -> None:
        """Ends all requests and probes, and closes the connections."""
        self._waiting.clear()
        await self._recovery.close()
        tasks = list(self._cancelled)
        for server in self._servers:
            server.assigned.clear()
            tasks += [*server.calls.values(), *([server.confirming] if server.confirming else [])]
            server.calls.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.client.close()


def _conversation(job: Job) -> tuple[int, ...]:
    """Returns what the turns of a group's conversations have in common; () for a sample that is no turn."""
    seed = job.params.seed
    return seed[:2] if isinstance(seed, tuple) else ()
