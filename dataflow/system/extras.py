"""Which extra of the package installs a module that is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

TRAIN = (
    "cachetools", "cloudpickle", "fastapi", "huggingface_hub", "pyarrow", "ray", "safetensors", "tensordict",
    "tokenizers", "torch", "transformers", "uvicorn", "uvloop", "verl",
)  # fmt: skip
EXTRAS = {
    **dict.fromkeys(TRAIN, "cpu"), "aiohttp": "http", "matplotlib": "pictures", "openai": "openai",
    "vllm": "cpu", "watchfiles": "http",
}  # fmt: skip
"""The smallest extra that installs each module which the base does without; those of ``cpu`` are in ``gpu``, too."""


def missing_extra(error: BaseException) -> str | None:
    """Returns a sentence that says which extra to install, if a missing module of one caused an error."""
    for cause in _causes(error):
        name = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if (why := not_installed(name)) is not None:
            return why
    return None


def not_installed(name: str) -> str | None:
    """Returns a sentence that says which extra installs a module, if one does and the module is missing."""
    extra = EXTRAS.get(name)
    if extra is None or importlib.util.find_spec(name) is not None:
        return None
    how = "'dataflow-rl[cpu]', or with GPUs 'dataflow-rl[gpu]'" if extra == "cpu" else f"'dataflow-rl[{extra}]'"
    return f"this needs {name}, which is not installed; pip install {how}."


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
