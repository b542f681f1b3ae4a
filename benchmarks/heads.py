"""Speed of the training loop: against the bare batched product, and against one client at a time.

    python benchmarks/heads.py [--repeats 7]

1. K = 100 clients, minibatches of 64, heads of 768 x 100: floating-point operations per second of one epoch, minibatch
   gathering, softmax and all, over those of torch.bmm on the same shapes. (A step has two products.)
2. The same with minibatches of 16: seconds of an epoch over those of nn.Linear, cross_entropy and optim.SGD, one client
   after the other, minibatches taken from the same rows.

Repeats of the two sides are interleaved; medians are compared, so a busy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from apfl.data.federation import Shard
from apfl.methods import load_method
from apfl.methods._stack import Stack

CLIENTS, ROWS, WIDTH, CLASSES = 100, 320, 768, 100


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def medians(repeats: int, *sides: Callable[[], object]) -> list[float]:
    for side in sides:
        side()  # warm up
    times = [[seconds(side) for side in sides] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def epoch(clients: list[Shard], batch: int) -> Callable[[], object]:
    stack = Stack([load_method("local_head", batch=batch, epochs=1)], clients, CLASSES, 0)
    params = stack.spread(stack.initial())
    return lambda: stack.train(params, 0)


def products(batch: int, device: str) -> Callable[[], object]:
    x = torch.randn(CLIENTS, batch, WIDTH, device=device)
    heads = torch.randn(CLIENTS, WIDTH, CLASSES, device=device)
    out = torch.empty(CLIENTS, batch, CLASSES, device=device)

    def work() -> None:
        for _ in range(2 * ROWS // batch):
            torch.bmm(x, heads, out=out)

    return work


def one_at_a_time(clients: list[Shard], batch: int) -> Callable[[], object]:
    def work() -> None:
        for shard in clients:
            head = torch.nn.Linear(WIDTH, CLASSES).to(shard.features.device)
            optimiser = torch.optim.SGD(head.parameters(), lr=0.1)
            for some in torch.randperm(len(shard)).to(shard.labels.device).split(batch):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(head(shard.features[some]), shard.labels[some]).backward()
                optimiser.step()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clients = [
        Shard(torch.randn(ROWS, WIDTH, device=device), torch.randint(CLASSES, (ROWS,), device=device))
        for _ in range(CLIENTS)
    ]
    flops = 4 * CLIENTS * ROWS * WIDTH * CLASSES
    ours, bare = medians(repeats, epoch(clients, 64), products(64, device))
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, medians of {repeats}")
    print(f"batch 64: {flops / ours / 1e9:.0f} Gflop/s, torch.bmm {flops / bare / 1e9:.0f}: ratio {bare / ours:.2f}")
    ours, loop = medians(repeats, epoch(clients, 16), one_at_a_time(clients, 16))
    print(f"batch 16: {ours:.3f} s an epoch, one client at a time {loop:.3f} s: {loop / ours:.1f} times faster")


if __name__ == "__main__":
    main()
