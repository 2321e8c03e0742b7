"""The server of a transformers model: its scores are the model's own, in any company, and it ends when it should."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from dataflow.rewards.judge.server import JudgeProcess
from dataflow.rewards.models.hf import server as hf_server
from dataflow.system.children import command

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(180)]

MODULE = "dataflow.rewards.models.hf.server"
CHAT = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}]
WIDTH = 1024


@pytest.fixture(scope="module")
def models(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with heads: of sequences, of tokens, without a token for padding in its configuration, an encoder."""
    import torch
    from transformers import (
        AutoConfig,
        BertConfig,
        BertForSequenceClassification,
        Qwen2ForSequenceClassification,
        Qwen2ForTokenClassification,
    )

    found = {}
    with torch.random.fork_rng():
        for name, kind, labels, hidden in [
            ("sequence", Qwen2ForSequenceClassification, 1, 32),
            ("unpadded", Qwen2ForSequenceClassification, 3, 32),
            ("token", Qwen2ForTokenClassification, 1, 32),
            ("wide", Qwen2ForSequenceClassification, 1, WIDTH),
            ("encoder", BertForSequenceClassification, 2, 32),
        ]:
            config = AutoConfig.from_pretrained(tiny_qwen, num_labels=labels, hidden_size=hidden)
            config.intermediate_size = 2 * hidden
            if name == "encoder":
                sizes = {"hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2}
                config = BertConfig(vocab_size=config.vocab_size, num_labels=labels, intermediate_size=64, **sizes)
            if name == "unpadded":
                config.pad_token_id = None
            torch.manual_seed(7)
            model = kind(config)
            found[name] = tmp_path_factory.mktemp("models") / name
            model.save_pretrained(found[name])
            for file in tiny_qwen.iterdir():
                if "token" in file.name or file.suffix == ".jinja":
                    shutil.copy(file, found[name])
    return found


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[JudgeProcess]:
    options = ["--served-model-name", "rm", "--max-num-seqs", "16", "--threads", "1"]
    with JudgeProcess(command(MODULE, "--model", str(models["sequence"]), *options), 120.0) as running:
        yield running


def run(body: Callable[[aiohttp.ClientSession], Awaitable[Any]], url: str) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(120), aiohttp.ClientSession(url) as session:
            return await body(session)

    return asyncio.run(limited())


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with session.post(path, json=body) as reply:
        return reply.status, await reply.json()


async def get(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as reply:
        assert reply.status == 200
        return await reply.json()


def rows(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(rng.choice([1, 5, 30, 120]))] for _ in range(count)]


def own_scores(path: Path, ids: list[list[int]], per_token: bool = False) -> list[list[float]]:
    """Returns what transformers computes, a row at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification
    model = kind.from_pretrained(path).eval()
    with torch.inference_mode():
        found = [model(input_ids=torch.tensor([row])).logits[0] for row in ids]
    return [(row[-1] if per_token else row).tolist() for row in found]


def test_scores_are_those_of_transformers_in_any_batch(server: JudgeProcess, models: dict[str, Path]) -> None:
    ids = [*rows(40), [9, 9, 0, 0], [0], [5, 0]]  # 0 is the token that pads

    async def body(session: aiohttp.ClientSession) -> tuple[list[float], list[float], Any]:
        replies = await asyncio.gather(
            *(post(session, "/classify", model="rm", input=row, use_activation=False) for row in ids)
        )
        together = [reply["data"][0]["probs"][0] for _, reply in replies]
        alone = []
        for row in ids:
            _, reply = await post(session, "/pooling", input=[row], use_activation=False)
            alone.append(reply["data"][0]["data"][0])
        return together, alone, await get(session, "/health")

    together, alone, health = run(body, server.url)
    own = [row[0] for row in own_scores(models["sequence"], ids)]
    assert together == pytest.approx(own, abs=1e-4)
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 6) for score in own}) > 30
    assert health["batches"] < health["rows"]


@pytest.mark.parametrize(("name", "kind"), [("unpadded", "classify"), ("token", "pooling"), ("encoder", "classify")])
def test_other_heads(models: dict[str, Path], name: str, kind: str) -> None:
    """In this process: models without a token for padding, that score every token, that read in both directions."""
    from dataflow.models.directory import check_classifier
    from dataflow.rewards.models.hf.model import HfModel

    ids = rows(30, seed=1)
    check_classifier(models[name], kind, "hf")
    model = HfModel(models[name], threads=1)
    made = model.scores(ids)
    for row, own, alone in zip(made, own_scores(models[name], ids, name == "token"), ids, strict=True):
        assert row == pytest.approx(own, abs=1e-4)
        assert model.scores([alone])[0] == pytest.approx(row, abs=1e-5)
    if name != "token":
        assert sum(model.activated(made[0])) == pytest.approx(1)
    else:
        assert 0 < model.activated(made[0])[0] < 1


def test_texts_chats_and_activation(server: JudgeProcess, models: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["sequence"])
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    async def body(session: aiohttp.ClientSession) -> list[tuple[int, Any]]:
        bodies: list[dict[str, Any]] = [{"input": ids}, {"input": text}, {"input": [text, "other"]}, {"messages": CHAT}]
        found = [await post(session, "/classify", use_activation=False, **one) for one in bodies]
        return [*found, await post(session, "/classify", input=ids)]

    *raw, (_, active) = run(body, server.url)
    scores = [reply["data"][0]["probs"][0] for _, reply in raw]
    assert scores == pytest.approx([scores[0]] * 4, abs=1e-6)
    assert active["data"][0]["probs"][0] == pytest.approx(1 / (1 + 2.718281828 ** -scores[0]), abs=1e-5)
    assert active["data"][0] | {"probs": 0} == {"index": 0, "label": "LABEL_0", "probs": 0, "num_classes": 1}
    assert active["usage"]["prompt_tokens"] == len(ids)
    assert [row["index"] for row in raw[2][1]["data"]] == [0, 1]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": [1] * 513}, 400, "has 513 tokens, and the model takes at most 512"),
        ({"input": [1, 10**9]}, 400, "not in the model's vocabulary"),
        ({"input": [-1]}, 400, "not in the model's vocabulary"),
        ({"input": []}, 400, "is empty"),
        ({"input": ""}, 400, "is empty"),
        ({"input": [[1], []]}, 400, "is empty"),
        ({"input": [1.5]}, 400, "input"),
        ({}, 400, "either input or messages"),
        ({"input": "a", "messages": CHAT}, 400, "either input or messages"),
        ({"input": "a", "normalise": True}, 400, "normalise"),
        ({"input": "a", "model": "other"}, 404, "'other' is not served here"),
        ({"messages": [{"content": "no role"}], "chat_template_kwargs": {"messages": 1}}, 400, "chat template"),
    ],
)
def test_a_bad_request_is_refused_with_a_sentence(
    server: JudgeProcess, body: dict[str, Any], status: int, message: str
) -> None:
    code, reply = run(lambda session: post(session, "/classify", **body), server.url)
    assert code == status
    assert message in reply["error"]["message"]
    assert reply["error"]["code"] == status


def test_it_sleeps_frees_its_memory_and_wakes(models: dict[str, Path]) -> None:
    async def body(session: aiohttp.ClientSession, process: psutil.Process) -> None:
        _, before = await post(session, "/classify", input=[5, 6], use_activation=False)
        full = process.memory_info().rss
        assert (await post(session, "/sleep?level=1"))[0] == 200
        assert await get(session, "/is_sleeping") == {"is_sleeping": True}
        freed = full - process.memory_info().rss
        assert freed > 0.8 * (models["wide"] / "model.safetensors").stat().st_size
        waiting = asyncio.ensure_future(post(session, "/classify", input=[5, 6], use_activation=False))
        assert (await get(session, "/health"))["status"] == "ok"
        assert not waiting.done()
        # A file that is away while it wakes: it stays asleep, and says why.
        weights = models["wide"] / "model.safetensors"
        weights.rename(weights.with_suffix(".away"))
        status, reply = await post(session, "/wake_up")
        assert (status, "cannot be loaded" in reply["error"]["message"]) == (500, True)
        weights.with_suffix(".away").rename(weights)
        assert (await post(session, "/wake_up"))[0] == 200
        assert (await waiting)[1]["data"] == before["data"]
        assert await get(session, "/is_sleeping") == {"is_sleeping": False}
        names = await get(session, "/v1/models")
        assert names["data"][0]["id"] == str(models["wide"])

    with JudgeProcess(command(MODULE, "--model", str(models["wide"]), "--threads", "1"), 120.0) as running:
        process = psutil.Process(running.pid)
        run(lambda session: body(session, process), running.url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_it_ends_with_its_standard_input(models: dict[str, Path]) -> None:
    arguments = command(MODULE, "--model", str(models["sequence"]))
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_bad_input_is_refused_with_one_sentence(
    tiny_qwen: Path, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headless = tmp_path / "headless"  # whose configuration promises a head that the weights do not have
    shutil.copytree(tiny_qwen, headless)
    config = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForSequenceClassification"]}))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        good = ["--model", str(models["sequence"])]
        for arguments, said in [
            (["--model", str(tiny_qwen)], "has no classification head: it is a Qwen2ForCausalLM"),
            (["--model", str(tmp_path / "nowhere")], "nowhere does not exist"),
            (["--model", str(headless)], "'score.weight' is in none of its files"),
            ([*good, "--port", port], f"--port={port} is taken by another server"),
            ([*good, "--port", "99999"], "--port=99999"),
            ([*good, "--host", "203.0.113.1"], "--host=203.0.113.1"),
            ([*good, "--max-model-len", "513"], "takes at most 512 tokens"),
            ([*good, "--device", "gpu"], "--device=gpu is unknown"),
            ([*good, "--device", "cuda:99"], "--device=cuda:99"),
            ([*good, "--chat-template", str(tmp_path / "none.jinja")], "none.jinja cannot be read"),
        ]:
            assert hf_server.main(arguments) == 2
            printed = capsys.readouterr().err.strip()
            assert said in printed
            assert "\n" not in printed, printed


def test_the_command_line_ends_with_2(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", MODULE, "--model", str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert made.returncode == 2
    assert made.stderr.startswith("ModelError: ")
