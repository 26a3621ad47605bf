"""What the KERNEL of a file in this folder is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.own_kernel import OwnKernel, symbol


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaKernel(OwnKernel):
    """A kernel in CUDA C++.

    target: what NVRTC compiles for.  samples: the sources of a few configs, which together hold all that is compiled.
    record gives one configuration for one problem: source() is what NVRTC compiles, launch how that is launched.
    """

    target: str
    samples: Callable[[], Iterable[str]]

    def source_hash(self) -> str:
        """The hash of what is compiled, 12 hex digits: no comments, and no spaces at the ends of lines."""
        return sha256("".join(map(without_comments, self.samples())).encode()).hexdigest()[:12]

    def symbol(self, found: Any) -> str:
        """What the binary of a configuration calls its kernel; not in the source, so that stamps stay as they were."""
        return symbol(self.name, found.n, found.k, found.tokens)

    def compile(self, found: Any) -> nvrtc.Compiled:
        """The binary of a configuration that `record` gave.

        Raises CandidateFailed when it does not compile, or spills registers to memory.
        """
        made = nvrtc.compiled(found.source(), self.target, called={self.name: self.symbol(found)})
        if made.spill_bytes:
            raise CandidateFailed(f"{found} for {self.target}: spills {made.spill_bytes} bytes per thread")
        return made


def without_comments(source: str) -> str:
    """CUDA C++ as stamps cover it: without comments, empty lines, and spaces at the ends of lines."""
    code = re.sub(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', lambda found: found[1] or " ", source, flags=re.DOTALL)
    return "".join(f"{line.rstrip()}\n" for line in code.splitlines() if line.strip())
