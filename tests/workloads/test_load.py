"""Workloads by name: what is found, what is refused, and that names cost nothing."""

import subprocess
import sys

import pytest

from syncline.errors import UsageError
from syncline.registry import entries, names
from syncline.workloads import load


def test_the_workloads_are_registered_and_documented():
    assert {"digits", "cifar10", "synthetic"} <= set(names("workloads"))
    assert all(entry.summary for entry in entries("workloads"))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("digit", "did you mean 'digits'"),
        ("", "unknown workload"),
        ("digits:8", "write 'digits'"),
        ("cifar10", "write 'cifar10:PATH'"),
        ("synthetic", "choose one of alexnet"),
        ("synthetic:resnet", "did you mean 'synthetic:resnet50'"),
    ],
)
def test_unknown_workloads_are_refused_with_the_remedy(text, hint):
    with pytest.raises(UsageError, match=hint):
        load(text)


def test_names_and_synthetic_data_do_not_import_torch():
    program = (
        "import sys; from syncline.registry import names; names('workloads')\n"
        "import syncline.workloads, syncline.workloads.models\n"
        "syncline.workloads.load('synthetic:alexnet')\n"
        "print([name for name in ('torch', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
