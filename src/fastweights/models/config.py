"""The configuration of every language model of the library."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from difflib import get_close_matches
from functools import partial
from math import inf, isfinite, lcm
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.activations import ACT2FN

from fastweights.layers import MLPS, NORMS, POOLINGS
from fastweights.mixer import Mixer
from fastweights.mixers import make
from fastweights.mixers.shared import SharedBlock
from fastweights.models.cache_names import CACHE
from fastweights.models.checkpoint_code import CarriesCode

RENAMED_FIELDS = {"norms_behind": "post_norm"}
RENAMED_ARGUMENTS = {("mla", "turned"): "rope_dim", ("mamba3", "still"): "partial_rotation"}
"""Today's names of fields, and of a mixer's arguments, by those of earlier checkpoints."""


def _with_new_names(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of a stored configuration, or of an entry of its `mixers`, by today's names."""
    mixer = fields.get("name")
    found = {
        RENAMED_ARGUMENTS.get((str(mixer), name)) or RENAMED_FIELDS.get(name, name): value
        for name, value in fields.items()
    }
    several = [name for name in ("mixers", "beside") if isinstance(found.get(name), list)]
    return found | {name: [_entry(one) for one in found[name]] for name in several}


def _entry(found: Any) -> Any:
    """Anything else is refused where it is checked."""
    return _with_new_names(found) if isinstance(found, dict) else found


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


@strict
class FastWeightsConfig(CarriesCode):
    """The configuration of a model: its mixers, and what stands around them in every block.

    A model is `num_hidden_layers` blocks, each a mixer and an MLP (by default a SwiGLU).

    Attributes:
        mixers: ``[{"name": "metala", …arguments}, …]``, repeated over the depth: several make a
            hybrid; a mixer's ``"beside": [{"name": …}, …]`` are others that read the same and whose
            outputs are added to its own
        norm, norm_eps: "rms", "layer" (LayerNorm with bias) or "simple_rms" (without weights),
            before every mixer and MLP and at the end
        mlp: "gated" (σ(x W_1) ⊙ x W_2) W_3, "plain" σ(x W_1) W_2, "identity" (x itself), or
            None for none
        hidden_act: σ, by its name in ``transformers.activations.ACT2FN``
        intermediate_size: width of the MLP; None for 8 · hidden_size² weights: 8/3 ·
            hidden_size (rounded up to a multiple of 8) if gated, else 4 · hidden_size
        mlp_bias: whether the MLP's projections have biases
        mlps: ``[{"name": "experts", "width": 512, …arguments}, …]``, a key of `layers.MLPS` with
            its width and arguments, or None for a layer without an MLP, repeated over the depth in
            place of `mlp` and `intermediate_size`; None for those in every layer
        shared_blocks: ``[{"layers": [5, 11], "width": 10240, "heads": 32, …arguments}, …]``,
            transformer blocks over the stream and the embeddings side by side, each by the
            arguments of `SharedBlock`, and the layers (from 0) whose mixers read what it gives
            beside the stream (Zamba); None for none
        parallel_residual: whether mixer and MLP read the same x and are added together
            (GPT-NeoX)
        post_norm: whether a layer's norms are after its mixer and MLP (OLMo 2) instead of before
            them, repeated over the depth
        sandwich_norms: whether a second norm stands behind every mixer and MLP (Gemma)
        normalized_residual: whether mixer and MLP are each added to what they read, the
            normalised stream (MiniMax)
        learnt_positions: adds a learnt embedding to each of the first so many tokens of a
            document; None for none
        embedding_scale: what the embeddings are multiplied by; None for √hidden_size
        embedding_dropout: probability of dropping an embedding's channel
        residual_dropout: probability of dropping a channel of what a mixer or MLP adds to the
            stream
        stochastic_depth: probability, in training, of leaving out what the last layer's mixer or
            MLP adds to an example's stream; in proportion to their depth in layers before it
        initializer_range: standard deviation of new weights, 1 / √(2 · layers) of it in those
            that write to the stream (GPT-2); None for MesaNet's, see
            `FastWeightsPreTrainedModel`
        logit_cap: c of c · tanh(z / c) on the logits; None for none
        bidirectional: whether every mixer reads both ways, see `Bidirectional`; for classifiers
        num_attention_heads: what libraries are told that ask every model for its heads (PEFT's
            prompt tuning); a mixer has its own number
        pooling: how a classifier makes one vector of a sequence's: "mean", "first" or "last",
            padding not counted

    Raises:
        ValueError: A size is below 1, a name is unknown, a field is misspelt, or a mixer cannot
            be built.
    """

    model_type = "fastweights"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012 (a ClassVar of transformers)

    vocab_size: int = 32_000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    mixers: list[dict[str, Any]] = field(default_factory=lambda: [{"name": "metala"}])
    norm: str = "rms"
    norm_eps: int | float = 1e-5
    mlp: str | None = "gated"
    hidden_act: str = "silu"
    intermediate_size: int | None = None
    mlp_bias: bool = False
    mlps: list[dict[str, Any] | None] | None = None
    shared_blocks: list[dict[str, Any]] | None = None
    parallel_residual: bool = False
    post_norm: list[bool] = field(default_factory=lambda: [False])
    sandwich_norms: bool = False
    normalized_residual: bool = False
    learnt_positions: int | None = None
    embedding_scale: int | float | None = None
    embedding_dropout: int | float = 0.0
    residual_dropout: int | float = 0.0
    stochastic_depth: int | float = 0.0
    initializer_range: int | float | None = None
    tie_word_embeddings: bool = False
    logit_cap: int | float | None = None
    bidirectional: bool = False
    pooling: str = "mean"
    num_attention_heads: int = 1
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_names(kwargs)
        self._check_sizes()
        self._check_choices()
        self._check_mixers()
        self._check_mlps()
        self._check_shared_blocks()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a configuration from the content of a config.json.

        Raises:
            ValueError: It is one of another kind of model.
        """
        kind = config_dict.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(
                f"this checkpoint holds a {kind!r} model, not a {cls.model_type!r} one; load it"
                " with from_pretrained of the transformers.AutoModel… of its task"
            )
        return super().from_dict(_with_new_names(config_dict), **kwargs)

    @property
    def mlp_size(self) -> int:
        """The width of the MLP, whether given or derived."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return 4 * self.hidden_size if self.mlp == "plain" else -(-self.hidden_size // 3) * 8

    @property
    def input_scale(self) -> float:
        """What the embeddings are multiplied by, whether given or derived."""
        return self.hidden_size**0.5 if self.embedding_scale is None else self.embedding_scale

    @property
    def layer_mixers(self) -> list[dict[str, Any]]:
        """One entry of `mixers` per layer."""
        return [self.mixers[layer % len(self.mixers)] for layer in range(self.num_hidden_layers)]

    @property
    def mixer_names(self) -> list[str]:
        """The names of the mixers, those side by side joined by a plus."""
        sums = ([one, *one.get("beside", ())] for one in self.mixers)
        return ["+".join(str(mixer["name"]) for mixer in mixers) for mixers in sums]

    @property
    def layer_mlps(self) -> list[dict[str, Any] | None]:
        """The MLP of every layer, by its name, width and arguments; None where there is none."""
        one = None if self.mlp is None else {"name": self.mlp, "width": self.mlp_size}
        kinds = [one] if self.mlps is None else self.mlps
        return [kinds[layer % len(kinds)] for layer in range(self.num_hidden_layers)]

    @property
    def period(self) -> int:
        """The number of layers after which mixers and MLPs repeat; all if some share blocks."""
        if self.shared_blocks:
            return self.num_hidden_layers
        return min(lcm(len(self.mixers), len(self.mlps or [None])), self.num_hidden_layers)

    @property
    def layer_shared_blocks(self) -> dict[int, int]:
        """Numbers of layers → the number of the shared block that each uses."""
        blocks = enumerate(self.shared_blocks or [])
        return {layer: number for number, block in blocks for layer in block["layers"]}

    def make_shared_blocks(self) -> list[SharedBlock]:
        """New blocks that layers share."""
        norm = partial(NORMS[self.norm], eps=self.norm_eps)
        activation = ACT2FN[self.hidden_act]
        return [
            SharedBlock(self.hidden_size, norm, activation, **_without(block, "layers"))
            for block in self.shared_blocks or []
        ]

    def make_mixers(self, fields: dict[str, Any]) -> list[Mixer]:
        """New mixers by an entry of `mixers`: one, or all that stand side by side."""
        own = _without(fields, "beside")
        return [make(d=self.hidden_size, **one) for one in (own, *fields.get("beside", ()))]

    def make_mlp(self, layer: int) -> nn.Module | None:
        """A new MLP of this layer, if it has one."""
        fields = self.layer_mlps[layer]
        if fields is None:
            return None
        name, width, others = fields["name"], fields["width"], dict(fields)
        del others["name"], others["width"]
        activation = ACT2FN[self.hidden_act]
        return MLPS[name](self.hidden_size, width, activation, bias=self.mlp_bias, **others)

    def _check_names(self, unknown: Iterable[str]) -> None:
        """Refuse fields that look misspelt: transformers keeps whatever it is given, and the
        field that was meant would silently keep its default.
        """
        for name in unknown:
            meant = get_close_matches(name, FastWeightsConfig.__annotations__, n=1, cutoff=0.72)
            if meant and not name.endswith("_token_id"):
                raise ValueError(
                    f"{type(self).__name__} has no field {name!r}; did you mean {meant[0]!r}?"
                )

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "mlp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; it is at least 1")
        for name in (
            "norm_eps",
            "embedding_scale",
            "initializer_range",
            "learnt_positions",
            "logit_cap",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(
                    f"{name} = {value}; it is above 0"
                    + ("" if name == "norm_eps" else ", or None")
                    + ("" if isfinite(value) else ", and finite")
                )
        for name in ("embedding_dropout", "residual_dropout", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; it is a probability below 1")

    def _check_choices(self) -> None:
        if self.mlp == "experts":
            raise ValueError(
                'mlp = "experts" lacks a routing; list the experts in mlps, such as [{"name":'
                ' "experts", "width": 512, "routing": {"count": 8, "chosen": 2}}]'
            )
        for name, known in (
            ("norm", NORMS),
            ("mlp", MLPS.keys() - {"experts"}),
            ("hidden_act", ACT2FN),
            ("pooling", POOLINGS),
        ):
            value = getattr(self, name)
            if value not in known and (name, value) != ("mlp", None):
                raise ValueError(f"{name} = {value!r}; there are {', '.join(sorted(known))}")
        parallel, normalized = self.parallel_residual, self.normalized_residual
        behind = any(self.post_norm)
        for message, contradictory in {
            "parallel_residual = True, but there is no MLP to be parallel to; set mlp or leave it"
            " out": parallel and None in self.layer_mlps,
            "parallel_residual and normalized_residual are two ways to add to the stream; set one"
            " of them": parallel and normalized,
            "normalized_residual adds to what the norms give, and post_norm has none in front; set"
            " one of them": normalized and behind,
            "sandwich_norms puts norms on both sides, and post_norm has none in front; set one of"
            " them": self.sandwich_norms and behind,
        }.items():
            if contradictory:
                raise ValueError(message)

    def _check_mixers(self) -> None:
        if not 1 <= len(self.post_norm) <= self.num_hidden_layers:
            raise ValueError(
                f"post_norm lists {len(self.post_norm)} layers of {self.num_hidden_layers};"
                " name at least one and at most all"
            )
        if not self.mixers:
            raise ValueError('mixers is empty; name at least one, such as [{"name": "metala"}]')
        if len(self.mixers) > self.num_hidden_layers:
            raise ValueError(
                f"mixers lists {len(self.mixers)} layers, num_hidden_layers is"
                f" {self.num_hidden_layers}; drop some or add layers"
            )
        tried: list[list[Mixer]] = []
        for position, mixer in enumerate(self.mixers):
            first = self.mixers.index(mixer)
            tried += [tried[first] if first < position else self._try_mixer(position, mixer)]
        for position, mixers in enumerate(tried):
            before = [mixer for layer in tried[:position] for mixer in layer]
            takes = any(mixer.takes_values for mixer in mixers)
            if takes and not any(mixer.leaves_values for mixer in before):
                raise ValueError(
                    f"mixers[{position}] = {self.mixers[position]} takes up the values of an"
                    " earlier layer, and none leaves any; put one with residual=False before it"
                )

    def _check_mlps(self) -> None:
        if self.mlps is not None and not 0 < len(self.mlps) <= self.num_hidden_layers:
            raise ValueError(
                f"mlps lists {len(self.mlps)} layers, num_hidden_layers is"
                f" {self.num_hidden_layers}; list one at least and no more than there are, or leave"
                " mlps out"
            )
        for position, mlp in enumerate(self.mlps or []):
            self._try_mlp(position, mlp)

    def _check_shared_blocks(self) -> None:
        if self.shared_blocks and self.bidirectional:
            raise ValueError(
                "bidirectional = True, but shared_blocks read from left to right; leave one of them"
                " out"
            )
        used: set[int] = set()
        for number, block in enumerate(self.shared_blocks or []):
            places, named = block.get("layers", []), f"shared_blocks[{number}] = {block}"
            if not places or not all(0 <= layer < self.num_hidden_layers for layer in places):
                raise ValueError(
                    f'{named}; its "layers" are numbers from 0 to {self.num_hidden_layers - 1}, at'
                    " least one"
                )
            if len(set(places)) < len(places) or used & set(places):
                raise ValueError(f"{named} uses a layer twice; a layer shares one block at most")
            used |= set(places)
        with self._trial(f"shared_blocks = {self.shared_blocks}"):
            self.make_shared_blocks()

    @contextmanager
    def _trial(self, what: str) -> Iterator[None]:
        """A block that builds this part on the meta device, which takes no memory, to see whether
        it can be.
        """
        with torch.device("meta"):
            try:
                yield
            except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(f"{what} at hidden_size = {self.hidden_size}: {error}") from error

    def _try_mlp(self, position: int, mlp: dict[str, Any] | None) -> None:
        if mlp is None:
            return
        if mlp.get("name") not in MLPS:
            raise ValueError(f'mlps[{position}] = {mlp}; its "name" is one of {", ".join(MLPS)}')
        if not isinstance(mlp.get("width"), int) or mlp["width"] < 1:
            raise ValueError(f'mlps[{position}] = {mlp}; its "width" is a whole number from 1')
        with self._trial(f"mlps[{position}] = {mlp}"):
            self.make_mlp(position)

    def _try_mixer(self, position: int, mixer: dict[str, Any]) -> list[Mixer]:
        if "name" not in mixer:
            raise ValueError(f'mixers[{position}] = {mixer} lacks "name"')
        beside = mixer.get("beside", [])
        if not all("name" in one and "beside" not in one for one in beside):
            raise ValueError(
                f'mixers[{position}] = {mixer}; each mixer beside another has a "name" and none'
                " beside itself"
            )
        if any("d" in one for one in (mixer, *beside)):
            raise ValueError(f"mixers[{position}] sets d; the width of every layer is hidden_size")
        if beside and self.bidirectional:
            raise ValueError(
                f"bidirectional = True, but mixers[{position}] are several side by side; one reads"
                " both ways"
            )
        with self._trial(f"mixers[{position}] = {mixer}"):
            return self.make_mixers(mixer)
