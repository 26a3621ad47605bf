"""A text classifier as anyone might write it: a bag of embeddings and three linear layers.

    python classifier.py [SECONDS]

Answers batches of eight texts, each tenth of five, for so long (10 s), and prints how many batches a second it made.
It knows nothing of gemmtuned.
"""

import sys
import time

import torch
from torch import nn


def build() -> nn.Module:
    """Logits [B, 10] of texts [B, 30] of tokens."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.EmbeddingBag(5000, 512),
        nn.Linear(512, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    ).eval()


@torch.inference_mode()
def serve(model: nn.Module, seconds: float) -> float:
    """Batches a second."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or count < 10:
        model(torch.randint(5000, (5 if count % 10 == 9 else 8, 30)))
        count += 1
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    rate = serve(build(), float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
    print(f"{rate:.0f} batches/s with {torch.get_num_threads()} threads")
