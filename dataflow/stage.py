"""Stages: plain functions with named inputs, named outputs and a resource.

From top to bottom: what marks a field of an earlier step (:class:`Carried`, :class:`Latest`), the task that a function
runs as (:class:`TaskInfo`), the services that it calls (:class:`Hosted`), the :class:`Stage`, and the decorator
:func:`stage` that makes one. Pure: no torch, no ray, no clock.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from dataflow.errors import DataflowError, PipelineError, nearest
from dataflow.metrics import Metric
from dataflow.usercode.numeric import real_number

Piece: TypeAlias = Literal["step", "chunk", "part", "mini-batch"]
"""What a task works on: a step, the groups that a streaming stage emits together, those of one collect, or those of
one optimizer step."""
Lag: TypeAlias = Literal["none", "latest", "carried"]
Role: TypeAlias = Literal["samples", "requests", "collects", "trains", "syncs", "validates", "saves"]
ROLES: tuple[Role, ...] = typing.get_args(Role)
SAMPLED = "groups sampled"
"""Name of the trace level that counts the finished groups of a rollout."""
RUNS_OWN = ("step", "timing_s/step")
"""Columns of a row of metrics that no stage may log: the step's number and its time."""


class Carried:
    """Marks a field of an earlier step, 1 + max_staleness steps back (the weights that a rollout samples with).

    Samples are then at most max_staleness steps old: step 5 of a run with max_staleness=1 samples with the weights of
    step 3, where an on-policy step samples with those of step 4.
    """


class Latest:
    """Marks a field of the previous step, whatever the staleness (the weights that a trainer continues from)."""


class Read(NamedTuple):
    """One field that a stage reads, the step it is read from, and whether it may be absent (then it is None)."""

    field: str
    lag: Lag = "none"
    optional: bool = False


@dataclass
class TaskInfo:
    """The task that a stage function runs as, passed to it as the keyword parameter ``task``."""

    step: int
    stage: str = ""
    part: int = 0
    parts: int = 1
    epoch: int = 0
    """How often the stage worked on these groups before, in this step."""
    epochs: int = 1
    groups: tuple[int, ...] | None = None
    """The groups it works on; None for all groups of the step."""
    take: int | None = None
    """How many groups a collecting stage must return; None for all groups of the step."""
    order: Literal["arrival", "index"] = "arrival"
    max_staleness: int = 0
    sampled_ahead: int = 0
    """How many later steps are sampled before the weights of this one are synced."""
    emits: int = 1
    """Chunks that a streaming stage must emit while it runs; 1 for none before its end."""
    emitted: Mapping[int, Any] = field(default_factory=dict)
    """Chunks that it emitted before its process died and it was restarted, by number."""
    on_emit: Callable[[int, tuple[Any, ...]], None] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> bool:
        """Whether this is the stage's last task of the step."""
        return self.part == self.parts - 1

    def emit(self, number: int, *values: Any) -> None:
        """Emits one of ``emits`` chunks, each once in any order: a Batch of whole groups for each field it writes."""
        if self.on_emit is not None:
            self.on_emit(number, values)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the step.

        The tasks of a step may log the same ones, each of them the same way. A :class:`dataflow.Mean` is weighted by
        what it is over, and a :class:`dataflow.Sum` added up; other numbers are reduced by max or min if their
        name ends so, and averaged otherwise.

        Raises:
            DataflowError: a value is not a number (arrays and tensors of one element are), or the name is the run's.
        """
        for name, value in metrics.items():
            if name in RUNS_OWN:
                raise DataflowError(f"stage '{self.stage}' logs '{name}', which the run itself logs; rename it.")
            try:
                self.metrics[name] = value if isinstance(value, Metric) else real_number(value)
            except ValueError as error:
                raise DataflowError(f"stage '{self.stage}' logs {error} as metric '{name}'; log a number.") from error

    def note(self, **facts: Any) -> None:
        """Adds facts to the task's own span in the trace, JSON-able (``requests``, how many it sent)."""
        self.facts.update(facts)

    def mark(self, name: str, begin: float, end: float, **facts: Any) -> None:
        """Adds a span inside this task (a reward request) to the trace, by :func:`dataflow.system.clock.now`."""
        self.marks.append({"name": name, "begin": begin, "end": end, **facts})

    def level(self, name: str, at: float, value: float) -> None:
        """Adds to the trace the value that a level (a limit) has from ``at`` on, in seconds as for :meth:`mark`."""
        self.marks.append({"name": name, "at": at, "value": value})


@dataclass(frozen=True)
class Hosted:
    """A service in a process of its own: an engine, a trainer, the reward agent.

    The executor builds it there with ``factory(**options)`` and runs the stages that use it in the same process.

    Attributes:
        name: of the host; services of one name are one object.
        factory: builds the service; as ``"package.module:name"`` it is imported only where it is built.
        options: keyword arguments of the factory.
        ranks: processes that all run each call (SPMD); the outputs of the first are used. Stages with collectives share
            a resource of one slot, so that all ranks run them in one order.
        gpus: GPUs per process, or the share of one.
        devices: GPUs that each process has ``gpus`` of, all on one node.
        concurrent: several calls run at a time, async stages on the event loop of the process, plain ones one after the
            other in a thread of it. Without it, one call runs at a time, and no stage can stream.
        restarts: how often in a run it may be rebuilt when its process dies; stages that replay then run again,
            followed by the interrupted tasks. For services whose state can be restored, such as an agent; with 0 its
            death restarts the run from the newest checkpoint.
        alone: built before the other services on GPUs, never at the same time, since it measures free memory.
        close_s: seconds that closing it may take at the end of a run.
        here: runs on the node of the run's own process on a cluster, as it uses files or servers there, unless
            ``ray.nodes`` names other nodes for it.
        run_directory: whether it has files in the run's directory, which its nodes then must share. One that a stage
            with the role ``saves`` calls has.
    """

    name: str
    factory: Callable[..., Any] | str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    gpus: float = 0.0
    devices: int = 1
    concurrent: bool = False
    restarts: int = 0
    alone: bool = False
    close_s: float = 1.0
    here: bool = False
    run_directory: bool = False

    def build(self) -> Any:
        """Returns the service, built in this process."""
        factory = self.factory
        if isinstance(factory, str):
            module, _, name = factory.partition(":")
            factory = getattr(importlib.import_module(module), name)
        return factory(**self.options)


@dataclass(frozen=True)
class Stage:
    """A template of tasks: a function with named inputs, named outputs and a resource. Made by :func:`stage`."""

    name: str
    fn: Callable[..., Any]
    reads: tuple[Read, ...]
    writes: tuple[str, ...]
    on: str
    per: Piece = "step"
    """It runs once for each of these."""
    role: Role | None = None
    streams: bool = False
    after: tuple[str, ...] = ()
    every: int | None = None
    ahead_of: str | None = None
    mini_batches: int | None = None
    """Optimizer steps in a pass over the step's groups, if not the run's number."""
    epochs: int = 1
    """How often each mini-batch is used."""
    epochs_over: Literal["mini-batch", "step"] = "mini-batch"
    services: Mapping[str, Any] = field(default_factory=dict)
    """Services and options bound to its keyword parameters, by parameter."""
    accepts: tuple[str, ...] = ()
    whole_batch: Callable[[Mapping[str, Any]], str | None] | None = None
    replays: bool = False

    @property
    def collects(self) -> bool:
        """Whether it returns the scored groups of each part of the step."""
        return self.role == "collects"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the plain function, for example in a test."""
        return self.fn(*args, **kwargs)

    def bind(
        self,
        *,
        name: str | None = None,
        on: str | None = None,
        every: int | None = None,
        after: str | Sequence[str] | None = None,
        mini_batches: int | None = None,
        epochs: int | None = None,
        epochs_over: Literal["mini-batch", "step"] | None = None,
        renamed: Mapping[str, str] | None = None,
        **services: Any,
    ) -> Stage:
        """Returns the stage with services and options bound to its keyword parameters.

        Args:
            name: another name, when one function serves as two stages.
            on: another resource.
            every: run only on every k-th step, and on the last.
            after: stages that must finish first although no data passes.
            mini_batches: optimizer steps in one pass over the step's groups, if not the run's number; for a stage that
                runs per mini-batch. The policy's ``split`` must divide it.
            epochs: how often it uses each mini-batch.
            epochs_over: ``mini-batch`` uses each mini-batch ``epochs`` times before the next one, so that the order is
                the same however the policy splits the step; ``step`` passes over the whole step ``epochs`` times, as
                verl does, which only policies with split=1 can.
            renamed: new names of fields it reads or writes, by old name. One mapping may serve several stages: names
                of fields that this one has not are ignored.
            **services: engines, agents and options, by parameter.

        Raises:
            PipelineError: the function has no such keyword parameter.
        """
        for service in services:
            if service not in self.accepts:
                raise PipelineError(
                    f"stage '{self.name}' takes no service or option '{service}'{nearest(service, self.accepts)}"
                    f" (it takes {', '.join(self.accepts) or 'none'})."
                )
        given = {
            "name": name,
            "on": on,
            "every": every,
            "after": None if after is None else names_of(after),
            "mini_batches": mini_batches,
            "epochs": epochs,
            "epochs_over": epochs_over,
        }
        other = renamed or {}
        return replace(
            self,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            reads=tuple(r._replace(field=other.get(r.field, r.field)) for r in self.reads),
            writes=tuple(other.get(w, w) for w in self.writes),
            services={**self.services, **services},
        )

    def also_reads(self, name: str, lag: Lag = "none") -> Stage:
        """Returns a stage that reads one more field, to model a graph; the field is not passed to its function."""
        return replace(self, reads=(*self.reads, Read(name, lag)))

    @property
    def host(self) -> Hosted | None:
        """The process that its function runs in, if one of its services is hosted."""
        hosts = [service for service in self.services.values() if isinstance(service, Hosted)]
        if len({h.name for h in hosts}) > 1:
            raise PipelineError(
                f"stage '{self.name}' uses services of two processes ({', '.join(h.name for h in hosts)}); "
                "split it in two, with a field between them."
            )
        return hosts[0] if hosts else None

    def check(self) -> None:
        """Checks what can be known without the other stages.

        Raises:
            PipelineError: a parameter is not bound, or an option is out of range or does not fit the others.
        """
        parameters = inspect.signature(self.fn).parameters
        for option in self.accepts:
            if option not in self.services and parameters[option].default is inspect.Parameter.empty:
                raise PipelineError(
                    f"stage '{self.name}' needs service or option '{option}'; bind it: {self.name}.bind({option}=...)."
                )
        if self.collects and self.every is not None:
            raise PipelineError(
                f"stage '{self.name}' collects the rewards of every step, so it cannot run only every {self.every}."
            )
        if self.per != "mini-batch" and (self.mini_batches is not None or self.epochs != 1):
            raise PipelineError(
                f"stage '{self.name}' runs once a {self.per}, so it takes neither mini_batches= nor epochs=; declare "
                "it with per_mini_batch=True."
            )
        for name in ("every", "mini_batches", "epochs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PipelineError(f"stage '{self.name}': {name}={value!r}; give a whole number of 1 or more.")
        if self.epochs_over not in ("mini-batch", "step"):
            raise PipelineError(f"stage '{self.name}': epochs_over={self.epochs_over!r}; use 'mini-batch' or 'step'.")
        _ = self.host

    def facts(self) -> dict[str, Any]:
        """Returns the stage without its function and services, JSON-able."""
        alike = ("name", "on", "per", "role", "streams", "every", "ahead_of", "mini_batches", "epochs", "epochs_over")
        lists = {"reads": [list(r) for r in self.reads], "writes": list(self.writes), "after": list(self.after)}
        return {name: getattr(self, name) for name in alike} | lists


def stage(
    *,
    writes: str | Sequence[str] = (),
    on: str,
    role: Role | None = None,
    splittable: bool = False,
    per_mini_batch: bool = False,
    streams: bool = False,
    per_chunk: bool = False,
    after: str | Sequence[str] = (),
    every: int | None = None,
    ahead_of: str | None = None,
    whole_batch: Callable[[Mapping[str, Any]], str | None] | None = None,
    replays: bool = False,
) -> Callable[[Callable[..., Any]], Stage]:
    """Turns a function into a stage: parameters before ``*`` are fields, after ``*`` services and options.

    A field with a default of None is optional: it is None where the pipeline has no stage that writes it, and on steps
    on which that stage does not run.

    Args:
        writes: fields it returns, in order; one name for a single value.
        on: resource it occupies.
        role: what the stage does, for the rest of the system, which does not use its name. ``samples`` draws responses,
            ``requests`` submits them for scoring, ``collects`` returns scored groups, ``trains`` takes optimizer steps,
            ``syncs`` copies new weights to the engine, ``validates`` evaluates, ``saves`` writes checkpoints. The
            groups that a stage with the role ``collects`` returns form a part of the step: ``task.take`` whole groups
            of its input that are in no earlier part of the step; anything else fails the run. Of several such stages
            the first one listed forms the parts, so list the slowest source first; each other one gets the groups of
            a part as ``task.groups`` and returns exactly these.
        splittable: runs once for each part that the policy splits a step into, on the groups of that part.
        per_mini_batch: runs once for each optimizer step.
        streams: can emit whole groups as they finish, if the policy streams (rollout).
        per_chunk: runs once for each chunk that a streaming stage emits, if the policy streams.
        after: stages that must finish first although no data passes.
        every: run only on every k-th step, and on the last.
        ahead_of: another stage with the same ``every``; this one runs in the max_staleness steps after each step of the
            other, which waits for it: these steps are sampled before the other's step is synced (keep_samples).
        whole_batch: called with the bound options; returns why the stage needs all groups at once, or None.
        replays: keeps in its service's memory the groups it reads, for a later stage of that service to return
            (reward_request), or the state it writes (sync_weights); if the service dies and is rebuilt, the stage
            runs again on the groups not yet returned, or on the newest state.

    Raises:
        PipelineError: an unknown role, a parameter without a name, a field with a default other than None, or an
            annotation that cannot be resolved (it may mean that the field comes from an earlier step).

    >>> @stage(writes="length", on="controller")
    ... def measure(text, *, scale=1):
    ...     return len(text) * scale
    >>> measure.reads, measure.writes, measure("abc", scale=2)
    ((Read(field='text', lag='none', optional=False),), ('length',), 6)
    """
    per: Piece = "chunk" if per_chunk else "mini-batch" if per_mini_batch else "step"
    if splittable or role == "collects":
        per = "part"

    def wrap(fn: Callable[..., Any]) -> Stage:
        where = f"stage '{fn.__name__}'"
        if role is not None and role not in ROLES:
            guess = nearest(str(role), ROLES) or f"; give one of {', '.join(ROLES)}."
            raise PipelineError(f"{where}: there is no role {role!r}{guess}")
        if streams and per != "step":
            raise PipelineError(f"{where} runs once a {per}, so it cannot stream; let it run once a step.")
        reads: list[Read] = []
        services: list[str] = []
        for name, parameter in inspect.signature(fn).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                if name != "task":
                    services.append(name)
            elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                reads.append(_read_of(fn, parameter))
            else:
                raise PipelineError(
                    f"{where}: parameter '*{name}' has no name to be a field; name each field that it reads."
                )
        return Stage(
            name=fn.__name__,
            fn=fn,
            reads=tuple(reads),
            writes=names_of(writes),
            on=on,
            per=per,
            role=role,
            streams=streams,
            after=names_of(after),
            every=every,
            ahead_of=ahead_of,
            accepts=tuple(services),
            whole_batch=whole_batch,
            replays=replays,
        )

    return wrap


def names_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """Returns names that were given as a sequence, or one alone."""
    return (given,) if isinstance(given, str) else tuple(given)


def _read_of(fn: Callable[..., Any], parameter: inspect.Parameter) -> Read:
    """Returns the field that a parameter before ``*`` stands for."""
    name, default, written = parameter.name, parameter.default, parameter.annotation
    optional = default is not inspect.Parameter.empty
    if optional and default is not None:
        raise PipelineError(
            f"stage '{fn.__name__}': field '{name}' has the default {default!r}; give None, which makes the field "
            f"optional, or move '{name}' behind the *, which makes it an option."
        )
    if written is inspect.Parameter.empty:
        return Read(name, "none", optional)
    where = f"stage '{fn.__name__}': the annotation {written!r} of field '{name}'"
    alone = types.SimpleNamespace(__annotations__={name: written})
    try:
        kind = typing.get_type_hints(alone, inspect.unwrap(fn).__globals__, include_extras=True)[name]
    except Exception as error:
        raise PipelineError(
            f"{where} cannot be resolved ({error}), and might say that the field comes from an earlier step; import "
            "its names at the top of the module, not under TYPE_CHECKING."
        ) from error
    lags = list(dict.fromkeys(_lags(kind)))
    if len(lags) > 1:
        raise PipelineError(f"{where} says both Carried and Latest; give one of them.")
    return Read(name, lags[0] if lags else "none", optional)


def _lags(kind: Any) -> Iterator[Lag]:
    """Yields the lags of the markers in a type: itself, its arguments (of Annotated, of a union), behind an alias."""
    marker = kind if isinstance(kind, type) else type(kind)
    if issubclass(marker, Carried):
        yield "carried"
    elif issubclass(marker, Latest):
        yield "latest"
    inner = kind if isinstance(kind, list | tuple) else typing.get_args(kind)
    behind = (getattr(kind, "__supertype__", None), getattr(kind, "__value__", None))
    for item in (*inner, *filter(None, behind)):
        yield from _lags(item)
