"""What direct calls keep from one to the next: a device, and what was made for it."""

from std.atomic import Atomic
from std.ffi import external_call
from std.sys import size_of
from max.gpu.host import DeviceContext

comptime PLACES = 1024
"""Things of a kind that may be kept: a power of two."""

comptime EXPECTED = 64
"""Words of 8 bytes that calls leave for others on a GPU."""

comptime PROBES = 8
"""Places that a key may have; what finds all of them taken is made anew each time."""


struct Table(Movable):
    """Addresses of things by their keys: written once each, and read by any thread without waiting.
    """

    var _memory: List[Int64]
    """Who has taken a place, how often; keys, 0 where there is none yet; addresses."""

    def __init__(out self):
        """An empty one."""
        self._memory = List[Int64](length=3 * PLACES, fill=0)

    @inline(.always)
    def find(self, key: Int) -> Int:
        """Returns the address of what has a key, or 0."""
        var memory = self._memory.unsafe_ptr()
        for probe in range(PROBES):
            var place = _place(key, probe)
            if memory[unsafe_offset=PLACES + place] == Int64(key):
                return Int(memory[unsafe_offset=2 * PLACES + place])
        return 0

    def keep(mut self, key: Int, address: Int) -> Bool:
        """Keeps an address if there is a place for it, and returns whether there is.

        Args:
            key: Not 0. The same may be kept by two threads that look for it at a time.
            address: Of what lives as long as the process from then on.
        """
        var memory = (
            self._memory.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
        )
        for probe in range(PROBES):
            var place = _place(key, probe)
            if Atomic.fetch_add(memory.unsafe_offset(place), 1) == 0:
                memory[unsafe_offset=2 * PLACES + place] = Int64(address)
                # Whoever sees the key sees the address.
                _ = Atomic.fetch_add(
                    memory.unsafe_offset(PLACES + place), Int64(key)
                )
                return True
        return False


@inline(.always)
def _place(key: Int, probe: Int) -> Int:
    """Returns where to look for a key, all of whose bits have a say."""
    var mixed = UInt64(key) * 0x9E3779B97F4A7C15
    return (Int(mixed >> 32) + probe) & (PLACES - 1)


struct Kept(Movable):
    """A device, with the streams and the kernels that calls have used."""

    var expected: Int
    """The address on a GPU of `EXPECTED` words for what calls have later ones expect; 0 where the caller has given none. It comes first: a caller
    writes it there."""
    var ctx: DeviceContext
    """The device."""
    var streams: Table
    """Callers' streams, by their handles and 1."""
    var kernels: Table
    """Kernels as they were loaded, by their names and their shared memory."""

    def __init__(out self, ctx: DeviceContext):
        """A device that nobody has used yet."""
        self.expected = 0
        self.ctx = ctx
        self.streams = Table()
        self.kernels = Table()


def key_of(name: StaticString) -> Int:
    """Returns a number that is as good as unique for a name, not 0; for use at compile time.
    """
    # FNV-1a.
    var key = UInt64(0xCBF29CE484222325)
    for byte in name.as_bytes():
        key = (key ^ UInt64(byte)) * 0x100000001B3
    return Int(key | 1)


def heap[T: AnyType]() -> Pointer[T, MutUntrackedOrigin]:
    """Returns memory for one thing that lives as long as the process, unless it is freed by C's free().
    """
    return external_call["malloc", Pointer[T, MutUntrackedOrigin]](size_of[T]())


def release[T: Deinitable](thing: Pointer[T, MutUntrackedOrigin]):
    """Ends a thing that is on the heap."""
    thing.unsafe_deinit_pointee()
    external_call["free", NoneType](thing)
