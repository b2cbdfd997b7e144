"""ImageNet as MetaLA's Table 6 compares models on it: MetaLA's training, and DeiT's own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fastweights.lab.tasks.augmentation import Crop, DeiTAugmentation, Mixing, View
from fastweights.lab.tasks.images import ImageFolder, TrainingImages, ValidationImages
from fastweights.lab.tasks.protocol import Backbone, Fields, Protocol, Segment, TrainingSettings
from fastweights.models import PRESETS
from fastweights.recipes.metala import IMAGE_GAPS
from fastweights.training.loop.schedules import CosineAnnealing

METALA_6 = {
    "softmax": (72.20, 79.90),
    "hgrn": (74.40, 80.09),
    "gla": (72.47, 79.23),
    "mamba": (73.39, 79.60),
    "metala": (75.33, 80.14),
}
"""Accuracies in per cent at 6 and 23 million parameters (MetaLA, Table 6)."""
STOCHASTIC_DEPTH = 0.1
REPEATS = 3


class DeiTSize(NamedTuple):
    """One of the two sizes of Table 6.

    Attributes:
        name: DeiT's name of it.
        column: Its place in `METALA_6`.
        mamba: Width of Mamba's MLPs, which gives the printed number of parameters.
    """

    name: str
    column: int
    mamba: int


TINY, SMALL = DeiTSize("tiny", 0, 400), DeiTSize("small", 1, 832)


def metala(folder: Path, size: DeiTSize = TINY, view: View = DeiTAugmentation()) -> Protocol:
    """Return MetaLA's training on ImageNet (appendix A4), for ``folder/train/<class>/…`` and
    ``folder/val/<class>/…``: DeiT's without mixup and CutMix, at a rate and betas of its own.

    Args:
        folder: The folder of both parts.
        size: The size of the models.
        view: What is shown of a training image.
    """
    fields = PRESETS[f"metala-deit-{size.name}"].fields
    heads = {"heads": fields["hidden_size"] // 64}
    around = {key: value for key, value in fields.items() if key not in ("mixers", "num_labels")}
    backbone = Backbone(
        {**around, "stochastic_depth": STOCHASTIC_DEPTH},
        (fields["hidden_size"],),
        {
            "metala": {"mixers": fields["mixers"]},
            "gla": {"mixers": [{"name": "gla", **heads}]},
            "mamba": {"mixers": [{"name": "mamba"}], "intermediate_size": size.mamba},
        },
    )
    training = _training(2.4e-3, 2048, (0.9, 0.98))
    return _protocol(folder, size, view, None, training, backbone, "MetaLA, Table 6, appendix A4")


def deit(folder: Path, size: DeiTSize = TINY, view: View = DeiTAugmentation()) -> Protocol:
    """Return DeiT's own training of its own model, by timm (Touvron et al., 2021, Table 9), on
    images as those of `metala`."""
    width = PRESETS[f"metala-deit-{size.name}"].fields["hidden_size"]
    model: Fields = {
        "model_type": "timm_wrapper",
        "architecture": f"deit_{size.name}_patch16_224",
        "model_args": {"drop_path_rate": STOCHASTIC_DEPTH, "img_size": view.size},
        "hidden_size": width,
    }
    training = _training(1e-3, 1024, (0.9, 0.999))
    backbone = Backbone({}, (width,), {"softmax": model})
    source = "DeiT, Table 9: facebookresearch/deit"
    return _protocol(folder, size, view, Mixing(), training, backbone, source)


def _training(rate: float, batch: int, betas: tuple[float, float]) -> TrainingSettings:
    return TrainingSettings(
        (rate,),
        (0.05,),
        batch,
        epochs=300,
        schedule=CosineAnnealing(5 / 300, 1e-6, 1e-5),
        betas=betas,
        best=True,
        bf16=True,
        repeats=REPEATS,
        matrices_only=True,
    )


def _protocol(
    folder: Path,
    size: DeiTSize,
    view: View,
    mixing: Mixing | None,
    training: TrainingSettings,
    backbone: Backbone,
    source: str,
) -> Protocol:
    train = ImageFolder(folder / "train", view, TrainingImages(), mixing, smoothing=0.1)
    validation = train.others(ValidationImages(), Crop(view.size))
    test = ImageFolder(folder / "val", Crop(view.size))
    return Protocol(
        train=(Segment(train, len(train.files)),),
        validation=(Segment(validation, len(validation.files)),),
        test=(Segment(test, len(test.files)),),
        training=training,
        backbone=backbone,
        source=source,
        differs="; ".join(IMAGE_GAPS),
        figures={model: row[size.column] for model, row in METALA_6.items()},
    )
