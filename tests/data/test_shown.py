"""What a prompt shows is kept and sent once for all rows of its group."""

from __future__ import annotations

import pickle

import torch

from dataflow.batch import Batch
from dataflow.data.shown import Shown
from dataflow.engines.samples import with_shown


def test_the_rows_of_a_group_share_it_here_and_in_another_process() -> None:
    shown = Shown({"pixel_values": torch.rand(64, 1176)}, torch.zeros(3, 4, dtype=torch.int64))
    rows = Batch([0], {"multi_modal_inputs": [shown]}).repeat(8)
    assert all(one is shown for one in rows["multi_modal_inputs"])
    sent = pickle.dumps(rows, 5)
    assert len(sent) < 1.5 * 64 * 1176 * 4
    there = pickle.loads(sent)["multi_modal_inputs"]
    assert all(one is there[0] for one in there)
    assert torch.equal(there[0].inputs["pixel_values"], shown.inputs["pixel_values"])


def test_a_response_counts_on_from_the_largest_position_of_its_prompt() -> None:
    # Two tokens of text, an image of 2 x 2 patches, and one more of text; then a response of two tokens.
    image = torch.tensor([[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]])
    text = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 6, 7, 8]])  # padded by one on the left
    (found,) = with_shown(text, [Shown({}, image)], 8)
    assert found[0].tolist() == text[0].tolist()
    assert found[1:, 1:8].tolist() == image.tolist()
    assert found[1:, 8:].tolist() == [[5, 6]] * 3
