"""Feature maps φ, whose products φ(q)·φ(k) replace softmax's exp(q·k) in linear attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fastweights.layers import LARGEST, accumulate_dtype, bounded_exp, upcast
from fastweights.recurrence.mapped import FeatureMap, ScaledMap, elu_plus_one, softmax
from fastweights.recurrence.streams import disable_autocast, with_room

FEATURES: Mapping[str, Callable[[Tensor], Tensor]] = {"elu": elu_plus_one, "relu": F.relu}
"""Maps to [0, ∞), channel by channel, by the names that configurations use."""


def cos_sin_features(x: Tensor, angle: Tensor) -> Tensor:
    """Return the features (x cos, x sin), ``[… w]`` → ``[… 2w]``, whose products depend on angles'
    differences.

    Products of q and k have channel i times cos(angle_ti - angle_si).
    """
    return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], dim=-1)


def taylor(x: Tensor) -> Tensor:
    """Return the features of exp's second-order Taylor polynomial, ``[… w]`` → ``[… 1 + w +
    w(w+1)/2]``.

    φ(q)·φ(k) = 1 + q·k + (q·k)²/2 (Based eq. 2; DSF eq. 18 cut off). Of the products x_i x_j only
    those with i ≤ j are kept, since q_i q_j k_i k_j counts twice for i < j.
    """
    width = x.shape[-1]
    i, j = torch.triu_indices(width, width, device=x.device)
    twice = x.new_ones(len(i)).masked_fill(i == j, 0.5**0.5)
    return torch.cat([torch.ones_like(x[..., :1]), x, x[..., i] * x[..., j] * twice], dim=-1)


def gaussian(count: int, width: int, seed: int) -> Tensor:
    """Draw ``[count width]`` rows from N(0, I), the same for the same seed on every machine."""
    return torch.randn(
        count, width, generator=Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
    )


def orthogonal(count: int, width: int, seed: int) -> Tensor:
    """Draw as `gaussian`, with every block of `width` rows made orthogonal and lengths kept
    (Performer, section 2.4)."""
    lengths = gaussian(count, width, seed).norm(dim=-1, keepdim=True)
    return lengths * torch.cat(
        [_rotation(block) for block in gaussian(count, width, seed + 1).split(width)]
    )


def _rotation(rows: Tensor) -> Tensor:
    """Orthonormal rows, uniform if `rows` are Gaussian: with R's diagonal made positive, as QR
    alone leaves it to the sign of the first component, and the mean of the rows away from zero.
    """
    q, r = torch.linalg.qr(rows.mT)
    return (q * r.diagonal().sign()).mT


class PositiveRandom(nn.Module):
    """Performer's positive random features (FAVOR+), which approximate exp(q·k).

    E φ(q)·φ(k) = exp(q·k) with φ_i(x) = exp(ω_i·x - ‖x‖²/2)      (Performer, Lemma 1)

    The factor exp(‖ω_i‖²/2) is moved from the key, where it leaves exp(-‖k - ω_i‖²/2) ≤ 1, to the
    query, where a factor common to all i cancels in the normaliser: nothing overflows, and no
    maximum is taken over time.
    """

    omega: Tensor

    def __init__(self, width: int, count: int, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("omega", torch.empty(count, width))
        self.reset_parameters()
        self.shift = min(
            width / 2, LARGEST
        )  # typical of ‖ω‖²/2; a constant factor of all keys cancels as well

    def reset_parameters(self) -> None:
        count, width = self.omega.shape
        self.omega.copy_(orthogonal(count, width, self.seed))

    def query(self, q: Tensor) -> Tensor:
        exponent = self._random_projection(q) + self._half(q)
        return (exponent - exponent.detach().amax(-1, keepdim=True)).exp().to(with_room(q).dtype)

    def key(self, k: Tensor) -> Tensor:
        distance = (
            upcast(k).square().sum(-1, keepdim=True) / 2
            + self._half(k)
            - self._random_projection(k)
        )
        return bounded_exp(self.shift - distance).to(with_room(k).dtype)

    def _half(self, x: Tensor) -> Tensor:
        return self.omega.to(accumulate_dtype(x)).square().sum(-1) / 2

    def _random_projection(self, x: Tensor) -> Tensor:
        with disable_autocast(x.device):
            return upcast(x) @ self.omega.to(accumulate_dtype(x)).mT


class RandomFourier(nn.Module):
    """RFA's random Fourier features, which approximate a Gaussian kernel of q and k.

    E φ(q)·φ(k) = exp(-‖σ ⊙ (q - k)‖²/2)
    φ(x) = (sin Wx, cos Wx) / √D, W = ω diag(σ)      (RFA eq. 3-4)

    σ is learnt per head and channel, and is 1 initially.
    """

    omega: Tensor

    def __init__(self, heads: int, width: int, count: int, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("omega", torch.empty(count, width))
        self.sigma = nn.Parameter(torch.empty(heads, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.sigma)
        count, width = self.omega.shape
        self.omega.copy_(gaussian(count, width, self.seed))

    def forward(self, x: Tensor) -> Tensor:
        with disable_autocast(x.device):
            angle = (upcast(x) * self.sigma) @ self.omega.to(accumulate_dtype(x)).mT
        return (torch.cat([angle.sin(), angle.cos()], -1) * len(self.omega) ** -0.5).to(x.dtype)

    def least(self) -> Tensor:
        """``[h 1]``: exp(-2 max σ²), the least value of the kernel of two unit vectors."""
        return (-2 * upcast(self.sigma).square().amax(-1, keepdim=True)).exp()


def _products(x: Tensor, W: Tensor, heads: int) -> Tensor:
    """x W ``[b t h n]`` of ``x [b t h w]`` and ``W [h·n w 1]``, in float32 or wider."""
    W = upcast(W).squeeze(-1).unflatten(0, (heads, -1))
    dtype = torch.promote_types(accumulate_dtype(x), W.dtype)
    return torch.einsum("bthw,hnw->bthn", x.to(dtype), W.to(dtype))


class LearnedFeatures(FeatureMap):
    """Learnt features φ(x) = (f(x W), f(-x W)): ``x [b t h w]`` → ``[b t h 2f]``, in float32 or
    wider.

    There is a W ``[w f]`` per head. It is initially the identity's first f columns (LoLCATs, 2024;
    Hedgehog, 2024), and more than the identity has are random directions: equal ones would stay
    equal.
    """

    def __init__(self, heads: int, width: int, features: int) -> None:
        super().__init__()
        self.heads, self.size = heads, 2 * features
        self.W = nn.Parameter(torch.empty(heads * features, width, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.dirac_(self.W, groups=self.heads)
        columns = self.W.detach().unflatten(0, (self.heads, -1)).squeeze(-1)
        further = columns[:, columns.shape[2] :]
        further.copy_(F.normalize(torch.randn_like(further), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        x = _products(x, self.W, self.heads)
        return torch.cat([self.activate(x), self.activate(-x)], dim=-1)


class Hedgehog(LearnedFeatures):
    """Hedgehog's feature map: f is the softmax over the features.

    It is bounded, and all keys have the same total weight.
    """

    activate = staticmethod(softmax)


class Exponential(LearnedFeatures):
    """The feature map with f = exp."""

    activate = staticmethod(torch.exp)


class Elu(LearnedFeatures):
    """The feature map with f = 1 + ELU."""

    activate = staticmethod(elu_plus_one)


class Relu(LearnedFeatures):
    """The feature map with f = ReLU (T2R, Kasai et al., 2021)."""

    activate = staticmethod(F.relu)


class SkipFeatures(LearnedFeatures):
    """Learnt features φ(x) = f(x W + x): ``x [b t h w]`` → ``[b t h w]``, in float32 or wider.

    There is a W ``[w w]`` per head, initially zero (LoLCATs, workshop, eq. 6). The functions f of
    the classes below are their own: kernels take torch's for (f(x W), f(-x W)).
    """

    def __init__(self, heads: int, width: int, features: int) -> None:
        if 2 * features != width:
            raise ValueError(
                f"feature_dim = {features} of a head with {width} channels: f(x W + x) has as many"
                f" features as channels; take feature_dim = None, or {width / 2:g}"
            )
        super().__init__(heads, width, width)
        self.size = width

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.W)

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(_products(x, self.W, self.heads) + x)


class SkipExponential(SkipFeatures):
    """The feature map with f = exp."""

    @staticmethod
    def activate(x: Tensor, /) -> Tensor:
        return x.exp()


class SkipElu(SkipFeatures):
    """The feature map with f = 1 + ELU."""

    @staticmethod
    def activate(x: Tensor, /) -> Tensor:
        return elu_plus_one(x)


class SkipRelu(SkipFeatures):
    """The feature map with f = ReLU."""

    @staticmethod
    def activate(x: Tensor, /) -> Tensor:
        return x.relu()


class Landmarks(ScaledMap):
    """Features that are a softmax over landmarks: φ(x) = softmax(x W + b), ``x [b t h w]`` → ``[b t
    h n]``, in float32 or wider.

    For queries, x W + b are the scores of the landmarks, and a = log Σ e^(x W + b) says what φ has
    been divided by: e^a φ(q)_j is what softmax would give landmark j. For keys, φ says which
    landmarks stand for a key. There is a W ``[w n]`` and a b ``[n]`` per head, random until
    `place_landmarks` or a checkpoint gives them values.

    Where a model's attention has rotary positions, x is what they have made of a query or a key, as
    `unrotate` gives it back: landmarks stand for keys at any position.

    Args:
        heads: The number of heads.
        width: w.
        features: Half of n, as the other maps have two channels for each of their features.

    Attributes:
        turning: ``[h 2 w]``, the channel that rotary positions turn each channel with, itself for
            none; and how far it turns back from one position to the next, in `TURN`. The same in
            all heads, which may be divided.
        further: How many of the last landmarks read x as rotary positions have turned it.
    """

    turning: Tensor
    further: int = 0

    def __init__(self, heads: int, width: int, features: int) -> None:
        super().__init__()
        self.heads, self.size = heads, 2 * features
        self.W = nn.Parameter(torch.empty(heads * self.size, width, 1))
        self.b = nn.Parameter(torch.empty(heads * self.size))
        self.register_buffer("turning", torch.empty(heads, 2, width, dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.W, std=self.W.shape[1] ** -0.5)
        nn.init.zeros_(self.b)
        self.turning[:, 0].copy_(torch.arange(self.W.shape[1]))
        self.turning[:, 1].zero_()

    @staticmethod
    def activate(x: Tensor, /) -> Tensor:
        return x.softmax(-1)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return unrotate(upcast(x), positions, *self.turning[0])

    def scores(self, x: Tensor) -> Tensor:
        """Compute x W + b."""
        return _products(x, self.W, self.heads) + self.b.view(self.heads, -1)

    def scores_at(self, x: Tensor, position: int) -> Tensor:
        of_landmarks = self.size - self.further
        place = torch.tensor([[position]], device=x.device)
        scores = self.scores(self.unrotate(x, place))
        if not self.further:
            return scores
        further = self.scores(upcast(x))[..., of_landmarks:]
        return torch.cat([scores[..., :of_landmarks], further], -1)

    def extend(self, W: Tensor, b: Tensor) -> Landmarks:
        """Return a map without parameters that has further landmarks, of ``W [h m w]`` and
        ``b [h m]``, behind its own, which read x as rotary positions have turned it."""
        extended = object.__new__(Landmarks)
        nn.Module.__init__(extended)
        own_W, own_b = upcast(self.W).view(self.heads, -1, W.shape[2]), upcast(self.b)
        W, b = torch.cat([own_W, W], 1), torch.cat([own_b.view(self.heads, -1), b], 1)
        extended.heads, extended.size = self.heads, b.shape[1]
        extended.further = b.shape[1] - self.size
        extended.W, extended.b = W.flatten(0, 1)[..., None], b.flatten()  # type: ignore[assignment]
        extended.turning = self.turning
        return extended

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(self.scores(x))

    def log_scale(self, x: Tensor) -> Tensor:
        """Compute a ``[b t h 1]``."""
        return self.scores(x).logsumexp(-1, keepdim=True)


TURN = 1 << 32
"""A whole turn in the integers by which angles are counted, exact at any position."""


def unrotate(x: Tensor, positions: Tensor, partners: Tensor, speeds: Tensor) -> Tensor:
    """Return what rotary positions have made ``x [b t h w]`` of.

    x'_i = x_i cos nω_i + x_p(i) sin nω_i at position n, with p(i) the other channel of a pair,
    whose ω are ω_i and -ω_i (Su et al., 2021, eq. 34, turned back).

    Args:
        x: Queries or keys.
        positions: n ``[b t]``; integers.
        partners: p ``[w]``.
        speeds: ω ``[w]``, in `TURN`.
    """
    angles = positions[..., None, None] * speeds
    angles = (angles + TURN // 2) % TURN - TURN // 2
    angles = angles.to(x.dtype) * (2 * math.pi / TURN)
    return x * angles.cos() + x.gather(-1, partners.expand(x.shape)) * angles.sin()
