"""A public repository of tables: opened by a command, filled by sync, checked by a script that needs nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted_search
import pytest
from fleets import Host, problem, rounds, running

from gemmtuned.cli import build
from gemmtuned.configs.errors import TryLater
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.hugging_face import HubObjects
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.tables import MARK, check, files

pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
ROOT = Path(__file__).resolve().parents[2]


def gemmtuned(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        build()(list(arguments), prog_name="gemmtuned")
    return int(str(end.value.code or 0))


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(planted_search, "pause_s", 0.0)
    folder = tmp_path / "tables"
    assert gemmtuned("fleet", "init", str(folder), "--title", "Tables of rack 7", "--holder", "Rack 7") == 0
    return folder


@pytest.fixture
def filled(tables: Path, tmp_path: Path) -> Iterator[tuple[Path, Host]]:
    host = Host(tmp_path / "one", tables.as_uri())
    with running([host]):
        host.see(problem(0), problem(1))
        host.work()
        assert host.exchange().run(now_s=time.time()).sent == 2
        yield tables, host


def test_it_holds_what_a_stranger_needs_and_nothing_is_replaced(tables: Path) -> None:
    found = {path.relative_to(tables).as_posix() for path in tables.rglob("*") if path.is_file()}
    assert found == {
        "fleet.json", "README.md", "LICENSE", ".gitattributes", ".ci/check", ".github/workflows/check.yml",
    }  # fmt: skip
    assert (tables / "README.md").read_text().startswith("---\nlicense: mit\npretty_name: Tables of rack 7\n")
    assert "Rack 7" in (tables / "LICENSE").read_text()
    assert list(check(tables)) == []
    (tables / "README.md").write_text("mine")
    assert gemmtuned("fleet", "init", str(tables)) == 2
    assert (tables / "README.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["rack 7", "Zürich ☃", "100%", "a#b?c"])
def test_a_folder_of_any_name_is_the_one_that_is_written_to(tmp_path: Path, name: str) -> None:
    """A URL spells a space as %20; also what an error proposes for a path is such a URL."""
    folder = tmp_path / name
    assert gemmtuned("fleet", "init", str(folder)) == 0
    assert (folder / "fleet.json").is_file() and os.listdir(tmp_path) == [name]
    objects = open_objects(folder.as_uri())
    objects.put("results/one.json", b"{}")
    assert [entry.path for entry in objects.list("results")] == ["results/one.json"]


def test_a_folder_that_an_earlier_version_named_as_the_url_is_spelt_goes_on(tmp_path: Path) -> None:
    (tmp_path / "rack%207").mkdir()
    open_objects(f"file://{tmp_path}/rack%207").put("one", b"1")
    assert (tmp_path / "rack%207" / "one").read_bytes() == b"1" and os.listdir(tmp_path) == ["rack%207"]


def test_it_takes_results_and_neither_counts_nor_claims_and_a_host_starts_with_them(
    filled: tuple[Path, Host], tmp_path: Path
) -> None:
    tables, one = filled
    assert not (tables / "hosts").exists() and not (tables / "claims").exists()
    assert list(check(tables)) == []
    assert one.exchange().run(now_s=time.time()).sent == 0
    two = Host(tmp_path / "two", tables.as_uri())
    with running([two]):
        two.see(problem(0), problem(1), problem(2))
        assert two.exchange().run(now_s=time.time()).fetched == 2
        assert two.work() == 3, "nobody is kept from tuning by a place without claims"
        assert two.searched() == {str(problem(2))}


def test_daemons_go_on_where_somebody_makes_a_repository_of_their_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is signed by no key: whoever can write there can plant one."""
    monkeypatch.setattr(planted_search, "pause_s", 0.0)
    url, trust = (tmp_path / "shared").as_uri(), Trust(b"a secret of members")
    hosts = [Host(tmp_path / name, url) for name in ("one", "two")]
    with running(hosts):
        for host in hosts:
            host.trust = trust
            host.see(*map(problem, range(8)))
            host.turn()
            host.work(2)
            host.turn()
        assert any(host.store.fleet_sync.ours(planted_search.ENVIRONMENT) for host in hosts)
        (tmp_path / "shared" / MARK).write_bytes(files("tables", "a stranger", 2026)[MARK])
        rounds(hosts)
        assert {len(host.solved()) for host in hosts} == {8}


def test_what_does_not_belong_there_is_named(filled: tuple[Path, Host], capsys: pytest.CaptureFixture[str]) -> None:
    tables, _ = filled
    one, two = sorted((tables / "results").rglob("*.json"))
    one.write_bytes(one.read_bytes()[:-3])
    (two.parent / "kernel.cubin").write_bytes(b"\x7fELF")
    (tables / "setup.py").write_text("print()")
    (tables / "results" / "link").symlink_to("/etc")
    (tables / "LICENSE").unlink()
    (tables / "README.md").write_text("no card")
    capsys.readouterr()
    assert gemmtuned("fleet", "check", str(tables), "--json") == 1
    wrong = [row["problem"] for row in json.loads(capsys.readouterr().out)["problems"]]
    for name in (one.name, "kernel.cubin", "setup.py", "results/link: a link", "LICENSE: missing", "README.md: "):
        assert sum(name in line for line in wrong) == 1, (name, wrong)
    assert len(wrong) == 6


@pytest.mark.long
def test_the_script_for_pull_requests_needs_nothing_installed_and_imports_nothing_of_the_request(
    filled: tuple[Path, Host],
) -> None:
    tables, _ = filled
    git = ["git", "-C", str(tables), "-c", "user.name=x", "-c", "user.email=x@x.invalid"]
    for step in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *step], check=True)
    for name in ("gemmtuned", "json"):  # what would be run if the script were to look here first
        (tables / name).mkdir()
        (tables / name / "__init__.py").write_text("open('/dev/stdout', 'w').write('owned')")

    def run(*base: str) -> subprocess.CompletedProcess[str]:
        # -S: no package but the standard library and gemmtuned
        env = {**os.environ, "PYTHON": f"{sys.executable} -S", "PYTHONPATH": str(ROOT)}
        command = ["sh", str(tables / ".ci/check"), *base]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)

    said = run()
    assert "owned" not in said.stdout and "gemmtuned/__init__.py: neither" in said.stdout
    subprocess.run([*git, "clean", "-qfd"], check=True)
    said = run("HEAD")
    assert (said.returncode, said.stdout) == (0, "2 results, all as they should be\n"), said
    one, two = sorted((tables / "results").rglob("*.json"))
    one.unlink()
    said = run("HEAD")
    assert said.returncode == 1 and "changed or removed since HEAD" in said.stdout
    assert "No such" in run("nowhere").stdout or "git diff nowhere" in run("nowhere").stdout
    assert two.exists()


class Hub:
    """Stands in for huggingface_hub.HfApi: what a commit adds is there, what a pull request adds is not yet."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.proposed: list[str] = []
        self.made: list[dict[str, Any]] = []

    def create_repo(self, repo: str, **named: Any) -> None:
        self.made.append(named)

    def list_repo_tree(self, repo: str, **named: Any) -> list[Any]:
        return [type("File", (), {"path": path, "size": len(data)}) for path, data in self.files.items()]

    def create_commit(self, repo: str, operations: Any, *, create_pr: bool, **named: Any) -> None:
        for one in operations:
            if create_pr:
                self.proposed.append(one.path_in_repo)
            else:
                self.files[one.path_in_repo] = one.path_or_fileobj


def test_at_the_hub_results_are_committed_or_proposed(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra [fleet] is not installed")
    hub = Hub()
    host = Host(tmp_path / "one", "hf://datasets/us/tables")
    HubObjects(host.url, hub).make()
    assert hub.made == [{"repo_type": "dataset", "private": True, "exist_ok": True}]
    with running([host]):
        host.see(problem(0))
        host.work()
        host.exchange(HubObjects(host.url, hub, propose=True)).run(now_s=time.time())
        assert len(hub.proposed) == 1 and not hub.files
        host.see(problem(1))
        host.work()
        host.exchange(HubObjects(host.url, hub)).run(now_s=time.time())
        assert {path.partition("/")[0] for path in hub.files} == {"results"}, "no counts are published"


def test_what_a_commit_failed_to_bring_to_the_hub_comes_with_the_next() -> None:
    pytest.importorskip("huggingface_hub", reason="the extra [fleet] is not installed")
    hub = Hub()
    objects, commit = HubObjects("hf://datasets/us/tables", hub), hub.create_commit
    objects.put("results/a", b"found")
    hub.create_commit = lambda *args, **named: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(TryLater):
        objects.flush()
    hub.create_commit = commit  # type: ignore[method-assign]
    objects.flush()
    assert hub.files == {"results/a": b"found"}
