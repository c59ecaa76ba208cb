"""The actor that reads prompts and samples: a prefill pass, then a decode step, in turn.

Both use one model and one prefix cache, so that the keys and values of an answer are there when its
next turn is read. A pass has at most `pass_tokens` tokens; running requests wait for one at most,
also while a swap waits for the prompts that have begun. On a GPU the first pass of an idle
worker is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from forge.runtime.actors.actor import ThreadActor
from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.messages import Abort, Join, Read, Swap
from services.inference.engines.embedded.prefill import PrefillActor


class BothActor(ThreadActor):
    """Owns the actors of both roles and runs them on one thread."""

    batch_size: ClassVar[int] = PrefillActor.batch_size

    def __init__(self, prefill: PrefillActor, decode: DecodeActor) -> None:
        """Both have the same model, prefix cache and store."""
        self._prefill = prefill
        self._decode = decode
        prefill.after_swap = decode.after_swap

    def started(self) -> None:
        """Start both."""
        for actor in (self._prefill, self._decode):
            actor.loop = self.loop
            actor.started()

    def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Hand each message to its actor; an abort to both. Prefill swaps the one model and empties
        the one cache."""
        self._prefill.receive_batch(
            [one for one in messages if isinstance(one, Read | Abort | Swap)]
        )
        if any(isinstance(one, Join) for one in messages):
            self._prefill.is_awaited = True
        return [
            None if isinstance(one, Read | Swap) else self._decode.receive_batch([one])[0]
            for one in messages
        ]

    def work(self) -> bool:
        """Run one pass and one step; False when no request is left."""
        reads = self._prefill.work()
        samples = self._decode.work()
        # After a pass its prompts will sample; they would wait for the next one.
        self._prefill.is_awaited = samples or reads
        return samples or reads
