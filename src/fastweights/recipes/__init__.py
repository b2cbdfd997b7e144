"""The papers' language-model runs as values, and the commands that train them."""

from __future__ import annotations

from difflib import get_close_matches

from fastweights.recipes import dsf, lolcats, mesanet, metala
from fastweights.recipes.command import command_of
from fastweights.recipes.conversion import ConversionBudget, StageBudget, plan_conversion, record_of
from fastweights.recipes.recipe import ConversionRecipe, Recipe, Stated, TableRow, TrainingRecipe

PAPERS = (metala, mesanet, dsf, lolcats)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for paper in PAPERS for recipe in paper.RECIPES}
"""All recipes, by name."""
ROWS: tuple[TableRow, ...] = tuple(row for paper in PAPERS for row in paper.ROWS)
"""The rows of the papers' tables, and what starts each."""


def find_recipe(name: str) -> Recipe:
    """Find the recipe of this name.

    Raises:
        ValueError: If there is none; the message names the nearest.
    """
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no recipe is called {name!r}; {meant}All: fastweights recipes")
    return RECIPES[name]


__all__ = [
    "RECIPES",
    "ROWS",
    "ConversionBudget",
    "ConversionRecipe",
    "Recipe",
    "StageBudget",
    "Stated",
    "TableRow",
    "TrainingRecipe",
    "command_of",
    "find_recipe",
    "plan_conversion",
    "record_of",
]
