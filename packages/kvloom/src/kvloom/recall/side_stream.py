"""Run work on a CUDA stream of its own, beside the device's other work; on a CPU, at once.

Decides when the device waits; independent of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """One CUDA stream, made when it is first needed.

    Call `wait` before you use its results or change the tensors that it reads.
    """

    def __init__(self) -> None:
        self.stream: Any = None
        self.done: Any = None

    def __deepcopy__(self, memo: dict) -> SideStream:
        """Return a new stream, once the work is done."""
        self.wait()
        return SideStream()

    def run(self, work: Callable[[], None], *reads: Tensor) -> None:
        """Run the function `work`, which reads the tensors `reads`, all on one device."""
        if not reads[0].is_cuda:
            work()
            return
        device = reads[0].device
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            work()
        for x in reads:  # the allocator must not reuse their memory while this stream reads
            x.record_stream(self.stream)
        self.done = self.stream.record_event()

    def wait(self) -> None:
        """Make the device's current stream wait for the work; the host does not wait."""
        if self.done is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.done)
            self.done = None
