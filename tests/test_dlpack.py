import array_api_strict
import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
from contract import check, logits
from max.driver import Buffer
from max.dtype import DType
from maxsoftmax import runtime


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
