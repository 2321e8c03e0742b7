"""The check of a model's weights against its architecture, made once a model and beside other work.

It needs torch and transformers, 4.5 s of CPU. So it runs in a process of its own, and is remembered: a model that
was found right, of which neither the configuration nor the headers of its weights have changed, is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from dataflow.errors import ModelError
from dataflow.files import cache_home, replaced
from dataflow.models.directory import headers, unused_weights, warn_unused
from dataflow.system.children import command

_REVISION = 1
"""Of what the check finds; a new one forgets what older ones have found."""


class WeightsCheck:
    """Begins the check of a model; a context manager.

    Args:
        path: of the model's directory.

    Raises:
        ModelError: the weights' headers cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = cache_home() / "checked" / f"{key_of(path)}.json"
        self._process: subprocess.Popen[bytes] | None = None
        if not self._file.is_file() and "torch" not in sys.modules:
            self._process = subprocess.Popen(
                command(__name__, str(path)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal ends the run, which ends this process
            )

    def __enter__(self) -> WeightsCheck:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()

    def wait(self, keep: bool = True) -> None:
        """Waits for the result; warns of weights that no layer takes.

        Args:
            keep: whether to remember it for later runs.

        Raises:
            ModelError: see :func:`~dataflow.models.directory.check_weights`.
        """
        unused = self._known()
        if unused is None:
            unused = self._found()
            if keep:
                self._remember(unused)
        warn_unused(self._path, unused)

    def _remember(self, unused: list[str]) -> None:
        # A home that cannot be written costs the next run this check again.
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(self._file) as temporary:
                temporary.write_text(json.dumps(unused), encoding="utf-8")

    def _known(self) -> list[str] | None:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, list) else None

    def _found(self) -> list[str]:
        if self._process is not None:
            out, _ = self._process.communicate()
            with contextlib.suppress(ValueError):
                answer = json.loads(out)
                if "error" in answer:
                    raise ModelError(answer["error"])
                return list(answer["unused"])
        return unused_weights(self._path)  # the process was killed, or there is none


def key_of(path: Path) -> str:
    """Returns a name for all that the result of a model's check depends on."""
    config = (path / "config.json").read_bytes().hex()
    versions = [importlib.metadata.version(package) for package in ("transformers", "torch")]
    facts = json.dumps([_REVISION, versions, config, headers(path)], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def main(path: str) -> None:
    """Checks a model and writes the result to stdout as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no result
    try:
        answer: dict[str, object] = {"unused": unused_weights(Path(path))}
    except ModelError as error:
        answer = {"error": str(error)}
    os.write(out, json.dumps(answer).encode())


if __name__ == "__main__":
    main(sys.argv[1])
