"""A PyTorch Lightning template for image classification on one device or many.

Three rooms: `model` is what is trained, `data` is on what, `run` is where and how. Importing it has one effect: Lightning
knows the strategy "dp" from then on. Lightning itself, which takes seconds, is not imported for that.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _WithLightning(MetaPathFinder, Loader):
    """Import `lightning.pytorch` as ever, once it is wanted, and after it what tells it of "dp"."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "lightning.pytorch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)  # everybody else's answer
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        from project.run import strategies as strategies


if "lightning.pytorch" in sys.modules:
    from project.run import strategies as strategies
else:
    sys.meta_path.insert(0, _WithLightning())
