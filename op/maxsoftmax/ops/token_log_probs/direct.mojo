"""The tokens' logarithms, the entropy and their gradient on memory: what graphs, libraries and Mojo programs call."""

from ...io.rows import Rows, Source, Target
from ...math.online import accumulator
from ...queue import Queue
from .cpu import gradients_on_cpu, log_probs_on_cpu
from .gpu import log_probs_on_gpu
from .gpu_backward import gradients_on_gpu
from .row import Asked


def token_log_probs[
    dtype: DType, //, target: StaticString, contiguous: Bool = False
](
    log_probs: Target[accumulator[dtype]()],
    entropy: Optional[Target[accumulator[dtype]()]],
    sums: Target[accumulator[dtype]()],
    x: Source[dtype],
    asked: Asked,
    rows: Rows,
    queue: Queue,
) raises:
    """Writes ln p of some tokens of every row, and if it is wanted the entropy of the row.

    Parameters:
        dtype: Dtype of the logits: float32, bfloat16, float16 or float64.
        target: "cpu" or "gpu".
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        log_probs: (rows, asked.each); NaN of what is no token of the row.
        entropy: (rows,), -Σ p ln p, if it is wanted.
        sums: (rows, 3), what the gradient needs: m, d = Σ e^(z - m) and, if the entropy is wanted, that.
        x: Logits.
        asked: The tokens, and what logits are divided by.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.count() == 0:
        return

    @inline(.always)
    def compute[contiguous: Bool]() raises {imm}:
        comptime if target == "cpu":
            log_probs_on_cpu[dtype, contiguous](
                log_probs, entropy, sums, x, asked, rows, queue
            )
        else:
            log_probs_on_gpu[dtype, contiguous](
                log_probs, entropy, sums, x, asked, rows, queue
            )

    if contiguous or rows.inner == 1:
        compute[True]()
        return
    comptime if not contiguous:
        compute[False]()


def token_log_probs_backward[
    dtype: DType, //, target: StaticString, contiguous: Bool = False
](
    dx: Target[dtype],
    x: Source[dtype],
    sums: Source[accumulator[dtype]()],
    asked: Asked,
    dlog_probs: Source[accumulator[dtype]()],
    dentropy: Optional[Source[accumulator[dtype]()]],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the gradient of the logits of `token_log_probs`.

    Parameters:
        dtype: Dtype of the logits.
        target: "cpu" or "gpu".
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradient of the logits, not in their memory. What is no token of its row has none if its own is 0, and else makes the
            row NaN.
        x: Logits.
        sums: What `token_log_probs` wrote.
        asked: As it was there.
        dlog_probs: (rows, asked.each), the gradients of the logarithms.
        dentropy: (rows,), those of entropies, which then have to be in `sums`; nowhere if there are none.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.is_empty():
        return

    @inline(.always)
    def compute[contiguous: Bool]() raises {imm}:
        comptime if target == "cpu":
            gradients_on_cpu[dtype, contiguous](
                dx, x, sums, asked, dlog_probs, dentropy, rows, queue
            )
        else:
            gradients_on_gpu[dtype, contiguous](
                dx, x, sums, asked, dlog_probs, dentropy, rows, queue
            )

    if contiguous or rows.inner == 1:
        compute[True]()
        return
    comptime if not contiguous:
        compute[False]()
