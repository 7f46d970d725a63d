"""Workloads by name: what is found, what is refused, and that names cost nothing."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from syncline import registry
from syncline.errors import UsageError
from syncline.registry import Entry, entries, names
from syncline_bench.workloads import Workload, load


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
        ("digits(lodaing=5ms)", "has no argument 'lodaing'; did you mean 'loading'"),
        ("digits(5ms)", r"arguments have names, as in digits\(hidden=5ms\)"),
        ("digits(loading=-5ms)", "loading of digits cannot be negative"),
        ("digits(loading=5)(h2d=1)", "unknown workload"),
        ("digits(h2d=5m)", "the units are ns, us, ms, s, min, h"),
        ("digits(prefetch=-1)", r"from 0 \(none ahead\) up, got -1"),
        ("digits(prefetch=few)", "prefetch of digits must be a whole number"),
        ("digits(loading=1ms, loading=2ms)", "'loading' is given twice"),
        ("digits(autotune=yes)", "autotune of digits must be off or on"),
        ("replay:alexnet(device=cpu)", "replay takes loading, h2d, prefetch"),
    ],
)
def test_unknown_workloads_are_refused_with_the_remedy(text, hint):
    with pytest.raises(UsageError, match=hint):
        load(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("synthetic:alexnet", "synthetic:alexnet"),
        (" synthetic:alexnet (prefetch=2,loading = 0.005) ", "synthetic:alexnet(loading=5ms, prefetch=2)"),
        ("synthetic:alexnet(h2d=1000us, loading=0s)", "synthetic:alexnet(h2d=1ms)"),
        ("synthetic:alexnet(channels_last=on, h2d=0)", "synthetic:alexnet(h2d=0s, channels_last=on)"),
    ],
)
def test_every_workload_has_one_name_which_says_the_same(text: str, name: str) -> None:
    found = load(text)
    assert found.name == name
    again = load(name)
    assert (again.name, again.pipeline, again.computing) == (found.name, found.pipeline, found.computing)


def test_parentheses_of_a_path_are_no_arguments(tmp_path: Path) -> None:
    path = tmp_path / "layers (1)"
    path.write_text("name,elements,forward_s,backward_s\nfc,4,0.25,0.5\n")
    assert load(f"trace:{path}").name == f"trace:{path}"
    assert load(f"trace:{path}(prefetch=1)").pipeline.prefetch == 1


def test_workloads_of_others_load_and_prefetch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load("synthetic:alexnet")

    def own(argument: str = "", *, rate: float = 1.0) -> Workload:
        """A workload of somebody else's, with an argument of its own."""
        return replace(made, name=f"own{argument}", batch=int(rate))

    monkeypatch.setitem(registry._entries["workloads"], "own", Entry("workloads", "own", own))
    found = load("own(rate=7.0, loading=5ms)")
    assert (found.name, found.batch, found.pipeline.loading) == ("own(rate=7.0, loading=5ms)", 7, 0.005)
    with pytest.raises(UsageError, match="own takes rate, loading, h2d, prefetch"):
        load("own(device=cpu)")


def test_names_and_synthetic_data_do_not_import_torch():
    program = (
        "import sys; from syncline.registry import names; names('workloads')\n"
        "import syncline_bench.workloads, syncline_bench.workloads.models\n"
        "syncline_bench.workloads.load('synthetic:alexnet')\n"
        "print([name for name in ('torch', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
