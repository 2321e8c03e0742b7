"""The tiny model: its tokenizer, its cache, the effect of its warm-up; and the checks of a user's model."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataflow.models.directory import check_model, check_weights
from dataflow.models.problems import LARGEST, generate, solve
from dataflow.models.tiny import Recipe, build_tokenizer, tiny_model
from dataflow.models.tokenizer import prompt_ids

pytestmark = pytest.mark.heavy

SHORT = Recipe(steps=2, problems=64, hidden=32, heads=2, kv_heads=1, intermediate=64, layers=1)


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


def test_a_warm_up_that_ends_early_leaves_no_model_and_the_next_call_cleans_up(tmp_path):
    name = f"tiny-{SHORT.key(0)}"
    (tmp_path / f"{name}.part-killed" / "model").mkdir(parents=True)

    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        tiny_model(cache=tmp_path, recipe=SHORT, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.lock"]


def test_two_calls_at_once_make_it_once(tmp_path):
    """The lock is the kernel's, so that it parts threads as it parts processes."""
    made: list[int] = []

    def call(_number: int) -> Path:
        return tiny_model(cache=tmp_path, recipe=SHORT, progress=lambda done, _total: made.append(done))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(call, range(2))
    assert (first, made) == (second, [1, 2])
    assert check_model(first) == first


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
