# mypy: disable-error-code="no-untyped-call,attr-defined"
"""Is the first captured CUDA graph tuned, how long did its capture wait, and who is condemned when programs die?

    python -m benchmarks first_graph [--starts 20] [--without 6] [--compiled 2] [--jobs 4] [--out DIR]

A table with kernels of ours for four layers lies in a home of its own.  A program starts with the hook on, makes its
context, and captures a graph of the layers 0.1 to 5 s later; the kernels in it are read from the profiler when it is
replayed.  `waiting` is the hook as it is, `without` the same with GEMMTUNED_GRAPH_WAIT_S=0, taking turns; `compiled`
has torch.compile capture the graph (reduce-overhead).

Deaths: a program takes the table up and dies, twice; a third start tells whether the generation is still used.

    exception, exit    its own: an exception that nobody catches, os._exit(0)
    assert             its own kernel breaks the device (an index out of range)
    sigkill            a signal from outside
    broken             a planted kernel of the table reads an address that is none
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

SIZES = ((512, 1024), (1024, 512), (768, 1024), (1024, 768))  # N, K of the layers
DEATHS = {"exception": False, "exit": False, "assert": False, "sigkill": False, "broken": True}  # condemned is right
CHILD_S = 240.0


# ---- the program


def child(mode: str, delay_s: float) -> None:
    """One start; says what it found as JSON on its last line."""
    began_s = time.monotonic()
    import torch

    import gemmtuned

    if not gemmtuned.is_enabled():  # run from a checkout: torch finds no entry point
        gemmtuned.enable()
    imported_s = time.monotonic()
    layers = [torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="cuda") for n, k in SIZES]
    xs = [torch.randn(1, k, dtype=torch.bfloat16, device="cuda") for _, k in SIZES]
    torch.cuda.synchronize()
    time.sleep(delay_s)
    with torch.inference_mode():
        if mode in DEATHS:
            _die(mode, layers, xs)
        said = _compiled(layers, xs) if mode == "compiled" else _captured(layers, xs)
    status = gemmtuned.status()
    said |= {
        "delay_s": delay_s,
        "import_s": round(imported_s - began_s, 3),
        "generation": status["generation"],
        "note": status["note"],
    }
    print(json.dumps(said), flush=True)


def _captured(layers: list[Any], xs: list[Any]) -> dict[str, Any]:
    import torch

    def step() -> list[Any]:
        return [layer(x) for layer, x in zip(layers, xs, strict=True)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # libraries make their handles
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    began_s = time.monotonic()
    with torch.cuda.graph(graph):
        begun_s = time.monotonic()
        ys = step()
    kernels = _kernels(graph.replay)
    right = all(torch.allclose(y, layer(x), rtol=0.1, atol=0.1) for y, layer, x in zip(ys, layers, xs, strict=True))
    return {"wait_s": round(begun_s - began_s, 4), "kernels": kernels, "right": right}


def _compiled(layers: list[Any], xs: list[Any]) -> dict[str, Any]:
    import torch

    run = torch.compile(lambda: [layer(x) for layer, x in zip(layers, xs, strict=True)], mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        run()
    began_s = time.monotonic()
    torch.compiler.cudagraph_mark_step_begin()
    kernels = _kernels(run)
    return {"wait_s": None, "replay_s": round(time.monotonic() - began_s, 4), "kernels": kernels, "right": True}


def _kernels(run: Any) -> dict[str, int]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return {e.key: e.count for e in seen.key_averages() if "CUDA" in str(e.device_type)}


def _die(mode: str, layers: list[Any], xs: list[Any]) -> None:
    import torch

    import gemmtuned

    if not gemmtuned.ready(60.0):
        raise SystemExit("the table did not become active")
    if mode == "broken":
        layers[0](xs[0])
        torch.cuda.synchronize()
    elif mode == "exception":
        raise ValueError("the program's own")
    elif mode == "exit":
        os._exit(0)
    elif mode == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "assert":
        bad = torch.zeros(4, device="cuda")[torch.tensor([100], device="cuda")]
        torch.cuda.synchronize()
        raise AssertionError(f"the device took an index that is out of range: {bad}")


# ---- the table


def make_table(folder: Path, *, broken: bool = False) -> list[str]:
    """Publish kernels of ours for the layers; the names of their functions."""
    from gemmtuned.configs.manifest import make_folder, write_binary, write_tables
    from gemmtuned.configs.problem import Problem
    from gemmtuned.configs.solution import Solution
    from gemmtuned.kernels.backends import BACKENDS, environment
    from gemmtuned.kernels.device import cuda_device

    make_folder(folder)
    device, backend = cuda_device(0), BACKENDS["triton"]
    rows, names = [], []
    for n, k in SIZES:
        problem = Problem(m=1, n=n, k=k, math_mode="reduced")
        candidate = next(iter(backend.candidates(problem)))
        launch, binary = backend.launch_of(candidate, problem)
        if binary is not None:
            write_binary(folder, binary)
        facts = json.loads(launch)
        names.append(facts["name"])
        if broken:  # the weight's address is a number
            takes = facts["arguments"]
            numbers = ("x.size0", "w.stride0", "x.stride0")
            i, j = takes.index("w.ptr"), next(takes.index(a) for a in numbers if a in takes)
            takes[i], takes[j] = takes[j], takes[i]
            launch = json.dumps(facts)
        row = Solution(
            problem=problem, device=device.key, mode="eager", covers="exact", backend="triton", config=candidate.config,
            stamp=environment(device).stamp_of(candidate) or "", us=1.0, baseline_us=2.0, gain_low=1.5, err=1e-3,
            baseline_err=1e-3, state="published", launch=launch,
        )  # fmt: skip
        rows += [row, replace(row, mode="graph")]
    write_tables(folder, {f"dense-{device.key}": rows}, generation=1)
    return names


# ---- the runs


def start(home: Path, mode: str, delay_s: float, **env: str) -> dict[str, Any]:
    """One process; what it said, its exit code and its lines of ours."""
    rest = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED_HOME", "AITER_"))}
    ours = {"GEMMTUNED": "1", "GEMMTUNED_HOME": str(home), "GEMMTUNED_RUN": mode, **env}
    command = [sys.executable, "-P", __file__, "--child", mode, str(delay_s)]
    try:
        done = subprocess.run(
            command, env={**rest, **ours}, capture_output=True, text=True, timeout=CHILD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "error": f"not over within {CHILD_S:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    said = json.loads(lines[-1]) if lines else {}
    ours_said = [line for line in done.stderr.splitlines() if line.startswith("gemmtuned:")]
    error = {} if done.returncode == 0 else {"error": done.stderr.strip().splitlines()[-1:]}
    return {**said, "code": done.returncode, "lines": ours_said, **error}


def delays(count: int) -> list[float]:
    """0.1 to 5 s, evenly."""
    return [round(0.1 + 4.9 * i / max(count - 1, 1), 2) for i in range(count)]


def tuned(found: dict[str, Any], names: list[str]) -> bool:
    """Whether every layer of the graph ran a kernel of ours."""
    return sum(count for kernel, count in found.get("kernels", {}).items() if kernel in names) >= len(SIZES)


def arms(home: Path, args: Any) -> Iterator[tuple[str, float, dict[str, str]]]:
    """(arm, delay, environment), the arms in turn."""
    without = delays(args.without) if args.without else []
    for i, delay_s in enumerate(delays(args.starts)):
        yield "waiting", delay_s, {}
        if i < len(without):
            yield "without", delay_s, {"GEMMTUNED_GRAPH_WAIT_S": "0"}
    for delay_s in delays(args.compiled) if args.compiled else []:
        yield "compiled", delay_s, {}


def deaths(folder: Path, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Per way to die: whether the third start goes without the generation, and what is right."""
    for mode in DEATHS:
        make_table(folder / f"death-{mode}" / "configs", broken=mode == "broken")
    out = dict(zip(DEATHS, pool.map(lambda mode: _death(folder / f"death-{mode}", mode), DEATHS), strict=True))
    for mode, found in out.items():
        said = f"codes {found['codes']}  condemned {found['condemned']}, right is {DEATHS[mode]}"
        print(f"  {mode:10} {said}  {found['note']}")
    return out


def _death(home: Path, mode: str) -> dict[str, Any]:
    died = [start(home, mode, 0.0) for _ in range(2)]
    third = start(home, "status", 0.0, GEMMTUNED_RUN=mode)
    note = third.get("note", "")
    condemned = third.get("generation") == 0 or "not used" in note
    return {
        "codes": [d["code"] for d in died], "errors": [d.get("error") for d in died], "condemned": condemned,
        "right": condemned == DEATHS[mode], "reported": _reports(home), "note": note, "lines": third.get("lines"),
    }  # fmt: skip


def _reports(home: Path) -> list[Any]:
    import sqlite3

    try:
        with sqlite3.connect(home / "tune.db") as conn:
            return conn.execute("SELECT how, backend, reports, reason FROM quarantine").fetchall()
    except sqlite3.Error:
        return []


def status_child() -> None:
    """A start that only says which generation it would use."""
    import torch

    import gemmtuned

    if not gemmtuned.is_enabled():
        gemmtuned.enable()
    torch.zeros(1, device="cuda")
    gemmtuned.ready(30.0)
    status = gemmtuned.status()
    print(json.dumps({"generation": status["generation"], "note": status["note"]}))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        mode, delay_s = sys.argv[2], float(sys.argv[3])
        if mode == "status":
            status_child()
        else:
            child(mode, delay_s)
        return
    parser = record.arguments(__doc__)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--without", type=int, default=6, help="starts with no wait")
    parser.add_argument("--compiled", type=int, default=2, help="starts in which torch.compile captures")
    parser.add_argument("--jobs", type=int, default=4, help="starts side by side")
    parser.add_argument("--no-deaths", action="store_true")
    args = parser.parse_args()

    from gemmtuned.configs.settings import Settings
    from gemmtuned.hooks.native.build import build

    build(Settings.from_env().cache)
    with tempfile.TemporaryDirectory(prefix="first-graph-") as name:
        home = Path(name) / "home"
        names = make_table(home / "configs")
        print(f"kernels of ours: {sorted(set(names))}")
        with ThreadPoolExecutor(args.jobs) as pool:
            todo = [(arm, pool.submit(start, home, arm, delay_s, **env)) for arm, delay_s, env in arms(home, args)]
            found: dict[str, list[dict[str, Any]]] = {}
            for arm, future in todo:
                one = future.result()
                one["tuned"] = tuned(one, names)
                found.setdefault(arm, []).append(one)
                print(f"  {arm:9} {one.get('delay_s')!s:5} s  tuned {one['tuned']}  waited {one.get('wait_s')} s  "
                      f"{one.get('error', '')}")  # fmt: skip
            died = {} if args.no_deaths else deaths(Path(name), pool)
        summary: dict[str, Any] = {}
        for arm, ones in found.items():
            waits = sorted(one["wait_s"] for one in ones if one.get("wait_s") is not None)
            summary[arm] = {
                "starts": len(ones), "tuned": sum(one["tuned"] for one in ones),
                "right": sum(bool(one.get("right")) for one in ones),
                "wait_s": {"median": statistics.median(waits), "max": waits[-1], "all": waits} if waits else None,
            }  # fmt: skip
            print(f"{arm}: {summary[arm]['tuned']} of {len(ones)} graphs tuned, waits {summary[arm]['wait_s']}")
    facts = record.facts()
    result = {"benchmark": "first_graph", "kernels": names, "summary": summary, "starts": found, "deaths": died}
    print("saved", record.save(f"first_graph-{facts['date'][:10]}", result, args.out))


if __name__ == "__main__":
    main()
