"""Taking a state apart: a head that is pickled, and the memory of arrays and tensors, which is copied as it is.

Anything that can be pickled may be in a state. numpy's arrays, and all that pickles as they do, such as JAX's, hand out their
memory by pickle's own protocol; torch's tensors by us. torch is never imported here: who has tensors has it, and who gets some
must have it.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rallypoint.base import environment
from rallypoint.checkpoint.devices import Carrier, DevicePart, Ferry
from rallypoint.errors import UsageError

__all__ = ["Part", "put_together", "take_apart"]

Place = Callable[[int, Sequence[int]], tuple[list[int], int]]


class Part:
    """The memory of one array or tensor, which lives as long as its `owner`."""

    def __init__(self, view: memoryview, owner: object) -> None:
        self.view, self.owner, self.size = view, owner, view.nbytes

    def copy_to(self, target: memoryview) -> None:
        target[:] = self.view

    def wait(self) -> None:
        """Until it is copied."""


class Kept(NamedTuple):
    """A part as it lies in the body."""

    begin: int
    view: memoryview
    is_tensor: bool


class _Taker(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._take_buffer)
        self.parts: list[Part | DevicePart] = []
        self.kinds: list[bool] = []  # whether it is a tensor's

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        self.parts.append(Part(buffer.raw(), buffer))
        self.kinds.append(False)
        return False  # it is not to be in the head

    def persistent_id(self, obj: Any) -> Any:
        """A tensor is named by its number; the rest of it is beside that."""
        torch = environment.imported_torch()
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
            return None  # torch's own pickling knows how
        tensor = obj.detach().contiguous()
        self.parts.append(DevicePart(torch, tensor) if tensor.is_cuda else _part_of(tensor.cpu()))
        self.kinds.append(True)
        return len(self.parts) - 1, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.is_cuda


def _part_of(tensor: Any) -> Part:
    size = tensor.numel() * tensor.element_size()
    view = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")
    return Part(view, tensor)


class _Joiner(pickle.Unpickler):
    def __init__(self, head: memoryview, parts: Sequence[Kept], copy: bool, carrier: Carrier | Ferry | None) -> None:
        self._parts, self._copy, self._carrier = parts, copy, carrier
        super().__init__(io.BytesIO(head), buffers=[self._own(part.view) for part in parts if not part.is_tensor])

    def _own(self, view: memoryview) -> memoryview:
        return memoryview(bytearray(view)) if self._copy else view

    def persistent_load(self, pid: Any) -> Any:
        torch = environment.imported_torch()
        if torch is None:
            raise UsageError("this snapshot has tensors: import torch before checkpoint.load()")
        number, name, shape, was_on_device = pid
        part, dtype = self._parts[number], getattr(torch, name)
        if was_on_device and self._carrier is not None:
            return self._carrier(part.begin, part.view.nbytes, dtype, shape)
        if not part.view.nbytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._own(part.view), dtype=dtype).reshape(shape)


def take_apart(state: Any) -> tuple[bytes, list[Part | DevicePart]]:
    """The head, and the parts; they are of no use once the state changes."""
    body = io.BytesIO()
    taker = _Taker(body)
    taker.dump(state)
    sizes = [(part.size, is_tensor) for part, is_tensor in zip(taker.parts, taker.kinds, strict=True)]
    return pickle.dumps(sizes) + body.getvalue(), taker.parts


def put_together(
    head: memoryview, body: memoryview, place: Place, copy: bool = True, carrier: Carrier | Ferry | None = None
) -> Any:
    """The state whose head this is; `place` says where in the body the parts are, given the head's length and their sizes.

    Tensors that were on a device are given to the `carrier`, if there is one. All else is a copy, or a view of the body.
    """
    file = io.BytesIO(head)
    sizes = pickle.load(file)
    begins, _ = place(len(head), [size for size, _ in sizes])
    parts = [Kept(begin, body[begin : begin + size], tensor) for begin, (size, tensor) in zip(begins, sizes, strict=True)]
    return _Joiner(head[file.tell() :], parts, copy, carrier).load()
