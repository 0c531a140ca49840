"""Graphs that know nothing of this package, with its kernels under the names of MAX's own ops."""

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from contract import check, logits
from emitted import emit
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.graph import ops as max_ops
from maxsoftmax import _cache as cache
from maxsoftmax._graph import runtime
from maxsoftmax._graph.extension import DROPIN, source

OURS = "maxsoftmax_dropin.registry.Softmax"
DTYPES = [DType.float32, DType.bfloat16, DType.float16, DType.float64]
SHAPE = ("a", "b", "c")


def graph_of(build, *types, extensions=(), device="cpu"):
    place = DeviceRef.from_device(runtime.device(device))
    given = [TensorType(dtype, shape, place) for dtype, shape in types]
    with Graph("given", input_types=given, custom_extensions=extensions) as graph:
        graph.output(*build(*(value.tensor for value in graph.inputs)))
    return graph


def run(model, device, *arrays):
    place = runtime.device(device)
    inputs = []
    for x in arrays:
        bits = np.ascontiguousarray(x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x)
        dtype = DType.bfloat16 if x.dtype == ml_dtypes.bfloat16 else DType.from_numpy(x.dtype)
        inputs.append(Buffer.from_numpy(bits).view(dtype, x.shape).to(place))
    results = [result.to(runtime.device("cpu")) for result in model.execute(*inputs)]
    return [
        result.view(DType.uint16).to_numpy().view(ml_dtypes.bfloat16)
        if result.dtype == DType.bfloat16
        else result.to_numpy()
        for result in results
    ]


def plain(*values):
    """MAX's softmax of every dtype along every axis, between other ops, and of a static shape."""
    *dynamic, static = values
    return [
        *(max_ops.softmax(x, axis=axis) for x in dynamic for axis in (0, 1, -1)),
        max_ops.softmax(dynamic[0], axis=-2),
        max_ops.softmax(static),
        max_ops.transpose(max_ops.softmax(max_ops.transpose(static, 0, 1), axis=0), 0, 1),
        max_ops.logsoftmax(static),
        max_ops.logsoftmax(dynamic[0], axis=1),
    ]


def test_what_is_no_graph_is_refused():
    with pytest.raises(TypeError, match=r"graph must be a max\.graph\.Graph, not 3"):
        maxsoftmax.drop_into(3)


@pytest.fixture(scope="session")
def model(device):
    types = [(dtype, SHAPE) for dtype in DTYPES] + [(DType.float32, (7, 1000))]
    graph = graph_of(plain, *types, device=device)
    maxsoftmax.drop_into(graph)
    return InferenceSession(devices=[runtime.device(device)]).load(graph)


@pytest.mark.parametrize("shape", [(3, 5, 129), (2, 300, 64), (1, 1, 1), (0, 3, 4), (2, 0, 3), (5, 2, 20_000)])
def test_softmax_of_every_dtype_and_axis(model, device, shape):
    kinds = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)
    arrays = [logits(shape, dtype, seed=seed) for seed, dtype in enumerate(kinds)]
    static = logits((7, 1000))
    results = run(model, device, *arrays, static)
    for i, x in enumerate(arrays):
        for axis in range(3):
            check(results[3 * i + axis], x, axis=axis)
    check(results[12], arrays[0], axis=1)
    check(results[13], static)
    check(results[14], static)
    np.testing.assert_allclose(results[15], scipy.special.log_softmax(static, axis=-1), rtol=1e-5, atol=1e-6)
    expected = scipy.special.log_softmax(arrays[0], axis=1) if arrays[0].size else arrays[0]
    np.testing.assert_allclose(results[16], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_it_has_the_bits_of_our_kernels(model, device):
    x = logits((6, 50, 777))
    results = run(
        model,
        device,
        *(x.astype(d) for d in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)),
        x[0, :7, :1].repeat(1000, 1),
    )
    for axis in range(3):
        np.testing.assert_array_equal(results[axis], maxsoftmax.softmax(x, axis=axis, device=device))


def test_every_softmax_of_the_graph_is_ours():
    def build(x, y):
        return max_ops.softmax(x), max_ops.softmax(x, axis=0), max_ops.softmax(y, axis=1), max_ops.logsoftmax(y)

    types = (DType.float32, SHAPE), (DType.bfloat16, SHAPE)
    emitted = emit(graph_of(build, *types, extensions=[maxsoftmax.dropin()]))
    assert sorted(emitted.calls()) == ["maxsoftmax_dropin.registry.LogSoftmax", *[OURS] * 3]
    assert sorted(emitted.launches()) == ["reduce.logsoftmax", *["reduce.softmax"] * 3]


def test_both_extensions_and_each_twice():
    def build(x):
        return maxsoftmax.ops.softmax(x), max_ops.softmax(x, axis=0)

    extensions = [maxsoftmax.dropin(), maxsoftmax.extension()] * 2
    emitted = emit(graph_of(build, (DType.float32, SHAPE), extensions=extensions))
    assert sorted(emitted.calls()) == ["maxsoftmax.registry.FusedSoftmax", OURS]


def test_a_graph_without_softmax_is_as_it_was():
    def build(x):
        return (max_ops.exp(x) + max_ops.sum(x, axis=-1),)

    emitted = emit(graph_of(build, (DType.float32, ("rows", "n")), extensions=[maxsoftmax.dropin()]))
    assert emitted.launches()
    assert all(call.startswith("builtin_") for call in emitted.calls())


def test_it_is_kept_with_the_kernels_that_it_needs():
    path = maxsoftmax.dropin()
    assert path == maxsoftmax.dropin()
    assert path.name == f"{DROPIN}.mojoc"
    assert sorted(file.name for file in path.parent.iterdir()) == ["maxsoftmax.mojoc", path.name, "sha256"]
    assert (path.parent / "maxsoftmax.mojoc").read_bytes() == maxsoftmax.extension().read_bytes()


def test_it_registers_and_computes_nothing_itself():
    assert {path.name for path in source(DROPIN).rglob("*.mojo")} == {"__init__.mojo", "registry.mojo"}


def test_an_entry_of_two_files_is_sound_only_with_both(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))

    def build(path):
        path.write_bytes(b"one")
        path.with_name("other").write_bytes(b"two")

    path = cache.entry("mojo-two", "file", build, "other")
    assert cache.entry("mojo-two", "file", None, "other") == path
    for damage in (
        lambda other: other.write_bytes(b"six"),
        lambda other: other.chmod(0o666),
        lambda other: other.unlink(),
    ):
        damage(path.with_name("other"))
        with pytest.warns(RuntimeWarning, match="damaged or is not private"):
            assert cache.entry("mojo-two", "file", build, "other") == path
        assert path.with_name("other").read_bytes() == b"two"
