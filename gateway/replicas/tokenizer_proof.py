"""What shows that a remote server reads text as this gateway does: a text and its token ids.

Prompts travel as token ids. To a server with another tokenizer they are another text, and nothing looks wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from tokenizers import Tokenizer

from gateway.errors import ConfigError

__all__ = ["TokenizerProof"]

_TEXT: Final = (
    "The quick brown fox, 12345 and 3.14; it's naïve café Straße 漢字 한국어 עברית हिन्दी 👩‍👩‍👧‍👦 🇫🇷\n\n"
    "def f(x):\n\treturn {'a': x + 1}  # two  blanks\r\n   ...!!! [Document d1] http://a.example/?b=c&d=%20\n"
)
"""Letters, digits, scripts, white space and punctuation: where tokenizers differ, they differ on some of these."""

_CONTROL_TOKENS: Final = 16


class TokenizerProof(msgspec.Struct, frozen=True):
    """``text`` has ``token_ids`` in the tokenizer of the gateway, whose ids are below ``vocab_size``."""

    text: str
    token_ids: list[int]
    vocab_size: int

    @classmethod
    def of(cls, folder: Path) -> TokenizerProof:
        """The proof for the tokenizer in ``folder``, with some of its control tokens in the text.

        Raises:
            ConfigError: There is none that can be used.
        """
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"{path} cannot be used: {error}.") from error
        control = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        text = _TEXT + "".join(control[:_CONTROL_TOKENS])
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        return cls(text, token_ids, 1 + max(tokenizer.get_vocab(with_added_tokens=True).values()))
