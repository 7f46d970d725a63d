"""What a world of one worker leaves out of a strategy: a script that is tried on one shall not be taken for another."""

from __future__ import annotations

import logging

from ..session.session import Session
from ..sync import Agrees

log = logging.getLogger("syncline")


def warn_of_plain_steps(session: Session) -> None:
    """Say where one worker's weights would be others under the sync mode, which a world of one does not apply."""
    mode = session.strategy.sync_mode()
    if isinstance(mode, Agrees) and (mode.remembers or mode.pull(1) < 1):
        log.warning(
            "sync=%s does nothing with one worker: its steps are plain ones, and no outer optimizer or centre changes"
            " the weights as it would with several; compare with two workers or more",
            session.strategy.sync.name,
        )
