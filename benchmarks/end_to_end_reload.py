"""The last part of end_to_end.py: tables change 100 times while threads decode. Is every step right, and how slow?

Each thread decodes eagerly with a model of its own layer sizes, cache and stream.  Blocks without and with publishes
take turns; a table of everything routed and one of torch's own alternate, published by another process, as the daemon
would.  The steps' logits must stay within rounding of those of the first, un-routed step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
import torch

import gemmtuned
from gemmtuned.configs.manifest import BINARIES, make_folder, read_manifest, read_table
from gemmtuned.configs.settings import Settings
from gemmtuned.hooks.activate import activate

HERE = Path(__file__).resolve().parent
example: Any = SourceFileLoader("example_decode", str(HERE.parent / "docs/examples/decode.py")).load_module()
example.SIZES["tiny"] = (128, 256, 2, 2, 1)
THREADS, PUBLISHES, BLOCKS = 8, 100, 10
ROUNDING = 0.05  # of the largest logit: bf16 through all layers

# Alternates two tables, given as rows by file, until told to stop; imports no torch.
PUBLISHER = """
import json, pathlib, sys, time
from gemmtuned.configs.manifest import write_tables
from gemmtuned.configs.solution import Solution
folder, every_s = pathlib.Path(sys.argv[1]), float(sys.argv[3])
tables = json.loads(pathlib.Path(sys.argv[2]).read_text())
tables = [[Solution.from_row(row) for row in rows] for rows in tables]
generation = 1
for line in sys.stdin:
    for _ in range(int(line)):
        write_tables(folder, {"test": tables[generation % 2]}, generation=generation)
        generation += 1
        time.sleep(every_s)
    print(generation - 1, flush=True)
"""


class Decoding:
    """One thread that decodes until stopped, on a stream of its own; `times` are its steps' in seconds."""

    def __init__(self, model: Any, device: str) -> None:
        self.decoder = example.Decoder(model, 1, 64, False)
        self.device = device
        self.times: list[float] = []
        self.wrong = 0
        self.right: Any = None

    def steps(self, stop: threading.Event) -> None:
        stream = torch.cuda.Stream() if self.device == "cuda" else None
        with torch.inference_mode(), torch.cuda.stream(stream):
            while not stop.is_set():
                start = time.perf_counter()
                self.decoder.step()
                logits = self.decoder.logits.float().cpu()  # waits for the step
                self.times.append(time.perf_counter() - start)
                if self.right is None:
                    self.right = logits
                elif (logits - self.right).abs().max() > ROUNDING * self.right.abs().max():
                    self.wrong += 1
                self.decoder.reset()  # each step is the first one
                self.decoder.token.zero_()


def block(threads: list[Decoding], during: Any) -> list[float]:
    """Times of all steps, in ms, that the threads made while `during` ran."""
    stop = threading.Event()
    for one in threads:
        one.times = []
    running = [threading.Thread(target=one.steps, args=(stop,)) for one in threads]
    for thread in running:
        thread.start()
    during()
    stop.set()
    for thread in running:
        thread.join()
    return sorted(1e3 * t for one in threads for t in one.times)


def copy_tables(home: Settings, folder: Path) -> list[Any]:
    """What the home has published, its binaries copied to another folder."""
    manifest = read_manifest(home.config_dir)
    make_folder(folder / BINARIES)
    for binary in (home.config_dir / BINARIES).glob("*"):
        copy = folder / BINARIES / binary.name
        copy.write_bytes(binary.read_bytes())
        copy.chmod(0o644)
    return [s for file in (manifest.files if manifest else ()) for s in read_table(home.config_dir, file)[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=example.SIZES, required=True)
    parser.add_argument("--part", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--seconds", type=float, required=True)
    args, _ = parser.parse_known_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="gemmtuned-")) / "configs"
    make_folder(folder)
    settings = replace(Settings.from_env(), config_dir=folder, capture=True, dispatch=True)
    solutions = copy_tables(Settings.from_env(), folder)
    assert solutions, "nothing is published: run end_to_end.py's other part first"
    hook = activate(settings)
    assert hook is not None and hook.path == "native", gemmtuned.status()["note"]
    stamp = hook.where.environment("cuda:0" if device == "cuda" else "cpu").stamps["torch"]
    own = {"backend": "torch", "config": "{}", "launch": "", "stamp": stamp, "state": "default_best"}
    tables = [[s.to_row() for s in solutions], [replace(s, **own).to_row() for s in solutions]]
    (folder.parent / "tables.json").write_text(json.dumps(tables))
    taken: list[int] = []
    gemmtuned.on_reload(taken.append)
    model = example.build(args.size, args.layers, device, torch.bfloat16 if device == "cuda" else torch.float32)
    threads = [Decoding(model, device) for _ in range(THREADS)]
    if device == "cuda":
        torch.cuda.synchronize()  # what was made on the default stream is read on others
    block(threads, lambda: time.sleep(1.0))  # the first step of each, with no table
    every_s = max(0.01, min(0.1, args.seconds / 6 / PUBLISHES))
    command = [sys.executable, "-P", "-c", PUBLISHER, str(folder), str(folder.parent / "tables.json"), str(every_s)]
    env = {**os.environ, "AITER_TUNE_GEMM": "0"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as publisher:
        assert publisher.stdin is not None and publisher.stdout is not None

        def publish() -> None:
            publisher.stdin.write(f"{PUBLISHES // BLOCKS}\n")
            publisher.stdin.flush()
            publisher.stdout.readline()

        quiet_s = every_s * PUBLISHES / BLOCKS
        blocks: dict[str, list[list[float]]] = {"quiet": [], "again": [], "publishing": []}
        generations = []
        for _ in range(BLOCKS):
            blocks["quiet"].append(block(threads, lambda: time.sleep(quiet_s)))
            blocks["publishing"].append(block(threads, publish))
            generations.append(gemmtuned.generation())
            blocks["again"].append(block(threads, lambda: time.sleep(quiet_s)))
        publisher.stdin.close()
    until = time.monotonic() + 5
    while gemmtuned.generation() < PUBLISHES and time.monotonic() < until:
        time.sleep(0.01)
    generations.append(gemmtuned.generation())
    hook.tick()  # the flush thread collects failures, too: they are asked for where it puts them
    summary = {
        "publishes": PUBLISHES, "threads": THREADS, "generations_seen": generations, "taken_up": len(taken),
        "wrong": sum(one.wrong for one in threads),
        "failures": hook.session().errors,
        **{
            f"{name}_ms": {
                "steps": sum(map(len, found)),
                "median": round(statistics.median(t for one in found for t in one), 2),
                "p95": round(statistics.quantiles((t for one in found for t in one), n=20)[-1], 2),
                "slowest": [round(one[-1], 2) for one in found],
            }
            for name, found in blocks.items()
        },
    }  # fmt: skip
    args.part.write_text(json.dumps({**record.facts(), "size": args.size, "summary": summary}, indent=1) + "\n")
    print(json.dumps(summary), flush=True)
    gemmtuned.disable()


if __name__ == "__main__":
    main()
