"""nearlight: what keeps a PyTorch program from the speed of light of its GPU, and the fixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives; importing nearlight loads neither torch nor triton.
_HOMES = {
    "optimize": "nearlight.fixes.loop",
    "predict": "nearlight.profiler.predict",
    "save_html": "nearlight.profiler.pages.html",
    "patch": "nearlight.nn.patch",
    "unpatch": "nearlight.nn.patch",
    "compare_models": "nearlight.nn.compare",
    "explain": "nearlight.ops",
    "assert_proved": "nearlight.workbench.prove",
    "ops": "nearlight.ops",
    "nn": "nearlight.nn",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from nearlight import nn as nn
    from nearlight import ops as ops
    from nearlight.fixes.loop import optimize as optimize
    from nearlight.nn.compare import compare_models as compare_models
    from nearlight.nn.patch import patch as patch
    from nearlight.nn.patch import unpatch as unpatch
    from nearlight.ops import explain as explain
    from nearlight.profiler.pages.html import save_html as save_html
    from nearlight.profiler.predict import predict as predict
    from nearlight.workbench.prove import assert_proved as assert_proved
else:

    def __getattr__(name: str) -> Any:
        import importlib

        if name not in _HOMES:
            raise AttributeError(f"nearlight has no {name!r}; it has {', '.join(__all__)}")
        home = importlib.import_module(_HOMES[name])
        value = home if _HOMES[name] == f"nearlight.{name}" else getattr(home, name)
        globals()[name] = value
        return value
