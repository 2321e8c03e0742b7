"""Runs whose reward model shares the GPUs of trainer and engine: it is awake only while it scores."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.errors import ConfigError
from dataflow.policy import PRESETS, expand, preset
from dataflow.testing import check_trace
from dataflow.timeline import perfetto
from tests.rigs.costs import RandomCosts
from tests.rigs.scheduling import simulate

ROOT = Path(__file__).parents[2]
PIPELINE = str(ROOT / "pipelines" / "gsm8k_grpo.py")
SMALL = (
    "engine.rollout=hf", "steps=3", "data.prompts=4", "engine.n=2", "engine.max_tokens=8", "data.max_prompt_length=200",
    "trainer.mini_batches=2", "val.every=2", "data.val_size=4", "checkpoint.export=false",
    "executor=inline", "data.train_size=200", "name=a", "--quiet",
)  # fmt: skip


class Sleepy(BaseHTTPRequestHandler):
    """A server that answers requests only while it is awake, and remembers when that was."""

    protocol_version = "HTTP/1.1"
    asleep = True
    changes: list[tuple[float, bool]]

    def do_GET(self) -> None:
        known = {"/is_sleeping": {"is_sleeping": self.asleep}, "/v1/models": {"data": [{"id": "rm"}]}}
        self._answer(known.get(self.path, {}))

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/classify":
            assert not self.asleep
            score = len(json.loads(text)["messages"][-1]["content"]) % 7
            self._answer({"data": [{"index": 0, "probs": [score]}]})
            return
        type(self).asleep = self.path.startswith("/sleep")
        self.changes.append((time.time(), self.asleep))
        self._answer({})

    def _answer(self, found: Any) -> None:
        text = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Sleepy.asleep, Sleepy.changes = True, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Sleepy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_the_model_is_awake_only_while_it_scores_and_nothing_else_runs_then(
    url: str, tiny_qwen: Path, tmp_path: Path
) -> None:
    keys = ["policy=both", f"model.path={tiny_qwen}", f"runs={tmp_path}", f"reward.models.rm.url={url}"]
    assert main(["run", PIPELINE, *SMALL, *keys, "reward.models.rm.placement=colocated"]) == 0
    counts = json.loads((tmp_path / "a" / "summary.json").read_text())["rewards"]
    assert (counts["scored"], counts["failed"]) == (counts["requested"], 0)
    trace = perfetto.load(str(tmp_path / "a"))
    scoring = [s for s in trace.spans if s.stage in ("reward_request", "val_score")]
    assert len(scoring) == 3 + 2
    assert {s.resource for s in scoring} == {"gpu"}
    asked = [m for m in trace.marks if m.name == "reward"]
    assert len(asked) >= 3 * 4 * 2
    for mark in asked:
        assert any(s.begin <= mark.begin <= mark.end <= s.end for s in scoring)
    woken = [begin for begin, asleep in Sleepy.changes if not asleep]
    slept = [end for end, asleep in Sleepy.changes if asleep]
    assert len(woken) == len(slept) == 6, "three steps, and the validations of steps 0, 2 and 3"
    for s in trace.on("gpu"):
        if s not in scoring:
            assert not any(s.begin < end and s.end > begin for begin, end in zip(woken, slept, strict=True)), s.stage


def pipeline(*keys: str) -> Any:
    module = load_pipeline_file(Path(PIPELINE))
    return module.pipeline(
        parse_overrides(module.Config, ["reward.models.rm.url=http://h:1", "data.prompts=16", *keys])
    )


@pytest.mark.parametrize("policy", [*PRESETS, "both+stream"])
def test_every_policy_runs_with_it(policy: str) -> None:
    made = pipeline("reward.models.rm.placement=colocated", "val.every=3")
    graph = expand(made, preset(policy, 4), steps=6, mini_batches=4, groups=16)
    trace, _ = simulate(graph, RandomCosts(0, 16))
    check_trace(trace, graph)


def test_the_stages_that_ask_are_on_the_gpus_and_wait_for_the_whole_rollout() -> None:
    plain, shared = pipeline(), pipeline("reward.models.rm.placement=colocated")
    assert (plain.by_name["reward_request"].on, plain.by_name["reward_request"].per) == ("controller", "chunk")
    for name in ("reward_request", "val_score"):
        assert (shared.by_name[name].on, shared.by_name[name].per) == ("gpu", "step")
        assert shared.by_name[name].services["sleeper"].urls == ("http://h:1",)
    assert shared.by_name["reward_collect"].on == "reward"
    restarts = [made.by_name["reward_collect"].host.restarts for made in (plain, shared)]
    assert restarts == [3, 0], "the run goes back to its checkpoint, as a rebuilt agent would wake the model by itself"


def test_a_stage_that_asks_in_another_way_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"rm.placement=colocated: stage 'greedy\w*' asks for rewards while the model"
    ):
        pipeline("reward.models.rm.placement=colocated", "algorithm.adv_estimator=remax")
