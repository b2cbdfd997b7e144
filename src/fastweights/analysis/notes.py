"""Where a paper's table, its text and its code disagree, and what is followed here."""

from collections.abc import Mapping

NOTES: Mapping[str, str] = {
    "table 2": (
        "groups are found by differentiating each projection: Q and K count if parameters of their own drive them, "
        "Λ_t if the decay depends on the input, Λ if it is there and does not. C0 compares state sizes; C1-C3 follow "
        "from the groups by Propositions A2.1-A2.3. Mixers that the paper does not list are judged by the same rules; "
        "its T-RNN is not here."
    ),
    "softmax": "no group decays, so C3 does not apply; C1 and C2 hold because every token is kept.",
    "swa": "as softmax inside its window, but what leaves the window is chosen by age alone: no C1.",
    "lolcats": "as `swa`; what leaves the window is remembered by linear attention, without decay.",
    "dss": (
        "the paper counts Q, K, Λ. DSS_exp sets B = 1, which C absorbs, so that the key has no parameters but those of "
        "the decay: Q, Λ. No condition changes."
    ),
    "s4d": "as DSS: the paper counts K; here B = 1 is absorbed by C, as in the released code. No condition changes.",
    "hgrn": (
        "Table 1 writes the GLRU with a key of its own, σ(x W_i + b_i), groups K, Λ_t (`tied=False`); HGRN ties it, "
        "group Λ_t. The lower bound β is 0 by default, which gives the table's f_α. HGRN turns its state by fixed "
        "angles as well, which the table leaves out, as does this mixer."
    ),
    "rwkv4": "the table leaves out the token shift and the present token's own weight; both are here.",
    "mamba": (
        "the table has f_g = 1 and Δ_t in f_k. Mamba's block gates by SiLU(u W_z), as here; Δ_t moves to f_v, where it "
        "leaves one key for all channels and the same product kᵀv."
    ),
    "s5": "B is discretised in f_v, W_O = C, as in the table; the paper's activation and gate follow.",
    "gla": "Table A1 leaves out the exponent 1/τ of f_α, the text and Table 1's source have it: followed here.",
    "retnet": (
        "Table A1 writes σ(x W_G), the text and RetNet SiLU: followed here. e^(jθ) turns q and k instead of the state; "
        "the table's column has d_v = d, RetNet d_v = 2d (`expand_v`)."
    ),
    "transnormer": (
        "the real part of λ e^(jθ) is kept as 2 d'_k channels. TransNormerLLM's text has λ = exp(-8h/H (1 - l/L)), "
        "followed here; its code takes ALiBi's slopes in the place of 8h/H."
    ),
    "h3": "keys and queries multiply the state space's own; the paper's row shows the latter alone.",
    "rglru": "Table A3 writes f_g = σ, the text and Griffin GeLU: followed here.",
    "lru": "e^γ, a parameter of its own in the LRU, is part of f_v here as B is: group Λ, as in the paper.",
    "rwkv4_channel": "a channel mixer stated as a mixer: its α = 0 keeps nothing.",
    "normalized": "η has parameters of its own, but only divides what the query reads: part of Q.",
    "table 3": (
        "S is the paper's Gᵀ; β multiplies v where it is not a field of the rule, and e^β kᵀv for the mLSTM, which is "
        "stabilised. For Mamba2 the paper's table has γ_t, the text of appendix D.1 calls it non-gated: the table is "
        "followed, `mamba2` with `decays=False` is the other."
    ),
    "table 4": (
        "the paper gives orders: O(n_a t) for attention, O(n_a²) for linear rules, O(n_a²) + O(k n_a²) for Mesa, whose "
        "state H and G is twice as large. Counted here are multiplications and additions."
    ),
    "costs": (
        "state is in numbers, complex ones count twice. MetaLA's text gives 4d² parameters for MetaLA, 4d² + 24d for "
        "GLA, 8d² for RetNet. Training is forward and backward (three times forward) in chunks of 64 tokens, or by a "
        "scan where that takes fewer operations."
    ),
}
"""By the name of a mixer or of a table."""
