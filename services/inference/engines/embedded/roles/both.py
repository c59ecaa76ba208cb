"""The actor that reads prompts and samples: a prefill pass, then a decode step, in turn.

Both use one model and one prefix cache, so that the keys and values of an answer are there when its
next turn is read. A pass has at most `pass_tokens` tokens; running requests wait for one at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from forge.runtime.actors.actor import ThreadActor
from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.messages import Abort, Swap
from services.inference.engines.embedded.prefill import PrefillActor, Read


class BothActor(ThreadActor):
    """Owns the actors of both roles and runs them on one thread."""

    batch_size: ClassVar[int] = PrefillActor.batch_size

    def __init__(self, prefill: PrefillActor, decode: DecodeActor) -> None:
        """Both have the same model, prefix cache and store."""
        self._prefill = prefill
        self._decode = decode

    def started(self) -> None:
        """Start both."""
        for actor in (self._prefill, self._decode):
            actor.loop = self.loop
            actor.started()

    def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Hand each message to its actor; an abort to both."""
        of_prefill = [one for one in messages if isinstance(one, Read | Abort | Swap)]
        read = iter(self._prefill.receive_batch(of_prefill))
        answers = []
        for message in messages:
            # A swap empties the one cache and changes the one model: prefill has done it.
            ours = not isinstance(message, Read | Swap)
            done = self._decode.receive_batch([message])[0] if ours else None
            answers.append(next(read) if isinstance(message, Read | Abort | Swap) else done)
            if isinstance(message, Swap):
                self._decode.after_swap()
        return answers

    def work(self) -> bool:
        """Run one pass and one step; False when no request is left."""
        reads = self._prefill.work()
        return self._decode.work() or reads
