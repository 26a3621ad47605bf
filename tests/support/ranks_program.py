"""One rank of an expert-parallel program: every rank computes the router for itself, and all must decide alike.

    RANK=.. RENDEZVOUS=FILE python tests/support/ranks_program.py WORLD_SIZE own|group|together|auto|none

Router weights are one row in different orders and every token has equal features, so all experts score alike but for
the order of the additions: which kernel ran decides.  Generation 1 is there at the start; rank 0 publishes 2 at step 2.
own: each rank reloads by itself, at a step of its own.  group: all in gemmtuned.reload(group) at step 5.
together: each has a Together take a step.  auto: all wait, at step 3, until they have it by themselves.
Printed: {"apart": [tokens on which the ranks disagree, by step], "generations": [...]}.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from hooked import publish, published, wait_for

import gemmtuned
from gemmtuned.configs.problem import Problem
from gemmtuned.hooks import activate
from gemmtuned.hooks.ranks import Together

TOKENS, EXPERTS, K, STEPS = 32, 8, 512, 12
ROUTER = Problem(m=TOKENS, n=EXPERTS, k=K, dtype="fp32", threads=1)


def main() -> None:
    size, how = int(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if gemmtuned.is_enabled() and os.environ.get("GEMMTUNED_RELOAD") != "manual":
        wait_for(lambda: gemmtuned.generation() == 1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=rank, world_size=size)
    group = dist.group.WORLD
    torch.manual_seed(0)
    row = torch.randn(K)
    weight = torch.stack([row[torch.randperm(K)] for _ in range(EXPERTS)])
    tokens = torch.rand(TOKENS, 1).expand(TOKENS, K).contiguous()
    apart, generations = [], []
    together = Together(group, hook=activate.current, every=1)
    for step in range(STEPS):
        if step == 2 and how != "together":
            if rank == 0:
                hook = activate.current()
                assert hook is not None
                publish(hook.settings.config_dir, [published(ROUTER, "onednn")], 2)
            dist.barrier()
            time.sleep(0.8)  # an automatic reload would have come by now
        if how == "auto" and step == 3:
            wait_for(lambda: gemmtuned.generation() == 2)
            dist.barrier()
        if how == "own" and step == 4 + 2 * rank:
            gemmtuned.reload()
        if how == "together":
            if rank == step % size:  # at another moment on each rank, and never where all stand still
                hook = activate.current()
                assert hook is not None
                publish(hook.settings.config_dir, [published(ROUTER, ("onednn", "torch_swap")[step % 2])], step + 2)
            together.step()
        if how == "group" and step == 5:
            gemmtuned.reload(group)
        choice = torch.nn.functional.linear(tokens, weight).argmax(1)
        theirs = [torch.empty_like(choice) for _ in range(size)]
        dist.all_gather(theirs, choice)
        apart.append(int(sum((other != theirs[0]).sum() for other in theirs)))
        generations.append(gemmtuned.generation())
    print(json.dumps({"apart": apart, "generations": generations}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
