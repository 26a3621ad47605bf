"""Other projects' own tests with the hook off, counting, and routing everything it can: the outcomes must be the same.

    python -m benchmarks foreign_suites                      (fetches 300 MB by pip and git; some 40 minutes)
    python -m benchmarks foreign_suites --suites peft --tests 200

The tests come with the projects' source archives, torchao's by git, since its archive has none; the packages go to a
folder of their own (.foreign in the checkout).
Of each suite every n-th test runs, so that about the number asked for is spread over all of it, three times in the same
order: with the hook off; counting; and with a table that has a route for each problem that was counted, torch_swap,
torch_mv and oneDNN in turn.  A test whose outcome differs runs twice more, off and routed: what comes out the same then
is listed as unsteady, the rest as a difference.  Nothing is fetched from model hubs: tests that want to fail alike.

Exit status: 0 no difference, 1 a difference, 77 nothing could be fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import record

from gemmtuned.configs.manifest import write_tables
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Solution, cpu_device
from gemmtuned.db import queries
from gemmtuned.hooks.dispatch import SERVED
from gemmtuned.hooks.native.build import build
from gemmtuned.kernels.backends import BACKENDS, environment

FOLDER: Final = Path(__file__).resolve().parent.parent / ".foreign"
ROUTES: Final = ("torch_swap", "onednn", "torch_mv")
NOTHING_FETCHED: Final = 77
LIMIT_S: Final = 3000  # of one pass over a suite


@dataclass(frozen=True)
class Suite:
    """A source archive and what its tests need beside torch, numpy, transformers and pytest.

    repository: where its tests are, at the tag `v` and the version, if the archive comes without them.
    """

    sdist: str
    needs: tuple[str, ...]
    paths: tuple[str, ...]
    share: float  # of the tests that are asked for
    left_out: tuple[str, ...] = ()
    repository: str = ""


SUITES: Final = {
    "peft": Suite(
        "peft==0.21.2",
        (
            "accelerate", "diffusers", "datasets", "pyarrow", "dill", "xxhash", "multiprocess", "importlib_metadata",
            "zipp", "pillow", "requests", "urllib3", "certifi", "charset_normalizer", "parameterized", "scipy",
        ),
        (
            "tests/test_custom_models.py", "tests/test_tuners_utils.py", "tests/test_bufferdict.py",
            "tests/test_lorafa.py", "tests/test_loraplus.py", "tests/test_randlora.py", "tests/test_vera.py",
        ),
        0.4,
    ),
    "linear_operator": Suite(
        "linear_operator==0.6.1",
        ("jaxtyping", "wadler_lindig", "mpmath", "scipy"),
        ("test/operators", "test/functions", "test/utils"),
        0.4,
    ),
    "gpytorch": Suite(
        "gpytorch==1.15.2",
        ("linear_operator==0.6.1", "jaxtyping", "wadler_lindig", "scipy", "scikit-learn", "joblib", "threadpoolctl"),
        ("test/kernels", "test/distributions", "test/likelihoods", "test/means", "test/variational", "test/models"),
        0.25,
        ("keops",),
    ),
    "torchao": Suite(
        "torchao==0.18.0",
        ("expecttest", "parameterized"),
        (
            "test/quantization", "test/dtypes", "test/core", "test/test_low_bit_optim.py", "test/float8/test_base.py",
            "test/prototype/test_int8_lut_tensor.py", "test/prototype/test_int4_opaque_tensor.py",
            "test/prototype/test_tensor_conversion.py", "test/prototype/test_quantized_training.py",
            "test/prototype/test_smoothquant.py", "test/prototype/test_parq.py", "test/prototype/test_awq.py",
            "test/prototype/test_codebook_quant.py", "test/prototype/pat",
        ),
        0.3,
        ("inductor_fusion",),  # minutes of compiling in each
        "https://github.com/pytorch/ao",
    ),
}  # fmt: skip


class NotFetched(Exception):
    """pip or git could not bring what a suite needs."""


# ---- fetching


def fetch(name: str, suite: Suite, folder: Path) -> Path:
    """Install the packages and unpack the tests; returns the folder that pytest runs in. Raises NotFetched."""
    site, sources = folder / "site", folder / "sources"
    mark = sources / f"{suite.sdist}.fetched"
    if not mark.exists():
        sources.mkdir(parents=True, exist_ok=True)
        _pip("install", "--no-deps", "--upgrade", "--target", str(site), suite.sdist, *suite.needs)
        if suite.repository:
            _clone(suite, sources / suite.sdist.replace("==", "-"))
        else:
            _pip("download", "--no-deps", "--no-binary", ":all:", "-d", str(sources), suite.sdist)
            with tarfile.open(next(sources.glob(f"{name}-*.tar.gz"))) as archive:
                archive.extractall(sources, filter="data")
        mark.touch()
    root = next(path for path in sources.glob(f"{name}-*") if path.is_dir())
    shutil.rmtree(root / name, ignore_errors=True)  # the installed package is tested, not the one beside its tests
    for tests in {path.split("/")[0] for path in suite.paths}:
        (root / tests / "__init__.py").touch()  # some tests import their neighbours as a package
    (root / "plain.ini").write_text("[pytest]\n")  # theirs ask for plug-ins
    return root


def _clone(suite: Suite, folder: Path) -> None:
    """Bring the tests; a folder that somebody has put there is taken as it is."""
    if not folder.exists():
        tag = "v" + suite.sdist.partition("==")[2]
        _fetched("git", "clone", "-q", "--depth", "1", "--branch", tag, suite.repository, str(folder))


def _pip(*args: str) -> None:
    _fetched(sys.executable, "-m", "pip", *args, "-q", "--disable-pip-version-check")


def _fetched(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise NotFetched(f"{' '.join(command[:4])} ... failed: {said}")


# ---- running


class Runner:
    """Runs a suite's tests in a process of their own, under one setting of the hook."""

    def __init__(self, folder: Path, root: Path, home: Path, cache: Path) -> None:
        self.folder, self.root, self.home, self.cache = folder, root, home, cache

    def environment(self, how: str) -> dict[str, str]:
        """For pytest: off, counting or routed."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        few = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        env = {**kept, **quiet, **few, "PYTHONPATH": str(self.folder / "site"), "GEMMTUNED": "0"}
        if how == "off":
            return env
        ours = {"GEMMTUNED_HOME": str(self.home), "GEMMTUNED_CACHE": str(self.cache), "GEMMTUNED_QUIET": "1"}
        return env | ours | {"GEMMTUNED": "1", "GEMMTUNED_DISPATCH": "1" if how == "routed" else "0"}

    def pytest(self, how: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run pytest to its end."""
        command = [sys.executable, "-P", "-m", "pytest", "-c", "plain.ini", "--rootdir", ".", "-p", "no:cacheprovider"]
        return subprocess.run(
            [*command, "-q", "--continue-on-collection-errors", *args],
            cwd=self.root, env=self.environment(how), capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def names(self, suite: Suite) -> list[str]:
        """Every test of it, as pytest names them."""
        found = [path for path in suite.paths if (self.root / path).exists()]
        ignored = [f"--ignore-glob=*{word}*" for word in suite.left_out]
        said = self.pytest("off", "--collect-only", *ignored, *found).stdout
        return [line for line in said.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]

    def outcomes(self, how: str, names: list[str]) -> dict[str, str]:
        """Test -> "passed", "skipped", "failed: AssertionError", or "crashed: -11" where the process died."""
        order, report = self.folder / "order.txt", self.folder / f"{how}.xml"
        order.write_text("\n".join(names) + "\n")
        report.unlink(missing_ok=True)
        done = self.pytest(how, f"--junitxml={report}", "-o", "junit_family=xunit1", f"@{order}")
        if not report.exists():
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
            return dict.fromkeys(names, f"crashed: {done.returncode}")
        return dict(_read(report))


def _read(report: Path) -> Iterator[tuple[str, str]]:
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        verdicts = [child for child in case if child.tag in ("failure", "error", "skipped")]
        if not verdicts:
            yield name, "passed"
        elif verdicts[0].tag == "skipped":
            yield name, "skipped"
        else:
            yield name, f"failed: {(verdicts[0].get('message') or '').split(':')[0].split('(')[0].strip()[:80]}"


# ---- the table


def plant(home: Path) -> int:
    """Publish a route for every problem that was counted and that a backend takes; returns how many."""
    here = environment(cpu_device())
    rows = []
    for i, problem in enumerate(_problems(home)):
        takes = [b for b in ROUTES if problem.family in SERVED and tuple(BACKENDS[b].candidates(problem))]
        if takes:
            rows.append(_row(problem, takes[i % len(takes)], here))
    write_tables(home / "configs", {"foreign": rows}, generation=1)
    return len(rows)


def _problems(home: Path) -> list[Problem]:
    sql = "SELECT DISTINCT p.text FROM every_sighting s JOIN problem p ON p.id = s.problem_id ORDER BY p.text"
    return [Problem.parse(row["text"]) for row in queries.ask(home / "tune.db", sql)]


def _row(problem: Problem, backend: str, here: Any) -> Solution:
    """What a daemon would publish; the times are no measurements."""
    return Solution(
        problem=problem, device=here.device.key, backend=backend, stamp=here.stamps.get(backend, "none"), mode="eager",
        covers="exact", config="{}", us=5.0, baseline_us=10.0, gain_low=1.5, err=1e-6, baseline_err=1e-6,
        state="published",
    )  # fmt: skip


def _calls(home: Path) -> dict[str, int]:
    sql = "SELECT outcome, sum(calls) AS calls FROM every_sighting GROUP BY outcome"
    return {row["outcome"]: row["calls"] for row in queries.ask(home / "tune.db", sql)}


# ---- comparing


def kinds(outcomes: Iterable[str]) -> dict[str, int]:
    """passed, failed, skipped, crashed -> how many."""
    counts = Counter(outcome.split(":")[0] for outcome in outcomes)
    return {
        kind: counts[kind] for kind in ("passed", "failed", "skipped", "crashed") if kind != "crashed" or counts[kind]
    }


def compare(runner: Runner, suite: Suite, tests: int) -> dict[str, Any]:
    """All passes over one suite."""
    every = runner.names(suite)
    names = every[:: max(1, len(every) // max(1, tests))]
    off = runner.outcomes("off", names)
    counted = runner.outcomes("counting", names)
    before = _calls(runner.home)
    routes = plant(runner.home)
    routed = runner.outcomes("routed", names)
    after = _calls(runner.home)
    differ = sorted(n for n in off.keys() | routed.keys() if not off.get(n) == counted.get(n) == routed.get(n))
    differences, unsteady = again(runner, names, differ, {"off": off, "counting": counted, "routed": routed})
    return {
        "sdist": suite.sdist, "collected": len(every), "tests": len(off), "routes": routes,
        "calls": sum(after.values()) - sum(before.values()),
        "calls_served_by_routes": sum(n for outcome, n in after.items() if outcome != "miss"),
        "off": kinds(off.values()), "counting": kinds(counted.values()), "routed": kinds(routed.values()),
        "why_they_fail": dict(Counter(o for o in off.values() if o.startswith("failed")).most_common(10)),
        "differences": differences, "unsteady": unsteady,
    }  # fmt: skip


def again(
    runner: Runner, names: list[str], differ: list[str], first: dict[str, dict[str, str]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run what differed twice more; (differences, what was no difference then), each test -> its outcomes."""
    if not differ:
        return {}, {}
    wanted = [name for name in names if _spelled(name) in set(differ)]
    found = {name: {how: [outcomes.get(name, "missing")] for how, outcomes in first.items()} for name in differ}
    for _ in range(2):
        for how in ("off", "routed"):
            for name, outcome in runner.outcomes(how, wanted).items():
                found.setdefault(name, {}).setdefault(how, []).append(outcome)
    lasting = {n: f for n, f in found.items() if set(f["off"][1:]) != set(f["routed"][1:])}
    return lasting, {n: f for n, f in found.items() if n not in lasting}


def _spelled(name: str) -> str:
    """As junit has it: tests/test_a.py::TestB::test_c[d] -> tests.test_a.TestB::test_c[d]."""
    bare, bracket, parameters = name.partition("[")
    path, *parts = bare.split("::")
    where = ".".join([path.removesuffix(".py").replace("/", "."), *parts[:-1]])
    return f"{where}::{parts[-1]}{bracket}{parameters}"


def main() -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--tests", type=int, default=2400, help="about how many, over all suites")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for what is fetched")
    args = parser.parse_args()
    folder = args.folder.resolve()
    cache = Settings.from_env().cache
    build(cache)
    result: dict[str, Any] = {"threads": 1, "suites": {}, "skipped": {}}
    whole = sum(SUITES[name].share for name in args.suites)
    for name in args.suites:
        home = folder / "home" / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        try:
            root = fetch(name, SUITES[name], folder)
        except NotFetched as err:
            result["skipped"][name] = str(err)
            print(f"{name}: skipped, {err}")
            continue
        tests = round(args.tests * SUITES[name].share / whole)
        found = result["suites"][name] = compare(Runner(folder, root, home, cache), SUITES[name], tests)
        print(f"{name}: {found['tests']} tests, routes served {found['calls_served_by_routes']} calls")
        print(f"  off {found['off']}, routed {found['routed']}, differences {found['differences']}", flush=True)
        _save(result, args.out)
    if not result["suites"]:
        return NOTHING_FETCHED
    return 1 if any(suite["differences"] for suite in result["suites"].values()) else 0


def _save(result: dict[str, Any], folder: Path) -> None:
    keys = ("off", "counting", "routed")
    totals = {key: dict(sum((Counter(s[key]) for s in result["suites"].values()), Counter())) for key in keys}
    totals["tests"] = sum(s["tests"] for s in result["suites"].values())
    date = record.facts()["date"][:10]
    record.save(f"foreign_suites-{date}", {"totals": totals, **result}, folder)


if __name__ == "__main__":
    sys.exit(main())
