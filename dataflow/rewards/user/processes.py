"""Pool: worker processes for CPU-bound reward functions; each runs one call at a time.

Every call ends in exactly one way: it is answered, fails with its worker, or is cancelled. A worker that dies, or is
killed because its call was cancelled, affects no other call and is replaced. No worker outlives the process that
started it, however that ends.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dataflow.errors import ConfigError, RewardFailed, nearest
from dataflow.rewards.user.worker import Outcome, Recipe, WorkerError, read_reply, work
from dataflow.system.children import safe_path
from dataflow.usercode.load import describe

START_METHODS = ("spawn", "forkserver")
"""Not fork, which copies the locks that other threads hold at that moment."""

START_S = 300.0
"""Seconds that a worker may take to load the reward."""

GRACE_S = 2.0
"""Seconds that a worker may take to end by itself when the pool is closed."""

_CLOSED = "the pool of reward workers was closed during the call."


class WorkerDied(RewardFailed):
    """The worker process ended during the call; another worker may complete it."""

    retry = True
    fix = "check whether memory ran out, or what in the function ends the process"


class Pool:
    """Worker processes that call one function; calls wait for a free worker in FIFO order.

    Only workers that are ready accept calls; they start with :meth:`start` or with the first call. A running call is
    cancelled by killing its worker and the worker's descendants: nothing else stops CPU-bound code.

    Args:
        recipe: of the reward, which each worker builds.
        workers: number of processes.
        start_method: ``spawn`` or ``forkserver``.

    Attributes:
        counts: ``died``, workers that ended by themselves; ``killed``, workers whose call was cancelled.

    Raises:
        ConfigError: there are less than 1 workers, the start method is unknown, or the recipe cannot be pickled.
    """

    def __init__(self, recipe: Recipe, workers: int, start_method: str = "spawn") -> None:
        if workers < 1:
            raise ConfigError(f"reward manager 'remote': workers={workers}; give 1 or more.")
        if start_method not in START_METHODS:
            hint = nearest(start_method, START_METHODS) or f"; give {' or '.join(START_METHODS)}."
            raise ConfigError(f"reward manager 'remote': start_method '{start_method}' cannot be used{hint}")
        try:
            pickle.dumps(recipe)
        except Exception as error:
            raise ConfigError(
                f"reward '{recipe.name}': its arguments cannot be sent to another process ({describe(error)})."
            ) from error
        self.workers = workers
        self.counts: Counter[str] = Counter()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = [_Worker(self._calls, recipe, start_method, self.counts) for _ in range(workers)]
        self._started = self._closed = False

    def start(self) -> None:
        """Starts the workers unless they are started; does not wait for them."""
        if not self._started and not self._closed:
            self._started = True
            for worker in self._workers:
                worker.start()

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the function in a worker; cancelling this coroutine kills the worker.

        Args:
            arguments: keywords of the function.

        Raises:
            WorkerDied: the worker ended during the call.
            WorkerError: the arguments or the result cannot be pickled.
            Exception: what the function raised, with the worker's traceback as its cause.
        """
        if self._closed:
            raise WorkerError("the pool of reward workers was closed before this call.")
        self.start()
        call = _Call(arguments)
        self._calls.put(call)
        try:
            result, error = await asyncio.wrap_future(call.outcome)
        except asyncio.CancelledError:
            if not call.outcome.cancel():  # it is running or has just ended
                for worker in self._workers:
                    worker.give_up(call)
            raise
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Ends the workers and waits for them: idle ones end by themselves, others are killed."""
        self._closed = True
        for worker in self._workers:
            worker.stop()
            self._calls.put(None)
        for worker in self._workers:
            if worker.is_alive():
                worker.join(2 * GRACE_S)


@atexit.register
def _at_exit() -> None:
    """Ends pools that were not closed; multiprocessing's handler, which runs later, would wait for them."""
    for thread in threading.enumerate():
        if isinstance(thread, _Worker):
            thread.stop(idle_too=True)


class _Call:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.outcome: Future[Outcome] = Future()


class _Worker(threading.Thread):
    """A thread of this process that passes calls to one worker process."""

    def __init__(
        self, calls: queue.SimpleQueue[_Call | None], recipe: Recipe, start_method: str, counts: Counter[str]
    ) -> None:
        super().__init__(name="reward-worker", daemon=True)
        self._calls = calls
        self._recipe = recipe
        self._context: Any = multiprocessing.get_context(start_method)
        self._counts = counts
        # Guards the fields below: calls are cancelled in the event loop's thread.
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._child: _Child | None = None
        self._given_up = False
        self._stopped = False

    def run(self) -> None:
        while True:
            # Before taking a call: a start may exceed the call's time-out, and another worker may be idle.
            failed = self._start()
            call = self._calls.get()
            if call is None:
                break
            if self._take(call):
                outcome = (None, failed) if failed is not None else self._serve(call)
                self._release_call()
                call.outcome.set_result(outcome)
                del outcome
            del call  # an idle worker must not keep the last call's samples alive
        if child := self._released():
            child.end()

    def _take(self, call: _Call) -> bool:
        with self._lock:
            pending = call.outcome.set_running_or_notify_cancel()
            if pending:
                self._call, self._given_up = call, False
        return pending

    def _release_call(self) -> None:
        with self._lock:
            self._call = None
            given_up = self._given_up
        # Also if it was cancelled after the reply: the next call must not get a dying process.
        if given_up and (child := self._released()):
            self._bury(child)

    def give_up(self, call: _Call) -> None:
        """Kills the process if it is running this call."""
        with self._lock:
            if self._call is call:
                self._kill()

    def stop(self, *, idle_too: bool = False) -> None:
        """Prevents further starts, and kills the current process unless it is idle."""
        with self._lock:
            self._stopped = True
            idle = self._call is None and self._child is not None and self._child.up
            if idle_too or not idle:
                self._kill()

    def _kill(self) -> None:
        self._given_up = True
        if self._child is not None:
            self._child.given_up = True
            self._child.kill()

    def _released(self) -> _Child | None:
        with self._lock:
            child, self._child = self._child, None
        return child

    def _serve(self, call: _Call) -> Outcome:
        try:
            message = pickle.dumps(dict(call.arguments))
        except Exception as error:
            return None, WorkerError(f"the arguments of the call cannot be sent to a worker: {describe(error)}.")
        failed = self._start()  # a new process, if the last one died while idle
        if failed is not None:
            return None, failed
        reply = self._child.call(message) if self._child is not None else None
        return self._lost() if reply is None else read_reply(reply)

    def _start(self) -> RewardFailed | None:
        """Ensures that a process is ready for a call; returns the error if that fails."""
        with self._lock:
            if self._child is not None and self._child.ended():
                self._bury(self._child)
                self._child = None
            if self._stopped:
                return WorkerError(_CLOSED)
            try:
                child = self._child = self._child or _Child(self._context, self._recipe)
            except Exception as error:
                return WorkerError(f"no worker process can be started: {describe(error)}.")
        if child.wait_up():
            return None
        failed = self._lost()[1]
        if isinstance(failed, WorkerDied):
            failed.fix = "check what it printed; a script that starts a run must do so under if __name__ == '__main__'"
        return failed

    def _lost(self) -> tuple[None, RewardFailed]:
        child = self._released()
        how = self._bury(child) if child is not None else "was not there"
        if self._stopped:
            return None, WorkerError(_CLOSED)
        when = "during a call" if child is None or child.up else "before it was ready"
        return None, WorkerDied(f"the worker process {how} {when}.")

    def _bury(self, child: _Child) -> str:
        if not self._stopped:
            self._counts["killed" if child.given_up else "died"] += 1
        return child.end()


class _Child:
    """A worker process and the parent's end of its pipe."""

    def __init__(self, context: Any, recipe: Recipe) -> None:
        self.up = self.given_up = False
        self._pipe, theirs = context.Pipe()
        # Not daemonic: daemonic processes may not start others, as graders of programs do.
        self._process = context.Process(target=work, args=(theirs, recipe), name="reward-worker", daemon=False)
        try:
            with safe_path():
                self._process.start()
        finally:
            theirs.close()
        self._pidfd: int | None = None
        # Descendants of the process may keep its pipes open after its end.
        with suppress(AttributeError, OSError):  # not Linux, or it has ended
            self._pidfd = os.pidfd_open(self._process.pid)
        self._end = self._process.sentinel if self._pidfd is None else self._pidfd

    def call(self, message: bytes) -> bytes | None:
        """Sends a call and returns the reply; None if the process ended before."""
        try:
            self._pipe.send_bytes(message)
        except OSError:
            return None
        return self._receive()

    def wait_up(self) -> bool:
        """Waits until the process is ready; returns False if it ends before, or after :data:`START_S`."""
        self.up = self.up or self._receive(START_S) is not None
        return self.up

    def _receive(self, deadline_s: float | None = None) -> bytes | None:
        multiprocessing.connection.wait([self._pipe, self._end], deadline_s)
        message: bytes | None = None
        with suppress(EOFError, OSError):  # it has ended
            message = self._pipe.recv_bytes() if self._pipe.poll() else None
        return message

    def ended(self) -> bool:
        return bool(multiprocessing.connection.wait([self._end], 0))

    def kill(self) -> None:
        """Kills the process and its process group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has not created its group yet
            self._process.kill()

    def end(self) -> str:
        """Waits for an idle process to end, then kills it; returns how it ended."""
        self._pipe.close()
        multiprocessing.connection.wait([self._end], GRACE_S)
        self.kill()  # kills its descendants as well
        self._process.join()
        if self._pidfd is not None:
            os.close(self._pidfd)
        code: int | None = self._process.exitcode
        if code is None:
            return "ended"  # other code has reaped it
        return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
