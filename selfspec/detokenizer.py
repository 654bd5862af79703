"""Tokens to text, one by one, never half a character."""

from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 8  # tokens already shown that the next one is decoded behind


class Detokenizer:
    """Gives the text that each token completes; together the pieces are the text of all tokens.

    A token's text may depend on the one before it, so each is decoded behind the last few that are shown already.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._shown: list[int] = []  # the last tokens whose text was given
        self._pending: list[int] = []  # bytes of a character that is not complete yet

    @property
    def num_pending(self) -> int:
        """How many tokens wait for the rest of a character."""
        return len(self._pending)

    def put(self, token: int) -> str:
        """The text up to and including ``token`` that was not given yet; none while a character is incomplete."""
        self._pending.append(token)
        text = self.rest()
        if text.endswith("\ufffd"):
            return ""
        self._shown, self._pending = [*self._shown, *self._pending][-CONTEXT_TOKENS:], []
        return text

    def rest(self) -> str:
        """The text of the tokens that wait, U+FFFD where a character is incomplete."""
        return self._text([*self._shown, *self._pending])[len(self._text(self._shown)) :]

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))
