"""Packages of others that end a worker, each in its way: when they are imported, or asked for their version."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

ENDS: Final = {
    "segfault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "exit": "import os; os._exit(0)",
    "hang": "import time; time.sleep(600)",
}
# In which piece it does so: of a backend's module, its stamp, a backend's or a family's entry point, its candidates
BACKEND: Final = """
    from gemmtuned.kernels.backends.base import StatelessKernel
    class Backend:
        name, order = "{name}", 50
        def stamps(self, device):
            {stamps}
            return {{self.name: "1"}}
        def candidates(self, problem):
            {candidates}
            return iter(())
        def prepare(self, candidate, problem):
            raise NotImplementedError
    BACKEND = Backend()
    """
OPERATOR: Final = """
    from gemmtuned.kernels.backends.torch_op import OperatorBackend
    BACKEND = OperatorBackend(
        name="{name}", package="{name}", imports=("{name}_kernels",), operator="{name}::mm", arguments=("x", "w"),
        suits=lambda p: True, kinds=("cpu",),
    )
    """
FAMILY: Final = """
    from gemmtuned.kernels.families.base import Family
    class Mine(Family):
        def tunable(self, device_kind):
            {tunable}
    FAMILY = Mine("{name}.mine", (), stock=None)
    """


def install(site: Path, name: str, where: str, end: str, *, version: str = "1.0") -> None:
    """Puts the distribution `name` into a folder for sys.path; it ends its process as `end` says, or raises it."""
    does = ENDS.get(end, end)
    backend = BACKEND.format(
        name=name, stamps=does if where == "stamps" else "pass", candidates=does if where == "candidates" else "pass"
    )
    group, value, code = {
        "module": ("backends", "BACKEND", OPERATOR.format(name=name)),
        "family": ("families", "FAMILY", FAMILY.format(name=name, tunable=does)),
        "family's import": ("families", "FAMILY", does),
    }.get(where, ("backends", "BACKEND", does if where == "import" else backend))
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{name}.py").write_text(textwrap.dedent(code))
    (site / f"{name}_kernels.py").write_text(does)
    facts = site / f"{name}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (facts / "entry_points.txt").write_text(f"[gemmtuned.{group}]\n{name} = {name}:{value}\n")
