"""What the wire may say about tokens: bodies of /tokenize, /detokenize and /tokenizer_info. Shapes and ranges only."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from app.api.completion_fields import Ids

_STRICT = ConfigDict(extra="forbid", strict=True)


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize."""

    model_config = _STRICT

    prompt: str = Field(
        description="The text, of any length that a body may have; names of special tokens in it are these tokens.",
        examples=["Once upon a time"],
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether to add what the tokenizer puts around a text (BOS, say), as a prompt gets it (true)."
    )


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = _STRICT

    tokens: Ids = Field(description="Token ids below the size of the vocabulary.", examples=[[1, 2, 3]])


class Piece(BaseModel):
    """A token as it stands in a text. The bytes of all pieces are the text's."""

    id: int = Field(description="Token id.")
    text: str = Field(description="The bytes as UTF-8; parts of a character show as U+FFFD.")
    bytes: list[int] = Field(description="Exactly what the token writes.")
    special: bool = Field(description="A token that steers the model; its name is shown in prompts, never in answers.")


class PlacedPiece(Piece):
    """A token and the characters it was made of."""

    start: int = Field(description="Its first character in the given text, counted in code points.")
    end: int = Field(description="Behind its last character; `start` for a token that was added.")


class TokenizeResponse(BaseModel):
    """Answer of POST /tokenize."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Tokens that the model can read, prompt and answer together.")
    tokens: list[int] = Field(description="Token ids.")
    pieces: list[PlacedPiece] = Field(description="The same tokens, with text, bytes and place.")


class DetokenizeResponse(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str = Field(description="The text; bytes that are no UTF-8 show as U+FFFD.")
    pieces: list[Piece] = Field(description="The tokens, with text and bytes.")


class SpecialToken(BaseModel):
    """A token that steers the model."""

    id: int = Field(description="Token id.")
    text: str = Field(description="How a prompt names it.")


class TokenizerInfo(BaseModel):
    """Answer of GET /tokenizer_info."""

    model: str = Field(description="The model's name.")
    kind: str = Field(description="What sort of tokenizer this is.", examples=["byte-level BPE"])
    vocab_size: int = Field(description="Every id of the tokenizer is below this.")
    max_model_len: int = Field(description="Tokens that the model can read, prompt and answer together.")
    bos_token: str | None = Field(description="Starts a text.")
    bos_token_id: int | None = Field(description="Its id.")
    add_bos_token: bool = Field(description="Whether it is put before every text.")
    eos_token: str | None = Field(description="Ends a text.")
    eos_token_id: int | None = Field(description="Its id.")
    eos_token_ids: list[int] = Field(description="All tokens that end a text.")
    special_tokens: list[SpecialToken] = Field(description="All tokens that steer the model, by id.")
    chat_template: str | None = Field(description="In the language of Jinja, where the weights bring one.")
