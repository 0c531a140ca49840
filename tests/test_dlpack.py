import itertools

import array_api_strict
import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
from contract import check, logits
from max.driver import Buffer
from max.dtype import DType
from maxsoftmax._graph import runtime


def test_max_buffers_stay_where_they_are(device):
    x = logits((3, 50))
    where = runtime.device(device)
    y = maxsoftmax.softmax(Buffer.from_numpy(x).to(where))
    assert isinstance(y, Buffer)
    assert y.device == where
    check(y.to_numpy(), x)
    buffer = Buffer.from_numpy(logits((3, 4, 5))).to(where)
    check(maxsoftmax.softmax(buffer, axis=(0, 2)).to_numpy(), buffer.to_numpy(), axis=(0, 2))
    check(maxsoftmax.softmax(buffer, axis=1).to_numpy(), buffer.to_numpy(), axis=1)


def test_max_buffers_of_bfloat16(device):
    x = logits((3, 50), ml_dtypes.bfloat16)
    y = maxsoftmax.softmax(Buffer.from_numpy(x.view(np.uint16)).view(DType.bfloat16).to(runtime.device(device)))
    assert y.dtype == DType.bfloat16
    check(y.view(DType.uint16).to_numpy().view(ml_dtypes.bfloat16), x)


def test_any_dlpack_array_comes_back_as_its_kind():
    xp = array_api_strict
    x = logits((3, 4, 50))
    y = maxsoftmax.softmax(xp.asarray(x))
    assert isinstance(y, type(xp.asarray(x)))
    check(np.from_dlpack(y), x)
    turned = xp.permute_dims(xp.asarray(x), (2, 0, 1))
    check(np.from_dlpack(maxsoftmax.softmax(turned, axis=0)), x.transpose(2, 0, 1), axis=0)
    integers = maxsoftmax.softmax(xp.asarray([1, 2, 3]))
    assert integers.dtype == xp.float64


def test_torch_tensors(device):
    torch = pytest.importorskip("torch")
    where = {"cpu": "cpu", "gpu": "cuda"}[device]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for shape, axis in (((3, 50), -1), ((3, 4, 5), 1), ((3, 4, 5), (0, 2)), ((0, 5), -1)):
            x = (torch.randn(shape) * 4).to(dtype).to(where)
            for t in (x, x.transpose(0, 1)):
                y = maxsoftmax.softmax(t, axis=axis)
                assert isinstance(y, torch.Tensor)
                assert (y.dtype, y.device, y.shape) == (t.dtype, t.device, t.shape)
                if dtype == torch.bfloat16:
                    as_bits = lambda a: a.cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # noqa: E731
                    check(as_bits(y), as_bits(t), axis=axis)
                else:
                    check(y.cpu().numpy(), t.cpu().numpy(), axis=axis)
    with pytest.raises(TypeError, match="cannot be shared"):
        maxsoftmax.softmax(torch.randn(3, device=where, requires_grad=True))


def test_torch_tensors_of_every_layout_and_op(device):
    torch = pytest.importorskip("torch")
    where = {"cpu": "cpu", "gpu": "cuda"}[device]
    x = torch.randn(4, 6, 5).to(where)
    target = torch.randint(0, 6, (4, 5), device=where)
    for order in itertools.permutations(range(3)):
        t = x.permute(order).contiguous().permute(*np.argsort(order).tolist())
        assert maxsoftmax.softmax(t, axis=1).stride() == t.stride()
        torch.testing.assert_close(maxsoftmax.log_softmax(t, axis=1), torch.log_softmax(x, 1))
        torch.testing.assert_close(maxsoftmax.logsumexp(t, axis=(0, 2)), torch.logsumexp(x, (0, 2)))
        m, d = maxsoftmax.max_sum(t, axis=0)
        torch.testing.assert_close(m, x.amax(0))
        torch.testing.assert_close(d, (x - x.amax(0)).exp().sum(0))
        y = torch.softmax(x, 1)
        dx = maxsoftmax.softmax_backward(y, t, axis=1)
        torch.testing.assert_close(dx, y * (x - (y * x).sum(1, keepdim=True)))
        loss, pairs = maxsoftmax.cross_entropy_forward(t, target)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, target))
        dx = maxsoftmax.cross_entropy_backward(t, target, pairs)
        written = t.clone()
        assert maxsoftmax.cross_entropy_backward_(written, target, pairs) is written
        torch.testing.assert_close(written, dx, rtol=0, atol=0)
        masked = maxsoftmax.softmax(t, mask=t > 0, scale=0.5, causal=True)
        seen = (x > 0) & torch.ones(6, 5, dtype=bool, device=where).tril(5 - 6)
        expected = torch.softmax((x * 0.5).masked_fill(~seen, -torch.inf), -1).nan_to_num(0)
        torch.testing.assert_close(masked, expected)
    assert maxsoftmax.softmax(torch.arange(4, device=where)).dtype == torch.float64
    assert maxsoftmax.softmax(x[:, ::2], axis=0, device="cpu").device == x.device
    torch.testing.assert_close(maxsoftmax.softmax(x[:, ::2], axis=0, device="cpu"), torch.softmax(x[:, ::2], 0))
    # Arrays of other kinds go along.
    loss = maxsoftmax.cross_entropy(x, target.cpu().numpy())
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, target))


@pytest.mark.gpu
def test_torch_work_that_is_still_queued_is_waited_for():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            x = torch.full((4000, 4000), 7.0, device="cuda")
            torch.cuda._sleep(20_000_000)
            x.copy_(torch.arange(4000, device="cuda", dtype=torch.float32) / 1000)
            y = maxsoftmax.softmax(x)
            torch.testing.assert_close(y, torch.softmax(x, -1))
            del x, y
