"""The order in which a run reads its prompts: the permutations of torch's random sampler, without torch.

A run draws the same prompts as verl with the same seed. torch's import takes seconds, which the run's own process, that
reads the prompts, would spend for this alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Order:
    """Permutations of row numbers, as ``torch.randperm`` draws them one after another from a generator with a seed.

    Args:
        rows: number of rows, below 2**32 / 20 (beyond, torch draws 64 bits for each).
        seed: of the generator.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        # torch's generator is a Mersenne Twister, too, and takes the low 32 bits of its seed.
        self._bits = np.random.RandomState(seed & 0xFFFFFFFF)._bit_generator  # type: ignore[attr-defined]

    def permutation(self) -> list[int]:
        """Returns the next one."""
        found, rows = list(range(self._rows)), self._rows
        if rows < 2:
            return found
        others = np.arange(rows - 1) + self._bits.random_raw(rows - 1) % np.arange(rows, 1, -1, dtype=np.uint64)
        for i, other in enumerate(others.astype(np.int64).tolist()):
            found[i], found[other] = found[other], found[i]
        return found


def steps(rows: int, prompts: int, seed: int | None) -> Iterator[list[int]]:
    """Yields the row numbers of each step, epoch after epoch; an epoch's last rows are dropped if they fill no step.

    Args:
        rows: number of rows.
        prompts: rows of a step.
        seed: of the order, another permutation for each epoch; None for the order of the rows.
    """
    order = None if seed is None else Order(rows, seed)
    while True:
        epoch = list(range(rows)) if order is None else order.permutation()
        for at in range(0, rows - prompts + 1, prompts):
            yield epoch[at : at + prompts]
