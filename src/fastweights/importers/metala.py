"""The checkpoints of MetaLA's authors (BICLab/MetaLA)."""

from __future__ import annotations

from fastweights.importers.plan import ImportPlan, Table, TensorSource, linear, plan_layers, taps
from fastweights.importers.source import CheckpointSource

HEAD = "lm_head.weight"


def metala(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a checkpoint of MetaLA's authors.

    It has SimpleRMSNorm, one convolution before all projections, q scaled in the recurrence but not
    beside it, and 1 - α in the precision of the weights, with which they were trained.
    """
    settings = source.settings
    settings.require("causal", True)
    settings.require("norm_type", "simplermsnorm")
    settings.require("add_bos_token", False)
    d, heads = settings["decoder_embed_dim"], settings["decoder_attention_heads"]
    layer: Table = {
        "mixer.conv.weight": TensorSource("token_mixer.conv1d.weight", taps),
        "mixer.W_q.weight": "token_mixer.q_proj.weight",
        "mixer.W_alpha.weight": "token_mixer.k_gate.weight",
        "mixer.W_v.weight": "token_mixer.v_proj.weight",
        **linear("mixer.W_g", "token_mixer.g_proj", bias=True),
        "mixer.W_o.weight": "token_mixer.out_proj.weight",
        "mixer.w_aug": TensorSource(
            "token_mixer.aug_balance", lambda w_aug: w_aug.unflatten(0, (heads, -1))
        ),
        **linear("mlp.W_1", "channel_mixer.l1", bias=settings["bias"]),
        **linear("mlp.W_2", "channel_mixer.l2", bias=settings["bias"]),
        **linear("mlp.W_3", "channel_mixer.l3", bias=settings["bias"]),
    }
    around = {
        "model.embed_tokens.weight": TensorSource("model.embed_tokens.weight"),
        HEAD: TensorSource(HEAD),
    }
    mixer = {"name": "metala", "heads": heads, "scaled": True, "rounded": True}
    return plan_layers(
        source,
        [(mixer, {})] * settings["decoder_layers"],
        layer,
        around=around,
        tie_word_embeddings=settings.get("tie_word_embeddings", HEAD not in source.names),
        hidden_size=d,
        norm="simple_rms",
        norm_eps=1e-6,
        hidden_act=settings["glu_act"],
        intermediate_size=d if settings["glu_dim"] == -1 else settings["glu_dim"],
        mlp_bias=settings["bias"],
        embedding_scale=1.0 if settings["no_scale_embedding"] else d**0.5,
    )
