"""Values of the run's own process, such as prompts, as they travel to the stages that read them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from dataflow.batch import Batch
from dataflow.cluster.local import INLINE
from dataflow.usercode.copies import is_immutable
from dataflow.usercode.pickling import dumps

_ROWS = 1024
"""Most rows of a small Batch: objects, such as texts, are not in its ``nbytes``."""


class Sent:
    """A value that is pickled once; unpickling this object gives the value itself.

    A small one is an argument of each task that reads it, as ``ray.put`` writes any value to shared memory: that takes
    1 ms more of the run's process, while nothing else starts, and a task that reads it from there begins later.

    Args:
        data: the pickle.
        buffers: that stay out of it; in shared memory they are not copied for a reader.
    """

    __slots__ = ("_buffers", "_data", "size")

    def __init__(self, data: bytes, buffers: Sequence[pickle.PickleBuffer]) -> None:
        self._data = data
        self._buffers = tuple(buffers)
        self.size = len(data) + sum(buffer.raw().nbytes for buffer in buffers)
        """In bytes."""

    @classmethod
    def of(cls, value: Any) -> Sent:
        """Pickles a value."""
        buffers: list[pickle.PickleBuffer] = []
        return cls(dumps(value, buffers.append), buffers)

    def value(self) -> Any:
        """Returns the value; its arrays are read-only, as those that Ray hands over."""
        return _value(self._data, *(buffer.raw().toreadonly() for buffer in self._buffers))

    def kept(self) -> Sent:
        """Returns it with bytes of its own, which later changes of the value's arrays do not reach."""
        return Sent(self._data, [pickle.PickleBuffer(bytes(buffer.raw())) for buffer in self._buffers])

    def __copy__(self) -> Sent:
        return self  # it does not change; without this method, a copy would be the value

    def __deepcopy__(self, _memo: Any) -> Sent:
        return self.kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return _value, (pickle.PickleBuffer(self._data), *self._buffers)


def fixed_form(value: Any) -> tuple[Any] | None:
    """Returns a value in a form that later changes do not reach; None if making it could take long.

    What cannot change is its own form, and that of a small Batch is a :class:`Sent`.
    """
    if is_immutable(value):
        return (value,)
    # Others, such as weights, are not pickled to learn how large they are.
    if not isinstance(value, Batch) or value.nbytes > INLINE or len(value) > _ROWS:
        return None
    sent = Sent.of(value)
    return (sent.kept(),) if sent.size <= INLINE else None


def _value(data: Any, *buffers: Any) -> Any:
    return pickle.loads(data, buffers=buffers)
