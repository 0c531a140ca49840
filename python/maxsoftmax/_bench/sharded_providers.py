"""Ways to compute losses and logarithms of rows that are split over the ranks of a process group of torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Step = Callable[[], Any]
"""Returns the loss, and leaves the gradient of the shard behind; or returns the shard's logarithms."""


def ours(op: str, shard: Any, target: Any, lengths: list[int]) -> Step:
    """Returns `maxsoftmax.torch.distributed`, or of one rank what needs no process group."""
    if len(lengths) == 1:
        functions = importlib.import_module("maxsoftmax.torch")
        if op == "log_softmax":
            return lambda: functions.log_softmax(shard)
        return lambda: _backward(functions.cross_entropy(shard, target))
    functions = importlib.import_module("maxsoftmax.torch.distributed")
    if op == "log_softmax":
        return lambda: functions.log_softmax(shard)
    return lambda: _backward(functions.cross_entropy(shard, target, lengths=lengths))


def loss_parallel(op: str, shard: Any, target: Any, lengths: list[int]) -> Step:
    """Returns torch's own for DTensors, which has the loss only."""
    if op != "cross_entropy":
        raise ImportError("has the loss only")
    import torch
    from torch.distributed import device_mesh, tensor
    from torch.distributed.tensor.parallel import loss_parallel as context

    mesh = device_mesh.init_device_mesh(shard.device.type, (len(lengths),))
    shape = torch.Size((shard.shape[0], sum(lengths)))

    def step() -> Any:
        x = tensor.DTensor.from_local(
            shard, mesh, [tensor.Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1)
        )
        with context():
            loss = torch.nn.functional.cross_entropy(x, target)
            loss.backward()
        return loss.detach().full_tensor()

    return step


def megatron(op: str, shard: Any, target: Any, lengths: list[int]) -> Step:
    """Returns Megatron's scheme in functions of torch: float32 throughout, an all-reduce for each of three numbers."""
    import torch
    import torch.distributed as dist

    start = sum(lengths[: dist.get_rank()])

    def reduced(x: Any, how: Any) -> Any:
        dist.all_reduce(x, how)
        return x

    class Loss(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            z = x.float()
            z = z - reduced(z.amax(1), dist.ReduceOp.MAX).unsqueeze(1)
            place = target - start
            elsewhere = (place < 0) | (place >= x.shape[1])
            place = place.masked_fill(elsewhere, 0)
            wanted = z.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0)
            wanted = reduced(wanted, dist.ReduceOp.SUM)
            y = z.exp()
            sums = reduced(y.sum(1), dist.ReduceOp.SUM)
            ctx.save_for_backward(y.div_(sums.unsqueeze(1)), place, elsewhere)
            return (sums.log() - wanted).mean()

        @staticmethod
        def backward(ctx: Any, dloss: Any) -> Any:
            y, place, elsewhere = ctx.saved_tensors
            y[torch.arange(len(y), device=y.device), place] -= (~elsewhere).float()
            return y.mul_(dloss / len(y)).to(shard.dtype)

    def logarithms() -> Any:
        z = shard.float()
        z = z - reduced(z.amax(1), dist.ReduceOp.MAX).unsqueeze(1)
        return (z - reduced(z.exp().sum(1), dist.ReduceOp.SUM).log().unsqueeze(1)).to(shard.dtype)

    return logarithms if op == "log_softmax" else lambda: _backward(Loss.apply(shard))


def transformer_engine(op: str, shard: Any, target: Any, lengths: list[int]) -> Step:
    """Returns TransformerEngine's, which has the loss only, of shards of one length, and overwrites logits."""
    function = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    if op != "cross_entropy" or len(set(lengths)) > 1:
        raise ImportError("has the loss only, of shards of one length")
    import torch.distributed as dist

    def step() -> Any:
        x = shard.detach().clone().requires_grad_()
        loss = function(x.unsqueeze(0), target.unsqueeze(0), 0.0, True, dist.group.WORLD)
        loss.backward()
        shard.grad = x.grad
        return loss.detach()

    return step


def gather(op: str, shard: Any, target: Any, lengths: list[int]) -> Step:
    """Returns torch's functions of whole rows, after gathering them."""
    import torch
    import torch.distributed as dist

    mine = slice(sum(lengths[: dist.get_rank()]), sum(lengths[: dist.get_rank() + 1]))

    def rows() -> Any:
        # One length for all, as collectives have it.
        most = max(lengths)
        padded = torch.nn.functional.pad(shard.detach(), (0, most - shard.shape[1]))
        every = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(every, padded)
        return torch.cat([x[:, :n] for x, n in zip(every, lengths, strict=True)], 1)

    def loss() -> Any:
        x = rows().requires_grad_()
        found = _backward(torch.nn.functional.cross_entropy(x, target))
        shard.grad = x.grad[:, mine].contiguous()
        return found

    return loss if op == "cross_entropy" else lambda: torch.log_softmax(rows(), 1)[:, mine]


PROVIDERS: dict[str, Callable[..., Step]] = {
    "maxsoftmax": ours,
    "loss_parallel": loss_parallel,
    "megatron": megatron,
    "transformer-engine": transformer_engine,
    "gather": gather,
}
"""Each by its name."""


def _backward(loss: Any) -> Any:
    loss.backward()
    return loss.detach()
