"""How tensors outside of batches travel through Ray, such as gathered weights: as bytes beside the pickle.

torch writes each tensor as a file of its own into the pickle, which takes as long as a whole hand-off of a small model,
and several times the memory of a large one.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class ReadInPlace(dict[str, "Tensor"]):
    """Tensors that each process of a node reads in Ray's memory, without a copy; they are read-only there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_in_place, ({name: sent(value.detach().cpu()) for name, value in self.items()},)


def _read_in_place(forms: Mapping[str, Any]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {name: received(form, copies=False) for name, form in forms.items()}


def register() -> None:
    """Lets Ray use this form for what this process sends; without effect unless it has imported torch."""
    if "torch" in sys.modules:
        from ray.util import register_serializer
        from torch import Tensor

        register_serializer(Tensor, serializer=sent, deserializer=received)


def sent(tensor: Tensor) -> Any:
    """Returns a dense tensor on the CPU as its bytes, type and shape; another or an empty one as torch pickles it."""
    import torch

    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or not tensor.numel() or tensor.requires_grad or tensor.dtype.is_complex:
        return pickle.dumps(tensor)
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def received(form: Any, copies: bool = True) -> Tensor:
    """Returns a tensor from its form.

    Its memory is its own, as a write to that of Ray would kill the process; without ``copies`` it is Ray's, to be read.
    """
    import torch

    if isinstance(form, bytes):
        return pickle.loads(form)
    data, dtype, shape = form
    return torch.from_numpy(data.copy() if copies else data).view(dtype).reshape(shape)
