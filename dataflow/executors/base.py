"""What the runner asks of an executor, and how a stage function is called: the same in this process and in a worker."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dataflow.batch import Batch
from dataflow.errors import DataflowError, StageFailed
from dataflow.executors.parts import listed
from dataflow.graph import Pipeline, Stage, Task, TaskId, TaskInfo
from dataflow.usercode.failures import message_of


@dataclass
class Report:
    """What comes back of a task beside its values: small, so that the controller may read it.

    Times are in the executor's seconds (``now``).

    Attributes:
        groups: that it chose, if it forms parts.
        written: the groups of each field it wrote, where that is a Batch.
        logged: level and text of the warnings and errors that its process has logged since its last report, if that
            process has no terminal of its own.
    """

    begin: float
    end: float
    groups: tuple[int, ...] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    written: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logged: tuple[tuple[str, str], ...] = ()


@dataclass
class Done:
    """A task ended: its report and a handle per field it writes, or the error that ended it."""

    id: TaskId
    report: Report | None = None
    values: tuple[Any, ...] = ()
    error: BaseException | None = None


@dataclass
class Part:
    """A running task handed on some groups: when, which, and a handle per field it writes.

    ``id`` is the task's, with the part and the number of parts it hands on.
    """

    id: TaskId
    at: float
    groups: tuple[int, ...] | None = None
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of a stage function, as it travels to where it runs.

    Attributes:
        stage: name of the stage; the place where it runs knows the function.
        info: what the function may ask of its task.
        layout: for each field the number of values that make it up, and whether it is taken as it is (a state).
        groups: groups to pick out of the values; None for all.
        handed: sets that it has handed on already; behind the values of the fields come theirs, in this order.
        aligned, keeps: see :class:`~dataflow.graph.Task`.
    """

    stage: str
    info: TaskInfo
    layout: tuple[tuple[str, int, bool], ...]
    groups: tuple[int, ...] | None
    handed: tuple[int, ...] = ()
    aligned: tuple[str, ...] = ()
    keeps: bool = False


class Executor(Protocol):
    """Runs tasks. ``start`` returns at once; what ended, or was handed on meanwhile, comes out of ``events``."""

    async def open(self, pipeline: Pipeline) -> None:
        """Builds the processes that the pipeline's stages need."""
        ...

    def now(self) -> float:
        """Seconds on this executor's clock."""
        ...

    def put(self, value: Any) -> Any:
        """Returns a handle for a value of the controller's."""
        ...

    def start(self, task: Task, call: Call, values: Sequence[Any]) -> None:
        """Starts a task; ``values`` are the handles of its fields, laid out as ``call.layout`` says."""
        ...

    def events(self) -> AsyncIterator[Done | Part]:
        """Yields what ended or was handed on, as it happens; woken, never polling."""
        ...

    def cancel(self, task: TaskId) -> None:
        """Stops a running task if that can be done; its event may still come."""
        ...

    async def ask(self, host: str, method: str) -> Any:
        """Calls a method of a hosted tool (on all its ranks) and returns the first rank's answer."""
        ...

    async def close(self) -> None:
        """Ends what ``open`` started."""
        ...


def fields_of(call: Call, values: Sequence[Any]) -> list[Any]:
    """Returns the stage function's arguments: several values of one field joined, groups picked out.

    Batches of the same groups come in the same order of groups, so that a stage may read them side by side.
    """
    fields: list[Any] = []
    at = 0
    for name, count, as_it_is in call.layout:
        mine = list(values[at : at + count])
        at += count
        if not mine:
            fields.append(None)
        elif as_it_is or not all(isinstance(value, Batch) for value in mine):
            fields.append(mine[0] if len(mine) == 1 else _joined(call, name, mine))
        else:
            batch = mine[0] if len(mine) == 1 else Batch.concat(mine)
            groups = call.groups if call.groups is not None else sorted(batch.ids) if len(mine) > 1 else None
            fields.append(_selected(call, name, batch, groups))
    return _in_one_order(call, fields)


def _selected(call: Call, name: str, batch: Batch, groups: Sequence[int] | None) -> Batch:
    if groups is None:
        return batch
    if missing := set(groups).difference(batch.ids):
        raise DataflowError(
            f"stage '{call.stage}' works on {listed(groups)}, but its field '{name}' lacks {listed(missing)}: it holds "
            f"{listed(batch.ids)}; see which groups the stage that writes '{name}' returns."
        )
    return batch.select(groups)


def _in_one_order(call: Call, fields: list[Any]) -> list[Any]:
    """Where groups were picked out, their order is one already; else the first Batch of the same groups sets it."""
    if call.groups is not None:
        return fields
    orders: dict[frozenset[int], tuple[int, ...]] = {}
    found: list[Any] = []
    for (_name, _count, as_it_is), value in zip(call.layout, fields, strict=True):
        if isinstance(value, Batch) and not as_it_is:
            value = value.select(orders.setdefault(frozenset(value.ids), value.ids))
        found.append(value)
    return found


def _joined(call: Call, name: str, values: Sequence[Any]) -> Any:
    """Returns one value of several that are no batches, if they know how to be one."""
    kinds = {type(value) for value in values}
    concat = getattr(kinds.pop(), "concat", None)
    if kinds or concat is None:
        raise DataflowError(
            f"{call.stage}: field '{name}' comes in {len(values)} parts that are no Batch; return a Batch, or a class "
            "with concat(values)."
        )
    return concat(values)


def results_of(stage: Stage, result: Any) -> tuple[Any, ...]:
    """Returns one value per field that the stage writes.

    Raises:
        DataflowError: the function returned another number of values.
    """
    if len(stage.writes) == 1:
        return (result,)
    if not stage.writes:
        return ()
    if not isinstance(result, tuple) or len(result) != len(stage.writes):
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise DataflowError(
            f"stage '{stage.name}' writes {', '.join(stage.writes)} but its function returned {got}; return a tuple."
        )
    return result


def check_rows(stage: Stage, call: Call, fields: Sequence[Any], results: Sequence[Any]) -> None:
    """Sees to it that what a stage returns can be read beside its inputs: the right groups, a row for each row.

    Raises:
        DataflowError: a field is of other groups than the stage was given, or of fewer or more rows.
    """
    inputs = [
        value
        for (_name, _count, as_it_is), value in zip(call.layout, fields, strict=True)
        if isinstance(value, Batch) and not as_it_is
    ]
    for name, value in zip(stage.writes, results, strict=True):
        if name not in call.aligned or not isinstance(value, Batch):
            continue
        if call.keeps:
            _check_groups(stage, name, value, call.groups, inputs)
        _check_sizes(stage, name, value, inputs, call.keeps)


def _check_groups(stage: Stage, name: str, value: Batch, given: Sequence[int] | None, inputs: Sequence[Batch]) -> None:
    allowed = [set(given)] if given is not None else [set(batch.ids) for batch in inputs]
    ids = set(value.ids)
    if allowed and ids not in allowed:
        lost, strange = allowed[0] - ids, ids - allowed[0]
        what = " and ".join(
            text for text in (lost and f"lacks {listed(lost)}", strange and f"has {listed(strange)} besides") if text
        )
        raise DataflowError(
            f"stage '{stage.name}' was given {listed(allowed[0])}, but the field '{name}' that it returned {what}; "
            "return the groups of its input, each with all its rows (Batch.like)."
        )


def _check_sizes(stage: Stage, name: str, value: Batch, inputs: Sequence[Batch], keeps: bool) -> None:
    """A group has as many rows as in an input, or as many as every other group has.

    A stage that keeps its groups may return a row for each row, one for each group, or several for each prompt.
    """
    sizes = value.sizes
    known = [batch.sizes for batch in inputs]
    if any(all(of.get(group) == size for group, size in sizes.items()) for of in known):
        return
    widest = max((size for of in known for size in of.values()), default=1)
    each = set(sizes.values())
    if len(each) <= 1 and (not keeps or widest == 1 or each <= {1}):
        return
    usual = widest if keeps and widest > 1 else max(each, key=list(sizes.values()).count)
    odd = {group: size for group, size in sizes.items() if size != usual}
    group = next(iter(odd), next(iter(sizes)))
    raise DataflowError(
        f"stage '{stage.name}' returned {sizes[group]} rows of '{name}' for group {group}, where {usual} belong to a "
        "group; return a row for each row of its input, in its order (Batch.like)."
    )


def prepare(
    stage: Stage,
    call: Call,
    values: Sequence[Any],
    tools: Mapping[str, Any],
    on_emit: Callable[[int, tuple[Any, ...]], None] | None = None,
) -> tuple[list[Any], dict[str, Any], TaskInfo]:
    """Returns arguments, keyword arguments and the info object for one call of a stage function.

    Args:
        stage: whose function it is.
        call: what travelled here.
        values: of the fields.
        tools: that live here, by parameter.
        on_emit: told of what a streaming stage hands on: which set, and a value per field.
    """
    wide = len(stage.writes)
    values, old = values[: len(values) - wide * len(call.handed)], values[len(values) - wide * len(call.handed) :]
    handed = {
        number: old[at * wide] if wide == 1 else tuple(old[at * wide : (at + 1) * wide])
        for at, number in enumerate(call.handed)
    }
    info = replace(call.info, metrics={}, marks=[], facts={}, handed=handed, on_emit=on_emit)
    keywords = {name: tools.get(name, tool) for name, tool in stage.tools.items()}
    if "task" in inspect.signature(stage.fn).parameters:
        keywords["task"] = info
    return fields_of(call, values), keywords, info


def part(stage: Stage, info: TaskInfo, number: int, values: tuple[Any, ...], at: float) -> Part:
    """Returns the event of a set that a task hands on.

    Raises:
        DataflowError: the task hands on no such set, or not a Batch for each field.
    """
    if len(values) != len(stage.writes) or not all(isinstance(value, Batch) for value in values):
        raise DataflowError(
            f"stage '{stage.name}' streams: task.emit takes the number of the set, then a Batch for each of "
            f"{', '.join(stage.writes)}."
        )
    if not 0 <= number < info.emits:
        raise DataflowError(f"stage '{stage.name}' was to emit sets 0 to {info.emits - 1}, not {number}.")
    ids = values[0].ids
    for name, value in zip(stage.writes[1:], values[1:], strict=True):
        if odd := set(ids).symmetric_difference(value.ids):
            raise DataflowError(
                f"stage '{stage.name}' emitted chunk {number} with different groups in '{stage.writes[0]}' and "
                f"'{name}' ({listed(odd)}); emit the same groups in every Batch."
            )
    return Part(TaskId(info.step, info.stage, number, info.emits), at, ids, values)


def report(stage: Stage, info: TaskInfo, results: Sequence[Any], begin: float, end: float) -> Report:
    """Returns the report of a finished call.

    Raises:
        DataflowError: the stage forms parts but returned no Batch, or Batches of different groups.
    """
    batches = [value for value in results if isinstance(value, Batch)]
    written: dict[str, tuple[int, ...]] = {}
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal ones are pickled once
    for name, value in zip(stage.writes, results, strict=True):
        if isinstance(value, Batch):
            ids = value.ids
            written[name] = shared.setdefault(ids, ids)
    groups = None
    if stage.forms_parts:
        if not batches:
            raise DataflowError(f"stage '{stage.name}' forms the parts of a step and so must return a Batch.")
        (first, groups), *others = written.items()
        for name, ids in others:
            if odd := set(groups).symmetric_difference(ids):
                raise DataflowError(
                    f"stage '{stage.name}' forms a part of the groups of '{first}', but '{name}' differs in "
                    f"{listed(odd)}; return the same groups in every Batch."
                )
    facts: dict[str, Any] = {**info.facts, "samples": len(batches[0])} if batches else dict(info.facts)
    if batches and "weights_version" in batches[0].meta:
        facts["weights_version"] = batches[0].meta["weights_version"]
    return Report(begin, end, groups, info.metrics, info.marks, facts, written)


def answer(
    stage: Stage, call: Call, info: TaskInfo, fields: Sequence[Any], result: Any, begin: float, end: float
) -> tuple[Report, tuple[Any, ...]]:
    """Returns the report of a finished call and a value per field that it writes.

    Args:
        stage: whose function it was.
        call: what travelled there.
        info: which the function was given.
        fields: its arguments.
        result: what it returned.
        begin, end: of the call, in the executor's seconds.

    Raises:
        DataflowError: the values are not what the stage is to return.
    """
    values = results_of(stage, result)
    check_rows(stage, call, fields, values)
    return report(stage, info, values, begin, end), values


def failure(task: Task, error: BaseException, elapsed: float, story: str) -> StageFailed:
    """Returns the error that ends a run: which task, where, why, and how it came there."""
    from dataflow.errors import RewardFailed

    kind = "" if isinstance(error, RewardFailed | DataflowError) else f"{type(error).__name__}: "
    what = error if isinstance(error, DataflowError) else f"{kind}{message_of(error)}".rstrip(": ")
    return StageFailed(
        f"{task.id.stage}[step {task.id.step}"
        + (f", part {task.id.part + 1} of {task.id.parts}" if task.id.parts > 1 else "")
        + f"] failed on '{task.stage.on}' after {elapsed:.1f} s: {what}\n  history: {story}"
    )
