"""Advice: the bound, the knob and the gain."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dataflow.planning.advice import advise
from dataflow.planning.plan import make_plan
from dataflow.planning.planner import predict
from dataflow.planning.sources.read import read_workload
from dataflow.policy import preset


@pytest.mark.heavy
def test_advice_names_the_bound_the_knob_and_the_gain(costs: str) -> None:
    advice = make_plan(costs, []).advice
    assert advice[0].startswith("both+stream is the fastest: ")
    assert "; without streaming, both is: " in advice[0]
    assert "the reward service bounds both: 32 calls x 20 s / 8 in flight = 80 s a step against" in advice[1]
    assert "in flight would make the GPUs the limit (-" in advice[1]
    assert any(s.startswith("strictly on-policy, mini-batch+stream is the fastest: -") for s in advice)
    for streamed, which in ((0.9, "both+stream"), (1.0, "both")):
        workload, _config = read_workload(costs, [])
        policies = {name: preset(name, workload.mini_batches) for name in ("baseline", "both", "both+stream")}
        base, both, stream = predict(workload, policies)
        rows = [base, both, replace(stream, total_s=both.total_s * streamed)]
        assert advise(workload, rows, policies)[0].startswith(f"{which} is the fastest: ")
    limited = make_plan(costs, ["reward.rpm=12"]).advice
    assert "32 calls at 12 a minute = 160 s a step" in limited[1]
    quick = make_plan(costs, ["reward.concurrency=999", "reward.latency=1", "validation.overlap=true"]).advice
    assert "no policy is faster than baseline" in quick[0]
    assert "the GPU pool bounds" in quick[1]
    assert not any("nothing is faster than baseline" in sentence for sentence in advice)
    lonely = make_plan(costs, ["reward.concurrency=999", "reward.latency=200"]).advice
    assert "the critical path bounds " in lonely[1]
    assert "max_staleness=2 would take" in lonely[1]
    stepwise = make_plan(costs, ["reward.agent=per-step", "reward.concurrency=9", "validation.overlap=true"]).advice
    assert any("reward.agent=continuous" in sentence for sentence in stepwise)


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [8, 11])
def test_near_the_limit_the_advice_agrees_with_its_own_numbers(costs: str, concurrency: int) -> None:
    plan = make_plan(costs, [f"reward.concurrency={concurrency}", "steps=4"])
    said = plan.advice[1]
    if "would make the GPUs the limit" in said:
        load, gpu = re.search(r"= ([\d.,]+) s a step against ([\d.,]+) s of GPU work", said).groups()
        wanted = int(re.search(r"; (\d+) in flight would", said).group(1))
        assert float(load) >= float(gpu)
        assert wanted > concurrency
    else:
        assert "which is the most that more rewards in flight could take off" in said
