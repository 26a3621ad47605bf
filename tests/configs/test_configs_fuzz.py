"""Mutated tables: whatever is in a file, reading it ends soon, runs nothing, and accounts for every row or says why."""

from __future__ import annotations

import os
import random
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import read_any
from gemmtuned.configs.hint import Imported

DATA = Path(__file__).parents[1] / "data/aiter"
SMALL = sorted(path for path in [*DATA.rglob("*.csv"), *DATA.rglob("*.json")] if path.stat().st_size < 20_000)
CONTENT = {path.name: path.read_bytes() for path in SMALL}
CONTENT["tunableop_results0.csv"] = (
    b"Validator,PT_VERSION,2.10.0\nGemmTunableOp_BFloat16_TN,tn_2048_8_1024_ld_1024_1024_2048,Gemm_Hipblaslt_52565,0.01\n"
    b"ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_128_2048_ld_2048_2048_64_rw_1_bias_None,Default\n"
)
CONTENT["lookup_table.json"] = (
    b'{"((torch.float16, [1, 2], [2, 1]), (torch.float16, [2, 3], [3, 1]))+mm": [{"template_id": "triton::mm"}]}'
)
CONTENT["E=8,N=64,device_name=X.json"] = b'{"1": {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 1, "BLOCK_SIZE_K": 1}}'
CANARY = Path("/tmp") / f"gemmtuned-fuzz-canary-{os.getpid()}"
CODE = f"__import__('pathlib').Path({str(CANARY)!r}).touch()".encode()
TOKENS = (
    CODE, b"eval(" + CODE + b")", b"{{" + CODE + b"}}", b'"', b'""', b",", b",,,,,,,,,,,,", b"\n", b"\r", b"\r\n",
    b"\0", b"\xff\xfe",
    b"\xef\xbb\xbf", b"-1", b"0", b"1e999", b"nan", b"9" * 400, b"M,N,K", b"us", b"torch.bfloat16", b"None", b"True",
    b"{", b"}", b"[" * 2000, b"\xc3", "\N{ARABIC-INDIC DIGIT THREE}".encode(), b"\x1b[31m", b"x" * 70_000, b"\t" * 100,
)  # fmt: skip
MUTATION = st.tuples(
    st.sampled_from(("insert", "replace", "delete", "repeat", "cut", "flip")),
    st.floats(0, 1),  # where
    st.integers(1, 200),  # how many bytes
    st.one_of(st.sampled_from(TOKENS), st.binary(min_size=1, max_size=20)),
)


def mutate(data: bytes, mutations: list[tuple[str, float, int, bytes]]) -> bytes:
    for kind, where, length, token in mutations:
        at = int(where * len(data))
        if kind == "insert":
            data = data[:at] + token + data[at:]
        elif kind == "replace":
            data = data[:at] + token + data[at + len(token) :]
        elif kind == "delete":
            data = data[:at] + data[at + length :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + length] * 3 + data[at + length :]
        elif kind == "cut":
            data = data[:at]
        elif at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << length % 8)]) + data[at + 1 :]
    return data


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    start = time.process_time()
    try:
        found = read_any(path)
    except TableError as err:
        assert path.name in str(err)
        return
    finally:
        assert time.process_time() - start < 1.0
        assert tracemalloc.get_traced_memory()[1] - before < 32 << 20
    assert isinstance(found, Imported)
    assert len(found.reasons) == min(found.rejected, 1000)
    for hint in found.hints:
        assert hint.us is None or 0 < hint.us < float("inf")
        assert "\0" not in hint.row.replace("\\u0000", "")
        if hint.candidate is not None:
            assert len(hint.candidate.config) <= 4096


MUTATED = given(
    name=st.sampled_from(sorted(CONTENT)), mutations=st.lists(MUTATION, min_size=1, max_size=6)
)  # fmt: skip
ANY_TIME = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@pytest.fixture(autouse=True)
def nothing_in_a_table_runs() -> Iterator[None]:
    CANARY.unlink(missing_ok=True)
    tracemalloc.start()
    yield
    tracemalloc.stop()
    assert not CANARY.exists()


@pytest.mark.long
@settings(max_examples=100, **ANY_TIME)  # type: ignore[arg-type]
@MUTATED
def test_mutated_tables_are_read_or_refused(
    name: str, mutations: list[tuple[str, float, int, bytes]], tmp_path: Path
) -> None:
    check(tmp_path / name, mutate(CONTENT[name], mutations))


@pytest.mark.soak
@settings(max_examples=10_000, **ANY_TIME)  # type: ignore[arg-type]
@MUTATED
def test_ten_thousand_mutated_tables_are_read_or_refused(
    name: str, mutations: list[tuple[str, float, int, bytes]], tmp_path: Path
) -> None:
    check(tmp_path / name, mutate(CONTENT[name], mutations))


def test_the_canary_would_show(tmp_path: Path) -> None:
    """The same text, evaluated, leaves the file that the fixture looks for."""
    exec(CODE.decode())
    assert CANARY.exists()
    CANARY.unlink()


WATCHED = ("exec", "compile", "os.", "subprocess.", "socket.", "ctypes.", "pty.", "shutil.")
_audited: list[str] | None = None  # a hook stays for as long as the process: it writes down what happens while this is


def _audit(event: str, args: tuple[object, ...]) -> None:
    opened = event == "open" and not isinstance(args[0], int)  # a number: what was opened before
    if _audited is not None and (opened or event.startswith(WATCHED)):
        _audited.append(f"{event} {args[0] if args else ''}")


@cache
def _listen() -> None:
    sys.addaudithook(_audit)


@pytest.mark.part(15)
@pytest.mark.parametrize("name", sorted(CONTENT))
def test_reading_a_hostile_table_runs_no_code_and_opens_no_other_file(name: str, tmp_path: Path) -> None:
    global _audited
    _listen()
    dice = random.Random(name)
    path = tmp_path / name
    data = CONTENT[name]
    with suppress(TableError):  # so that what is imported late is
        path.write_bytes(data)
        read_any(path)
    for token in TOKENS[:3]:  # code, in three forms
        path.write_bytes(mutate(data, [("replace", dice.random(), 1, token), ("insert", dice.random(), 1, token)]))
        _audited = []
        try:
            with suppress(TableError):
                read_any(path)
        finally:
            said, _audited = _audited, None
        assert [line for line in said if not line.startswith(f"open {path}")] == [], token


def test_the_audit_would_show(tmp_path: Path) -> None:
    global _audited
    _listen()
    _audited = []
    try:
        exec("1")
        (tmp_path / "other").touch()
    finally:
        said, _audited = _audited, None
    assert any(line.startswith("exec") for line in said) and len(said) >= 2
