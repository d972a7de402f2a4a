"""Tensors of any layout, and groups of them, as the one flat tensor that an operation works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phub_collective.torch.tensors import count_write


class Stage:
    """What travels for `tensors`, which have one dtype.

    Attributes:
        flat: the contiguous tensor that is exchanged in place.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], in_place: bool) -> None:
        self._tensors, self._in_place = tensors, in_place
        self._direct = len(tensors) == 1 and (not in_place or tensors[0].is_contiguous())
        with torch.no_grad():
            if not self._direct:
                self.flat = torch.cat([one.detach().reshape(-1) for one in tensors])
            elif in_place:
                self.flat = tensors[0].detach()
            else:
                self.flat = tensors[0].detach().clone(memory_format=torch.contiguous_format)

    def results(self) -> list[torch.Tensor]:
        """After the exchange: the tensors themselves (in place), or new ones."""
        if self._direct:
            if not self._in_place:
                return [self.flat]
            count_write(self._tensors[0])
            return list(self._tensors)
        pieces = torch.split(self.flat, [one.numel() for one in self._tensors])
        shaped = [p.view(t.shape) for p, t in zip(pieces, self._tensors, strict=True)]
        if not self._in_place:
            return [one.clone() for one in shaped]
        with torch.no_grad():
            for tensor, piece in zip(self._tensors, shaped, strict=True):
                tensor.copy_(piece)
        return list(self._tensors)


def by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Indices of the tensors of each dtype, in order of appearance."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return groups
