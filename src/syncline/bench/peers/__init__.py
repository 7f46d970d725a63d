"""Peers: what one would use instead of Syncline, measured beside it in its best documented setting.

One file per peer, registered under its name (kind ``peers``) and named with arguments like a strategy's parts:
``ddp(bucket=5MiB)``. What a peer declares says where it can take part:

    trains=True     in ``syncline compare``: ``join()`` makes this process a member of the run's group and returns what
                    ``bench.train.Side`` asks for

Loading a peer's file loads no library of its own.
"""
