"""The slots of resources, and stages that hold one until another has ended: that no task between them needs that slot.

Pure: no torch, no ray, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dataflow.errors import PipelineError, nearest
from dataflow.stage import Lag, Stage

Edges = Iterable[tuple[Stage, Stage, str, Lag]]
RESOURCES: Mapping[str, int | None] = {"gpu": 1, "reward": None, "controller": 1, "io": 1}
"""The slots of the resources that every pipeline has; None for no limit."""


def resources_of(stages: Iterable[Stage], given: Mapping[str, int | None] | None) -> dict[str, int | None]:
    """Returns the slots of each resource of a pipeline: those given, and those of :data:`RESOURCES` in use.

    Raises:
        PipelineError: they are no mapping, or a number of slots is none.
    """
    if given is not None and not isinstance(given, Mapping):
        raise PipelineError(f"Pipeline(resources={given!r}): give the slots by name, such as {{'judge': 1}}.")
    # Recipes give all of theirs: another one, which no stage runs on, would be an empty row of the timeline.
    used = {s.on for s in stages} if given else RESOURCES.keys()
    more = {name: slots for name, slots in RESOURCES.items() if name in used and name not in (given or ())}
    for name, slots in (given or {}).items():
        if slots is not None and (not isinstance(slots, int) or slots < 1):
            raise PipelineError(f"resource '{name}' has {slots!r} slots; give 1 or more, or None for no limit.")
    return {**more, **(given or {})}


def check_holds(stages: Mapping[str, Stage], edges: Edges) -> None:
    """Checks that whatever a held slot waits for can run without it.

    Args:
        stages: of a pipeline, by name.
        edges: (from, to, field, lag) between them.

    Raises:
        PipelineError: a run could stand still.
    """
    known = list(edges)
    for holder in stages.values():
        if holder.until is not None:
            _check(holder, holder.until, stages, known)


def _check(holder: Stage, until: str, stages: Mapping[str, Stage], edges: Edges) -> None:
    last = stages.get(until)
    rule = f"stage '{holder.name}' holds '{holder.on}' until '{until}' has ended"
    if last is None or last is holder:
        raise PipelineError(f"{rule}, which is no other stage{nearest(until, stages) or '.'}")
    if last.on != holder.on:
        raise PipelineError(f"{rule}, but that runs on '{last.on}'; let both run on one resource.")
    if (holder.grain, last.grain) != ("step", "step") or holder.every != last.every:
        raise PipelineError(f"{rule}; let each of them run once on the same steps.")
    if any(other.until == until for other in stages.values() if other is not holder):
        raise PipelineError(f"{rule}, as another stage does; give each a stage of its own.")
    before = _upstream(holder.name, edges)
    needed = _upstream(until, edges)
    if holder.name not in needed:
        raise PipelineError(f"{rule}, but '{until}' does not wait for it; give it after=['{holder.name}'] or a field.")
    between = needed - before - {holder.name}
    if busy := sorted(name for name in between if stages[name].on == holder.on):
        raise PipelineError(
            f"{rule}, but '{busy[0]}' runs on '{holder.on}' and '{until}' waits for it; let '{holder.name}' be after "
            f"'{busy[0]}', or '{busy[0]}' after '{until}'."
        )
    # What another step writes on the resource may come after the holder of this step.
    early = {source.name for source, target, _field, lag in edges if target.name in before and lag != "none"}
    for source, target, field, lag in edges:
        waits = lag != "none" and target.name in {*between, until} and source.on == holder.on
        if waits and source.name not in early:
            raise PipelineError(
                f"{rule}, but '{target.name}' waits for '{field}' of an earlier step, which '{source.name}' writes on "
                f"'{holder.on}'; let '{holder.name}' read it as well."
            )


def _upstream(name: str, edges: Edges) -> set[str]:
    """Returns the stages of the same step that a stage waits for."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        at = ahead.pop()
        new = {source.name for source, target, _field, lag in edges if target.name == at and lag == "none"} - found
        found |= new
        ahead += new
    return found
