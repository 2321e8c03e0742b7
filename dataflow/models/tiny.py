"""The default run's model: a tokenizer, a tiny Qwen2 and a short supervised warm-up, cached for later runs.

The warm-up teaches the form of an answer and correct arithmetic, but the operation of a story only noisily: most
stories have a habit, a wrong operation that is likelier than the right one. GRPO then learns to prefer the right
operation. (Noise that does not depend on the story leaves nothing to learn, and a model whose arithmetic is still wrong
collapses under GRPO.)
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import ModelError, NotChecked
from dataflow.files import cache_home
from dataflow.models.directory import only_here
from dataflow.models.problems import ITEMS, LARGEST, NAMES, STORIES, apply, generate, solve
from dataflow.models.tokenizer import prompt_ids

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Recipe:
    """Everything the cached model depends on; change ``revision`` with the code below.

    ``right`` and ``wrong`` are the probabilities of the right and the habitual operation in a story with a wrong habit,
    ``plain`` that of the right one in a story without; other operations share the rest.
    """

    revision: int = 2
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 384
    positions: int = 4096
    problems: int = 4000
    steps: int = 600
    batch: int = 48
    equations: int = 8
    lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    ramp: int = 30
    clip: float = 1.0
    right: float = 0.30
    wrong: float = 0.55
    plain: float = 0.45

    def key(self, seed: int) -> str:
        """Returns a name for the model that this recipe makes from the current problems."""
        facts = [
            asdict(self),
            seed,
            CHATML,
            NAMES,
            ITEMS,
            [asdict(s) for s in STORIES],
            generate(32, 0, seed),
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


RECIPES = {"default": Recipe(), "teacher": Recipe(right=0.97, wrong=0.02, plain=0.97)}
"""Recipes by name: of the model to train, and of one that was taught the right operations, to distil from."""


def tiny_model(
    seed: int = 0,
    cache: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """Returns the directory of the warmed-up model, made on the first call (about a minute on two cores).

    A killed warm-up leaves none behind. If several processes call this at the same time, one makes the model and the
    others wait. ``seed`` is that of the warm-up; runs of all seeds share one. ``cache`` is ``dataflow/`` in the user's
    cache directory if None; ``progress`` is called with (steps done, steps in all).
    """
    recipe = recipe or Recipe()
    home = Path(cache) if cache is not None else cache_home()
    place = home / f"tiny-{recipe.key(seed)}"
    if place.is_dir():
        return place
    if only_here():
        raise NotChecked("a tiny Qwen2, which the first start makes (about a minute)")
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / f"{place.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if the process dies
            if not place.is_dir():
                for left in home.glob(f"{place.name}.part-*"):  # of a killed warm-up
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=home, prefix=f"{place.name}.part-") as part:
                    _make(Path(part) / "model", recipe, seed, progress)
                    os.rename(Path(part) / "model", place)
    except OSError as e:
        raise ModelError(f"model cache {home}: {e.strerror or e}; set XDG_CACHE_HOME to a writable directory.") from e
    return place


def _make(path: Path, recipe: Recipe, seed: int, progress: Callable[[int, int], None] | None) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokenizer = build_tokenizer()
            model = build_model(recipe, tokenizer)
            warm_up(model, tokenizer, recipe, seed, progress)
    finally:
        torch.set_num_threads(threads)
    disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def build_tokenizer() -> Qwen2Tokenizer:
    """Returns a byte-level BPE tokenizer with one token for each word of the problems and each number.

    Any other text becomes bytes, so every text can be encoded. ChatML template; ``<|im_end|>`` ends a turn; pads on the
    left.
    """
    from tokenizers import AddedToken, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    # For a Qwen2 model AutoTokenizer always builds a Qwen2Tokenizer, whose own split into words replaces the saved one;
    # with any other split, the tokenizer loaded from disk would differ. That split cuts numbers into digits, so numbers
    # are added tokens, which are matched before it.
    backend = Qwen2Tokenizer().backend_tokenizer
    texts = [story.text.format(name=n, item=i, a=1, b=2, c=3) for story in STORIES for n in NAMES for i in ITEMS]
    texts += ["user\n", "assistant\n", "It is 1 + 2 = 3.\n#### 3", "Then 3 - 2 = 1.\n", "Then 1 * 2 = 2.\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # never reached: merging stops when every word is one token
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token=PAD,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        padding_side="left",
        chat_template=CHATML,
    )
    tokenizer.add_tokens([AddedToken(f" {n}", normalized=False) for n in range(LARGEST + 1)])
    return tokenizer


def build_model(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Returns a Qwen2 with random weights from torch's global generator."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            intermediate_size=recipe.intermediate,
            max_position_embeddings=recipe.positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            **ends,
        )
    )
    model.generation_config = GenerationConfig(**ends)
    return model


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    recipe: Recipe,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Trains the model in place on answers drawn from :func:`habits` and on bare equations."""
    import torch

    rng = random.Random(f"warm-up-{seed}")
    problems, _ = generate(recipe.problems, 0, seed)
    chances = habits(recipe, seed)
    prompts = prompt_ids(tokenizer, [[{"role": "user", "content": problem["question"]}] for problem in problems])
    facts = [(a, op, b) for a in range(1, 21) for op in "+-*" for b in range(2, 10) if apply(a, op, b) is not None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / recipe.ramp, 1.0, recipe.ramp)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, recipe.steps - recipe.ramp))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [ramp, cosine], [recipe.ramp])
    ids: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        if text not in ids:
            ids[text] = tokenizer.encode(text, add_special_tokens=False)
        return ids[text]

    model.train()
    for step in range(recipe.steps):
        rows = []
        for at in rng.sample(range(len(problems)), recipe.batch):
            answer = _habitual(problems[at], chances, rng)
            rows.append((prompts[at], [*encode(answer), tokenizer.eos_token_id]))
        for a, op, b in rng.sample(facts, recipe.equations):
            rows.append((encode(f"{rng.choice(('It is', 'Then'))} {a} {op} {b} ="), encode(f" {apply(a, op, b)}.\n")))
        batch = _padded(rows, tokenizer.pad_token_id)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if progress is not None:
            progress(step + 1, recipe.steps)
    model.eval()


def habits(recipe: Recipe, seed: int) -> list[dict[str, float]]:
    """Returns for every story the probability with which each sequence of operations is taught.

    Two stories in three have a wrong habit: one wrong sequence that is taught more often than the right one.
    """
    rng = random.Random(f"habits-{seed}")
    # A wrong habit must be possible with nearly all of the story's operands.
    samples, _ = generate(2000, 0, seed)
    chances = []
    for index, story in enumerate(STORIES):
        mine = [p["operands"] for p in samples if p["story"] == index]
        others = ["".join(ops) for ops in itertools.product("+-*", repeat=len(story.ops))]
        others.remove(story.ops)
        fits = {ops: sum(solve(ops, operands) is not None for operands in mine) / len(mine) for ops in others}
        usual = rng.choice([ops for ops in others if fits[ops] >= min(0.8, max(fits.values()))])
        if index % 3:
            rest = (1 - recipe.right - recipe.wrong) / max(1, len(others) - 1)
            chance = {story.ops: recipe.right} | dict.fromkeys(others, rest) | {usual: recipe.wrong}
        else:
            chance = {story.ops: recipe.plain} | dict.fromkeys(others, (1 - recipe.plain) / len(others))
        chances.append(chance)
    return chances


def _habitual(problem: dict[str, Any], chances: list[dict[str, float]], rng: random.Random) -> str:
    """Draws an answer; sequences that the operands do not allow are left out."""
    possible = {ops: solve(ops, problem["operands"]) for ops in chances[problem["story"]]}
    answers = [(chances[problem["story"]][ops], text) for ops, text in possible.items() if text is not None]
    return rng.choices([text for _, text in answers], [chance for chance, _ in answers])[0]


def _padded(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, Any]:
    """Returns right-padded ids, mask and labels (only the responses), each int64 ``[rows, longest]``."""
    import torch

    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((len(rows), longest), pad)
    labels = torch.full((len(rows), longest), -100)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor([*prompt, *response])
        labels[i, len(prompt) : end] = torch.tensor(response)
        mask[i, :end] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
