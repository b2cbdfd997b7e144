"""Model types of ours that transformers' Auto classes, and PEFT, know before our models are
imported.

``import fastweights`` must make ``AutoModelForCausalLM.from_pretrained`` read our checkpoints, and
yet import neither torch nor transformers. So a stand-in for each model type enters transformers'
table of configurations as soon as that table exists; the first checkpoint of the type imports the
module that registers its real configuration and models. In the same way PEFT learns which
projections adapters go to where nobody names any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

TABLE = "transformers.models.auto.configuration_auto"
MODELS, LINEARIZE = "fastweights.models", "fastweights.linearize"
OWN_TYPES = ("fastweights", "fastweights_vision")
LINEARIZED_PREFIX = "linearized_"
ADAPTERS = "peft.utils.constants"
PROJECTIONS = ["W_q", "W_k", "W_v", "W_o", "W_u", "W_z", "W_xBC", "W_r"]
"""The layers of mixers that PEFT's adapters go to where nobody names any; each mixer has some."""
MODEL_CLASSES = {
    "FastWeights": MODELS,
    "Linearized": "fastweights.linearize.convert.model_classes",
}
"""The modules of our configurations and models, by what the names of their classes begin with."""


def __getattr__(name: str) -> Any:
    """A class of configurations or models by its name.

    Checkpoints import this function, in modeling_fastweights.py; it stays where it is.
    """
    home = next((home for start, home in MODEL_CLASSES.items() if name.startswith(start)), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def register_when_needed() -> None:
    """Register the stand-ins and the adapters' targets: now if the tables exist, else when they
    are imported.
    """
    for table, register in ((TABLE, _register), (ADAPTERS, _register_projections)):
        if table in sys.modules:
            register()
        else:
            sys.meta_path.insert(0, _TableFinder(table, register))


class _TableFinder(MetaPathFinder):
    """Finds a module with tables as others do, and registers what it lacks once it has run."""

    def __init__(self, table: str, register: Callable[[], None]) -> None:
        self.table, self.register = table, register

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.table:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            follow(spec.loader, lambda _: self.register())
        return spec


def follow(loader: Any, then: Callable[[ModuleType], None]) -> None:
    """Have a loader hand each module to `then` once it has run."""
    execute = loader.exec_module

    def execute_and_follow(module: ModuleType) -> None:
        execute(module)
        then(module)

    loader.exec_module = execute_and_follow


def _register_projections() -> None:
    """Let adapters of PEFT find their layers in our models, and in linearized ones those of the
    models that they were.
    """
    tables = vars(sys.modules[ADAPTERS])
    known = tables["TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"]
    for name, table in tables.items():
        if name.endswith("_MODULES_MAPPING"):
            for base in list(table):
                table.setdefault(LINEARIZED_PREFIX + base, table[base])
            if table.get("llama") == known["llama"]:
                table.setdefault(OWN_TYPES[0], PROJECTIONS)


def _register() -> None:
    table = sys.modules[TABLE]
    homes = dict.fromkeys(OWN_TYPES, MODELS)
    homes |= {LINEARIZED_PREFIX + base: LINEARIZE for base in table.CONFIG_MAPPING_NAMES}
    for model_type, home in homes.items():
        if model_type not in table.CONFIG_MAPPING:
            members = {"stands_for": model_type, "home": home}
            table.CONFIG_MAPPING.register(model_type, type("StandIn", (StandIn,), members))


class StandIn:
    """The configuration class of a model type until one of its configurations is made.

    Attributes:
        stands_for: the model type
        home: the module that registers its real configuration
    """

    stands_for: ClassVar[str]
    home: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._real()(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The real configuration with these fields."""
        return cls._real().from_dict(config_dict, **kwargs)

    @classmethod
    def _real(cls) -> Any:
        import_module(cls.home)
        real = sys.modules[TABLE].CONFIG_MAPPING[cls.stands_for]
        if issubclass(real, StandIn):
            raise ValueError(
                f"model type {cls.stands_for!r} cannot be loaded: transformers has no causal"
                f" language model of type {cls.stands_for.removeprefix(LINEARIZED_PREFIX)!r}"
            )
        return real
