"""Stop a computation at one of its torch operations."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode


class Stop(BaseException):
    """Like an interrupt from the keyboard: no `Exception`."""


class StopAt(TorchFunctionMode):
    """Raise an error at the torch operation of this number, once; by default `Stop`."""

    def __init__(self, number: int, error: type[BaseException] = Stop) -> None:
        super().__init__()
        self.left, self.error = number, error

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise self.error("stopped")
        return func(*args, **(kwargs or {}))
