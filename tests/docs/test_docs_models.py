"""The pages about models and tables: what they show runs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from typed import environment

from gemmtuned.configs.model_shapes import known

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / name).read_text() for name in ("models.md", "tables.md")}
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128}
FILES = {
    "tables/bf16_untuned_gemm.csv": "M,N,K,note\n16,640,1024,mine\n32,640,1024,\n",
    "tables/a8w8_tuned_gemm.csv": "cu_num,M,N,K,q_dtype_w,kernelId,us,kernelName\n304,8,64,64,torch.int8,3,5,k\n",
    "tables/N=2112,K=7168,device_name=X,dtype=fp8_w8a8,block_shape=[128,128].json": json.dumps({"1": TILE, "64": TILE}),
    "tables/E=8,N=96,device_name=X,dtype=fp8_w8a8.json": json.dumps({"1": TILE, "64": TILE}),
    "odd_untuned_gemm.csv": "M,N,K,trans_b\n16,640,1024,0\n",
    "cut_untuned_gemm.csv": "M,N,K,bias,dtype\n8,640,1024,False,bf16\n16,640,10",
    "tunableop_untuned0.csv": "GemmTunableOp_BFloat16_TN,tn_640_16_1024_ld_1024_1024_640\n",
}
SMALL = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 64,
    "num_hidden_layers": 2, "torch_dtype": "bfloat16", "head_dim": 4,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.usefixtures("beside_others")
@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_shows_runs(page: str, tmp_path: Path, native_cache: Path) -> None:
    pytest.importorskip("transformers")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, kind in (("my_model", "llama"), ("odd_model", "doge")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind, **SMALL}))
    env = environment(tmp_path, native_cache)
    fences = re.findall(r"^```console\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)
    assert fences
    for fence in fences:
        for command, shown in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", fence, re.MULTILINE):
            told = re.search(r"# ends with (\d)", command)
            done = subprocess.run(
                ["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
            )
            said = done.stdout + done.stderr
            assert done.returncode == (int(told[1]) if told else 0), f"{command}: {said}"
            for line in shown.splitlines():
                assert line in said, f"{command}: {line!r} is not in {said}"


def test_the_page_lists_the_types_that_are_described() -> None:
    listed = PAGES["models.md"].partition("## The types that are described\n")[2]

    assert [name.strip() for name in listed.replace("\n", " ").split(",")] == known()
    assert f"- {len(known())} model types" in PAGES["models.md"]
