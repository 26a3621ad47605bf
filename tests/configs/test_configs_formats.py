"""Tables of other tools: what is read as a hint, what is rejected and why, and what we write in their form."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hooked import solution
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import bundle, inductor, read_any, tunableop, vllm_moe
from gemmtuned.configs.problem import LAYOUTS, Problem
from gemmtuned.configs.solution import Candidate, Device, Solution

DATA = Path(__file__).parents[1] / "data/aiter"
H200 = Device(key="cuda-h200-132", kind="cuda", name="NVIDIA H200", arch="sm_90", units=132)
TILES = {
    "kernel": "tiles",
    "rows": 64,
    "tokens": 16,
    "block_k": 128,
    "split": 1,
    "group": 8,
    "swap": 0,
    "warps": 4,
    "stages": 3,
}

VLLM = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 3}


def made(problem: Problem, backend: str = "torch", **columns: Any) -> Solution:
    return solution(problem, backend, H200.key, "2.13", **columns)


# ---- which format it is


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("x.csv", "M,N,K\n1,2,3\n", "aiter-csv"),
        ("tunableop_results0.csv", "Validator,PT_VERSION,2.13.0\n", "tunableop"),
        ("tunableop_untuned0.csv", "GemmTunableOp_float_TN,tn_5_4_3_ld_3_3_5\n", "tunableop"),
        ("gfx942-GEMM-A16W16.json", '{"any": {"BLOCK_SIZE_M": 16}}', "triton-json"),
        (
            "E=8,N=64,device_name=AMD_MI300X.json",
            '{"1": {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 1, "BLOCK_SIZE_K": 1}}',
            "vllm-moe",
        ),
        ("table.json", '{"((torch.float16, [1, 2], [2, 1]), (torch.float16, [2, 3], [3, 1]))+mm": []}', "inductor"),
    ],
)
def test_the_content_tells_the_format(name: str, content: str, format: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)

    assert read_any(tmp_path / name).format == format


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}', "[1]", "hello", '{"schema": 1}'])
def test_what_is_of_no_format_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(TableError, match=r"x\.json"):
        read_any(tmp_path / "x.json")


@pytest.mark.parametrize("path", sorted([*DATA.rglob("*.csv"), *DATA.rglob("*.json")]), ids=lambda path: path.name)
def test_every_file_of_aiters_becomes_hints_row_by_row(path: Path) -> None:
    found = read_any(path)

    assert found.rejected == 0
    assert found.format == ("triton-json" if path.suffix == ".json" else "aiter-csv")
    if path.suffix == ".json":
        assert len(found.hints) == len(json.loads(path.read_text()))
    assert all(json.loads(hint.row) for hint in found.hints)
    assert all((hint.candidate is None) == (hint.kind == "untuned") or hint.family == "gdn" for hint in found.hints)


# ---- TunableOp

RESULTS = """\
Validator,PT_VERSION,2.10.0
Validator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-

GemmTunableOp_BFloat16_TN,tn_2048_8_1024_ld_1024_1024_2048,Gemm_Hipblaslt_52565,0.0105563
GemmTunableOp_float_NT,nt_25088_4096_64,Gemm_Rocblas_-621294427,1.262
GemmAndBiasTunableOp_Half_TN,tn_2048_8_1024_ld_1024_1024_2048,Default,0.5
GemmStridedBatchedTunableOp_BFloat16_NN,nn_64_8_32_B_16_ld_64_32_64,Gemm_Rocblas_1,0.01
ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_128_2048_ld_2048_2048_64_rw_1_bias_None,Default,0.02
GemmTunableOp_tf32_TN,tn_5_4_3_ld_3_3_5,Default
"""


def test_tunable_op_results_are_read_with_their_validators(tmp_path: Path) -> None:
    path = tmp_path / "tunableop_results0.csv"
    path.write_text(RESULTS)

    found = read_any(path)

    assert (found.kind, len(found.hints), found.rejected) == ("tuned", 6, 0)
    assert [hint.problem for hint in found.hints] == [
        Problem(m=8, n=2048, k=1024),
        Problem(m=4096, n=25088, k=64, dtype="fp32", layout="tn"),
        Problem(m=8, n=2048, k=1024, dtype="fp16", bias=True),
        Problem(family="batched", batch=16, m=8, n=64, k=32, layout="nn"),
        Problem(family="scaled", m=128, n=64, k=2048, dtype="fp8_e4m3", out_dtype="bf16", scale="row"),
        Problem(m=4, n=5, k=3, dtype="fp32", math_mode="tf32"),
    ]
    first = found.hints[0]
    assert (first.arch, first.us) == ("gfx942", pytest.approx(10.5563))
    assert first.candidate == Candidate.of("hipblaslt", solution="Gemm_Hipblaslt_52565")
    assert json.loads(first.row)["validators"]["PT_VERSION"] == "2.10.0"
    assert found.hints[2].candidate == Candidate("torch")


def test_an_untuned_list_of_tunable_op_is_problems_alone(tmp_path: Path) -> None:
    path = tmp_path / "tunableop_untuned0.csv"
    path.write_text(
        "GemmTunableOp_float_TN,tn_5_4_3_ld_3_3_5\nGemmTunableOp_float_TN,tn_5_4_3_ld_3_3_5,BLAS_PARAMS,a\n"
    )

    found = read_any(path)

    assert found.kind == "untuned"
    assert [(hint.problem, hint.candidate) for hint in found.hints] == [
        (Problem(m=4, n=5, k=3, dtype="fp32"), None)
    ] * 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("GemmTunableOp_float_XX,tn_5_4_3,Default", "field 1: 'GemmTunableOp_float_XX' is not an operator's name"),
        ("GemmTunableOp_float_TN,tn_5_4,Default", "field 2: 'tn_5_4' is not an operator's sizes"),
        ("GemmTunableOp_float_TN,tn_5_4_3,Default,soon", "field 4: 'soon' is not a time"),
        ("GemmTunableOp_float_TN,nt_5_4_3,Default", "field 2: 'nt_5_4_3' has other letters than the operator"),
    ],
)
def test_a_bad_line_of_tunable_op_is_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text(f"Validator,PT_VERSION,2\n{line}\n")

    found = read_any(path)

    assert (found.hints, found.rejected) == ([], 1)
    assert f"{path} line 2, {reason}" in found.reasons[0]


def test_sizes_of_tunable_op_with_a_part_that_nobody_knows_are_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    lines = [f"GemmTunableOp_float_TN,tn_5_4_3_ld_3_3_5{part},Default,1.25\n" for part in ("", "_act_gelu", "_rw_7")]
    path.write_text("Validator,PT_VERSION,2\n" + "".join(lines).rstrip("5\n"))

    found = read_any(path)

    assert [hint.problem for hint in found.hints] == [Problem(m=4, n=5, k=3, dtype="fp32"), None, None]
    assert found.kept == {"act_gelu in the sizes is not known": 1, "rw_7 in the sizes is not known": 1}
    assert found.notes == [f"{path} line 4: the last row has no line end; read as it stands"]


def test_entries_that_stand_under_one_key_are_counted(tmp_path: Path) -> None:
    """JSON keeps the last of equal keys."""
    tile = '{"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128}'
    path = tmp_path / "N=512,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    path.write_text(f'{{"8": {tile}, "8": {tile}, "16": {tile}, "8": {tile}}}')
    table = tmp_path / "table.json"
    key = "((torch.float32, [4, 3], [3, 1]), (torch.float32, [3, 5], [1, 3]))+mm"
    some = '[{"template_id": "aten::mm"}, {"template_id": "triton::mm"}]'
    table.write_text(f'{{"{key}": {some}, "{key}": [{{"template_id": "aten::mm"}}]}}')

    tiles, choices = read_any(path), read_any(table)

    assert (len(tiles.hints), tiles.reasons) == (2, [f"{path} entry '8': stands 3 times, the last is taken"] * 2)
    assert (len(choices.hints), choices.rejected) == (1, 2)
    assert all("stands 2 times, the last is taken" in reason for reason in choices.reasons)


NATURAL = st.integers(1, 9000)
PLAIN = st.builds(
    Problem, m=NATURAL, n=NATURAL, k=NATURAL, layout=st.sampled_from([one for one in LAYOUTS if "s" not in one]),
    dtype=st.sampled_from(("bf16", "fp16", "fp32")), bias=st.booleans(),
) | st.builds(
    Problem, family=st.just("batched"), batch=st.integers(2, 64), m=NATURAL, n=NATURAL, k=NATURAL,
    layout=st.sampled_from([one for one in LAYOUTS if "s" not in one]), dtype=st.sampled_from(("bf16", "fp32")),
)  # fmt: skip


@settings(deadline=None)
@given(problem=PLAIN)
def test_what_we_write_for_tunable_op_reads_as_the_same_problem(problem: Problem, tmp_path_factory: Any) -> None:
    line = tunableop.line_of(made(problem, us=12.0, state="default_best"))
    assert line is not None
    path = tmp_path_factory.mktemp("t") / "tunableop_results0.csv"
    tunableop.write(path, [line], {"PT_VERSION": "2.13.0"})

    (hint,) = read_any(path).hints

    assert (hint.problem, hint.candidate, hint.us) == (problem, Candidate("torch"), pytest.approx(12.0))


def taken_by_tunable_op(path: Path, required: Mapping[str, str]) -> dict[tuple[str, str], tuple[str, float]]:
    """What TuningContext::ReadFile of torch 2.13 loads (ATen/cuda/tunable/Tunable.cpp), whose build has no CUDA here.

    required: what the running torch has registered, all of which must be there and nothing else.
    """
    validators: dict[str, str] = {}
    results: dict[tuple[str, str], tuple[str, float]] = {}
    for line in path.read_bytes().decode().split("\n"):  # a carriage return would be part of the last field
        parts = line.split(",")
        if parts[0] == "Validator" and len(parts) >= 3:
            validators[parts[1]] = parts[2]
        elif len(parts) >= 3:
            results.setdefault((parts[0], parts[1]), (parts[2], float(parts[3]) if len(parts) > 3 else 0.0))
    return results if validators == dict(required) else {}


@pytest.mark.parametrize("stamp", ["2.13.0", "2.13.0+cu130", "2.13.0a0+git1", "2.13.0.dev20260801+cu130"])
def test_tunable_ops_reader_takes_what_we_write(stamp: str, tmp_path: Path) -> None:
    line = tunableop.line_of(made(Problem(m=8, n=2048, k=1024), us=12.0, state="default_best"))
    assert line is not None
    tunableop.write(tmp_path / "t.csv", [line], {"PT_VERSION": tunableop.version_of(stamp)})

    assert taken_by_tunable_op(tmp_path / "t.csv", {"PT_VERSION": "2.13.0"}) == {
        ("GemmTunableOp_BFloat16_TN", "tn_2048_8_1024_ld_1024_1024_2048"): ("Default", 0.012)
    }


def test_tunable_op_gets_only_what_it_can_run() -> None:
    problem = Problem(m=8, n=64, k=64)
    assert tunableop.line_of(made(problem, "triton")) is None
    assert tunableop.line_of(made(replace(problem, family="dense_add"))) is None
    assert tunableop.line_of(made(problem.with_m(16), covers="fine")) is None


def test_torch_itself_reads_our_sizes_as_the_same_gemm() -> None:
    """torch's offline tuner takes n, m, k and the transpositions from these fields."""
    line = tunableop.line_of(made(Problem(m=8, n=2048, k=1024), state="default_best"))
    assert line is not None
    op, sizes, *_ = line
    signature, dtype, layout = op.split("_")
    n, m, k = map(int, sizes.split("_")[1:4])

    assert (signature, dtype) == ("GemmTunableOp", "BFloat16")
    assert (m, n, k) == (8, 2048, 1024)
    assert (layout[0] == "T", layout[1] == "T") == (True, False)  # transB, transA: W [N, K] is transposed, X is not
    assert sizes.split("_")[4:] == ["ld", "1024", "1024", "2048"]


# ---- vLLM and SGLang


def test_tiles_of_vllms_mixtures_are_kept_as_they_stand(tmp_path: Path) -> None:
    name = "E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    tile = VLLM
    (tmp_path / name).write_text(json.dumps({"triton_version": "3.4", "1": tile, "64": tile, "x": tile, "8": {"a": 1}}))

    found = read_any(tmp_path / name)

    assert (found.kind, len(found.hints), found.rejected) == ("tuned", 2, 2)
    row = json.loads(found.hints[0].row)
    assert (row["experts"], row["inter"], row["device"], row["dtype"]) == ("128", "384", "NVIDIA_H200", "fp8_w8a8")
    assert row["triton"] == "3.4"
    assert found.hints[0].problem is None  # neither width nor top-k is told
    assert found.hints[0].candidate == Candidate.of("vllm_moe", **tile)


def test_an_entry_may_have_any_parameter_but_not_more_than_can_be_kept(tmp_path: Path) -> None:
    odd = {**VLLM, "backend": "x", "cls": 1}
    (tmp_path / "moe.json").write_text(json.dumps({"1": odd, "2": {**VLLM, "long": "x" * 4096}}))
    key = "((torch.float16, [2, 1, 2], [2, 2, 1]), (torch.float16, [2, 2, 3], [6, 3, 1]))+bmm"
    entry = {"template_id": "triton::bmm", "backend": "x", "cls": 1}
    (tmp_path / "inductor.json").write_text(json.dumps({key: [entry]}))
    (tmp_path / "t.csv").write_text(f"GemmTunableOp_float_NT,nt_8_8_8,Gemm_{'a' * 300}_1,0.5\n")

    moe, inductor, tunable = (read_any(tmp_path / name) for name in ("moe.json", "inductor.json", "t.csv"))

    assert [json.loads(one.hints[0].candidate.config) for one in (moe, inductor) if one.hints[0].candidate] == [
        odd,
        entry,
    ]
    assert (len(moe.hints), moe.rejected) == (1, 1)
    assert re.fullmatch(r".*moe.json line 2: a config of 4\d+ characters, at most 4096 are kept", moe.reasons[0])
    assert tunable.hints[0].candidate is None  # a library of 300 letters is none


def test_sglangs_folder_names_the_triton_that_was_tuned_with(tmp_path: Path) -> None:
    (tmp_path / "triton_3_2_0").mkdir()
    path = tmp_path / "triton_3_2_0/E=8,N=64,device_name=X.json"
    path.write_text(json.dumps({"1": VLLM}))

    assert json.loads(read_any(path).hints[0].row)["triton"] == "3.2.0"


def test_a_mixtures_solution_is_written_under_vllms_name_and_read_again(tmp_path: Path) -> None:
    tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4}
    problem = Problem(
        family="moe", m=8, n=4096, k=4096, experts=128, topk=8, inter=384, act="silu_gated", dtype="fp8_e4m3",
        out_dtype="bf16", scale="1x128",
    )  # fmt: skip
    slow = made(problem, "triton", config=json.dumps({**tile, "num_warps": 8}), us=9.0)
    fast = made(problem, "triton", config=json.dumps(tile), us=5.0)

    files, left = vllm_moe.tables([slow, fast, made(Problem(m=1, n=2, k=3))], H200)

    name = "E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert files == {name: {"8": tile}}
    assert [one.problem.family for one in left] == ["dense"]
    vllm_moe.write(tmp_path / name, files[name])
    assert [hint.candidate for hint in read_any(tmp_path / name).hints] == [Candidate.of("vllm_moe", **tile)]


# ---- Inductor


class Kernel:
    """What Inductor's key is made of, for its own function."""

    def __init__(self, problem: Problem) -> None:
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem.dtype]
        x = torch.empty(problem.m, problem.k, dtype=dtype, device="meta")
        w = torch.empty(problem.n, problem.k, dtype=dtype, device="meta").t()
        self.operands = [x, w]
        self._scalars: dict[str, int] = {}
        if problem.bias:
            self.operands.insert(0, torch.empty(problem.n, dtype=dtype, device="meta").expand(problem.m, problem.n))
            self._scalars = {"alpha": 1, "beta": 1}

    def device(self) -> Any:
        return self.operands[0].device

    def dtypes(self) -> list[Any]:
        return [one.dtype for one in self.operands]

    def shapes_hinted(self) -> list[Any]:
        return [tuple(one.shape) for one in self.operands]

    def strides_hinted(self) -> list[Any]:
        return [one.stride() for one in self.operands]


@pytest.mark.long
@pytest.mark.parametrize("bias", [False, True])
def test_our_keys_are_those_that_inductor_makes(bias: bool) -> None:
    choices = pytest.importorskip("torch._inductor.lookup_table.choices")  # since torch 2.10
    problem = Problem(m=8, n=2048, k=1024, bias=bias)
    entry = inductor.entry_of(made(problem, "triton", config=json.dumps(TILES)))
    assert entry is not None

    theirs = choices.LookupTableChoices._generate_kernel_inputs_key(Kernel(problem))

    assert entry[0] == f"{theirs}+{'addmm' if bias else 'mm'}"
    assert entry[1] == {
        "template_id": "triton::mm", "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8, "num_warps": 4,
        "num_stages": 3,
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("bias", [False, True])
def test_inductors_own_reader_finds_what_we_write(bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = pytest.importorskip("torch._inductor.lookup_table.choices")
    from torch._inductor import config

    problem = Problem(m=8, n=2048, k=1024, bias=bias)
    entry = inductor.entry_of(made(problem, "triton", config=json.dumps(TILES)))
    assert entry is not None
    inductor.write(tmp_path / "lookup_table.json", {entry[0]: [entry[1]]})
    monkeypatch.setattr(choices.LookupTableChoices, "_get_device_key", staticmethod(lambda device: "a GPU"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # it reads no table without one
    reader = choices.LookupTableChoices()
    with config.patch({"lookup_table.table": json.loads((tmp_path / "lookup_table.json").read_text())}):
        found = reader.lookup_template_configs(Kernel(problem), "addmm" if bias else "mm", ["triton::mm", "aten::mm"])
        other = reader.lookup_template_configs(Kernel(problem.with_m(9)), "mm", ["triton::mm"])

    assert found == {"triton::mm": [{name: value for name, value in entry[1].items() if name != "template_id"}]}
    assert other == {}


@settings(deadline=None)
@given(problem=PLAIN)
def test_what_we_write_for_inductor_reads_as_the_same_problem(problem: Problem, tmp_path_factory: Any) -> None:
    entry = inductor.entry_of(made(problem, "triton", config=json.dumps(TILES)))
    assert entry is not None
    path = tmp_path_factory.mktemp("i") / "lookup_table.json"
    inductor.write(path, {entry[0]: [entry[1]]})

    (hint,) = read_any(path).hints

    one_row = 1 in (problem.m, problem.n, problem.k)  # then both layouts have the same strides
    assert hint.problem == problem or (one_row and hint.problem == replace(problem, layout=hint.problem.layout))
    if problem.family == "dense":
        assert hint.candidate == Candidate("triton", json.dumps(TILES, sort_keys=True, separators=(",", ":")))


def test_bad_entries_of_a_lookup_table_are_rejected_and_devices_kept(tmp_path: Path) -> None:
    key = "((torch.float16, [1, 2], [2, 1]), (torch.float16, [2, 3], [3, 1]))+mm"
    good = {"template_id": "triton::mm", "BLOCK_M": 16}
    table = {f"gfx942:sramecc+{key}": [good], key: [{"a": 1}, 5], "__import__('os')+mm": [good]}
    (tmp_path / "t.json").write_text(json.dumps(table))

    found = read_any(tmp_path / "t.json")

    assert [hint.arch for hint in found.hints] == ["gfx942"]
    assert found.rejected == 3


# ---- our own folder


def test_a_folder_of_ours_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    solutions = [made(Problem(m=8, n=64, k=64)), made(Problem(m=16, n=64, k=64), "torch_swap", covers="fine")]
    solutions.append(made(Problem(m=8, n=96, k=64), beside='{"vllm_cutlass":["0.32.0",1.1]}'))

    manifest, left = bundle.write(tmp_path / "out", solutions, generation=7, binaries=tmp_path)

    assert (manifest.generation, left) == (7, [])
    found = read_any(tmp_path / "out")
    assert {hint.solution for hint in found.hints} == set(solutions)
    assert read_any(tmp_path / "out/manifest.json").hints == found.hints


def test_a_solution_whose_kernel_is_gone_is_left_out_with_the_reason(tmp_path: Path) -> None:
    gone = made(Problem(m=8, n=64, k=64), "triton", launch="{}")

    manifest, left = bundle.write(tmp_path / "out", [gone], generation=1, binaries=tmp_path)

    assert (manifest.files, [one for one, _ in left]) == ((), [gone])


# ---- anything at all


@pytest.mark.parametrize(
    "content",
    [
        b"Validator,a,b\n" + b"\n" * 10_000_000, b"Validator,a,b\n" + b"x\n" * 5_000_000,
        b"Validator," + b"x" * 10_000_000, b"[" * 10_000_000, b'{"any": [' + b"0," * 5_000_000 + b"0]}",
        b'{"a":' * 2_000_000, b'{"' + b"x" * 10_000_000,
    ],
    ids=["blank", "bad", "long", "deep", "numbers", "objects", "key"],
)  # fmt: skip
def test_ten_megabytes_of_garbage_end_at_once_with_little_memory(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(TableError, match="garbage"):
        read_any(path)
    assert time.process_time() - start < 1.0
    tracemalloc.start()
    with pytest.raises(TableError):
        read_any(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@given(data=st.binary(max_size=4000), name=st.sampled_from(["a8w8_tuned_gemm.csv", "x.json", "tunableop_results0.csv"]))
def test_no_bytes_make_a_reader_crash(data: bytes, name: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("b") / name
    path.write_bytes(data)
    try:
        found = read_any(path)
    except TableError as err:
        assert name in str(err)
    else:
        assert len(found.reasons) == found.rejected
