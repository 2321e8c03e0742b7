"""A model's directory, or its name on the hub: found, and checked before anything heavy is started.

:func:`check_files` and :func:`check_head` read JSON and the headers of the weights, in a fraction of a second;
:func:`check_weights` lets transformers build the model without memory for its weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.errors import ModelError, NotChecked
from dataflow.models.processor import VISION

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ENDS: dict[str, tuple[str, ...]] = {
    "chat": ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
    "classify": ("ForSequenceClassification",),
    "pooling": ("ForSequenceClassification", "ForTokenClassification", "RewardModel"),
}
"""Ends of the architectures' names that have the head which a kind of model needs."""
_LEFT_OUT = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "original/*"]
"""Files of a model on the hub that nothing here reads."""
_here_only: ContextVar[bool] = ContextVar("here_only", default=False)


@contextlib.contextmanager
def here_only() -> Iterator[None]:
    """No model is made or downloaded in the block: one that is not on this machine yet is a ``NotChecked``."""
    before = _here_only.set(True)
    try:
        yield
    finally:
        _here_only.reset(before)


def only_here() -> bool:
    """Whether this is in a block of :func:`here_only`."""
    return _here_only.get()


def check_model(path: str | Path, key: str = "model.path") -> Path:
    """Returns the local directory of a model to train, or to learn from, after a check of its files.

    Args:
        path: a directory, or the name of a model on the Hugging Face hub (``org/name`` or ``name``), which is then
            downloaded, or found in the hub's cache.
        key: of the configuration that gave it, for messages.

    Raises:
        ModelError: it is missing, cannot be downloaded, is quantized, or is no language model.
        NotChecked: it would have to be downloaded (:func:`here_only`).
    """
    text, local = str(path), Path(path).expanduser()
    if not text or not os.path.isdir(local):
        if text and os.path.exists(local):
            raise ModelError(f"{key}={text} is a file; give the model's directory.")
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text):
            raise ModelError(f"{key}={text} does not exist; give the directory of a Hugging Face model, or a hub id.")
        local = _downloaded(text, key)
    if check_files(local, "chat").get("quantization_config"):
        raise ModelError(f"model {local} is quantized, and cannot be trained; give the model that it was made from.")
    headers(local)
    return local


def _downloaded(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=_LEFT_OUT, local_files_only=only_here()))
    # The hub's client raises its own kinds, httpx's, ValueError and OSError; all mean the same to the user.
    except Exception as error:
        if only_here():
            raise NotChecked(
                f"{key}={name} is not on this machine; a start downloads it, and 'hf download {name}' does so now"
            ) from error
        raise ModelError(
            f"{key}={name} is not a local directory, and was not found on the Hugging Face hub ({_reason(error)})."
        ) from error


def check_files(path: Path, kind: str) -> dict[str, Any]:
    """Returns the configuration of a model, after a check that its architecture is of the kind that is needed.

    transformers and vLLM give a model without the head a random one, and go on with that. The kinds are ``chat`` (it
    writes), ``classify`` and ``pooling``.

    Raises:
        ModelError: there is none or it cannot be read, or the model is of another kind.
    """
    if not path.is_dir():
        why = "is no directory" if path.exists() else "does not exist"
        raise ModelError(f"model {path} {why}; give the directory of a Hugging Face model.")
    config = read_json(path, "config.json")
    names = config.get("architectures") or []
    if not any(str(name).endswith(_ENDS[kind]) for name in names):
        lacks, other = "does not write", ""
        if kind != "chat":
            lacks, other = "has no classification head", ", or take kind=chat"
        raise ModelError(
            f"model {path} {lacks}: it is a {', '.join(names) or 'model without architectures'}; give one whose "
            f"config.json names an architecture that ends in {' or '.join(_ENDS[kind])}{other}."
        )
    return config


def check_head(path: Path, kind: str) -> int | None:
    """Checks a reward model with a head that scores (``classify``, ``pooling``).

    Returns:
        How many numbers it answers (labels); None if only the engine that serves it knows.

    Raises:
        ModelError: see :func:`check_files`; or the files hold no head, or one of another number of labels than the
            configuration's.
    """
    config = check_files(path, kind)
    weights = {} if config.get("quantization_config") else headers(path)
    if weights and all(name.startswith(("model.", "transformer.", "language_model.", "lm_head.")) for name in weights):
        raise ModelError(
            f"model {path}: none of its weights is that of a classification head, whatever config.json says; give a "
            "model that was trained to score, or take kind=chat."
        )
    if all(name.endswith("RewardModel") for name in config["architectures"]):
        return None  # an architecture of vLLM's own, such as Qwen2ForRewardModel
    names, number = config.get("id2label"), config.get("num_labels")
    labels = len(names) if isinstance(names, dict) else number if isinstance(number, int) else 2  # as transformers
    for name in ("score.weight", "classifier.weight", "classifier.out_proj.weight"):
        if name in weights and weights[name][0] != labels:
            raise ModelError(
                f"model {path}: its head '{name}' has {weights[name][0]} labels, and config.json {labels} (num_labels, "
                "id2label); take both from one model."
            )
    return labels


def headers(path: Path) -> dict[str, list[int]]:
    """Returns the shape of each weight, from the headers of the safetensors files.

    Raises:
        ModelError: a file is missing, truncated or corrupt.
    """
    from safetensors import safe_open

    sharded = not (path / WEIGHTS).is_file() and (path / INDEX).is_file()
    found: dict[str, list[int]] = {}
    for name in sorted({*read_json(path, INDEX).get("weight_map", {}).values()}) if sharded else [WEIGHTS]:
        try:
            with safe_open(str(path / name), framework="numpy") as held:
                found |= {weight: list(held.get_slice(weight).get_shape()) for weight in held.keys()}  # noqa: SIM118
        # safetensors' own error is a plain Exception; a missing file is an OSError.
        except Exception as error:
            raise ModelError(
                f"weights {path / name} cannot be read ({_reason(error)}); download them again, or save them by "
                "save_pretrained."
            ) from error
    return found


def check_weights(path: Path) -> None:
    """Checks the model's weights against its architecture; warns of those that no layer takes.

    Raises:
        ModelError: transformers cannot build a model from the configuration, or a weight is missing, which would be
            random, or has another shape.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    held = {name: torch.empty(shape, device="meta") for name, shape in headers(path).items()}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        seeing = config.model_type in VISION
        kinds: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if seeing else MODEL_FOR_CAUSAL_LM_MAPPING
        with _without_report():
            _model, info = kinds[type(config)].from_pretrained(
                None,
                config=config,
                state_dict=held,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    # For a wrong value, the architecture's own code may raise any exception.
    except Exception as error:
        raise ModelError(
            f"model {path}: transformers builds no language model from its config.json ({_reason(error)})."
        ) from error
    if wrong := sorted(info["mismatched_keys"]):
        name, have, want = wrong[0]
        raise ModelError(
            f"model {path}: weight '{name}' has the shape {list(have)} in its file and {list(want)} by config.json"
            f"{_others(wrong)}; take both from one model."
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"model {path}: weight '{missing[0]}' is in none of its files{_others(missing)}; save the model again."
        )
    if unused := sorted(info["unexpected_keys"]):
        logger.warning(
            f"model {path}: weight '{unused[0]}' belongs to no layer that config.json describes, and is left out"
            f"{_others(unused)}"
        )


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Keeps transformers from printing a table of missing weights when it loads a model."""
    report = logging.getLogger("transformers")
    before = report.level
    report.setLevel(logging.ERROR)
    try:
        yield
    finally:
        report.setLevel(before)


@dataclass(frozen=True)
class Room:
    """The capacity of a model.

    Attributes:
        positions: maximum tokens of prompt and response together; None if its configuration does not say.
        vocabulary: number of token ids; None if its configuration does not say.
    """

    positions: int | None
    vocabulary: int | None


def room_of(path: str | Path) -> Room:
    """Returns the capacity of a model from its configuration; both are None for a directory with only a tokenizer.

    Raises:
        ModelError: the configuration cannot be read.
    """
    if not (Path(path) / "config.json").exists():
        return Room(None, None)
    config = read_json(Path(path), "config.json")
    of = config.get("text_config") or config

    def number(*keys: str) -> int | None:
        return next((value for key in keys if isinstance(value := of.get(key), int)), None)

    return Room(number("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), number("vocab_size"))


def chat_template(path: Path) -> str:
    """Returns the chat template in a model's directory, several as one text; "" if there is none.

    Raises:
        ModelError: a file cannot be read.
    """
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    names = [name for name in ("chat_template.json", "tokenizer_config.json") if (path / name).is_file()]
    return next((str(found) for name in names if (found := read_json(path, name).get("chat_template"))), "")


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a model's directory.

    Raises:
        ModelError: there is no such file, or it holds something else.
    """
    try:
        found = json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"model {path} has no {name}; give a directory that save_pretrained has written.") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {path}: {name} cannot be read ({_reason(error)}); take it from the model again."
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"model {path}: {name} holds no JSON object; take it from the model again.")
    return found


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, without the full stop."""
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.partition("\n")[0].rstrip(".") or type(error).__name__


def _others(names: list[Any]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
