"""What MAX can fuse into a softmax is computed as it reads its input or writes its output: one kernel, and nothing in
between in memory."""

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from emitted import emit, load
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType
from max.graph import ops as max_ops
from maxsoftmax._graph import runtime

TERMS = [
    "along the first axis, then a mask along the last",
    "by name, then others",
    "logarithms of scale and mask",
    "logarithms, where, along another axis",
    "logarithms by name, then others",
    "logarithms, then dropout and a cast",
]
"""Those in which terms nearly cancel out."""
# The last two are more than a CPU's caches hold.
SHAPES = [(2, 5, 64), (3, 4, 67), (1, 3, 40_000), (2, 300, 31), (8192, 16, 36), (2, 64, 40_001)]


def producers(x, mask, keep):
    """Softmaxes of what is computed elementwise, as one would write them without fusion in mind."""
    low = max_ops.constant(-np.inf, DType.float32, x.device)
    return {
        "scale and mask": max_ops.softmax(x * 0.125 + mask),
        "where": max_ops.softmax(max_ops.where(keep, x, low)),
        "cast": max_ops.softmax(max_ops.cast(x, DType.float64)),
        "temperature along another axis": max_ops.softmax(x / 0.7, axis=1),
        "along the first axis": max_ops.softmax(max_ops.abs(x), axis=0),
        "transposed": max_ops.softmax(max_ops.transpose(x, 1, 2)),
        "by name": maxsoftmax.ops.softmax(x * 2.0 + 1.0),
        "all forms": maxsoftmax.ops.softmax(x, scale=0.5, mask=keep, causal=True, temperature=2.0),
        "a slice": maxsoftmax.ops.softmax(x[:, :, 1:] * 0.5),
        "logarithms of scale and mask": max_ops.logsoftmax(x * 0.25 + mask),
        "logarithms, where, along another axis": maxsoftmax.ops.log_softmax(max_ops.where(keep, x * 0.75, low), axis=1),
    }


def consumers(x, mask, keep):
    """What is computed elementwise of softmaxes."""
    softmax = maxsoftmax.ops.softmax

    def dropout(y):
        return max_ops.where(keep, y * 1.25, max_ops.constant(0, DType.float32, x.device))

    return {
        "cast of probabilities": max_ops.cast(max_ops.softmax(x), DType.float64),
        "dropout": dropout(max_ops.softmax(x * 0.125)),
        "dropout along another axis": dropout(max_ops.softmax(x, axis=1)),
        "along the first axis, then a mask along the last": max_ops.softmax(max_ops.abs(x), axis=0) + mask,
        "by name, then others": softmax(x) * 3.0 - 1.0,
        "forms, then dropout and a cast": max_ops.cast(
            dropout(softmax(x, scale=0.5, mask=keep, causal=True)), DType.float16
        ),
        "logarithms by name, then others": maxsoftmax.ops.log_softmax(x) * 3.0 - 1.0,
        "logarithms, then dropout and a cast": max_ops.cast(dropout(max_ops.logsoftmax(x, axis=0)), DType.float16),
        "another axis and a sink": softmax(x, -2, sink=max_ops.constant(0.5, DType.float32, x.device)) * mask,
    }


def expected(x, mask, keep):
    wide = x.astype(np.float64)
    seen = np.arange(x.shape[2]) <= np.arange(x.shape[1])[:, None] + x.shape[2] - x.shape[1]
    softmax, log_softmax = scipy.special.softmax, scipy.special.log_softmax
    with np.errstate(invalid="ignore"):
        return {
            "scale and mask": softmax(wide * 0.125 + mask, axis=-1),
            "where": softmax(np.where(keep, wide, -np.inf), axis=-1),
            "cast": softmax(wide, axis=-1),
            "temperature along another axis": softmax(wide / 0.7, axis=1),
            "along the first axis": softmax(np.abs(wide), axis=0),
            "transposed": softmax(wide.transpose(0, 2, 1), axis=-1),
            "by name": softmax(wide * 2 + 1, axis=-1),
            "all forms": np.nan_to_num(softmax(np.where(keep & seen, wide / 4, -np.inf), axis=-1)),
            "a slice": softmax(wide[:, :, 1:] / 2, axis=-1),
            "logarithms of scale and mask": log_softmax(wide * 0.25 + mask, axis=-1),
            "logarithms, where, along another axis": log_softmax(np.where(keep, wide * 0.75, -np.inf), axis=1),
            "cast of probabilities": softmax(wide, axis=-1),
            "dropout": softmax(wide * 0.125, axis=-1) * keep * 1.25,
            "dropout along another axis": softmax(wide, axis=1) * keep * 1.25,
            "along the first axis, then a mask along the last": softmax(np.abs(wide), axis=0) + mask,
            "by name, then others": softmax(wide, axis=-1) * 3 - 1,
            "forms, then dropout and a cast": 1.25
            * np.nan_to_num(softmax(np.where(keep & seen, wide / 2, -np.inf), axis=-1) * keep),
            "logarithms by name, then others": log_softmax(wide, axis=-1) * 3 - 1,
            "logarithms, then dropout and a cast": np.where(keep, log_softmax(wide, axis=0) * 1.25, 0),
            "another axis and a sink": mask * np.exp(wide) / (np.exp(wide).sum(axis=1, keepdims=True) + np.exp(0.5)),
        }


FEW = [
    *("along the first axis", "where", "cast", "transposed", "all forms", "a slice", "logarithms of scale and mask"),
    *("along the first axis, then a mask along the last", "dropout along another axis", "by name, then others"),
    *("logarithms, then dropout and a cast", "another axis and a sink"),
]
"""Those that are compiled where all, which take minutes, are not."""


def graph_on(device, names):
    """Returns a graph of those that are named, of all if none is, and the names of its results."""
    place = DeviceRef.from_device(runtime.device(device))
    types = [
        TensorType(DType.float32, ("batch", "queries", "keys"), place),
        TensorType(DType.float32, ("keys",), place),
        TensorType(DType.bool, ("queries", "keys"), place),
    ]
    with Graph("fused", input_types=types, custom_extensions=[maxsoftmax.dropin(), maxsoftmax.extension()]) as graph:
        inputs = [value.tensor for value in graph.inputs]
        found = producers(*inputs) | consumers(*inputs)
        names = names or list(found)
        graph.output(*(found[name] for name in names))
    return graph, names


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def model(request, device):
    """The names of its results, a graph, its model and its Mojo, of one compilation."""
    graph, names = graph_on(device, FEW if request.param == "few" else None)
    return names, graph, *load(graph, device)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_fused_gives_what_numpy_does(model, device, shape):
    names, _, loaded, _ = model
    generator = np.random.default_rng(1)
    x = (generator.standard_normal(shape) * 2).astype(np.float32)
    mask = generator.standard_normal(shape[2:]).astype(np.float32)
    keep = generator.random(shape[1:]) < 0.7
    keep[0] = False
    results = loaded.execute(*(Buffer.from_numpy(a).to(runtime.device(device)) for a in (x, mask, keep)))
    references = expected(x, mask, keep)
    for result, name in zip(results, names, strict=True):
        y = result.to(runtime.device("cpu")).to_numpy()
        rtol, atol = (1e-3, 6e-8) if y.dtype == np.float16 else (5e-6, 1e-30)
        # What nearly cancels out is no more accurate than its terms.
        atol = 1e-6 if name in TERMS else atol
        np.testing.assert_allclose(y, references[name], rtol=rtol, atol=atol, err_msg=name)


# Each takes a minute and a half to compile.
DTYPES = [DType.float32, pytest.param(DType.bfloat16, marks=pytest.mark.slow)]
# NumPy has no bfloat16 that MAX knows.
KINDS = {DType.float32: (np.float32, DType.float32, 5e-6), DType.bfloat16: (ml_dtypes.bfloat16, DType.uint16, 8.1e-3)}
"""NumPy's dtype for each, as which of its own the two exchange it, and how near results are."""
COLUMN_EDGES = [16, 64, 128, 672, 960, 1024, 5376, 7680]
"""Lengths of columns at which one GPU kernel takes over from another, on a Hopper the last ones."""


def kept(x, keep):
    y = max_ops.softmax(x * 0.25, axis=1)
    return y, max_ops.where(keep, max_ops.softmax(x, axis=1) * 2.0, max_ops.constant(0, x.dtype, x.device))


ROW_EDGES = [31, 256, 1024, 1536, 2048, 4096, 8192, 12_288, 16_384, 65_536, 131_072, 163_840, 196_608, 262_144, 278_528]
ROW_EDGES += [344_064, 688_128]
"""Lengths of rows at which one GPU kernel takes over from another."""


def rows(x, keep):
    y = max_ops.where(keep, max_ops.softmax(x) * 2.0, max_ops.constant(0, x.dtype, x.device))
    return max_ops.softmax(x * 0.25), y, max_ops.logsoftmax(x * 0.5), maxsoftmax.ops.softmax(x * 0.5, causal=True)


def masked(x, keep):
    y = maxsoftmax.ops.softmax(x, scale=0.5, mask=keep) * 4.0
    return [max_ops.where(keep, y, max_ops.constant(0, x.dtype, x.device))]


def execute(model, device, x, keep, dtype, *, after=0):
    """Returns what a model of arrays and bools makes of them, the first `after` elements behind a new address."""
    where, (kind, bits, _) = runtime.device(device), KINDS[dtype]
    plain = np.concatenate([np.zeros(after, bits.to_numpy()), x.view(bits.to_numpy()).ravel()])
    given = Buffer.from_numpy(plain).to(where)[after:].view(dtype, x.shape)
    found = model.execute(given, Buffer.from_numpy(keep).to(where))
    return [y.to(runtime.device("cpu")).view(bits).to_numpy().view(kind) for y in found]


def chain(x):
    for step in range(4):
        x = maxsoftmax.ops.log_softmax(x, axis=step % 2)
        x = max_ops.softmax(x * 3.0, axis=(step + 1) % 2) * 10.0
    return [x]


@pytest.fixture(scope="module")
def models(request, device):
    """Columns and rows of a dtype, and of float32 the chain, in one module: MAX takes 20 seconds for every module."""
    module, where, dtype = Module(), runtime.device(device), request.param
    types = [(dtype, ("rows", "n")), (DType.bool, ("rows", "n"))]
    graphs = {
        "columns": (kept, [(dtype, ("batch", "n", "last")), (DType.bool, ("batch", "n", "last"))]),
        "rows": (rows, types),
        "masked": (masked, types),
    }
    if dtype == DType.float32:
        graphs["chain"] = (chain, types[:1])
    for name, (build, types) in graphs.items():
        given = [TensorType(kind, dims, DeviceRef.from_device(where)) for kind, dims in types]
        extensions = [maxsoftmax.dropin(), maxsoftmax.extension()]
        with Graph(name, input_types=given, custom_extensions=extensions, module=module) as graph:
            graph.output(*build(*(value.tensor for value in graph.inputs)))
    # It compiles the whole module of a graph, with the extensions of that one.
    return dtype, InferenceSession(devices=[where]).load_all(graph)


@pytest.mark.parametrize("models", DTYPES, indirect=True, ids=str)
def test_columns_around_every_edge(models, device):
    dtype, loaded = models
    kind, _, rtol = KINDS[dtype]
    generator = np.random.default_rng(2)
    for n in [1, *(edge + beyond for edge in COLUMN_EDGES for beyond in (0, 1))]:
        # The last block of columns is not full, of vectors and of elements.
        for last in (72, 9):
            x = (generator.standard_normal((3, n, last)) * 2).astype(kind)
            x[1, :, 1], x[2, -1, 2] = -np.inf, 90
            keep = generator.random(x.shape) < 0.7
            found = execute(loaded["columns"], device, x, keep, dtype)
            wide = x.astype(np.float64)
            with np.errstate(invalid="ignore"):
                expected = (
                    scipy.special.softmax(wide / 4, axis=1),
                    np.where(keep, scipy.special.softmax(wide, 1) * 2, 0),
                )
            for y, reference in zip(found, expected, strict=True):
                np.testing.assert_allclose(y.astype(np.float64), reference, rtol, 1e-30, err_msg=f"{n}×{last}")


@pytest.mark.parametrize("models", DTYPES, indirect=True, ids=str)
def test_rows_around_every_edge(models, device):
    dtype, loaded = models
    model, of_memory, (kind, _, rtol) = loaded["rows"], loaded["masked"], KINDS[dtype]
    generator = np.random.default_rng(5)
    for n in [1, 7, *(edge + beyond for edge in ROW_EDGES for beyond in (-1, 0, 1, 3))]:
        x = (generator.standard_normal((3, n)) * 2).astype(kind)
        x[1, n // 2], x[2, -1] = -np.inf, 90
        keep = generator.random(x.shape) < 0.7
        found = execute(model, device, x, keep, dtype) + execute(of_memory, device, x, keep, dtype)
        wide = x.astype(np.float64)
        seen = np.arange(n) <= np.arange(3)[:, None] + n - 3
        with np.errstate(invalid="ignore"):
            expected = (
                scipy.special.softmax(wide / 4, axis=1),
                np.where(keep, scipy.special.softmax(wide, 1) * 2, 0),
                scipy.special.log_softmax(wide / 2, axis=1),
                np.nan_to_num(scipy.special.softmax(np.where(seen, wide / 2, -np.inf), axis=1)),
                np.nan_to_num(scipy.special.softmax(np.where(keep, wide / 2, -np.inf), axis=1)) * 4 * keep,
            )
        for i, (y, reference) in enumerate(zip(found, expected, strict=True)):
            atol = 1e-5 if i == 2 else 1e-30
            np.testing.assert_allclose(y.astype(np.float64), reference, rtol, atol, err_msg=f"{n}, result {i}")
        # In a batch of odd rows each begins elsewhere between two multiples of 16 bytes.
        for row in range(3):
            one = x[row : row + 1].copy(), keep[row : row + 1].copy(), dtype
            alone = execute(model, device, *one)[:3] + execute(of_memory, device, *one, after=row)
            for y, whole in zip(alone, [*found[:3], found[4]], strict=True):
                np.testing.assert_array_equal(y[0].view(np.uint8), whole[row].view(np.uint8), err_msg=f"{n}, row {row}")


@pytest.mark.parametrize("models", DTYPES[:1], indirect=True, ids=str)
def test_kernels_that_overlap_wait_for_each_other(models, device):
    # On a GPU each is launched while the one before still writes what it reads, or reads what it writes.
    where, (_, loaded) = runtime.device(device), models
    for shape in [(1, 40_000), (40_000, 3), (700, 900), (64, 20_001)]:
        x = (np.random.default_rng(4).standard_normal(shape) * 3).astype(np.float32)
        given = Buffer.from_numpy(x).to(where)
        results = [loaded["chain"].execute(given)[0] for _ in range(30)]
        results = [y.to(runtime.device("cpu")).to_numpy() for y in results]
        wide = x.astype(np.float64)
        for step in range(4):
            wide = scipy.special.log_softmax(wide, axis=step % 2)
            wide = scipy.special.softmax(wide * 3, axis=(step + 1) % 2) * 10
        np.testing.assert_allclose(results[0], wide, rtol=1e-3, atol=1e-30, err_msg=str(shape))
        for y in results[1:]:
            np.testing.assert_array_equal(y, results[0])


def test_each_is_one_launch(model):
    names, graph, _, emitted = model
    launches = emitted.launches()
    # Softmax along the first axis is asked for alone and with a mask added to it: one kernel writes both.
    assert len(launches) == len(graph.output_types) - 1, launches
    # What is scaled and masked by what lies in memory, as the logits do, needs nothing fused into it.
    plain = [launch for launch in launches if not launch.startswith(("Prologue(", "Epilogue("))]
    assert plain == ["custom__softmax_formed"], launches
    assert all("softmax" in launch for launch in launches), launches
    assert sum("Epilogue(" in launch for launch in launches) == (5 if names == FEW else 9), launches


def test_what_is_not_fused_is_read_and_written_as_it_lies_in_memory(device):
    kind = TensorType(DType.float32, ("rows", "n"), DeviceRef.from_device(runtime.device(device)))
    extensions = [maxsoftmax.dropin(), maxsoftmax.extension()]
    with Graph("plain", input_types=[kind], custom_extensions=extensions) as graph:
        x = graph.inputs[0].tensor
        graph.output(max_ops.softmax(x), maxsoftmax.ops.softmax(x, axis=0))
    code = emit(graph)
    assert code.launches() == ["custom__softmax_fused", "reduce.softmax"]
    assert code.count("has_prologue_fusion = False, has_epilogue_fusion = False") == 2
