"""Softmax kernels for CPU and GPU: as functions on memory for Mojo programs, and as ops that graphs of MAX call."""

from .cpu.kernels import Cpu
from .direct import (
    cross_entropy,
    cross_entropy_backward,
    log_softmax,
    logsumexp,
    max_sum,
    softmax,
    softmax_backward,
    statistics,
)
from .ops.forms import Forms, Kind, Operand
from .gpu.kernels import Gpu
from .kernels import Kernels
from .math.loss import LossOptions, Reduction, Targets
from .math.online import accumulator
from .ops.kl_divergence import kl_divergence, kl_divergence_backward
from .ops.sparsemax import sparsemax, sparsemax_backward
from .ops.token_log_probs import (
    Asked,
    token_log_probs,
    token_log_probs_backward,
)
from .queue import Queue
from .registry import (
    CrossEntropy,
    CrossEntropyBackward,
    FormedSoftmax,
    FusedSoftmax,
    KlDivergence,
    KlDivergenceBackward,
    LogSoftmax,
    LogSumExp,
    MaskedSoftmax,
    MaxSum,
    SinkSoftmax,
    Softmax,
    SoftmaxBackward,
    Sparsemax,
    SparsemaxBackward,
    TokenLogProbs,
    TokenLogProbsBackward,
)
from .io.rows import Rows, Source, Target
