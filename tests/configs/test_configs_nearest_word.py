"""What somebody may have meant: in errors about problems, options and URLs."""

from __future__ import annotations

import pytest

from gemmtuned.configs.errors import ProblemError, SettingError
from gemmtuned.configs.nearest_word import nearest
from gemmtuned.configs.problem import DTYPES, FAMILIES, Problem
from gemmtuned.fleet.opening import open_objects


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("fp33:8x64x64", "fp32"),
        ("float32:8x64x64", "fp32"),
        ("bfloat16:8x64x64", "bf16"),
        ("fp32/floot16:8x64x64", "fp16"),
        ("FP32:8x64x64", "fp32:8x64x64"),
        ("fp32:8*64*64 +bias", "fp32:8x64x64+bias"),
        ("dens:fp32:8x64x64", "dense"),
        ("linear:fp32:8x64x64", "dense"),
        ("fp32:8x64x64,treads=2", "threads"),
        ("fp32:8x64x64,math=tf23", "tf32"),
    ],
)
def test_a_key_that_is_written_nearly_right_is_told_what_was_meant(text: str, meant: str) -> None:
    with pytest.raises(ProblemError) as told:
        Problem.parse(text)

    assert str(told.value).endswith(f". Did you mean {meant}?")


@pytest.mark.parametrize("text", ["quux:8x64x64", "8x64", "", "fp32:8x64x64,quux=1", "x" * 100_000])
def test_a_key_that_is_like_nothing_gets_no_guess(text: str) -> None:
    with pytest.raises(ProblemError) as told:
        Problem.parse(text)

    assert "Did you mean" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("/folder", "file:///folder"),
        ("/a folder", "file:///a%20folder"),
        ("file://folder/x", "file:///folder/x"),
        ("s4://bucket/x", "s3://bucket/x"),
        ("gcs://bucket", "gs://bucket"),
    ],
)
def test_a_folder_or_a_misspelled_scheme_is_told_the_url_that_was_meant(url: str, meant: str) -> None:
    with pytest.raises(SettingError) as told:
        open_objects(url)

    assert str(told.value).endswith(f". Did you mean {meant}?")


@pytest.mark.parametrize("url", ["", "https://host/x", "s3:/bucket", "C:folder"])
def test_another_kind_of_address_gets_no_guess(url: str) -> None:
    with pytest.raises(SettingError, match="is not a URL") as told:
        open_objects(url)

    assert "Did you mean" not in str(told.value)


def test_every_name_that_is_known_is_nearest_to_itself() -> None:
    for names in (tuple(DTYPES), FAMILIES):
        assert all(nearest(name, names) == name for name in names)
    assert nearest(7, FAMILIES) == ""
