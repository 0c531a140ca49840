"""The ways to compute softmax, each a small adapter in a file of its own."""

from __future__ import annotations

from maxsoftmax._bench.providers.base import Provider, Unsupported
from maxsoftmax._bench.providers.called import (
    CalledLiger,
    CalledQuack,
    CalledTorch,
    CalledTorchCompile,
    OurArrays,
    OurGraph,
    OurTorch,
    OurTorchGrad,
    TorchGrad,
)
from maxsoftmax._bench.providers.cudnn import Cudnn
from maxsoftmax._bench.providers.jax_jit import Jax, OurJax
from maxsoftmax._bench.providers.liger import Liger
from maxsoftmax._bench.providers.max_builtin import MaxBuiltin
from maxsoftmax._bench.providers.numpy_ufuncs import Numpy
from maxsoftmax._bench.providers.onnx_runtime import OnnxRuntime
from maxsoftmax._bench.providers.ours import MaxSoftmax
from maxsoftmax._bench.providers.quack import Quack
from maxsoftmax._bench.providers.scipy_special import Scipy
from maxsoftmax._bench.providers.torch_compile import TorchCompile
from maxsoftmax._bench.providers.torch_eager import Torch

__all__ = ["CALLERS", "PROVIDERS", "Provider", "Unsupported"]

PROVIDERS: dict[str, type[Provider]] = {
    p.name: p
    for p in (
        MaxSoftmax,
        MaxBuiltin,
        Torch,
        TorchCompile,
        Liger,
        Quack,
        Jax,
        OurJax,
        Cudnn,
        OnnxRuntime,
        Scipy,
        Numpy,
    )
}
"""Every provider's class by its name; making one imports its library."""

CALLERS: dict[str, type[Provider]] = {
    p.name: p
    for p in (
        OurArrays,
        OurTorch,
        OurTorchGrad,
        OurGraph,
        OurJax,
        MaxBuiltin,
        CalledTorch,
        TorchGrad,
        CalledTorchCompile,
        CalledLiger,
        CalledQuack,
        Jax,
        OnnxRuntime,
        Scipy,
        Numpy,
    )
}
"""The same for whole calls: each library as its users call it."""
