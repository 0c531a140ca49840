"""Libraries as their users call them, where the adapters of kernels call them otherwise."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

import maxsoftmax
from maxsoftmax._bench.cases import OPS, Case, Entry
from maxsoftmax._bench.providers.base import Provider, Unsupported
from maxsoftmax._bench.providers.liger import Liger
from maxsoftmax._bench.providers.ours import OfArrays, loss_and_gradient
from maxsoftmax._bench.providers.quack import Quack
from maxsoftmax._bench.providers.torch_compile import TorchCompile
from maxsoftmax._bench.providers.torch_eager import Torch

GRADIENT = "cross_entropy_gradient"
"""The op that nobody computes without autograd, or a function of its own."""


class OurArrays(OfArrays):
    """`maxsoftmax.softmax` and its relatives."""

    ops = ("softmax", "log_softmax", "cross_entropy", GRADIENT)

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the function."""
        functions: dict[str, Callable[[Any], Any]] = {
            "softmax": functools.partial(maxsoftmax.softmax, axis=case.axis),
            "log_softmax": functools.partial(maxsoftmax.log_softmax, axis=case.axis),
            "cross_entropy": lambda given: maxsoftmax.cross_entropy(*given),
            GRADIENT: loss_and_gradient,
        }
        return functions[case.op]


class OurGraph(Provider):
    """A graph of `maxsoftmax.ops`, for any shape, through `Model.execute`."""

    name = "maxsoftmax.ops"
    ops = ("softmax", "log_softmax", "cross_entropy", GRADIENT)
    late = True

    def version(self) -> str:
        """Returns the package's version."""
        return maxsoftmax.__version__

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the model's execution."""
        return self._function(case.like)

    def result(self, y: Buffer) -> Buffer:
        """Returns `y`."""
        return y

    @functools.cache  # noqa: B019 (a provider lives as long as the run)
    def _function(self, like: Case) -> Callable[[Any], Any]:
        ops, axis = maxsoftmax.ops, like.place

        def gradient(x: Any, target: Any) -> tuple[Any, Any]:
            loss, pairs = ops.cross_entropy_forward(x, target)
            return loss, ops.cross_entropy_backward(x, target, pairs)

        functions: dict[str, Callable[..., Any]] = {
            "softmax": lambda x: ops.softmax(x, axis),
            "log_softmax": lambda x: ops.log_softmax(x, axis),
            "cross_entropy": ops.cross_entropy,
            GRADIENT: gradient,
        }
        dims, where = [f"d{i}" for i in range(len(like.shape))], DeviceRef.from_device(self.device)
        types = [TensorType(like.dtype, dims, where)]
        if OPS[like.op].losses:
            types.append(TensorType(DType.int64, dims[:1], where))
        extensions = [maxsoftmax.extension()]
        graph = Graph(like.op, functions[like.op], input_types=types, custom_extensions=extensions)
        execute = InferenceSession(devices=[self.device]).load(graph).execute
        if like.op == GRADIENT:
            return lambda given: tuple(execute(*given))
        return (lambda given: execute(*given)[0]) if OPS[like.op].losses else (lambda x: execute(x)[0])


class CalledTorch(Torch):
    """Torch's own functions, on torch's own stream, without gradients unless it is one that is computed."""

    ops: ClassVar[tuple[str, ...]] = ("softmax", "log_softmax", "cross_entropy", GRADIENT)
    grad: ClassVar[bool] = False
    """Whether logits require a gradient."""

    def _join(self) -> None:
        """Stays on torch's stream."""

    def wait(self, y: Any) -> None:
        """Returns when all is there that torch's streams were given."""
        if not self.device.is_host:
            self.torch.cuda.synchronize(self.device.id)

    def calling(self, case: Case) -> contextlib.AbstractContextManager[object]:
        """Returns `torch.no_grad`, or its contrary."""
        mode: contextlib.AbstractContextManager[object]
        mode = self.torch.enable_grad() if self.grad or case.op == GRADIENT else self.torch.no_grad()
        return mode

    def share(self, x: Buffer) -> Any:
        """Returns `x` as a tensor, which requires a gradient where tensors may."""
        tensor = super().share(x)
        return tensor.requires_grad_(self.torch.is_grad_enabled() and tensor.is_floating_point())

    def result(self, y: Any) -> Buffer:
        """Returns the memory of `y`."""
        return super().result(y.detach())

    def _gradient(self, loss: Callable[..., Any], x: Any, target: Any) -> tuple[Any, Any]:
        found = loss(x, target)
        # What `backward` does, but for the sum with earlier gradients.
        (dx,) = self.torch.autograd.grad(found, x)
        return found.detach(), dx


class OurTorch(CalledTorch):
    """`maxsoftmax.torch`."""

    name = "maxsoftmax.torch"

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        import maxsoftmax.torch

        self.ours = maxsoftmax.torch

    def version(self) -> str:
        """Returns the package's version."""
        return maxsoftmax.__version__

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns its function."""
        ours, axis = self.ours, case.axis
        functions: dict[str, Callable[[Any], Any]] = {
            "softmax": lambda x: ours.softmax(x, axis),
            "log_softmax": lambda x: ours.log_softmax(x, axis),
            "cross_entropy": lambda given: ours.cross_entropy(*given),
            GRADIENT: lambda given: self._gradient(ours.cross_entropy, *given),
        }
        return functions[case.op]


class _Grad(CalledTorch):
    """The same for tensors that require a gradient, which autograd keeps what it needs for."""

    grad = True

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the function."""
        if case.op == GRADIENT:
            raise Unsupported(f"computes what {self.name.removesuffix('+grad')} does")
        return super().prepare(case, entry)


class TorchGrad(_Grad):
    """Torch's own functions of tensors that require a gradient."""

    name = "torch+grad"


class OurTorchGrad(_Grad, OurTorch):
    """`maxsoftmax.torch` of tensors that require a gradient."""

    name = "maxsoftmax.torch+grad"


class CalledTorchCompile(CalledTorch, TorchCompile):
    """`torch.compile` of torch's function, for the case's shape alone."""

    # Its name, its devices and how it prepares are those of the class that it takes out of MAX's stream.


class CalledLiger(CalledTorch, Liger):
    """Liger's functions, on torch's own stream."""

    ops = ("softmax", "cross_entropy", GRADIENT)


class CalledQuack(CalledTorch, Quack):
    """QuACK's functions, on torch's own stream."""

    ops = ("softmax", "cross_entropy", GRADIENT)
