"""How a stage function is called: arguments, checks and report, the same in this process and in a worker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeAlias

from dataflow.batch import Batch
from dataflow.errors import DataflowError, NotOffered
from dataflow.executors.base import Chunk, Report, StageCall
from dataflow.executors.parts import listed
from dataflow.graph import Stage, TaskId, TaskInfo
from dataflow.usercode.copies import readable_once

OnChunk: TypeAlias = Callable[[Chunk], None]


def fields_of(call: StageCall, values: Sequence[Any]) -> list[Any]:
    """Returns the arguments of a stage function: joins the values of each field and selects the groups of the call.

    Batches with the same groups have them in the same order, so that a stage may read them row by row.
    """
    fields: list[Any] = []
    orders: dict[frozenset[int], tuple[int, ...]] = {}
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
            groups = call.groups
            if groups is None:  # in the order of the first Batch with the same groups
                own = tuple(sorted(batch.ids)) if len(mine) > 1 else batch.ids
                groups = orders.setdefault(frozenset(own), own)
            if missing := set(groups).difference(batch.ids):
                raise DataflowError(
                    f"stage '{call.stage}' works on {listed(groups)}, but its field '{name}' lacks {listed(missing)}; "
                    f"see which groups the stage that writes '{name}' returns."
                )
            fields.append(batch.select(groups))
    return fields


def _joined(call: StageCall, name: str, values: Sequence[Any]) -> Any:
    """Concatenates values other than Batches by the ``concat`` of their class."""
    kinds = {type(value) for value in values}
    concat = getattr(kinds.pop(), "concat", None)
    if kinds or concat is None:
        raise DataflowError(
            f"{call.stage}: field '{name}' comes in {len(values)} values that are not a Batch; return a Batch, or an "
            "object whose class has concat(values)."
        )
    return concat(values)


def results_of(stage: Stage, result: Any) -> tuple[Any, ...]:
    """Returns one value per field that the stage writes."""
    if len(stage.writes) == 1:
        result = (result,)
    elif stage.writes and (not isinstance(result, tuple) or len(result) != len(stage.writes)):
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise DataflowError(
            f"stage '{stage.name}' writes {', '.join(stage.writes)} but its function returned {got}; return a tuple."
        )
    values = tuple(result) if stage.writes else ()
    for name, value in zip(stage.writes, values, strict=True):
        if (what := readable_once(value)) is not None:
            raise DataflowError(
                f"stage '{stage.name}' returned {what} as field '{name}', which only one stage could read, and only "
                "once; return a list."
            )
    return values


def check_rows(stage: Stage, call: StageCall, fields: Sequence[Any], results: Sequence[Any]) -> None:
    """Checks that the results of a stage match its inputs group by group and row by row.

    A stage that keeps its groups may return a row per row, one per group, or several per prompt.
    """
    layout = zip(call.layout, fields, strict=True)
    inputs = [value for (*_, as_it_is), value in layout if isinstance(value, Batch) and not as_it_is]
    allowed = [set(call.groups)] if call.groups is not None else [set(batch.ids) for batch in inputs]
    known = [batch.sizes for batch in inputs]
    widest = max((size for of in known for size in of.values()), default=1)
    for name, value in zip(stage.writes, results, strict=True):
        if name not in call.aligned or not isinstance(value, Batch):
            continue
        if call.keeps and allowed and set(value.ids) not in allowed:
            raise DataflowError(
                f"stage '{stage.name}' was given {listed(allowed[0])}, but the field '{name}' that it returned has "
                f"{listed(value.ids)}; return the groups of its input, each with all its rows (Batch.like)."
            )
        sizes = value.sizes
        each = set(sizes.values())
        if any(all(of.get(group) == size for group, size in sizes.items()) for of in known) or (
            len(each) <= 1 and (not call.keeps or widest == 1 or each <= {1})
        ):
            continue
        usual = widest if call.keeps and widest > 1 else max(each, key=list(sizes.values()).count)
        group = next((group for group, size in sizes.items() if size != usual), next(iter(sizes)))
        raise DataflowError(
            f"stage '{stage.name}' returned {sizes[group]} rows of '{name}' for group {group}, where {usual} belong to "
            "a group; return a row for each row of its input, in its order (Batch.like)."
        )


async def run_stage(
    stage: Stage,
    call: StageCall,
    values: Sequence[Any],
    services: Mapping[str, Any],
    now: Callable[[], float],
    on_chunk: OnChunk | None = None,
    thread: Executor | None = None,
    own: Callable[[Any], Any] = lambda value: value,
) -> tuple[Report, tuple[Any, ...]]:
    """Runs a stage function, in this process or in a worker; returns its report and a value per field that it writes.

    Args:
        values: of the fields, then of the chunks that the task has emitted already.
        now: returns seconds of the executor's clock.
        thread: that runs a plain function; None runs it at once, on the event loop.
        own: copies what the function reads and returns, where these are objects of other tasks, too.
    """
    begin = now()
    wide = len(stage.writes)
    values, old = values[: len(values) - wide * len(call.emitted)], values[len(values) - wide * len(call.emitted) :]
    emitted = {
        number: old[at * wide] if wide == 1 else tuple(old[at * wide : (at + 1) * wide])
        for at, number in enumerate(call.emitted)
    }

    def emit(number: int, written: tuple[Any, ...]) -> None:
        if call.info.emits > 1 and on_chunk is not None:
            on_chunk(_chunk(stage, call.info, number, own(written), now()))

    info = replace(call.info, metrics={}, marks=[], facts={}, emitted=own(emitted), on_emit=emit)
    keywords = {name: services.get(name, service) for name, service in stage.services.items()}
    if "task" in inspect.signature(stage.fn).parameters:
        keywords["task"] = info
    fields = own(fields_of(call, values))

    def plain() -> Any:
        nonlocal begin
        begin = now()  # the thread may have been busy
        return stage.fn(*fields, **keywords)

    if is_async(stage):
        result = stage.fn(*fields, **keywords)
        result = await result if asyncio.iscoroutine(result) else result
    elif thread is None:
        result = plain()
    else:
        result = await _in_thread(thread, plain)
    written = results_of(stage, own(result))
    check_rows(stage, call, fields, written)
    report = _report(stage, info, written, begin, now())
    if stage.replays:  # the groups that it leaves in its service; none if it leaves a state
        report.held = next((value.ids for value in fields if isinstance(value, Batch)), ())
    return report, written


def is_async(stage: Stage) -> bool:
    """Whether the stage's function is async, below its decorators."""
    return inspect.iscoroutinefunction(inspect.unwrap(stage.fn))


async def _in_thread(thread: Executor, function: Callable[[], Any]) -> Any:
    """Runs user code in a thread; a future takes no StopIteration, and SystemExit would end the event loop."""

    def outcome() -> tuple[Any, BaseException | None]:
        try:
            return function(), None
        except BaseException as error:
            return None, error

    result, error = await asyncio.get_running_loop().run_in_executor(thread, outcome)
    if error is not None:
        raise error
    return result


def _chunk(stage: Stage, info: TaskInfo, number: int, values: tuple[Any, ...], at: float) -> Chunk:
    """Returns the event of a chunk that a task emits."""
    if len(values) != len(stage.writes) or not all(isinstance(value, Batch) for value in values):
        raise DataflowError(
            f"stage '{stage.name}' streams: task.emit takes the number of the chunk, then a Batch for each of "
            f"{', '.join(stage.writes)}."
        )
    if not 0 <= number < info.emits:
        raise DataflowError(f"stage '{stage.name}' emits chunks 0 to {info.emits - 1}, not {number}.")
    ids = values[0].ids
    for name, value in zip(stage.writes[1:], values[1:], strict=True):
        if odd := set(ids).symmetric_difference(value.ids):
            raise DataflowError(
                f"stage '{stage.name}' emitted chunk {number} with different groups in '{stage.writes[0]}' and "
                f"'{name}' ({listed(odd)}); emit the same groups in every Batch."
            )
    return Chunk(TaskId(info.step, info.stage, number, info.emits), at, ids, values)


def _report(stage: Stage, info: TaskInfo, results: Sequence[Any], begin: float, end: float) -> Report:
    """Returns the report of a finished call."""
    batches = {name: value for name, value in zip(stage.writes, results, strict=True) if isinstance(value, Batch)}
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}  # pickle equal ids once
    written = {name: shared.setdefault(value.ids, value.ids) for name, value in batches.items()}
    groups = next(iter(written.values()), None) if stage.collects else None
    if stage.collects and len({frozenset(ids) for ids in written.values()}) != 1:
        raise DataflowError(
            f"stage '{stage.name}' forms the parts of a step and so must return a Batch, or several of the same "
            f"groups; it returned {', '.join(f'{name}: {listed(ids)}' for name, ids in written.items()) or 'none'}."
        )
    facts: dict[str, Any] = dict(info.facts)
    first = next(iter(batches.values()), None)
    if first is not None:
        facts["samples"] = len(first)
        if "weights_version" in first.meta:
            facts["weights_version"] = first.meta["weights_version"]
    return Report(begin, end, groups, info.metrics, info.marks, facts, written)


def method_of(service: Any, name: str) -> Callable[..., Any]:
    """Returns a method of a service, or raises NotOffered."""
    found = getattr(service, name, None)
    if not callable(found):
        raise NotOffered(f"service {type(service).__name__} has no method '{name}'.")
    return found  # type: ignore[no-any-return]
