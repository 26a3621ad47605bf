"""The page about models: what it shows runs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from test_docs_coming_from_aiter import ROOT, environment

PAGE = (ROOT / "docs" / "models.md").read_text()
FENCES = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SMALL = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 64,
    "num_hidden_layers": 2, "torch_dtype": "bfloat16", "head_dim": 4,
}  # fmt: skip


@pytest.mark.usefixtures("beside_others")
def test_what_the_page_shows_runs(tmp_path: Path, native_cache: Path) -> None:
    pytest.importorskip("transformers")
    for name, kind in (("my_model", "llama"), ("odd_model", "olmo2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind, **SMALL}))
    env = environment(tmp_path, native_cache)
    assert FENCES
    for fence in FENCES:
        for command, shown in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", fence, re.MULTILINE):
            told = re.search(r"# ends with (\d)", command)
            done = subprocess.run(
                ["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
            )
            said = done.stdout + done.stderr
            assert done.returncode == (int(told[1]) if told else 0), f"{command}: {said}"
            for line in shown.splitlines():
                assert line in said, f"{command}: {line!r} is not in {said}"
