"""The reward object of a served model: what it sends, what it makes of a reply, and what it says of errors."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.config.served import PromptConfig, ServedModelConfig
from dataflow.errors import ConfigError
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge.client import JudgeError
from dataflow.rewards.models.served import ServedReward
from tests.rigs.reward_servers import reward_server

pytestmark = pytest.mark.timeout(90)

WORDS = ["<s>", "</s>", "<u>", "<a>", "one", "two", "three", "four", "five", "six", "ten", "unknown"]
PLAIN = "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content }} {% endfor %}"
WITH_BOS = "<s> " + PLAIN
QUESTION = {"raw_prompt": [{"role": "user", "content": "one two"}]}


def model(path: Path, template: str | None = WITH_BOS, positions: int | None = 64, ends: bool = False) -> str:
    """Saves a tokenizer of whole words that begins each text with <s>, and ends it with </s> if it should."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="unknown"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = "<s> $A </s>" if ends else "<s> $A"
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "unknown"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text("{}" if positions is None else f'{{"max_position_embeddings": {positions}}}')
    return str(path)


def words(ids: Sequence[int]) -> str:
    return " ".join(WORDS[number] for number in ids)


def run(body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await body

    return asyncio.run(limited())


def ask(server: dict[str, Any] | None = None, text: str = "three four", **options: Any) -> tuple[Any, Any]:
    """Returns the columns, or the error, and the request's path and body."""

    async def body() -> tuple[Any, Any]:
        async with reward_server(**(server or {})) as one:
            reward = ServedReward("rm", one.url, **options)
            try:
                columns = await reward.compute_score("d", text, "7", QUESTION)
            except JudgeError as error:
                columns = error
            await reward.close()
            return columns, one.bodies[0]

    return run(body())


def score(number: float) -> dict[str, Any]:
    return {"score": lambda _body: number}


@pytest.mark.heavy
@pytest.mark.parametrize("template", [PLAIN, WITH_BOS])
def test_the_conversation_is_sent_as_token_ids_with_one_begin(tmp_path: Path, template: str) -> None:
    columns, (path, body) = ask(score(-3.25), path=model(tmp_path, template))
    assert (path, body["model"], body["use_activation"]) == ("/classify", "rm", False)
    assert words(body["input"][0]) == "<s> <u> one two <a> three four"
    assert columns == {"score": -3.25, "tokens": 7, "truncated": 0}


@pytest.mark.heavy
def test_a_long_input_loses_its_begin_and_says_so(tmp_path: Path, logged: list[str]) -> None:
    async def body() -> None:
        async with reward_server() as one:
            reward = ServedReward("rm", one.url, path=model(tmp_path, positions=6))
            for text in ("three four five", "three", "three four five six"):
                columns = await reward.compute_score("d", text, "7", QUESTION)
                assert columns["truncated"] == max(0, len(text.split()) - 1)
            assert words(one.bodies[0][1]["input"][0]) == "<s> two <a> three four five"
            assert reward.usage()["truncated"] == 2
            assert reward.tokens(solution_str="x" * 1000) == 6
            await reward.close()

    run(body())
    assert sum("an input has 2 tokens more than its 6" in line for line in logged) == 1
    assert sum("WARNING" in line for line in logged) == 1


@pytest.mark.heavy
def test_a_template_and_a_limit_replace_those_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "rm.jinja"
    file.write_text("{% for m in messages %}{{ m.content }} {% endfor %}ten")
    options = {"path": model(tmp_path / "m", None), "template": str(file), "max_model_len": 4}
    columns, (_path, body) = ask(**options)
    assert words(body["input"][0]) == "<s> three four ten"
    assert columns["truncated"] == 2


def test_without_a_path_the_server_renders_the_messages() -> None:
    columns, (path, body) = ask(score(0.5), kind="pooling")
    assert path == "/pooling"
    assert body["messages"] == [*QUESTION["raw_prompt"], {"role": "assistant", "content": "three four"}]
    assert "input" not in body
    assert columns == {"score": 0.5, "tokens": 7}


@pytest.mark.heavy
def test_a_response_cannot_spell_special_tokens(tmp_path: Path) -> None:
    _columns, (_path, body) = ask(text="three</s> <s> four <<s>s>", path=model(tmp_path))
    assert words(body["input"][0]) == "<s> <u> one two <a> three four"


def test_a_sigmoid_keeps_the_raw_score() -> None:
    columns, _sent = ask(score(-2.0), normalize="sigmoid")
    assert columns["score"] == pytest.approx(1 / (1 + math.exp(2)))
    assert columns["raw_score"] == -2.0
    assert ask(score(-1e4), normalize="sigmoid")[0]["score"] == 0.0


def test_chat_is_a_judge_with_the_keys_of_its_prompt() -> None:
    prompt = {"template": "Rate {response}", "score_range": (0, 10), "score_pattern": None, "system": None}
    columns, (path, body) = ask(score(5.0), kind="chat", prompt=prompt)
    assert path == "/v1/chat/completions"
    assert (body["model"], body["messages"]) == ("rm", [{"role": "user", "content": "Rate three four"}])
    assert (columns["score"], columns["tokens"]) == (0.5, 5)


@pytest.mark.parametrize(
    ("server", "options", "words", "fix", "retry"),
    [
        ({"status": 404}, {}, "answered 404", r"--served-model-name", False),
        ({"status": 500}, {}, "answered 500", "the server's log, in servers/", True),
        ({"status": 401}, {}, "answered 401", r"reward\.models\.rm\.url holds a login .* http://USER", False),
        (score(math.nan), {}, "a score that is nan", r"reward\.models\.rm\.dtype", False),
        (score(7.0), {"kind": "chat"}, "Score: 7", r"'Score: <0\.\.1>'", False),
    ],
)
def test_errors_name_the_server_and_the_keys_of_the_model(
    server: dict[str, Any], options: dict[str, Any], words: str, fix: str, retry: bool
) -> None:
    error, _sent = ask(server, **options)
    assert isinstance(error, JudgeError)
    assert words in str(error)
    assert error.retry is retry
    assert re.search(fix, error.fix)
    assert "judge." not in f"{error} {error.fix}"
    named = re.findall(r"reward\.models\.rm\.([a-z_.]*[a-z_])", f"{error} {error.fix}")
    fields = {*ServedModelConfig.model_fields, *(f"prompt.{name}" for name in PromptConfig.model_fields)}
    assert fields.issuperset(named)


@pytest.mark.heavy
def test_bad_options_are_one_sentence(tmp_path: Path) -> None:
    address = "http://127.0.0.1:1"
    for options, message in (
        ({"template": "x.jinja"}, r"reward\.models\.rm\.template=x\.jinja: without reward\.models\.rm\.path"),
        ({"path": model(tmp_path / "a", None)}, r"has no chat template; give reward\.models\.rm\.template"),
        ({"path": model(tmp_path / "b", positions=None)}, r"give reward\.models\.rm\.max_model_len"),
        ({"url": "nowhere"}, r"reward\.models\.rm\.url=nowhere is not an address"),
        ({"kind": "chat", "prompt": {"template": "x"}}, r"reward\.models\.rm\.prompt\.template has no {response}"),
        ({"path": model(tmp_path / "d", "hello")}, r"rm\.path=.*writes the same for two responses"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServedReward("rm", **{"url": address, **options})
    ServedReward("rm", None, path=model(tmp_path / "e"))  # before its servers run


def test_requests_wait_for_a_server_that_is_restarted_and_say_so(warned: list[str]) -> None:
    async def body() -> None:
        async with reward_server(score=lambda body: float(len(body["messages"][-1]["content"]))) as one:
            reward = ServedReward("rm", one.url)
            agent = RewardAgent(reward, limits=Limits(8), retry=Retry(tries=1, timeout_s=30.0))
            one.hang()
            texts = ["x" * (1 + row) for row in range(20)]
            columns = {"response_text": texts, "data_source": ["d"] * 20, "ground_truth": ["1"] * 20}
            agent.submit(1, Batch(range(20), {**columns, "extra_info": [QUESTION] * 20}))
            await one.until(8)
            await one.stop()
            await asyncio.sleep(0)
            await one.start()
            rewards = await agent.collect(1)
            assert rewards["score"].tolist() == [float(len(text)) for text in texts]
            await agent.close()

    run(body())
    assert any("reward model 'rm': http://" in line and "asked again" in line for line in warned)


def test_a_router_without_servers_is_asked_again_and_an_overloaded_server_is_not() -> None:
    async def body() -> None:
        async with reward_server(status=503) as one:
            reward = ServedReward("rm", one.url)
            asking = asyncio.create_task(reward.compute_score("d", "x", "7", QUESTION))
            await one.until(2)
            one.status = 200
            assert (await asking)["score"] == 0.0
            one.status = 429
            with pytest.raises(JudgeError, match="answered 429"):
                await reward.compute_score("d", "x", "7", QUESTION)
            await reward.close()

    run(body())
