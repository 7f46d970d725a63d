"""``syncline calibrate``: measures links and computing between real ranks, and writes a network file for predictions.

``request`` checks the arguments. ``command`` starts the ranks and runs in each of them. ``links`` times the messages
of ``patterns`` on a session; ``computing`` times the work of one thread per byte. ``fits`` fits constants with
intervals to any times, and ``network`` makes the file from the constants.
"""
