"""A regular expression that is compiled when it is first used answers as one that always was."""

from __future__ import annotations

import re

from hooked import Home

from gemmtuned.configs.pattern import Pattern


def test_it_answers_as_a_compiled_one_each_time() -> None:
    text = r"([a-z]+)-([0-9]+)"
    pattern, compiled = Pattern(text), re.compile(text)
    for _ in range(2):
        for word in ("abc-12", "abc-", "", "abc-12 "):
            found, right = pattern.fullmatch(word), compiled.fullmatch(word)
            assert (found and found.groups()) == (right and right.groups())
        assert pattern.findall("a-1 b-2") == compiled.findall("a-1 b-2")


def test_a_program_that_starts_compiles_few_of_ours(home: Home) -> None:
    """Each takes up to a millisecond of the start of each program."""
    code = """
import json, re
import torch
compiler = getattr(re, "_compiler", None) or re.sre_compile  # until 3.10
compiled, plain = [], compiler.compile
compiler.compile = lambda text, *more: compiled.append(text) or plain(text, *more)
import gemmtuned.db.guest, gemmtuned.hooks.activate, gemmtuned.hooks.native.library
print(json.dumps(compiled))
"""
    assert home.bare().run(code, AITER_TUNE_GEMM="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0").said == []
