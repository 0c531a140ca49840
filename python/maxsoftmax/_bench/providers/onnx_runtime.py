"""ONNX Runtime, on a model of one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.driver import Device
from max.dtype import DType

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.providers.base import ArrayProvider, Unsupported


class OnnxRuntime(ArrayProvider):
    """`onnxruntime.InferenceSession` on the CPU."""

    name = "onnxruntime"
    ops = ("softmax", "log_softmax")

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        import onnx
        import onnxruntime

        self.onnx, self.runtime = onnx, onnxruntime

    def version(self) -> str:
        """Returns ONNX Runtime's version."""
        return str(self.runtime.__version__)

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns a session's run."""
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        if case.dtype == DType.bfloat16:
            raise Unsupported("takes no bfloat16")
        kind = {DType.float32: kinds.FLOAT, DType.float64: kinds.DOUBLE, DType.float16: kinds.FLOAT16}[case.dtype]
        dims = [f"d{i}" for i in range(len(case.shape))]
        x, y = (helper.make_tensor_value_info(name, kind, dims) for name in "xy")
        operator = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[case.op]
        node = helper.make_node(operator, ["x"], ["y"], axis=case.axis)
        graph = helper.make_graph([node], case.op, [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        session = self.runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        return lambda x: session.run(None, {"x": x})[0]
