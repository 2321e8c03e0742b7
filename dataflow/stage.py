"""Stages: plain functions with named inputs, named outputs and a resource, and the services that they call.

Pure: no torch, no ray, no clock.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal, TypeAlias

from dataflow.errors import PipelineError, an, counted, nearest
from dataflow.signature.fields import Carried, Lag, Latest, Read, names_around, placed, read_of
from dataflow.signature.hosted import Hosted
from dataflow.signature.task_info import TaskInfo

Grain: TypeAlias = Literal["step", "chunk", "part", "mini-batch"]
__all__ = [
    "ROLES",
    "SAMPLED",
    "Carried",
    "Grain",
    "Hosted",
    "Lag",
    "Latest",
    "Read",
    "Role",
    "Stage",
    "TaskInfo",
    "stage",
]

Role: TypeAlias = Literal["samples", "requests", "collects", "trains", "syncs", "validates", "saves"]
ROLES: tuple[Role, ...] = typing.get_args(Role)
SAMPLED = "groups sampled"
"""Name of the trace level that counts the finished groups of a rollout."""


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

    def __post_init__(self) -> None:
        for name in ("name", "on", "ahead_of"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in ("name", "on")):
                raise PipelineError(f"stage '{self.name}': {name}={value!r}; give a name.")
        if not self.name or "[" in self.name:
            raise PipelineError(
                f"'{self.name}' cannot be the name of a stage: tasks are named NAME[STEP]; give one without '['."
            )

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
            renamed: new names of fields it reads or writes, by old name. One mapping may serve several stages: names
                of fields that this one has not are ignored.
            **services: engines, agents and options, by parameter.

        Raises:
            PipelineError: the function has no such keyword parameter, or a name is none.
        """
        for service in services:
            if service not in self.accepts:
                raise PipelineError(
                    f"stage '{self.name}' takes no service or option '{service}'{nearest(service, self.accepts)}"
                    f" (it takes {', '.join(self.accepts) or 'none'})."
                )
        other = dict(renamed or {})
        names_of(other.values(), f"stage '{self.name}': renamed")
        return replace(
            self,
            name=name or self.name,
            on=on or self.on,
            every=self.every if every is None else every,
            after=self.after if after is None else names_of(after, f"stage '{self.name}': after"),
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

    def check(self) -> None:
        """Checks what can be known without the other stages.

        Raises:
            PipelineError: a parameter is not bound, or an option is out of range or does not fit the others.
        """
        if missing := self.unbound():
            raise PipelineError(
                f"stage '{self.name}' needs service or option '{missing[0]}'; bind it: "
                f"{self.name}.bind({missing[0]}=...)."
            )
        if self.collects and self.every is not None:
            raise PipelineError(
                f"stage '{self.name}' collects the rewards of every step, so it cannot run only every {self.every}."
            )
        if self.grain != "mini-batch" and (self.mini_batches is not None or self.epochs != 1):
            raise PipelineError(
                f"stage '{self.name}' runs once a {self.grain}, so it takes neither mini_batches= nor epochs=; declare "
                "it with per_mini_batch=True."
            )
        for name in ("every", "mini_batches", "epochs"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise PipelineError(f"stage '{self.name}': {name}={value!r}; give a whole number.")
            if value is not None and value < 1:
                raise PipelineError(f"stage '{self.name}': {name}={value}; give 1 or more.")
        if self.epochs_over not in ("mini-batch", "step"):
            raise PipelineError(f"stage '{self.name}': epochs_over={self.epochs_over!r}; use 'mini-batch' or 'step'.")
        _ = self.host

    def facts(self) -> dict[str, Any]:
        """Returns the stage without its function and services, JSON-able."""
        alike = (
            "name",
            "on",
            "grain",
            "role",
            "streams",
            "every",
            "ahead_of",
            "mini_batches",
            "epochs",
            "epochs_over",
        )
        lists = {"reads": [list(r) for r in self.reads], "writes": list(self.writes), "after": list(self.after)}
        return {name: getattr(self, name) for name in alike} | lists

    def words(self) -> list[str]:
        """Returns how often it runs and where, each fact in a few words."""
        found = [f"on {self.on}"]
        if self.grain == "chunk":
            found.append("once a chunk where the policy streams")
        elif self.grain != "step":
            found.append(f"once a {self.grain}")
        if self.mini_batches is not None:
            found.append(counted(self.mini_batches, "mini-batch"))
        if self.epochs > 1:
            found.append(f"{self.epochs} epochs over each {self.epochs_over}")
        if self.streams:
            found.append("can stream")
        if self.every is not None:
            found.append("every step" if self.every == 1 else f"every {self.every} steps")
        if self.host is not None:
            found.append(f"in {self.host.name}" + (f" x{self.host.ranks}" if self.host.ranks > 1 else ""))
        return found

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
    fn: None = None,
    /,
    *,
    writes: str | Sequence[str] = (),
    on: str = "",
    role: Role | None = None,
    splittable: bool = False,
    per_mini_batch: bool = False,
    streams: bool = False,
    per_chunk: bool = False,
    after: str | Sequence[str] = (),
    every: int | None = None,
    ahead_of: str | None = None,
    whole_batch: Callable[[Mapping[str, Any]], str | None] | None = None,
    imports: Sequence[str] = (),
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
        imports: modules that its process imports before the run, so that the first call is not slow.
        replays: keeps in its service's memory the groups it reads, for a later stage of that service to return
            (reward_request), or the state it writes (sync_weights); if the service dies and is rebuilt, the stage
            runs again on the groups not yet returned, or on the newest state.

    Raises:
        PipelineError: no resource, no parentheses, no function, an unknown role, a parameter without a name, a field
            with a default other than None, or an annotation that cannot be resolved (it may mean that the field comes
            from an earlier step).

    >>> @stage(writes="length", on="controller")
    ... def measure(text, *, scale=1):
    ...     return len(text) * scale
    >>> measure.reads, measure.writes, measure("abc", scale=2)
    ((Read(field='text', lag='none', optional=False),), ('length',), 6)
    """

    if fn is not None:
        raise PipelineError(
            f'@stage above {placed(fn)} is without parentheses; write @stage(writes="FIELD", on="RESOURCE").'
        )
    grain: Grain = "chunk" if per_chunk else "mini-batch" if per_mini_batch else "step"
    if splittable or role == "collects":
        grain = "part"

    def wrap(fn: Callable[..., Any]) -> Stage:
        _check_function(fn)
        place = placed(fn)
        if not on:
            raise PipelineError(f"@stage above {place} is without a resource; give on=, such as on='gpu' or 'reward'.")
        if role is not None and role not in ROLES:
            guess = nearest(str(role), ROLES) or f"; give one of {', '.join(ROLES)}."
            raise PipelineError(f"stage {place}: there is no role {role!r}{guess}")
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise PipelineError(
                f"stage {place} contains yield, so a call would not run it; return the values of its fields."
            )
        if streams and grain != "step":
            raise PipelineError(f"stage {place} runs once a {grain}, so it cannot stream; let it run once a step.")
        reads: list[Read] = []
        services: list[str] = []
        around = names_around(fn, sys._getframe(1))
        for name, parameter in inspect.signature(fn).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                if name != "task":
                    services.append(name)
            elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                reads.append(read_of(fn, parameter, around))
            else:
                raise PipelineError(
                    f"stage {place}: parameter '*{name}' has no name to be a field; name each field that it reads."
                )
        return Stage(
            name=fn.__name__,
            fn=fn,
            reads=tuple(reads),
            writes=names_of(writes, f"stage {place}: writes"),
            on=on,
            grain=grain,
            role=role,
            streams=streams,
            after=names_of(after, f"stage {place}: after"),
            every=every,
            ahead_of=ahead_of,
            accepts=tuple(services),
            whole_batch=whole_batch,
            imports=names_of(imports, f"stage {place}: imports"),
            replays=replays,
        )

    return wrap


def names_of(given: str | Iterable[str], what: str) -> tuple[str, ...]:
    """Returns names that were given as a sequence, or one alone.

    Raises:
        PipelineError: they are no names; ``what`` says whose.
    """
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for name in names:
        if not isinstance(name, str):
            raise PipelineError(f"{what}: {name!r} is no name; give a name, or a list of names.")
    return names


def _check_function(fn: Any) -> None:
    if isinstance(fn, Stage):
        raise PipelineError(f"'{fn.name}' is a stage already; bind(name=...) makes another stage of its function.")
    if isinstance(fn, type) or not callable(fn):
        raise PipelineError(f"@stage above {getattr(fn, '__name__', repr(fn))}: this is no function; give a function.")
    if not hasattr(fn, "__name__"):  # functools.partial, an object with __call__
        raise PipelineError(
            f"@stage above {an(type(fn).__name__)}: it has no name; write a function that calls it, whose options "
            "(after the *) are given by bind()."
        )
