"""The way in which a strategy moves gradients and weights between workers and owners."""

from __future__ import annotations

from ..session.session import Session
from .carriers import Payloads, Plans
from .merged import Coded, Planned
from .single import Single
from .traffic import Model, Traffic


def traffic_of(session: Session, model: Model) -> Traffic:
    """As the sync mode and the codec say."""
    if not session.strategy.sync_mode().merges:
        carrier = Plans(session, model) if model.compression is None else Payloads(session, model, model.compression)
        return Single(session, model, carrier)
    return Planned(session, model) if model.compression is None else Coded(session, model, model.compression)
