"""How long a server takes for a request, by the number of requests that it has in flight. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ServiceTime:
    """Seconds of a request or of a batch: ``base + each * n``.

    Attributes:
        base, each: in seconds.
        batches: n is the size of a batch: a server computes all requests that wait as one batch, and those that come
            meanwhile as the next one. Otherwise n requests in flight share the server, and each takes that long.
        first: for one begin of an idle server after the other, again and again: requests that its batch begins with,
            although more come at the same time. It is a race: those that lose it wait for the next batch.
        known: whether a run showed the times of several n; if not, ``base`` is 0, as of a server that is never idle.
    """

    base: float
    each: float
    batches: bool = False
    first: tuple[int, ...] = (1,)
    known: bool = True

    def seconds(self, n: float) -> float:
        """Returns the seconds of a request beside which ``n - 1`` others are in flight, or those of a batch of n."""
        return self.base + self.each * n

    def of_server(self, pace: float, number: float) -> ServiceTime:
        """Returns the service time of one of several servers.

        Args:
            pace: factor by which its times are longer.
            number: its place among the servers, from 0 to below 1; each goes through ``first`` from a place of its own.
        """
        at = int(number * len(self.first))
        first = (*self.first[at:], *self.first[:at])
        return replace(self, base=self.base * pace, each=self.each * pace, first=first)


@dataclass(frozen=True)
class Servers:
    """The servers of a reward model.

    Attributes:
        model: its name.
        replicas: number of servers.
        slots: requests in flight at one server at most.
        service_time: of each server.
        filled: whether as many requests are in flight as all servers take, whatever their number.
        gpus: of one server.
        training_gpus: of trainer and engine, in the run that was measured; 0 if they had GPUs of their own each.
        wake_s: seconds to wake the model, and as many to let it sleep, where it shares GPUs and the run does not say.
    """

    model: str
    replicas: int
    slots: int
    service_time: ServiceTime
    filled: bool = False
    gpus: int = 1
    training_gpus: int = 0
    wake_s: float = 0.0

    def busiest(self, concurrency: int) -> int:
        """Returns the most requests that are in flight at one server, if all servers have equally many."""
        return max(1, min(self.slots, -(-concurrency // self.replicas)))

    def seconds(self, concurrency: int) -> float:
        """Returns the least seconds by which one request extends the work of all servers, kept full."""
        n = self.busiest(concurrency)
        return self.service_time.seconds(n) / n / min(self.replicas, concurrency)

    def with_replicas(self, replicas: int) -> Servers:
        """Returns another number of equal servers."""
        return replace(self, replicas=replicas)
