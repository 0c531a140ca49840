"""Where tensors lie: nothing is copied that the kernels can walk, and results go where they are told."""

import math

import maxsoftmax
import pytest
from torch_tensors import ALONG, close, normal, ours, torch, torch_device

memory = ours._memory


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


DENSE = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "transposed": lambda: torch.randn(3, 2).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
    "one of a dimension": lambda: torch.randn(2, 6, 4)[:, :1].as_strided((2, 1, 4), (4, 99, 1)),
    "from an odd place": lambda: torch.randn(13)[1:].view(3, 4),
}


@pytest.mark.parametrize("layout", DENSE)
def test_without_gaps_nothing_is_copied(place, layout):
    x = DENSE[layout]() if place == "cpu" else torch.empty_like(DENSE[layout](), device=place).normal_()
    assert memory.dense(x)[0] is x
    for dim in range(-x.ndim, x.ndim):
        for mine, theirs in ALONG.values():
            y = mine(x, dim)
            assert y.stride() == x.stride()
            close(y, theirs(x, dim))


@pytest.mark.parametrize("view", [lambda x: x[::2], lambda x: x[:, :1].expand(6, 7), lambda x: x.t()[1:]])
def test_copies_keep_the_order_of_dimensions(place, view):
    x = view(torch.randn(6, 4, device=place))
    y = ours.softmax(x)
    assert y.stride() == torch.empty_like(x).stride()
    close(y, x.softmax(-1))


@pytest.mark.parametrize("dtype", memory.NAMES)
@pytest.mark.parametrize("layout", DENSE)
def test_memory_at_the_same_distance_from_a_vector(dtype, layout):
    x = DENSE[layout]().to(dtype)
    for distance in range(0, 16, x.element_size()):
        y = memory.shifted(x, distance)
        assert y.data_ptr() % 16 == (torch.empty(1).data_ptr() + distance) % 16
        assert (y.shape, y.stride(), y.dtype, y._base) == (x.shape, x.stride(), x.dtype, None)
        y.copy_(x)
        assert (y == x).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [1, 3, 4])
def test_a_result_has_the_alignment_of_its_logits(dtype, start):
    x = torch.randn(start + 40 * 1000, device="cuda").to(dtype)[start:].view(40, 1000).requires_grad_()
    y = ours.softmax(x)
    assert y.data_ptr() % 16 == x.data_ptr() % 16
    close(y.detach(), x.detach().softmax(-1))
    (dx,) = torch.autograd.grad(y.mul(2).square().sum(), x)
    expected = torch.autograd.grad(torch.softmax(x, -1).mul(2).square().sum(), x)[0]
    close(dx, expected)
    # Nobody has kept it, so that it may be changed in place.
    close(ours.log_softmax(ours.softmax(x.detach()).mul_(2)), (x.detach().softmax(-1) * 2).log_softmax(-1))


def test_bits_are_those_of_arrays():
    for shape in ((4, 1000), (3, 5, 7)):
        x = normal(*shape).detach()
        for name, (mine, _) in ALONG.items():
            for dim in range(-len(shape), len(shape)):
                array = getattr(maxsoftmax, name)(x.numpy(), axis=dim)
                assert torch.equal(mine(x, dim), torch.from_numpy(array))
    x, target = normal(6, 5).detach(), torch.arange(6) % 5
    loss = maxsoftmax.cross_entropy(x.numpy(), target.numpy())
    assert ours.cross_entropy(x, target).item() == loss.item()


def test_a_sign_or_zeros_that_torch_had_put_off():
    x = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    close(ours.softmax(x), x.softmax(-1))
    zeros = torch._efficientzerotensor(3, 4)
    assert (ours.softmax(zeros) == 0.25).all()


def test_tensors_without_memory_have_results_without_memory():
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    y = ours.softmax(x)
    assert (y.shape, y.device.type) == ((3, 4), "meta")
    loss = ours.cross_entropy(x, torch.zeros(3, device="meta", dtype=torch.int64))
    assert (loss.shape, loss.device.type) == ((), "meta")
    loss.backward()


def test_shapes_are_forgotten_when_they_are_too_many(monkeypatch):
    monkeypatch.setattr(memory, "MOST_CALLS", 4)
    for n in range(1, 12):
        x = torch.randn(2, n)
        close(ours.softmax(x), x.softmax(-1))


# The argument out.


@pytest.mark.parametrize("name", ALONG)
def test_a_result_in_a_tensor_that_is_there(place, name):
    mine, theirs = ALONG[name]
    x = normal(6, 8, device=place).detach()
    expected = theirs(x, 1)
    for out in (torch.empty_like(x), torch.empty(0, device=place), torch.empty(8, 6, device=place).t()):
        version = out._version
        assert mine(x, 1, out=out) is out
        assert out._version > version
        close(out, expected)
    steps = torch.zeros(6, 16, device=place)
    mine(x, 1, out=steps[:, ::2])
    close(steps[:, ::2].contiguous(), expected)
    assert (steps[:, 1::2] == 0).all()
    with pytest.warns(UserWarning, match=r"out has shape \(3,\) and is given that of x, \(6, 8\)"):
        close(mine(x, 1, out=torch.empty(3, device=place)), expected)
    memory_of_both = torch.cat([x.flatten(), x.new_zeros(8)])
    mine(memory_of_both[:48].view(6, 8), 1, out=memory_of_both[8:].view(6, 8))
    close(memory_of_both[8:].view(6, 8).clone(), expected)
    close(mine(x, 1, out=x), expected)


def test_a_result_of_another_dtype(place):
    x = normal(6, 8, dtype=torch.bfloat16, device=place).detach()
    out = torch.empty(6, 8, device=place)
    ours.softmax(x, -1, torch.float32, out=out)
    close(out, x.softmax(-1, torch.float32))


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        ([0.0], TypeError, "out must be a torch.Tensor, not a list"),
        (torch.empty(2, 3, dtype=torch.float64), TypeError, "out has dtype float64, but the result has float32"),
        (torch.empty(2, 3, device="meta"), ValueError, "out is on meta, but x is on cpu"),
        (torch.empty(2, 3, requires_grad=True), RuntimeError, "out has no gradient, but out requires one"),
    ],
)
def test_what_cannot_be_a_result(out, error, words):
    with pytest.raises(error, match=words):
        ours.softmax(torch.zeros(2, 3), out=out)
    with pytest.raises(RuntimeError, match="out has no gradient, but x requires one"):
        ours.log_softmax(torch.zeros(2, 3, requires_grad=True), out=torch.empty(2, 3))
    assert math.isclose(ours.softmax(torch.zeros(2, 3)).sum().item(), 2, rel_tol=1e-6)
