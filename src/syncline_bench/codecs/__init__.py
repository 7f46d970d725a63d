"""``syncline bench codecs``: every codec next to memory's speed and to the usual composition of torch operations.

``codec_bench`` measures; ``compositions`` has the operations that a user would write instead of a codec.
``syncline.tuning.codec_times`` does the timing, so ``codec=auto`` and this table see the same figures.
"""
