"""Tests of what a GPU reads of rows along another axis than the last, on a CPU: vectors of neighbours are what their elements are one by one."""

from std.random import random_float64, random_si64, seed
from std.testing import TestSuite, assert_equal
from std.utils import IndexList

from maxsoftmax.io.rows import Positions, Source
from maxsoftmax.math.online import accumulator
from maxsoftmax.ops.formed import FormedSource
from maxsoftmax.ops.forms import (
    AXIS,
    Class,
    Forms,
    Kind,
    Operand,
    place_of,
    RANK,
)
from maxsoftmax.ops.scaled_columns import ScaledSource

comptime SHAPE = IndexList[RANK](1, 2, 3, 5, 7, 8)
comptime OUTER = 30
comptime SIZE = OUTER * 7 * 8
comptime WIDTH = 4


struct Numbers[dtype: DType](Movable):
    """As many numbers as there are elements."""

    var all: List[Scalar[Self.dtype]]

    def __init__(out self):
        self.all = List[Scalar[Self.dtype]]()
        for _ in range(SIZE):
            comptime if Self.dtype == DType.uint8:
                self.all.append(random_si64(0, 1).cast[Self.dtype]())
            else:
                self.all.append(random_float64(0.5, 2).cast[Self.dtype]())

    def source(self) -> Source[Self.dtype]:
        return (
            self.all.unsafe_ptr()
            .unsafe_mut_cast[False]()
            .unsafe_origin_cast[ImmUntrackedOrigin]()
        )

    def bytes(self) -> Source[DType.uint8]:
        return self.source().unsafe_bitcast[UInt8]()


struct Columns[dtype: DType]:
    """Columns of a dtype; no functions of the module, as those may have no parameters beside tests.
    """

    @staticmethod
    def operand(
        kind: Kind, address: Source[DType.uint8]
    ) -> Operand[Self.dtype]:
        """Returns an operand, a tensor of which is broadcast along some dimensions.
        """
        var result = Operand[Self.dtype].of(random_float64(0.5, 2))
        result.kind = kind
        if not result.is_known():
            result.address = address
            var step = 1
            comptime for i in reversed(range(RANK)):
                if random_si64(0, 2) > 0:
                    result.strides[i] = step
                    step *= SHAPE[i]
        return result

    @staticmethod
    def one_by_one(
        forms: Forms[Self.dtype], x: Numbers[Self.dtype], at: IndexList[RANK]
    ) -> Scalar[accumulator[Self.dtype]()]:
        """Returns the logit of the element at a place."""
        return forms.made[1, RANK - 1](
            x.all[place_of(at, SHAPE)].cast[accumulator[Self.dtype]()](), at
        )[0]

    @staticmethod
    def check() raises:
        comptime accum = accumulator[Self.dtype]()
        comptime columns = FormedSource[
            Self.dtype, contiguous=False, forms_are=Class.ANY
        ]
        seed(7)
        var x = Numbers[Self.dtype]()
        var wide = Numbers[accum]()
        var narrow = Numbers[Self.dtype]()
        var bools = Numbers[DType.uint8]()
        var kinds = [
            Kind.NOTHING,
            Kind.WIDE,
            Kind.NARROW,
            Kind.NUMBER,
            Kind.BOOL,
        ]
        var of_wide = wide.bytes()
        var places = [of_wide, of_wide, narrow.bytes(), of_wide, bools.bytes()]
        for _ in range(500):
            var forms = Forms[Self.dtype].of_nothing({OUTER, 7, 8})
            forms.shape = SHAPE
            forms.causal = random_si64(0, 1) == 1
            var some = Int(random_si64(0, 3))
            forms.scale = Self.operand(kinds[some], places[some])
            some = Int(random_si64(0, 4))
            forms.mask = Self.operand(kinds[some], places[some])
            some = Int(random_si64(0, 3))
            forms.temperature = Self.operand(kinds[some], places[some])

            var outer = Int(random_si64(0, OUTER - 1))
            var at = Positions(
                outer, WIDTH * Int(random_si64(0, 1)), 1, 2, 7, 8
            )
            var index = IndexList[RANK](0)
            index[5] = at.inner
            index[3], index[2], index[1] = (
                outer % 5,
                outer // 5 % 3,
                outer // 15,
            )
            var found = columns(x.source(), forms).column(at)
            index[AXIS] = 1
            assert_equal(found.length(7), forms.length(index))
            for i in range(3):
                index[AXIS] = 1 + 2 * i
                var logits = found.load[WIDTH](i)
                for j in range(WIDTH):
                    index[5] = at.inner + j
                    assert_equal(logits[j], Self.one_by_one(forms, x, index))
                index[5] = at.inner

            forms.scale = Self.operand(Kind.NUMBER, places[0])
            var scaled = ScaledSource[_, True](x.source(), forms).column(at)
            for i in range(3):
                index[AXIS] = 1 + 2 * i
                var elements = scaled.load[WIDTH](i)
                assert_equal(elements[0], scaled.address(i)[])
                for j in range(WIDTH):
                    index[5] = at.inner + j
                    forms.mask.kind = Kind.NOTHING
                    forms.temperature.kind = Kind.NOTHING
                    assert_equal(
                        scaled.logits(elements)[j],
                        Self.one_by_one(forms, x, index),
                    )
                index[5] = at.inner
        _ = x^
        _ = wide^
        _ = narrow^
        _ = bools^


def test_float32() raises:
    Columns[DType.float32].check()


def test_bfloat16() raises:
    Columns[DType.bfloat16].check()


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
