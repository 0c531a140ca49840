"""Barriers in shared memory at which some arrive, and for which others wait. NVIDIA GPUs from sm_90 on; elsewhere they are not there."""

from std.sys import inlined_assembly, is_nvidia_gpu


@inline(.always)
def begin(place: UInt32, count: UInt32):
    """Makes 8 bytes of shared memory such a barrier. The others have to be told before they use it.

    Args:
        place: Where they are, a multiple of 8.
        count: How many arrive in a turn.
    """
    comptime if is_nvidia_gpu():
        inlined_assembly[
            "mbarrier.init.shared::cta.b64 [$0], $1;",
            NoneType,
            constraints="r,r,~{memory}",
        ](place, count)


@inline(.always)
def arrive(place: UInt32):
    """Says that this thread has come, and has written what it was to write.

    Args:
        place: Where the barrier is.
    """
    comptime if is_nvidia_gpu():
        inlined_assembly[
            "mbarrier.arrive.shared::cta.b64 _, [$0];",
            NoneType,
            constraints="r,~{memory}",
        ](place)


@inline(.always)
def wait(place: UInt32, turn: Int):
    """Waits until all have arrived in a turn. The next one must not end before.

    Args:
        place: Where the barrier is.
        turn: How many there were before.
    """
    comptime if is_nvidia_gpu():
        inlined_assembly[
            (
                "{ .reg .pred done; again:"
                " mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
                " @!done bra again; }"
            ),
            NoneType,
            constraints="r,r,~{memory}",
        ](place, UInt32(turn % 2))
