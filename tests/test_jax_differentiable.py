"""Derivatives of the functions for JAX, forward and backward, and the scans that they go through."""

import maxsoftmax
import numpy as np
import pytest
import scipy.special
from contract import logits
from jax_arrays import DTYPES, FUNCTIONS, gradient, jax, jnp, ours, same, tokens_of

check_grads = pytest.importorskip("jax.test_util").check_grads

pytestmark = pytest.mark.usefixtures("place_of_jax")


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
    forward, backward = (jax.jit(way(lambda x: function(x, axis=0)))(x) for way in (jax.jacfwd, jax.jacrev))
    np.testing.assert_allclose(forward, backward, atol=1e-6)
    if name == "sparsemax":
        return
    theirs = getattr(jax.nn, name)
    found, expected = (jax.jit(jax.hessian(lambda x, f=f: (f(x, -1) ** 2).sum()))(x) for f in (function, theirs))
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


@pytest.mark.parametrize(("each", "entropy"), [(None, False), (3, True)])
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

    for way in (jax.grad, jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        one, other = (jax.jit(way(loss(f)))(x) for f in (found, expected))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
    changes = (jax.jit(lambda x, f=f: jax.jvp(f, (x,), (x,)))(x) for f in (found, expected))
    for one, other in zip(*map(jax.tree.leaves, changes), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # A batch of logits or of tokens is rows.
    many = jax.vmap(lambda t: ours.token_log_probs(x, t, 1))(jnp.stack([tokens, tokens]))
    np.testing.assert_allclose(many[1], ours.token_log_probs(x, tokens, 1), rtol=1e-6)
    one_by_one = jax.vmap(lambda x, t: ours.token_log_probs(x, t, 0))(x, tokens)
    np.testing.assert_allclose(one_by_one, ours.token_log_probs(x, tokens, 1), rtol=1e-6)


def test_all_of_it_in_float64_where_jax_has_it(device):
    x, target = logits((5, 33), np.float64), np.arange(5) * 6

    def values(x):
        p = ours.token_log_probs(x, target, temperature=0.7)
        of_rows = ours.softmax(x), ours.log_softmax(x), ours.sparsemax(x), ours.logsumexp(x, -1, x)
        return (*of_rows, ours.cross_entropy(x, target, label_smoothing=0.1), p)

    def expected(x):
        z, rows = jax.nn.log_softmax(x), np.arange(5)
        losses = -0.9 * z[rows, target] - 0.1 * z.mean(-1)
        ranked = -jnp.sort(-x)
        sums = jnp.cumsum(ranked, -1)
        count = (1 + jnp.arange(1, 34) * ranked > sums).sum(-1)
        threshold = (sums[rows, count - 1] - 1) / count
        tokens = jax.nn.log_softmax(x / 0.7)[rows, target]
        return jnp.exp(z), z, jnp.maximum(x - threshold[:, None], 0), jax.nn.logsumexp(x, -1, x), losses, tokens

    def total(f):
        return lambda x: sum((jnp.nan_to_num(part) ** 2).sum() for part in f(x))

    with jax.enable_x64(True):
        for one, other in zip(jax.jit(values)(x), jax.jit(expected)(x), strict=True):
            assert one.dtype == np.float64
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
        found, wanted = (jax.jit(jax.grad(total(f)))(x) for f in (values, expected))
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-11)


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
