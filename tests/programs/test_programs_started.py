"""Ways to start a program: with the hook off and on it says the same and ends the same, and its counts are exact."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipapp
from pathlib import Path

import pytest
from hooked import Home

PROGRAM = """
import sys
import torch
torch.set_num_threads(1)
for _ in range(10):
    y = torch.nn.functional.linear(torch.ones(8, 16), torch.ones(4, 16))
print(y.sum().item(), sys.flags.isolated, sys.flags.no_site, sys.flags.optimize, sys.gettrace())
"""
POOL = """
import torch
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

def work(number):
    torch.set_num_threads(1)
    for _ in range(5):
        y = torch.nn.functional.linear(torch.ones(8, 16), torch.ones(4, 16))
    return y.sum().item() + number

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        print([*pool.map(work, range(2))])
"""
TRACED = (
    "import sys, threading\nsys.settrace(trace := lambda *args: trace)\nthreading.settrace(trace)\n"
    + PROGRAM.replace("sys.gettrace()", "sys.gettrace() is trace")
)
EMBEDS = """
#include <Python.h>
int main(void) {
  Py_Initialize();
  const int failed = PyRun_SimpleString(PROGRAM);
  return Py_FinalizeEx() | failed;
}
"""
WAYS = {
    "isolated": (["-I"], PROGRAM), "without site": (["-S"], PROGRAM), "traced": (["-OO"], TRACED), "a pool": ([], POOL),
}  # fmt: skip
ROOT = Path(__file__).parents[2]


def check(command: list[str], home: Home, **env: str) -> None:
    """Run it off and on, and compare."""
    off, on = (
        subprocess.run(
            command, env=home.environment(GEMMTUNED=switch, AITER_TUNE_GEMM="0", **env), capture_output=True,
            text=True, timeout=120,
        )
        for switch in "01"
    )  # fmt: skip
    assert (on.returncode, on.stdout) == (off.returncode, off.stdout) and off.returncode == 0, on.stderr + off.stderr
    assert on.stderr == off.stderr
    assert home.counts() == {("fp32:8x4x16,threads=1", "miss"): 10}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_start_with_other_flags_or_in_other_processes_changes_nothing(home: Home, tmp_path: Path, way: str) -> None:
    flags, text = WAYS[way]
    program = tmp_path / "program.py"
    program.write_text(text)
    path = f"{ROOT}:{sysconfig.get_path('purelib')}" if way == "without site" else ""
    check([sys.executable, *flags, str(program)], home, **({"PYTHONPATH": path} if path else {}))


@pytest.mark.long
def test_a_program_in_a_zip_file_is_counted(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text(PROGRAM)
    zipapp.create_archive(folder, tmp_path / "app.pyz")
    check([sys.executable, str(tmp_path / "app.pyz")], home)


@pytest.mark.long
def test_a_c_program_that_embeds_python_is_counted(home: Home, tmp_path: Path) -> None:
    libraries, name = sysconfig.get_config_var("LIBDIR"), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    source, program = tmp_path / "embeds.c", tmp_path / "embeds"
    lines = "".join(f'"{line}\\n"' for line in re.sub(r'"', r"\"", PROGRAM).splitlines())
    source.write_text(EMBEDS.replace("PROGRAM", lines))
    built = subprocess.run(
        ["cc", str(source), f"-I{sysconfig.get_path('include')}", f"-L{libraries}", f"-l{name}", "-o", str(program),
         f"-Wl,-rpath,{libraries}"], capture_output=True, text=True,
    )  # fmt: skip
    if built.returncode:
        pytest.skip(f"no program can embed this Python: {built.stderr[-200:]}")
    check([str(program)], home, PYTHONPATH=f"{ROOT}:{sysconfig.get_path('purelib')}")
