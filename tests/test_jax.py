"""Values, bits, shapes, dtypes and refusals of the functions for JAX."""

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
from contract import check, logits
from jax_arrays import DTYPES, FUNCTIONS, jax, jnp, losses, ours, run, same, tokens_of

pytestmark = pytest.mark.usefixtures("place_of_jax")


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
    computed = jax.jit(ours.cross_entropy)
    # JAX calls a function in another way once it has succeeded.
    for labels in (target, jnp.array([0, 3, 1]), target):
        if labels is not target:
            jax.block_until_ready(computed(x, labels))
            continue
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"labels\[1\] is 4, which is neither a class from 0 to 3"):
            jax.block_until_ready(computed(x, labels))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"labels\[0, 2\] is 9, which is neither a class"):
        jax.block_until_ready(ours.cross_entropy(jnp.zeros((2, 3, 4)), jnp.array([[0, 0, 9], [0, 0, 0]])))
    with pytest.raises(jax.errors.JaxRuntimeError, match="labels is -1, which is neither a class"):
        jax.block_until_ready(ours.cross_entropy(jnp.zeros(4), jnp.array(-1)))
    # By optax's name, nothing is ignored.
    optaxs = ours.softmax_cross_entropy_with_integer_labels
    for where in (None, jnp.array([True, False, True])):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"labels\[2\] is -100, which is no class from 0 to 3"):
            jax.block_until_ready(optaxs(x, jnp.array([0, 3, -100]), where=where))
    assert optaxs(x, jnp.array([0, 3, -100], np.int16), where=jnp.array([True, True, False])).tolist()[2] == 0
    # Nothing is left of it.
    same(ours.cross_entropy(x, jnp.array([0, 3, -100])), np.array([np.log(4), np.log(4), 0], np.float32))


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


@pytest.mark.parametrize(
    "choices",
    [
        {"axis": 1, "b": "b"},
        {"axis": 1, "b": "b", "keepdims": True, "return_sign": True},
        {"b": "b", "where": "where", "return_sign": True},
        {"axis": (0, 2), "return_sign": True},
        {"axis": -1, "b": 2},
        {"axis": -1, "b": np.arange(6)[:, None]},
        {"axis": 1, "b": np.zeros(3), "return_sign": True},
    ],
)
def test_weighted_sums_and_their_signs(device, choices):
    a, b = jnp.asarray(logits((4, 6, 3))), jnp.asarray(logits((6, 3), seed=1)).at[0].set(0)
    given = {"b": b, "where": np.random.default_rng(0).random((4, 6, 1)) < 0.6}
    choices = {name: given[name] if isinstance(value, str) else value for name, value in choices.items()}
    found, expected = (jax.tree.leaves(f(a, **choices)) for f in (ours.logsumexp, jax.nn.logsumexp))
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    # As JAX passes them.
    same(ours.logsumexp(a, 1, b, True, True)[1], jax.nn.logsumexp(a, 1, b, True, True)[1])


def test_derivatives_of_weighted_sums(device):
    a, b = jnp.asarray(logits((4, 6), scale=1.0)), jnp.asarray(logits((4, 6), seed=1)).at[:, 0].set(0)

    def value(f):
        return lambda a, b: f(a, 1, b, return_sign=True)[0].sum()

    found, expected = (jax.jit(jax.grad(value(f), (0, 1)))(a, b) for f in (ours.logsumexp, jax.nn.logsumexp))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_weights_of_any_dtype(device):
    a = jnp.asarray(logits((4, 6), ml_dtypes.bfloat16))
    assert ours.logsumexp(a, -1, 2.0).dtype == ml_dtypes.bfloat16
    assert ours.logsumexp(a, -1, np.full(6, 2, np.float32)).dtype == np.float32
    # What is multiplied by 0 is nothing, and NaN is NaN.
    row = jnp.array([1.0, np.nan])
    assert ours.logsumexp(row, b=jnp.array([1.0, 0.0])) == 1
    assert np.isnan(ours.logsumexp(row, b=jnp.array([2.0, 1.0]), return_sign=True)).all()
    assert np.isnan(ours.logsumexp(jnp.zeros(2), b=jnp.array([1.0, np.nan]), return_sign=True)).all()


@pytest.mark.parametrize("axis", [0, (1, 2), (2, 1)])
@pytest.mark.parametrize("masked", ["elements", "rows", "broadcast", "nothing"])
def test_losses_by_the_name_of_optax(device, axis, masked):
    x, rng = logits((5, 4, 3)), np.random.default_rng(0)
    several = isinstance(axis, tuple)
    # Classes are counted in the order of the axes.
    rows = x.transpose(0, *axis).reshape(5, 12) if several else x.transpose(1, 2, 0)
    n, shape = rows.shape[-1], rows.shape[:-1]
    target = rng.integers(0, n, shape).astype(np.int32)
    where = {
        "elements": rng.random(x.shape) < 0.7, "rows": rng.random(shape) < 0.5,
        "broadcast": rng.random((1, 4, 1)) < 0.7, "nothing": np.zeros((1, 1, 1), bool),
    }[masked]  # fmt: skip
    counted = np.broadcast_to(where[..., None], rows.shape) if masked == "rows" else np.broadcast_to(where, x.shape)
    if masked != "rows":
        counted = counted.transpose(0, *axis).reshape(5, 12) if several else counted.transpose(1, 2, 0)
    with np.errstate(divide="ignore"):
        total = np.log((np.exp(rows.astype(np.float64)) * counted).sum(-1))
    expected = np.where(counted.any(-1), total - np.take_along_axis(rows, target[..., None], -1)[..., 0], 0)
    found = jax.jit(lambda x: ours.softmax_cross_entropy_with_integer_labels(x, target, axis, where))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
    dx = jax.grad(lambda x: ours.softmax_cross_entropy_with_integer_labels(x, target, axis, where).sum())(x)
    assert np.isfinite(dx).all()


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
        (lambda x: ours.logsumexp(x, b="2"), TypeError, "b must be an array of real numbers, not str"),
        (lambda x: ours.logsumexp(x, b=1j), TypeError, "b has dtype complex64, but is an array of real numbers"),
        (
            lambda x: ours.logsumexp(x, b=np.ones(4)),
            ValueError,
            "b has shape (4,), which does not broadcast with a of (2, 3)",
        ),
        (lambda x: ours.logsumexp(x, keepdims=1), TypeError, "keepdims must be True or False, not 1"),
        (
            lambda x: ours.softmax_cross_entropy_with_integer_labels(x, np.zeros(2, int), -1, np.ones(3, bool)),
            ValueError,
            "where has shape (3,), which does not broadcast to labels of (2,)",
        ),
        (
            lambda x: ours.softmax_cross_entropy_with_integer_labels(x, np.zeros((), int), (0, 0)),
            ValueError,
            "axis (0, 0) names an axis of logits twice",
        ),
        (
            lambda x: ours.logsumexp(x, where=np.ones(4, bool)),
            ValueError,
            "where has shape (4,), which does not broadcast to a of (2, 3)",
        ),
        (lambda x: ours.cross_entropy(1.0, 0), ValueError, "logits have rank 0, but need an axis of classes"),
        (
            lambda x: ours.cross_entropy(x, np.zeros(3, int)),
            ValueError,
            "labels have shape (3,), but logits of (2, 3) with classes along axis -1 need (2,)",
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


def test_without_jax_one_sentence_says_what_to_install(environment, device):
    program = """
        import sys
        sys.modules["jax"] = None
        try:
            import maxsoftmax.jax
        except ImportError as error:
            print(error)
    """
    assert run(program, environment) == "maxsoftmax.jax needs JAX: pip install 'maxsoftmax[jax]'\n"
