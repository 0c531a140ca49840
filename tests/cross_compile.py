"""Compiles ops for a GPU that need not be there: python cross_compile.py ARCHITECTURE known|few|softmax|relatives."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from max import driver

architecture, what = sys.argv[1:]
driver.set_virtual_device_api("hip" if architecture.startswith("gfx") else "cuda")
driver.set_virtual_device_count(1)
driver.set_virtual_device_target_arch(architecture)

import maxsoftmax  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.graph import DeviceRef, Graph, TensorType, TensorValue  # noqa: E402
from maxsoftmax import ops  # noqa: E402
from maxsoftmax._arguments import ALGORITHMS, DTYPES  # noqa: E402

GPU = DeviceRef.GPU()


def known(x: TensorValue) -> list[TensorValue]:
    """Returns softmax of rows whose length the graph says."""
    return [ops.softmax(x), ops.softmax(x * 0.5)]


def few(x: TensorValue) -> list[TensorValue]:
    """Returns softmax of columns, and by a kernel of the ladder: `test_launches` has rows of any length."""
    return [ops.softmax(x, axis=1), ops.softmax(x, algorithm="tree")]


def softmaxes(*values: TensorValue) -> list[TensorValue]:
    """Returns softmax of every dtype along every kind of axis, and by every algorithm."""
    *values, fixed = values
    return [
        *[ops.softmax(x, axis=axis) for x in values for axis in (1, 2)],
        ops.softmax(fixed),
        *[ops.softmax(fixed, algorithm=algorithm) for algorithm in ALGORITHMS["gpu"]],
        ops.softmax(fixed, algorithm="tree", block_size=1024),
    ]


def relatives(*values: TensorValue) -> list[TensorValue]:
    """Returns everything else, of every dtype."""
    *values, target, mask, tokens = values
    results = []
    for x in values:
        for axis in (0, 1):
            results += [
                ops.log_softmax(x, axis),
                ops.softmax_backward(x, x, axis),
                ops.log_softmax_backward(x, x, axis),
                ops.logsumexp(x, axis),
                ops.sparsemax(x, axis),
                ops.sparsemax_backward(x, x, axis),
                *ops.token_log_probs(x, tokens, axis, temperature=0.7, entropy=True),
            ]
        for axis in (-1, -2):
            results.append(ops.softmax(x, axis, scale=0.5, mask=mask, temperature=2.0))
        results.append(ops.softmax(x, causal=True, sink=ops.max_sum(x)[0].reshape((x.shape[0], 1))))
        loss, pairs = ops.cross_entropy_forward(x, target, label_smoothing=0.1)
        results += [loss, ops.cross_entropy_backward(x, target, pairs, label_smoothing=0.1)]
    for axis in (0, 1):
        results += ops.kl_divergence_backward(values[0], values[0], axis=axis)
    results.append(ops.softmax(values[0], out_dtype="float8_e4m3fn", out_scale=256))
    results.append(ops.log_softmax(values[1], 0, out_dtype="float8_e5m2"))
    return results


TYPES = {
    known: [TensorType(DType.float32, ("a", 50257), GPU)],
    few: [TensorType(DType.float32, ("a", "b", "c"), GPU)],
    softmaxes: [
        *[TensorType(dtype, ("a", "b", "c"), GPU) for dtype in DTYPES],
        TensorType(DType.float32, (64, 50257), GPU),
    ],
    relatives: [
        *[TensorType(dtype, ("a", "b"), GPU) for dtype in DTYPES],
        TensorType(DType.int64, ("a",), GPU),
        TensorType(DType.bool, ("a", "b"), GPU),
        TensorType(DType.int32, ("a", "b"), GPU),
    ],
}

build = {"known": known, "few": few, "softmax": softmaxes, "relatives": relatives}[what]
with Graph("cross", input_types=TYPES[build], custom_extensions=[maxsoftmax.extension()]) as graph:
    graph.output(*build(*(value.tensor for value in graph.inputs)))
with TemporaryDirectory() as folder:
    path = Path(folder) / "model.mef"
    InferenceSession(devices=[driver.Accelerator()]).compile(graph).export_mef(path)
    print(architecture, path.stat().st_size, flush=True)
# A thread of MAX's that is still there when Python ends aborts the process, once in some twenty times.
os._exit(0)
