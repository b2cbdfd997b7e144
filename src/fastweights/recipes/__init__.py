"""The papers' language-model runs as values, and the commands that train them."""

from __future__ import annotations

from difflib import get_close_matches

from fastweights.recipes import lolcats, mesanet, metala
from fastweights.recipes.command import command_of
from fastweights.recipes.conversion import ConversionBudget, StageBudget, plan_conversion
from fastweights.recipes.recipe import ConversionRecipe, Recipe, Stated, TrainingRecipe
from fastweights.recipes.record import record_of

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (*metala.RECIPES, *mesanet.RECIPES, *lolcats.RECIPES)
}
"""All recipes, by name."""


def find_recipe(name: str) -> Recipe:
    """Find the recipe of this name.

    Raises:
        ValueError: If there is none; the message lists all.
    """
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        meant = f"did you mean {near[0]}? There are" if near else "there are"
        raise ValueError(f"no recipe is called {name!r}; {meant} {', '.join(RECIPES)}")
    return RECIPES[name]


__all__ = [
    "RECIPES",
    "ConversionBudget",
    "ConversionRecipe",
    "Recipe",
    "StageBudget",
    "Stated",
    "TrainingRecipe",
    "command_of",
    "find_recipe",
    "plan_conversion",
    "record_of",
]
