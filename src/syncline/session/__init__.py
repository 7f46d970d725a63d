"""A process in a run, and the groups it communicates in.

``member`` is the process, its end, and its place in a group; ``communicator`` a group with its collectives;
``session`` the group of all workers, with the strategy and the models; ``groups`` are those of some of them.
``tickets`` has what belongs to every call: tickets, keys, and the threads that call. ``layout`` says how a model's
tensors travel, ``printing`` what is printed of the end.
"""
