"""Tensors on a GPU: their way into the kept memory, and back, as fast as the bus goes.

A copy is fast only where the memory is pinned. What is kept is registered with the driver for that, which takes longer than a
copy, but once for each slot and process; on standby it is done ahead (`ahead`). Any other worker that is restarted copies only
once: it goes by way of a few small buffers that are pinned, each filled while the one before it is on its way.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["Carrier", "DevicePart", "Ferry", "Read", "Registered"]

BUFFERS, BUFFER_BYTES = 8, 16 << 20

Read = Callable[[memoryview, int], None]  # fill this with what is kept from there on


class DevicePart:
    """The memory of one tensor on a device. What is copied is there after `wait`."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        self._torch, self._tensor = torch, tensor
        self._copied: Any = None
        self.size = tensor.numel() * tensor.element_size()

    def copy_to(self, target: memoryview) -> None:
        if self.size:
            kept = self._torch.frombuffer(target, dtype=self._torch.uint8)
            with self._torch.cuda.device(self._tensor.device):
                kept.copy_(self._tensor.reshape(-1).view(self._torch.uint8), non_blocking=True)
                self._copied = self._torch.cuda.Event()
                self._copied.record()

    def wait(self) -> None:
        """What the program has given the device to do since then is not waited for."""
        if self._copied is not None:
            self._copied.synchronize()


class Registered:
    """A mapping that the driver knows, until `close`; one that it does not want to know is copied to more slowly."""

    def __init__(self, torch: Any, memory: memoryview) -> None:
        self._runtime = torch.cuda.cudart()
        holder = ctypes.c_char.from_buffer(memory)
        self._address = ctypes.addressof(holder)
        del holder  # or the mapping could not be closed
        self.is_known = int(self._runtime.cudaHostRegister(self._address, len(memory), 0)) == 0

    def close(self) -> None:
        if self.is_known:
            self.is_known = False
            self._runtime.cudaHostUnregister(self._address)


class Ferry:
    """Puts tensors on a device, from kept memory that the driver knows; they are there after `close`."""

    def __init__(self, torch: Any, device: Any, body: memoryview) -> None:
        self._torch, self._device, self._body = torch, torch.device(device), body

    def __call__(self, begin: int, size: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        tensor = self._torch.empty(shape, dtype=dtype, device=self._device)
        if size:
            kept = self._torch.frombuffer(self._body[begin : begin + size], dtype=self._torch.uint8)
            tensor.reshape(-1).view(self._torch.uint8).copy_(kept, non_blocking=True)
        return tensor

    def close(self) -> None:
        self._torch.cuda.synchronize(self._device)


class Carrier:
    """Puts tensors on a device. Several threads read what is kept into buffers that are pinned, and send them on their way."""

    def __init__(self, torch: Any, device: Any, read: Read) -> None:
        self._torch, self._device, self._read = torch, torch.device(device), read
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(_Buffer(torch))
        self._threads = ThreadPoolExecutor(BUFFERS, "rallypoint-checkpoint")
        self._sent: list[Future[None]] = []

    def __call__(self, begin: int, size: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        """The tensor whose memory is kept from there on; it is there after `close`."""
        tensor = self._torch.empty(shape, dtype=dtype, device=self._device)
        target = tensor.reshape(-1)
        for at in range(0, size, BUFFER_BYTES):
            part = target.view(self._torch.uint8)[at : at + BUFFER_BYTES]
            self._sent.append(self._threads.submit(self._send, part, begin + at))
        return tensor

    def _send(self, target: Any, begin: int) -> None:
        buffer = self._free.get()
        buffer.sent.synchronize()
        size = target.numel()
        self._read(buffer.view[:size], begin)
        with self._torch.cuda.device(self._device):
            target.copy_(buffer.tensor[:size], non_blocking=True)
            buffer.sent.record()
        self._free.put(buffer)

    def close(self) -> None:
        """All of them are there; or one could not be read."""
        try:
            for one in self._sent:
                one.result()
        finally:
            self._threads.shutdown()
            self._torch.cuda.synchronize(self._device)


class _Buffer:
    def __init__(self, torch: Any) -> None:
        self.tensor = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.view = memoryview((ctypes.c_char * BUFFER_BYTES).from_address(self.tensor.data_ptr())).cast("B")
        self.sent = torch.cuda.Event()
