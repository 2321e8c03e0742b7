"""A model's directory, or its name on the hub: found, and checked before anything heavy is started."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """
    config = read_json(path, "config.json")
    names = config.get("architectures") or []
    if not any(str(name).endswith(_ENDS[kind]) for name in names):
        other = "" if kind == "chat" else ", or take kind=chat"
        raise ModelError(
            f"model {path} is a {', '.join(names) or 'model without architectures'}; give one whose config.json names "
            f"an architecture that ends in {' or '.join(_ENDS[kind])}{other}."
        )
    return config


def labels_of(config: Mapping[str, Any]) -> int | None:
    """Returns how many numbers a model with a head that scores answers; None if only its engine knows."""
    if all(name.endswith("RewardModel") for name in config["architectures"]):
        return None  # an architecture of vLLM's own, such as Qwen2ForRewardModel
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels") or 2)  # as transformers


def headers(path: Path) -> dict[str, list[int]]:
    """Returns the shape of each weight, from the headers of the safetensors files."""
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
    """Checks that no weight is missing, which would be random, or has another shape than the architecture's.

    transformers builds the model without memory for its weights.
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
    wrong = [f"'{name}' is {list(have)} and not {list(want)}" for name, have, want in sorted(info["mismatched_keys"])]
    wrong += [f"'{name}' is missing" for name in sorted(info["missing_keys"])]
    if wrong:
        raise ModelError(
            f"model {path}: {len(wrong)} of its weights are not as its config.json says, first {wrong[0]}; take both "
            "from one model."
        )


@dataclass(frozen=True)
class Room:
    """The capacity of a model; None where its configuration does not say.

    ``positions`` are the most tokens of prompt and response together, ``vocabulary`` the number of token ids.
    """

    positions: int | None
    vocabulary: int | None


def room_of(path: str | Path) -> Room:
    """Returns the capacity of a model from its configuration; both are None for a directory with only a tokenizer."""
    if not (Path(path) / "config.json").exists():
        return Room(None, None)
    config = read_json(Path(path), "config.json")
    of = config.get("text_config") or config

    def number(*keys: str) -> int | None:
        return next((value for key in keys if isinstance(value := of.get(key), int)), None)

    return Room(number("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), number("vocab_size"))


def chat_template(path: Path) -> str:
    """Returns the chat template in a model's directory, several as one text; "" if there is none."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    names = [name for name in ("chat_template.json", "tokenizer_config.json") if (path / name).is_file()]
    return next((str(found) for name in names if (found := read_json(path, name).get("chat_template"))), "")


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a model's directory; raises ModelError if it has none."""
    try:
        return dict(json.loads((path / name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"model {path}: {name} cannot be read ({_reason(error)}); give a directory that save_pretrained wrote."
        ) from error


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, without the full stop."""
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.partition("\n")[0].rstrip(".") or type(error).__name__
