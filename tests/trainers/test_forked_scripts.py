"""Most scripts of trainers run in forks of a server, which stand for torchrun's processes."""

from __future__ import annotations

import json
from pathlib import Path

import scripts_of_trainers as scripts

scripts.need("torch")

OF_A_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
TELLS = """
import json, os, sys
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(dict(os.environ), file)
"""


def test_forked_ranks_have_what_torchrun_gives(tmp_path: Path) -> None:
    """Whatever of it a trainer goes by; a torch to come may give more."""
    script = tmp_path / "tells.py"
    script.write_text(TELLS)
    scripts.run(*scripts.TORCHRUN, script, tmp_path)
    before = scripts.environment_of_all()
    for rank in range(2):
        told = json.loads((tmp_path / str(rank)).read_text())
        new = {name: value for name, value in told.items() if before.get(name) != value}
        assert len(new) > len(OF_A_RUN)
        forked = scripts.rank_variables(rank, 29500)
        for name in new.keys() - OF_A_RUN:
            assert forked.get(name) == new[name], name
