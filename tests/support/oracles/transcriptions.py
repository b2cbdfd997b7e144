"""All models whose own code does not run here, by the names that tests and docs give them."""

from oracles import decaying_models, delta_models, models

TRANSCRIPTIONS = {
    **models.TRANSCRIPTIONS,
    **delta_models.TRANSCRIPTIONS,
    **decaying_models.TRANSCRIPTIONS,
}
