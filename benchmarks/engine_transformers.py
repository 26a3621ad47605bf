"""`transformers serve` on a CPU, with the hook on and off.

    python benchmarks/engine_transformers.py [--out FOLDER]     # where transformers[serving] and gemmtuned are

A Llama of two layers with random weights is served unchanged from a folder.  Each `must` in the result is a yes or no:

    exact calls        layers x requests x steps by problem, and no other problem
    label, log line    `transformers`; one line of ours in the server's log
    publish taken up   a table of two problems is published while it serves: the running process's calls hit
    same text          greedy text with the hook off, on, on with the table, and with the file `disabled`
    store whole        after the server was killed with -9: `gemmtuned db check`
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_checks
import engine_model
import record
from engine_server import Server, running

from gemmtuned.configs.problem import Problem

REQUESTS, TOKENS = 3, 40
PROMPTS = [f"w5 w9 w20 w{30 + n}" for n in range(REQUESTS)]
PROMPT = 5  # tokens: the tokenizer puts one in front
LAYERS, HIDDEN, INNER, WORDS = engine_model.LAYERS, engine_model.HIDDEN, engine_model.INNER, engine_model.WORDS
# (N, K), and how many a layer has of it: q, k, v, o; gate and up; down
LINEARS = {(HIDDEN, HIDDEN): 4, (INNER, HIDDEN): 2, (HIDDEN, INNER): 1}
COMMAND = [
    str(Path(sys.executable).parent / "transformers"), "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}",
    "--device", "cpu",
]  # fmt: skip
GREEDY = json.dumps({"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None})


def expected(threads: int) -> dict[str, int]:
    """Calls by problem: one pass over the prompt and one for each further token, one request after the other."""
    calls = {}
    for (n, k), times in LINEARS.items():
        calls[f"bf16:{PROMPT}x{n}x{k},threads={threads}"] = LAYERS * times * REQUESTS
        calls[f"bf16:1x{n}x{k},threads={threads}"] = LAYERS * times * REQUESTS * (TOKENS - 1)
    calls[f"bf16:1x{WORDS}x{HIDDEN},threads={threads}"] = (
        REQUESTS * TOKENS
    )  # the head, for the last token of a prompt too
    return calls


def texts(server: Server) -> list[str]:
    """One request after the other."""
    body = {"model": str(server.model), "generation_config": GREEDY, "max_tokens": TOKENS, "temperature": 0}
    found = [server.post("/v1/completions", {**body, "prompt": prompt}) for prompt in PROMPTS]
    return [str(one["choices"][0]["text"]) for one in found]


def check(model: Path, folder: Path) -> dict[str, Any]:
    """What must hold."""
    import torch

    (folder / "hub" / "hub").mkdir(parents=True)  # its list of models fails without a cache
    env = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    stock = Server(COMMAND, model, folder / "off", hooked=False, env=env)
    with running(stock):
        right = texts(stock)
    server = Server(COMMAND, model, folder / "on", env=env)
    must: dict[str, Any] = {}
    threads = torch.get_num_threads()
    with running(server):
        must["no table: same text"] = texts(server) == right
        calls = server.settled()
        must["exact calls"] = calls == expected(threads)
        must["label"] = server.rows("SELECT DISTINCT run FROM sessions WHERE path <> 'off'") == [("transformers",)]
        must["one log line"] = len(server.ours()) == 1
        chosen = [Problem(m=1, n=n, k=k, dtype="bf16", threads=threads) for n, k in LINEARS]
        hits = LAYERS * sum(LINEARS.values()) * REQUESTS * (TOKENS - 1)
        must |= engine_checks.publish(server, lambda: texts(server), right, chosen, hits)
        must |= engine_checks.disable(server, lambda: texts(server), right)
        must |= engine_checks.kill(server)
    return {"calls": calls, "log": [engine_checks.line_of(x) for x in server.ours()], "must": must}


def main() -> None:
    given = record.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine_model.make(folder / "model")
        served = [check(folder / "model", folder)]
    print(json.dumps(served[0]["must"]))
    result = {"benchmark": "engine_transformers", "engine": f"transformers {version('transformers')}", "served": served}
    print(record.save(f"engine-transformers-cpu-{time.strftime('%Y-%m-%d')}", result, given.out))
    if not engine_checks.all_hold(served):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
