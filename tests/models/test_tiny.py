"""The tiny model: its tokenizer, its cache, the effect of its warm-up; and the checks of a user's model."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.models.directory import check_model, check_weights
from dataflow.models.problems import LARGEST, generate, solve
from dataflow.models.tiny import Recipe, build_tokenizer, tiny_model
from dataflow.models.tokenizer import prompt_ids

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.heavy

SHORT = Recipe(steps=2, problems=64, hidden=32, heads=2, kv_heads=1, intermediate=64, layers=1)
LONG = Recipe(steps=100_000, problems=64, hidden=32, heads=2, kv_heads=1, intermediate=64, layers=1)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return tiny_model(cache=tmp_path_factory.mktemp("cache"), recipe=SHORT)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_numbers_are_whole_tokens_and_any_text_comes_back(tokenizer):
    for number in range(LARGEST + 1):
        assert len(tokenizer.encode(f" {number}")) == 1
    for text in (
        "It is 12 + 3 = 15.\n#### 15",
        "Ünïcode 😀 costs $1,200.50 or 155%\n\n  ok",
        "7 at the start",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_from_disk_is_the_one_that_was_trained_with(short, tokenizer):
    """AutoTokenizer puts a class of its own in place of the saved one; both must cut text alike."""
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(short)
    assert saved.get_vocab() == tokenizer.get_vocab()
    assert (saved.eos_token, saved.pad_token, saved.padding_side) == ("<|im_end|>", "<|endoftext|>", "left")
    for problem in generate(200, 0, 7)[0]:
        chat = [{"role": "user", "content": problem["question"]}]
        assert prompt_ids(saved, chat) == prompt_ids(tokenizer, chat)
        assert saved.encode(problem["answer"]) == tokenizer.encode(problem["answer"])
    ids = [*saved.encode("#### 5"), saved.eos_token_id]
    assert saved.decode(ids, skip_special_tokens=True) == "#### 5"


def test_the_directory_is_a_whole_model(short):
    from transformers import AutoModelForCausalLM, GenerationConfig

    assert check_model(short) == short
    check_weights(short)
    model = AutoModelForCausalLM.from_pretrained(short)
    assert model.config.tie_word_embeddings
    assert GenerationConfig.from_pretrained(short).eos_token_id == model.config.eos_token_id


def test_the_same_seed_makes_the_same_weights_and_leaves_torch_alone(short, tmp_path):
    import torch

    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    again = tiny_model(cache=tmp_path, recipe=SHORT)
    assert (again / "model.safetensors").read_bytes() == (short / "model.safetensors").read_bytes()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert len({Recipe().key(0), SHORT.key(0), SHORT.key(1)}) == 3, "another recipe or seed is another model"


def start(cache: Path, recipe: Recipe) -> subprocess.Popen[str]:
    """Starts a process that makes the model and prints each step (a fork would inherit torch's threads,
    dead)."""
    code = (
        "from pathlib import Path; from dataflow.models.tiny import Recipe, tiny_model\n"
        f"path = tiny_model(cache=Path({str(cache)!r}), recipe={recipe!r},"
        " progress=lambda done, total: print(done, flush=True))\nprint(path)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.timeout(90)
def test_a_killed_warm_up_leaves_no_model_and_the_next_call_cleans_up(tmp_path):
    child = start(tmp_path, LONG)
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    name = f"tiny-{LONG.key(0)}"
    assert not (tmp_path / name).exists()
    assert list(tmp_path.glob(f"{name}.part-*"))

    # The dead process's lock is free again, its left-overs go with the next warm-up of the same model.
    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        tiny_model(cache=tmp_path, recipe=LONG, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.lock"]


@pytest.mark.timeout(120)
def test_two_processes_at_once_make_it_once(tmp_path):
    children = [start(tmp_path, SHORT) for _ in range(2)]
    printed = sorted(child.communicate()[0].split() for child in children)
    assert [child.returncode for child in children] == [0, 0]
    (path,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert printed == [[str(path)], ["1", "2", str(path)]] or printed == [["1", "2", str(path)], [str(path)]]
    assert check_model(path) == path


@pytest.mark.timeout(600)
def test_the_warm_up_leaves_arithmetic_right_and_operations_to_learn():
    """The real model, from the user's cache where a run has left it there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(min(2, os.cpu_count() or 1))
    path = tiny_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    problems = generate(0, 256, 0)[1]
    chats = [[{"role": "user", "content": problem["question"]}] for problem in problems]
    rows = [{"input_ids": ids} for ids in prompt_ids(tokenizer, chats)]
    prompts = tokenizer.pad(rows, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompts, max_new_tokens=24, do_sample=False)
    responses = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [response == problem["answer"] for response, problem in zip(responses, problems, strict=True)]
    assert 0.25 < sum(right) / len(right) < 0.55
    plausible = 0
    for response, problem in zip(responses, problems, strict=True):
        operations = "".join(re.findall(r"\d+ ([-+*]) \d+ =", response))
        plausible += response == solve(operations, problem["operands"])
    assert plausible / len(problems) > 0.9
