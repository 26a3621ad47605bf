"""decode.py with the model compiled by torch.compile, and on a GPU the compiled step in one CUDA graph.

    python docs/examples/decode_compiled.py --batch 8 --steps 128                # prints tokens/s
    python docs/examples/decode_compiled.py --batch 8 --max-autotune

Inductor calls most GEMMs of such a model as extern kernels; those are counted and routed when the step is captured.
With --max-autotune it may put some into kernels of its own: `gemmtuned coverage` says how many.
"""

import time

import torch
from decode import Decoder, arguments, build


@torch.inference_mode()
def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--max-autotune", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(args.size, args.layers, device, torch.bfloat16)
    mode = "max-autotune-no-cudagraphs" if args.max_autotune else "default"
    compiled = torch.compile(model, mode=mode, dynamic=False)  # the graph is captured here, not by Inductor
    decoder = Decoder(model, args.batch, args.steps + 8, device == "cuda" and not args.no_graph, compiled)
    for _ in range(args.repeat):
        for _ in range(3):  # a first step compiles
            decoder.step()
        start = time.perf_counter()
        for _ in range(args.steps):
            decoder.step()
        decoder.logits.sum().item()  # waits for the device
        seconds = time.perf_counter() - start
        print(f"batch {args.batch}: {args.batch * args.steps / seconds:.1f} tokens/s", flush=True)
        decoder.reset()


if __name__ == "__main__":
    main()
