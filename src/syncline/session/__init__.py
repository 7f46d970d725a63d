"""A process's place in a run: ``session`` has the collectives, ``tickets`` what ranks show each other at every call,
``ending`` what is said and heard of the end, ``stats`` the totals.
"""
