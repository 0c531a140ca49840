"""What the tests of the functions for torch share."""

import os

import pytest

torch = pytest.importorskip("torch")
ours = pytest.importorskip("maxsoftmax.torch")
F = torch.nn.functional

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# Ours, and torch's own.
ALONG = {"softmax": (ours.softmax, torch.softmax), "log_softmax": (ours.log_softmax, torch.log_softmax)}


def torch_device(device):
    """Returns torch's name of a device of ours."""
    if device == "gpu" and not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")
    return {"cpu": "cpu", "gpu": "cuda"}[device]


def needs_gpus(count):
    """Skips a test where torch has fewer."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs")


def normal(*shape, dtype=torch.float32, device="cpu", seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale
    return x.to(device, dtype).requires_grad_()


def classes(*shape, n, device="cpu", dtype=torch.int64, seed=1):
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(device, dtype)


def probabilities(*shape, dtype=torch.float32, device="cpu", seed=4):
    return normal(*shape, dtype=torch.float64, seed=seed).detach().softmax(min(1, len(shape) - 1)).to(device, dtype)


def close(a, b):
    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    tolerance = TOLERANCE[b.dtype]
    finite = b[b.isfinite()].abs()
    scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def same(mine, theirs, x):
    """Asserts that two functions have the same result for `x`, and the same gradient."""
    results, gradients = [], []
    for function in (mine, theirs):
        y = function(x)
        dy = normal(*y.shape, device=y.device, seed=2, scale=1).detach().to(y.dtype)
        results.append(y.detach())
        gradients.append(torch.autograd.grad(y, x, dy)[0])
    close(*results)
    close(*gradients)


def in_processes(function, world, *arguments):
    """Calls a function with its rank and the arguments in each of `world` processes; what one of them raises, fails."""
    torch.multiprocessing.spawn(_in_process, (function, *arguments), world)


def _in_process(rank, function, *arguments):
    function(rank, *arguments)
    # A thread of MAX's or of gloo's that is still there when Python ends aborts the process, once in a hundred times.
    os._exit(0)
