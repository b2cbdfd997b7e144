"""The shape letters used everywhere, as jaxtyping aliases.

b batch · t time (query) · s time (key) · h head · g head of grouped keys · k key width · v value
width · f features · m slots · l levels · p parameters of a head · d model width

Streams are ``[b t h ·]`` and broadcast over b, t, h where an axis has length 1 (``#`` below).
States are ``[b h k v]`` (or tuples of batch-first tensors), in float32 or wider.
"""

from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

Keys = Inexact[Tensor, "#b #t #h k"]
Values = Inexact[Tensor, "#b #t #h v"]
GroupKeys = Inexact[Tensor, "#b #t #g k"]
GroupValues = Inexact[Tensor, "#b #t #g v"]
SlotShares = Inexact[Tensor, "#b #t #h m"]
SlotDecay = Inexact[Tensor, "#b #t #h #m"]
Levels = Inexact[Tensor, "#b #t #h l"]
Skip = Inexact[Tensor, "#b #t #h #v"]
Features = Inexact[Tensor, "#b #t #h f"]
GroupFeatures = Inexact[Tensor, "#b #t #g f"]
PerToken = Inexact[Tensor, "#b #t #h 1"]
HeadVectors = Inexact[Tensor, "#b #t #h k"]
HeadWeights = Inexact[Tensor, "#b #t #h p"]
LogDecay = Inexact[Tensor, "#b #t #h #k"]
Output = Inexact[Tensor, "b t h v"]
Map = Inexact[Tensor, "b h t s"]
Embedded = Float[Tensor, "b t d"]
Mask = Bool[Tensor, "b t"]
Segments = Int[Tensor, "b t"]
