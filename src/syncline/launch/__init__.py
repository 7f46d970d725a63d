"""How a run starts: the environment variables of launchers, the launcher for one machine, and the forming of a group.

Nothing here knows frameworks. Only ``connecting``, which makes sessions, knows strategies and transports, except that
``address`` publishes rank 0's address over MPI. A rank here is a *process*: workers first, then dedicated servers.
"""

from .environment import Environment, recognise

__all__ = ["Environment", "recognise"]
