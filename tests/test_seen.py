"""What kernels see of the tensors that MAX fuses into them: of MAX's own structs, as `io/fusion.mojo` takes them."""

import numpy as np
import pytest
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.graph import ops as max_ops
from maxsoftmax._graph.extension import extension, run_mojo, source

PLACE = DeviceRef.CPU()


@pytest.fixture(scope="module")
def package(tmp_path_factory, root):
    """The op `seen`, compiled."""
    path = tmp_path_factory.mktemp("seen") / "seen.mojoc"
    folder = str(root / "tests" / "seen")
    run_mojo("precompile", "-I", str(source().parent), folder, "-o", str(path), temporary=path.parent)
    return path


def aligned(shape):
    """Returns an array that begins at a multiple of 128 bytes."""
    size = 4 * int(np.prod(shape))
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 128
    return memory[start : start + size].view(np.float32).reshape(shape)


def seen(package, columns, shapes):
    """Returns what is seen of each expression, for inputs of each shape."""
    types = [TensorType(DType.float32, shape, PLACE) for shape in (("rows", columns), (columns,), ("rows", 1))]
    with Graph("seen", input_types=types, custom_extensions=[extension(), package]) as graph:
        x, row, column = (value.tensor for value in graph.inputs)
        expressions = [x * 0.5, x * 0.5 + row, x * column, x[:, 1:] * 0.5]
        result = [TensorType(DType.int64, (3,), PLACE)]
        graph.output(*(max_ops.custom("seen", PLACE, [each], result)[0].tensor for each in expressions))
    model = InferenceSession(devices=[CPU()]).load(graph)
    found = []
    for rows, n in shapes:
        inputs = (aligned((rows, n)), aligned((n,)), aligned((rows, 1)))
        outputs = model.execute(*(Buffer.from_numpy(array) for array in inputs))
        found.append([tuple(y.to_numpy()) for y in outputs])
    return found


def test_how_many_neighbours_are_read_at_a_time(package):
    odd, even = seen(package, "columns", [(3, 67), (3, 68)])
    assert odd == [(16, 0, 1), (1, 0, 1), (16, 0, 1), (1, 0, 1)]
    # Four elements of a row of 68 begin alike in all rows; a slice begins at its parent's second element.
    assert even == [(16, 0, 1), (4, 0, 1), (16, 0, 1), (1, 0, 1)]


def test_lengths_that_the_graph_says(package):
    (found,) = seen(package, 67, [(3, 67)])
    assert [length for _, length, _ in found] == [67, 67, 67, 66]
