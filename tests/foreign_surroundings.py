"""Programs that extend torch, fork, start threads and serve; see foreign_running.py."""

from __future__ import annotations

import inspect
import operator
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from foreign_running import ROWS, K, N, arrive, aten, coarse_program, mlp, program, rows, step
from torch import Tensor

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
    """As gunicorn: the master loads the model, forks, reaps, and ends its workers with a signal.

    They end as multiprocessing ends its children: where the master has used torch's profiler, the end of the whole
    interpreter in a fork of it waits for a thread that did not come along, and torch aborts.
    """
    import signal
    import socket

    model = mlp().eval()
    model(rows())
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(16)

    def worker():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        torch.set_num_threads(1)  # the threads of OpenMP did not come along
        while True:
            connection, _ = listening.accept()
            seed = connection.recv(8)[0]
            with torch.no_grad():
                y = model(torch.full((ROWS, K), float(seed)))
            connection.sendall(pickle.dumps(y.tolist()))
            connection.close()

    workers = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                worker()
            except SystemExit as end:
                os._exit(int(str(end.code)))
            os._exit(1)
        workers.append(pid)
    answers = []
    for seed in range(9):
        with socket.create_connection(listening.getsockname(), timeout=20) as connection:
            connection.sendall(bytes([seed]))
            answers.append(torch.tensor(pickle.loads(b"".join(iter(lambda: connection.recv(65536), b"")))))
        if seed == 4:
            arrive()
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    ends = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in workers)
    try:
        os.wait()
        ends.append("one child more")
    except ChildProcessError:
        pass
    listening.close()
    return answers, ends
