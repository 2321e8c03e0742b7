"""Which of the ready tasks get the slots that are free."""

from __future__ import annotations

from dataflow.graph import TaskId
from dataflow.tasks.slots import Slots


def key(priority: float, name: str) -> tuple[float, float, int, int, int, TaskId]:
    return priority, 0.0, 1, 0, 0, TaskId(1, name)


def taken(slots: Slots, *wanted: str) -> list[str]:
    return [i.stage for i in slots.take({TaskId(1, name) for name in wanted} or None)]


def filled(**resources: int | None) -> Slots:
    slots = Slots(resources)
    for priority, name in enumerate(["first", "second", "third"]):
        for resource in resources:
            slots.add(resource, key(priority, f"{name}_{resource}"))
    return slots


def test_as_many_start_as_there_are_slots_by_priority():
    slots = filled(gpu=1, io=2, controller=None)
    assert taken(slots) == [
        "first_gpu",
        "first_io",
        "second_io",
        "first_controller",
        "second_controller",
        "third_controller",
    ]
    assert taken(slots) == []
    slots.taken["gpu"] -= 1
    assert taken(slots) == ["second_gpu"]


def test_what_is_not_wanted_never_starts():
    slots = filled(gpu=1)
    assert taken(slots, "second_gpu") == ["second_gpu"]
    slots.taken["gpu"] -= 1
    assert taken(slots) == []


def test_new_keys_give_a_new_order():
    slots = filled(gpu=None)
    slots.sort(lambda i: key(-len(i.stage), i.stage))
    assert taken(slots) == ["second_gpu", "first_gpu", "third_gpu"]
