"""The engine: what runs plans and reducers in the background of training, and who drives them.

``engine`` takes orders, ``driver`` drives them, ``order`` says what may start when. What threads share is in
``monitor``; ``motion`` sees whether anything moves, and finds out who is to blame when nothing does. ``exchange`` runs
plans over a transport: by ``messages``, or in mapped memory (``memory``, ``window``), by ``scripts``, met at ``slots``;
``kept`` ones are run again and again by the thread that calls. ``reducing`` runs what is compressed. Single messages
are ``mail``. ``trace`` tells an observer what begins and ends.
"""
