"""Plans: an allreduce, or another collective, as data. Pure: no transport, no clock, no arrays.

``plan`` is the value and ``check`` its proof; ``messages`` is one rank's share of it as sends and receives, ``memory``
as passes over memory that all ranks have mapped.
"""

from .check import check
from .plan import COPY, REDUCE, Plan, Transfer

__all__ = ["COPY", "REDUCE", "Plan", "Transfer", "check"]
