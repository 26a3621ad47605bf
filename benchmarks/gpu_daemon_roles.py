"""The other programs of gpu_daemon.py, each a process of its own, so that the one that measures never holds a GPU.

    python -m benchmarks gpu_daemon_roles seed|server|probe|guest|faults|slowed [--device cpu]

Most are told what to do line by line on standard input and answer with JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

HERE = Path(__file__).resolve()
SIZES = ((3072, 1024), (1024, 1024), (1024, 3072), (2048, 1024), (1024, 2048), (4096, 1024), (6144, 2048), (2048, 6144))


def p(values: list[float], share: float) -> float:
    """The value below which this share lies; the largest but one in a hundred for 0.99 of fewer values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def used_bytes(index: int = 0) -> int | None:
    """Memory in use on a GPU as its driver counts it; None without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except Exception:
        return None


def orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def answer(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def role_seed(device: str, count: int, offset: int, planted: bool) -> None:
    """Problems that were seen and wait, as a program with these layers would have counted them."""
    import torch

    from gemmtuned.configs.problem import Problem
    from gemmtuned.configs.settings import Settings
    from gemmtuned.configs.sighting import Sighting
    from gemmtuned.daemon.child.worker_main import device_of
    from gemmtuned.db.store import Store
    from gemmtuned.kernels.backends import environment

    here = Settings.from_env()
    if planted:
        import planted_gpu  # noqa: F401  its backends are part of the environment

    where = environment(device_of("cpu" if device == "cpu" else "GPU-0"))
    threads = torch.get_num_threads() if device == "cpu" else 0
    mode = "ieee" if device == "cpu" else "reduced"
    wanted = [
        Problem(m=m, n=n + 64 * (i // (2 * len(SIZES))) + offset, k=k, dtype="bf16", math_mode=mode, threads=threads)
        for i in range(count)
        for m in ((1, 8)[i // len(SIZES) % 2],)
        for n, k in (SIZES[i % len(SIZES)],)
    ]
    store = Store(here.db, locks=here.locks)
    store.sightings.add(
        "serve", where, [Sighting(one, "miss", max(1000 - i, 1)) for i, one in enumerate(wanted)], now_s=time.time()
    )
    store.close()


def role_server(device: str) -> None:
    """A loaded program: 2 GiB of weights, quiet unless told."""
    import torch

    small = device == "cpu"
    layers = [torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) for _ in range(2 if small else 256)]
    x = torch.randn(8, 2048, device=device, dtype=torch.bfloat16)

    def request() -> float:
        began = time.perf_counter()
        y = x
        for _ in range(1 if small else 8):
            for w in layers:
                y = torch.nn.functional.linear(y, w) * 0.02
        float(y.sum())
        return (time.perf_counter() - began) * 1e3

    def work(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            request()

    request()
    answer(ready=True)
    for order in orders():
        if "request" in order:
            answer(ms=request())
        elif "bursts" in order:
            end = time.perf_counter() + order["seconds"]
            while time.perf_counter() < end:
                work(0.05)
                time.sleep(max(1 / order["bursts"] - 0.05, 0))
            answer(done=True)
        else:
            work(order["busy"])


def role_probe(device: str) -> None:
    """A thousand small products a second; the time of each from launch to result."""
    import torch

    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    w = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    torch.nn.functional.linear(x, w)
    sync()
    answer(ready=True)
    for order in orders():
        times = []
        start = time.perf_counter()
        for number in range(int(order["seconds"] * 1000)):
            due = start + number / 1000
            while time.perf_counter() < due - 2e-4:
                time.sleep(1e-4)
            while time.perf_counter() < due:
                pass
            began = time.perf_counter_ns()
            torch.nn.functional.linear(x, w)
            sync()
            times.append((time.perf_counter_ns() - began) / 1e3)
        answer(p50_us=p(times, 0.5), p99_us=p(times, 0.99), p999_us=p(times, 0.999), calls=len(times))


def role_guest(device: str, gpu: int) -> None:
    """Has torch imported and no context; at each order a child of it starts to use the device for `hold` seconds."""
    import torch

    answer(ready=True)
    for order in orders():
        read_fd, write_fd = os.pipe()
        child = os.fork()
        if child == 0:
            begun = time.time()
            x = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
            y = x @ x
            float(y.sum())
            first = time.time()
            end, used = first + order["hold"], None
            while time.time() < end:
                y = x @ x
                float(y[0, 0])
                used = used_bytes(gpu) if used is None and time.time() > first + 0.7 * order["hold"] else used
            os.write(write_fd, json.dumps({"begun_s": begun, "first_s": first, "used_bytes": used}).encode())
            os._exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd) as said:
            text = said.read()
        os.waitpid(child, 0)
        print(text, flush=True)


def role_faults(device: str) -> None:
    """The daemon over a home, with planted kernels in its worker; says what each lost worker cost."""
    from dataclasses import replace

    from gemmtuned.configs.settings import Settings
    from gemmtuned.daemon.device.devices import find_monitors
    from gemmtuned.daemon.protocol.wire import Trial
    from gemmtuned.daemon.seats import worker
    from gemmtuned.daemon.service.main import run_daemon
    from gemmtuned.daemon.service.rules import allowed

    planted = HERE.with_name("planted_gpu.py")
    import ast

    tree = ast.parse(planted.read_text())
    listed = next(n for n in tree.body if isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == "FAULTS")
    assert isinstance(listed.value, ast.Dict)
    print(json.dumps([ast.literal_eval(key) for key in listed.value.keys if key is not None]))
    trying: list[tuple[str, float]] = []

    class Watched(worker.Worker):
        def poll(self) -> list[Any]:
            try:
                heard = super().poll()
            except worker.WorkerFailed:
                if trying:
                    print(
                        json.dumps({"candidate": trying[-1][0], "lost_s": time.monotonic() - trying[-1][1]}), flush=True
                    )
                raise
            trying.extend(
                (str(m.candidate), time.monotonic()) for m in heard if isinstance(m, Trial) and m.phase == "start"
            )
            return heard

    here = replace(Settings.from_env(), idle_s=0.5)
    monitors = allowed(find_monitors(), ["cuda:0"])
    code = run_daemon(
        here,
        once=True,
        wait_s=60,
        monitors=monitors,
        make_worker=lambda d: Watched(d, nice=0, search=f"{planted}:tune"),
    )
    sys.exit(code)


def role_slowed(device: str) -> None:
    """One problem searched while the driver never, at every other look and always says that the device is hot."""
    import itertools

    from gemmtuned.configs.errors import TryLater
    from gemmtuned.configs.problem import Problem
    from gemmtuned.daemon.child import search
    from gemmtuned.daemon.child.measure_cuda import CudaGraphs
    from gemmtuned.daemon.child.worker_main import device_of
    from gemmtuned.kernels.backends import environment

    here = environment(device_of("GPU-0"))
    problem = Problem(m=1, n=1024, k=2048, dtype="bf16", math_mode="reduced")
    plain, hot = CudaGraphs.condition, 0x20

    def found(bits: itertools.cycle[int]) -> dict[str, Any]:
        def condition(graphs: CudaGraphs) -> tuple[int | None, int | None]:
            nonlocal readings
            bit = next(bits)
            readings += bit == hot
            return plain(graphs)[0], bit

        CudaGraphs.condition = condition  # type: ignore[method-assign]
        solution, *_ = search.tune_modes(
            (problem,), "exact", problem, here, mode="graph", skip=(), emit=lambda trial: None, seed=1
        )
        return {"backend": solution.backend, "config": solution.config, "us": solution.us}

    readings = 0
    told: dict[str, Any] = {"never": found(itertools.cycle((0,)))}
    told["sometimes"] = found(itertools.cycle((hot, 0)))
    told["hot_readings"] = readings
    try:
        found(itertools.cycle((hot,)))
        told["always"] = "a verdict all the same"
    except TryLater as err:
        told["always"] = str(err)
    print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("seed", "server", "probe", "guest", "faults", "slowed"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--gpu", type=int, default=0, help="its number, for the driver")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    if args.role == "seed":
        role_seed(args.device, args.count, args.offset, args.planted)
    elif args.role == "guest":
        role_guest(args.device, args.gpu)
    else:
        roles = {"server": role_server, "probe": role_probe, "faults": role_faults, "slowed": role_slowed}
        roles[args.role](args.device)


if __name__ == "__main__":
    main()
