"""MLPs split over ranks (tensor parallel), NCCL on GPUs and gloo on CPUs; new tables are taken up by all ranks at once.

    torchrun --nproc-per-node 2 docs/examples/tensor_parallel.py --tokens 16 --steps 200      # prints tokens/s

Each rank holds half the columns of the up and half the rows of the down projection; one all-reduce a layer.  Ranks
take tuned tables up at start.  The one line about gemmtuned lets them take up newer ones while they run, at one step:
leave it out and everything else still works.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gemmtuned


class Mlp(nn.Module):
    """This rank's share of down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inter: int, ranks: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * inter // ranks, bias=False)
        self.down = nn.Linear(inter // ranks, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y = self.down(F.silu(gate) * up)
        dist.all_reduce(y)
        return x + y


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inter", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    with device:
        model = nn.Sequential(*(Mlp(args.hidden, args.inter, ranks) for _ in range(args.layers))).bfloat16().eval()
        torch.manual_seed(0)
        x = torch.randn(args.tokens, args.hidden, dtype=torch.bfloat16)
    for _ in range(args.repeat):
        gemmtuned.reload(dist.group.WORLD)
        for _ in range(3):
            model(x)
        start = time.perf_counter()
        for _ in range(args.steps):
            y = model(x)
        total = y.float().sum().item()  # waits for the device
        seconds = time.perf_counter() - start
        if rank == 0:
            print(f"{args.tokens * args.steps / seconds:.1f} tokens/s, checksum {total:.6g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
