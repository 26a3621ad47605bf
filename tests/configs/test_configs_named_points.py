"""Entry points are found beside packages whose metadata is broken."""

from __future__ import annotations

from pathlib import Path

import crashing_site
import pytest

from gemmtuned.configs.named_points import named_points
from gemmtuned.kernels import other_packages
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
