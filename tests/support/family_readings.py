"""What a model of transformers gives for texts, and transformers' own code of it in float64."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.engines.transformers import patch_transformers
from fastweights.engines.transformers.substitute import MARK, Switch
from fastweights.models.cache_names import name_of_cache
from transformers_families import VOCABULARY

Reading = dict[str, Tensor]
TOKENS = 37
PROMPT = 19
GENERATED = 6


def draw_text(*shape: int, seed: int = 1) -> Tensor:
    """Tokens that neither begin, end nor pad a text."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def modelling_file(model: nn.Module) -> ModuleType:
    return sys.modules[type(model).__module__]


def read(model: nn.Module) -> Reading:
    """Everything that users see: training's loss and gradients, logits of padded rows, states
    after a prompt and after a second part of it, greedy tokens.
    """
    found = read_training(model)
    with torch.no_grad():
        return found | read_padded(model.eval()) | read_parts(model)


def learn(model: nn.Module, text: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    """(logits, all gradients in one row) of predicting a text by the model's own loss."""
    model.zero_grad()
    found = model(input_ids=text, labels=text, use_cache=False, **named)
    found.loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return found.logits.detach(), torch.cat(gradients)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference beside the largest number."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def read_training(model: nn.Module) -> Reading:
    """The loss is computed here, as transformers' is in float32 always."""
    text = draw_text(2, TOKENS)
    model.zero_grad()
    logits = model.train()(input_ids=text, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    gradients = {
        f"gradient of {name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"logits": logits.detach(), "loss": loss.detach()} | gradients


def read_padded(model: nn.Module) -> Reading:
    """Of rows with padding on the left: logits, and the tokens that follow."""
    text = draw_text(3, PROMPT)
    mask = torch.ones_like(text)
    mask[0, :7] = mask[1, :2] = 0
    logits = model(input_ids=text * mask, attention_mask=mask).logits
    tokens: Any = model.generate(
        text * mask, attention_mask=mask, max_new_tokens=GENERATED, do_sample=False
    )
    return {"padded logits": logits * mask[..., None], "tokens": tokens}


def read_parts(model: nn.Module) -> Reading:
    """Of a text that is read in three parts, the last of one token."""
    text = draw_text(2, TOKENS)
    found: Reading = {}
    cache: dict[str, Any] = {}
    for part, tokens in enumerate(text.split([PROMPT, TOKENS - PROMPT - 1, 1], dim=1)):
        out = model(input_ids=tokens, use_cache=True, **cache)
        name = name_of_cache(out)
        assert name is not None
        cache = {name: out[name]}
        found[f"logits of part {part}"] = out.logits
        states = (state for layer in out[name].layers for state in find_states(vars(layer)))
        found |= {f"state {i} after part {part}": s.clone() for i, s in enumerate(states)}
    return found


def find_states(value: Any) -> Iterator[Tensor]:
    """The tensors of numbers in what a layer of a cache holds."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from find_states(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from find_states(entry)


def difference(found: Reading, expected: Reading) -> tuple[float, str]:
    """The largest relative difference, and of what; of gradients relative to a hundredth of the
    whole gradient at least.
    """
    assert found.keys() == expected.keys()
    whole = sum(g.norm() ** 2 for name, g in expected.items() if name.startswith("grad")) ** 0.5

    def relative(name: str) -> float:
        least = whole / 100 if name.startswith("gradient") else 1e-6
        size = max(float(expected[name].double().norm()), float(least))
        return float((found[name].double() - expected[name].double()).norm()) / size

    return max((relative(name), name) for name in expected)


def widen(model: nn.Module, *, patched: bool) -> nn.Module:
    """The same model by transformers' code with float64 wherever it says float32.

    Args:
        model: the model
        patched: whether its functions are ours, which compute in the dtype they are given
    """
    theirs = modelling_file(model)
    source = re.sub(r"torch\.float(32)?\b", "torch.float64", inspect.getsource(theirs))
    module = ModuleType(f"{theirs.__name__}_wide")
    module.__file__, module.__package__ = theirs.__file__, theirs.__package__
    sys.modules[module.__name__] = module
    code = re.sub(r"\.float\(\)", ".double()", source)
    exec(compile(code, f"{theirs.__file__}_wide", "exec"), vars(module))
    if patched:
        with patch_transformers(model):
            # ours itself, which outlives the patch
            ours = {
                name: getattr(value, MARK).put_before(value.__wrapped__, Switch())
                for name, value in vars(theirs).items()
                if hasattr(value, MARK)
            }
        assert ours
        vars(module).update(ours)
    wide = getattr(module, type(model).__name__)(copy.deepcopy(model.config))
    wide.set_experts_implementation("eager")  # others multiply float32 and bfloat16 alone
    wide.load_state_dict(model.state_dict())
    return wide.double().eval()
