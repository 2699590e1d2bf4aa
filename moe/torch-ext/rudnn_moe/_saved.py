"""What a backward that is called by hand keeps of its forward."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling


class Saved:
    """Tensors that a backward called by hand needs, which must then be as they were."""

    def __init__(self, **tensors: torch.Tensor | None) -> None:
        # A traced graph knows no versions, and whoever runs it keeps its tensors.
        kept = {} if is_dynamo_compiling() else tensors
        self.__setstate__({name: tensor for name, tensor in kept.items() if tensor is not None})

    def __getstate__(self) -> dict[str, torch.Tensor]:
        """Returns what a copy keeps, whose tensors have versions of their own; what has been changed is not copied."""
        self.check("copy")
        return self._tensors

    def __setstate__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}

    def check(self, function: str) -> None:
        """Raises RuntimeError if one of the tensors has been changed in place since.

        Args:
            function: the name of the backward.
        """
        if is_dynamo_compiling():
            return
        for name, tensor in self._tensors.items():
            if _version(tensor) != self._versions[name]:
                raise RuntimeError(f"{function}: {name} has been modified by an inplace operation since the forward")


def _version(tensor: torch.Tensor) -> int:
    """Returns the count of changes in place; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version
