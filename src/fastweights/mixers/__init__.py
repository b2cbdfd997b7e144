"""One file per paper; `MIXERS` names them all, and those of a user's own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import signature

from fastweights.layers.arguments import require_annotated
from fastweights.mixer import Mixer
from fastweights.mixers.based import Based
from fastweights.mixers.comba import Comba
from fastweights.mixers.cosformer import CosFormer
from fastweights.mixers.deltanet import DeltaNet
from fastweights.mixers.dss import DSS
from fastweights.mixers.fox import FoX
from fastweights.mixers.gated_deltanet import GatedDeltaNet, LogLinearGatedDeltaNet
from fastweights.mixers.gated_deltaproduct import GatedDeltaProduct
from fastweights.mixers.gdn2 import GatedDeltaNet2
from fastweights.mixers.gla import GLA
from fastweights.mixers.gsa import GSA
from fastweights.mixers.h3 import H3
from fastweights.mixers.hgrn import HGRN
from fastweights.mixers.hgrn2 import HGRN2
from fastweights.mixers.hyena import Hyena
from fastweights.mixers.kalmanet import GatedKalmaNet
from fastweights.mixers.kda import KDA
from fastweights.mixers.lightning import Lightning
from fastweights.mixers.linear import LinearAttention
from fastweights.mixers.lolcats import LoLCATs
from fastweights.mixers.longhorn import Longhorn
from fastweights.mixers.lru import LRU
from fastweights.mixers.mamba import Mamba
from fastweights.mixers.mamba2 import LogLinearMamba2, Mamba2
from fastweights.mixers.mamba3 import Mamba3
from fastweights.mixers.mesa import MesaLayer, SignedMesaLayer
from fastweights.mixers.mesanet import MesaNetBaseline
from fastweights.mixers.metala import MetaLA
from fastweights.mixers.mla import MLA
from fastweights.mixers.mlstm import MLSTM
from fastweights.mixers.mom import MixtureOfMemories
from fastweights.mixers.normalized import NormalizedAttention
from fastweights.mixers.performer import Performer
from fastweights.mixers.pgdn import PreconditionedGatedDeltaNet, PreconditionedKDA
from fastweights.mixers.qlstm import QLSTM
from fastweights.mixers.raven import Raven
from fastweights.mixers.retnet import RetNet
from fastweights.mixers.rfa import RFA
from fastweights.mixers.rglru import RGLRU
from fastweights.mixers.rodimus import Rodimus
from fastweights.mixers.rwkv4 import RWKV4, RWKV4Channel
from fastweights.mixers.rwkv6 import RWKV6
from fastweights.mixers.rwkv7 import RWKV7, RWKV7Channel
from fastweights.mixers.s4 import S4
from fastweights.mixers.s4d import S4D
from fastweights.mixers.s5 import S5
from fastweights.mixers.shortconv import GatedShortConvolution
from fastweights.mixers.softmax import OLMo2Attention, SlidingWindow, SoftmaxAttention
from fastweights.mixers.transnormer import TransNormer
from fastweights.mixers.ttt import TTTMLP, TTTLinear

MIXERS: dict[str, type[Mixer]] = {
    "softmax": SoftmaxAttention,
    "swa": SlidingWindow,
    "olmo2": OLMo2Attention,
    "mla": MLA,
    "fox": FoX,
    "linear": LinearAttention,
    "performer": Performer,
    "rfa": RFA,
    "cosformer": CosFormer,
    "based": Based,
    "normalized": NormalizedAttention,
    "retnet": RetNet,
    "transnormer": TransNormer,
    "lightning": Lightning,
    "gla": GLA,
    "gsa": GSA,
    "raven": Raven,
    "hgrn": HGRN,
    "hgrn2": HGRN2,
    "metala": MetaLA,
    "dss": DSS,
    "s4": S4,
    "s4d": S4D,
    "h3": H3,
    "s5": S5,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "longhorn": Longhorn,
    "rodimus": Rodimus,
    "loglinear_mamba2": LogLinearMamba2,
    "lru": LRU,
    "rglru": RGLRU,
    "qlstm": QLSTM,
    "rwkv4": RWKV4,
    "rwkv4_channel": RWKV4Channel,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
    "rwkv7_channel": RWKV7Channel,
    "mlstm": MLSTM,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KDA,
    "gated_deltaproduct": GatedDeltaProduct,
    "gdn2": GatedDeltaNet2,
    "comba": Comba,
    "pgdn": PreconditionedGatedDeltaNet,
    "pkda": PreconditionedKDA,
    "mom": MixtureOfMemories,
    "loglinear_gdn": LogLinearGatedDeltaNet,
    "mesa": MesaLayer,
    "mesa_signed": SignedMesaLayer,
    "mesanet": MesaNetBaseline,
    "kalmanet": GatedKalmaNet,
    "ttt_linear": TTTLinear,
    "ttt_mlp": TTTMLP,
    "lolcats": LoLCATs,
    "shortconv": GatedShortConvolution,
    "hyena": Hyena,
}

__all__ = ["MIXERS", "make", "plugin", "register"]


def register(name: str, mixer: type[Mixer]) -> None:
    """Make `mixer` known as `name` to models, the command and checkpoints; raises if the name is
    taken.
    """
    if not (isinstance(name, str) and name.strip()):
        raise ValueError(f"a mixer cannot be called {name!r}; give it a name, such as 'mine'")
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise TypeError(f"{mixer!r} is not a Mixer; register a class that inherits from it")
    if MIXERS.get(name, mixer) is not mixer:
        raise ValueError(f"the name {name!r} already means {MIXERS[name].__name__}; choose another")
    MIXERS[name] = mixer


def plugin(path: str) -> str:
    """Register the mixer that ``package.module:Class`` names, under this very name, and return it.

    The module is looked for where Python looks, and in the working folder, under its present name
    if it is one of ours that has moved. Raises ValueError if it cannot be had.
    """
    module, separator, name = path.partition(":")
    if not (module and separator and name):
        raise ValueError(
            f"{path!r} names no class; write package.module:Class, such as mypkg.mymixer:MyMixer"
        )
    with _working_folder_importable():
        try:
            register(path, getattr(import_module(module), name))
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(f"cannot use {path!r} as a mixer: {error}") from error
    return path


@contextmanager
def _working_folder_importable() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def make(name: str, d: int, **arguments: object) -> Mixer:
    """The mixer called `name` for model width `d`; an unknown name or argument is an error that
    lists the known, and one of another type than the mixer's own annotation an error that says so.
    """
    if name not in MIXERS:
        own = ":" in str(name)
        yours = f"; fastweights.mixers.plugin({name!r}) makes it known" if own else ""
        raise ValueError(f"unknown mixer {name!r}{yours}; there are {', '.join(sorted(MIXERS))}")
    known = signature(MIXERS[name]).parameters
    unknown = sorted(arguments.keys() - known.keys())
    if unknown:
        raise ValueError(f"{name} does not take {', '.join(unknown)}; it takes {', '.join(known)}")
    require_annotated(name, MIXERS[name].__init__, arguments)
    return MIXERS[name](d=d, **arguments)
