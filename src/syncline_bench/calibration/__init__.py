"""``syncline calibrate``: measures links and computing between real ranks, and writes a network file for predictions.

``command`` checks the arguments, starts the ranks and runs in each of them. ``links`` times messages on a session;
``computing`` times the work of one thread per byte. ``fits`` fits constants with intervals to any times, and
``network`` makes the file from the constants.
"""
