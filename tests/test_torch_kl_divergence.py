"""The KL divergence for torch, and its gradients, against torch's own functions in float64."""

import pytest
from torch_tensors import TOLERANCE, F, normal, ours, torch, torch_device


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


def by_torch(x, teacher, dim=-1, temperature=1.0, reverse=False):
    log_p, log_q = (torch.log_softmax(z / temperature, dim) for z in ((x, teacher) if reverse else (teacher, x)))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim)


def close(found, reference, dtype):
    scale = max(1.0, reference.abs().max().item())
    torch.testing.assert_close(found.double(), reference, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype] * scale)


def pair(shape, place, dtype=torch.float32):
    return normal(*shape, dtype=dtype, device=place), normal(*shape, dtype=dtype, device=place, seed=5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "dim"), [((5,), 0), ((7, 33), 1), ((7, 33), 0), ((3, 40, 5), 1), ((3, 50_257), -1)])
@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_gradients_of_both(place, dtype, shape, dim, reverse):
    given = pair(shape, place, dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    options = {"temperature": 1.7, "reverse": reverse}
    kl, reference = ours.kl_divergence(*given, dim, **options), by_torch(*exact, dim, **options)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert kl.dtype is wide
    close(kl.detach(), reference.detach(), wide)
    upstream = normal(*kl.shape, device=place, seed=2, scale=1).detach()
    gradients = torch.autograd.grad(kl, given, upstream.to(wide))
    for dx, dexact, x in zip(gradients, torch.autograd.grad(reference, exact, upstream.double()), given, strict=True):
        assert (dx.dtype, dx.stride()) == (dtype, x.stride())
        close(dx, dexact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1000, 4097])
def test_addresses_change_no_bit(place, n, dtype):
    """Whether both begin alike between two multiples of 16 bytes, or not."""
    x, teacher = (t.detach() for t in pair((3, n), place, dtype))

    def found(*given):
        student = given[0].requires_grad_()
        kl = ours.kl_divergence(student, given[1])
        return kl.detach(), torch.autograd.grad(kl.sum(), student)[0]

    def moved(t, by):
        return torch.empty(t.numel() + by, dtype=dtype, device=place)[by:].view_as(t).copy_(t)

    whole = found(x.clone(), teacher)
    for steps in ((1, 1), (1, 0), (0, 3), (2, 5)):
        for mine, reference in zip(found(*map(moved, (x, teacher), steps)), whole, strict=True):
            assert torch.equal(mine, reference)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_differences(reverse):
    given = pair((3, 5), "cpu", torch.float64)

    def function(x, teacher):
        return ours.kl_divergence(x, teacher, temperature=0.7, reverse=reverse)

    assert torch.autograd.gradcheck(function, given, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, given)


def test_operators_are_as_torch_wants_them():
    given, operators = pair((3, 5), "cpu"), torch.ops.maxsoftmax
    torch.library.opcheck(operators.kl_divergence.default, (*given, 1, 0.7))
    kl, sums = operators.kl_divergence(*(x.detach() for x in given), 1, 0.7)
    for of_p in (False, True):
        arguments = (*given, sums, kl.clone().requires_grad_(), 1, 0.7, of_p)
        torch.library.opcheck(operators.kl_divergence_backward.default, arguments)


def test_compiled_and_transformed(place):
    x, teacher = (t.detach() for t in pair((3, 4, 9), place))

    def mine(x, teacher):
        return ours.kl_divergence(x, teacher, temperature=2.0).square().sum()

    def theirs(x, teacher):
        return by_torch(x, teacher, temperature=2.0).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    student = x.clone().requires_grad_()
    expected = torch.func.grad(theirs)(x, teacher)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(student, teacher), student)[0], expected, rtol=1e-5, atol=1e-5
    )
    for transform in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(f))):
        torch.testing.assert_close(*(transform(f)(x, teacher) for f in (mine, theirs)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        *(torch.func.jacfwd(lambda x, f=f: f(x, teacher))(x) for f in (mine, theirs)), rtol=1e-5, atol=1e-5
    )


LAYOUTS = {
    "turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "steps": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_teacher", LAYOUTS)
def test_tensors_lie_as_they_like(place, layout, of_teacher):
    x, teacher = (t.detach() for t in pair((4, 6, 5), place))
    given = LAYOUTS[layout](x).requires_grad_(), LAYOUTS[of_teacher](teacher).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in given]
    gradients = torch.autograd.grad(ours.kl_divergence(*given, 1).square().sum(), given)
    for dx, dexact in zip(gradients, torch.autograd.grad(by_torch(*exact, 1).square().sum(), exact), strict=True):
        close(dx, dexact, torch.float32)


X = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"x": [[0.0]]}, TypeError, "x must be a torch.Tensor, not a list"),
        ({"teacher": [[0.0]]}, TypeError, "teacher must be a torch.Tensor, not a list"),
        ({"x": X[0, 0], "teacher": X[0, 0]}, ValueError, "x has rank 0, but logits need a dimension of probabilities"),
        ({"teacher": X.double()}, TypeError, "teacher has dtype float64, but x has float32"),
        ({"teacher": X[:2]}, ValueError, r"teacher has shape \(2, 5\), but x has \(3, 5\)"),
        ({"teacher": X.to("meta")}, ValueError, "teacher is on meta, but x is on cpu"),
        ({"dim": 2}, IndexError, "dim 2 is out of bounds for x of rank 2"),
        ({"temperature": -1.0}, ValueError, "temperature must be a positive, finite number"),
        ({"reverse": None}, TypeError, "reverse must be True or False"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(wrong, error, words):
    with pytest.raises(error, match=words):
        ours.kl_divergence(**{"x": X, "teacher": X, **wrong})


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_of_nothing(place, shape):
    x = torch.zeros(shape, device=place, requires_grad=True)
    kl = ours.kl_divergence(x, torch.zeros(shape, device=place))
    assert kl.shape == shape[:1]
    assert kl.isnan().all()
    assert torch.autograd.grad(kl.sum(), x)[0].shape == shape
