"""Entry points are found beside packages whose metadata is broken."""

from __future__ import annotations

from pathlib import Path

import crashing_site
import pytest

from gemmtuned.configs.named_points import named_points
from gemmtuned.configs.solution import Device
from gemmtuned.daemon.seats.left_out import Pieces
from gemmtuned.hooks import dispatch
from gemmtuned.kernels import backends, other_packages
from gemmtuned.kernels.backends import torch_op
from gemmtuned.reports import checks_hook

BROKEN = {"no value": b"[gemmtuned.backends]\ngarbage\n", "no text": b"[x]\n\xff\xfe = 1\n"}


@pytest.mark.parametrize("what", BROKEN)
def test_a_package_with_broken_metadata_hides_no_other(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """importlib.metadata raises then, whatever group is asked for, and no worker started."""
    crashing_site.install(tmp_path, "broken", "", "pass")
    (tmp_path / "broken-1.0.dist-info/entry_points.txt").write_bytes(BROKEN[what])
    crashing_site.install(tmp_path, "sound", "", "pass")
    monkeypatch.syspath_prepend(tmp_path)

    points, broken = named_points("gemmtuned.backends")

    assert [point.name for point in points] == ["sound"]
    (place,) = broken
    assert place.endswith("broken-1.0.dist-info")

    said: dict[str, str] = {}
    monkeypatch.setattr(other_packages.GUESTS, "say", lambda name, why, wanted: said.update({name: why}))
    found = [one.name for one in other_packages.found("gemmtuned.backends", "backend", lambda backend: "")]
    assert found == ["sound"] and list(said) == [place]

    check = checks_hook._entry_point()
    assert check.result == "FAIL" and place in check.found and "reinstall" in check.fix


UNREADABLE = {"no text": b"Metadata-Version: 2.1\nName: vllm\nAuthor: \xff\n", "no name": b"\n", "none": None}


@pytest.fixture(params=UNREADABLE)
def unreadable(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a backend, which is also one whose kernels a backend of ours calls; nobody knows its version."""
    crashing_site.install(tmp_path, "vllm", "", "pass")
    facts, text = tmp_path / "vllm-1.0.dist-info/METADATA", UNREADABLE[request.param]
    if text is None:
        facts.unlink()
    else:
        facts.write_bytes(text)
    monkeypatch.syspath_prepend(tmp_path)
    dispatch.installed_version.cache_clear()
    return "vllm"


def test_a_package_without_a_version_costs_no_more_than_its_own_part(
    unreadable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers ended at their start by what importlib.metadata raises or, in its old versions, does not."""
    said: dict[str, str] = {}
    guests = other_packages.Guests()
    guests.without, guests.say = ("sglang",), lambda name, why, wanted: said.update({name: why})
    for module in (other_packages, backends, torch_op):
        monkeypatch.setattr(module, "GUESTS", guests)

    found = [one.name for one in other_packages.found("gemmtuned.backends", "backend", lambda backend: "")]
    assert found == [unreadable] and guests.package_of == {unreadable: unreadable}

    own = [name for name, backend in backends.BACKENDS.items() if getattr(backend, "package", "") == unreadable]
    here = backends.environment(Device("cuda-x-132", "cuda", "x", "sm_90", 132))
    assert own and "torch" in here.stamps and not {*own} & {*here.stamps}
    assert all("metadata of vllm" in said[name] for name in own), said

    assert dispatch.installed_version(unreadable) is None
    pieces = Pieces()
    pieces.blame("import of vllm", unreadable, "killed by SIGSEGV", doubtful=False)
    assert pieces.ended()


def test_what_such_a_package_ended_stays_known_in_the_home(unreadable: str, tmp_path: Path) -> None:
    """Each start of a worker ended by it anew, at once, for nobody could read that it had been left out."""
    Pieces(tmp_path).blame("import of vllm", unreadable, "killed by SIGSEGV", doubtful=False)
    assert list(Pieces(tmp_path).ended()) == ["import of vllm"]


def test_entry_points_of_packages_without_metadata_are_found_beside_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("broken", "one", "two"):
        crashing_site.install(tmp_path, name, "", "pass")
    (tmp_path / "broken-1.0.dist-info/entry_points.txt").write_bytes(BROKEN["no value"])
    for name in ("one", "two"):
        (tmp_path / f"{name}-1.0.dist-info/METADATA").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    assert sorted(point.name for point in named_points("gemmtuned.backends")[0]) == ["one", "two"]
