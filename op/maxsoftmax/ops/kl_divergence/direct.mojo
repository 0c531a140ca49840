"""The divergence and its gradient on memory: what graphs, libraries and Mojo programs call."""

from ...io.rows import Rows, Source, Target
from ...math.online import accumulator
from ...queue import Queue
from .cpu import divergences_on_cpu, gradients_on_cpu
from .gpu import divergences_on_gpu
from .gpu_backward import gradients_on_gpu


def kl_divergence[
    dtype: DType, //, target: StaticString, contiguous: Bool = False
](
    kl: Target[accumulator[dtype]()],
    sums: Target[accumulator[dtype]()],
    p: Source[dtype],
    q: Source[dtype],
    temperature: Float64,
    rows: Rows,
    queue: Queue,
) raises:
    """Writes D(p | q) of every row.

    Parameters:
        dtype: Dtype of the logits: float32, bfloat16, float16 or float64.
        target: "cpu" or "gpu".
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        kl: (rows,); infinite where q is 0 and p is not, NaN where either has no probabilities.
        sums: (rows, 5), what the gradient needs: m and d of p, those of q, and the divergence.
        p: Logits of p.
        q: Logits of q.
        temperature: What logits are divided by.
        rows: How the memory of each is divided into rows.
        queue: Where to compute.
    """
    if rows.count() == 0:
        return
    var factor = Scalar[accumulator[dtype]()](1 / temperature)

    @inline(.always)
    def compute[contiguous: Bool]() raises {imm}:
        comptime if target == "cpu":
            divergences_on_cpu[dtype, contiguous](
                kl, sums, p, q, factor, rows, queue
            )
        else:
            divergences_on_gpu[dtype, contiguous](
                kl, sums, p, q, factor, rows, queue
            )

    if contiguous or rows.inner == 1:
        compute[True]()
        return
    comptime if not contiguous:
        compute[False]()


def kl_divergence_backward[
    dtype: DType, //, target: StaticString, contiguous: Bool = False
](
    dx: Target[dtype],
    p: Source[dtype],
    q: Source[dtype],
    sums: Source[accumulator[dtype]()],
    dkl: Optional[Source[accumulator[dtype]()]],
    of_p: Bool,
    temperature: Float64,
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the gradient of the logits of p, or of q.

    Parameters:
        dtype: Dtype of the logits.
        target: "cpu" or "gpu".
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradient of the logits.
        p: Logits of p.
        q: Logits of q.
        sums: What `kl_divergence` wrote.
        dkl: (rows,), the gradients of the divergences; 1 where there are none.
        of_p: Whether the gradient is that of p.
        temperature: What logits are divided by.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.is_empty():
        return
    var factor = Scalar[accumulator[dtype]()](1 / temperature)

    @inline(.always)
    def compute[contiguous: Bool]() raises {imm}:
        comptime if target == "cpu":
            gradients_on_cpu[dtype, contiguous](
                dx, p, q, sums, dkl, of_p, factor, rows, queue
            )
        else:
            gradients_on_gpu[dtype, contiguous](
                dx, p, q, sums, dkl, of_p, factor, rows, queue
            )

    if contiguous or rows.inner == 1:
        compute[True]()
        return
    comptime if not contiguous:
        compute[False]()
