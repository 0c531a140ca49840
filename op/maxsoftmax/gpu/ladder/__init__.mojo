"""The teaching rungs, from the naive kernel up, each reproducing a published one and readable on its own."""

from .elementwise import elementwise
from .multipass import multipass
from .naive import naive
from .online import online
from .split import split
from .tree import tree
from .tree_blocked import tree_blocked
from .vector import vector
from .warp import warp
