"""Every mixer, in every dtype, on inputs where norms vanish, gates shut and exponents overflow:
values and gradients are finite, and as close to float64 as the dtype and the problem allow.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from families import VOCABULARY, student
from fastweights import MIXERS
from fastweights.importers import import_model
from fastweights.layers import Linear
from fastweights.linearize import LinearAttentionConfig
from fastweights.mixers import make
from fastweights.mixers.rglru import RGLRU
from kinds import one_of_each, slow_but
from reference_models import is_right
from tolerances import TOLERANCE

pytestmark = pytest.mark.sampled

D, T = 16, 12
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SENSITIVE = 100
"""How much more than a rounding error of all weights and inputs a result may move."""

SCALES = {(torch.float16, what): 2.0**-8 for what in ("loud", "open", "shut")}
"""Of losses: their gradients pass through numbers for which float16 has no room."""

Named = dict[str, Tensor]


def ordinary(rows: int) -> Tensor:
    return torch.randn(rows, T, D, generator=Generator().manual_seed(1))


def quiet() -> tuple[Tensor, Tensor]:
    """A text, one with zeros, zeros alone, zeros as padding, and padding alone."""
    x, keep = ordinary(5), torch.ones(5, T, dtype=torch.bool)
    x[1, 5] = x[1, 0] = 0
    x[2], x[3, :3], x[3, 8] = 0, 0, 0
    keep[3, :3], keep[3, 8], keep[4] = False, False, False
    return x, keep


def loud() -> tuple[Tensor, None]:
    """Large activations, in all tokens, in one of them and in one channel."""
    x = ordinary(5)
    for row, factor in enumerate((10, 100, 1000)):
        x[row] *= factor
    x[3, 6] *= 1000
    x[4, :, 3] *= 300
    return x, None


def shut(mixer: nn.Module, value: float) -> nn.Module:
    """The mixer with every other number of its biases and rates at `value`."""
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            if p.dim() == 1 and "norm" not in name and not name.endswith("weight"):
                p[::2] = value
    return mixer


def made(name: str, dtype: torch.dtype, bias: float | None) -> nn.Module:
    torch.manual_seed(0)
    mixer = make(name, D)
    return (mixer if bias is None else shut(mixer, bias)).to(dtype)


def results(
    mixer: nn.Module, x: Tensor, keep: Tensor | None, scale: float = 1.0
) -> tuple[Named, Named]:
    """(y and the gradient of x, row by row; the gradients of the weights), of a loss that is
    multiplied by `scale` on the way, as GradScaler does for float16.
    """
    x = x.clone().requires_grad_()
    y = mixer(x, keep=keep)[0]
    y = y if keep is None else y.masked_fill(~keep[..., None], 0)
    direction = torch.randn(y.shape, generator=Generator().manual_seed(2)).to(y.dtype)
    (y * (direction * scale)).sum().backward()
    assert x.grad is not None
    both = (("y", y.detach().double()), ("dx", x.grad.double() / scale))
    rows = {f"{n} of row {i}": row for n, s in both for i, row in enumerate(s)}
    grads = {f"d{n}": p.grad for n, p in mixer.named_parameters() if p.grad is not None}
    return rows, {n: s.double() / scale for n, s in grads.items()}


def exactly(
    mixer: nn.Module, x: Tensor, keep: Tensor | None, scale: float
) -> tuple[tuple[Named, Named], float]:
    """The results, and the largest number that a layer gives or is given as a gradient."""
    seen = [0.0]

    def note(_layer: nn.Module, _inputs: object, y: Tensor) -> None:
        seen.append(y.abs().max().item())
        y.register_hook(lambda g: seen.append(scale * g.abs().max().item()))

    hooks = [m.register_forward_hook(note) for m in mixer.modules() if isinstance(m, Linear)]
    found = results(mixer, x, keep)
    for hook in hooks:
        hook.remove()
    return found, max(seen)


def values_alone(found: tuple[Named, Named]) -> tuple[Named, Named]:
    return {n: s for n, s in found[0].items() if n.startswith("y")}, {}


def moved(mixer: nn.Module, x: Tensor, by: float) -> tuple[nn.Module, Tensor]:
    """The mixer and x with every number off by about as much, relative to itself."""
    g, mixer = Generator().manual_seed(3), deepcopy(mixer)

    def off(s: Tensor) -> Tensor:
        return s * (1 + by * torch.randn(s.shape, generator=g).to(s.dtype))

    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(off(p))
    return mixer, off(x)


def stepped(mixer: Any, x: Tensor, keep: Tensor | None) -> Tensor:
    """y, one token after the other."""
    state, found = None, []
    for i in range(x.shape[1]):
        y, state = mixer(x[:, i : i + 1], state, keep=None if keep is None else keep[:, i : i + 1])
        found.append(y)
    return torch.cat(found, 1)


def complain(got: Named, want: Named, near: Named, dtype: torch.dtype, close: float) -> list[str]:
    """What of `got` is not finite, or further from `want` than `close` and the problem, of which
    `near` is one with other roundings, allow; beyond its range a dtype has no numbers.
    """
    found, whole = [], sum(s.norm() ** 2 for s in want.values()) ** 0.5
    for name, exact in want.items():
        there = got[name].double()
        if not there.isfinite().all():
            if exact.abs().max() < torch.finfo(dtype).max / 16:
                found.append(f"{name} is not finite")
            continue
        scale = max(exact.norm(), whole if name.startswith("d") else 0, torch.tensor(1e-3))
        allowed = close * scale + SENSITIVE * (near[name] - exact).norm()
        if (error := (there - exact).norm()) > allowed:
            found.append(f"{name}: off by {error:.1e}, allowed are {allowed:.1e}")
    return found


def closeness(what: str, dtype: torch.dtype) -> float:
    """Scores of 10⁵ keep two digits in float32."""
    return TOLERANCE[torch.bfloat16 if what == "loud" and dtype is torch.float32 else dtype]


INPUTS = {
    "quiet": (quiet, None),
    "loud": (loud, None),
    "open": (quiet, 30.0),
    "shut": (quiet, -30.0),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "dtype",
    slow_but([torch.float16, torch.bfloat16, torch.float32], [torch.float16]),
    ids=str,
)
@pytest.mark.parametrize("name", one_of_each(MIXERS))
def test_a_mixer_is_finite_and_as_exact_as_its_dtype(name: str, dtype: torch.dtype) -> None:
    found = []
    for what, (inputs, bias) in INPUTS.items():
        x, keep = inputs()
        x, mixer, close = x.to(dtype), made(name, dtype, bias), closeness(what, dtype)
        exact = deepcopy(mixer).double()
        scale = SCALES.get((dtype, what), 1.0)
        want, largest = exactly(exact, x.double(), keep, scale)
        each = [
            results(mixer, x, keep, scale),
            want,
            results(*moved(exact, x.double(), EPS[dtype]), keep),
        ]
        if largest > torch.finfo(dtype).max / 16:  # their gradients have no room
            each = [values_alone(result) for result in each]
        for got, want, near in zip(*each, strict=True):
            found += [f"{what}: {c}" for c in complain(got, want, near, dtype, close)]
        if what == "quiet":
            with torch.no_grad():
                y = stepped(mixer, x, keep).masked_fill(~keep[..., None], 0)
            rows = {f"y of row {i}": row for i, row in enumerate(y)}
            want, near = ({n: r[0][n] for n in rows} for r in each[1:])
            found += [f"steps: {c}" for c in complain(rows, want, near, dtype, close)]
    assert not found, "\n".join(found)


STUDENTS = {
    "lolcats": LinearAttentionConfig(window=4),
    "landmarks": LinearAttentionConfig("landmarks", 8, 4),
    "gla-sinks": LinearAttentionConfig(rule="gla", window=3, sinks=2),
    "kda": LinearAttentionConfig(rule="kda", window=4),
}


def read_loudly(model: Any, factor: float) -> tuple[Tensor, Tensor]:
    """(logits, all gradients) of texts with padding before, within and instead of them, and with a
    zero among embeddings that are `factor` times what they were.
    """
    ids = torch.randint(3, VOCABULARY, (4, 15), generator=Generator().manual_seed(2))
    keep = torch.ones_like(ids)
    keep[0, :5], keep[1], keep[2, 7] = 0, 0, 0
    x = model.get_input_embeddings()(ids).detach() * factor
    x[3, 4] = 0
    y = model(inputs_embeds=x.requires_grad_(), attention_mask=keep).logits
    y = y.masked_fill(keep[..., None] == 0, 0)
    direction = torch.randn(y.shape, generator=Generator().manual_seed(3))
    (y * direction.to(y)).sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return y.detach().double(), torch.cat([g.flatten().double() for g in grads if g is not None])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1, 1000])
@pytest.mark.parametrize("analog", STUDENTS.values(), ids=list(STUDENTS))
def test_a_linearized_model_is_finite(
    analog: LinearAttentionConfig, factor: float, dtype: torch.dtype
) -> None:
    model = student(analog=analog).requires_grad_(True).to(dtype)
    exact = read_loudly(deepcopy(model).double(), factor)
    for got, want in zip(read_loudly(model, factor), exact, strict=True):
        assert (got - want).norm() <= 6 * TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize("name", ["dss", "h3", "hyena", "lru", "s4", "s4d"])
def test_bfloat16_rounds_no_frequencies(name: str) -> None:
    torch.manual_seed(0)
    mixer, x = make(name, 32), torch.randn(2, 256, 32).bfloat16()
    with torch.no_grad():
        want, got = mixer(x.float())[0], mixer.bfloat16()(x)[0].float()
    assert (got - want).norm() <= TOLERANCE[torch.bfloat16] * want.norm()


@pytest.mark.skipif(not is_right("RecurrentGemma"), reason="transformers' own gradients are wrong")
@pytest.mark.usefixtures("unchecked")
def test_a_shut_gate_has_the_gradients_of_recurrentgemma(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = ["recurrent", "recurrent", "attention"]
    sizes = {"hidden_size": 32, "lru_width": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "attention_window_size": 8, "block_types": blocks}
    theirs: Any = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(vocab_size=61, **sizes, **heads))
    rules = [m for m in theirs.modules() if isinstance(m, RecurrentGemmaRglru)]
    with torch.no_grad():
        for rule in rules:
            rule.recurrent_gate_bias[:, ::2] = -120.0
    theirs.save_pretrained(tmp_path)
    ours: Any = import_model(tmp_path)
    ids = torch.randint(1, 61, (2, 20))
    for model in (theirs, ours):
        model(ids, labels=ids).loss.backward()
    mixers = [m for m in ours.modules() if isinstance(m, RGLRU)]
    assert len(mixers) == len(rules) > 0
    for mixer, rule in zip(mixers, rules, strict=True):
        for got, want, sign in (
            (mixer.b_a, rule.recurrent_gate_bias, 1),
            (mixer.b_x, rule.input_gate_bias, 1),
            (mixer.W_a, rule.recurrent_gate_weight, 1),
            (mixer.W_x, rule.input_gate_weight, 1),
            (mixer.Lambda, rule.recurrent_param, -1),
        ):
            wanted = sign * want.grad.view_as(got)
            torch.testing.assert_close(got.grad, wanted, rtol=1e-3, atol=1e-7)
