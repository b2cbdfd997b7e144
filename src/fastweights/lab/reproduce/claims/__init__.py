"""The papers' claims, a file per paper."""
