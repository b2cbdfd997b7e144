"""Notes on where a paper's table, its text and its code disagree, and which of them is followed
here."""

from collections.abc import Mapping

FUNCTIONS: Mapping[str, str] = {
    "metala": (
        "eq. A31's convolution has no activation, eq. A32 no 1/τ, and eq. A36 normalises the"
        " concatenated heads: SiLU, τ = 16 and a norm per head are the published code's."
    ),
    "gla": "Table A1 leaves out the exponent 1/τ of f_α, which the text has: followed here.",
    "transnormer": (
        "the real part of λ e^(jθ) is kept as 2 d'_k channels. φ is SiLU as in TransNormerLLM, 1 +"
        " ELU as in the first TransNormer with `feature_map`."
    ),
    "hgrn": (
        "Table 1 writes the GLRU with a key of its own, σ(x W_i + b_i) (`tied=False`); HGRN ties"
        " it. The lower bound β is 0 by default, which gives the table's f_α. HGRN also turns its"
        " state by angles that are constants of time, which the table leaves out, as does this"
        " mixer."
    ),
    "rwkv4": (
        "the table leaves out the token shift and the present token's own weight; both are here."
    ),
    "mamba": (
        "the table has f_g = 1 and Δ_t in f_k. Mamba's block gates by SiLU(u W_z), as here; Δ_t"
        " moves to f_v, where it leaves one key for all channels and the same product kᵀv."
    ),
    "mamba3": (
        "the paper turns q and k by sums of Δθ; a complex decay does the same to the state. Rates"
        " of decay are the official code's. SISO: one key and one query per token and head; of rank"
        " R, MIMO, there are R of each, read and written by steps of one decay."
    ),
    "s5": (
        "B is discretised in f_v, W_O = C, as in the table; the paper's activation and gate follow."
    ),
    "retnet": (
        "Table A1 writes σ(x W_G), the text and RetNet SiLU: followed here. e^(jθ) turns q and k"
        " instead of the state; the table has d_v = d, RetNet d_v = 2d (`expand_v`), which the"
        " text's 8d² parameters count."
    ),
    "h3": (
        "keys and queries multiply the state space's own; the paper's row shows the latter alone."
    ),
    "dss": "B = 1 in DSS_exp: C absorbs it.",
    "s4d": "B = 1: C absorbs it.",
    "rglru": "Table A3 writes f_g = σ, the text and Griffin GeLU: followed here.",
    "shortconv": "its α = 0 keeps nothing: what it knows of other tokens is in the convolution.",
    "rwkv4_channel": "a channel mixer stated as a mixer: its α = 0 keeps nothing.",
    "rwkv7": "what is erased has keys of its own, κ̂ and η ⊙ κ̂, which the table has no columns for.",
    "ttt_linear": (
        "its memory changes by gradients of a network, for which the table has no column. With"
        " `conv=0`, q and k have projections of their own and no convolutions; RoPE is the code's."
    ),
    "ttt_mlp": "as `ttt_linear`.",
    "rwkv7_channel": "as `rwkv4_channel`, without the gate.",
}
"""On the parameter functions of a mixer."""

GROUPS: Mapping[str, str] = {
    "all": (
        "groups are found by differentiating each projection: Q and K count if parameters of their"
        " own drive them, Λ_t if the decay depends on the input, Λ if it is there and does not. C0"
        " compares state sizes; C1-C3 follow from the groups by Propositions A2.1-A2.3. Mixers that"
        " the paper does not list are judged by the same rules; its T-RNN is not here."
    ),
    "softmax": "no group decays, so C3 does not apply; C1 and C2 hold because every token is kept.",
    "swa": (
        "as softmax inside its window, but what leaves the window is chosen by age alone: no C1."
    ),
    "olmo2": "as `softmax`.",
    "mla": "as `softmax`, with one latent of every token kept for all heads.",
    "lolcats": "as `swa`; what leaves the window is remembered by linear attention, without decay.",
    "hyena": (
        "its filter counts as a decay that is constant in time; C0 holds because the filter ends:"
        " the state is a cache of the tokens that it reaches."
    ),
    "dss": (
        "the paper counts Q, K, Λ. Since B = 1, the key has no parameters but those of the decay:"
        " Q, Λ. No condition changes."
    ),
    "s4d": "as `dss`: the paper counts K. No condition changes.",
    "glru": "`hgrn` with `tied=False`.",
    "lru": (
        "e^γ, a parameter of its own in the LRU, is part of f_v here as B is: group Λ, as in the"
        " paper."
    ),
    "ttt_linear": (
        "what it reads is not linear in the values, so that there is no map for C1-C3 to be about."
    ),
    "ttt_mlp": "as `ttt_linear`.",
    "normalized": "η has parameters of its own, but only divides what the query reads: part of Q.",
}
"""On the groups and conditions of a mixer."""

RULES = (
    "layers of the mixer `mesanet`, by `rule`. S is the paper's Gᵀ; β multiplies v where it is no"
    " field of the rule, and is e^(x W_β + b_β) for the mLSTM, stabilised. For Mamba2 the paper's"
    " table has γ_t, the text of appendix D.1 calls it non-gated: the table is followed; the mixer"
    " `mamba2` with `decays=False` is the other."
)

INFERENCE = (
    "the paper gives orders: O(n_a t) for attention, O(n_a²) for linear rules, O(n_a²) + O(k n_a²)"
    " for Mesa, whose state H and G is twice as large. Counted here are multiplications and"
    " additions."
)

COSTS = (
    "state is in numbers, complex ones count twice. MetaLA's text gives 4d² parameters for MetaLA,"
    " 4d² + 24d for GLA, 8d² for RetNet. Training is forward and backward (three times forward) in"
    " chunks of 64 tokens, or token by token where that takes fewer operations. Products of"
    " projections and the memory's work are counted; activations, norms and convolutions are not."
)
