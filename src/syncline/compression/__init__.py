"""Connects a codec to one model's buckets and combines the ranks' payloads into one average.

``compression`` keeps the codec's state between steps: start reading there. ``updates`` distributes weights from their
owners, and ``reducers`` has the ways of combining payloads. ``session``, ``training``, ``serving`` and models of costs
import from here; nothing here knows a transport or a thread.
"""
