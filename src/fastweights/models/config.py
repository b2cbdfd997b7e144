"""The one configuration of every language model here."""

from collections.abc import Iterable
from dataclasses import field
from difflib import get_close_matches
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig

from fastweights.mixers import make


@strict
class FastWeightsConfig(PretrainedConfig):
    """A decoder of `num_hidden_layers` blocks, each a mixer and a SwiGLU.

    mixers             ``[{"name": "metala", …arguments}, …]``, repeated over the depth: several make a hybrid
    intermediate_size  width of the SwiGLU; None for 8/3 · hidden_size, rounded up to a multiple of 8
    logit_cap          c of c · tanh(z / c) on the logits; None for none

    Raises ValueError for sizes below 1, misspelt fields, and mixers that are unknown or cannot be built.
    """

    model_type = "fastweights"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (a ClassVar of transformers)

    vocab_size: int = 32_000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    mixers: list[dict[str, Any]] = field(default_factory=lambda: [{"name": "metala"}])
    intermediate_size: int | None = None
    norm_eps: int | float = 1e-5
    tie_word_embeddings: bool = False
    logit_cap: int | float | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_names(kwargs)
        self._check_sizes()
        self._check_mixers()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration in `config_dict`; raises ValueError if that one is of another kind of model."""
        kind = config_dict.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(
                f"this checkpoint holds a {kind!r} model, not a {cls.model_type!r} one; load it with "
                "transformers.AutoModelForCausalLM.from_pretrained"
            )
        return super().from_dict(config_dict, **kwargs)

    @property
    def mlp_size(self) -> int:
        """The width of the SwiGLU, whether given or derived."""
        return -(-self.hidden_size // 3) * 8 if self.intermediate_size is None else self.intermediate_size

    @property
    def layer_mixers(self) -> list[dict[str, Any]]:
        """One entry of `mixers` per layer."""
        return [self.mixers[layer % len(self.mixers)] for layer in range(self.num_hidden_layers)]

    def _check_names(self, unknown: Iterable[str]) -> None:
        """transformers keeps whatever it is given; a misspelt field would silently leave its default."""
        for name in unknown:
            meant = get_close_matches(name, FastWeightsConfig.__annotations__, n=1, cutoff=0.72)
            if meant and not name.endswith("_token_id"):
                raise ValueError(f"{type(self).__name__} has no field {name!r}; did you mean {meant[0]!r}?")

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "mlp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; it is at least 1")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps = {self.norm_eps}; it is above 0")
        if self.logit_cap is not None and self.logit_cap <= 0:
            raise ValueError(f"logit_cap = {self.logit_cap}; it is above 0, or None for no cap")

    def _check_mixers(self) -> None:
        if not self.mixers:
            raise ValueError('mixers is empty; name at least one, such as [{"name": "metala"}]')
        if len(self.mixers) > self.num_hidden_layers:
            raise ValueError(
                f"mixers lists {len(self.mixers)} layers, num_hidden_layers is {self.num_hidden_layers}; "
                "drop some or add layers"
            )
        for position, mixer in enumerate(self.mixers):
            self._try_mixer(position, mixer)

    def _try_mixer(self, position: int, mixer: dict[str, Any]) -> None:
        """Builds it, without memory."""
        if "name" not in mixer:
            raise ValueError(f'mixers[{position}] = {mixer} lacks "name"')
        if "d" in mixer:
            raise ValueError(f"mixers[{position}] sets d; the width of every layer is hidden_size")
        with torch.device("meta"):
            try:
                make(d=self.hidden_size, **mixer)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"mixers[{position}] = {mixer} at hidden_size = {self.hidden_size}: {error}"
                ) from error
