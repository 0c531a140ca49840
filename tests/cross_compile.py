"""Compiles the op for a GPU that need not be there: python cross_compile.py ARCHITECTURE."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from max import driver

architecture = sys.argv[1]
driver.set_virtual_device_api("hip" if architecture.startswith("gfx") else "cuda")
driver.set_virtual_device_count(1)
driver.set_virtual_device_target_arch(architecture)

import maxsoftmax  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.graph import DeviceRef, Graph, TensorType  # noqa: E402
from maxsoftmax.arguments import ALGORITHMS, DTYPES  # noqa: E402

types = [TensorType(dtype, ("a", "b", "c"), DeviceRef.GPU()) for dtype in DTYPES]
types.append(TensorType(DType.float32, (64, 50257), DeviceRef.GPU()))
with Graph("cross", input_types=types, custom_extensions=[maxsoftmax.extension()]) as graph:
    values = [value.tensor for value in graph.inputs]
    graph.output(
        *[maxsoftmax.ops.softmax(x, axis=axis) for x in values[:-1] for axis in (1, 2)],
        maxsoftmax.ops.softmax(values[-1]),
        *[maxsoftmax.ops.softmax(values[-1], algorithm=algorithm) for algorithm in ALGORITHMS["gpu"]],
        maxsoftmax.ops.softmax(values[-1], algorithm="tree", block_size=1024),
    )
with TemporaryDirectory() as folder:
    path = Path(folder) / "model.mef"
    InferenceSession(devices=[driver.Accelerator()]).compile(graph).export_mef(path)
    print(architecture, path.stat().st_size)
