"""What was measured of GPUs, a file a kind of GPU."""

from ..hardware.cluster import has_clusters
from .configuration import (
    CROWDED,
    HAS_ROOM,
    line_for,
    Stream,
    Strip,
    Team,
    Units,
    slots,
)
from .searched import KIND, Searched
from .sm90 import Sm90
from .tuning import Generic, ONE_BY_ONE, Tuning

comptime Tuned: Tuning = Searched if KIND != "" else (
    Sm90 if has_clusters() else Generic
)
"""Of the GPU that is compiled for."""
