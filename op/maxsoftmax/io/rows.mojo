"""A tensor as its softmax sees it: `outer` × `n` × `inner`."""

from std.sys import inlined_assembly, is_nvidia_gpu
from std.utils import IndexList

comptime VECTOR_BYTES = 16
"""The widest access that a thread of a GPU can make."""


struct Rows[length: Int = 0](TrivialRegisterPassable):
    """A row-major tensor seen as (outer, n, inner), whose rows run along the middle axis with stride `inner`.

    Parameters:
        length: Is n, if that is known at compile time, so that only the kernels for it are compiled; else 0.
    """

    var outer: Int
    """Product of the dimensions before the axis."""
    var n: Int
    """Length of the axis."""
    var inner: Int
    """Product of the dimensions after the axis: the distance between neighbours in a row."""

    @inline(.always)
    def __init__(out self, outer: Int, n: Int, inner: Int):
        self.outer = outer
        self.n = n
        self.inner = inner

    @implicit
    def __init__(out self: Rows[], rows: Rows[_]):
        """The same, of a length that is not known at compile time."""
        self = {rows.outer, rows.n, rows.inner}

    @staticmethod
    def of[axis: Int](shape: IndexList) -> Self:
        """Returns the view of a tensor along `axis`, counted from 0."""
        var rows = Self(1, shape[axis], 1)
        comptime for i in range(axis):
            rows.outer *= shape[i]
        comptime for i in range(axis + 1, shape.size):
            rows.inner *= shape[i]
        return rows

    @inline(.always)
    def count(self) -> Int:
        """Returns the number of rows."""
        return self.outer * self.inner

    @inline(.always)
    def start(self, row: Int) -> Int:
        """Returns where the first element of a row is, rows being counted through outer and inner.
        """
        var outer, column = divmod(row, self.inner)
        return outer * self.n * self.inner + column

    @inline(.always)
    def is_empty(self) -> Bool:
        """Returns whether there is nothing to compute."""
        return self.count() * self.n == 0


@fieldwise_init
struct Positions(TrivialRegisterPassable):
    """Every `step`-th element of a row, along the middle axis of a tensor seen as (outer, n, inner), from the `first` on.
    """

    var outer: Int
    """Place of the row before the axis, counted as in row-major memory."""
    var inner: Int
    """Place of the row after it."""
    var first: Int
    """The first element."""
    var step: Int
    """From one element to the next."""
    var n: Int
    """Length of the axis."""
    var stride: Int
    """Product of the dimensions after it."""

    @inline(.always)
    def offset(self) -> Int:
        """Returns where the first is in row-major memory."""
        return (self.outer * self.n + self.first) * self.stride + self.inner


def check_row_major[
    rank: Int, //
](shape: IndexList[rank], strides: IndexList[rank]) raises:
    """Refuses a tensor that does not lie in memory as its shape says.

    Parameters:
        rank: Number of dimensions.

    Args:
        shape: The tensor's shape.
        strides: Elements from one index to the next, along each dimension.

    Raises:
        Error: If elements are elsewhere than in row-major memory.
    """
    var step = 1
    comptime for i in reversed(range(rank)):
        if shape[i] > 1 and strides[i] != step:
            raise Error(
                "a tensor of shape ",
                shape,
                " has strides ",
                strides,
                ": it has to be contiguous in row-major order",
            )
        step *= shape[i]


comptime Source[dtype: DType] = Pointer[Scalar[dtype], ImmUntrackedOrigin]
"""Where a kernel reads from."""

comptime Target[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
"""Where a kernel writes to."""


@inline(.always)
def unseen(i: Int) -> Int:
    """Returns `i` so that the compiler does not see that it is: it would keep an address for each value of each vector.
    """
    comptime if is_nvidia_gpu():
        return Int(
            inlined_assembly["mov.b64 $0, $1;", Int64, constraints="=l,l"](
                Int64(i)
            )
        )
    else:
        return i


@inline(.always)
def nowhere[dtype: DType]() -> Source[dtype]:
    """Returns where an input is said to be that there is none of."""
    return {unsafe_from_address = VECTOR_BYTES}
