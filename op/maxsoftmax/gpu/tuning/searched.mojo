"""One way to take rows in memory, whatever their length, in place of what was measured: what `maxsoftmax tune` builds and times, and nothing else
uses.

`-D CONFIGURATION=cluster -D CONFIGURATION_0=256 …` names it, with its numbers in the order of `configuration.mojo`: of a team after the longest row, of
units without what rows are longer than and what is packed, of a stream without the most units.
"""

from std.sys import get_defined_int, get_defined_string

from .configuration import HAS_ROOM, Stream, Team, Units
from .tuning import Generic, Tuning

comptime KIND = get_defined_string["CONFIGURATION", ""]()
"""Whether rows are to be held in the registers of a team ("whole"), with slots as well ("slotted"), by the blocks of a cluster ("cluster") or by its warps
("units"), or read twice ("streaming"); "" if nothing is searched."""


struct Searched(Tuning):
    """What the search says."""

    comptime streams = KIND == "streaming"
    comptime shares_short = False

    @staticmethod
    def resident(wide: Bool, pairs: Bool, made: Bool) -> List[Team]:
        comptime if KIND == "whole":
            comptime up_to = _number[1]() * _number[2]()
            return [
                Team.whole(
                    up_to,
                    _number[0](),
                    _number[1](),
                    _number[2](),
                    _number[3](),
                )
            ]
        elif KIND == "slotted":
            return [
                Team.slotted(HAS_ROOM, _number[0](), _number[1](), _number[2]())
            ]
        elif KIND == "cluster":
            return [
                Team.cluster(
                    _number[0](),
                    _number[1](),
                    _number[2](),
                    _number[3](),
                    _number[4](),
                )
            ]
        else:
            return []

    @staticmethod
    def units(wide: Bool) -> List[Units]:
        comptime if KIND == "units":
            return [
                Units(
                    0,
                    _number[0](),
                    _number[1](),
                    _number[2](),
                    0,
                    _number[3](),
                )
            ]
        else:
            return []

    @staticmethod
    def exponentials(for_logarithm: Bool) -> Stream:
        comptime if KIND == "streaming":
            return {
                _number[0](),
                _number[1](),
                _number[2](),
                _number[3]() != 0,
                _number[4](),
                4096,
            }
        else:
            return Generic.exponentials(for_logarithm)


def _number[i: Int]() -> Int:
    """Returns a number of the configuration."""
    return get_defined_int["CONFIGURATION_" + String(i), 1]()
