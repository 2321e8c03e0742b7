"""Stages: plain functions with named inputs, named outputs and a resource, and the services that they call.

Pure: no torch, no ray, no clock.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from dataflow.errors import DataflowError, PipelineError, nearest
from dataflow.usercode.numeric import real_number

Grain: TypeAlias = Literal["step", "chunk", "part", "mini-batch"]
Lag: TypeAlias = Literal["none", "latest", "carried"]
Role: TypeAlias = Literal["samples", "requests", "collects", "trains", "syncs", "validates", "saves"]
ROLES: tuple[Role, ...] = typing.get_args(Role)
SAMPLED = "groups sampled"
"""Name of the trace level that counts the finished groups of a rollout."""


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
    emits: int = 1
    """Chunks that a streaming stage must emit while it runs; 1 for none before its end."""
    emitted: Mapping[int, Any] = field(default_factory=dict)
    """Chunks that it emitted before its process died and it was restarted, by number."""
    on_emit: Callable[[int, tuple[Any, ...]], None] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        return self.part == 0

    @property
    def last(self) -> bool:
        """Whether this is the stage's last task of the step."""
        return self.part == self.parts - 1

    def emit(self, number: int, *values: Any) -> None:
        """Emits one of ``emits`` chunks, each once in any order: a Batch of whole groups for each field it writes."""
        if self.on_emit is not None:
            self.on_emit(number, values)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the step; values of several parts are averaged, or reduced by max or min if so named.

        Raises:
            DataflowError: a value is not a number; arrays and tensors of one element are numbers.
        """
        for name, value in metrics.items():
            try:
                self.metrics[name] = value if type(value) in (float, int) else real_number(value)
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
        ranks: processes that all run each call (SPMD); the outputs of the first are used.
        gpus: GPUs per process, or the share of one.
        devices: GPUs that each process has ``gpus`` of, all on one node.
        concurrent: calls run concurrently on one event loop (for I/O-bound services).
        restarts: how often in a run it may be rebuilt when its process dies; stages that replay then run again,
            followed by the interrupted tasks. For services whose state can be restored, such as an agent.
        alone: built before the other services on GPUs, never at the same time, since it measures free memory.
        close_s: seconds that closing it may take at the end of a run.
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
    grain: Grain = "step"
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
    imports: tuple[str, ...] = ()
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
        after: Sequence[str] | None = None,
        ahead_of: str | None = None,
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
            ahead_of: see :func:`stage`.
            mini_batches: optimizer steps in one pass over the step's groups, if not the run's number; for a stage that
                runs per mini-batch. The policy's ``split`` must divide it.
            epochs: how often it uses each mini-batch.
            epochs_over: ``mini-batch`` uses each mini-batch ``epochs`` times before the next one, so that the order is
                the same however the policy splits the step; ``step`` passes over the whole step ``epochs`` times, as
                verl does, which only policies with split=1 can.
            renamed: new names of fields it reads or writes, by old name.
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
        other = dict(renamed or {})
        return replace(
            self,
            name=name or self.name,
            on=on or self.on,
            every=self.every if every is None else every,
            after=self.after if after is None else tuple(after),
            ahead_of=ahead_of or self.ahead_of,
            mini_batches=self.mini_batches if mini_batches is None else mini_batches,
            epochs=self.epochs if epochs is None else epochs,
            epochs_over=epochs_over or self.epochs_over,
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

    def load(self) -> None:
        """Imports the function's modules in the process that runs it."""
        for module in self.imports:
            importlib.import_module(module)

    def unbound(self) -> list[str]:
        """Returns the required keyword parameters that are not bound."""
        parameters = inspect.signature(self.fn).parameters
        return [
            name
            for name in self.accepts
            if name not in self.services and parameters[name].default is inspect.Parameter.empty
        ]


def stage(
    *,
    writes: str | Sequence[str] = (),
    on: str,
    role: Role | None = None,
    splittable: bool = False,
    per_mini_batch: bool = False,
    streams: bool = False,
    per_chunk: bool = False,
    after: Sequence[str] = (),
    every: int | None = None,
    ahead_of: str | None = None,
    whole_batch: Callable[[Mapping[str, Any]], str | None] | None = None,
    imports: Sequence[str] = (),
    replays: bool = False,
    forms_parts: None = None,
    per_emission: None = None,
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
        imports: modules that its process imports before the run, so that the first call is not slow.
        replays: keeps in its service's memory the groups it reads, for a later stage of that service to return
            (reward_request), or the state it writes (sync_weights); if the service dies and is rebuilt, the stage
            runs again on the groups not yet returned, or on the newest state.
        forms_parts: replaced by role="collects".
        per_emission: replaced by per_chunk=True.

    Raises:
        PipelineError: an unknown role, a parameter without a name, a field with a default other than None, or an
            annotation that cannot be resolved (it may mean that the field comes from an earlier step).

    >>> @stage(writes="length", on="controller")
    ... def measure(text, *, scale=1):
    ...     return len(text) * scale
    >>> measure.reads, measure.writes, measure("abc", scale=2)
    ((Read(field='text', lag='none', optional=False),), ('length',), 6)
    """

    grain: Grain = "chunk" if per_chunk else "mini-batch" if per_mini_batch else "step"
    if splittable or role == "collects":
        grain = "part"
    if forms_parts is not None:
        raise PipelineError('stage(forms_parts=True) is stage(role="collects") now; change it.')
    if per_emission is not None:
        raise PipelineError("stage(per_emission=True) is stage(per_chunk=True) now; change it.")
    if role is not None and role not in ROLES:
        raise PipelineError(f"stage(role={role!r}): there is no such role{nearest(str(role), ROLES) or '.'}")

    def wrap(fn: Callable[..., Any]) -> Stage:
        if streams and grain != "step":
            raise PipelineError(
                f"stage '{fn.__name__}' runs once a {grain}, so it cannot stream; let it run once a step."
            )
        reads: list[Read] = []
        services: list[str] = []
        # A function's closure lacks names of the enclosing function that only its annotations use.
        around = sys._getframe(1).f_locals
        for name, parameter in inspect.signature(fn).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                if name != "task":
                    services.append(name)
            elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                reads.append(Read(name, _lag(fn, parameter, around), _is_optional(fn, parameter)))
            else:
                raise PipelineError(f"stage '{fn.__name__}': parameter '*{name}' has no name to be a field.")
        return Stage(
            name=fn.__name__,
            fn=fn,
            reads=tuple(reads),
            writes=(writes,) if isinstance(writes, str) else tuple(writes),
            on=on,
            grain=grain,
            role=role,
            streams=streams,
            after=tuple(after),
            every=every,
            ahead_of=ahead_of,
            accepts=tuple(services),
            whole_batch=whole_batch,
            imports=tuple(imports),
            replays=replays,
        )

    return wrap


def _is_optional(fn: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    """Returns whether the field may be absent: its parameter has a default, which must be None."""
    if parameter.default is inspect.Parameter.empty:
        return False
    if parameter.default is not None:
        name, value = parameter.name, parameter.default
        raise PipelineError(
            f"stage '{fn.__name__}': field '{name}' has the default {value!r}; give None, which makes the field "
            f"optional, or move '{name}' behind the *, which makes it an option."
        )
    return True


def _lag(fn: Callable[..., Any], parameter: inspect.Parameter, around: Mapping[str, Any]) -> Lag:
    """Returns the lag of a field, from the type that its parameter is annotated with."""
    if parameter.annotation is inspect.Parameter.empty:
        return "none"
    where = f"stage '{fn.__name__}': the annotation '{_text(parameter.annotation)}' of field '{parameter.name}'"
    alone = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    plain = inspect.unwrap(fn)
    try:
        kind = typing.get_type_hints(alone, getattr(plain, "__globals__", {}), dict(around), include_extras=True)
    except Exception as error:
        raise PipelineError(
            f"{where} cannot be resolved ({error}), and might say that the field comes from an earlier step; import "
            "its names where the stage is made, not under TYPE_CHECKING."
        ) from error
    found = list(dict.fromkeys(_lags(kind[parameter.name])))
    if len(found) > 1:
        raise PipelineError(f"{where} says both Carried and Latest; give one of them.")
    if not found and any(_mentions(kind[parameter.name])):
        raise PipelineError(
            f"{where} has Carried or Latest inside another type; write Annotated[TYPE, Carried], or Carried alone."
        )
    return found[0] if found else "none"


def _lags(kind: Any) -> Iterator[Lag]:
    """Yields the lags that a type declares: itself, as metadata of Annotated, in a union, or behind an alias."""
    lags: dict[Any, Lag] = {Carried: "carried", Latest: "latest"}
    if isinstance(kind, type) and issubclass(kind, (Carried, Latest)):
        yield "carried" if issubclass(kind, Carried) else "latest"
    elif metadata := getattr(kind, "__metadata__", ()):
        yield from _lags(kind.__origin__)
        for item in metadata:
            if (lag := lags.get(item if isinstance(item, type) else type(item))) is not None:
                yield lag
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for item in typing.get_args(kind):
            yield from _lags(item)
    else:
        for alias in ("__value__", "__supertype__"):  # of a type statement, of a NewType
            if (behind := getattr(kind, alias, None)) is not None:
                yield from _lags(behind)


def _mentions(kind: Any) -> Iterator[bool]:
    for item in typing.get_args(kind):
        yield from (True for _ in _lags(item))
        yield from _mentions(item)


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
