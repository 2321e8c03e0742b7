"""What a server's reply says of a sample."""

from __future__ import annotations

import pytest

from dataflow.engines.servers.client import ServerError
from dataflow.engines.servers.protocol import finish_of


@pytest.mark.parametrize(
    ("reason", "last", "finish"),
    [("stop", 1, "stop"), ("length", 7, "length"), ("length", 5, "stop"), ("stop", 7, "stop")],
)
def test_a_sample_that_ends_at_the_limit_is_whole_whatever_the_server_calls_it(
    reason: str, last: int, finish: str
) -> None:
    assert finish_of(reason, [9, last], [1, 5]) == finish


def test_a_sample_that_was_not_finished_is_an_error() -> None:
    with pytest.raises(ServerError, match="ended the sample with 'abort'"):
        finish_of("abort", [9, 1], [1])
