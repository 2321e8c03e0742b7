"""A judge that sends the API key back: no file and no stream of a run may contain it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from loguru import logger

from dataflow.batch import Batch
from dataflow.cli import main
from dataflow.errors import RewardFailed
from dataflow.reward_agent import Retry, RewardAgent
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.ledger import Ledger
from tests.faults.rig.server import FaultServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(180)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
KEY = "Zq7/Wm3+Lk9pTx2vNb8RcYd5Hs4"
HOWS = ("score", "no_json", "header", "401", "307")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TEST_JUDGE_SESAME", KEY)  # by its name no secret: it is one because the judge uses it
    return "TEST_JUDGE_SESAME"


def everything(*directories: Path) -> Iterator[tuple[str, str]]:
    for directory in directories:
        for file in directory.rglob("*"):
            if file.is_file():
                yield file.name, file.read_bytes().decode("latin-1")


@pytest.mark.parametrize("how", HOWS)
def test_no_error_and_no_answer_holds_it(server: FaultServer, key: str, tmp_path: Path, how: str) -> None:
    async def body() -> str:
        agent = RewardAgent(
            Judge(server.url, api_key_env=key),
            retry=Retry(tries=2, backoff_s=0.01, max_backoff_s=0.01),
            ledger=Ledger(tmp_path / "ledger.db"),
        )
        columns = {"response_text": ["#### 7"], "ground_truth": ["7"], "data_source": ["d"]}
        agent.submit(1, Batch([0], columns))
        try:
            rewards = await agent.collect(1)
        except RewardFailed as error:
            return _all_of(error)
        finally:
            await agent.close()
        assert how == "score"
        assert "***" in rewards["explanation"][0]
        return repr(rewards.columns) + repr(rewards.meta)

    server.behave(f"echo:{how}")
    text = asyncio.run(body())
    server.behave("ok")
    assert KEY not in text
    if how not in ("score", "header"):
        assert "***" in text
    for name, content in everything(tmp_path):
        assert KEY not in content, name


def _all_of(error: BaseException) -> str:
    """Returns the texts of an exception and its causes."""
    text = "".join(traceback.format_exception(error))
    ahead: list[BaseException | None] = [error]
    while ahead:
        one = ahead.pop()
        if one is not None:
            text += f"{one!r} {one} {vars(one)} {one.args}"
            ahead += [one.__cause__, one.__context__]
    return text


def run(keys: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Returns the exit code of a run and all that it wrote anywhere, by what is looked through here."""
    code = main(["run", PIPELINE, *keys])
    out, err = capfd.readouterr()
    for name, content in [("stdout", out), ("stderr", err), *everything(tmp_path)]:
        assert KEY not in content, name
    return code, err


@pytest.fixture
def keys(tiny_qwen: Path, tmp_path: Path, key: str) -> list[str]:
    return [
        "executor=inline", "engine.rollout=hf", "steps=1", "data.prompts=8", "engine.n=2", "engine.max_tokens=4",
        "data.max_prompt_length=200", "val.every=0", f"model.path={tiny_qwen}", f"runs={tmp_path / 'runs'}",
        f"judge.api_key_env={key}",
        "reward.backoff=0", "reward.tries=2", "reward.share_equal=false",
    ]  # fmt: skip


def test_whole_runs_keep_it(
    server: FaultServer, keys: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.behave("echo:mixed")
    handled = ["reward.on_failure=score:0", "reward.max_failed_share=1"]
    code, err = run([*keys, *handled, f"judge.url={server.url}", "name=handled"], tmp_path, capfd)
    assert code == 0
    assert "answered 500: you sent Bearer ***" in err  # the warning of the first failure
    ledger = b"".join(file.read_bytes() for file in tmp_path.glob("runs/handled/rewards.sqlite*"))
    assert b"you sent Bearer ***" in ledger  # in an answer and in a story
    assert b"Score: " in ledger
    assert b"answered 500" in ledger

    server.behave("echo:401")
    address = server.url.replace("http://", f"http://me:{quote(KEY, safe='')}@")
    mine = [text for text in keys if not text.startswith("judge.api_key_env")]
    code, err = run([*mine, f"judge.url={address}", "name=login", "seed=2"], tmp_path, capfd)
    server.behave("ok")
    assert code == 1
    assert "answered 401: you sent Basic ***" in err
    assert f"url: http://***@{server.url[7:]}" in (tmp_path / "runs" / "login" / "config.yaml").read_text()


def test_the_log_shows_no_values_of_variables(capsys: pytest.CaptureFixture[str], key: str) -> None:
    from dataflow.running.session import prepare_logging

    def fail(secret: str) -> None:
        raise ValueError(len(secret))

    Judge("http://h", api_key_env=key)
    prepare_logging()
    try:
        try:
            fail(KEY)
        except ValueError as error:
            logger.opt(exception=error).error("of {}", KEY)
    finally:
        logger.remove()
    assert "of ***" in capsys.readouterr().err
