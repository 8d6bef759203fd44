"""Many small tensors to the host in one copy from each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Transfer:
    """Put tensors in, `go`, and take them out on the host as rows of float64.

    >>> transfer = Transfer()
    >>> ticket = transfer.put([torch.ones(2), torch.zeros(())])
    >>> transfer.go()
    >>> ticket()
    tensor([1., 1., 0.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        self._rows: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def put(self, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """A function that gives the values back, one after another, once they have arrived."""
        places = []
        for tensor in tensors:
            kind = tensor.device, tensor.dtype
            start = self._sizes.get(kind, 0)
            self._parts.setdefault(kind, []).append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
            self._sizes[kind] = stop = start + tensor.numel()
            places.append((kind, start, stop))

        def arrived() -> Tensor:
            rows = [self._rows[kind][start:stop] for kind, start, stop in places]
            return torch.cat(rows) if rows else torch.empty(0, dtype=torch.float64, device="cpu")

        return arrived

    def go(self) -> None:
        """Wait for them."""
        for device in {device for device, _ in self._parts}:
            kinds = [kind for kind in self._parts if kind[0] == device]
            wide = torch.float32 if device.type == "mps" else torch.float64
            row = torch.cat([torch.cat(self._parts[kind]).to(wide) for kind in kinds]).cpu().double()
            self._rows.update(zip(kinds, row.split_with_sizes([self._sizes[kind] for kind in kinds]), strict=True))
        self._parts = {}
