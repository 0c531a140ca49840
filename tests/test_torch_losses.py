"""Cross entropy for torch, against torch's own."""

import pytest
from torch_tensors import TOLERANCE, F, classes, close, normal, ours, probabilities, same, torch, torch_device

DTYPES = [pytest.param(d, marks=[pytest.mark.slow] * (d is torch.float16)) for d in TOLERANCE]
SHAPES = [((9,), ()), ((7, 9), (7,)), ((3, 9, 4), (3, 4)), ((2, 9, 3, 4), (2, 3, 4))]


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(place, dtype, reduction):
    target = classes(20, n=130, device=place)
    target[::7] = -100
    x = normal(20, 130, dtype=dtype, device=place)
    same(
        lambda x: ours.cross_entropy(x, target, reduction=reduction),
        lambda x: F.cross_entropy(x, target, reduction=reduction),
        x,
    )


@pytest.mark.parametrize(("shape", "of_target"), SHAPES)
def test_classes_are_along_dimension_1(place, shape, of_target):
    target = classes(*of_target, n=9, device=place)
    same(lambda x: ours.cross_entropy(x, target), lambda x: F.cross_entropy(x, target), normal(*shape, device=place))


@pytest.mark.parametrize(("ignored", "smoothing"), [(2, 0.0), (-100, 0.2), (2, 0.3), (-100, 1.0)])
def test_choices(place, ignored, smoothing):
    target = classes(20, n=7, device=place)
    options = {"ignore_index": ignored, "label_smoothing": smoothing}
    x = normal(20, 7, device=place)
    same(lambda x: ours.cross_entropy(x, target, **options), lambda x: F.cross_entropy(x, target, **options), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "of_target"), SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_classes_have_weights(place, dtype, shape, of_target, reduction, smoothing):  # noqa: PLR0917
    target = classes(*of_target, n=9, device=place)
    if target.ndim:
        target[0] = -100
    weight = torch.rand(9, generator=torch.Generator().manual_seed(5)).to(place, dtype)
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    x = normal(*shape, dtype=dtype, device=place)
    same(lambda x: ours.cross_entropy(x, target, **options), lambda x: F.cross_entropy(x, target, **options), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [shape for shape, _ in SHAPES])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_targets_may_be_probabilities(place, dtype, shape, reduction, smoothing, weighted):  # noqa: PLR0917
    target = probabilities(*shape, dtype=dtype, device=place)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.arange(9, device=place).to(dtype) / 8
    x = normal(*shape, dtype=dtype, device=place)
    same(lambda x: ours.cross_entropy(x, target, **options), lambda x: F.cross_entropy(x, target, **options), x)


def test_probabilities_have_a_gradient_too(place):
    x, target = normal(3, 5, device=place), probabilities(3, 5, device=place).requires_grad_()
    mine = torch.autograd.grad(ours.cross_entropy(x, target), target)
    theirs = torch.autograd.grad(F.cross_entropy(x, target), target)
    close(mine[0], theirs[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize("options", [{}, {"weight": torch.ones(5)}])
def test_dtypes_of_classes(place, dtype, options):
    target, x = classes(6, n=5, device=place), normal(6, 5, device=place)
    options = {name: value.to(place) for name, value in options.items()}
    same(
        lambda x: ours.cross_entropy(x, target.to(dtype), **options),
        lambda x: F.cross_entropy(x, target, **options),
        x,
    )


@pytest.mark.parametrize("size_average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_old_arguments_by_their_places(place, size_average, reduce):
    target, x = classes(6, n=5, device=place), normal(6, 5, device=place)
    arguments = (target, None, size_average, -100, reduce, "sum", 0.1)
    same(lambda x: ours.cross_entropy(x, *arguments), lambda x: F.cross_entropy(x, *arguments), x)


def test_an_old_name_of_the_mean():
    target, x = classes(6, n=5), normal(6, 5)
    with pytest.warns(UserWarning, match="deprecated"):
        loss = ours.cross_entropy(x, target, reduction="elementwise_mean")
    close(loss, F.cross_entropy(x, target))


def test_a_share_is_not_rounded_on_its_way(place):
    target = classes(20, n=7, device=place)
    x = normal(20, 7, dtype=torch.float64, device=place).detach()
    close(ours.cross_entropy(x, target, label_smoothing=0.2), F.cross_entropy(x, target, label_smoothing=0.2))


@pytest.mark.parametrize("weighted", [False, True])
def test_without_a_row_that_counts(place, weighted):
    target = torch.full((4,), -100, device=place)
    x = normal(4, 6, device=place)
    loss = ours.cross_entropy(x, target, torch.ones(6, device=place) if weighted else None)
    assert loss.isnan()
    if not weighted:
        (dx,) = torch.autograd.grad(loss, x)
        assert (dx == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_rows(place, reduction, weighted, smoothing):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.ones(5, device=place)
    x = normal(0, 5, device=place)
    for target in (classes(0, n=5, device=place), probabilities(0, 5, device=place)):
        same(
            lambda x, t=target: ours.cross_entropy(x, t, **options),
            lambda x, t=target: F.cross_entropy(x, t, **options),
            x,
        )


LAYOUTS = {
    "contiguous": lambda x: x,
    "classes last": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "reversed": lambda x: x.permute(*range(x.ndim)[::-1]).contiguous().permute(*range(x.ndim)[::-1]),
    "steps": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_target", ["contiguous", "reversed", "steps", "expanded"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_and_targets_lie_as_they_like(place, layout, of_target, reduction):
    target = LAYOUTS[of_target](classes(3, 4, 2, n=5, device=place))
    view = LAYOUTS[layout]
    same(
        lambda x: ours.cross_entropy(view(x), target, reduction=reduction),
        lambda x: F.cross_entropy(view(x), target, reduction=reduction),
        normal(3, 5, 4, 2, device=place),
    )


def test_weights_may_have_steps(place):
    weight, target = torch.rand(10, device=place)[::2], classes(6, n=5, device=place)
    x = normal(6, 5, device=place)
    same(lambda x: ours.cross_entropy(x, target, weight), lambda x: F.cross_entropy(x, target, weight), x)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(5)}])
def test_a_mistake_on_a_gpu_is_not_a_number(options):
    x = normal(3, 5, device="cuda")
    options = {name: value.cuda() if name == "weight" else value for name, value in options.items()}
    losses = ours.cross_entropy(x, torch.tensor([0, 7, 4], device="cuda"), reduction="none", **options)
    assert losses.isnan().tolist() == [False, True, False]


X, T = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"x": [[0.0]]}, TypeError, "x must be a torch.Tensor, not a list"),
        ({"x": X.long()}, TypeError, "x has dtype int64"),
        ({"x": torch.zeros(()), "target": T[0]}, ValueError, "x has rank 0"),
        ({"target": torch.zeros(3, 4)}, ValueError, r"dtype float32 and shape \(3, 4\), but probabilities need"),
        ({"target": torch.zeros(3, 5, dtype=torch.int64)}, ValueError, r"target has shape \(3, 5\), but x of \(3, 5\)"),
        ({"target": torch.zeros(3, dtype=torch.int16)}, TypeError, "target has dtype int16, but classes are"),
        ({"target": [0, 0, 0]}, TypeError, "target must be a torch.Tensor, not a list"),
        ({"target": T[:2]}, ValueError, r"target has shape \(2,\), but x of \(3, 5\) needs \(3,\)"),
        ({"target": T + 5}, ValueError, r"target\[0\] is 5, which is neither a class from 0 to 4 nor ignore_index"),
        ({"target": T + 5, "weight": torch.ones(5)}, ValueError, r"target\[0\] is 5, which is neither a class"),
        ({"target": T.to("meta")}, ValueError, "target is on meta, but x is on cpu"),
        ({"target": X, "ignore_index": 2}, ValueError, "ignore_index 2 has no meaning"),
        ({"weight": [1.0] * 5}, TypeError, "weight must be a torch.Tensor, not a list"),
        ({"weight": torch.ones(4)}, ValueError, r"weight has shape \(4,\), but x of \(3, 5\) needs \(5,\)"),
        ({"weight": torch.ones(5).double()}, TypeError, "weight has dtype float64, but x of float32 needs float32"),
        ({"reduction": "max"}, ValueError, "reduction 'max' does not exist"),
        ({"reduction": ["mean"]}, TypeError, "reduction must be a string"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an integer"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing 2.0 is not from 0 to 1"),
        ({"x": torch.zeros(3, 0)}, ValueError, r"target\[0\] is 0, but x has no classes"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(wrong, error, words):
    with pytest.raises(error, match=words):
        ours.cross_entropy(**{"x": X, "target": T, **wrong})


def test_a_mistake_is_named_by_its_place():
    target = classes(2, 3, 4, n=5)
    target[1, 2, 3] = 9
    for logits in (torch.zeros(2, 5, 3, 4), torch.zeros(4, 3, 5, 2).permute(3, 2, 1, 0)):
        with pytest.raises(ValueError, match=r"target\[1, 2, 3\] is 9, which is neither a class from 0 to 4"):
            ours.cross_entropy(logits, target)
    # As torch's own is.
    with pytest.raises(IndexError, match=r"target is 9, which"):
        ours.cross_entropy(torch.zeros(5), torch.tensor(9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "n"), [((7,), 33), ((3, 5), 40)])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_z_loss_is_a_term_of_the_loss(place, dtype, shape, n, reduction, label_smoothing):  # noqa: PLR0917
    x = normal(shape[0], n, *shape[1:], dtype=dtype, device=place)
    target = classes(*shape, n=n, device=place)
    target.view(-1)[1] = -100
    options = {"reduction": reduction, "label_smoothing": label_smoothing}

    def theirs(x):
        squares = torch.where(target == -100, 0.0, 0.1 * x.logsumexp(1).square())
        more = squares if reduction == "none" else squares.sum()
        more = more / (target != -100).sum() if reduction == "mean" else more
        return F.cross_entropy(x, target, **options) + more

    loss = ours.cross_entropy(x, target, z_loss=0.1, **options)
    exact = x.detach().double().requires_grad_()
    reference = theirs(exact)
    assert loss.dtype is dtype
    close(loss.detach(), reference.detach().to(dtype))
    upstream = normal(*loss.shape, device=place, seed=2, scale=1).detach()
    (dx,) = torch.autograd.grad(loss, x, upstream.to(dtype))
    (dexact,) = torch.autograd.grad(reference, exact, upstream.to(dtype).double())
    close(dx, dexact.to(dtype))


def test_z_loss_has_every_derivative(place):
    x, target = normal(3, 5, dtype=torch.float64, device=place), classes(3, n=5, device=place)

    def mine(x, **options):
        return ours.cross_entropy(x, target, z_loss=0.1, **options)

    assert torch.autograd.gradcheck(lambda x: mine(x, reduction="none"), x)
    assert torch.autograd.gradgradcheck(lambda x: mine(x, reduction="none"), x)
    torch.compiler.reset()
    (eager,) = torch.autograd.grad(mine(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(mine, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.func.grad(mine)(x.detach()), eager)
    torch.testing.assert_close(torch.func.jacfwd(mine)(x.detach()), eager)


def test_z_loss_goes_with_classes_alone():
    x, target = normal(3, 5), classes(3, n=5)
    for wrong, error, words in (
        ({"z_loss": -1.0}, ValueError, "z_loss"),
        ({"z_loss": "much"}, TypeError, "z_loss"),
        ({"z_loss": 0.1, "weight": torch.ones(5)}, ValueError, "z_loss 0.1 does not go with weight"),
        ({"z_loss": 0.1, "target": x.softmax(1)}, ValueError, "z_loss 0.1 does not go with a target of probabilities"),
    ):
        with pytest.raises(error, match=words):
            ours.cross_entropy(**{"x": x, "target": target, **wrong})


def test_a_focal_loss_is_made_of_the_logarithms(place):
    x, target = normal(7, 33, device=place), classes(7, n=33, device=place)
    log_p = ours.token_log_probs(x, target)
    loss = -((1 - log_p.exp()) ** 2 * log_p).mean()
    exact = x.detach().double().requires_grad_()
    p = exact.softmax(1).gather(1, target[:, None])[:, 0]
    reference = -((1 - p) ** 2 * p.log()).mean()
    close(loss.detach(), reference.detach().float())
    close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(reference, exact)[0].float())
