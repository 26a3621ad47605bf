"""Other projects' own tests with the hook off, counting, and routing everything it can: the outcomes must be the same.

    python -m benchmarks foreign_suites                      (fetches 600 MB by pip and git; three quarters of an hour)
    python -m benchmarks foreign_suites --suites peft --tests 200
    SOAK=test_programs_suites make soak                      (the same as tests, one for each suite)

foreign_fetch.py says which tests of which projects these are.  Each suite has a virtual environment of its own (in
.foreign of the checkout), which takes torch and gemmtuned from the one that runs this.  Where PyPI or GitHub cannot be
reached, `--sources FOLDER`, or FOREIGN_SOURCES, names a folder with what pip and git would bring: archives and wheels,
and checkouts of torchao's and torch's repositories as torchao-VERSION and torch-VERSION.

Of each suite every n-th test runs, so that at most the number asked for is spread over all of it, three times in the
same order: with the hook off; counting; and with a table that has a route for each problem that was counted
(torch_swap, torch_mv and oneDNN in turn).  What differs runs four times more in each way, once with all tests of its
file, then alone.  What comes out alike in all of these, or in more than one way with the hook off, is listed as
unsteady, the rest as a difference.  Nothing is fetched from model hubs: tests that want to fail alike.

Exit status: 0 no difference, 1 a difference, 77 nothing could be fetched.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

import record
from foreign_fetch import SUITES, Fetched, NotFetched, Suite, fetch

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
PASSES: Final = ("off", "counting", "routed")
AGAIN: Final = 4  # how often what differs is run in each of them
NOTHING_FETCHED: Final = 77
LIMIT_S: Final = 3000  # of one pass over a suite


# ---- running


class Runner:
    """Runs a suite's tests in a process of their own, under one setting of the hook."""

    def __init__(self, fetched: Fetched, home: Path, cache: Path, own: Path | None = None) -> None:
        self.python, self.root, self.home, self.cache = fetched.python, fetched.root, home, cache
        self.own = home if own is None else own  # for what two runners with one home do not share

    def environment(self, how: str) -> dict[str, str]:
        """For pytest: off, counting or routed."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        few = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # each pass goes through Inductor's scheduler, which the hook wraps; what a compiler has made of it is kept
        inductor = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
        inductor |= {"TORCHINDUCTOR_CACHE_DIR": str(self.own / "inductor")}
        env = {**kept, **quiet, **few, **inductor, "TMPDIR": str(self.own / how), "GEMMTUNED": "0"}
        if how == "off":
            return env
        ours = {"GEMMTUNED_HOME": str(self.home), "GEMMTUNED_CACHE": str(self.cache), "GEMMTUNED_QUIET": "1"}
        return env | ours | {"GEMMTUNED": "1", "GEMMTUNED_DISPATCH": "1" if how == "routed" else "0"}

    def pytest(self, how: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run pytest to its end."""
        fresh(self.own / how)
        command = [
            str(self.python),
            "-P",
            "-m",
            "pytest",
            "-c",
            "plain.ini",
            "--rootdir",
            ".",
            "-p",
            "no:cacheprovider",
        ]
        return subprocess.run(
            [*command, "-q", "--continue-on-collection-errors", *args],
            cwd=self.root, env=self.environment(how), capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def names(self, suite: Suite) -> list[str]:
        """Every test of it, as pytest names them."""
        found = [path for path in suite.paths if (self.root / path).exists()]
        ignored = [f"--ignore-glob=*{word}*" for word in suite.left_out]
        said = self.pytest("off", "--collect-only", *ignored, *found).stdout
        tests = [line for line in said.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]
        return [test for test in tests if not any(word in test for word in suite.left_out)]

    def outcomes(self, how: str, names: list[str]) -> dict[str, str]:
        """Test -> "passed", "skipped", "failed: AssertionError", or "crashed: -11" where the process died."""
        order, report = self.own / "order.txt", self.own / f"{how}.xml"
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
            why = next(iter((verdicts[0].get("message") or "").splitlines()), "")  # later lines have addresses
            yield name, f"failed: {why.split(':')[0].split('(')[0].strip()[:80]}"


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
    began = time.monotonic()
    every = runner.names(suite)
    names = every[:: max(1, math.ceil(len(every) / tests))]
    off = runner.outcomes("off", names)
    counted = runner.outcomes("counting", names)
    before = _calls(runner.home)
    routes = plant(runner.home)
    routed = runner.outcomes("routed", names)
    after = _calls(runner.home)
    differ = sorted(
        n for n in off.keys() | counted.keys() | routed.keys() if not off.get(n) == counted.get(n) == routed.get(n)
    )
    differences, unsteady = again(runner, names, differ, {"off": off, "counting": counted, "routed": routed})
    return {
        "sdist": suite.sdist, "commit": suite.commit, "collected": len(every), "tests": len(off),
        "minutes": round((time.monotonic() - began) / 60, 1), "routes": routes,
        "calls": sum(after.values()) - sum(before.values()),
        "calls_served_by_routes": sum(n for outcome, n in after.items() if outcome != "miss"),
        "off": kinds(off.values()), "counting": kinds(counted.values()), "routed": kinds(routed.values()),
        "why_they_fail": dict(Counter(o for o in off.values() if o.startswith("failed")).most_common(10)),
        "differences": differences, "unsteady": unsteady,
    }  # fmt: skip


def again(
    runner: Runner, names: list[str], differ: list[str], first: dict[str, dict[str, str]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run what differed AGAIN times more; (differences, what was no difference then), each test -> its outcomes.

    No difference is what comes out in more than one way with the hook off, or came out alike in all that followed.
    """
    if not differ:
        return {}, {}
    wanted = [name for name in names if _spelled(name) in set(differ)]
    files = {name.partition("::")[0] for name in wanted}
    beside = [name for name in names if name.partition("::")[0] in files]
    found = {name: {how: [outcomes.get(name, "missing")] for how, outcomes in first.items()} for name in differ}
    for i in range(AGAIN):
        for how in PASSES:
            outcomes = runner.outcomes(how, wanted if i else beside)
            for name in differ:
                found[name][how].append(outcomes.get(name, "missing"))
    lasting = {n: f for n, f in found.items() if is_difference(f)}
    return lasting, {n: f for n, f in found.items() if n not in lasting}


def is_difference(found: dict[str, list[str]]) -> bool:
    """Whether the hook must be thought the cause; found: pass -> outcomes, first that of the long run."""
    later = {outcome for outcomes in found.values() for outcome in outcomes[1:]}
    return len(later) > 1 and len(set(found["off"])) == 1


def _spelled(name: str) -> str:
    """As junit has it: tests/test_a.py::TestB::test_c[d] -> tests.test_a.TestB::test_c[d]."""
    bare, bracket, parameters = name.partition("[")
    path, *parts = bare.split("::")
    where = ".".join([path.removesuffix(".py").replace("/", "."), *parts[:-1]])
    return f"{where}::{parts[-1]}{bracket}{parameters}"


def main() -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--tests", type=int, help="of each suite, at most")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for what is fetched")
    parser.add_argument("--sources", type=Path, default=os.environ.get("FOREIGN_SOURCES"), help="has what to fetch")
    parser.add_argument("--jobs", type=int, default=2, help="suites at the same time, one thread each")
    args = parser.parse_args()
    folder, cache = args.folder.resolve(), Settings.from_env().cache
    build(cache)
    date = record.facts()["date"][:10]  # that of the start, so that a run over midnight has one file
    given = None if args.sources is None else Path(args.sources).resolve()
    result: dict[str, Any] = {"threads": 1, "jobs": args.jobs, "suites": {}, "skipped": {}}
    runs = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for name in args.suites:
            suite = SUITES[name]
            try:
                fetched = fetch(suite, folder, given)
            except NotFetched as err:
                result["skipped"][name] = str(err)
                print(f"{name}: skipped, {err}", flush=True)
                continue
            runner = Runner(fetched, fresh(folder / "home" / name), cache)
            runs[pool.submit(compare, runner, suite, args.tests or suite.tests)] = name
        for run in as_completed(runs):
            name = runs[run]
            found = result["suites"][name] = run.result()
            print(f"{name}: {found['tests']} tests, routes served {found['calls_served_by_routes']} calls")
            print(f"  off {found['off']}, routed {found['routed']}, differences {found['differences']}", flush=True)
            _save(result, args.out, date)
    if not result["suites"]:
        return NOTHING_FETCHED
    return 1 if any(suite["differences"] for suite in result["suites"].values()) else 0


def fresh(folder: Path) -> Path:
    """The folder, with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _save(result: dict[str, Any], folder: Path, date: str) -> None:
    totals = {how: dict(sum((Counter(s[how]) for s in result["suites"].values()), Counter())) for how in PASSES}
    totals["tests"] = sum(s["tests"] for s in result["suites"].values())
    record.save(f"foreign_suites-{date}", {"totals": totals, **result}, folder)


if __name__ == "__main__":
    sys.exit(main())
