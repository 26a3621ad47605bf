"""Install a wheel alone in a clean environment and try it: `package.py WHEEL [--demo] [--link-torch]`, `make package`.

Nothing of the checkout is in reach: torch comes from the index as constraints.txt pins it, commands run in a folder of
their own.  --link-torch: torch's files are those that this environment has from the index, and all else is installed;
.ci/run has just unpacked them, for a third of the CPU time of all this.  --demo: `gemmtuned demo` as well, a minute,
whose gain in fp32 is said at the end and has to reach LEAST.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TRY_LATER: Final = 75
LEAST: Final = 1.2
HOOKED: Final = "import torch; torch.nn.Linear(64, 64)(torch.randn(4, 64))"
INSIDE: Final = (
    "gemmtuned/demo/program.py", "gemmtuned/examples/classifier.py", "gemmtuned/hooks/native/c_api.cpp",
    "gemmtuned/db/migrations/", "gemmtuned/reports/page.html.j2", "gemmtuned/kernels/cuda/one_shot.cu",
    "gemmtuned/py.typed",
)  # fmt: skip


def missing(wheel: Path) -> list[str]:
    """What a wheel has to hold and does not."""
    names = zipfile.ZipFile(wheel).namelist()
    return [part for part in INSIDE if not any(name.startswith(part) for name in names)]


def link(name: str, environment: Path) -> None:
    """Give an environment what this one has of a distribution, but its programs: as hard links, or copies elsewhere."""
    there = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))
    found = metadata.distribution(name)
    for part in sorted({file.parts[0] for file in found.files or () if len(file.parts) > 1} - {".."}):
        here = Path(str(found.locate_file(part)))
        being_written = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(here, there / part, ignore=being_written, copy_function=link_or_copy)


def link_or_copy(source: str, target: str) -> None:
    """A hard link where the file system can make one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def install(wheel: Path, folder: Path, *, link_torch: bool) -> Path:
    """The folder of programs of a new environment with this wheel."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if link_torch:
        link("torch", folder)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += ["--progress-bar", "off", "--no-compile", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch", "numpy<2.4", str(wheel)], check=True)
    return folder / "bin"


def tried(bin_: Path, folder: Path) -> None:
    """The first commands of a newcomer; raises CalledProcessError when one fails."""
    env = {**os.environ, "GEMMTUNED_HOME": str(folder / "home")}

    def run(*words: str, **more: str) -> str:
        command = [str(bin_ / words[0]), *words[1:]]
        return subprocess.run(
            command, cwd=folder, env={**env, **more}, check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    print(run("gemmtuned", "--version"), end="")
    run("gemmtuned", "status")
    run("gemmtuned", "run", "--", str(bin_ / "python"), "-c", HOOKED)
    print(run("gemmtuned", "coverage", "--json"), end="")
    run("python", "-c", "import gemmtuned.examples.classifier as c; c.serve(c.build(), 0.1)")
    completed = run("gemmtuned", _GEMMTUNED_COMPLETE="complete_bash", COMP_WORDS="gemmtuned explain 4x", COMP_CWORD="2")
    assert completed.split() == ["4x64x64"], completed


def demo(bin_: Path, folder: Path) -> float:
    """What `gemmtuned demo` says it gained: 1.0 where it says that there is no clear gain, or none was seen."""
    done = subprocess.run([str(bin_ / "gemmtuned"), "demo"], cwd=folder, check=False, text=True, stdout=subprocess.PIPE)
    print(done.stdout, end="")
    if done.returncode not in (0, TRY_LATER):
        sys.exit(f"gemmtuned demo ended with {done.returncode}")
    said = re.search(r"^([0-9.]+)x in ([0-9]+) s, in processes", done.stdout, re.M)
    return float(said[1]) if said else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--link-torch", action="store_true")
    given = parser.parse_args()
    left_out = missing(given.wheel)
    if left_out:
        sys.exit(f"{given.wheel.name} lacks {', '.join(left_out)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bin_ = install(given.wheel.resolve(), folder / "venv", link_torch=given.link_torch)
        tried(bin_, folder)
        if given.demo:
            gain = demo(bin_, folder)
            print(f"package: the wheel alone gains {gain:.2f}x in fp32 ({LEAST}x asked)")
            if gain < LEAST:
                sys.exit(1)


if __name__ == "__main__":
    main()
