"""Prompt ids of a session's requests: matched, rendered and encoded, within the context.

Long requests are handled on threads, because they take from milliseconds to seconds; a session
handles one at a time, so the threads serve sessions in turn. The work is bounded by the context,
whatever the size of the request. Owns no conversation and no turns.
"""

from __future__ import annotations

from functools import partial

from forge.core.errors import ContextTooLong
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.security.tokens import Claims
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.prompt import Prompt, PromptDraft
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.encode_threads import EncodeThreads

LARGE_TEXT_CHARS = 32_768
"""Longer texts are encoded on a thread."""
LARGE_REQUEST_BYTES = 1 << 20
"""Larger requests are matched and rendered on a thread."""


class Prompts:
    """The prompts of one session."""

    def __init__(
        self, claims: Claims, model: ChatModel, threads: EncodeThreads, *, limit: int
    ) -> None:
        """`limit`: longest context of the session, prompt and answer."""
        self._claims = claims
        self._model = model
        self._threads = threads
        self._limit = limit

    async def draft(
        self, conversation: Conversation, request: TurnRequest, opening: str
    ) -> PromptDraft:
        """As `Conversation.draft`. Nothing else may use the conversation meanwhile. Raises
        `ContextTooLong` for more messages or tools than tokens."""
        draft = partial(
            conversation.draft,
            request.messages,
            request.tools,
            opening=opening,
            template_kwargs=request.template_kwargs,
            most=self._limit,
        )
        if request.size_bytes <= LARGE_REQUEST_BYTES:
            return draft()
        return await self._threads.run(self._claims.tenant, draft)

    async def encode(self, draft: PromptDraft) -> Prompt:
        """Returns the prompt of a draft; raises `ContextTooLong` for a long one."""
        model, first = self._model, draft.how == "first"
        if len(draft.text) > LARGE_TEXT_CHARS:
            tail = await self._encode_long(draft, first)
        elif draft.text:
            tail = (model.encode_first if first else model.encode)(draft.text)
        else:
            tail = b""
        return Prompt(ids=draft.ids + tail, draft=draft)

    def require_room(self, tokens: int, *, at_least: bool = False) -> None:
        """Raises `ContextTooLong` unless a prompt of so many tokens leaves room for an answer."""
        if tokens >= self._limit:
            shorter = self._limit < self._model.context_tokens
            raise ContextTooLong.of(
                tokens=tokens,
                limit=self._limit,
                at_least=at_least,
                domain=self._claims.domain if shorter else "",
            )

    async def _encode_long(self, draft: PromptDraft, first: bool) -> bytes:
        before = len(draft.ids) // TOKEN_BYTES
        self.require_room(before + self._model.least_tokens(draft.text), at_least=True)
        encode = partial(self._model.encode_within, draft.text, self._limit - before, first=first)
        tokens, tail = await self._threads.run(self._claims.tenant, encode)
        self.require_room(before + tokens, at_least=not tail)
        return tail
