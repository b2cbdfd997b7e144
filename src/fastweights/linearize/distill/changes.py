"""Changes of a recipe: single settings of its stages, and the length of all of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from fastweights.linearize.distill.recipe import LinearizationRecipe, StageConfig


@dataclass(frozen=True)
class StageChange:
    """A change of one setting of a stage, ``STAGE.FIELD=VALUE``.

    Attributes:
        stage: Name of the stage.
        field: Name of the setting: of the stage, its fit, optimiser, schedule, loss, teacher or
            adapters.
        value: The new value.
    """

    stage: str
    field: str
    value: Any

    @classmethod
    def read(cls, text: str) -> StageChange:
        """Read ``STAGE.FIELD=VALUE``, the value as TOML writes it, or a plain word.

        Raises:
            ValueError: If it is none.
        """
        name, equals, value = text.partition("=")
        stage, point, field = name.strip().partition(".")
        if not (stage and point and field and equals and value.strip()):
            raise ValueError(
                f"{text!r} is not STAGE.FIELD=VALUE, such as transfer.steps=100 or kl.lr=1e-5"
            )
        try:
            found = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found = value.strip()
        return cls(stage, field, found)


def change_stages(
    recipe: LinearizationRecipe, changes: Iterable[StageChange]
) -> LinearizationRecipe:
    """Return a recipe with changes of its stages; one of 0 steps is left out.

    Raises:
        ValueError: If there is no such stage or setting, or the value does not fit.
    """
    stages = {stage.name: stage for stage in recipe.stages}
    left_out = set[str]()
    for change in changes:
        _require_stage(stages, change.stage)
        if change.field == "steps" and change.value == 0:
            left_out.add(change.stage)
            continue
        left_out -= {change.stage} if change.field == "steps" else set()
        stages[change.stage] = _changed(stages[change.stage], change)
    return recipe.with_stages(stage for name, stage in stages.items() if name not in left_out)


def scale_steps(recipe: LinearizationRecipe, factor: float) -> LinearizationRecipe:
    """Return a recipe with the updates of every stage, and of its warm-up, times a factor; at least
    one of each stage is left."""
    return recipe.with_stages(_scaled(stage, factor) for stage in recipe.stages)


def _scaled(stage: StageConfig, factor: float) -> StageConfig:
    fit: Any = stage.fit
    schedule = fit.schedule
    if hasattr(schedule, "warmup"):
        schedule = replace(schedule, warmup=round(factor * schedule.warmup))
    scaled = replace(fit, steps=max(1, round(factor * fit.steps)), schedule=schedule)
    return stage.with_fit(scaled)


def _require_stage(stages: Mapping[str, StageConfig], name: str) -> None:
    if name not in stages:
        raise ValueError(
            f"the recipe has no stage {name!r}; its stages are"
            f" {', '.join(stages) or 'none: nothing is trained'}"
        )


def _changed(stage: StageConfig, change: StageChange) -> StageConfig:
    known = list(_settings(stage))
    if change.field not in known:
        raise ValueError(
            f"stage {stage.name!r} has no setting {change.field!r}; it has {', '.join(known)}"
        )
    before = _setting(stage, change.field)
    if not _fits(before, change.value):
        raise ValueError(
            f"{change.stage}.{change.field} = {change.value!r}, which was {before!r}, cannot be a"
            f" {type(change.value).__name__}; give a value of the same kind"
        )
    return _replaced(stage, change.field, change.value)


def _fits(before: Any, value: Any) -> bool:
    if isinstance(before, bool) or isinstance(value, bool):
        return isinstance(before, bool) and isinstance(value, bool)
    if isinstance(before, int | float):
        return isinstance(value, int | float)
    return before is None or isinstance(value, type(before))


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """The fields of a value that are values with fields themselves."""
    for field in fields(value):
        part = getattr(value, field.name)
        if is_dataclass(part):
            yield field.name, part


def _plain(value: Any) -> list[str]:
    """The fields of a value that are numbers, texts or None."""
    return [
        field.name
        for field in fields(value)
        if isinstance(getattr(value, field.name), bool | int | float | str | None)
    ]


def _settings(value: Any) -> Iterable[str]:
    """Names of settings, the nearest first, each once."""
    found = _plain(value) + [name for _, part in _parts(value) for name in _settings(part)]
    return dict.fromkeys(name for name in found if name != "name")


def _setting(value: Any, name: str) -> Any:
    if name in _plain(value):
        return getattr(value, name)
    return next(_setting(part, name) for _, part in _parts(value) if name in _settings(part))


def _replaced(value: Any, name: str, new: Any) -> Any:
    if name in _plain(value):
        return replace(value, **{name: new})
    place, part = next((place, part) for place, part in _parts(value) if name in _settings(part))
    return replace(value, **{place: _replaced(part, name, new)})
