"""One file per paper; `MIXERS` names them all."""

from inspect import signature

from fastweights.mixer import Mixer
from fastweights.mixers.gated_deltanet import GatedDeltaNet
from fastweights.mixers.gla import GLA
from fastweights.mixers.linear import Linear
from fastweights.mixers.lolcats import LoLCATs
from fastweights.mixers.mamba import Mamba
from fastweights.mixers.mesa import MesaLayer
from fastweights.mixers.metala import MetaLA
from fastweights.mixers.softmax import SoftmaxAttention

MIXERS: dict[str, type[Mixer]] = {
    "softmax": SoftmaxAttention,
    "linear": Linear,
    "gla": GLA,
    "metala": MetaLA,
    "mamba": Mamba,
    "gated_deltanet": GatedDeltaNet,
    "mesa": MesaLayer,
    "lolcats": LoLCATs,
}


def register(name: str, mixer: type[Mixer]) -> None:
    """Make `mixer` known as `name` to models, the command and checkpoints; raises if the name is taken."""
    if MIXERS.get(name, mixer) is not mixer:
        raise ValueError(f"the name {name!r} already means {MIXERS[name].__name__}; choose another")
    if not issubclass(mixer, Mixer):
        raise TypeError(f"{mixer!r} is not a Mixer")
    MIXERS[name] = mixer


def make(name: str, d: int, **arguments: object) -> Mixer:
    """The mixer called `name` for model width `d`; an unknown name or argument is an error that lists the known."""
    if name not in MIXERS:
        raise ValueError(f"unknown mixer {name!r}; there are {', '.join(sorted(MIXERS))}")
    known = signature(MIXERS[name]).parameters
    unknown = sorted(arguments.keys() - known.keys())
    if unknown:
        raise ValueError(f"{name} does not take {', '.join(unknown)}; it takes {', '.join(known)}")
    return MIXERS[name](d=d, **arguments)


__all__ = [
    "GLA",
    "MIXERS",
    "GatedDeltaNet",
    "Linear",
    "LoLCATs",
    "Mamba",
    "MesaLayer",
    "MetaLA",
    "SoftmaxAttention",
    "make",
    "register",
]
