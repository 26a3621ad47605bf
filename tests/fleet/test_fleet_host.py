"""The name that a host has in a fleet: made once for each home, and nothing is left behind where it cannot be."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from gemmtuned.configs.settings import Settings
from gemmtuned.fleet.host import host_name


def of(home: Path) -> Settings:
    return Settings(home=home, db=home / "tune.db", config_dir=home / "configs", cache=home / "cache")


def test_it_is_made_once_and_two_homes_have_two(tmp_path: Path) -> None:
    one, other = (of(tmp_path / name) for name in ("one", "other"))
    assert host_name(one) == host_name(one) != host_name(other)
    assert len([*one.home.iterdir()]) == 1


def test_a_home_without_room_keeps_no_part_of_it(tmp_path: Path) -> None:
    settings = of(tmp_path / "home")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as a full disk: files are made, and nothing goes in
    try:
        with pytest.raises(OSError, match="too large"):
            host_name(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*settings.home.iterdir()]
    assert host_name(settings)
