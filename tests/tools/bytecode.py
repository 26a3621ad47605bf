"""Compiles what tests import, so that the first `make test` finds it compiled: `make install` does it beside pip.

pip is told to compile nothing, since most modules of torch and transformers are never imported.  What no tests
import of a package is left out here as well (LEFT_OUT): the first import compiles what is missing.  In pytest's own
process each module takes twice as long, and all are compiled one after another, while the other CPU waits.

    python tests/tools/bytecode.py            # all of it; what is compiled already is left as it is
    python tests/tools/bytecode.py OF_TORCH   # what is there as soon as torch and pytest are
"""

from __future__ import annotations

import compileall
import re
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pool
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = ROOT / "tests"
OURS: Final = ("configs", "daemon", "db", "gemmtuned", "hooks", "kernels", "benchmarks", "tests/support", "tests/tools")
OF_TORCH: Final = ("torch", "sympy", "networkx", "mpmath", "numpy", "_pytest")  # what installs torch and pytest brings
OTHERS: Final = (
    "pandas", "transformers", "botocore", "hypothesis", "textual", "huggingface_hub", "triton", "rich", "pydantic",
    "werkzeug", "httpcore2", "filelock", "urllib3", "boto3", "httpx2", "jinja2", "sqlite_utils", "flask",
)  # fmt: skip
# Of the installed packages, with a path from where they lie
LEFT_OUT: Final = re.compile(
    r"/(tests?|distutils|f2py|polynomial)/"
    r"|/torch/(testing/_internal|_inductor/(codegen|fx_passes|kernel|template_heuristics)|_vendor/quack|ao/ns"
    r"|distributed/(pipelining|optim|_tools)|utils/(hipify|benchmark|tensorboard))/"
    r"|/sympy/(physics|combinatorics|stats|vector|codegen|categories|diffgeom|testing)/"
    r"|/transformers/(models/(?!llama/|auto/)\w+|exporters|pipelines|cli|data|decision)/"
)


def installed(folder: Path) -> None:
    """Compile an installed package's modules but those of LEFT_OUT; what does not compile is left to who imports it."""
    if folder.is_dir():
        compileall.compile_dir(folder, maxlevels=20, quiet=2, rx=LEFT_OUT)


def ours(folder: Path) -> None:
    """Compile the modules that lie in a folder of this checkout and below it."""
    compileall.compile_dir(folder, maxlevels=20, quiet=2)


def rewritten(file: Path) -> None:
    """Compile a test file as pytest does when it imports it, with the values of its assertions kept; it is not run.

    The functions are pytest's own and not meant for others: a pytest that has them otherwise compiles the file later.
    What is no Python is left to pytest, which says so.
    """
    with suppress(ImportError, AttributeError, TypeError, OSError, SyntaxError, ValueError):
        from _pytest.assertion import rewrite

        config: Any = SimpleNamespace(getini=lambda name: False)
        state: Any = SimpleNamespace(trace=lambda text: None)
        cache = rewrite.get_cache_dir(file)
        kept = cache / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, kept) is None:
            cache.mkdir(exist_ok=True)
            of_source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, of_source, kept)


def _one(what: tuple[Callable[[Path], None], Path]) -> None:
    what[0](what[1])


def main() -> None:
    """See above."""
    early = "OF_TORCH" in sys.argv[1:]
    site = Path(sysconfig.get_path("purelib"))
    names = OF_TORCH if early else (*OF_TORCH, *OTHERS)
    files = [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")]
    work: list[tuple[Callable[[Path], None], Path]] = [(installed, site / name) for name in names]
    work += [(ours, ROOT / name) for name in OURS] + [(rewritten, file) for file in files]
    with Pool(1 if early else 2) as pool:
        for _ in pool.imap_unordered(_one, work, chunksize=4):
            pass


if __name__ == "__main__":
    main()
