"""The engine: what runs plans and reducers in the background of training, and who drives them.

``engine`` takes work, ``driver`` drives it, ``work`` says what may start when. What threads share is in ``monitor``,
whether anything moves in ``motion``. ``messages`` runs plans over a
transport, cut into segments (``runs``); ``memory`` runs them in mapped memory (``window``), by ``scripts``, met at
``slots``. ``reducing`` runs what is compressed; ``loopback`` is for messages of a process to itself. ``stall`` finds
out who is to blame when nothing moves, ``trace`` tells an observer what begins and ends.
"""
