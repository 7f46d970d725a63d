"""All errors that Syncline raises on purpose, in one tree.

    SynclineError
    ├── UsageError (also ValueError)   a user's mistake, raised before any work starts
    │   ├── StrategyError              a strategy that cannot be parsed or built
    │   ├── NotBuiltError              a call for which a part does not exist yet
    │   ├── PlanError                  a plan that does not do what it claims
    │   └── DataError                  a data file that is missing, truncated or altered
    ├── GroupError                     the group could not be formed
    │   ├── RollCallError              ranks that did not come, came twice, or disagree
    │   └── HandshakeError             a connection that could not prove it belongs to the run
    │       └── SecretError            whose other end holds another secret, or none
    ├── PeerError                      another process failed: names rank, host and operation
    │   ├── PeerLost                   it died, was stopped, or its machine is gone
    │   ├── PeerLeft                   it said goodbye while others still needed it
    │   ├── ProtocolError              it sent data that no process of this version sends
    │   │   └── AlteredError           or data that were altered on their way
    │   └── PeerTimeout                it is alive, but an operation outlasted its time limit
    ├── MismatchError                  the ranks made different calls at the same point
    ├── ViewEnds                       an elastic run goes on in another session, which syncline.elastic() begins
    ├── GradientError                  a gradient that cannot be exchanged: missing, sparse, changed
    └── ClosedError                    the session or transport was used after its end

A message tells what happened, where (rank, host, peer, bucket, operation) and what to do.
"""

from __future__ import annotations


class SynclineError(Exception):
    """The base of every error raised by Syncline on purpose."""


class UsageError(SynclineError, ValueError):
    """A user's mistake, raised at construction with the remedy in its text."""


class StrategyError(UsageError):
    """A strategy text or combination that is unknown or impossible."""


class NotBuiltError(UsageError):
    """A call that asks for a part which is not built yet."""


class PlanError(UsageError):
    """A plan that is malformed, or whose transfers do not reach its goal."""


class DataError(UsageError):
    """A data file that is missing, truncated, altered or of another format."""


class GroupError(SynclineError):
    """The processes of a run could not form a group."""


class RollCallError(GroupError):
    """Ranks are missing, duplicate, or disagree about the run."""


class HandshakeError(GroupError):
    """A connection could not prove that it belongs to this run."""


class SecretError(HandshakeError):
    """The other end of a connection holds another secret than this process, or none."""


class PeerError(SynclineError):
    """Another process of the group failed. ``rank`` is the culprit's process index, ``host`` its host name."""

    def __init__(self, message: str, *, rank: int, host: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host


class PeerLost(PeerError):
    """A peer died, was stopped, raised, or cannot be reached any more."""


class PeerLeft(PeerError):
    """A peer ended its part of the run while others still needed it."""


class ProtocolError(PeerError):
    """An authenticated peer sent data that this version never sends: it has another version, or a faulty machine."""


class AlteredError(ProtocolError):
    """Bytes from a peer were altered on their way, as a checksum shows: a fault of a machine or of the network."""


class PeerTimeout(PeerError):
    """A peer is alive, but an operation with it outlasted its time limit."""


class MismatchError(SynclineError):
    """The ranks called different operations, or with different arguments, at the same point."""


class ViewEnds(SynclineError):
    """A process joins an elastic run. ``syncline.elastic`` catches this error and goes on in another session."""

    def __init__(
        self, text: str = "a process joins the run: syncline.elastic() goes on with it in another session"
    ) -> None:
        super().__init__(text)


class GradientError(SynclineError):
    """A gradient cannot be exchanged: it is missing, sparse, or was changed after it was sent."""


class ClosedError(SynclineError):
    """A session or transport was used before its start, after its end, or in a forked child."""


def within(limit_s: float) -> str:
    """A time limit for messages, with enough digits for short ones."""
    return f"within {limit_s:.1f} s" if limit_s >= 0.1 else f"within {limit_s:g} s"


def labelled(label: str, error: Exception) -> Exception:
    """The error, with a label prepended. ``ViewEnds`` stays as it is."""
    if isinstance(error, ViewEnds):
        return error
    text = f"{label}: {error}"
    return type(error)(text, rank=error.rank, host=error.host) if isinstance(error, PeerError) else SynclineError(text)
