"""How a run starts: the environment variables of launchers, the launcher for one machine, and the forming of a group.

No module here knows frameworks. Only ``connecting``, which makes sessions, knows strategies and transports; ``address``
uses MPI, but only to publish rank 0's address. A rank here is a *process*: workers first, then dedicated servers.
"""

from .environment import Environment, recognise

__all__ = ["Environment", "recognise"]
