"""What can be seen of what MAX has fused into an op: the tensors in memory that it reads or writes.

MAX 26.7 hands over a struct with a pointer, a shape and strides of each of them, in that order, and loads or stores elements at the indices of the op's own
tensor: tests/test_seen.py has MAX's own structs. Of a struct of other fields nothing is seen, which is slower, and as correct.
"""

from std.reflection import reflect
from std.sys import is_gpu, size_of
from std.utils import IndexList
from extensibility.managed_tensor_slice import InputFusion, StaticTensorSpec

from .rows import check_row_major, Rows, Source

comptime MOST_ALIGNED = 16
"""More neighbours than are read at a time."""

comptime _LARGEST = 8
"""Bytes of an element at most."""


struct _Tensor[dtype: DType, rank: Int](TrivialRegisterPassable):
    """What MAX hands over for a tensor."""

    var pointer: Source[Self.dtype]
    """The first element."""
    var shape: IndexList[Self.rank]
    """The tensor's shape."""
    var strides: IndexList[Self.rank]
    """Elements from one index to the next, along each dimension."""


def _has_tensors[Fusion: AnyType, rank: Int]() -> Bool:
    """Returns whether tensors are all that there is."""
    comptime fields = reflect[Fusion]
    comptime count = fields.field_count()
    comptime if count == 0 or count % 3 != 0:
        return False
    comptime types = fields.field_types()
    comptime for i in range(0, count, 3):
        comptime if not (
            size_of[types[i]]() == size_of[Source[DType.uint8]]()
            and size_of[types[i + 1]]() == size_of[IndexList[rank]]()
            and size_of[types[i + 2]]() == size_of[IndexList[rank]]()
            and "Pointer[" in reflect[types[i]].name()
            and "IndexList[" in reflect[types[i + 1]].name()
            and "IndexList[" in reflect[types[i + 2]].name()
        ):
            return False
    return True


def is_plain[Fusion: AnyType, rank: Int, has_prologue_fusion: Bool]() -> Bool:
    """Returns whether an input is a tensor as it lies in memory, at an address that `address` can find.

    Parameters:
        Fusion: What loads the input.
        rank: The input's number of dimensions.
        has_prologue_fusion: What MAX says of it.
    """
    return (
        not has_prologue_fusion
        and reflect[Fusion].field_count() == 3
        and _has_tensors[Fusion, rank]()
    )


@inline(.always)
def address[
    Fusion: InputFusion, //, dtype: DType, rank: Int
](fusion: Fusion) raises -> Source[dtype]:
    """Returns where the first element of a tensor is for which `is_plain`.

    Raises:
        Error: If it is not row-major.
    """
    var plain = fusion
    ref tensor = Pointer(to=plain).unsafe_bitcast[_Tensor[dtype, rank]]()[]
    check_row_major(tensor.shape, tensor.strides)
    return tensor.pointer


def known_length[
    dtype: DType,
    rank: Int,
    //,
    spec: StaticTensorSpec[dtype, rank, ...],
    axis: Int,
]() -> Int:
    """Returns the length of an axis of a tensor if the graph says it, else 0.

    Parameters:
        dtype: The tensor's dtype.
        rank: Its number of dimensions.
        spec: What is known of it.
        axis: The axis, counted from 0.
    """
    comptime length = spec.static_layout._shape_types[axis]
    comptime if length.is_static_value:
        return Int(length.static_value)
    return 0


def rows_of[
    dtype: DType,
    rank: Int,
    //,
    spec: StaticTensorSpec[dtype, rank, ...],
    axis: Int,
](shape: IndexList[rank]) -> Rows[known_length[spec, axis]()]:
    """Returns the view of a tensor along an axis, of a length that is known at compile time if the graph says it.

    Parameters:
        dtype: The tensor's dtype.
        rank: Its number of dimensions.
        spec: What is known of it.
        axis: The axis, counted from 0.

    Args:
        shape: The tensor's shape.
    """
    return Rows[known_length[spec, axis]()].of[axis](shape)


def alignment[
    Fusion: TrivialRegisterPassable, rank: Int, //
](fusion: Fusion, shape: IndexList[rank]) -> Int:
    """Returns how many neighbours along the last axis can be read, or written, of every tensor at a time, where the first one's place is a multiple of as
    many: a power of two. Places are counted through all of the op's tensor, as in row-major memory.

    Parameters:
        Fusion: What is loaded from, or handed to.
        rank: Number of dimensions.

    Args:
        fusion: The same.
        shape: The shape of the op's tensor.
    """
    comptime if not _has_tensors[Fusion, rank]():
        # What MAX's own kernels take for granted.
        return _power_of_two_in(shape[rank - 1])
    var tensors = fusion
    var first = Pointer(to=tensors).unsafe_bitcast[UInt8]()
    var result = MOST_ALIGNED
    comptime fields = reflect[Fusion]
    comptime types = fields.field_types()
    comptime for i in range(0, fields.field_count(), 3):
        # Bools are read one by one wherever they are.
        comptime if "DType.bool" not in reflect[types[i]].name():
            ref tensor = first.unsafe_offset(
                fields.field_offset[index=i]()
            ).unsafe_bitcast[_Tensor[DType.uint8, rank]]()[]
            # And so are elements that are not side by side.
            if tensor.strides[rank - 1] == 1:
                var place = _power_of_two_in(Int(tensor.pointer))
                result = min(result, max(1, place // _LARGEST))
                var step = 1
                comptime for j in reversed(range(rank)):
                    if shape[j] > 1:
                        var apart = tensor.strides[j] - step
                        result = min(result, _power_of_two_in(apart))
                    step *= shape[j]
    return result


def _power_of_two_in(number: Int) -> Int:
    """Returns the largest power of two, up to `MOST_ALIGNED * _LARGEST`, that divides a number.
    """
    comptime most = MOST_ALIGNED * _LARGEST
    return most if number % most == 0 else number & -number


def piece_width[Fusion: AnyType](width: Int) -> Int:
    """Returns how many elements of a vector are best loaded from, or handed to, what MAX fused at a time.

    On a GPU MAX takes bools that are more than 4 through the stack: 16×2048×2048 of bfloat16 with a mask take 312 µs by 8, 94
    by 4 (H200); without one 65 by either.

    Parameters:
        Fusion: What is loaded from, or handed to.

    Args:
        width: Elements of the vector.
    """
    comptime if is_gpu():
        comptime fields = reflect[Fusion]
        comptime types = fields.field_types()
        comptime for i in range(fields.field_count()):
            comptime if "DType.bool" in reflect[types[i]].name():
                return min(width, 4)
    return width
