"""``syncline doctor``: checks of one host, of all pairs of hosts of a job, and the command.

A finding is ``fail`` if a run cannot work, ``warn`` if it works but may be slow or behave unexpectedly.
"""
