"""Losses without the logits of all rows, for arrays and in graphs, against float64."""

import doctest

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax._graph import runtime

LIMIT = {"float32": 4e-6, "bfloat16": 1.6e-2, "float16": 2e-3, "float64": 1e-14}
"""By how much results may be wrong, in norms."""

TENSOR_FLOAT = 1e-3
"""The same of float32 in a graph on a GPU: MAX multiplies 10 bits there (TF32)."""

CHOICES = [
    {},
    {"reduction": "sum", "ignore_index": 3},
    {"reduction": "none", "z_loss": 0.02},
    {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.01},
]


def sampled(dtype=np.float32, rows=(5, 8), n=130, features=24, ignored=(0, 5, 6, 39)):
    random = np.random.default_rng(0)
    hidden, weight, bias = (random.standard_normal(s) for s in ((*rows, features), (n, features), (n,)))
    target = random.integers(0, n, rows)
    target.reshape(-1)[list(ignored)] = -100
    return hidden.astype(dtype), (weight / 2).astype(dtype), bias.astype(dtype), target


def reference(hidden, weight, target, bias, dloss=1.0, **options):
    """Returns the loss and the gradients of hidden, weight and bias in float64, with all logits."""
    wide = [np.asarray(a, np.float64) for a in (hidden, weight, bias)]
    rows, classes, cap = wide[0].reshape(-1, wide[0].shape[-1]), target.reshape(-1), options.get("softcap")
    z = rows @ wide[1].T + wide[2]
    slope = 1.0
    if cap:
        slope = 1 - np.tanh(z / cap) ** 2
        z = cap * np.tanh(z / cap)
    n, share, factor = z.shape[1], options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    counts = classes != options.get("ignore_index", -100)
    wanted = np.eye(n)[np.where(counts, classes, 0)] * (1 - share) + share / n
    logsumexp = scipy.special.logsumexp(z, axis=1)
    losses = ((logsumexp[:, None] - z) * wanted).sum(1) + factor * logsumexp**2
    losses *= counts
    how = options.get("reduction", "mean")
    scale = counts * (np.reshape(dloss, -1) if how == "none" else dloss)
    scale = scale / counts.sum() if how == "mean" else scale
    dz = scipy.special.softmax(z, axis=1) * (1 + 2 * factor * logsumexp[:, None]) - wanted
    dz = dz * scale[:, None] * slope
    loss = losses.reshape(target.shape) if how == "none" else losses.sum() / (counts.sum() if how == "mean" else 1)
    return loss, (dz @ wide[1]).reshape(hidden.shape), dz.T @ rows, dz.sum(0)


def error(found, expected):
    found = np.asarray(found).astype(np.float64)
    assert found.shape == np.shape(expected)
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize("chunk", [None, 7])
def test_arrays(dtype, options, chunk):
    hidden, weight, bias, target = sampled(dtype)
    target = np.where(target == -100, options.get("ignore_index", -100), target)
    dloss = np.asarray(np.linspace(1, 2, target.size).reshape(target.shape), dtype)
    if options.get("reduction") != "none":
        dloss = dloss.reshape(-1)[7]
    loss = maxsoftmax.linear_cross_entropy(hidden, weight, target, bias, chunk=chunk, **options)
    found = maxsoftmax.linear_cross_entropy_backward(hidden, weight, target, bias, dloss, chunk=chunk, **options)
    np.testing.assert_array_equal(loss, found[0])
    expected = reference(hidden, weight, target, bias, np.asarray(dloss, np.float64), **options)
    for mine, theirs in zip(found, expected, strict=True):
        assert np.asarray(mine).dtype == dtype
        assert error(mine, theirs) <= LIMIT[np.dtype(dtype).name]


def test_arrays_of_others():
    torch = pytest.importorskip("torch")
    hidden, weight, _, target = sampled()
    plain = maxsoftmax.linear_cross_entropy_backward(hidden, weight, target)
    assert plain[3] is None
    found = maxsoftmax.linear_cross_entropy_backward(*(torch.from_numpy(a) for a in (hidden, weight, target)))
    for mine, theirs in zip(found[:3], plain, strict=False):
        assert isinstance(mine, torch.Tensor)
        np.testing.assert_array_equal(mine.numpy(), theirs)
    low = [torch.from_numpy(a).bfloat16() for a in (hidden, weight)]
    loss, _, dweight, _ = maxsoftmax.linear_cross_entropy_backward(*low, torch.from_numpy(target))
    expected = reference(*(a.double().numpy() for a in low), target, np.zeros(130))
    assert loss.dtype == dweight.dtype == torch.bfloat16
    assert error(dweight.float().numpy(), expected[2]) <= LIMIT["bfloat16"]


@pytest.mark.parametrize("chunk", [None, 7])
def test_tokens_of_arrays(chunk):
    hidden, weight, bias, _ = sampled()
    tokens = np.random.default_rng(1).integers(0, 130, (5, 8, 3))
    options = {"temperature": 0.7, "softcap": 5.0, "chunk": chunk}
    found, entropy = maxsoftmax.linear_token_log_probs(hidden, weight, tokens, bias, entropy=True, **options)
    of_all, entropies = expected_tokens(hidden, weight, bias, tokens)
    assert error(found, of_all) <= 4e-6
    assert error(entropy, entropies) <= 4e-6
    one = maxsoftmax.linear_token_log_probs(hidden, weight, tokens[..., 0], bias, **options)
    np.testing.assert_array_equal(one, found[..., 0])


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_gradients_of_tokens_of_arrays(chunk, dtype):
    hidden, weight, bias, _ = sampled(dtype)
    tokens, upstream, of_entropies = of_tokens(np.float64 if dtype is np.float64 else np.float32)
    options = {"dentropy": of_entropies, "temperature": 0.7, "softcap": 5.0, "chunk": chunk}
    found = maxsoftmax.linear_token_log_probs_backward(hidden, weight, tokens, bias, upstream, **options)
    expected = expected_gradients((hidden, weight, bias), tokens, upstream, of_entropies)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert error(mine, theirs) <= LIMIT[np.dtype(dtype).name]
    one = maxsoftmax.linear_token_log_probs_backward(hidden, weight, tokens[..., 0])
    ones = maxsoftmax.linear_token_log_probs_backward(
        hidden, weight, tokens[..., :1], dlog_probs=upstream[..., :1] * 0 + 1
    )
    assert one[2] is None
    for mine, theirs in zip(one[:2], ones[:2], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def of_tokens(dtype):
    """Returns tokens, and the gradients of their logarithms and of the entropies."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, 130, (5, 8, 3))
    return tokens, random.standard_normal(tokens.shape).astype(dtype), random.standard_normal((5, 8)).astype(dtype)


def expected_gradients(made_of, tokens, upstream, of_entropies):
    """Returns those of hidden, weight and bias."""
    x, w, b = (np.asarray(a, np.float64) for a in made_of)
    cap = np.tanh((x @ w.T + b) / 5)
    z = scipy.special.log_softmax(5 * cap / 0.7, axis=-1)
    hits = np.zeros(z.shape)
    for place in np.ndindex(tokens.shape):
        hits[*place[:2], tokens[place]] += upstream[place]
    entropies = -(np.exp(z) * z).sum(-1, keepdims=True)
    dz = hits - np.exp(z) * (upstream.sum(-1, keepdims=True) + (z + entropies) * of_entropies[..., None])
    dz *= (1 - np.square(cap)) / 0.7
    return dz @ w, np.einsum("abn,abf->nf", dz, x), dz.sum((0, 1))


def expected_tokens(hidden, weight, bias, tokens):
    wide = [np.asarray(a, np.float64) for a in (hidden, weight, bias)]
    every = scipy.special.log_softmax(5 * np.tanh((wide[0] @ wide[1].T + wide[2]) / 5) / 0.7, axis=-1)
    return np.take_along_axis(every, tokens, -1), -(np.exp(every) * every).sum(-1)


@pytest.mark.parametrize(("reduction", "value"), [("mean", np.nan), ("sum", 0.0)])
def test_without_a_row_that_counts(reduction, value):
    hidden, weight, bias, target = sampled()
    for rows in (0, 5):
        given = hidden[:rows], weight, np.full_like(target[:rows], -100), bias
        loss, *gradients = maxsoftmax.linear_cross_entropy_backward(*given, reduction=reduction)
        np.testing.assert_array_equal(loss, value)
        assert not any(gradient.any() for gradient in gradients)


H, W, T = np.zeros((3, 4), np.float32), np.zeros((5, 4), np.float32), np.zeros(3, np.int64)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"weight": W.astype(float)}, TypeError, "weight has dtype float64, but hidden has float32"),
        ({"weight": W.T}, ValueError, r"weight has shape \(4, 5\), but hidden of \(3, 4\) needs \(n, 4\)"),
        ({"bias": H[0]}, ValueError, r"bias has shape \(4,\), but weight of \(5, 4\) needs one a row"),
        ({"target": T[:2]}, ValueError, r"target has shape \(2,\), but hidden of \(3, 4\) needs \(3,\)"),
        ({"target": T + 5}, ValueError, r"target\[0\] is 5, which is neither a class from 0 to 4"),
        ({"dloss": H}, ValueError, r"dloss has shape \(3, 4\), but that of the loss is \(\)"),
        ({"chunk": 0}, ValueError, "chunk must be a positive number of rows, not 0"),
        ({"z_loss": -1.0}, ValueError, "z_loss must be 0 or a positive, finite number, not -1.0"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(wrong, error, words):
    with pytest.raises(error, match=words):
        maxsoftmax.linear_cross_entropy_backward(**{"hidden": H, "weight": W, "target": T, **wrong})


@pytest.mark.parametrize(
    "function",
    [maxsoftmax.linear_cross_entropy, maxsoftmax.linear_cross_entropy_backward, maxsoftmax.linear_token_log_probs],
)
def test_the_examples_run(function):
    names = {"maxsoftmax": maxsoftmax, "numpy": np}
    (example,) = doctest.DocTestFinder(recurse=False).find(function, globs=names)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


# Graphs

LOSSES = {
    "loop": (np.float32, ("a", "b"), {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.01, "chunk": 7}),
    "once": (np.float32, (5, 8), {"reduction": "none", "ignore_index": 3}),
    "once in bfloat16": (ml_dtypes.bfloat16, (5, 8), {}),
    "bfloat16": (ml_dtypes.bfloat16, ("a", "b"), {"reduction": "sum", "chunk": 16}),
}


# Each compiles products of MAX: minutes.
@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_graphs(device, name):
    dtype, dims, options = LOSSES[name]
    hidden, weight, bias, target = sampled(dtype)
    target = np.where(target == -100, options.get("ignore_index", -100), target)
    dloss = np.linspace(1, 2, 40, dtype=np.float32).reshape(5, 8)
    if options.get("reduction") != "none":
        dloss = dloss[3, 3]
    # What is in rows that do not count does not matter.
    spoiled = hidden.copy()
    spoiled[0, 0] = np.nan
    arrays = spoiled, weight, bias, target, np.asarray(dloss)

    def build(hidden, weight, bias, target, dloss):
        given = hidden, weight, target, bias
        loss = maxsoftmax.ops.linear_cross_entropy(*given, **options)
        return loss, *maxsoftmax.ops.linear_cross_entropy_backward(*given, dloss, **options)

    loss, *found = executed(build, arrays, [(*dims, 24), (130, 24), (130,), dims, dloss.shape and dims], device)
    np.testing.assert_array_equal(loss, found[0])
    chosen = {key: value for key, value in options.items() if key != "chunk"}
    for mine, theirs in zip(found, reference(hidden, weight, target, bias, dloss, **chosen), strict=True):
        assert np.asarray(mine).dtype == dtype
        assert error(mine, theirs) <= limit(dtype, device)


@pytest.mark.slow
def test_tokens_in_graphs(device):
    hidden, weight, bias, _ = sampled()
    tokens, *upstream = of_tokens(np.float32)
    options = {"temperature": 0.7, "softcap": 5.0, "chunk": 7}

    def build(hidden, weight, bias, tokens, *upstream):
        given = hidden, weight, tokens, bias
        found = maxsoftmax.ops.linear_token_log_probs(*given, entropy=True, **options)
        more = {"dentropy": upstream[1], **options}
        return *found, *maxsoftmax.ops.linear_token_log_probs_backward(*given, upstream[0], **more)

    shapes = [("a", "b", 24), (130, 24), (130,), ("a", "b", 3), ("a", "b", 3), ("a", "b")]
    found = executed(build, (hidden, weight, bias, tokens, *upstream), shapes, device)
    expected = (
        *expected_tokens(hidden, weight, bias, tokens),
        *expected_gradients((hidden, weight, bias), tokens, *upstream),
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert error(mine, theirs) <= limit(np.float32, device)


def limit(dtype, device):
    """Returns by how much results of a graph may be wrong."""
    return TENSOR_FLOAT if dtype is np.float32 and device == "gpu" else LIMIT[np.dtype(dtype).name]


def executed(build, arrays, shapes, device):
    """Returns the results of a graph as arrays."""
    where = runtime.device(device)
    buffers = [_buffer(a) for a in arrays]
    place = DeviceRef.from_device(where)
    types = [TensorType(b.dtype, shape, place) for b, shape in zip(buffers, shapes, strict=True)]
    with Graph("linear", input_types=types) as graph:
        graph.output(*build(*(value.tensor for value in graph.inputs)))
    model = InferenceSession(devices=[where]).load(graph)
    return [_array(each.to(CPU())) for each in model.execute(*(b.to(where) for b in buffers))]


def _buffer(array):
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if array.dtype == ml_dtypes.bfloat16:
        return Buffer.from_numpy(array.view(np.uint16)).view(DType.bfloat16)
    return Buffer.from_numpy(array)


def _array(buffer):
    if buffer.dtype == DType.bfloat16:
        return buffer.view(DType.uint16, buffer.shape).to_numpy().view(ml_dtypes.bfloat16)
    return buffer.to_numpy()


def test_a_graph_refuses_what_does_not_fit():
    types = [TensorType(DType.float32, shape, DeviceRef.CPU()) for shape in (("a", 4), (5, 4))]
    with Graph("bad", input_types=[*types, TensorType(DType.int64, ("a",), DeviceRef.CPU())]):
        hidden, weight, target = (value.tensor for value in Graph.current.inputs)
        with pytest.raises(ValueError, match=r"weight has shape \(a, 4\), but here it needs|needs \(n, 4\)"):
            maxsoftmax.ops.linear_cross_entropy(hidden, weight.reshape((4, 5)), target)
        with pytest.raises(ValueError, match=r"target has shape \(5, 4\), but hidden of \(a, 4\) needs \(a,\)|dtype"):
            maxsoftmax.ops.linear_cross_entropy(hidden, weight, max_cast(weight))
        with pytest.raises(TypeError, match="target has dtype float32, but classes are"):
            maxsoftmax.ops.linear_cross_entropy(hidden, weight, hidden)
        with pytest.raises(ValueError, match="chunk must be a positive number of rows, not 0"):
            maxsoftmax.ops.linear_cross_entropy(hidden, weight, target, chunk=0)


def max_cast(value):
    return value.cast(DType.int64)
