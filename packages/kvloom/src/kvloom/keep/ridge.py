"""The linear systems of ridge regressions."""

from __future__ import annotations

import torch
from torch import Tensor


def solve(system: Tensor, y: Tensor) -> Tensor:
    """Return system^-1 y [..., N, D], of symmetric positive definite systems [..., N, N].

    `torch.cholesky_solve` launches hundreds of kernels on a GPU for each call.
    """
    lower, solve_triangular = torch.linalg.cholesky_ex(system).L, torch.linalg.solve_triangular
    return solve_triangular(lower.mT, solve_triangular(lower, y, upper=False), upper=True)
