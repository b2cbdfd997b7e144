"""One file per paper; `MIXERS` names them all."""

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
from fastweights.mixers.pgdn import PreconditionedGatedDeltaNet
from fastweights.mixers.pkda import PreconditionedKDA
from fastweights.mixers.qlstm import QLSTM
from fastweights.mixers.raven import Raven
from fastweights.mixers.registry import MIXERS, make, plugin, register
from fastweights.mixers.retnet import RetNet
from fastweights.mixers.rfa import RFA
from fastweights.mixers.rglru import RGLRU
from fastweights.mixers.rodimus import Rodimus
from fastweights.mixers.rwkv4 import RWKV4
from fastweights.mixers.rwkv4_channel import RWKV4Channel
from fastweights.mixers.rwkv6 import RWKV6
from fastweights.mixers.rwkv7 import RWKV7, RWKV7Channel
from fastweights.mixers.s4 import S4
from fastweights.mixers.s4d import S4D
from fastweights.mixers.s5 import S5
from fastweights.mixers.shortconv import GatedShortConvolution
from fastweights.mixers.softmax import OLMo2Attention, SlidingWindow, SoftmaxAttention
from fastweights.mixers.transnormer import TransNormer
from fastweights.mixers.ttt import TTTMLP, TTTLinear

__all__ = [
    "DSS",
    "GLA",
    "GSA",
    "H3",
    "HGRN",
    "HGRN2",
    "KDA",
    "LRU",
    "MIXERS",
    "MLA",
    "MLSTM",
    "QLSTM",
    "RFA",
    "RGLRU",
    "RWKV4",
    "RWKV6",
    "RWKV7",
    "S4",
    "S4D",
    "S5",
    "TTTMLP",
    "Based",
    "Comba",
    "CosFormer",
    "DeltaNet",
    "FoX",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedKalmaNet",
    "GatedShortConvolution",
    "Hyena",
    "Lightning",
    "LinearAttention",
    "LoLCATs",
    "LogLinearGatedDeltaNet",
    "LogLinearMamba2",
    "Longhorn",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MesaLayer",
    "MesaNetBaseline",
    "MetaLA",
    "MixtureOfMemories",
    "NormalizedAttention",
    "OLMo2Attention",
    "Performer",
    "PreconditionedGatedDeltaNet",
    "PreconditionedKDA",
    "RWKV4Channel",
    "RWKV7Channel",
    "Raven",
    "RetNet",
    "Rodimus",
    "SignedMesaLayer",
    "SlidingWindow",
    "SoftmaxAttention",
    "TTTLinear",
    "TransNormer",
    "make",
    "plugin",
    "register",
]
