"""Connects a codec to one model's buckets and combines the ranks' payloads into one average.

``compression`` keeps the codec's state, ``updates`` distributes weights from their owners, and ``reducers`` has one
file for every way of combining payloads.
"""
