"""Programs that extend torch, fork, start threads and serve; see foreign_running.py."""

from __future__ import annotations

import inspect
import json
import operator
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from foreign_running import K, N, arrive, aten, coarse_program, mlp, program, rows, step
from torch import Tensor

from gemmtuned.hooks import activate

# ---- extensions of torch


@program
def operator_of_a_users_own():
    @torch.library.custom_op("foreign::product", mutates_args=())
    def product(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x, w.t())

    product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[0]))
    product.register_autograd(
        lambda ctx, g: (g @ ctx.saved_tensors[1], g.t() @ ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x, w = rows().requires_grad_(), torch.randn(N, K, requires_grad=True)
    y = torch.compile(product, backend="aot_eager", fullgraph=True)(x, w)
    y.square().sum().backward()
    said = torch.library.opcheck(product, (x.detach(), w.detach()))
    return y, x.grad, w.grad, said


@coarse_program
def autograd_function_of_a_users_own():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, g.t() @ x

    x, w = rows().requires_grad_(), torch.randn(N, K, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Product.apply(x, w)
    y.float().square().sum().backward()
    return y, x.grad, w.grad


@program
def what_torch_says_of_its_functions():
    overridable = torch.overrides.get_overridable_functions()
    known = [f in overridable[m] for m, f in ((torch, torch.mm), (F, F.linear), (Tensor, Tensor.matmul))]
    return (
        known, repr(F.linear), repr(torch.mm), F.linear is torch._C._nn.linear, type(F.linear).__name__,
        inspect.isbuiltin(F.linear), F.linear.__name__, (F.linear.__doc__ or "")[:60],
        [str(aten.mm.overloads()), str(aten.mm.default._schema), str(aten.mm.default.tags)],
        torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "CPU"),
        aten.linear.default.has_kernel_for_dispatch_key("Meta"),
        operator.matmul(rows(), rows().t()),
    )  # fmt: skip


# ---- processes and threads


class Products(torch.utils.data.Dataset):
    def __init__(self):
        self.weight = torch.randn(N, K)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return F.linear(torch.full((2, K), float(i)), self.weight)


def tell_worker(worker: int) -> None:
    torch.manual_seed(worker)


@program
def data_loader_with_workers():
    from torch.utils.data import DataLoader

    data = Products()
    said = []
    for _ in range(2):
        said.append(list(DataLoader(data, 3, num_workers=2, worker_init_fn=tell_worker, persistent_workers=True)))
        arrive()
    return said


@program
def threads_that_train():
    torch.manual_seed(0)
    models, x = [mlp() for _ in range(4)], rows()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda m: step(m, x), models))
    return found, [t.name for t in threading.enumerate()]


@program
def server_that_forks_its_workers():
    """In an interpreter of its own: after all that ran here, MKL can hold a lock that a fork never gets, stock too."""
    environment = {**os.environ, "AITER_TUNE_GEMM": "0" if activate.current() is None else "1"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("foreign_server.py"))]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, text=True, **pipes) as server:
        half = server.stdout.readline()
        arrive()
        out, err = server.communicate("on\n")
    said = json.loads(out.splitlines()[-1]) if out else {"answers": [], "ends": []}
    answers = torch.tensor(said["answers"])
    return {"half": half, "answers": answers, "ends": said["ends"], "status": server.returncode, "errors": err}
