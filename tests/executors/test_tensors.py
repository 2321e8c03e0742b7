"""Tensors outside of batches are the same after they travelled through Ray, and their memory is their own."""

from __future__ import annotations

import pickle

import pytest

torch = pytest.importorskip("torch")

from dataflow.executors.ray.tensors import received, sent  # noqa: E402

TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "bool": torch.tensor([[True], [False]]),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "slice": torch.arange(12).reshape(3, 4)[:, 1],
    "negative zero and NaN": torch.tensor([-0.0, float("nan")]),
    "complex": torch.tensor([1 + 2j]),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    tensor = TENSORS[name]
    buffers: list[pickle.PickleBuffer] = []
    form = pickle.dumps(sent(tensor), protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]  # cannot be written to
    found = received(pickle.loads(form, buffers=shared))
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    dense, other = (each.to_dense() if each.is_sparse else each for each in (tensor, found))
    assert dense.contiguous().reshape(-1).view(torch.uint8).tolist() == other.reshape(-1).view(torch.uint8).tolist()
    if not found.is_sparse:
        found.zero_()


def test_of_a_slice_its_own_values_travel_and_a_gradient_stays() -> None:
    data, _dtype, shape = sent(torch.zeros(1000, 1000)[:2])
    assert (data.nbytes, shape) == (8000, (2, 1000))
    assert received(sent(torch.ones(2, requires_grad=True))).requires_grad
