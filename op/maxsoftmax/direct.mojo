"""Every op on memory: what graphs, libraries and Mojo programs call.

`x` and the like are row-major memory of (outer, n, inner), of which the axis in the middle is the softmax's; see `Rows`.
On a GPU a call enqueues its kernels and returns; a `DeviceContext` is a `Queue`.
"""

from .ops.finish import Finish
from .kernels import Kernels
from .math.loss import LossOptions, Reduction, Targets, no_class
from .math.online import accumulator
from .queue import Queue
from .io.rows import Rows, Source, Target


def softmax[
    dtype: DType,
    out_dtype: DType,
    //,
    K: Kernels,
    contiguous: Bool = False,
    *,
    algorithm: StaticString = "auto",
    block_size: Int = 128,
    unroll: Int = 4,
](
    y: Target[out_dtype],
    x: Source[dtype],
    rows: Rows,
    queue: Queue,
    out_scale: Float64 = 1,
) raises:
    """Writes softmax of every row of `x`: exp(x - max x) / Σ exp(x - max x).

    Parameters:
        dtype: Dtype of the logits: float32, bfloat16, float16 or float64.
        out_dtype: Dtype of the probabilities, which are rounded once: the same, or by "auto" float32, bfloat16, float16,
            float8_e4m3fn or float8_e5m2.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
        algorithm: "auto", or the name of a kernel that the device has.
        block_size: Threads a block of a GPU kernel chosen by name, a power of two up to 1024.
        unroll: Vectors that a thread of `vector` or `online` has under way at a time.

    Args:
        y: Probabilities; on a GPU not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where to compute.
        out_scale: What probabilities of float8 are multiplied by.
    """
    if rows.is_empty():
        return
    comptime if out_dtype == dtype:
        K.softmax[algorithm, dtype, block_size, unroll, contiguous](
            rebind[Target[dtype]](y), x, rows, queue
        )
    else:
        comptime assert algorithm == "auto", "others write the logits' dtype"
        K.converted[dtype, out_dtype, Finish.PROBABILITIES, contiguous](
            y, x, rows, out_scale, queue
        )


def log_softmax[
    dtype: DType, out_dtype: DType, //, K: Kernels, contiguous: Bool = False
](
    y: Target[out_dtype],
    x: Source[dtype],
    rows: Rows,
    queue: Queue,
    out_scale: Float64 = 1,
) raises:
    """Writes the logarithm of softmax of every row of `x`: (x - max x) - ln Σ exp(x - max x).

    Parameters:
        dtype: Dtype of the logits.
        out_dtype: Dtype of the results, as of `softmax`.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Logarithms of probabilities; on a GPU not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where to compute.
        out_scale: What results of float8 are multiplied by.
    """
    if rows.is_empty():
        return
    comptime if out_dtype == dtype:
        K.auto[dtype, Finish.LOGARITHMS, contiguous](
            rebind[Target[dtype]](y), x, rows, queue
        )
    else:
        K.converted[dtype, out_dtype, Finish.LOGARITHMS, contiguous](
            y, x, rows, out_scale, queue
        )


def statistics[
    dtype: DType, //, K: Kernels, contiguous: Bool = False
](
    pairs: Target[accumulator[dtype]()],
    x: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the pair of every row of `x`: m = max x and d = Σ exp(x - m).

    Parameters:
        dtype: Dtype of the logits.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        pairs: (rows, 2); (-inf, 0) of rows of nothing.
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.count() != 0:
        K.auto[dtype, Finish.PAIR, contiguous](
            pairs.unsafe_bitcast[Scalar[dtype]](), x, rows, queue
        )


def max_sum[
    dtype: DType, //, K: Kernels, contiguous: Bool = False
](
    result: Target[accumulator[dtype]()],
    x: Source[dtype],
    rows: Rows,
    apart: Bool,
    queue: Queue,
) raises:
    """Writes what `statistics` does, as pairs or apart.

    Parameters:
        dtype: Dtype of the logits.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        result: (rows, 2), or (2, rows): all m, and then all d.
        x: Logits.
        rows: How the memory is divided into rows.
        apart: Whether it is the latter.
        queue: Where to compute.
    """
    if apart:
        K.max_sum_apart[dtype, contiguous](result, x, rows, queue)
    else:
        statistics[K, contiguous](result, x, rows, queue)


def logsumexp[
    dtype: DType, //, K: Kernels, contiguous: Bool = False
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Writes ln Σ exp x of every row of `x`.

    Parameters:
        dtype: Dtype of both tensors.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: One a row: -inf for nothing but -inf, NaN beside NaN, and else inf beside +inf.
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    K.logsumexp[dtype, contiguous](y, x, rows, queue)


def softmax_backward[
    dtype: DType,
    //,
    K: Kernels,
    contiguous: Bool = False,
    *,
    log: Bool = False,
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the gradient of the logits of every row: y · (dy - Σ y·dy), of log_softmax dy - e^y · Σ dy.

    Parameters:
        dtype: Dtype of all tensors.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
        log: Whether `y` is what log_softmax returned.

    Args:
        dx: Gradient of the logits; on a GPU not in the memory of `y` or `dy`.
        y: What the forward op returned.
        dy: The gradient of that.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.is_empty():
        return
    K.backward[dtype, log, contiguous](dx, y, dy, rows, queue)


def cross_entropy[
    dtype: DType,
    out: DType,
    //,
    K: Kernels,
    contiguous: Bool = False,
    *,
    checked: Bool = False,
    smoothed: Bool = True,
](
    loss: Target[out],
    pairs: Target[accumulator[dtype]()],
    x: Source[dtype],
    targets: Targets,
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Writes the cross entropy of logits and target classes, -ln softmax(x)[target], and what its gradient needs.

    Parameters:
        dtype: Dtype of the logits.
        out: Dtype of the loss.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
        checked: Whether the caller has asked `K.wrong_target` about the targets.
        smoothed: Whether options may ask for label smoothing.

    Args:
        loss: One a row where there is no reduction, else one.
        pairs: (rows, 2), as of `statistics`.
        x: Logits.
        targets: The class of each row.
        rows: How the memory is divided into rows.
        options: What the caller chooses.
        queue: Where to compute.

    Raises:
        Error: On a CPU, if a target that was not checked is neither a class nor ignored. On a GPU its loss is NaN.
    """
    # Of a shard, the host knows no number of a row's class that a caller would know.
    if not checked and options.classes == 0:
        var wrong = K.wrong_target(targets, rows, options.ignored)
        if wrong:
            var row = wrong.value()
            raise Error(
                no_class(
                    String(t"target[{row}]"),
                    targets[row],
                    rows.n,
                    options.ignored,
                )
            )
    K.losses[dtype, out, contiguous, smoothed](
        loss, pairs, x, targets, rows, options, queue
    )


def cross_entropy_backward[
    dtype: DType, up: DType, //, K: Kernels, contiguous: Bool = False
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[accumulator[dtype]()],
    targets: Targets,
    dloss: Optional[Source[up]],
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Writes the gradient of the logits of cross entropy: (softmax x - target) · dloss.

    Parameters:
        dtype: Dtype of the logits.
        up: Dtype of the gradient of the loss: that of the logits, or its accumulator.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: The gradient; may be the same memory as `x`.
        x: Logits.
        pairs: What `cross_entropy` wrote.
        targets: The class of each row.
        dloss: The gradient of the loss, one a row where there was no reduction, else one; 1 if it is nowhere.
        rows: How the memory is divided into rows.
        options: As of `cross_entropy`.
        queue: Where to compute.
    """
    if rows.is_empty():
        return
    K.gradients[dtype, up, contiguous](
        dx, x, pairs, targets, dloss, rows, options, queue
    )


def cross_entropy_gradient[
    dtype: DType, //, K: Kernels, contiguous: Bool = False
](
    dx: Target[dtype],
    pairs: Target[accumulator[dtype]()],
    x: Source[dtype],
    targets: Targets,
    rows: Rows,
    ignored: Int,
    queue: Queue,
) raises:
    """Writes the gradient of each row's cross entropy, softmax x - target, and the pairs that the losses are made of: logits are read once
    where rows fit on a GPU.

    Parameters:
        dtype: Dtype of the logits.
        K: `Cpu` or `Gpu`.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: The gradient; may be the same memory as `x`: 0 in rows that do not count, NaN where a target is no class.
        pairs: (rows, 2), as of `statistics`.
        x: Logits.
        targets: The class of each row.
        rows: How the memory is divided into rows.
        ignored: The class of rows that do not count.
        queue: Where to compute.
    """
    if K.pairs_with_gradients[dtype, contiguous](
        dx, pairs, x, targets, rows, ignored, queue
    ):
        return
    statistics[K, contiguous](pairs, x, rows, queue)
    cross_entropy_backward[K, contiguous](
        dx,
        x,
        pairs,
        targets,
        Optional[Source[dtype]](None),
        rows,
        {ignored, 0, Reduction.SUM, False, 0},
        queue,
    )
