"""Taking a state apart: a head that is pickled, and the memory of arrays and tensors, which is copied as it is.

Anything that can be pickled may be in a state. numpy's arrays, and all that pickles as they do, such as JAX's, hand out their
memory by pickle's own protocol; torch's tensors by us. torch is never imported here: who has tensors has it, and who gets some
must have it.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Sequence
from typing import Any

from rallypoint.base import environment
from rallypoint.errors import UsageError

__all__ = ["Part", "put_together", "take_apart"]


class Part:
    """The memory of one array or tensor. It lives as long as its `owner`, and can be `copy`'d to where it is to be."""

    def __init__(self, view: memoryview, owner: object) -> None:
        self.view, self.owner, self.size = view, owner, view.nbytes

    def copy_to(self, target: memoryview) -> None:
        target[:] = self.view


class _Taker(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._take_buffer)
        self.parts: list[Part] = []
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
        tensor = obj.detach().to("cpu").contiguous()
        size = tensor.numel() * tensor.element_size()
        view = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")
        self.parts.append(Part(view, tensor))
        self.kinds.append(True)
        return len(self.parts) - 1, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


class _Joiner(pickle.Unpickler):
    def __init__(self, head: memoryview, parts: Sequence[memoryview], kinds: Sequence[bool]) -> None:
        buffers = [part for part, is_tensor in zip(parts, kinds, strict=True) if not is_tensor]
        super().__init__(io.BytesIO(head), buffers=buffers)
        self._parts = parts

    def persistent_load(self, pid: Any) -> Any:
        torch = environment.imported_torch()
        if torch is None:
            raise UsageError("this snapshot has tensors: import torch before checkpoint.load()")
        number, dtype, shape = pid
        part = self._parts[number]
        if not part.nbytes:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.frombuffer(part, dtype=getattr(torch, dtype)).reshape(shape)


def take_apart(state: Any) -> tuple[bytes, list[Part]]:
    """The head, and the parts; they are of no use once the state changes."""
    body = io.BytesIO()
    taker = _Taker(body)
    taker.dump(state)
    sizes = [(part.size, is_tensor) for part, is_tensor in zip(taker.parts, taker.kinds, strict=True)]
    return pickle.dumps(sizes) + body.getvalue(), taker.parts


def put_together(head: memoryview, body: memoryview, place: Any) -> Any:
    """The state whose head this is; `place` says where in the body the parts are, given the head's length and their sizes."""
    file = io.BytesIO(head)
    sizes = pickle.load(file)
    begins, _ = place(len(head), [size for size, _ in sizes])
    parts = [body[begin : begin + size] for begin, (size, _) in zip(begins, sizes, strict=True)]
    return _Joiner(head[file.tell() :], parts, [is_tensor for _, is_tensor in sizes]).load()
