"""What the verbs do: one file per verb, imported when the verb is used."""
