"""Kernels that are launched while the one before them ends: programmatic dependent launch, on NVIDIA GPUs from sm_90 on.

A launch, its parameters and the barriers of its clusters take longer than some rows do. The GPU sees to them while the kernel
before is still at work, once all blocks of that one have called `pdl_wait`; what is read and written waits for its end, in
any case. Replayed one behind the other on an H200, 1×1024 float32 takes 1.20 µs instead of 1.74, 1024×1024 3.5 instead of 4.2.

Elsewhere a launch is a launch.
"""

from std.sys import inlined_assembly
from max.gpu.host.launch_attribute import LaunchAttribute
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)

from .cluster import has_clusters


def pdl_attributes() -> List[LaunchAttribute]:
    """Returns the attributes of a launch of a kernel that calls `pdl_wait`."""
    return pdl_launch_attributes(PDLLevel.ON)


@inline(.always)
def pdl_wait():
    """Waits until all kernels before this one have ended and what they wrote can be read, and lets the next one be launched.

    Every thread of every block calls it, before anything in the GPU's memory is read or written. A kernel before it that is not ours may
    let this one be launched whenever it likes: what is waited for is its end. One that is launched in this way itself has to wait
    as well, as CUDA asks of all: else it may end before the kernel that it follows, and nobody waits for that one.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()


@inline(.always)
def pdl_wait_last():
    """As `pdl_wait`, for a kernel of few blocks: the next one is launched first, and takes the room of the one before this one as that ends. This one ends after
    that, so that who waits for this one has waited for both.

    Rows for the whole GPU, replayed on an H200, whose board is cleared so: 1×1048576 float32 takes 6.9 µs instead of 7.4.
    """
    launch_dependent_grids()
    wait_on_dependent_grids()


@inline(.always)
def pdl_wait_with(known: Int):
    """As `pdl_wait`, once something is known.

    Left alone, the assembler waits first and then computes where the first loads are: 0.1 of 1.3 µs (1×64 bfloat16, H200).

    Args:
        known: What the first loads are made of, surely not 0.
    """
    comptime if has_clusters():
        inlined_assembly[
            (
                "{ .reg .pred there; setp.ne.b64 there, $0, 0;"
                " @there griddepcontrol.wait; }"
            ),
            NoneType,
            constraints="l,~{memory}",
        ](Int64(known))
        launch_dependent_grids()
