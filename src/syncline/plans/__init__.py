"""An allreduce or another collective as data, without transports, clocks or arrays.

``plan`` defines the value and ``check`` proves it. ``messages`` compiles a plan into one rank's sends and receives;
``memory`` compiles it into passes over memory that all ranks have mapped.
"""

from .check import check
from .plan import COPY, REDUCE, Plan, Transfer

__all__ = ["COPY", "REDUCE", "Plan", "Transfer", "check"]
