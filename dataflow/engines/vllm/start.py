"""Starts vLLM once with a small model and ends it again, in a process of its own: whether it works on this device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from dataflow.errors import DataflowError, RunError
from dataflow.system.children import command

_LIMIT_S = 600.0


def start_once(model: str, device: str) -> float:
    """Starts vLLM, and ends it.

    Args:
        model: directory of a small model.
        device: ``cpu`` or ``cuda``.

    Returns:
        The seconds until it could sample.

    Raises:
        RunError: it does not start.
    """
    process = subprocess.Popen(
        command(__name__, model, device),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # vLLM's own processes end with it
    )
    try:
        out, _ = process.communicate(timeout=_LIMIT_S)
        answer = json.loads(out)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"vLLM has not started within {_LIMIT_S:g} s; see what else the machine does.") from error
    except ValueError as error:
        raise RunError(
            f"vLLM's process ended with exit code {process.returncode} and no message; run 'python -m {__name__} "
            f"{model} {device}' to see its output."
        ) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if "error" in answer:
        raise RunError(str(answer["error"]))
    return float(answer["seconds"])


def main(model: str, device: str) -> None:
    """Starts vLLM in this process, and writes to stdout what happened, as JSON."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no result
    from dataflow.engines.vllm.in_process import VllmRollout

    began = time.monotonic()
    try:
        engine = VllmRollout(model, 64, 8, device=device, max_num_seqs=4, gpu_memory=0.3, kv_cache_bytes=64 << 20)
        answer: dict[str, object] = {"seconds": time.monotonic() - began}
        engine.close()
    except DataflowError as error:
        answer = {"error": str(error)}
    os.write(out, json.dumps(answer).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
