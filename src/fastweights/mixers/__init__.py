"""One file per paper; `MIXERS` names them all."""

from fastweights.mixers.based import Based
from fastweights.mixers.cosformer import CosFormer
from fastweights.mixers.deltanet import DeltaNet
from fastweights.mixers.dss import DSS
from fastweights.mixers.fox import FoX
from fastweights.mixers.gated_deltanet import GatedDeltaNet, LogLinearGatedDeltaNet
from fastweights.mixers.gla import GLA
from fastweights.mixers.gsa import GSA
from fastweights.mixers.h3 import H3
from fastweights.mixers.hgrn import HGRN
from fastweights.mixers.hgrn2 import HGRN2
from fastweights.mixers.kalmanet import GatedKalmaNet
from fastweights.mixers.linear import LinearAttention
from fastweights.mixers.lolcats import LoLCATs
from fastweights.mixers.lru import LRU
from fastweights.mixers.mamba import Mamba
from fastweights.mixers.mamba2 import LogLinearMamba2, Mamba2
from fastweights.mixers.mesa import MesaLayer, SignedMesaLayer
from fastweights.mixers.mesanet import MesaNetBaseline
from fastweights.mixers.metala import MetaLA
from fastweights.mixers.mlstm import MLSTM
from fastweights.mixers.normalized import NormalizedAttention
from fastweights.mixers.performer import Performer
from fastweights.mixers.qlstm import QLSTM
from fastweights.mixers.raven import Raven
from fastweights.mixers.registry import MIXERS, make, plugin, register
from fastweights.mixers.retnet import RetNet
from fastweights.mixers.rfa import RFA
from fastweights.mixers.rglru import RGLRU
from fastweights.mixers.rwkv4 import RWKV4
from fastweights.mixers.rwkv4_channel import RWKV4Channel
from fastweights.mixers.s4d import S4D
from fastweights.mixers.s5 import S5
from fastweights.mixers.softmax import SlidingWindow, SoftmaxAttention
from fastweights.mixers.transnormer import TransNormer

__all__ = [
    "DSS",
    "GLA",
    "GSA",
    "H3",
    "HGRN",
    "HGRN2",
    "LRU",
    "MIXERS",
    "MLSTM",
    "QLSTM",
    "RFA",
    "RGLRU",
    "RWKV4",
    "S4D",
    "S5",
    "Based",
    "CosFormer",
    "DeltaNet",
    "FoX",
    "GatedDeltaNet",
    "GatedKalmaNet",
    "LinearAttention",
    "LoLCATs",
    "LogLinearGatedDeltaNet",
    "LogLinearMamba2",
    "Mamba",
    "Mamba2",
    "MesaLayer",
    "MesaNetBaseline",
    "MetaLA",
    "NormalizedAttention",
    "Performer",
    "RWKV4Channel",
    "Raven",
    "RetNet",
    "SignedMesaLayer",
    "SlidingWindow",
    "SoftmaxAttention",
    "TransNormer",
    "make",
    "plugin",
    "register",
]
