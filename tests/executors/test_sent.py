"""Values of the run's own process as they travel: pickled once, read as the value itself."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.cluster.local import INLINE
from dataflow.executors.ray.executor import RayExecutor
from dataflow.executors.ray.sent import Sent, fixed_form


def read(sent: Sent) -> object:
    """Returns what a worker reads: Ray pickles with buffers apart, and gives them to the reader without a copy."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[memoryview(buffer.raw()).toreadonly() for buffer in buffers])


@pytest.mark.parametrize("value", [None, {"a": [1, "b"]}, b"", "text"])
def test_a_reader_gets_the_value_itself(value):
    assert read(Sent.of(value)) == value


def test_a_batch_keeps_its_columns_and_groups():
    prompts = Batch([3, 4], {"prompt_ids": [[1, 2], [3]]}, {"weights_version": 2})
    found = read(Sent.of(prompts))
    assert isinstance(found, Batch)
    assert found.ids == (3, 4)
    assert [list(row) for row in found["prompt_ids"]] == [[1, 2], [3]]
    assert found.meta == prompts.meta


def test_large_arrays_stay_out_of_the_pickle_and_count_for_its_size():
    array = np.arange(100_000)
    sent = Sent.of({"a": array})
    assert array.nbytes <= sent.size < array.nbytes + 1000
    assert np.array_equal(read(sent)["a"], array)


def test_a_value_can_be_read_more_than_once_and_its_readers_share_nothing():
    sent = Sent.of([[1], [2]])
    first = read(sent)
    first[0].append(5)
    assert read(sent) == [[1], [2]]


def test_a_copy_is_sent_as_the_original_and_a_deep_one_has_bytes_of_its_own():
    array = np.zeros(50_000)
    sent = Sent.of({"a": array})
    shallow, deep = copy.copy(sent), copy.deepcopy([sent])[0]
    array[0] = 1.0
    assert [type(each) for each in (shallow, deep)] == [Sent, Sent]
    assert [read(each)["a"][0] for each in (sent, shallow, deep)] == [1.0, 1.0, 0.0]
    assert shallow.size == deep.size == sent.size


def test_a_small_value_is_no_object_of_rays_and_its_bytes_are_counted(monkeypatch):
    import ray

    put = []
    monkeypatch.setattr(ray, "put", lambda value: put.append(value) or "ref")
    executor = RayExecutor()
    small = executor.put("x" * 100)
    assert isinstance(small, Sent)
    assert not put
    assert 100 < executor.bytes_put == small.size < 200
    assert executor.put("x" * INLINE) == "ref"
    assert [read(sent) for sent in put] == ["x" * INLINE]


def test_a_small_value_is_what_it_was_when_it_was_put():
    array = np.arange(3)
    batch = Batch([0, 1], {"x": np.zeros(2)})
    sent = RayExecutor().put({"array": array, "batch": batch})
    array[:] = 7
    batch["x"][:] = 7
    found = read(sent)
    assert found["array"].tolist() == [0, 1, 2]
    assert found["batch"]["x"].tolist() == [0, 0]


@pytest.mark.parametrize("value", [None, 7, ("a", 2.5), frozenset({1})])
def test_a_value_that_cannot_change_is_its_own_fixed_form(value):
    assert fixed_form(value) == (value,)


def test_the_fixed_form_of_a_batch_is_not_reached_by_changes():
    batch = Batch([3, 4], {"score": np.array([1.0, 2.0], dtype=object), "chat": [["a"], ["b"]]}, {"facts": ["x"]})
    (form,) = fixed_form(batch)
    batch["chat"][0].append("spoilt")
    batch.meta["facts"].append("spoilt")
    one, other = form.value(), form.value()
    one["chat"][0].append("own")
    assert (other["chat"][0], other.meta["facts"]) == (["a"], ["x"])


LARGE = Batch([0], {"a": torch.zeros((1, INLINE // 4 + 1))})


@pytest.mark.parametrize("value", [[1], {"a": 1}, np.zeros(2), LARGE, Batch(range(1025), {"n": [None] * 1025})])
def test_large_values_and_those_that_may_take_long_to_pickle_have_no_fixed_form(value):
    assert fixed_form(value) is None


def test_arrays_are_read_only_as_those_from_another_process():
    (form,) = fixed_form(Batch([0, 1], {"number": np.array([1.5, 2.5])}, {"facts": np.zeros(3)}))
    assert not form.value().meta["facts"].flags.writeable
    assert not read(form).meta["facts"].flags.writeable
