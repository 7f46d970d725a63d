"""A process in a run, and the groups it communicates in.

``member`` is the process; ``communicator`` a group with its collectives; ``session`` the group of all workers, with the
strategy and the models; ``groups`` are those of some of them, ``grouped`` is this process and its engine in one.
``tickets`` has what belongs to every call: tickets, keys, and the threads that call. ``programs`` is a process's part
in the plans of a group; ``ending`` what is said and heard of the end, ``printing`` what is printed of it; ``stats`` the
totals.
"""
