"""Fixtures of the tests of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer(tiny_qwen: Path) -> Any:
    from dataflow.models.tokenizer import load_chat_tokenizer

    return load_chat_tokenizer(str(tiny_qwen))
