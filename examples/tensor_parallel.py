"""A language model's head whose vocabulary is split over processes, trained, beside the same on one process.

Each rank has some of the rows of the head's weight, and so some of the logits of every token. The loss is that of all
of them, and the gradient of the embedding, which all ranks share, is summed over ranks. On two CPU processes, or GPUs:

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 8 examples/tensor_parallel.py --backend nccl --vocabulary 128256 --width 4096
"""

from __future__ import annotations

import argparse

import maxsoftmax.torch
import maxsoftmax.torch.distributed
import torch
import torch.distributed as dist


def parameters(options: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the embedding and the head, (vocabulary, width) both, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = options.vocabulary, options.width
    made = [torch.randn(shape, generator=generator) / options.width**0.5 for _ in range(2)]
    return made[0].to(device), made[1].to(device)


def batches(options: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """Returns tokens for each step: each is followed by its successor in a fixed, random order."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(options.vocabulary, generator=generator)
    places = torch.randint(options.vocabulary, (options.steps, options.tokens, 1), generator=generator)
    found = order[(places + torch.arange(2)) % options.vocabulary]
    return list(found.to(device))


def train(options: argparse.Namespace, device: torch.device, split: bool) -> list[float]:
    """Returns the loss of each step, of a head that is split over ranks or is not."""
    embedding, head = parameters(options, device)
    lengths = None
    if split:
        shards = head.tensor_split(dist.get_world_size())
        lengths = [len(shard) for shard in shards]
        head = shards[dist.get_rank()].clone()
    embedding.requires_grad_()
    head.requires_grad_()
    optimizer = torch.optim.SGD([embedding, head], lr=options.rate)
    losses = []
    for tokens in batches(options, device):
        logits = embedding[tokens[:, 0]] @ head.T
        if split:
            loss = maxsoftmax.torch.distributed.cross_entropy(logits, tokens[:, 1], lengths=lengths)
        else:
            loss = maxsoftmax.torch.cross_entropy(logits, tokens[:, 1])
        optimizer.zero_grad()
        loss.backward()
        if split:
            dist.all_reduce(embedding.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains both, and compares the losses."""
    parser = argparse.ArgumentParser(description="A language model's head that is split over processes")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"], help="nccl is for GPUs (gloo)")
    for name, value in {"vocabulary": 1001, "width": 32, "tokens": 512, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"({value})")
    parser.add_argument("--rate", type=float, default=20.0, metavar="X", help="of the steps (20)")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    losses = train(options, device, split=True)
    if dist.get_rank() == 0:
        alone = train(options, device, split=False)
        apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        print(f"{dist.get_world_size()} ranks: the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")
        print(f"on one rank the losses are the same to {apart:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
