"""Values of the run's own process, such as prompts, as they travel to the stages that read them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from dataflow.usercode.pickling import dumps


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

    def kept(self) -> Sent:
        """Returns it with bytes of its own, which later changes of the value's arrays do not reach."""
        return Sent(self._data, [pickle.PickleBuffer(bytes(buffer.raw())) for buffer in self._buffers])

    def __copy__(self) -> Sent:
        return self  # it does not change; without this method, a copy would be the value

    def __deepcopy__(self, _memo: Any) -> Sent:
        return self.kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return _value, (pickle.PickleBuffer(self._data), *self._buffers)


def _value(data: Any, *buffers: Any) -> Any:
    return pickle.loads(data, buffers=buffers)
