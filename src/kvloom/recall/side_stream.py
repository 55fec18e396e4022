"""Work beside the device's other work: on a CUDA stream of its own, elsewhere at once.

Decides when who waits for whom; knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Aside:
    """One stream, made when it is needed.

    What was computed there may be used after `wait`, and what it reads must not change before.
    """

    def __init__(self) -> None:
        self.stream: Any = None
        self.done: Any = None

    def __deepcopy__(self, memo: dict) -> Aside:
        """Return a new one, once the work is done."""
        self.wait()
        return Aside()

    def run(self, work: Callable[[], None], *reads: Tensor) -> None:
        """Do the work, which reads `reads`: all on one device."""
        if not reads[0].is_cuda:
            work()
            return
        device = reads[0].device
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            work()
        for x in reads:  # their memory is not given to others while this stream reads
            x.record_stream(self.stream)
        self.done = self.stream.record_event()

    def wait(self) -> None:
        """Let the device's next work wait for this; the host goes on."""
        if self.done is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.done)
            self.done = None
