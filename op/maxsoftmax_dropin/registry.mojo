"""Every op of MAX that is replaced. A registration in a graph's own extension comes before the built-in one."""

import extensibility as compiler
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from maxsoftmax import cpu, gpu
from maxsoftmax.rows import Rows


@compiler.register("mo.reduce.softmax")
struct Softmax:
    """What `max.graph.ops.softmax` puts into a graph."""

    @staticmethod
    def execute[
        target: StaticString, axis: Int
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) raises:
        comptime place = axis if axis >= 0 else axis + x.rank
        comptime contiguous = place == x.rank - 1
        var rows = Rows.of[place](x.shape())
        if rows.is_empty():
            return
        var target_ptr = y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        var source_ptr = x.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        comptime if is_cpu[target]():
            cpu.softmax["auto", y.dtype, contiguous](
                target_ptr, source_ptr, rows, ctx
            )
        else:
            gpu.softmax["auto", y.dtype, 128, 4, contiguous](
                target_ptr, source_ptr, rows, ctx
            )
