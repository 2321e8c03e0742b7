"""The order of the prompts is the one that torch's random sampler gives with the same seed."""

import itertools

import pytest

from dataflow.data.order import Order, steps


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1, 2**40 + 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 700])
def test_permutations_are_torchs(seed: int, rows: int) -> None:
    import torch

    generator, order = torch.Generator().manual_seed(seed), Order(rows, seed)
    for _ in range(3):
        assert order.permutation() == torch.randperm(rows, generator=generator).tolist()


def test_each_epoch_is_a_permutation_without_its_odd_last_rows() -> None:
    found = list(itertools.islice(steps(10, 4, 3), 6))
    assert all(len(set(a + b)) == 8 for a, b in zip(found[::2], found[1::2], strict=True))
    assert found[:2] != found[2:4] != found[4:]
    assert list(itertools.islice(steps(10, 4, None), 3)) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
