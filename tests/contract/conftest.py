"""Fixtures of the contract: a judge over HTTP, and a training run of a tiny model in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.contract.rig import ENVIRONMENT, Judge, Trainer, problems, tiny_model

# Before anything imports torch or transformers, which read these once.
os.environ |= ENVIRONMENT


@pytest.fixture
def judge() -> Iterator[Judge]:
    """A judge that scores by :func:`rig.verdict`, until its rule is changed."""
    judge = Judge()
    yield judge
    judge.close()


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Trains a model of two layers on problems with numbers."""
    base = tmp_path_factory.mktemp("contract")
    (base / "template.txt").write_text("{question}\n{response}")
    model, data = tiny_model(base / "tiny"), problems(64, base / "train.jsonl")
    return Trainer(model, data, base / "template.txt", lambda: tmp_path_factory.mktemp("runs"))
