"""Managers written for verl's reward loop, verl's own among them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.managers import TokensUnknown, build_manager
from dataflow.usercode.load import is_async, name_of

pytestmark = pytest.mark.timeout(120)


def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return float(ground_truth)


async def late(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return {"score": float(ground_truth), "why": solution_str}


def ask(truth: Any = "1", text: str = "text", **extra: Any) -> dict[str, Any]:
    return {"data_source": "d", "solution_str": text, "ground_truth": truth, "extra_info": extra}


def tokens(truth: Any = "1", text: str = "text", *more: int) -> dict[str, Any]:
    """With the tokens of Letters, as the agent passes them."""
    ids = [*map(ord, text), *more]
    return ask(truth, text, response_ids=ids, response_length=len(ids))


def score(manager: Any, **arguments: Any) -> Any:
    return asyncio.run(manager.compute_score(**arguments))


VERL = """
class Mine:
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None):
        self.config, self.tokenizer, self.score, self.router = config, tokenizer, compute_score, reward_router_address
    async def run_single(self, data):
        item = data[0]
        ids = item.batch["responses"]
        valid = int(item.batch["attention_mask"][-ids.shape[-1]:].sum())
        text = self.tokenizer.decode(ids[:valid], skip_special_tokens=True)
        rows = item.non_tensor_batch
        score = self.score(rows["data_source"], text, rows["reward_model"]["ground_truth"], rows["extra_info"])
        return {"reward_score": score * self.config.reward.get("scale", 1), "reward_extra_info": {"length": valid}}

class Silent(Mine):
    async def run_single(self, data): return None
"""


class Letters:
    """A tokenizer of one letter a token; 0 is eos and pad."""

    eos_token_id = pad_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(int(i)) for i in ids if int(i)).replace("~", "")  # ~ is special


@pytest.fixture
def verl_path(tmp_path: Path) -> str:
    file = tmp_path / "verls.py"
    file.write_text(VERL)
    return str(file)


def equal(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    assert "response_ids" not in extra_info
    return float(solution_str == ground_truth)


@pytest.mark.heavy
def test_a_manager_written_for_verl(verl_path: str) -> None:
    manager = build_manager("Mine", equal, verl_path, tokenizer=Letters(), config={"reward": {"scale": 3}})
    assert is_async(manager.compute_score)
    assert name_of(manager.compute_score) == "Mine"
    assert score(manager, **tokens("yes", "yes")) == {"score": 3, "acc": 3, "length": 3}
    assert score(manager, **tokens("ye", "yes", 0)) == {"score": 0, "acc": 0, "length": 4}


@pytest.mark.heavy
def test_what_a_call_may_lack(verl_path: str) -> None:
    with pytest.raises(TokensUnknown) as unknown:
        score(build_manager("Mine", equal, verl_path, tokenizer=Letters()), **ask())
    assert unknown.value.fatal
    with pytest.raises(ValueError, match="run_single returned a NoneType without 'reward_score'"):
        score(build_manager("Silent", equal, verl_path, tokenizer=Letters()), **tokens())


@pytest.mark.heavy
def test_a_tokenizer_by_its_path(verl_path: str, tiny_qwen: Path) -> None:
    from transformers import AutoTokenizer

    manager = build_manager("Mine", equal, verl_path, tokenizer=str(tiny_qwen))
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen)
    text = "It is 3 + 4 = 7.\n#### 7, \u00fc\u4e2d"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert score(manager, **ask(text, text, response_ids=[*ids, tokenizer.eos_token_id]))["length"] == len(ids) + 1
    with pytest.raises(ConfigError, match="no tokenizer can be loaded from /none"):
        build_manager("Mine", equal, verl_path, tokenizer="/none")


def test_what_verls_managers_need(verl_path: str) -> None:
    with pytest.raises(ConfigError, match="'Mine' decodes responses, as verl's managers do: give the option 'token"):
        build_manager("Mine", equal, verl_path)
    with pytest.raises(ConfigError, match=r"'Mine' cannot be built with .*unexpected keyword argument 'worker'"):
        build_manager("Mine", equal, verl_path, tokenizer=Letters(), worker=3)


@pytest.mark.heavy
@pytest.mark.parametrize(("reward", "length"), [(plain, 6), (plain, 7), (late, 10)])
def test_verls_own_dapo_gives_the_same(tmp_path: Path, reward: Any, length: int) -> None:
    file = tmp_path / "own.py"
    file.write_text("from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager\n")
    buffer = {"enable": True, "len": 4, "penalty_factor": 0.5, "log": True}
    config = {"reward": {"reward_kwargs": {"max_resp_len": 10, "overlong_buffer_cfg": buffer}}}
    theirs = build_manager("DAPORewardManager", reward, str(file), tokenizer=Letters(), config=config)
    options = {"overlong_buffer_len": 4, "max_response_length": 10, "overlong_penalty_factor": 0.5, "log": True}
    ours = build_manager("dapo", reward, **options).compute_score
    arguments = tokens(text="x" * length)
    result = score(theirs, **arguments)
    same = asyncio.run(ours(**arguments)) if is_async(ours) else ours(**arguments)
    assert {name: value if name == "why" else float(value) for name, value in result.items()} == same
