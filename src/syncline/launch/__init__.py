"""How processes come to life: what launchers tell a process, the launcher for one machine, and how a group forms.

Nothing here knows frameworks, and nothing but ``connecting``, which makes sessions of processes that have met, knows
strategies, or of transports more than MPI's way to rank 0; names and numbers of processes are all that matters. A rank
here is a *process*: workers first, servers of their own after them.
"""

from .environment import Environment, recognise

__all__ = ["Environment", "recognise"]
