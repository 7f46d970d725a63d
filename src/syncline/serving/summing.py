"""A server that only sums: it takes part in the workers' exchange of gradients, and holds no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..compression.compression import Compression
from ..engine.order import CodedOrder, Order, Work
from ..errors import ProtocolError
from ..nouns import Bucket
from ..plans.messages import Program
from ..session.communicator import Heard, compiled
from ..session.layout import LABEL, REPLACING, Layout, Recompressing, hear_layout
from ..session.session import Session
from .merged import coded_posts, planned_posts
from .records import Array

Lay = Callable[[Sequence[Bucket]], Sequence[Array]]
"""Cuts the memory of gradients into other buckets."""


class Summing:
    """The server's part in the exchanges of one model.

    ``lay`` cuts the memory of the ``gradients`` anew; without it the layout stays as it is.
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
        self._heard = None if lay is None else session.everyone.listen(LABEL)

    def serve(self) -> None:
        """Return when every worker has left; raises the fault when there is one."""
        engine, left = self._session.engine, self._session.ending.workers_left
        while not engine.over(left):
            coming = [work for work in self._posted if not work.done][:1]
            if not coming and self._owns:
                self._post()
                continue
            engine.wait_any(coming if self._heard is None else [*coming, self._heard.work], until=left)
            if self._heard is not None and self._lay is not None and self._heard.work.done:
                self._replace(self._heard, self._lay)

    @property
    def _owns(self) -> bool:
        """False where a codec leaves nothing of the model to this server: what it posts is done at once."""
        return self._compression is None or self._compression.owns

    def _post(self) -> None:
        session, self._exchanges = self._session, self._exchanges + 1
        if self._compression is None:
            orders: Sequence[Order | CodedOrder] = planned_posts(self._program, self._gradients)
        else:
            orders = coded_posts(session, self._compression)
        self._posted = [session.engine.start(order) for order in orders]

    def _replace(self, heard: Heard, lay: Lay) -> None:
        """As ``session.layout`` has it."""
        session, engine = self._session, self._session.engine
        layout, passed = hear_layout(session, self._layout.layers, heard)
        if passed.exchanges > self._exchanges and self._owns:
            raise ProtocolError(f"{LABEL}: {session.name(0)} tells of {passed.exchanges} exchanges", rank=0)
        if passed.exchanges == self._exchanges and self._owns:  # the workers have this one behind them
            engine.wait(*self._posted)
            self._post()
        anew = passed.anew or not layout.travels_like(self._layout)
        compression = Recompressing(session, self._compression if anew else None)
        session.everyone.meet(REPLACING)
        if anew:
            engine.wait(*self._posted)
            self._gradients = lay(layout.buckets)
            self._compression = compression.on(layout.buckets, self._gradients, passed)
            self._exchanges = 0
            self._post()
        self._layout = layout
        self._heard = session.everyone.listen(LABEL)
