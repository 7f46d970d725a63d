"""Lightning over Syncline: ``import syncline.lightning`` lets ``Trainer(strategy="syncline")`` be known.

Not loaded with the package, since it loads Lightning.
"""

from __future__ import annotations

from .frameworks.torch.lightning import SynclineStrategy
from .torch_backend import register

__all__ = ["SynclineStrategy"]

register()  # torch may not have been loaded with the package
