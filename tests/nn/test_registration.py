"""The registration of the layers with libraries that know layers by their class, whichever is imported first."""

from __future__ import annotations

import json
import subprocess
import sys
import types
import zipfile

import pytest
import torch
from torch import nn

import gatewise
from gatewise.nn import registration

# What Opacus and thop have in these modules: functions by the exact class of a layer.
OPACUS = """
from torch import nn

class ModuleValidator:
    VALIDATORS = {nn.LSTM: "refuses an LSTM", nn.GRU: "refuses a GRU"}
    FIXERS = {nn.LSTM: lambda layer, **options: f"replaces an LSTM of {layer.hidden_size}{options}"}
"""
THOP = """
from torch import nn

register_hooks = {nn.LSTMCell: "counts a cell"}
"""

ENTRIES = """
import json, sys
def entries(registry):
    texts = {kind: entry(kind(1, 2), own=3) if callable(entry) else entry for kind, entry in registry.items()}
    return {kind.__module__.partition(".")[0] + "." + kind.__name__: text for kind, text in texts.items()}
found = {name: entries(getattr(opacus.validators.ModuleValidator, name)) for name in ("VALIDATORS", "FIXERS")}
found["register_hooks"] = entries(thop.profile.register_hooks)
try:
    found["reversed"] = opacus.validators.ModuleValidator.FIXERS[gatewise.LSTM](gatewise.LSTM(1, 2, reverse=True))
except gatewise.ArgumentError as error:
    found["reversed"] = str(error)
found["finders"] = [type(finder).__module__ for finder in sys.meta_path if "gatewise" in type(finder).__module__]
"""

LSTM, GRU, REPLACED = "refuses an LSTM", "refuses a GRU", "replaces an LSTM of 2{'own': 3}"
AS_PYTORCH = {
    "VALIDATORS": {"torch.LSTM": LSTM, "torch.GRU": GRU, "gatewise.LSTM": LSTM, "gatewise.GRU": GRU},
    "FIXERS": {"torch.LSTM": REPLACED, "gatewise.LSTM": REPLACED},
    "register_hooks": {"torch.LSTMCell": "counts a cell", "gatewise.LSTMCell": "counts a cell"},
}


def run(folder, program):
    for name, text in (("opacus/validators", OPACUS), ("thop/profile", THOP)):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    whole = f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


# `make clients` runs Opacus, too.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("gatewise, opacus.validators, thop.profile", marks=pytest.mark.exhaustive),
        "opacus.validators, gatewise, thop.profile",  # one of them before gatewise, the other after it
        pytest.param("opacus.validators, thop.profile, gatewise", marks=pytest.mark.exhaustive),
    ],
)
def test_opacus_and_thop_treat_the_layers_as_those_of_pytorch(tmp_path, imports):
    found = run(tmp_path, f"import {imports}\n{ENTRIES}")
    # Its direction would be lost.
    assert "`reverse` must be False for a layer that Opacus replaces, got True." in found.pop("reversed")
    assert found == {**AS_PYTORCH, "finders": ["gatewise.nn.registration"]}


def test_dynamo_traces_the_layers_and_goes_on_to_refuse_those_of_pytorch():
    torch.compiler.reset()
    x = torch.ones(2, 2, 3)
    layer = gatewise.GRU(3, 4)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN"):
        torch.compile(nn.GRU(3, 4), backend="eager", fullgraph=True)(x)
    assert torch._dynamo.config.allow_rnn is False
    torch.compiler.reset()


def test_other_modules_of_a_zip_archive_are_left_alone(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "found.zip", "w") as archive:
        for name in ("one", "other"):
            archive.writestr(f"gatewise_zipped/{name}.py", "")
        archive.writestr("gatewise_zipped/__init__.py", "")
    called = []
    finder = registration._AfterImport({"gatewise_zipped.one": lambda module: called.append(module.__name__)}, {})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path / "found.zip")
    import gatewise_zipped.one  # type: ignore[import-not-found]
    import gatewise_zipped.other  # type: ignore[import-not-found]

    assert gatewise_zipped.one.__loader__ is gatewise_zipped.other.__loader__
    assert called == ["gatewise_zipped.one"]


def test_a_module_whose_import_has_begun_is_looked_at_when_it_has_ended(monkeypatch):
    module = types.ModuleType("thop.profile")
    module.__spec__ = types.SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "thop.profile", module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    registration.register()
    module.register_hooks = {nn.LSTM: "counts"}  # type: ignore[attr-defined]
    module.__spec__._initializing = False  # type: ignore[union-attr]
    with pytest.raises(ImportError):
        import gatewise_has_no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert module.register_hooks == {nn.LSTM: "counts", gatewise.LSTM: "counts"}


def test_registering_again_changes_nothing(monkeypatch):
    import torch._dynamo.variables.builder as builder

    before = builder.VariableBuilder.wrap_module, torch.fx.Tracer.is_leaf_module
    finders = [type(finder) for finder in sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    registration.register()
    assert (builder.VariableBuilder.wrap_module, torch.fx.Tracer.is_leaf_module) == before
    assert [type(finder) for finder in sys.meta_path] == finders


def test_a_dynamo_without_the_function_that_is_replaced_is_said():
    with pytest.warns(UserWarning, match=r"torch\.compile will not trace gatewise's layers with PyTorch"):
        registration._with_dynamo(types.SimpleNamespace())
