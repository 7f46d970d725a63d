"""The engine: what runs plans and reducers in the background of training, and who drives them.

``engine`` takes orders and single messages, and ``driver`` drives them. ``order`` says what may start when, and has
what threads share of it. ``motion`` sees whether anything moves, and finds out who is to blame when nothing does.
``exchange`` runs plans over a transport: by messages, or in mapped ``memory``, by ``scripts``. ``reducing`` runs what
is compressed. ``trace`` tells an observer what begins and ends.
"""
