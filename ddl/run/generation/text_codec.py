"""Text as tokens of a model, and back."""

import codecs
import dataclasses
from collections.abc import Callable, Sequence

from ddl.errors import ConfigError, check_takes

_BYTES = 256


@dataclasses.dataclass(frozen=True)
class TextCodec:
    """Functions between a text and the tokens of a model. Without any, tokens are UTF-8 bytes.

    Attributes:
      encode: Turns a text into a list of token numbers.
      decode: Turns a list of token numbers into a text.

    Raises:
      ConfigError: If one of them is given without the other, or takes other arguments.
    """

    encode: Callable[[str], Sequence[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if (self.encode is None) != (self.decode is None):
            given, other = ("encode", "decode") if self.decode is None else ("decode", "encode")
            raise ConfigError(
                f"TextCodec needs both encode and decode, or none, got only {given}. Bind "
                f"TextCodec.{other}, too."
            )
        if self.encode is not None and self.decode is not None:
            check_takes("TextCodec.encode", self.encode, ("text",))
            check_takes("TextCodec.decode", self.decode, ("tokens",))

    def tokens(self, text: str, vocabulary: int) -> list[int]:
        """Returns the tokens of a text.

        Raises:
          ConfigError: If no function is bound, and the tokens of the model are no bytes.
        """
        if self.encode is not None:
            return [int(token) for token in self.encode(text)]
        if vocabulary != _BYTES:
            raise ConfigError(
                f"Text stands for its bytes only if the model has {_BYTES} tokens, got "
                f"{vocabulary:,} tokens. Bind TextCodec.encode and TextCodec.decode to functions "
                "of your tokenizer, or pass --prompt_tokens."
            )
        # Bytes of the command line that are no UTF-8 stand as surrogates in the text.
        return list(text.encode("utf-8", "surrogateescape"))

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens.

        Bytes that are no UTF-8 become U+FFFD. A character that the end cuts off is left out.
        """
        if self.decode is not None:
            return str(self.decode(tokens))
        return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(tokens))
