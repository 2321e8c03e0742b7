"""Fixtures of all tests: a quiet, offline environment and a tiny model to test engines with."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dataflow.engines.choice import vllm_device
from dataflow.system.secrets import KNOWN

# Before anything imports torch, ray or transformers: they read these once. Ray's workers inherit them.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

# What modules hold lives as long as the process: without a look at all of it at each collection of garbage, importing
# them takes a sixth less.
gc.disable()

# A shell ignores SIGINT in what it starts in the background, and nohup ignores SIGHUP. Processes inherit that, but no
# handler that does nothing: the tests of signals start theirs with the defaults.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# `make test` draws the same examples each time, so that it passes or fails for what was changed; `make test-fast`
# draws fewer. New examples are searched for with pytest --hypothesis-profile=search. How long an example takes depends
# on what else the machine does, so only pytest's time-out bounds it.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("full", UNHURRIED, max_examples=60, derandomize=True)
settings.register_profile("fast", UNHURRIED, max_examples=6, stateful_step_count=15)
settings.register_profile("search", UNHURRIED, max_examples=1000)
settings.load_profile("full")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COSTS = """
steps: 6
prompts: 8
responses: 4
mini_batches: 4
stages: {rollout: 10, old_log_prob: 5, actor_update: 8, sync_weights: 1, val_rollout: 2, checkpoint: 3}
reward: {latency: 20, concurrency: 8}
validation: {every: 3, samples: 4, overlap: false}
checkpoint: {every: 3}
"""


# Files that take a minute or more run first, so that no worker is left alone with one at the end. Those that share a
# Ray run one after the other, so that each worker starts it once.
FIRST = (
    "running/test_reward_model_runs.py",
    "running/test_session.py",
    "executors/test_ray_restart.py",
    "executors/test_executors.py",
    "executors/test_ray.py",
    "executors/test_streaming.py",
    "faults/test_deaths.py",
    "verl/test_state.py",
    "executors/test_gpus.py",
    "executors/test_parts.py",
    "vllm/test_engine.py",
    # The longest of `make test-fast`.
    "system/test_supervisor.py",
    "tests/test_cli.py",
    "project/test_bad_input.py",
    "planning/test_planner.py",
    "models/test_probe.py",
    "running/test_several_agents.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shares_ray: the module's tests may use the local Ray of their pytest worker")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: at for at, name in enumerate(FIRST)}
    if vllm_device() == "cuda":
        reason = "samples with vLLM on the CPU: the one that is installed is for GPUs, and 'make gpu-check' tests it"
        for item in items:
            if item.get_closest_marker("vllm") and item.path.stem != "test_gpu":
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(order)))


def pytest_collection_finish() -> None:
    import cloudpickle  # type: ignore[import-untyped]

    # Workers cannot import the tests: another package of that name may be installed.
    if "tests" in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules["tests"])
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> Iterator[None]:
    """Fails the session if a worker, a judge or a Ray daemon that some test started outlives the tests."""
    from tests.rigs.processes import below, command, left

    yield
    # Python's own helper of multiprocessing ends with this process.
    started = [p for p in below() if "resource_tracker" not in " ".join(command(p))]
    alive = left(started, timeout=15)
    assert not alive, f"tests left processes behind: {alive}"


_FORKS: list[str] = []


def _note_fork() -> None:
    stack = traceback.format_stack(limit=8)
    if "subprocess.py" not in stack[-2]:  # Ray's preexec_fn: another program follows at once
        _FORKS.append("".join(stack))


os.register_at_fork(before=_note_fork)


@pytest.fixture(autouse=True)
def _no_fork() -> Iterator[None]:
    """Fails a test that forks this process: it has threads, whose locks nobody releases in the child."""
    _FORKS.clear()
    yield
    assert not _FORKS, f"start a process of its own instead (subprocess):\n{_FORKS[0]}"


@pytest.fixture(autouse=True)
def _secrets_forgotten() -> Iterator[None]:
    """Forgets the secrets of a test, which would be masked in the texts of the next one."""
    yield
    KNOWN.clear()


@pytest.fixture(scope="session", autouse=True)
def _problems_made_once() -> Iterator[None]:
    """Generates the problems of each size and seed once: a run's 4,512 take 0.2 s, and hundreds of tests begin one."""
    from dataflow.models import problems

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "generate", functools.cache(problems.generate))
        yield


class SharedRay:
    """The local Ray that all modules of one pytest worker share."""

    def __init__(self) -> None:
        self._executor: Any = None

    def open(self) -> None:
        """Starts Ray unless it is up; a test may have shut it down."""
        import asyncio

        import ray

        from dataflow.executors.ray import RayExecutor
        from dataflow.graph import Pipeline

        if ray.is_initialized():
            return
        # Ray assigns GPUs by count, so tests of services that request them need none.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')
            self._executor = RayExecutor(num_cpus=2)
            asyncio.run(self._executor.open(Pipeline([])))

    def close(self) -> None:
        import asyncio

        if self._executor is not None:
            asyncio.run(self._executor.close())
            self._executor = None


@pytest.fixture(scope="session")
def _shared_ray(_no_process_left: None) -> Iterator[SharedRay]:
    shared = SharedRay()
    yield shared
    shared.close()


@pytest.fixture(scope="module", autouse=True)
def _no_ray_elsewhere(request: pytest.FixtureRequest, _shared_ray: SharedRay) -> None:
    """Stops the shared Ray before a module that is not marked, which may start one of its own."""
    if request.node.get_closest_marker("shares_ray") is None:
        _shared_ray.close()


@pytest.fixture(scope="module")
def local_ray(request: pytest.FixtureRequest, _shared_ray: SharedRay) -> None:
    """A running Ray with 2 CPUs and 2 GPUs (by count), shared by all modules marked ``shares_ray``.

    A ``RayExecutor`` that finds Ray running uses it and leaves it running.
    """
    assert request.node.get_closest_marker("shares_ray"), "mark the module: pytestmark = pytest.mark.shares_ray"
    _shared_ray.open()


@pytest.fixture(scope="module")
def by_value(request: pytest.FixtureRequest, local_ray: None) -> Iterator[None]:
    """Sends what is defined in the module itself to Ray's workers by value, as they cannot import it."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Qwen2 (2 layers, tied embeddings) and a byte-level tokenizer for chats."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytewise = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    config = Qwen2Config(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    path = tmp_path_factory.mktemp("models") / "tiny-qwen"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def costs(tmp_path: Path) -> str:
    """A costs.yaml of a job that its rewards bound."""
    (tmp_path / "costs.yaml").write_text(COSTS)
    return str(tmp_path / "costs.yaml")


@pytest.fixture(autouse=True, scope="module")
def _engine_for_the_cpu() -> Iterator[None]:
    """Names the module that imports verl's engine for another device: later tests could not train in this process."""
    yield
    engine = sys.modules.get("verl.workers.engine.fsdp.transformer_impl")
    if engine is not None and not sys.modules["torch"].cuda.is_available():
        from dataflow.engines.verl.cpu import NAME

        assert engine.device_name == NAME, "call dataflow.engines.verl.cpu.install() before verl's trainer is imported"


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The messages of warnings and errors that are logged during the test."""
    from tests.rigs.logs import logged

    with logged() as messages:
        yield messages
