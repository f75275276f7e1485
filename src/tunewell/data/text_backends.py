"""Copies of a tokenizer that read text as nothing but text, one for each place a stretch can have in a document."""

from typing import Any, Literal, get_args

import orjson
import tokenizers

from tunewell.data.items import Place
from tunewell.data.word_table import word_table

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: tuple[Form, ...] = get_args(Form)


class TextBackends:
    """The copies, made when first asked for; places that are treated alike share one."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        config = orjson.loads(backend.to_str())
        # A post-processor would trim offsets to the letters of a token, and these must cover its spaces too.
        config |= {"truncation": None, "padding": None, "post_processor": None}
        if all(token["special"] for token in config["added_tokens"]):
            # Nothing looks for special tokens in these copies; without them, nothing looks for their absence either.
            config["added_tokens"] = []
        self.keeps_text = config["normalizer"] is None or config["normalizer"].get("normalizers") == []
        """Whether text is encoded just as it is."""
        self.form: Form | None = _form(config["normalizer"])
        """The Unicode form that text is brought into, where that is all that happens to it."""
        self.unknown_id: int | None = _unknown_id(config["model"])
        self._by_place: dict[Place, tokenizers.Tokenizer] = {}
        places = [Place(is_first, is_last) for is_first in (True, False) for is_last in (True, False)]
        made: dict[bytes, tokenizers.Tokenizer] = {}
        for place in places:
            parts = {
                "normalizer": _at(place, config["normalizer"]),
                "pre_tokenizer": _at(place, config["pre_tokenizer"]),
            }
            key = orjson.dumps(parts)
            if key not in made:
                made[key] = _as_text(config | parts)
            self._by_place[place] = made[key]
        self.words = word_table(config) if len(made) == 1 and (self.keeps_text or self.form) else None
        """A quicker way for ASCII text, where there is one; every Unicode form leaves ASCII as it is."""

    def __getitem__(self, place: Place) -> tokenizers.Tokenizer:
        return self._by_place[place]


def _as_text(config: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(orjson.dumps(config).decode())
    backend.encode_special_tokens = True
    return backend


def _form(normalizer: dict[str, Any] | None) -> Form | None:
    return next((form for form in _FORMS if normalizer is not None and normalizer["type"] == form), None)


def _unknown_id(model: dict[str, Any]) -> int | None:
    if model["type"] == "Unigram":
        return model.get("unk_id")
    unknown = model.get("unk_token")
    return model["vocab"].get(unknown) if unknown is not None else None


def _at(place: Place, step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Leave out what a tokenizer does to the first or the last letters of a text, where a stretch has not got them."""
    if step is None:
        return None
    if step["type"] == "Sequence":
        name = next(key for key in ("normalizers", "pretokenizers") if key in step)
        kept = [inner for own in step[name] if (inner := _at(place, own)) is not None]
        return {**step, name: kept}
    if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first" and not place.is_first:
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "Replace" and "Regex" in step["pattern"]:
        pattern = step["pattern"]["Regex"].removeprefix("(?#dummy space)")
        if pattern.startswith(r"\A") and not place.is_first:
            return None
        if pattern.endswith(r"\z") and not place.is_last:
            return None
    return step
