"""No file, class or function is longer than a reader can take in."""

from __future__ import annotations

from pathlib import Path

import pytest
import sizes


@pytest.mark.long  # `make check` looks as well
def test_nothing_is_too_long() -> None:
    assert dict(sizes.too_long()) == {}, "split it: tests/tools/sizes.py has the limits"


def test_at_most_five_exceptions_each_with_its_reason() -> None:
    assert len(sizes.EXCEPTIONS) <= 5
    assert all(len(reason.split()) > 4 for reason in sizes.EXCEPTIONS.values())


def test_what_is_too_long_is_seen(tmp_path: Path) -> None:
    for folder in (*sizes.FOLDERS, "tests/data"):
        (tmp_path / folder).mkdir(parents=True)
    body = "\n".join(f"        x = {n}" for n in range(70))
    (tmp_path / "db/a.py").write_text(f"class A:\n    def f(self):\n{body}\n")
    (tmp_path / "db/b.py").write_text("\n" * 401)
    (tmp_path / "hooks/c.h").write_text("\n" * 351)
    (tmp_path / "hooks/d.py").write_text("\n" * 400)
    (tmp_path / "tests/e.py").write_text("\n" * 500)
    (tmp_path / "tests/f.py").write_text("\n" * 501)
    (tmp_path / "tests/data/g.py").write_text("\n" * 501)

    assert dict(sizes.too_long(tmp_path)) == {"db/a.py:A.f": 71, "db/b.py": 401, "hooks/c.h": 351, "tests/f.py": 501}
