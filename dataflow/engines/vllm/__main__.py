"""Starts vLLM once with the model and on the device given, and ends it: whether it works here."""

import sys

from dataflow.errors import DataflowError


def main(model: str, device: str) -> None:
    """Ends with the error as the last line of stderr if it does not start."""
    from dataflow.engines.vllm.engine import VllmRollout

    try:
        VllmRollout(model, 64, 8, device=device, max_num_seqs=4, gpu_memory=0.3, kv_cache_bytes=64 << 20).close()
    except DataflowError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
