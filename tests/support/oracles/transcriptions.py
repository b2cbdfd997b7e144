"""All models whose own code does not run here, by the names that tests and docs give them."""

from oracles import delta_models, models

TRANSCRIPTIONS = {**models.TRANSCRIPTIONS, **delta_models.TRANSCRIPTIONS}
