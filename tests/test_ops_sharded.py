"""Rows that are split over devices of a graph, a CPU or two GPUs, against one device and float64."""

import doctest

import contract
import maxsoftmax.ops.sharded
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from buffers import array_of, buffer_of, known
from max.driver import accelerator_count
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.graph import ops as max_ops
from max.nn import Signals
from maxsoftmax._graph import runtime
from test_gradients import close

CPU = DeviceRef.CPU()
GPUS = [DeviceRef.GPU(i) for i in range(3)]
LENGTHS = (5, 0, 9)
SMOOTHED = {"label_smoothing": 0.2, "reduction": "mean", "ignore_index": 3}
functions = maxsoftmax.ops.sharded


def results(shards, gradients, target, tokens, signals):
    """Yields the name of each function, and what it returns for each device."""
    y, z = functions.softmax(shards, signals, 1), functions.log_softmax(shards, signals, 1)
    yield "softmax", y
    yield "log_softmax", z
    yield "softmax_backward", functions.softmax_backward(y, gradients, signals, 1)
    yield "log_softmax_backward", functions.log_softmax_backward(z, gradients, signals, 1)
    yield "logsumexp", functions.logsumexp(shards, signals, 1)
    yield "token_log_probs", functions.token_log_probs(shards, tokens, signals, axis=1)
    for name, options in (("mean", SMOOTHED), ("none", {"reduction": "none"})):
        loss, pairs = functions.cross_entropy_forward(shards, target, signals, **options)
        yield name, loss
        yield f"{name} pairs", pairs
        dloss = loss if options.get("reduction") == "none" else None
        yield f"{name} gradient", functions.cross_entropy_backward(shards, target, pairs, dloss, **options)


class Model:
    """A graph of all functions of one dtype, with the classes along axis 1: on a CPU, or a GPU for each shard."""

    def __init__(self, dtype, inner, lengths=LENGTHS, on_gpus=False):
        self.names, self.lengths, count = [], lengths, len(lengths)
        places = GPUS[:count] if on_gpus else [CPU] * count
        self.devices = runtime.devices()[1 : count + 1] if on_gpus else [runtime.device("cpu")]
        shards = [TensorType(known(dtype), ["rows", n, *inner], at) for n, at in zip(lengths, places, strict=True)]
        # Targets come to all GPUs, tokens to one for all.
        types = [*shards, *shards, *(TensorType(DType.int64, ["rows", *inner], at) for at in (*places, places[0]))]
        signals = Signals(places) if on_gpus else None
        self.signals = signals.buffers() if signals else []
        types += signals.input_types() if signals else []
        with Graph("sharded", input_types=types, custom_extensions=[maxsoftmax.extension()]) as graph:
            given, outputs = [value.tensor for value in graph.inputs[: 3 * count + 1]], []
            parts = given[:count], given[count : 2 * count], given[2 * count : 3 * count], given[-1]
            for name, found in results(*parts, graph.inputs[len(given) :]):
                self.names += [name] * count
                outputs += found
            graph.output(*outputs)
        self.model = InferenceSession(devices=self.devices).load(graph)

    def __call__(self, x, dy, target, tokens):
        """Returns what each function returns, by its name: a list, one a shard."""
        count, starts, found = len(self.lengths), np.cumsum(self.lengths)[:-1], {}
        arguments = [*np.split(x, starts, 1), *np.split(dy, starts, 1), *[target] * count, tokens]
        devices = [*[self.devices[i % len(self.devices)] for i in range(count)] * 3, self.devices[0]]
        given = [buffer_of(each).to(device) for each, device in zip(arguments, devices, strict=True)]
        for name, buffer in zip(self.names, self.model.execute(*given, *self.signals), strict=True):
            found.setdefault(name, []).append(array_of(buffer.to(runtime.device("cpu"))))
        return found


KINDS = [(dtype, ()) for dtype in contract.DTYPES] + [(np.float32, (4,))]
MODELS = [
    pytest.param(
        (dtype, inner, LENGTHS, False),
        id=f"{np.dtype(dtype).name}{len(inner) or ''}",
        # Each is compiled for more than a minute.
        marks=[pytest.mark.slow] * (np.dtype(dtype) != np.float32 or bool(inner)),
    )
    for dtype, inner in KINDS
] + [
    pytest.param((dtype, (), lengths, True), id=f"gpus-{np.dtype(dtype).name}-{lengths[0]}", marks=pytest.mark.gpu)
    for dtype in (np.float32, ml_dtypes.bfloat16)
    for lengths in ((5, 9), (0, 14))
]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A dtype, the dimensions after the axis, and a model of them."""
    dtype, inner, lengths, on_gpus = request.param
    if on_gpus and accelerator_count() < len(lengths):
        pytest.skip(f"fewer than {len(lengths)} GPUs")
    return dtype, inner, Model(*request.param)


def made(dtype, inner=(), rows=9):
    """Returns logits, gradients, targets and tokens."""
    n = sum(LENGTHS)
    target = np.random.default_rng(1).integers(0, n, (rows, *inner))
    tokens = target.copy()
    target[1], target[2], tokens[3] = -100, 3, n - 1
    shape = rows, n, *inner
    return contract.logits(shape, dtype), contract.logits(shape, dtype, 1.0, 7), target, tokens


def one_hot(target, n):
    """Returns the wanted probabilities of classes along axis 1."""
    return np.moveaxis(np.eye(n)[np.clip(target, 0, n - 1)], -1, 1)


def losses(x, target, ignored, share):
    """Returns losses of rows in float64, and the gradients of their logits."""
    n = x.shape[1]
    wanted = one_hot(target, n) * (1 - share) + share / n
    logs = x - scipy.special.logsumexp(x, axis=1, keepdims=True)
    counts = target != ignored
    return (-(wanted * logs).sum(1)) * counts, (np.exp(logs) - wanted) * counts[:, None], counts.sum()


def expected(x, dy, target, tokens):
    """Returns what each function has to return, in float64."""
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    y, sums = scipy.special.softmax(x, axis=1), scipy.special.logsumexp(x, axis=1)
    plain, gradient, _ = losses(x, target, -100, 0.0)
    smoothed, smoothed_gradient, count = losses(x, np.where(target == -100, 3, target), 3, 0.2)
    return {
        "log_softmax": scipy.special.log_softmax(x, axis=1),
        "softmax_backward": y * (dy - (y * dy).sum(1, keepdims=True)),
        "log_softmax_backward": dy - y * dy.sum(1, keepdims=True),
        "logsumexp": sums,
        "token_log_probs": (x * one_hot(tokens, x.shape[1])).sum(1) - sums,
        "mean": smoothed.sum() / count,
        "mean gradient": smoothed_gradient / count,
        "none": plain,
        "none gradient": gradient * plain[:, None],
    }


def test_results_are_those_of_one_device(model):
    dtype, inner, compiled = model
    x, dy, target, tokens = made(dtype, inner)
    found = compiled(x, dy, target, tokens)
    # In the mean -100 would be no class.
    found.update({name: parts for name, parts in compiled(x, dy, np.where(target == -100, 3, target), tokens).items()
                  if "mean" in name})  # fmt: skip
    contract.check(np.concatenate(found["softmax"], 1), x, axis=1)
    for name, want in expected(x, dy, target, tokens).items():
        parts = found[name]
        wide = np.float64 if dtype == np.float64 else np.float32
        assert parts[0].dtype == (wide if name == "token_log_probs" else dtype)
        scale = max(1, np.abs(want).max())
        if np.ndim(want) == x.ndim:
            assert tuple(part.shape[1] for part in parts) == compiled.lengths
            close(np.concatenate(parts, 1), want, scale)
            continue
        close(parts[0], want, scale)
        for part in parts[1:]:
            np.testing.assert_array_equal(part, parts[0])
    m, d = np.moveaxis(found["mean pairs"][-1], -1, 0)
    np.testing.assert_array_equal(m, x.max(1).astype(m.dtype))
    close(d, np.exp(x.astype(np.float64) - x.astype(np.float64).max(1, keepdims=True)).sum(1))


def test_a_row_has_the_same_bits_in_every_batch(model):
    dtype, inner, compiled = model
    given = made(dtype, inner, rows=40)
    whole, part = compiled(*given), compiled(*(each[17:20] for each in given))
    for name in part.keys() - {"mean", "mean gradient"}:
        for a, b in zip(whole[name], part[name], strict=True):
            np.testing.assert_array_equal(a[17:20], b, err_msg=name)


def test_special_values_are_those_of_one_device(model):
    dtype, inner, compiled = model
    if dtype != np.float32 or inner:
        pytest.skip("one dtype has all of them")
    x, dy, target, tokens = made(dtype, rows=2 * 14 * 3 + 4)
    for row in range(len(x) - 4):
        x[row, row // 6] = (np.nan, np.inf, -np.inf)[row % 3]
    target[:-4:2] = np.arange(len(x) - 4)[::2] // 6
    x[-4:, :5] = -np.inf
    x[-4] = -np.inf
    x[-3, 5:] = -np.inf
    x[-3, 5] = np.nan
    target[-4:] = 1, 1, 2, 9
    found = compiled(x, dy, target, tokens)
    with np.errstate(invalid="ignore"):
        contract.check(np.concatenate(found["softmax"], 1), x, axis=1)
        close(np.concatenate(found["log_softmax"], 1), maxsoftmax.log_softmax(x))
    close(found["logsumexp"][0], maxsoftmax.logsumexp(x))
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, reduction="none")
    close(found["none"][0], loss)
    gradient = maxsoftmax.cross_entropy_backward(x, target, pairs, loss, reduction="none")
    close(np.concatenate(found["none gradient"], 1), gradient)


def test_what_is_no_class_is_nan(model):
    dtype, inner, compiled = model
    x, dy, target, tokens = made(dtype, inner)
    target[0], target[4], tokens[0], tokens[4] = 14, -1, 14, -2
    found = compiled(x, dy, target, tokens)
    wrong = np.broadcast_to(np.isin(np.arange(len(x)), [0, 4]).reshape(-1, *[1] * len(inner)), target.shape)
    for name in ("none", "token_log_probs"):
        np.testing.assert_array_equal(np.isnan(found[name][0]), wrong)
    assert np.isnan(found["mean"][0])
    gradient = np.concatenate(found["none gradient"], 1)
    np.testing.assert_array_equal(np.isnan(gradient), np.broadcast_to(np.expand_dims(wrong, 1), x.shape))


def shard(n=3, rows="rows", dtype=DType.float32, device=CPU):
    return TensorType(dtype, [rows, n], device)


@pytest.mark.parametrize(
    ("types", "failure", "text"),
    [
        ([], ValueError, "shards is empty"),
        ([shard(), shard(dtype=DType.float64)], TypeError, "shards[1] has dtype float64, but shards[0] has float32"),
        ([shard(), shard(rows="others")], ValueError, "may differ along axis 1 only"),
        ([shard(), shard(n="n")], ValueError, "its length along axis 1 must be static"),
        ([shard(dtype=DType.int32)], TypeError, "shards[0] has dtype int32"),
        ([shard(device=gpu) for gpu in GPUS[:2]], ValueError, "signals has 0 buffers, but 2 devices need one each"),
        ([shard(device=GPUS[i // 2]) for i in range(3)], ValueError, "shards are on 2 devices, but 3 need as many"),
    ],
)
def test_bad_shards_are_refused(types, failure, text):
    with Graph("bad", input_types=types) as graph, pytest.raises(failure) as caught:
        functions.softmax([value.tensor for value in graph.inputs])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "failure", "text"),
    [
        (lambda x, t: functions.cross_entropy([x, x], [t]), ValueError, "target has 1 tensors, but there are 2 shards"),
        (lambda x, t: functions.cross_entropy([x], x), TypeError, "target has dtype float32"),
        (lambda x, t: functions.cross_entropy([x], t, reduction="most"), ValueError, "reduction"),
        (lambda x, t: functions.token_log_probs([x], pair(t)), ValueError, "tokens has shape (rows, 2), but here it"),
        (lambda x, t: functions.cross_entropy_backward([x], t, []), ValueError, "pairs has 0 tensors"),
        (lambda x, t: functions.cross_entropy_backward([x], t, [x]), ValueError, "pairs has shape (rows, 3)"),
        (lambda x, t: functions.softmax_backward([x], []), ValueError, "gradients has 0 tensors"),
        (lambda x, t: functions.softmax(x), TypeError, "shards must be a list of tensors"),
    ],
)
def test_bad_arguments_are_refused(call, failure, text):
    types = [shard(), TensorType(DType.int64, ["rows"], CPU)]
    with Graph("bad", input_types=types) as graph, pytest.raises(failure) as caught:
        call(*(value.tensor for value in graph.inputs))
    assert text in str(caught.value)


def test_one_collective_forward_and_none_for_the_gradient_of_the_loss():
    gpus = [DeviceRef.GPU(i) for i in range(8)]
    types = [TensorType(DType.int64, ["rows"], gpus[0]), *[shard(n, device=gpu) for n, gpu in enumerate(gpus)]]

    def count(build):
        with Graph("eight", input_types=[*types, *Signals(gpus).input_types()]) as graph:
            target, *values = graph.inputs
            graph.output(*build([value.tensor for value in values[:8]], target.tensor, values[8:]))
        return str(graph).count("mo.distributed.allgather")

    def loss(x, target, signals):
        losses, pairs = functions.cross_entropy_forward(x, target, signals, label_smoothing=0.1)
        return [*losses, *functions.cross_entropy_backward(x, target, pairs, label_smoothing=0.1)]

    assert count(loss) == 1
    assert count(functions.token_log_probs) == 1
    for name in ("softmax", "log_softmax", "logsumexp"):
        assert count(lambda x, _, signals, name=name: getattr(functions, name)(x, signals)) == 1
    for name in ("softmax_backward", "log_softmax_backward"):
        assert count(lambda x, _, signals, name=name: getattr(functions, name)(x, x, signals)) == 1


def pair(target):
    """Returns two classes for each row."""
    return max_ops.stack([target, target], 1)


def test_outside_of_a_graph():
    with pytest.raises(LookupError, match="no graph is being built"):
        functions.softmax([np.zeros((2, 3), np.float32)])


def test_the_example():
    example = doctest.DocTestParser().get_doctest(functions.__doc__, {}, "sharded", None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
