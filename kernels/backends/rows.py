"""Products on a CPU whose rows do not depend on the batch: torch's own calls, in blocks of rows that are all alike.

A library adds up in one order for few rows and in another for many, so the bits of a row of Y change with M.  Here X is
cut into blocks of at most `block` rows, and each block is padded with zeros to a multiple of `grain`, so that the
library is only ever called with a few numbers of rows.  Whether it adds up alike for all of these is not known from
documents: the gate proves it for each problem (daemon/child/chain_proof.py), and what it cannot prove is not published.

With block = grain there is one number of rows, which costs most: M = 1 then pays for a whole block.

The native hook does the same (hooks/native/cpu.h, run_rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import CHAIN_M, Problem
from gemmtuned.configs.rows_config import KERNELS, ROWS, read_rows
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import stamps
from gemmtuned.kernels.backends import onednn, torch_
from gemmtuned.kernels.backends.base import Kernel, StatelessKernel

_ALIGNED: Final = 64  # bytes; where torch allocates
_GRAINS: Final = (1, 2, 4, 8, 16)  # with blocks as large as can be: what costs least where it is proven
_FIXED: Final = (1, 4, 8, 16, 32)  # blocks of one size each
_Call = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
_OF: Final = {b.name: b for b in (*torch_.BACKENDS, *onednn.BACKENDS) if b.name in KERNELS}


@dataclass(frozen=True, slots=True)
class Rows:
    """config: `kernel`, whose calls they are (torch, torch_swap, onednn), `block` and `grain` in rows of X."""

    name: str = ROWS
    order: int = 35

    def stamps(self, device: Device) -> dict[str, str]:
        """Torch's version and the CPU: which instructions a library uses decides in which order it adds up."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """For batch-invariant problems on a CPU, the likely cheapest first."""
        if not problem.batch_invariant or not problem.threads:
            return
        kernels = [name for name, b in _OF.items() if any(b.candidates(problem.at(CHAIN_M)))]
        for grain in _GRAINS:
            for kernel in kernels:
                yield Candidate.of(self.name, kernel=kernel, block=CHAIN_M, grain=grain)
        for block in _FIXED:
            for kernel in kernels:
                yield Candidate.of(self.name, kernel=kernel, block=block, grain=block)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed for a config that is none, and where its kernel does not run the problem."""
        config = read_rows(candidate.config)
        bound = _OF[config.kernel].prepare(Candidate(config.kernel), problem)
        if not isinstance(bound, StatelessKernel):
            raise CandidateFailed(f"{candidate}: {config.kernel} keeps something of the weight")
        return StatelessKernel(_in_blocks(bound.call, config.block, config.grain))


def _in_blocks(call: _Call, block: int, grain: int) -> _Call:
    def run(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_contiguous() or x.data_ptr() % _ALIGNED:
            x = x.clone(memory_format=torch.contiguous_format)
        m = x.shape[0]
        y: Tensor | None = None
        for first in range(0, m, block):
            some = min(block, m - first)
            padded = -(-some // grain) * grain
            part = x[first : first + some]
            if padded != some:
                wide = torch.zeros(padded, x.shape[1], dtype=x.dtype)
                wide[:some] = part
                part = wide
            made = call(part, w, bias)
            if padded == m:
                return made
            if y is None:
                y = torch.empty(m, w.shape[1], dtype=x.dtype)
            y[first : first + some] = made[:some]
        assert y is not None
        return y

    return run


BACKENDS: Final = (Rows(),)
