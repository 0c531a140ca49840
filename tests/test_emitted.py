"""Which kernels compute the softmaxes of a graph."""

import maxsoftmax
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from maxsoftmax._graph.emitted import SoftmaxKernel, kernels

MOJO = """
    with max.runtime.tracing.Trace[max.runtime.tracing.TraceLevel.OP, target = StaticString("gpu")]("matmul", task_id = 3):
        builtin_kernels.linalg.BatchMatmulGPU.execute[target = "gpu"](x)
    with max.runtime.tracing.Trace[max.runtime.tracing.TraceLevel.OP, target = StaticString("cpu")]("transpose", task_id = 3):
        @parameter
    with max.runtime.tracing.Trace[max.runtime.tracing.TraceLevel.OP, target = StaticString("cpu")]("Prologue(mul, reduce.softmax)"):
            maxsoftmax_dropin.registry.Softmax.execute[target = "cpu", axis = 1](y, x, ctx)
"""  # noqa: E501


def test_kernels_are_found_in_emitted_mojo():
    assert kernels(MOJO) == [
        SoftmaxKernel("builtin_kernels.linalg.BatchMatmulGPU", "gpu", "matmul"),
        SoftmaxKernel("maxsoftmax_dropin.registry.Softmax", "cpu", "Prologue(mul, reduce.softmax)"),
    ]
    assert [kernel.ours for kernel in kernels(MOJO)] == [False, True]


def test_what_is_no_graph_is_refused():
    with pytest.raises(TypeError, match=r"graph must be a max\.graph\.Graph, not 3"):
        maxsoftmax.softmax_kernels(3)


def test_kernels_of_this_package_and_of_max_are_told_apart(capfd):
    cpu = DeviceRef.CPU()
    heads, rows = (TensorType(DType.float32, shape, cpu) for shape in (("b", 4, "s", 64), ("rows", 100)))
    with Graph("three", input_types=[heads, heads, heads, rows]) as graph:
        q, k, v, x = (value.tensor for value in graph.inputs)
        attention = ops.softmax(q @ ops.transpose(k, 2, 3) * 0.125) @ v
        graph.output(attention, ops.logsoftmax(x), maxsoftmax.ops.softmax(x, scale=2.0))
    found = maxsoftmax.softmax_kernels(graph)
    assert sorted((kernel.ours, kernel.name) for kernel in found) == [
        (False, "builtin_kernels.attention.NoMaskFlashAttentionCPU"),
        (False, "builtin_kernels.reductions.LogSoftmax"),
        (True, "maxsoftmax.registry.FormedSoftmax"),
    ]
    assert {kernel.device for kernel in found} == {"cpu"}
    # The compiler names the files that it writes, in its own process.
    assert capfd.readouterr() == ("", "")


def test_a_graph_that_max_refuses_is_refused():
    # It has no output.
    graph = Graph("nothing", input_types=[])
    with pytest.raises(RuntimeError, match="MAX does not compile the graph"):
        maxsoftmax.softmax_kernels(graph)
