"""What transformers' continuous batching cannot be asked of models that keep states."""

from __future__ import annotations

from typing import Any, NoReturn


class BatchesAtOnce:
    """A model whose requests are generated one batch after the other."""

    def init_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse.

        Raises:
            NotImplementedError: always: transformers batches continuously over pages of keys and
                values, and states are none
        """
        raise NotImplementedError(
            f"a {type(self).__name__} keeps states, and the continuous batching of transformers"
            " keeps pages of keys and values: serve it without --continuous-batching, or generate"
            " padded batches"
        )
