"""Arrays as MAX's buffers, and back; of bfloat16, which NumPy does not know, too."""

import ml_dtypes
import numpy as np
from max.driver import Buffer
from max.dtype import DType


def known(dtype):
    """Returns MAX's dtype of one of NumPy's."""
    return DType.bfloat16 if dtype == ml_dtypes.bfloat16 else DType.from_numpy(np.dtype(dtype))


def buffer_of(x):
    """Returns a copy of an array as MAX takes it."""
    bits = x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x
    return Buffer.from_numpy(bits.copy()).view(known(x.dtype), x.shape)


def array_of(buffer):
    """Returns a result as NumPy has it."""
    if buffer.dtype != DType.bfloat16:
        return buffer.to_numpy()
    return buffer.view(DType.uint16, buffer.shape).to_numpy().view(ml_dtypes.bfloat16)
