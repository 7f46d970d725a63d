"""``syncline calibrate``: what messages and computing take between real ranks, as a network file for predictions.

``request`` says what is to be measured and refuses what makes no sense; ``command`` starts the ranks, or is one of
them; ``links`` times the messages of ``patterns`` on a session, ``computing`` what one thread does to bytes; ``fits``
makes constants with intervals of the times, and knows nothing of where they come from; ``network`` puts all into a
file.
"""
