"""How processes come to life: what launchers tell a process, and the launcher for one machine.

Nothing here knows strategies, transports or frameworks; names and numbers of processes are all that matters. A rank
here is a *process*: workers first, servers of their own after them.
"""

from .environment import Environment, recognise

__all__ = ["Environment", "recognise"]
