"""An op that says what it sees of what MAX has fused into it."""

import extensibility as compiler
from extensibility import OutputTensor
from extensibility import _FusedInputTensor as FusedInputTensor
from max.gpu.host import DeviceContext

from maxsoftmax.io.fusion import alignment, known_length


@compiler.register("seen")
struct Seen:
    """The op `seen`: how many neighbours of its input can be read at a time, and the length of its last axis, if that is known.
    """

    @staticmethod
    def execute[
        target: StaticString, has_prologue_fusion: Bool
    ](
        y: OutputTensor[dtype=DType.int64, rank=1, ...],
        x: FusedInputTensor,
        ctx: DeviceContext,
    ) capturing raises:
        var to = y.unsafe_ptr()
        to[unsafe_offset=0] = Int64(alignment(x.in_fusion, x.shape()))
        to[unsafe_offset=1] = Int64(known_length[x.static_spec, x.rank - 1]())
        to[unsafe_offset=2] = Int64(has_prologue_fusion)
