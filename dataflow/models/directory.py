"""Checks the files of a Hugging Face model before anything heavy is imported or started.

:func:`check_files` reads only JSON and the headers of the weights, and takes a fraction of a second;
:func:`check_weights` builds the model without memory for its weights and compares their names and shapes
with the headers.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.errors import ModelError, nearest
from dataflow.files import decoded
from dataflow.models.processor import VISION

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that can be trained, under safetensors' names."""
_TABLES = {
    "CONFIG_MAPPING_NAMES": "models/auto/auto_mappings.py",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "models/auto/modeling_auto.py",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "models/auto/modeling_auto.py",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "models/auto/modeling_auto.py",
}
HEADS = {
    "classify": ("ForSequenceClassification",),
    "pooling": ("ForSequenceClassification", "ForTokenClassification"),
}
"""Ends of the architectures' names that have the head which a kind of reward model needs."""


def check_files(path: Path) -> None:
    """Checks configuration, tokenizer and weights of a causal language model, as far as their headers show.

    Args:
        path: of the model's directory.

    Raises:
        ModelError: one of them is missing, cannot be read, or belongs to another kind of model.
    """
    _check_present(path)
    _check_kind(path, _json(path, "config.json"))
    _check_json(path)
    headers(path)


def check_classifier(path: Path, kind: str) -> None:
    """Checks a reward model's files as :func:`check_files` does, and that it has a head which scores.

    transformers and vLLM give a model without one a head with random weights, and score with that.

    Args:
        path: of the model's directory.
        kind: ``classify`` or ``pooling``, see :data:`HEADS`.

    Raises:
        ModelError: see there; or it has no such head.
    """
    config, names = _architectures(path)
    # vLLM has reward models of its own, such as Qwen2ForRewardModel.
    ends = (*HEADS[kind], "RewardModel") if kind == "pooling" else HEADS[kind]
    if not any(name.endswith(ends) for name in names):
        raise ModelError(
            f"model {path} has no classification head: it is a {', '.join(names) or 'model without architectures'}; "
            f"give one whose config.json names an architecture that ends in {' or '.join(ends)}, or take kind=chat."
        )
    _check_json(path)
    if not config.get("quantization_config"):
        headers(path)


def check_chat(path: Path) -> None:
    """Checks a chat model's files as far as a server needs them; it may be quantized.

    Args:
        path: of the model's directory.

    Raises:
        ModelError: one of them is missing or cannot be read, or the model does not write.
    """
    config, names = _architectures(path)
    if not any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names):
        raise ModelError(
            f"model {path} does not write: it is a {', '.join(names) or 'model without architectures'}; give one whose "
            "config.json names an architecture that ends in ForCausalLM, or take kind=classify."
        )
    _check_json(path)
    if not config.get("quantization_config"):
        headers(path)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the configuration in a model's directory.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    return _json(path, "config.json")


def chat_template(path: Path) -> str:
    """Returns the chat template in a model's directory, several as one text; "" if there is none.

    Raises:
        ModelError: a file cannot be read.
    """
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    names = [name for name in ("chat_template.json", "tokenizer_config.json") if (path / name).is_file()]
    return next((str(found) for name in names if (found := _json(path, name).get("chat_template"))), "")


def _architectures(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration of a model that shall be served, and its architectures."""
    if not path.is_dir():
        why = "is no directory" if path.exists() else "does not exist"
        raise ModelError(f"model {path} {why}; give the directory of a Hugging Face model.")
    _check_present(path)
    config = _json(path, "config.json")
    names = config.get("architectures")
    return config, [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _check_present(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(f"model {path} has no config.json; give a directory that save_pretrained has written.")
    if not any((path / name).is_file() for name in TOKENIZERS):
        raise ModelError(f"model {path} has no tokenizer (tokenizer.json); save the tokenizer with the model.")


def _check_json(path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "generation_config.json"):
        if (path / name).is_file():
            _json(path, name)


def headers(path: Path) -> dict[str, tuple[list[int], str]]:
    """Returns shape and type of each weight, from the headers of the safetensors files.

    Raises:
        ModelError: a file is missing, truncated or corrupt, or a weight is not a floating-point number.
    """
    if (path / WEIGHTS).is_file():
        found = _header(path / WEIGHTS)
    elif (path / INDEX).is_file():
        found = _sharded(path)
    else:
        pickled = next((file.name for name in ("*.bin", "*.pt", "*.pth") for file in sorted(path.glob(name))), None)
        if pickled is not None:
            raise ModelError(
                f"model {path} has its weights in {pickled}, a pickle, which may run any code when it is read; "
                "convert it with save_pretrained(..., safe_serialization=True)."
            )
        raise ModelError(f"model {path} has no weights ({WEIGHTS}); save them with its config.json.")
    if not found:
        raise ModelError(f"model {path}: its safetensors file holds no weights; save the model again.")
    for name, (_shape, kind) in found.items():
        if kind not in FLOATS:
            raise ModelError(
                f"model {path}: weight '{name}' is of type {kind}; only {', '.join(FLOATS)} can be trained, so give "
                "a model that is not quantized."
            )
    return found


def check_weights(path: Path) -> None:
    """Compares the weights in the files with those of the model's architecture; warns of those that no layer takes.

    Raises:
        ModelError: no model can be built from the configuration, or a weight is missing or has another shape.
    """
    warn_unused(path, unused_weights(path))


def unused_weights(path: Path) -> list[str]:
    """Returns the names of the weights that no layer takes. Imports transformers and torch.

    Raises:
        ModelError: as of :func:`check_weights`.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
        held = {
            name: torch.empty(shape, dtype=torch.float32, device="meta") for name, (shape, _) in headers(path).items()
        }
        table: Any = (
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if config.model_type in VISION else MODEL_FOR_CAUSAL_LM_MAPPING
        )
        kind: Any = table[type(config)]
        with without_report():
            _model, info = kind.from_pretrained(
                None,
                config=config,
                state_dict=held,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except ModelError:
        raise
    # For a wrong value, the architecture's own code may raise any exception.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(f"model {path}: its config.json describes no model that can be built ({reason}).") from error
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
    return sorted(info["unexpected_keys"])


def warn_unused(path: Path, unused: list[str]) -> None:
    """Logs a warning about weights that no layer takes, if there are any."""
    if unused:
        logger.warning(
            f"model {path}: weight '{unused[0]}' belongs to no layer that config.json describes, and is left out"
            f"{_others(unused)}"
        )


@contextmanager
def without_report() -> Iterator[None]:
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
    config = _json(Path(path), "config.json")
    inner = config.get("text_config")
    of = inner if isinstance(inner, dict) else config

    def number(*keys: str) -> int | None:
        return next((value for key in keys if type(value := of.get(key)) is int and value > 0), None)

    return Room(number("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), number("vocab_size"))


def _check_own_code(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("auto_map"):
        raise ModelError(
            f"model {path} has Python code of its own (auto_map in config.json), which is not run; give a model "
            "that is part of transformers."
        )


def _others(names: list[Any]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_kind(path: Path, config: Mapping[str, Any]) -> None:
    kind, architectures = config.get("model_type"), config.get("architectures")
    _check_own_code(path, config)
    if not isinstance(kind, str) or not kind:
        raise ModelError(f"model {path}: config.json has no model_type; save the model again with save_pretrained.")
    causal = _table("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    known = _table("CONFIG_MAPPING_NAMES")
    if kind not in causal and kind not in known:
        guess = nearest(kind, causal) or "; install a version of transformers that has it, or give another model."
        raise ModelError(f"model {path}: transformers has no model_type '{kind}'{guess}")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise ModelError(
            f"model {path}: config.json names no architectures, so it may not be a causal language model; "
            'add them, such as "architectures": ["Qwen2ForCausalLM"].'
        )
    wanted = (VISION[kind][0],) if kind in VISION else causal.get(kind, ())
    named = ", ".join(architectures)
    if not set(wanted).intersection(architectures):
        instead = f" {' or '.join(wanted)} is" if wanted else " one that ends in ForCausalLM is"
        if kind in _table("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES") and kind not in VISION:
            instead = f" of those that take images, {' or '.join(VISION)} is"
        raise ModelError(f"model {path} is a {named}, which is not a causal language model;{instead} needed.")
    # Encoders have a causal class, too; without is_decoder, their tokens attend to later ones.
    if kind in _table("MODEL_FOR_MASKED_LM_MAPPING_NAMES") and config.get("is_decoder") is False:
        raise ModelError(f"model {path} is a {named} with is_decoder=false, which is not a causal language model.")
    if config.get("quantization_config"):
        raise ModelError(f"model {path} is quantized, and cannot be trained; give the model that it was made from.")


@lru_cache
def _table(name: str) -> dict[str, tuple[str, ...]]:
    """Returns one of transformers' tables of model types, without importing transformers, which takes seconds."""
    spec = importlib.util.find_spec("transformers")
    file = Path(spec.origin or "").parent / _TABLES[name] if spec else Path()
    if file.is_file():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == name
                and isinstance(node.value, ast.Call)
                and node.value.args
            ):
                return {key: _names(value) for key, value in ast.literal_eval(node.value.args[0])}
    module = importlib.import_module(f"transformers.{_TABLES[name].removesuffix('.py').replace('/', '.')}")
    return {key: _names(value) for key, value in getattr(module, name).items()}


def _names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        data = (path / name).read_bytes()
        # transformers' readers refuse a byte order mark, too.
        if data.startswith(b"\xef\xbb\xbf"):
            raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
        found = json.loads(decoded(data))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"model {path}: {name} cannot be read ({reason}); take it from the model again.") from error
    if not isinstance(found, dict):
        raise ModelError(f"model {path}: {name} holds no JSON object; take it from the model again.")
    return found


def _header(file: Path) -> dict[str, tuple[list[int], str]]:
    from safetensors import safe_open

    try:
        with safe_open(str(file), framework="numpy") as held:
            parts = {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118 - it is not a mapping
            return {name: (list(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}
    # Its own error is a plain Exception; a directory or a file without rights is an OSError.
    except Exception as error:
        reason = str(error).strip().removeprefix("Error while deserializing header: ") or type(error).__name__
        raise ModelError(f"weights {file} cannot be read ({reason}); download or save them again.") from error


def _sharded(path: Path) -> dict[str, tuple[list[int], str]]:
    shards = _json(path, INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelError(f"model {path}: {INDEX} has no weight_map; take it from the model again.")
    found: dict[str, tuple[list[int], str]] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise ModelError(f"model {path}: {INDEX} names '{shard}', which is not a file in that directory.")
        if not (path / shard).is_file():
            raise ModelError(f"model {path}: shard {shard} is missing; download or save the model again.")
        held = _header(path / shard)
        if missing := sorted(name for name, of in shards.items() if of == shard and name not in held):
            raise ModelError(
                f"model {path}: weight '{missing[0]}' is not in {shard}, where {INDEX} has it; save the model again."
            )
        found |= held
    return found
