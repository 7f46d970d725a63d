"""``syncline bench codecs``: every codec beside memory's speed and beside the usual composition of torch operations.

``run`` measures, ``compositions`` is what one would write instead of a codec, ``command`` is the verb. The measuring
itself is ``tuning.codec_times``'s, so that ``codec=auto`` and this table see the same figures.
"""
