"""What the package and its extras require: which extra installs a missing module, and which versions are others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE = "dataflow-rl"

TRAIN = (
    "PIL", "cachetools", "cloudpickle", "fastapi", "huggingface_hub", "hydra", "omegaconf", "pandas", "peft", "pyarrow",
    "ray", "renderers",
    "safetensors", "tensorboard", "tensordict", "tokenizers", "torch", "transformers", "uvicorn", "uvloop", "verl",
)  # fmt: skip
EXTRAS = {
    **dict.fromkeys(TRAIN, "cpu"), "aiohttp": "http", "matplotlib": "pictures", "multidict": "http",
    "vllm": "cpu", "vllm_router": "cpu",
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
    return f"this needs {name}, which is not installed; {install(extra)}."


def install(extra: str) -> str:
    """Returns the command that installs an extra; of "" the package alone."""
    if extra in ("cpu", "train"):
        return f"pip install '{PACKAGE}[cpu]', or with GPUs '{PACKAGE}[gpu]'"
    return f"pip install '{PACKAGE}[{extra}]'" if extra else f"pip install {PACKAGE}"


def version_of(package: str) -> str | None:
    """Returns the version that is installed; None if none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def required(extra: str) -> list[Requirement] | None:
    """Returns what an extra requires, of "" the package alone; None where the package runs from its sources."""
    from packaging.requirements import Requirement

    try:
        found = [Requirement(line) for line in importlib.metadata.requires(PACKAGE) or []]
    except importlib.metadata.PackageNotFoundError:
        return None
    own = [each for each in found if each.name != PACKAGE and (each.marker is not None) == bool(extra)]
    return [each for each in own if each.marker is None or each.marker.evaluate({"extra": extra})]


def mismatched(extra: str) -> str | None:
    """Returns a sentence about the packages of an extra that are installed in another version than it requires."""
    wrong = [
        f"{each.name} {version} (needs {each.specifier})"
        for each in required(extra) or ()
        if (version := version_of(each.name)) is not None and not each.specifier.contains(version, prereleases=True)
    ]
    return f"{', '.join(wrong)}: another version than was tested; {install(extra)}." if wrong else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
