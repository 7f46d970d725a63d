"""A server that only sums: it takes part in the workers' exchange of gradients, and holds no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..compression.compression import Compression
from ..engine.work import Work
from ..nouns import Bucket
from ..plans.messages import Program
from ..session.communicator import compiled
from ..session.layout import LABEL, Layout, hear_layout
from ..session.replacing import LABEL as REPLACING
from ..session.replacing import Recompressing
from ..session.session import Heard, Session
from .merged import push_coded, push_plan
from .records import Array

Lay = Callable[[Sequence[Bucket]], Sequence[Array]]
"""Lays the memory of gradients out for other buckets."""


class Summing:
    """The server's part in the exchanges of one model.

    ``lay`` lays the memory of the ``gradients`` out anew; without it the layout stays as it is.
    """

    def __init__(
        self,
        session: Session,
        layout: Layout,
        gradients: Sequence[Array],
        compression: Compression | None,
        lay: Lay | None = None,
    ) -> None:
        self._session, self._layout, self._gradients, self._lay = session, layout, gradients, lay
        self._compression = compression
        self._program: Program = compiled(session.strategy.plan(session.group), session.index)
        self._posted: list[Work] = []
        self._exchanges = 0  # in this layout, the posted one included
        self._post()
        self._heard = None if lay is None else session.listen(LABEL)

    def serve(self) -> None:
        """Return when every worker has left; raises the fault when there is one."""
        engine, left = self._session.engine, self._session.ending.workers_left
        while not left():
            late = next((work for work in self._posted if not work.done), None)
            if late is None:
                self._post()
                continue
            engine.wait_any([late] if self._heard is None else [late, self._heard.work], until=left)
            if self._heard is not None and self._lay is not None and self._heard.work.done:
                self._replace(self._heard, self._lay)

    def _post(self) -> None:
        session, self._exchanges = self._session, self._exchanges + 1
        if self._compression is None:
            self._posted = push_plan(session, self._program, self._gradients)
        else:
            self._posted = push_coded(session, self._compression)

    def _replace(self, heard: Heard, lay: Lay) -> None:
        """As ``session.replacing`` has it."""
        session, engine = self._session, self._session.engine
        layout, passed = hear_layout(session, self._layout.layers, heard)
        while self._exchanges <= passed.exchanges:  # the workers have these behind them
            engine.wait(*self._posted)
            self._post()
        compression = Recompressing(session, self._compression)
        session.meet_everyone(REPLACING)
        if passed.anew or not layout.travels_like(self._layout):
            engine.wait(*self._posted)
            self._gradients = lay(layout.buckets)
            self._compression = compression.on(layout.buckets, self._gradients, passed)
            self._exchanges = 0
            self._post()
        self._layout = layout
        self._heard = session.listen(LABEL)
