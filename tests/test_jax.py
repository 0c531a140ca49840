import ctypes
import json
import os
import struct
import subprocess
import sys
import textwrap
import threading

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from contract import check, logits

# Other libraries need memory too, and nobody else's devices are asked for.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax")

import maxsoftmax.jax as ours  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from maxsoftmax._commands import cli, network_jax, train  # noqa: E402
from maxsoftmax._graph import runtime  # noqa: E402
from maxsoftmax._native import description, load  # noqa: E402
from maxsoftmax.jax import primitives  # noqa: E402

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
FUNCTIONS = ["softmax", "log_softmax", "logsumexp", "sparsemax"]


@pytest.fixture(autouse=True)
def place(device):
    """Where JAX computes."""
    try:
        found = jax.devices(device)[0]
    except RuntimeError:
        pytest.skip("this build of jax has no GPU")
    with jax.default_device(found):
        yield found


def same(a, b):
    """Asserts that two arrays have the same bits, but for those of NaN."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    # Which float64 has all of.
    np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def losses(x, target, axis=-1):
    """Returns a loss for each row in float64."""
    log_p = scipy.special.log_softmax(x.astype(np.float64), axis=axis)
    return -np.take_along_axis(log_p, np.expand_dims(target, axis), axis).squeeze(axis)


def gradient(y, dy, axis=-1):
    """Returns the gradient of the logits of softmax in float64."""
    y, dy = y.astype(np.float64), dy.astype(np.float64)
    return y * (dy - (y * dy).sum(axis, keepdims=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 5), 1), ((1, 1), 0), ((4, 33, 7), 1), ((33, 6), 0), ((3, 4097), -1), ((2, 50257), -1)]
)
def test_softmax_has_the_bits_of_arrays(device, shape, axis, dtype):
    x = logits(shape, dtype)
    y = jax.jit(ours.softmax, static_argnames="axis")(x, axis=axis)
    same(y, maxsoftmax.softmax(x, axis=axis, device=device))
    check(y, x, axis)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, (0, 1), (1, 2), (0, 2), (2, 0), None])
def test_each_function_has_the_bits_of_arrays(device, name, axis):
    x = logits((5, 7, 3))
    expected = getattr(maxsoftmax, name)(x, axis=axis, device=device)
    function = getattr(ours, name)
    y = jax.jit(lambda x: function(x, axis=axis))(x)
    assert y.dtype == np.float32
    if axis in ((0, 2), (2, 0)):
        # Axes that are no neighbours lie otherwise in NumPy's array.
        np.testing.assert_allclose(y, expected, rtol=2e-6)
    else:
        same(y, expected)
    # Without jit it is no other.
    same(function(x, axis=axis), y)


def test_results_in_large_pages_have_the_bits_of_arrays(device):
    x = logits((1024, 4099))
    same(jax.jit(ours.softmax)(x), maxsoftmax.softmax(x, device=device))
    same(ours.softmax(x[:513].T, axis=0), maxsoftmax.softmax(np.ascontiguousarray(x[:513].T), axis=0, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_special_values(device, dtype):
    x = logits((6, 9), dtype)
    x[0, 3], x[1, 0], x[2], x[3, 1:8] = np.nan, np.inf, -np.inf, -np.inf
    same(ours.softmax(x), maxsoftmax.softmax(x, device=device))
    check(ours.softmax(x), x)


def test_a_row_has_its_bits_in_any_batch(device):
    x = logits((64, 1001))
    y = np.asarray(ours.softmax(x))
    for rows in (slice(0, 1), slice(3, 20), slice(63, 64)):
        same(ours.softmax(x[rows]), y[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((6, 5), 1), ((4, 33, 7), 1), ((3, 4097), -1)])
def test_the_gradient_of_softmax(device, shape, axis, dtype):
    x, dy = logits(shape, dtype), logits(shape, dtype, 1.0, seed=1)
    y, pull = jax.vjp(lambda x: ours.softmax(x, axis), x)
    (dx,) = jax.jit(pull)(dy)
    same(dx, maxsoftmax.softmax_backward(np.asarray(y), dy, axis=axis, device=device))
    expected = gradient(np.asarray(y), dy, axis)
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}[dx.dtype.name]
    np.testing.assert_allclose(np.asarray(dx, np.float64), expected, rtol=tolerance, atol=tolerance / 10)


def test_value_and_gradient_are_those_of_jax(device):
    x, w = jnp.asarray(logits((16, 24))), jnp.asarray(logits((16, 24), seed=1))

    def loss(nn, x):
        return (nn.softmax(x) * w).sum() + (nn.log_softmax(x, 0) * w).sum() + nn.logsumexp(x, -1).sum()

    theirs, ourselves = (jax.jit(jax.value_and_grad(lambda x, nn=nn: loss(nn, x)))(x) for nn in (jax.nn, ours))
    np.testing.assert_allclose(ourselves[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ourselves[1], theirs[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_differences(device, name):
    # Sparsemax is smooth where no logit is at the threshold.
    x = jnp.asarray(np.random.default_rng(3).permutation(12).reshape(3, 4).astype(np.float32)) / 3
    function = getattr(ours, name)
    check_grads(lambda x: function(x, axis=-1), (x,), order=2, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


def test_gradients_of_losses_are_those_of_differences(device):
    x, target = jnp.asarray(logits((3, 5), scale=1.0)), jnp.array([4, 0, 2])

    def loss(x, scale):
        return (ours.cross_entropy(x, target, label_smoothing=0.2, ignore_index=0) * scale).sum()

    check_grads(loss, (x, jnp.array([1.0, 2.0, 3.0])), order=2, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_that_are_computed_forward(device, name):
    x = jnp.asarray(np.random.default_rng(3).permutation(12).reshape(3, 4).astype(np.float32)) / 3
    function = getattr(ours, name)
    check_grads(lambda x: function(x, axis=-1), (x,), order=2, modes=["fwd"], atol=2e-2, rtol=2e-2, eps=1e-2)
    # One is the transpose of the other.
    forward, backward = (way(lambda x: function(x, axis=0))(x) for way in (jax.jacfwd, jax.jacrev))
    np.testing.assert_allclose(forward, backward, atol=1e-6)
    if name == "sparsemax":
        return
    theirs = getattr(jax.nn, name)
    found, expected = (jax.hessian(lambda x, f=f: (f(x, axis=-1) ** 2).sum())(x) for f in (function, theirs))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_of_losses(device, dtype):
    x, t = jnp.asarray(logits((5, 9), dtype)), jnp.asarray(logits((5, 9), dtype, 1.0, seed=1))
    target, choices = jnp.array([4, 0, 2, 8, 1]), {"ignore_index": 0, "label_smoothing": 0.2}
    loss, change = jax.jvp(lambda x: ours.cross_entropy(x, target, **choices), (x,), (t,))
    same(loss, ours.cross_entropy(x, target, **choices))
    wanted = 0.8 * np.eye(9)[target] + 0.2 / 9
    p = scipy.special.softmax(np.asarray(x, np.float64), -1)
    expected = ((p - wanted) * np.asarray(t, np.float64)).sum(-1) * (np.asarray(target) != 0)
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[x.dtype.name]
    np.testing.assert_allclose(np.asarray(change, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_the_gradient_of_a_loss_is_one_call_each_way(device):
    x, target = jnp.zeros((3, 5)), jnp.zeros(3, int)
    told = jax.jit(jax.grad(lambda x: ours.cross_entropy(x, target).mean())).lower(x).as_text()
    assert told.count("custom_call @maxsoftmax_") == 2
    assert "exponential" not in told


@pytest.mark.parametrize("dtype", [*DTYPES, np.int32])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cross_entropy(device, axis, dtype):
    x, target = logits((5, 7, 6), dtype), np.random.default_rng(0).integers(0, 5, (5, 7, 6)).astype(np.int32)
    target = target.take(0, axis)
    loss = jax.jit(ours.cross_entropy, static_argnames="axis")(x, target, axis=axis)
    expected = losses(x, target, axis)
    assert loss.shape == target.shape
    assert loss.dtype == (np.float32 if dtype is np.int32 else dtype)
    tolerance = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}[loss.dtype.name]
    np.testing.assert_allclose(np.asarray(loss, np.float64), expected, rtol=tolerance, atol=tolerance)
    same(ours.softmax_cross_entropy_with_integer_labels(x, target, axis), loss)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 5), (9, 4099)])
def test_cross_entropy_and_its_gradient_have_the_bits_of_arrays(device, shape, dtype):
    x, choices = logits(shape, dtype), {"ignore_index": 3, "label_smoothing": 0.1}
    target = np.random.default_rng(0).integers(0, shape[1], shape[0]).astype(np.int32)
    target[1] = 3
    dloss = logits(shape[:1], dtype, seed=2)
    loss, pull = jax.vjp(lambda x: ours.cross_entropy(x, target, **choices), jnp.asarray(x))
    choices["device"] = device
    expected, pairs = maxsoftmax.cross_entropy_forward(x, target, reduction="none", **choices)
    same(loss, expected)
    assert loss[1] == 0
    dx = maxsoftmax.cross_entropy_backward(x, target, pairs, dloss, reduction="none", **choices)
    same(pull(jnp.asarray(dloss))[0], dx)


def tokens_of(shape, axis, each, seed=1):
    """Returns one token for each row, or `each` along the axis."""
    of = [each] if each else []
    return np.random.default_rng(seed).integers(0, shape[axis], (*shape[:axis], *of, *shape[axis + 1 :]), np.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis", "each"), [((5,), 0, None), ((7, 33), 1, 3), ((3, 40, 5), 1, 2), ((2, 50257), 1, 1)]
)
def test_tokens_have_the_bits_of_arrays(device, shape, axis, each, entropy, dtype):  # noqa: PLR0917
    x, tokens = logits(shape, dtype), tokens_of(shape, axis, each)
    choices = {"axis": axis, "temperature": 0.7, "entropy": entropy}
    found = jax.jit(lambda x, t: ours.token_log_probs(x, t, **choices))(x, tokens)
    expected = maxsoftmax.token_log_probs(x, tokens, device=device, **choices)
    for one, other in zip(found, expected, strict=True) if entropy else [(found, expected)]:
        same(one, other)


@pytest.mark.parametrize("each", [None, 3])
@pytest.mark.parametrize("entropy", [False, True])
def test_derivatives_of_tokens(device, each, entropy):
    x, tokens = jnp.asarray(logits((4, 3, 6), scale=1.0)), jnp.asarray(tokens_of((4, 3, 6), 1, each))

    def found(x):
        return ours.token_log_probs(x, tokens, 1, temperature=0.7, entropy=entropy)

    def expected(x):
        z = jax.nn.log_softmax(x / 0.7, 1)
        p = jnp.take_along_axis(z, tokens if each else tokens[:, None], 1)
        p = p if each else p.squeeze(1)
        return (p, -(jnp.exp(z) * z).sum(1)) if entropy else p

    def loss(f):
        return lambda x: sum((part**2).sum() for part in jax.tree.leaves(f(x)))

    for way in (jax.grad, jax.hessian, lambda f: jax.jit(jax.jacfwd(f)), lambda f: jax.jacrev(jax.jacrev(f))):
        np.testing.assert_allclose(way(loss(found))(x), way(loss(expected))(x), rtol=1e-4, atol=2e-5)
    for one, other in zip(*(jax.tree.leaves(jax.jvp(f, (x,), (x,))) for f in (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # A batch of logits or of tokens is rows.
    many = jax.vmap(lambda t: ours.token_log_probs(x, t, 1))(jnp.stack([tokens, tokens]))
    np.testing.assert_allclose(many[1], ours.token_log_probs(x, tokens, 1), rtol=1e-6)
    one_by_one = jax.vmap(lambda x, t: ours.token_log_probs(x, t, 0))(x, tokens)
    np.testing.assert_allclose(one_by_one, ours.token_log_probs(x, tokens, 1), rtol=1e-6)


def test_tokens_of_nothing_and_what_is_no_token(device):
    x = jnp.asarray(logits((3, 5)))
    found = ours.token_log_probs(x, np.array([[0, -1], [5, 4], [2, 1]]))
    np.testing.assert_array_equal(np.isnan(found), [[False, True], [True, False], [False, False]])
    for result in ours.token_log_probs(jnp.ones((2, 0)), np.zeros(2, int), entropy=True):
        assert np.isnan(result).tolist() == [True, True]
    assert ours.token_log_probs(x, np.zeros((3, 0), int)).shape == (3, 0)
    assert ours.token_log_probs(jnp.ones((0, 4)), np.zeros(0, int)).shape == (0,)
    same(ours.token_log_probs(x, np.array([0, 1, 2], np.uint8)), ours.token_log_probs(x, np.array([0, 1, 2])))


def test_labels_of_other_integers(device):
    x = logits((4, 300))
    for dtype in (np.int8, np.uint8, np.int16, np.uint32):
        target = np.array([0, 1, 2, 127], dtype)
        np.testing.assert_allclose(ours.cross_entropy(x, target), losses(x, target.astype(int)), rtol=1e-5)
    with jax.enable_x64(True):
        target = np.array([0, 1, 2, 299], np.int64)
        np.testing.assert_allclose(ours.cross_entropy(x, target), losses(x, target), rtol=1e-5)


def test_float64_where_jax_has_it(device):
    x = logits((5, 33), np.float64)
    with jax.enable_x64(True):
        y = jax.jit(ours.softmax)(x)
        assert y.dtype == np.float64
        check(y, x)
    assert ours.softmax(x).dtype == np.float32


def test_labels_that_are_no_classes(device):
    x, target = jnp.zeros((3, 4)), jnp.array([0, 4, 1])
    if device == "gpu":
        assert np.isnan(np.asarray(ours.cross_entropy(x, target))).tolist() == [False, True, False]
        return
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: target\[1\] is 4, which is neither a class"
    ):
        jax.block_until_ready(jax.jit(ours.cross_entropy)(x, target))
    # Nothing is left of it.
    same(ours.cross_entropy(x, jnp.array([0, 3, -100])), np.array([np.log(4), np.log(4), 0], np.float32))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "sparsemax"])
@pytest.mark.parametrize("place_of_batch", [0, 1, 2])
def test_vmap_is_rows(device, name, place_of_batch):
    x = jnp.asarray(logits((5, 4, 6)))
    function = getattr(ours, name)
    for axis in (0, 1):
        one_by_one = [function(each, axis=axis) for each in jnp.moveaxis(x, place_of_batch, 0)]
        y = jax.vmap(lambda x, axis=axis: function(x, axis=axis), in_axes=place_of_batch)(x)
        # A batch lies between the elements of a row, which then has other kernels.
        np.testing.assert_allclose(y, np.stack(one_by_one), rtol=1e-6, atol=5e-7)
    if name != "logsumexp":
        y = jax.vmap(jax.vmap(function), in_axes=place_of_batch, out_axes=place_of_batch)(x)
        np.testing.assert_allclose(y, function(x, axis=1 if place_of_batch == 2 else 2), rtol=1e-6, atol=5e-7)


def test_a_batch_of_contiguous_rows_has_their_bits(device):
    x = jnp.asarray(logits((5, 4, 129)))
    same(jax.vmap(ours.softmax)(x), ours.softmax(x))
    same(jax.vmap(ours.softmax, in_axes=1, out_axes=1)(x), ours.softmax(x))


def test_vmap_of_gradients(device):
    x, v = jnp.asarray(logits((4, 6))), jnp.asarray(logits((7, 6), seed=1))
    # Each row's Jacobian: the same probabilities with a batch of gradients.
    y = np.asarray(ours.softmax(x), np.float64)
    expected = np.stack([np.diag(row) - np.outer(row, row) for row in y])
    np.testing.assert_allclose(jax.vmap(jax.jacrev(ours.softmax))(x), expected, atol=1e-6)
    # And one gradient with a batch of probabilities.
    _, pull = jax.vjp(ours.softmax, v)
    many = jax.vmap(lambda x: jax.vjp(ours.softmax, x)[1](v[0])[0])(v)
    np.testing.assert_allclose(many, pull(jnp.broadcast_to(v[0], v.shape))[0], atol=1e-6)


@pytest.mark.parametrize("in_axes", [(0, 0), (1, 0), (2, 1), (0, None), (None, 0)])
def test_vmap_of_losses(device, in_axes):
    x, target = jnp.asarray(logits((4, 4, 4))), jnp.asarray(np.random.default_rng(0).integers(0, 4, (4, 4)))
    if in_axes[0] is None:
        x = x[0]
    if in_axes[1] is None:
        target = target[0]

    def loss(x, target, axis):
        return ours.cross_entropy(x, target, axis).mean()

    def theirs(x, target, axis):
        return -jnp.take_along_axis(jax.nn.log_softmax(x, axis), jnp.expand_dims(target, axis), axis).mean()

    for axis in (0, 1):
        found, expected = (
            jax.jit(jax.vmap(jax.value_and_grad(lambda x, t, f=f, axis=axis: f(x, t, axis)), in_axes))(x, target)
            for f in (loss, theirs)
        )
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-6)


def test_scan_and_checkpoint(device):
    x = jnp.asarray(logits((5, 3, 8)))

    def step(carry, x):
        y = jax.checkpoint(ours.softmax)(x + carry)
        return y, ours.logsumexp(y, axis=-1)

    def total(x):
        last, seen = jax.lax.scan(step, jnp.zeros((3, 8)), x)
        return (last**2).sum() + seen.sum()

    def theirs(x):
        carry, found = jnp.zeros((3, 8)), 0.0
        for each in x:
            carry = jax.nn.softmax(each + carry)
            found += jax.nn.logsumexp(carry, axis=-1).sum()
        return (carry**2).sum() + found

    (value, dx), (expected, expected_dx) = (jax.jit(jax.value_and_grad(f))(x) for f in (total, theirs))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(dx, expected_dx, atol=1e-6)


def test_where(device):
    x = jnp.asarray(logits((4, 6)))
    where = np.arange(6) % 3 > 0
    for name in ("softmax", "log_softmax"):
        np.testing.assert_allclose(
            getattr(ours, name)(x, where=where), getattr(jax.nn, name)(x, where=where), rtol=1e-5
        )
    for choices in ({"axis": -1}, {"axis": 0, "keepdims": True}, {}):
        y = ours.logsumexp(x, where=where[:, None][:4] if choices == {} else where, **choices)
        expected = jax.nn.logsumexp(x, where=where[:, None][:4] if choices == {} else where, **choices)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    # Of rows of which nothing counts, nothing is NaN.
    nothing = np.zeros((4, 1), bool)
    same(ours.softmax(x, where=nothing), np.zeros((4, 6), np.float32))
    assert not np.isnan(jax.grad(lambda x: ours.softmax(x, where=nothing)[0, 0])(x)).any()


def test_shapes_without_elements(device):
    assert ours.softmax(jnp.ones((0, 3))).shape == (0, 3)
    assert jax.jit(ours.log_softmax)(jnp.ones((3, 0))).shape == (3, 0)
    assert jax.vmap(ours.softmax)(jnp.ones((0, 2, 3))).shape == (0, 2, 3)
    assert jax.grad(lambda x: ours.softmax(x).sum())(jnp.ones((0, 3))).shape == (0, 3)
    same(ours.logsumexp(jnp.ones((2, 0)), axis=-1), np.full(2, -np.inf, np.float32))
    assert ours.logsumexp(jnp.ones((2, 0)), axis=0).shape == (0,)
    assert ours.cross_entropy(jnp.ones((0, 3)), jnp.ones(0, int)).shape == (0,)
    same(ours.cross_entropy(jnp.ones((2, 0)), jnp.array([-100, 1])), np.array([0, np.nan], np.float32))
    same(jax.vmap(ours.cross_entropy)(jnp.ones((2, 1, 0)), jnp.full((2, 1), -100)), np.zeros((2, 1), np.float32))


def test_scalars_and_integers(device):
    same(ours.softmax(3.0), np.float32(1))
    same(ours.logsumexp(2.5), np.float32(2.5))
    same(ours.softmax(np.arange(4)), ours.softmax(np.arange(4, dtype=np.float32)))
    same(ours.softmax([True, False]), ours.softmax(np.array([1, 0], np.float32)))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda x: ours.softmax(x, 2), ValueError, "axis 2 is out of bounds for x of rank 2: it must be from -2 to 1"),
        (
            lambda x: ours.logsumexp(x, 2),
            ValueError,
            "axis 2 is out of bounds for a of rank 2: it must be from -2 to 1",
        ),
        (lambda x: ours.logsumexp(x, (0, 0)), ValueError, "axis (0, 0) names an axis of a twice"),
        (
            lambda x: ours.cross_entropy(x, np.zeros(2, int), 2),
            ValueError,
            "axis 2 is out of bounds for logits of rank 2: it must be from -2 to 1",
        ),
        (
            lambda x: ours.token_log_probs(x, np.zeros(3, int)),
            ValueError,
            "tokens has shape (3,), but x of (2, 3) needs (2,), or (2, k) for k a row",
        ),
        (
            lambda x: ours.token_log_probs(x, np.zeros(2)),
            TypeError,
            "tokens have dtype float32, but they are integers",
        ),
        (lambda x: ours.token_log_probs(1.0, 0), ValueError, "x has rank 0, but logits need an axis of tokens"),
        (
            lambda x: ours.token_log_probs(x, np.zeros(2, int), temperature=0),
            ValueError,
            "temperature must be a positive, finite number, not 0",
        ),
        (
            lambda x: ours.token_log_probs(x, np.zeros(2, int), entropy=1),
            TypeError,
            "entropy must be True or False, not 1",
        ),
        (lambda x: ours.softmax(x, axis_name="tokens"), NameError, "Found an unbound axis name: tokens"),
        (lambda x: ours.softmax(x, 0.5), TypeError, "axis must be an integer, a tuple of integers or None, not 0.5"),
        (lambda x: ours.softmax(x, (0, 0)), ValueError, "axis (0, 0) names an axis of x twice"),
        (lambda x: ours.softmax(x * 1j), TypeError, "x has dtype complex64, but the kernels take float32, bfloat16, "),
        (lambda x: ours.softmax("logits"), TypeError, "x must be an array of numbers, not str"),
        (lambda x: ours.softmax(None), TypeError, "x must be an array of numbers, not NoneType"),
        (lambda x: ours.softmax(x, where=x), TypeError, "where has dtype float32, but says which elements count"),
        (
            lambda x: ours.logsumexp(x, where=np.ones(4, bool)),
            ValueError,
            "where has shape (4,), which does not broadcast to a of (2, 3)",
        ),
        (lambda x: ours.cross_entropy(1.0, 0), ValueError, "logits have rank 0, but need an axis of classes"),
        (
            lambda x: ours.cross_entropy(x, np.zeros(3, int)),
            ValueError,
            "labels have shape (3,), but logits of (2, 3) need (2,)",
        ),
        (
            lambda x: ours.cross_entropy(x, np.zeros(2)),
            TypeError,
            "labels have dtype float32, but classes are integers",
        ),
        (lambda x: ours.cross_entropy(x, np.zeros(2, int), None), TypeError, "axis must be an integer, not None"),
        (
            lambda x: ours.cross_entropy(x, np.zeros(2, int), label_smoothing=2),
            ValueError,
            "label_smoothing 2 is not from 0 to 1",
        ),
        (
            lambda x: ours.cross_entropy(x, np.zeros(2, int), ignore_index=0.5),
            TypeError,
            "ignore_index must be an integer, not 0.5",
        ),
    ],
)
def test_bad_arguments_are_refused_with_one_sentence(device, call, error, sentence):
    for way in (call, jax.jit(call)):
        with pytest.raises(error) as told:
            way(jnp.ones((2, 3)))
        assert str(told.value).startswith(sentence)


def test_other_platforms_are_refused(device):
    lowered = jax.jit(ours.softmax).trace(jnp.ones((2, 3)))
    with pytest.raises(
        NotImplementedError, match=r"softmax of maxsoftmax.jax computes on CPUs and CUDA devices, not on tpu"
    ):
        lowered.lower(lowering_platforms=("tpu",))


def test_several_threads_call_at_a_time(device):
    xs = [jnp.asarray(logits((64, 257), seed=seed)) for seed in range(8)]
    expected = [np.asarray(maxsoftmax.softmax(np.asarray(x), device=device)) for x in xs]
    function, found = jax.jit(ours.softmax), [None] * len(xs)

    def compute(i):
        for _ in range(20):
            found[i] = function(xs[i])

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y, wanted in zip(found, expected, strict=True):
        same(y, wanted)


def test_ops_are_the_libraries_that_have_a_handler(device):
    assert {op.library for op in primitives.OPS.values()} == set(description.XLA)
    assert load.functions("softmax", "float32", -1, "auto", primitives.CHOICES).xla


def _run(program, environment, **more):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={**environment, "JAX_PLATFORMS": "cpu", **more},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sharded_arrays_under_shard_map(environment, device):
    if device == "gpu":
        pytest.skip("one GPU has no mesh of two")
    program = """
        import jax, maxsoftmax.jax as ours, numpy as np
        from jax import numpy as jnp
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
        x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4, 5), dtype=np.float32))
        target = jnp.asarray(np.random.default_rng(0).integers(0, 5, (6, 4)))
        rows = P("rows")

        def sharded(f, specs, out=rows):
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))

        for f in (ours.softmax, ours.log_softmax, lambda x: ours.logsumexp(x, axis=-1)):
            g = sharded(f, (rows,))
            assert (g(x) == f(x)).all()
            dx, expected = (jax.grad(lambda x: (f(x) ** 2).sum())(x) for f in (g, f))
            np.testing.assert_allclose(dx, expected, atol=1e-6)
        g = sharded(ours.cross_entropy, (rows, rows))
        assert (g(x, target) == ours.cross_entropy(x, target)).all()
        # The same logits everywhere, and labels that differ: gradients of all devices add up.
        g = sharded(lambda x, t: jax.lax.psum(ours.cross_entropy(x, t[0]).sum(), "rows"), (P(), rows), P())
        both = target.reshape(2, 3, 4)
        dx = jax.grad(g)(x[:3], both)
        expected = sum(jax.grad(lambda x: ours.cross_entropy(x, t).sum())(x[:3]) for t in both)
        np.testing.assert_allclose(dx, expected, atol=1e-6)
        # Without shard_map XLA brings the rows together, and the result is the same.
        split = jax.device_put(x, jax.sharding.NamedSharding(mesh, rows))
        assert (jax.jit(ours.softmax)(split) == ours.softmax(x)).all()
        print("done")
    """
    assert "done" in _run(program, environment, XLA_FLAGS="--xla_force_host_platform_device_count=2")


DIVIDED = """
    import re
    import jax, maxsoftmax.jax as ours, ml_dtypes, numpy as np, scipy.special
    from jax import lax, numpy as jnp
    from jax.sharding import AxisType, PartitionSpec as P

    mesh = jax.make_mesh((4,), ("v",), axis_types=(AxisType.Auto,))
    square = jax.make_mesh((2, 2), ("rows", "v"), axis_types=(AxisType.Auto,) * 2)
    V = P(None, "v")
    rng = np.random.default_rng(0)

    def sharded(f, specs, out, mesh=mesh, **choices):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, **choices))

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * 3)

    def collectives(f, *arrays):
        told = f.lower(*arrays).compile().as_text()
        names = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
        return {name: n for name in names if (n := len(re.findall(rf" {name}(?:-start)?\\(", told)))}

    x, labels = normal(6, 40), jnp.asarray(rng.integers(0, 40, 6)).at[1].set(-100)
"""
"""What programs on four devices begin with."""


def _run_on_four(program, environment):
    whole = textwrap.dedent(DIVIDED) + textwrap.dedent(program) + "print('done')"
    assert "done" in _run(whole, environment, XLA_FLAGS="--xla_force_host_platform_device_count=4")


@pytest.fixture
def four(environment, device):
    """Runs a program on four devices."""
    if device == "gpu":
        pytest.skip("one GPU has no mesh of four")
    return lambda program: _run_on_four(program, environment)


def test_divided_rows(four):
    four("""
        functions = {
            "softmax": (V, scipy.special.softmax), "log_softmax": (V, scipy.special.log_softmax),
            "logsumexp": (P(), scipy.special.logsumexp),
        }
        for name, (out, reference) in functions.items():
            f = sharded(lambda x: getattr(ours, name)(x, axis=1, axis_name="v"), (V,), out)
            for dtype, limit in ((np.float32, 2e-6), (ml_dtypes.bfloat16, 1e-2), (np.float16, 1e-3)):
                for array in (normal(6, 40), normal(3, 200_004), 1000 + 100 * normal(6, 40)):
                    array = array.astype(dtype)
                    y = f(array)
                    assert y.dtype == dtype
                    # Tiny probabilities are subnormal in 16 bits.
                    expected = reference(np.asarray(array, np.float64), axis=1)
                    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=limit, atol=limit * 1e-3)
            assert collectives(f, x) == {"all-gather": 1}

        # Other axes, several axes of the mesh, a mask, a batch.
        f = sharded(lambda x: ours.softmax(x, axis=0, axis_name="v"), (P("v"),), P("v"))
        np.testing.assert_allclose(f(x.T), jax.nn.softmax(x.T, 0), rtol=1e-5)
        names = ("rows", "v")
        f = sharded(lambda x: ours.logsumexp(x, axis=1, axis_name=names), (P(None, names),), P(), square)
        np.testing.assert_allclose(f(x), ours.logsumexp(x, axis=1), rtol=1e-6)
        f = sharded(lambda x, w: ours.softmax(x, where=w, axis_name="v"), (V, V), V)
        where = jnp.arange(40) < 37
        np.testing.assert_allclose(f(x, where[None]), jax.nn.softmax(x, where=where), rtol=1e-5)
        deep = normal(3, 6, 40)
        last = P(None, None, "v")
        f = sharded(jax.vmap(lambda x: ours.log_softmax(x, axis_name="v")), (last,), last)
        np.testing.assert_allclose(f(deep), jax.nn.log_softmax(deep), rtol=1e-5)
        f = jax.vmap(lambda x: ours.softmax(x, axis_name="v"), in_axes=1, out_axes=1, axis_name="v")
        np.testing.assert_allclose(f(x.reshape(6, 4, 10)).reshape(6, 40), jax.nn.softmax(x), rtol=1e-5)

        # Special values, anywhere in a row; the same bits on all devices.
        odd = np.array(normal(8, 40))
        odd[0, 3], odd[1, 33], odd[2], odd[3, :30], odd[4, 1:] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
        odd[5], odd[5, 25] = -np.inf, np.nan
        for name, (out, reference) in functions.items():
            f = sharded(lambda x: getattr(ours, name)(x, axis=1, axis_name="v"), (V,), out)
            np.testing.assert_allclose(f(odd), getattr(ours, name)(odd, axis=1), rtol=2e-6, atol=1e-37)
        f = sharded(lambda x: ours.logsumexp(x, axis=1, axis_name="v")[None], (V,), P("v"), check_vma=False)
        assert len({row.tobytes() for row in np.asarray(f(x))}) == 1
        assert f(x[:0]).shape == (4, 0)
    """)


def test_gradients_of_divided_rows(four):
    four("""
        change = normal(6, 40)
        for check in (True, False):
            for name in ("softmax", "log_softmax", "logsumexp"):
                out = P() if name == "logsumexp" else V
                f = sharded(lambda x: getattr(ours, name)(x, axis=1, axis_name="v"), (V,), out, check_vma=check)
                g = lambda x: getattr(jax.nn, name)(x, axis=1)
                w = normal(*g(x).shape)
                first = [jax.jit(jax.grad(lambda x, h=h: (h(x) ** 2 * w).sum())) for h in (f, g)]
                np.testing.assert_allclose(first[0](x), first[1](x), rtol=1e-5, atol=3e-5)
                second = [jax.grad(lambda x: (d(x) ** 2).sum())(x) for d in first]
                np.testing.assert_allclose(*second, rtol=1e-3, atol=1e-2)
                np.testing.assert_allclose(*(jax.jvp(h, (x,), (change,))[1] for h in (f, g)), rtol=1e-4, atol=3e-5)
                if check:
                    expected = {"all-gather": 1} if name == "logsumexp" else {"all-gather": 1, "all-reduce": 1}
                    assert collectives(first[0], x) == expected
    """)


def test_losses_of_divided_rows(four):
    four("""
        def losses(share, **choices):
            f = lambda x, t: ours.cross_entropy(x, t, axis_name="v", label_smoothing=share)
            return sharded(f, (V, P()), P(), **choices)

        for check in (True, False):
            for share in (0.0, 0.2, 1.0):
                f, g = losses(share, check_vma=check), lambda x, t: ours.cross_entropy(x, t, label_smoothing=share)
                np.testing.assert_allclose(f(x, labels), g(x, labels), rtol=1e-5)
                w = normal(6)
                first = [jax.jit(jax.grad(lambda x, h=h: (h(x, labels) ** 2 * w).sum())) for h in (f, g)]
                np.testing.assert_allclose(first[0](x), first[1](x), rtol=1e-5, atol=3e-5)
                second = [jax.grad(lambda x: (d(x) ** 2).sum())(x) for d in first]
                np.testing.assert_allclose(*second, rtol=1e-3, atol=1e-2)
                changes = [jax.jvp(lambda x: h(x, labels), (x,), (x,))[1] for h in (f, g)]
                np.testing.assert_allclose(*changes, rtol=1e-4, atol=1e-4)
                # Nothing is told for gradients, where JAX knows that all devices have one loss.
                assert collectives(first[0], x) == {"all-gather": 1} | ({} if check else {"all-reduce": 1})

        # A vocabulary of a language model, in 16 bits, against float64.
        wide = (normal(5, 50_260) + 10).astype(ml_dtypes.bfloat16)
        target = rng.integers(0, 50_260, 5)
        log_p = scipy.special.log_softmax(np.asarray(wide, np.float64), -1)
        for share in (0.0, 0.1):
            value, dx = jax.value_and_grad(lambda x: losses(share)(x, target).astype(np.float32).sum())(wide)
            expected = -(1 - share) * log_p[np.arange(5), target] - share * log_p.mean(1)
            np.testing.assert_allclose(np.asarray(losses(share)(wide, target), np.float64), expected, rtol=8e-3)
            wanted = (1 - share) * (np.arange(50_260) == target[:, None]) + share / 50_260
            np.testing.assert_allclose(np.asarray(dx, np.float64), np.exp(log_p) - wanted, rtol=1e-2, atol=1e-8)

        # Labels that are no classes of the whole vocabulary, in any integers; and those that differ.
        for bad in (40, -1):
            t = labels.at[3].set(bad)
            assert np.isnan(losses(0.0)(x, t)).tolist() == [False] * 3 + [True] + [False] * 2
            dx = jax.grad(lambda x: losses(0.0)(x, t).sum())(x)
            assert np.isnan(dx).all(1).tolist() == [i == 3 for i in range(6)]
        small = jnp.arange(6, dtype=np.uint8) * 7
        np.testing.assert_allclose(losses(0.0)(x, small), ours.cross_entropy(x, small), rtol=1e-5)
        f = sharded(lambda x, t: ours.cross_entropy(x, t[0], axis_name="v"), (V, P("v")), P())
        try:
            f(x, jnp.zeros((4, 6), int))
        except ValueError as error:
            assert str(error) == "labels may differ along v, but devices with shards of a row need its label"
        else:
            raise AssertionError

        # Rows along one axis of a mesh, the vocabulary along the other.
        both = P("rows", "v"), P("rows")
        f = sharded(lambda x, t: ours.cross_entropy(x, t, axis_name="v"), both, P("rows"), square)
        np.testing.assert_allclose(f(x, labels), ours.cross_entropy(x, labels), rtol=1e-5)
        first = [jax.grad(lambda x: h(x, labels).mean())(x) for h in (f, ours.cross_entropy)]
        np.testing.assert_allclose(*first, atol=1e-6)
        with jax.set_mesh(jax.make_mesh((2, 2), ("rows", "v"), axis_types=(AxisType.Explicit,) * 2)):
            f = lambda x, t: ours.cross_entropy(x, t, axis_name="v")
            f = jax.jit(jax.shard_map(f, in_specs=both, out_specs=both[1]))
            mesh = jax.sharding.get_mesh()
            given = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((x, labels), both)]
            np.testing.assert_allclose(f(*given), ours.cross_entropy(x, labels), rtol=1e-5)
    """)


def test_what_xla_keeps_for_other_processes_works_there(environment, device, tmp_path):
    if device == "gpu":
        pytest.skip("the same on any device")
    program = """
        import jax, maxsoftmax, maxsoftmax.jax, numpy as np
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        x = np.random.default_rng(0).standard_normal((6, 5), dtype=np.float32)
        assert (jax.jit(maxsoftmax.jax.softmax)(x) == maxsoftmax.softmax(x)).all()
        print("done")
    """
    for _ in range(2):
        assert "done" in _run(program, environment, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
        assert any(tmp_path.iterdir())


def test_without_jax_one_sentence_says_what_to_install(environment, device):
    program = """
        import sys
        sys.modules["jax"] = None
        try:
            import maxsoftmax.jax
        except ImportError as error:
            print(error)
    """
    assert _run(program, environment) == "maxsoftmax.jax needs JAX: pip install 'maxsoftmax[jax]'\n"


def trained(seed, device):
    return train.sign(seed), train.sign(seed).training_in_jax(seed, runtime.device(device))


@pytest.mark.parametrize("seed", [0, 1])
def test_fifteen_steps_bring_the_published_loss_below_a_hundredth(device, seed):
    _, training = trained(seed, device)
    found = list(training.steps(15))
    assert len(found) == 16
    assert found[0].loss > 0.5
    assert found[-1].loss < 0.01
    assert found[-1].right > 0.8


def test_the_gradient_of_the_classifier_is_that_of_jax_and_of_differences(device):
    task, training = trained(3, device)
    x, target = task.learn.x, task.learn.target.astype(np.int32)

    def theirs(weights):
        log_p = jax.nn.log_softmax(network_jax.logits(weights, x))
        return -jnp.take_along_axis(log_p, target[:, None], -1).mean()

    # A GPU would multiply matrices in TF32, which has 11 bits.
    with jax.default_matmul_precision("highest"):
        value, gradients = jax.jit(jax.value_and_grad(network_jax.loss))(training.weights, x, target)
        expected, expected_gradients = jax.value_and_grad(theirs)(training.weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for ours_, theirs_ in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours_, theirs_, atol=1e-7)

    # Differences of the loss in float64.
    def loss(weights):
        hidden = np.maximum(x.astype(np.float64) @ weights[0] + weights[1], 0)
        return losses(hidden @ weights[2] + weights[3], target).mean()

    wide = [w.astype(np.float64) for w in training.weights]
    for layer, place in ((0, 5), (1, 7), (2, 11), (3, 1)):
        sides = []
        for step in (1e-6, -1e-6):
            moved = [w.copy() for w in wide]
            moved[layer].flat[place] += step
            sides.append(loss(moved))
        assert float(gradients[layer].flatten()[place]) == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-5)


def test_the_command_trains_in_jax(capsys, device, tmp_path):
    arguments = ["train", "--framework", "jax", "--device", device, "--steps", "2", "--json", str(tmp_path / "x.json")]
    assert cli.main(arguments) == 0
    *steps, last, _ = capsys.readouterr().out.splitlines()
    kept = json.loads((tmp_path / "x.json").read_text())
    assert kept["versions"]["jax"] == jax.__version__
    expected = [step.loss for step in trained(0, device)[1].steps(2)]
    assert kept["losses"] == expected
    assert steps[1] == f"step 2 of 2: loss {expected[1]:.6f}"
    assert last.startswith(f"after 2 steps: loss {expected[2]:.6f}, ")


@pytest.mark.parametrize(("theirs", "answered"), [(None, 1), (2, 2), (3, 3)])
def test_the_handler_is_for_the_version_that_xla_has(theirs, answered):
    # As c_api.h has them: the API table, the metadata, the extension that asks for these, and the call frame.
    api = struct.pack("<qqqqii", 192, 0, 24, 0, 0, theirs or 0)
    api = ctypes.create_string_buffer(api)
    metadata = ctypes.create_string_buffer(struct.pack("<qqqiiIxxxxq", 48, 24, 0, -1, -1, 7, 0))
    asking = ctypes.create_string_buffer(struct.pack("<qixxxxqq", 32, 1, 0, ctypes.addressof(metadata)))
    place = 0 if theirs is None else ctypes.addressof(api)
    frame = ctypes.create_string_buffer(struct.pack("<qqq", 168, ctypes.addressof(asking), place).ljust(168, b"\0"))
    handler = load.functions("softmax", "float32", -1, "auto", primitives.CHOICES).xla
    handler.argtypes, handler.restype = (ctypes.c_void_p,), ctypes.c_void_p
    assert handler(ctypes.addressof(frame)) is None
    assert struct.unpack("<qqqiiI", metadata.raw[:36]) == (48, 24, 0, 0, answered, 0)


def test_kernels_are_recorded_in_command_buffers_with_whatever_memory_there_is(place):
    def several(x):
        for _ in range(8):
            x = ours.softmax(x * 1.5)
        return x + ours.logsumexp(x, axis=-1)[..., None]

    together, kept = jax.jit(several), []
    for i in range(12):
        x = jax.device_put(np.float32(np.random.default_rng(i).standard_normal((64, 1000 + i % 2))), place)
        kept.append((together(x), several(x)))
        if i % 3 == 0:
            kept.append(kept.pop(0))
    for found, expected in kept:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
