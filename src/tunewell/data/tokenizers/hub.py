"""Read `tokenizer.json` and its companion files from the Hugging Face hub, as transformers 5.22 does."""

import json
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, models

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json
from tunewell.data.rows.conversation import is_list, is_object
from tunewell.data.tokenizers.loaded import LoadedTokenizer
from tunewell.data.tokenizers.parts import add_tokens, load_table
from tunewell.model_files.files import ModelFiles

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Some configs use a larger number to mean "no limit".
_LONGEST_LENGTH = 1_000_000_000


class SpecialTokenTable:
    """The added and special tokens of the companion files, merged as in transformers."""

    def __init__(self, files: ModelFiles, in_vocabulary: dict[int, AddedToken]) -> None:
        self.config = files.read_object("tokenizer_config.json")
        model_type = files.read_object("config.json").get("model_type")
        name = self.config.get("tokenizer_class")
        self.class_name = name.removesuffix("Fast") if isinstance(name, str) else None
        if model_type in load_table("transformers")["file_as_it_is"]:
            self.class_name = None
        values: dict[str, Any] = dict(load_table("transformers")["class_tokens"].get(self.class_name or "", {}))
        values |= {key: value for key, value in self.config.items() if _names_tokens(key)}
        self.by_id: dict[int, AddedToken] = {}
        if "added_tokens_decoder" in self.config:
            self.by_id = {int(number): _token(value) for number, value in self.config["added_tokens_decoder"].items()}
        else:
            # Files from before 2023 store these tokens separately. They are ignored if the config lists added tokens.
            values |= {k: v for k, v in files.read_object("special_tokens_map.json").items() if _names_tokens(k)}
            special = {_content(value) for value in (*map(values.get, SPECIAL_NAMES), *_listed(values)) if value}
            for content, number in files.read_object("added_tokens.json").items():
                is_special = content in special
                self.by_id[int(number)] = AddedToken(content, normalized=not is_special, special=is_special)
            self.by_id |= in_vocabulary
        self.named = self._named(values)
        self.extra = [_token(value) for value in _listed(values)]

    def _named(self, values: dict[str, Any]) -> dict[str, AddedToken]:
        extra = values.get("extra_special_tokens")
        other = {key: value for key, value in values.items() if key.endswith("_token") and key not in SPECIAL_NAMES}
        other |= extra if is_object(extra) else {}
        chosen = {name: values[name] for name in SPECIAL_NAMES if values.get(name) is not None} | other
        by_content = {token.content: token for token in self.by_id.values()}
        return {name: by_content.get(_content(value), _token(value)) for name, value in chosen.items()}

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by their variable names in chat templates."""
        return {name: token.content for name, token in self.named.items()}

    def additions(self, backend: Tokenizer) -> list[AddedToken]:
        """Return the tokens to add, in the order that determines their ids."""
        tokens = [token for _, token in sorted(self.by_id.items())]
        known = {token.content for token in [*backend.get_added_tokens_decoder().values(), *tokens]}
        named = {token.content for token in self.named.values()}
        for token in [*self.named.values(), *self.extra]:
            if token.content not in known:
                known.add(token.content)
                tokens.append(token)
        for token in tokens:
            token.special = token.special or token.content in named
        return tokens

    @property
    def max_length(self) -> int | None:
        """The maximum length of the tokenizer, or None if it has no limit."""
        length = self.config.get("model_max_length")
        return int(length) if isinstance(length, int | float) and 0 < length < _LONGEST_LENGTH else None


def read_special_tokens(files: ModelFiles, in_vocabulary: dict[int, AddedToken]) -> SpecialTokenTable:
    """Read the companion files; raise UserError if they are malformed."""
    try:
        return SpecialTokenTable(files, in_vocabulary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the special tokens of `{files.source}` cannot be read: {type(error).__name__} {error}",
            where="tokenizer_config.json, special_tokens_map.json or added_tokens.json",
        ) from None


def load_tokenizer_json(files: ModelFiles) -> LoadedTokenizer:
    """Load a `tokenizer.json` with the tokens and the template of its companion files."""
    text = files.read_text("tokenizer.json") or ""
    backend = _open(text, files)
    _require_safe(backend, files)
    padding = cast("dict[str, Any] | None", backend.padding)  # pyright: ignore[reportUnknownMemberType]
    backend.no_truncation()
    backend.no_padding()
    tokens = read_special_tokens(files, backend.get_added_tokens_decoder())
    if tokens.class_name == "LlamaTokenizer" and isinstance(backend.model, models.BPE):
        backend = _open(_rebuilt_as_llama(backend.to_str(), tokens.config), files)
    if padding and padding.get("pad_token"):
        tokens.named.setdefault("pad_token", _token(padding["pad_token"]))
    add_tokens(backend, tokens.additions(backend))
    backend.encode_special_tokens = False
    special = tokens.special_tokens
    return LoadedTokenizer(
        backend, special, read_template(files, tokens.config), _adds_bos(backend, special), tokens.max_length
    )


def _open(text: str, files: ModelFiles) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:
        # The library raises no narrower type than Exception for a malformed file; a panic of its Rust code is not even
        # an Exception, and has no public class.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        where = str(files.small["tokenizer.json"])
        raise UserError(f"`tokenizer.json` cannot be read: {str(error)[:200]}", where=where) from None


def _require_safe(backend: Tokenizer, files: ModelFiles) -> None:
    """Try a tokenizer with regular expressions or growing replacements in a child process."""
    steps = (backend.normalizer, backend.pre_tokenizer)
    if any(_may_crash(parse_json(step.__getstate__())) for step in steps if step is not None):
        from tunewell.data.tokenizers.probe import require_safe

        require_safe(backend, files.small["tokenizer.json"])


def _may_crash(step: dict[str, Any]) -> bool:
    pattern: dict[str, str] = step.get("pattern") or {}
    has_regex = "Regex" in pattern and pattern["Regex"] not in load_table("transformers")["known_patterns"]
    grows = len(step.get("content") or "") > len(pattern.get("String") or pattern.get("Regex") or "")
    inner = [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
    return has_regex or (step["type"] == "Replace" and grows) or any(map(_may_crash, inner))


def read_template(files: ModelFiles, config: dict[str, Any]) -> str | None:
    """Return the model's chat template from its file or from the config (`default` if there are several)."""
    text = files.read_text("chat_template.jinja")
    if text is not None:
        return text
    for holder in (config, files.read_object("chat_template.json")):
        template = holder.get("chat_template")
        if is_list(template):
            named = {entry.get("name"): entry.get("template") for entry in template if is_object(entry)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def _adds_bos(backend: Tokenizer, special: dict[str, str]) -> bool:
    plain = backend.encode("a", add_special_tokens=False).ids
    with_special = backend.encode("a", add_special_tokens=True).ids
    bos = backend.token_to_id(special.get("bos_token", ""))
    return bos is not None and with_special[:1] == [bos] and with_special[1 : 1 + len(plain)] == plain


def _rebuilt_as_llama(text: str, config: dict[str, Any]) -> str:
    """Replace the pipeline as transformers 5 does: only the first text gets a prefix space."""
    raw = parse_json(text)
    if "ByteLevel" in json.dumps([raw["pre_tokenizer"], raw["decoder"]]):
        return text
    prefix_space = config.get("add_prefix_space")
    scheme = "never" if prefix_space is False else "always" if config.get("legacy") else "first"
    raw["normalizer"] = None
    raw["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    raw["model"] |= {"fuse_unk": True, "byte_fallback": True, "unk_token": None, "ignore_merges": False}
    return json.dumps(raw)


def _names_tokens(key: str) -> bool:
    is_flag = key in ("add_bos_token", "add_eos_token")
    return not is_flag and (key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"))


def _listed(values: dict[str, Any]) -> list[Any]:
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens")
    return extra if is_list(extra) else []


def _content(value: Any) -> str:
    return value["content"] if is_object(value) else str(value)


def _token(value: Any) -> AddedToken:
    if not is_object(value):
        return AddedToken(str(value), special=True)
    return AddedToken(value["content"], **{key: bool(value[key]) for key in _FLAGS if key in value})
