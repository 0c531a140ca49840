"""The logarithms of tokens' probabilities without the logits of all rows, for torch, against float64."""

import contextlib

import pytest
from torch_tensors import TOLERANCE, F, normal, ours, torch, torch_device

DTYPES = [pytest.param(d, marks=[pytest.mark.slow] * (d is torch.float16)) for d in TOLERANCE]


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


def reference(hidden, weight, tokens, bias, *, temperature=1.0, softcap=None):
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    every = torch.log_softmax(logits / temperature, -1)
    several = tokens.ndim == hidden.ndim
    found = every.gather(-1, tokens.long() if several else tokens.long().unsqueeze(-1))
    return found if several else found.squeeze(-1), -(every.exp() * every).sum(-1)


def sampled(place, dtype=torch.float32, each=0, *, rows=(4, 9), n=130, features=24):
    tensors = (
        normal(*rows, features, dtype=dtype, device=place, scale=1),
        normal(n, features, dtype=dtype, device=place, seed=3, scale=0.5),
        normal(n, dtype=dtype, device=place, seed=4, scale=1),
    )
    generator = torch.Generator().manual_seed(1)
    shape = (*rows, each) if each else rows
    return tensors, torch.randint(n, shape, generator=generator, dtype=torch.int32).to(place)


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 5.0, "temperature": 2.0}], ids=str)
@pytest.mark.parametrize("each", [0, 3])
@pytest.mark.parametrize("chunk", [None, 7])
def test_values_and_gradients(place, dtype, options, each, chunk):
    tensors, tokens = sampled(place, dtype, each)
    hidden, weight, bias = tensors
    found = ours.linear_token_log_probs(hidden, weight, tokens, bias, entropy=True, chunk=chunk, **options)
    alone = ours.linear_token_log_probs(hidden, weight, tokens, bias, chunk=chunk, **options)
    assert torch.equal(alone, found[0])
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = reference(*exact[:2], tokens, exact[2], **options)
    upstream = [normal(*t.shape, device=place, seed=9 + i, scale=1).detach().double() for i, t in enumerate(expected)]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (torch.float64 if dtype is torch.float64 else torch.float32, theirs.shape)
        assert error(mine.detach(), theirs.detach()) <= 4 * TOLERANCE[dtype]
    gradients = torch.autograd.grad(found, tensors, [g.to(t.dtype) for g, t in zip(upstream, found, strict=True)])
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, exact, upstream), strict=True):
        assert (mine.dtype, mine.shape) == (dtype, theirs.shape)
        assert error(mine, theirs) <= 8 * TOLERANCE[dtype]


def test_without_a_bias_or_rows(place):
    (hidden, weight, _), tokens = sampled(place)
    found = ours.linear_token_log_probs(hidden, weight, tokens)
    expected, _ = reference(hidden, weight, tokens, None)
    torch.testing.assert_close(found, expected)
    empty = ours.linear_token_log_probs(hidden[:0], weight, tokens[:0])
    assert empty.shape == (0, 9)
    assert (torch.autograd.grad(empty.sum(), weight)[0] == 0).all()


def test_only_what_wants_a_gradient_has_one(place):
    tensors, tokens = sampled(place)
    upstream = normal(*tokens.shape, device=place, seed=9).detach()
    hidden, weight, bias = tensors
    whole = torch.autograd.grad(ours.linear_token_log_probs(hidden, weight, tokens, bias), tensors, upstream)
    for i in range(3):
        given = [t.detach().requires_grad_(i == j) for j, t in enumerate(tensors)]
        found = ours.linear_token_log_probs(*given[:2], tokens, given[2])
        assert torch.equal(torch.autograd.grad(found, given[i], upstream)[0], whole[i])


def test_compiled(place):
    tensors, tokens = sampled(place)

    def function(hidden, weight, bias):
        log_probs, entropy = ours.linear_token_log_probs(hidden * 2, weight, tokens, bias, entropy=True)
        return log_probs.square().sum() + entropy.sum()

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, plain = (torch.autograd.grad(f(*tensors), tensors) for f in (compiled, function))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_the_operator_is_as_torch_wants_it():
    (hidden, weight, bias), tokens = sampled("cpu", rows=(6,), n=30, features=8)
    arguments = hidden, weight, tokens, bias, None, None, 0.7, True, 5.0, 4, torch.float32, [False] * 3
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.maxsoftmax.linear_token_log_probs.default, arguments, test_utils=tests)


H, W, T = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"weight": W.t()}, ValueError, r"weight has shape \(4, 5\), but hidden of \(3, 4\) needs \(n, 4\)"),
        ({"tokens": T[:2]}, ValueError, r"tokens has shape \(2,\), but hidden of \(3, 4\) needs \(3,\), or \(3, k\)"),
        ({"tokens": T.float()}, TypeError, "tokens has dtype float32, but classes are int64 or int32"),
        ({"temperature": 0}, ValueError, "temperature must be a positive, finite number, not 0"),
        ({"entropy": 1}, TypeError, "entropy must be True or False, not 1"),
        ({"chunk": 0}, ValueError, "chunk must be a positive number of rows, not 0"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(wrong, error, words):
    with pytest.raises(error, match=words):
        ours.linear_token_log_probs(**{"hidden": H, "weight": W, "tokens": T, **wrong})


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.overrides.BaseTorchFunctionMode])
def test_a_second_derivative_is_refused(mode):
    hidden = H.clone().requires_grad_()
    # A mode sees an operator, which has a way of its own.
    with mode():
        log_probs = ours.linear_token_log_probs(hidden, W, T).sum()
    (gradient,) = torch.autograd.grad(log_probs, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_token_log_probs has no second derivative"):
        gradient.square().sum().backward()
