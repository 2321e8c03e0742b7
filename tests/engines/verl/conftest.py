"""The ranks that several modules run, and trained models in the tests' own process."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.verl.models import Fresh, build
from tests.rigs.ranks import RankHost, alone


@pytest.fixture(scope="session")
def ranks(_no_process_left: None) -> Iterator[RankHost]:
    with RankHost() as host:
        yield host


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Leaves the environment of this process as it was; in the block it is no rank, unless it was one already."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    for name in set() if torch.distributed.is_initialized() else set(environment) - set(alone()):
        os.environ.pop(name)
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


@pytest.fixture
def make() -> Iterator[Any]:
    """Builds trained models in this process, and closes them."""
    built: list[Any] = []

    def one(model: Path, *, by: Any = build, keep: bool = False, **options: Any) -> Any:
        while built and not keep:
            built.pop().close()
        built.append(by(model, **options))
        return built[-1]

    with as_it_was():
        yield one
        while built:
            built.pop().close()


@pytest.fixture(scope="module")
def fresh(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    """One trainer of a module, with its first weights and other options of the algorithm at each call."""
    with as_it_was():
        made = Fresh(tiny_qwen, tmp_path_factory.mktemp("fresh") / "state")
        yield made
        made.trainer.close()


@pytest.fixture(scope="session")
def untied_qwen(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with an output layer of its own and without a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = copy.deepcopy(AutoConfig.from_pretrained(tiny_qwen))
    config.tie_word_embeddings = False
    path = tmp_path_factory.mktemp("models") / "untied-qwen"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path
