"""The key of a reward request: a hash of everything that determines its answer.

Invariants:

* Arguments that differ in a value or its type have different keys.
* Equal arguments have the same key in every process and run, in whatever order they were created.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.errors import DataflowError
from dataflow.usercode.failures import is_ours, message_of

Key = bytes

_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class _Standin:
    """Replaces a value whose pickle is not deterministic; no user's value is of this class."""

    kind: str
    parts: Any


def key_of(arguments: Mapping[str, Any], scorer: str = "") -> Key:
    """Returns the key of a reward call, 16 bytes.

    Dicts and sets count in any order, numpy scalars as the Python numbers they equal, arrays and tensors by type, shape
    and content. Any other object counts by its pickle, so by its whole content; if the pickles of equal objects differ,
    the answer is requested again, but never mixed up.

    Args:
        arguments: ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info`` (with ``raw_prompt``). Missing
            ones count as None, others are ignored.
        scorer: identifies what computes the score, such as a judge's model and prompt.

    Raises:
        DataflowError: an argument contains an object that cannot be pickled, such as a lock, an open file or a lambda.
    """
    get = arguments.get
    content = (scorer, get("data_source"), get("solution_str"), get("ground_truth"), get("extra_info"))
    try:
        text = memoryview(_pickled(_ordered(content)))
    except BaseException as error:  # pickling runs the objects' own code
        if is_ours(error):
            raise
        what = f"{type(error).__name__}: {message_of(error)}"
        raise DataflowError(
            f"a request has no key, as its arguments cannot be pickled ({what}); keep such objects out of "
            "extra_info, or set reward.ledger=false and reward.share_equal=false"
        ) from error
    # SHA-256 has hardware support. For 2,048 bytes or more hashlib releases the GIL and, beside busy reward threads,
    # reacquires it only after milliseconds.
    digest = hashlib.sha256()
    for start in range(0, len(text), 2047):
        digest.update(text[start : start + 2047])
    return digest.digest()[:16]


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 4)
    pickler.fast = True  # no memo: otherwise shared and equal strings would differ
    pickler.dump(value)
    return file.getvalue()


def _ordered(value: Any) -> Any:
    """Returns a value that pickles to the same bytes for equal inputs."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is dict:
        try:
            items = sorted(value.items())
        except TypeError:  # keys of several types
            items = sorted(value.items(), key=lambda item: _pickled(item[0]))
        return {key: part if type(part) in _LEAVES else _ordered(part) for key, part in items}
    if kind is list or kind is tuple:
        return kind([part if type(part) in _LEAVES else _ordered(part) for part in value])
    if kind is set or kind is frozenset:
        return _Standin(kind.__name__, sorted(_pickled(_ordered(part)) for part in value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):  # its pickle contains an address
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _Standin(str(value.dtype), (tuple(value.shape), data.numpy().tobytes()))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _Standin(str(value.dtype), (value.shape, _ordered(value.tolist())))
    if isinstance(value, np.generic) and type(value.item()) in _LEAVES:
        return value.item()
    return value
