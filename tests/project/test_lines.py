"""tests/tools/lines.py counts the lines of source that a commit has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import lines


def test_lines_of_two_commits(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("db", "hooks/native", "tests"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "db/a.py").write_text("one\n\ntwo\n")
    (tmp_path / "db/a.md").write_text("no source\n")
    (tmp_path / "hooks/native/problem.gen.h").write_text("made\n")
    (tmp_path / "tests/a.py").write_text("no source of ours\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    (tmp_path / "hooks/native/a.h").write_text("three\n")
    (tmp_path / "db/b.py").symlink_to("a.py")
    git("add", "-A")
    git("commit", "-qm", "two")

    assert lines.lines_of("HEAD~1", tmp_path) == {"db/a.py": 2}
    assert lines.by_folder(lines.lines_of("HEAD", tmp_path)) == {"db": 2, "hooks": 1}
