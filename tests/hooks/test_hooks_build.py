"""The native hook's place in the cache: what lies there is mapped only when it is what was built."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_library import DAMAGE
from hooked import Home, wait_for
from typer.testing import CliRunner

from gemmtuned import cli
from gemmtuned.commands import native_library
from gemmtuned.configs.settings import Settings
from gemmtuned.hooks.native import build as native_build
from gemmtuned.hooks.native.build import BuildFailed, build, failure, find_built, library_path, may_try

PROGRAM = """
    import json, torch, gemmtuned
    torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    print(json.dumps([gemmtuned.status()["path"], gemmtuned.status()["note"]]))
    """


@pytest.fixture
def copied(home: Home, tmp_path: Path) -> Path:
    """The library in a cache of its own."""
    cache = tmp_path / "cache"
    built, there = build(home.cache), library_path(cache)
    assert there is not None
    there.parent.mkdir(parents=True)
    for suffix in (".so", ".json"):
        shutil.copyfile(built.with_suffix(suffix), there.with_suffix(suffix))
    assert find_built(cache) == there
    return there


@pytest.mark.parametrize("how", DAMAGE)
def test_a_library_that_is_not_what_was_built_is_not_mapped_and_said_in_one_line(
    home: Home, copied: Path, how: str
) -> None:
    DAMAGE[how](copied)
    done = home.run(PROGRAM, GEMMTUNED_CACHE=str(copied.parent.parent))

    path, note = done.said
    assert path == "off"
    assert note.endswith("is not what was built. Run: gemmtuned doctor --build")
    assert done.ours == [f"gemmtuned: {note}"]


def test_a_program_that_starts_while_the_library_is_built_says_that_it_comes(home: Home, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    there = library_path(cache)
    assert there is not None
    there.parent.mkdir(parents=True)
    notes = []
    with there.with_suffix(".lock").open("w") as lock:
        for how in (fcntl.LOCK_EX, fcntl.LOCK_UN):
            fcntl.flock(lock, how)
            done = home.run(PROGRAM, GEMMTUNED_CACHE=str(cache))
            notes.append(done.said[1])
            assert done.ours == [f"gemmtuned: {notes[-1]}"]

    building = "nothing is counted or routed yet: the native hook is being built, and is used here once it is there"
    assert notes[0] == building
    assert notes[1].endswith("Run: gemmtuned doctor --build")


@pytest.mark.long
def test_doctor_builds_anew_what_does_not_load(home: Home, copied: Path) -> None:
    copied.write_bytes(b"no library")
    facts = {"bytes": 10, "sha256": native_build.sha256(b"no library").hexdigest()}
    copied.with_suffix(".json").write_text(json.dumps(facts))  # whole, and of no use
    cache = copied.parent.parent
    (cache / "bin").mkdir()
    fake(cache / "bin", "cp " + str(build(home.cache)) + ' "$out"')
    env = {**home.environment(GEMMTUNED_CACHE=str(cache)), "PATH": f"{cache / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "gemmtuned", "doctor", "--build", "--json"],
        env=env, capture_output=True, text=True, timeout=100,
    )  # fmt: skip

    checks = {check["name"]: check["result"] for check in json.loads(done.stdout)["checks"]}
    assert (checks["native hook"], checks["takes effect"]) == ("PASS", "PASS"), done.stdout
    assert find_built(cache) == copied


# ---- builds that fail


def fake(folder: Path, script: str) -> None:
    """A compiler; $out is where its result belongs."""
    compiler = folder / "g++"
    find_out = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done'
    compiler.write_text(f"#!/bin/sh\n{find_out}\n{script}\n")
    compiler.chmod(0o755)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return lambda script: fake(tmp_path / "bin", script)


@pytest.mark.parametrize(
    ("said", "lasting"),
    [
        ("echo 'x/c_api.cpp:12:5: error: no member' >&2; exit 1", True),
        ("echo '/usr/include/x.h:1: fatal error: y.h: No such file or directory' >&2; exit 1", False),
        ("echo 'x/c_api.cpp:9:10: fatal error: ATen/ATen.h: Input/output error' >&2; exit 1", False),
        ("echo 'x/call.h:9:10: error: virtual memory: Cannot allocate memory' >&2; exit 1", False),
        ('[ "$LC_ALL" = C ] || exit 1; echo "x/c_api.cpp:12:5: error: no member" >&2; exit 1', True),
        ("echo 'collect2: error: ld returned 1 exit status' >&2; exit 1", False),
        ("echo 'x/call.h:1:1: fatal error: cannot write: No space left on device' >&2; exit 1", False),
        ("kill -9 $$", False),
    ],
)
def test_an_error_of_the_sources_is_remembered_and_any_other_is_tried_again(
    tmp_path: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, said: str, lasting: bool
) -> None:
    compiler(said)
    cache = tmp_path / "cache"
    assert may_try(cache)
    with pytest.raises(BuildFailed, match="does not compile"):
        build(cache)
    now_s = time.time()

    def after(seconds: float) -> bool:
        monkeypatch.setattr(native_build.clock, "now_s", lambda: now_s + seconds)
        return may_try(cache)

    assert failure(cache) and not after(10)
    assert after(120) is not lasting
    assert after(8 * 86400)
    monkeypatch.undo()
    assert not list((cache / "native").glob(".capture*")), "nothing half done is left"


@pytest.mark.parametrize("tries", ["1e999", "NaN", "9" * 5000, '"²"'])
def test_what_is_remembered_of_a_failure_and_is_no_number_is_passed_over(tmp_path: Path, tries: str) -> None:
    path = library_path(tmp_path)
    assert path is not None
    path.parent.mkdir()
    path.with_suffix(".failed.json").write_text(f'{{"reason": "x", "at_s": 1, "lasting": true, "tries": {tries}}}')

    assert failure(tmp_path) is None and may_try(tmp_path)


def test_each_failure_in_turn_waits_longer_and_a_build_that_works_forgets_them(
    tmp_path: Path, home: Home, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    compiler("exit 1")
    for _ in range(3):
        with pytest.raises(BuildFailed):
            build(cache)
    now_s = time.time()
    monkeypatch.setattr(native_build.clock, "now_s", lambda: now_s + 600)
    assert not may_try(cache)
    monkeypatch.setattr(native_build.clock, "now_s", lambda: now_s + 1000)
    assert may_try(cache)
    compiler(f'cp "{build(home.cache)}" "$out"')
    path = build(cache)

    assert find_built(cache) == path
    assert failure(cache) is None and may_try(cache)


def test_the_daemon_builds_once_there_is_room_again_and_anew_what_was_removed(
    tmp_path: Path, home: Home, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("in the way, as a full disk is")
    compiler(f'cp "{build(home.cache)}" "$out"')
    settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path), "GEMMTUNED_CACHE": str(tmp_path / "cache")})
    monkeypatch.setenv("GEMMTUNED_CACHE", str(tmp_path / "cache"))
    beside = native_library.Beside(settings, look_s=0.02)
    try:
        (tmp_path / "cache").unlink()
        for _ in range(2):
            wait_for(lambda: find_built(settings.cache) is not None)
            shutil.rmtree(settings.cache)
    finally:
        beside.stop()


def test_the_daemon_goes_on_looking_however_often_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []

    def find_built(cache: Path) -> None:
        looks.append(cache)
        raise OSError("no disk")

    monkeypatch.setattr(native_library, "find_built", find_built)
    beside = native_library.Beside(Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}), look_s=0.0)
    try:
        wait_for(lambda: len(looks) > 1100)  # 2.0 ** 1024 is no number
    finally:
        beside.stop()


def test_a_full_disk_is_named_before_the_compiler_runs(
    tmp_path: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(f"touch {tmp_path / 'ran'}")
    monkeypatch.setattr(native_build, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(BuildFailed, match="1024 KiB are free"):
        build(tmp_path / "cache")

    assert not (tmp_path / "ran").exists()


@pytest.mark.long
@pytest.mark.parametrize("how", ["no compiler", "a compiler that fails"])
def test_doctor_that_cannot_build_ends_with_1_and_does_not_advise_itself(
    tmp_path: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    compiler_fails = how != "no compiler"
    if compiler_fails:
        compiler("echo 'x/c_api.cpp:12:5: error: no member' >&2; exit 1")
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GEMMTUNED_CACHE", str(tmp_path / "cache"))
    quick = ["--quick"] if compiler_fails else []  # of a process that imports torch one is enough
    done = CliRunner().invoke(cli.build(), ["doctor", "--build", "--json", *quick])

    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.exit_code == 1 and checks["native hook"]["result"] == "FAIL"
    assert ("no member" if compiler_fails else "no C++ compiler") in checks["native hook"]["found"]
    assert ("install g++" in checks["native hook"]["fix"]) is not compiler_fails
    assert "doctor --build" not in done.stdout
    assert ("takes effect" in checks) is not compiler_fails


def test_a_disk_that_fails_at_the_end_leaves_nothing_that_would_be_mapped(
    tmp_path: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    compiler('echo half > "$out"')
    monkeypatch.setattr(native_build.os, "fsync", fsync)
    with pytest.raises(BuildFailed, match="was not kept"):
        build(tmp_path / "cache")

    assert find_built(tmp_path / "cache") is None


def test_two_builds_of_torch_with_one_version_have_two_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(name: str, version: str, abi: int = 1) -> Path:
        (tmp_path / name / "share/cmake/Torch").mkdir(parents=True)
        (tmp_path / name / "version.py").write_text(version)
        config = f'set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI={abi}")'
        (tmp_path / name / "share/cmake/Torch/TorchConfig.cmake").write_text(config)
        return tmp_path / name

    cpu = "__version__ = '2.13.0'\ncuda = None\ngit_version = 'abc'\n"
    folders = [
        folder("cpu", cpu),
        folder("cuda", cpu.replace("None", "'13.0'")),
        folder("own", cpu.replace("abc", "def")),
        folder("abi", cpu, 0),
    ]
    names = set()
    for each in folders:
        monkeypatch.setattr(native_build, "torch_folder", lambda each=each: each)
        names.add(library_path(tmp_path))
    monkeypatch.setattr(native_build, "torch_folder", lambda: folders[0])
    monkeypatch.setattr(native_build, "_libstdcxx", lambda: "libstdc++.so.6.0.25")
    names.add(library_path(tmp_path))

    assert len(names) == 5


def test_a_frozen_program_with_its_own_copy_of_the_cpp_library_looks_for_the_same_file(tmp_path: Path) -> None:
    """PyInstaller copies it under the name that is asked for, which does not end with its version."""
    asks = "from gemmtuned.hooks.native import build; import ctypes; "
    asks += "library = ctypes.CDLL('libstdc++.so.6'); print(build._libstdcxx()); print(open('/proc/self/maps').read())"

    def said(**env: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", asks], env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        name, _, maps = done.stdout.partition("\n")
        return name, next(line.split()[-1] for line in maps.splitlines() if "libstdc++" in line)

    name, path = said()
    shutil.copy(Path(path).resolve(), tmp_path / "libstdc++.so.6")
    assert said(LD_LIBRARY_PATH=str(tmp_path)) == (name, str(tmp_path / "libstdc++.so.6"))
    assert name.removeprefix("libstdc++.so.6.0.").isdigit()


@pytest.mark.long
def test_operators_of_torchs_own_use_may_take_other_arguments_in_a_later_torch(tmp_path: Path) -> None:
    torch, cxx = native_build.torch_folder(), native_build.compiler()
    assert torch is not None and cxx is not None
    (tmp_path / "ATen/ops").mkdir(parents=True)
    for name, last in (("_int_mm", "Tensor & mat2"), ("_addmm_activation", "Scalar & alpha=1")):
        header = f"ATen/ops/{name}_cpu_dispatch.h"
        text = (torch / "include" / header).read_text()
        assert text.count(last) >= 1
        (tmp_path / header).write_text(text.replace(last, f"{last}, int later{'=0' if '=' in last else ''}"))
    folders = [f"-I{folder}" for folder in (tmp_path, torch / "include", torch / "include/torch/csrc/api/include")]
    command = [cxx, "-std=c++20", "-fsyntax-only", *folders, str(native_build._here() / "c_api.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
