"""Where work goes: to the device of a graph, or to a caller's own stream, with a caller's own memory."""

from std.builtin.device_passable import DevicePassable
from std.collections.optional import OptionalReg
from std.math import align_up
from std.memory import Pointer
from std.reflection import get_linkage_name
from std.sys import size_of
from max.gpu.host import (
    DeviceAttribute,
    DeviceBuffer,
    DeviceContext,
    DeviceStream,
    Dim,
    FuncAttribute,
)
from max.gpu.host.launch_attribute import LaunchAttribute

from .kept import EXPECTED, Kept, heap, key_of, release
from .io.rows import Target

comptime SCRATCH_ALIGNMENT = 256
"""Bytes that every piece of scratch memory is aligned to, as what a GPU's allocators return is."""


struct Scratch[dtype: DType](Movable):
    """Memory on the device for what one kernel leaves to the next.

    Parameters:
        dtype: Dtype of the elements.
    """

    var pointer: Target[Self.dtype]
    """Where it is."""
    var _owned: Optional[DeviceBuffer[Self.dtype]]
    """What frees it, in the order of its stream, with this; nothing where it is the caller's."""

    def __init__(out self, pointer: Target[Self.dtype]):
        """Memory of the caller's."""
        self.pointer = pointer
        self._owned = None

    def __init__(out self, var buffer: DeviceBuffer[Self.dtype]):
        """Memory of its own."""
        self.pointer = buffer.unsafe_ptr().unsafe_origin_cast[
            MutUntrackedOrigin
        ]()
        self._owned = buffer^


struct Queue(ImplicitlyCopyable):
    """Where kernels are launched and where their scratch memory is.

    Of a graph it is the graph's context. Of a caller it is the caller's stream and the caller's memory: nothing is
    allocated and nothing waits, so that a CUDA graph may capture it.
    """

    var ctx: DeviceContext
    """The device."""
    var workers: Int
    """On a CPU, the most threads that work is shared out to; 0 is as many as there are."""
    var _kept: Optional[Pointer[Kept, MutUntrackedOrigin]]
    """What direct calls keep of the device; none in a graph."""
    var _stream: Optional[DeviceStream]
    """The caller's stream; none where it is the context's own."""
    var _memory: Optional[Target[DType.uint8]]
    """The caller's scratch memory; none where the context allocates it."""
    var _used: Optional[Pointer[Int, MutUntrackedOrigin]]
    """How many bytes of the caller's memory were asked for; none where the context allocates it."""
    var _capacity: Int
    """How many bytes of it there are."""
    var _measures: Bool
    """Whether memory is only counted, and nothing is launched."""

    @implicit
    def __init__(out self, ctx: DeviceContext):
        """The stream and the memory of a context."""
        self.ctx = ctx
        self.workers = 0
        self._kept = None
        self._stream = None
        self._memory = None
        self._used = None
        self._capacity = Int.MAX
        self._measures = False

    def __init__(out self, ctx: DeviceContext, *, workers: Int):
        """A CPU, of which so many threads are used; all if 0."""
        self = Self(ctx)
        self.workers = workers

    def __init__(
        out self,
        kept: Pointer[Kept, MutUntrackedOrigin],
        *,
        stream: Int,
        memory: Target[DType.uint8],
        capacity: Int,
        used: Pointer[Int, MutUntrackedOrigin],
    ) raises:
        """The stream and the memory of a caller.

        Args:
            kept: The GPU.
            stream: The stream's handle, a CUstream; 0 is the legacy default stream.
            memory: As many bytes as were counted for the same call.
            capacity: How many those are.
            used: Counts the bytes that were asked for.
        """
        self = Self(kept[].ctx)
        self._kept = kept
        self._stream = _stream(kept, stream)
        self._memory = memory
        self._capacity = capacity
        self._used = used

    @staticmethod
    def measuring(
        ctx: DeviceContext, used: Pointer[Int, MutUntrackedOrigin]
    ) -> Self:
        """Returns a queue that launches nothing, and counts the scratch memory that a call takes.

        Args:
            ctx: The device.
            used: Counts the bytes that were asked for.
        """
        var queue = Self(ctx)
        queue._used = used
        queue._measures = True
        return queue^

    def sm_count(self) raises -> Int:
        """Returns how many SMs the device has, which may be fewer than others of its architecture have (H20, MIG).
        """
        return self.ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)

    def scratch[dtype: DType](self, count: Int) raises -> Scratch[dtype]:
        """Returns memory for so many elements, uninitialized.

        Parameters:
            dtype: Dtype of the elements.

        Args:
            count: How many.

        Raises:
            Error: If the caller's memory has no room for them.
        """
        if not self._used:
            return Scratch(self.ctx.enqueue_create_buffer[dtype](count))
        var used = self._used.value()
        var start = used[]
        used[] = start + align_up(count * size_of[dtype](), SCRATCH_ALIGNMENT)
        if used[] > self._capacity:
            # Nobody's memory is written who counted for another call or on another GPU.
            raise Error(
                String(
                    t"this call needs {used[]} bytes of scratch memory or more,"
                    t" and has {self._capacity}"
                )
            )
        if self._measures:
            return Scratch(Target[dtype](unsafe_from_address=SCRATCH_ALIGNMENT))
        return Scratch(
            self._memory.value()
            .unsafe_offset(start)
            .unsafe_bitcast[Scalar[dtype]]()
        )

    def expected(self, key: Int) -> Int:
        """Returns the address where one call may leave a word of 8 bytes for the next, or 0: all have it that have the same key, and perhaps others.

        Args:
            key: What the calls have in common.
        """
        if not self._kept or self._kept.value()[].expected == 0:
            return 0
        return self._kept.value()[].expected + 8 * (key % EXPECTED)

    @inline(.always)
    def launch[
        declared: TypeList[Trait=AnyType, ...],
        //,
        kernel: def(* args: * declared) thin -> None,
        *Ts: DevicePassable,
    ](
        self,
        *args: *Ts,
        grid_dim: Dim,
        block_dim: Dim,
        cluster_dim: OptionalReg[Dim] = None,
        shared_mem_bytes: Int = 0,
        var attributes: List[LaunchAttribute] = [],
    ) raises:
        """Enqueues a kernel: the one way that all kernels take.

        Parameters:
            declared: Types of the kernel's arguments.
            kernel: What runs on the GPU.
            Ts: Types of the arguments given.

        Args:
            args: The kernel's arguments.
            grid_dim: Blocks a grid.
            block_dim: Threads a block.
            cluster_dim: Blocks a cluster; none if the kernel has no clusters.
            shared_mem_bytes: Dynamic shared memory a block.
            attributes: Attributes of the launch.
        """
        if self._measures:
            return
        var attribute: OptionalReg[FuncAttribute] = None
        if shared_mem_bytes > 0:
            attribute = FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(shared_mem_bytes)
            )
        if not self._stream:
            self.ctx.enqueue_function[kernel](
                *args,
                grid_dim=grid_dim,
                block_dim=block_dim,
                cluster_dim=cluster_dim,
                shared_mem_bytes=shared_mem_bytes,
                func_attribute=attribute,
                attributes=attributes^,
            )
            return

        comptime Loaded = type_of(self.ctx.compile_function[kernel]())
        comptime name = key_of(get_linkage_name[kernel]())
        # Memory beyond what a kernel has by itself is granted when it is loaded.
        var key = name ^ (shared_mem_bytes << 12)
        ref kernels = self._kept.value()[].kernels
        var found = kernels.find(key)
        var is_kept = found != 0
        if not is_kept:
            var loaded = heap[Loaded]()
            loaded.unsafe_write(
                self.ctx.compile_function[kernel](func_attribute=attribute)
            )
            found = Int(loaded)
            is_kept = kernels.keep(key, found)
        var loaded = Pointer[Loaded, MutUntrackedOrigin](
            unsafe_from_address=found
        )
        self._stream.value().enqueue_function(
            loaded[],
            *args,
            grid_dim=grid_dim,
            block_dim=block_dim,
            cluster_dim=cluster_dim,
            shared_mem_bytes=shared_mem_bytes,
            attributes=attributes^,
        )
        if not is_kept:
            release(loaded)


def _stream(
    kept: Pointer[Kept, MutUntrackedOrigin], handle: Int
) raises -> DeviceStream:
    """Returns a caller's stream."""
    var found = kept[].streams.find(handle + 1)
    if found != 0:
        return Pointer[DeviceStream, MutUntrackedOrigin](
            unsafe_from_address=found
        )[]
    var made = kept[].ctx.create_external_stream(
        Pointer[NoneType, MutAnyOrigin](unsafe_from_address=handle)
    )
    var place = heap[DeviceStream]()
    place.unsafe_write(made)
    if not kept[].streams.keep(handle + 1, Int(place)):
        release(place)
    return made
