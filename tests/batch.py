"""Models that many tests share, compiled together: one takes half a minute, and every further one a tenth of that."""

from dataclasses import replace

from max.dtype import DType
from maxsoftmax import runtime
from maxsoftmax.arguments import DTYPES
from maxsoftmax.runtime import INPUTS, Signature

ALONG = [op for op, inputs in INPUTS.items() if op != "softmax" and "target" not in inputs]

_own = runtime.model
_models = runtime._models


def model(signature: Signature, n: int):
    """Returns what `runtime.model` does, and has its relatives compiled with it.

    Tests with models of their own are left alone, and so are gradients and losses on a GPU, where many processes share
    the work.
    """
    together = signature.device.is_host or signature.op == "softmax"
    if runtime._models is _models and signature not in _models and together:
        missing = [relative for relative in family(signature) if relative not in _models]
        if signature in missing:
            runtime.prepare(missing)
    return _own(signature, n)


def family(signature: Signature) -> list[Signature]:
    """Returns the models that are likely to be wanted once this one is."""
    plain = Signature(signature.device, signature.dtype, True)
    if signature.n is not None:
        return []
    if signature.op == "softmax":
        chosen = replace(plain, algorithm=signature.algorithm)
        return [replace(chosen, dtype=dtype, contiguous=rows) for dtype in DTYPES for rows in (True, False)]
    if signature.op in ALONG:
        ops = ALONG if signature.dtype == DType.float32 else (signature.op,)
        return [replace(plain, op=op, contiguous=rows) for op in ops for rows in (True, False)]
    return [replace(plain, op=op, contiguous=rows, options=options) for op, rows, options in _losses()]


def _losses():
    """Yields the op, whether its rows are contiguous, and the options of the losses that are tested most."""

    def options(reduction="mean", target=DType.int64, smoothing=0.0, **others):
        chosen = {"ignore_index": -100, "label_smoothing": smoothing, "reduction": reduction}
        return tuple({"target": target, **others, **chosen}.items())

    for reduction in ("none", "sum", "mean"):
        yield "cross_entropy_forward", True, options(reduction)
    for rows in (True, False):
        yield "cross_entropy_backward", rows, options(dloss=False)
        yield "cross_entropy_backward_", rows, options(dloss=False)
    for rows, more in ((False, {}), (True, {"reduction": "none", "target": DType.int32})):
        yield "cross_entropy_forward", rows, options(**more)
        yield "cross_entropy_backward", rows, options(**more, dloss=True)
    for rows in (True, False):
        yield "cross_entropy_forward", rows, options(smoothing=0.2)
        yield "cross_entropy_backward", rows, options(smoothing=0.2, dloss=not rows)
