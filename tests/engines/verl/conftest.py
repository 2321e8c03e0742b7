"""The ranks that several modules run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.ranks import RankHost


@pytest.fixture(scope="session")
def ranks(_no_process_left: None) -> Iterator[RankHost]:
    with RankHost(Path(__file__).parent) as host:
        yield host
