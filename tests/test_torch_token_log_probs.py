"""The logarithms of tokens' probabilities for torch, and their gradients, against torch's own functions in float64."""

import numpy as np
import pytest
from test_token_log_probs import SHAPES, tokens_of
from torch_tensors import TOLERANCE, normal, ours, torch, torch_device


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


def by_torch(x, tokens, dim=-1, temperature=1.0):
    """Returns the logarithms and the entropies."""
    all_of = torch.log_softmax(x / temperature, dim)
    several = tokens.ndim == x.ndim
    found = all_of.gather(dim, tokens if several else tokens.unsqueeze(dim))
    return found if several else found.squeeze(dim), torch.special.entr(all_of.exp()).sum(dim)


def close(found, reference, dtype):
    scale = max(1.0, reference.abs().max().item()) if reference.numel() else 1.0
    limit = TOLERANCE[dtype] * scale
    torch.testing.assert_close(found.double(), reference, rtol=TOLERANCE[dtype], atol=limit)


def sampled(shape, dim, each, place, dtype=torch.float32):
    x = normal(*shape, dtype=dtype, device=place)
    return x, torch.from_numpy(tokens_of(shape, dim, each)).to(place)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("each", [None, 5])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients(place, dtype, shape, dim, each, entropy):  # noqa: PLR0917
    x, tokens = sampled(shape, dim, each, place, dtype)
    exact = x.detach().double().requires_grad_()
    found = ours.token_log_probs(x, tokens, dim, temperature=0.7, entropy=entropy)
    found = found if entropy else (found,)
    reference = by_torch(exact, tokens, dim, 0.7)[: len(found)]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    upstream = [normal(*y.shape, device=place, seed=2, scale=1).detach().double() for y in reference]
    for y, of in zip(found, reference, strict=True):
        assert y.dtype == wide
        close(y.detach(), of.detach(), wide)
    (dx,) = torch.autograd.grad(found, x, [g.to(wide) for g in upstream])
    (dexact,) = torch.autograd.grad(reference, exact, upstream)
    assert dx.dtype == dtype
    assert dx.stride() == x.stride()
    close(dx, dexact, dtype)


def test_a_token_may_be_named_twice(place):
    x, tokens = normal(2, 7, device=place), torch.tensor([[3, 3, 3], [6, 0, 6]], device=place)
    upstream = torch.tensor([[1.0, 2.0, -4.0], [1.0, 0.5, 2.0]], device=place)
    (dx,) = torch.autograd.grad(ours.token_log_probs(x, tokens), x, upstream)
    exact = x.detach().double().requires_grad_()
    (dexact,) = torch.autograd.grad(by_torch(exact, tokens)[0], exact, upstream.double())
    close(dx, dexact, torch.float32)


def test_what_is_no_token_has_a_gradient_only_if_somebody_wants_it(place):
    x, tokens = normal(3, 5, device=place), torch.tensor([[0, -100], [5, 4], [1, 2]], device=place)
    found = ours.token_log_probs(x, tokens)
    assert found.isnan().tolist() == [[False, True], [True, False], [False, False]]
    (dx,) = torch.autograd.grad(torch.where(found.isnan(), 0.0, found).sum(), x, retain_graph=True)
    exact = x.detach().double().requires_grad_()
    kept, _ = by_torch(exact, tokens.clamp(0, 4))
    (dexact,) = torch.autograd.grad(torch.where(found.isnan(), 0.0, kept).sum(), exact)
    close(dx, dexact, torch.float32)
    (dx,) = torch.autograd.grad(found[:1].sum(), x)
    assert dx.isnan().any(1).tolist() == [True, False, False]


def test_gradients_of_logits_that_are_infinite(place):
    x = torch.zeros(4, 6, device=place)
    x[0, 2:] = -np.inf
    x[1, 1] = np.nan
    x[2] = -np.inf
    x.requires_grad_()
    found = ours.token_log_probs(x, torch.zeros(4, dtype=torch.int64, device=place), entropy=True)
    (dx,) = torch.autograd.grad([y.sum() for y in found], x)
    assert dx.isnan().all(1).tolist() == [False, True, True, False]
    torch.testing.assert_close(dx[0].cpu(), torch.tensor([0.5, -0.5, 0, 0, 0, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [33, 1000, 50_257])
def test_bits_of_gradients_are_the_rows_own(place, n, dtype):
    x, tokens = sampled((64, n), 1, 2, place, dtype)
    upstream = normal(64, 3, device=place, seed=3).detach()

    def gradient(part):
        rows = x.detach()[part].clone().requires_grad_()
        found = ours.token_log_probs(rows, tokens[part], temperature=0.9, entropy=True)
        return torch.autograd.grad(found, rows, (upstream[part, :2].contiguous(), upstream[part, 2].contiguous()))[0]

    whole = gradient(slice(64))
    for start, stop in ((0, 1), (5, 6), (1, 34), (63, 64)):
        assert torch.equal(gradient(slice(start, stop)), whole[start:stop])


LAYOUTS = {
    "turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "steps": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_tokens", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tensors_lie_as_they_like(place, layout, of_tokens, dim):
    x, tokens = sampled((4, 6, 5), dim, 3, place)
    x, tokens = LAYOUTS[layout](x.detach()).requires_grad_(), LAYOUTS[of_tokens](tokens)
    exact = x.detach().double().requires_grad_()
    found = ours.token_log_probs(x, tokens.int(), dim, entropy=True)
    reference = by_torch(exact, tokens, dim)
    close(found[0].detach(), reference[0].detach(), torch.float32)
    (dx,) = torch.autograd.grad(sum(y.square().sum() for y in found), x)
    (dexact,) = torch.autograd.grad(sum(y.square().sum() for y in reference), exact)
    close(dx, dexact, torch.float32)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("each", [None, 2])
def test_gradients_are_differences(entropy, each):
    x, tokens = sampled((3, 5), 1, each, "cpu", torch.float64)

    def function(x):
        return ours.token_log_probs(x, tokens, temperature=0.7, entropy=entropy)

    assert torch.autograd.gradcheck(function, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("entropy", [False, True])
def test_operators_are_as_torch_wants_them(entropy):
    x, tokens = sampled((3, 5), 1, 2, "cpu")
    operators, choices = torch.ops.maxsoftmax, (1, 0.7, entropy)
    torch.library.opcheck(operators.token_log_probs.default, (x, tokens, *choices))
    log_probs, entropies, sums = operators.token_log_probs(x.detach(), tokens, *choices)
    given = log_probs.clone().requires_grad_(), entropies.clone().requires_grad_()
    # What is checked beside needs the entropies' gradient to be used.
    tests = (
        ("test_schema", "test_faketensor")
        if not entropy
        else ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    )
    torch.library.opcheck(
        operators.token_log_probs_backward.default, (x, tokens, sums, *given, *choices), test_utils=tests
    )


def test_compiled_and_transformed(place):
    x, tokens = sampled((3, 4, 9), 2, None, place)

    def loss(function, x, tokens):
        log_probs, entropy = function(x, tokens)
        return (log_probs - 0.1 * entropy).square().sum()

    def mine(x, tokens):
        return loss(lambda x, t: ours.token_log_probs(x, t, entropy=True), x, tokens)

    def theirs(x, tokens):
        return loss(by_torch, x, tokens)

    torch.compiler.reset()
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    (dx,) = torch.autograd.grad(compiled(x, tokens), x)
    (dtheirs,) = torch.autograd.grad(theirs(x, tokens), x)
    torch.testing.assert_close(dx, dtheirs, rtol=1e-5, atol=1e-5)
    plain = x.detach()
    for transform in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(f))):
        torch.testing.assert_close(*(transform(f)(plain, tokens) for f in (mine, theirs)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        *(torch.func.jacfwd(lambda x, f=f: f(x, tokens))(plain) for f in (mine, theirs)), rtol=1e-5, atol=1e-5
    )


X, T = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"x": [[0.0]]}, TypeError, "x must be a torch.Tensor, not a list"),
        ({"tokens": [0, 0, 0]}, TypeError, "tokens must be a torch.Tensor, not a list"),
        ({"x": torch.zeros(()), "tokens": T[0]}, ValueError, "x has rank 0, but logits need a dimension of tokens"),
        ({"tokens": T.float()}, TypeError, "tokens has dtype float32, but it has to be int64 or int32"),
        ({"tokens": T[:2]}, ValueError, r"tokens has shape \(2,\), but x of \(3, 5\) needs \(3,\), or \(3, k\)"),
        ({"tokens": T.to("meta")}, ValueError, "tokens is on meta, but x is on cpu"),
        ({"dim": 2}, IndexError, "dim 2 is out of bounds for x of rank 2"),
        ({"temperature": -1.0}, ValueError, "temperature must be a positive, finite number"),
        ({"entropy": None}, TypeError, "entropy must be True or False"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(wrong, error, words):
    with pytest.raises(error, match=words):
        ours.token_log_probs(**{"x": X, "tokens": T, **wrong})


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_of_nothing(place, shape):
    x = torch.zeros(shape, device=place, requires_grad=True)
    found, entropy = ours.token_log_probs(x, torch.zeros(shape[0], dtype=torch.int64, device=place), entropy=True)
    assert found.shape == entropy.shape == (shape[0],)
    assert found.isnan().all()
    (dx,) = torch.autograd.grad(found.sum() + entropy.sum(), x)
    assert dx.shape == shape
