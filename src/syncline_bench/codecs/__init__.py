"""``syncline bench codecs``: every codec beside memory's speed and beside the usual composition of torch operations.

``codec_bench`` measures; ``compositions`` has the operations that a user would write instead of a codec.
``syncline.tuning.codec_times`` does the timing, so ``codec=auto`` and this table see the same figures.
"""
