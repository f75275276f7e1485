"""Load the tokenizer and the chat templates of a config, and check that they fit together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import SourceConfig
from tunewell.config.schema import Template as TemplateSettings
from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.data.encoding.encoder import Encoder
from tunewell.data.masking.masker import Masker, SupervisionRule
from tunewell.data.templates.chat_template import (
    BUILTIN_NAMES,
    ChatTemplate,
    TemplateFailed,
    builtin_template,
    required_markers,
)
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.model_files.presets import find_preset, is_preset
from tunewell.records.manifest import TemplateRecord


@dataclass
class TextPipeline:
    """The tokenizer, templates, maskers and encoders that turn the sources of a config into tokens."""

    model: str
    tokenizer: LoadedTokenizer
    templates: dict[str, ChatTemplate]
    """Templates by their name in the config."""
    default_name: str
    rule: SupervisionRule
    warnings: list[str] = field(default_factory=list[str])
    """Templates that probably do not do what the user wants."""

    def __post_init__(self) -> None:
        self._maskers: dict[tuple[str, SupervisionRule], Masker] = {}
        self._encoders: dict[frozenset[str], Encoder] = {}

    @classmethod
    def load(cls, loaded: LoadedConfig) -> "TextPipeline":
        """Load the tokenizer and all templates of a config; raise UserError if the tokenizer lacks a marker."""
        config = loaded.config
        assert config.model is not None
        model = loaded.seen(config.model)
        if is_preset(model):
            find_preset(model)
        tokenizer = load_tokenizer(loaded.seen(config.tokenizer) if config.tokenizer else model)
        names = dict.fromkeys([config.template.name, *(s.template for s in config.data.sources if s.template)])
        sources = {name: _source_of(name, tokenizer, loaded) for name in names}
        templates = {
            name: _template(name, text, tokenizer, config.template)
            for name, text in sources.items()
            if text is not None
        }
        missing = _missing_markers(templates, tokenizer)
        if missing and not config.template.add_missing_tokens:
            raise _missing_markers_error(missing, tokenizer)
        if missing:
            tokenizer = tokenizer.with_tokens(sorted({marker for markers in missing.values() for marker in markers}))
        rule = SupervisionRule(config.template.learn_from, tuple(config.template.learn_roles))
        warnings = [text for name, template in templates.items() for text in _warnings(name, template, tokenizer)]
        return cls(model, tokenizer, templates, config.template.name, rule, warnings)

    def masker(self, source: SourceConfig) -> Masker | None:
        """Return the masker of a source, or None if neither the model nor the config has a template."""
        name = source.template or self.default_name
        template = self.templates.get(name)
        if template is None:
            return None
        roles = tuple(source.learn_roles) if source.learn_roles else self.rule.roles
        rule = SupervisionRule(source.learn_from or self.rule.learn_from, roles)
        if (name, rule) not in self._maskers:
            self._maskers[name, rule] = Masker(template, self.tokenizer.added, rule)
        return self._maskers[name, rule]

    def chat_masker(self, sources: Sequence[SourceConfig]) -> Masker | None:
        """Return the masker for chat: with the template that all sources share, or else the default template."""
        is_one = len({source.template for source in sources}) == 1
        return self.masker(sources[0] if is_one else SourceConfig(path="chat"))

    def encoder(self, masker: Masker | None) -> Encoder:
        """Return the encoder for a masker. It never encodes message text as a marker of the template."""
        markers = frozenset(masker.frame.turn_markers if masker else ())
        if markers not in self._encoders:
            self._encoders[markers] = Encoder(self.tokenizer, markers)
        return self._encoders[markers]

    def records(self) -> list[TemplateRecord]:
        """Return the template records of the manifest."""
        return [
            TemplateRecord(
                name=masker.template.name,
                sha256=masker.template.sha256,
                learn_from=rule.learn_from,
                learn_roles=list(rule.roles),
                date=masker.template.date if masker.template.uses_clock else None,
                end_of_turn=masker.frame.end_marker,
            )
            for (_, rule), masker in self._maskers.items()
        ]

    def save(self, folder: Path) -> None:
        """Save the tokenizer with the default template."""
        template = self.templates.get(self.default_name)
        self.tokenizer.save(folder, template.source if template else None)


def _source_of(name: str, tokenizer: LoadedTokenizer, loaded: LoadedConfig) -> str | None:
    if name == "auto":
        return tokenizer.chat_template
    if name in BUILTIN_NAMES:
        return builtin_template(name)
    path = loaded.path(name)
    if path.is_file():
        return read_text(path)
    raise UserError(
        f"there is no template `{name}`",
        fix=f"use `auto` for the model's template, one of {', '.join(BUILTIN_NAMES)}, or a `.jinja` file",
    )


def _template(name: str, source: str, tokenizer: LoadedTokenizer, settings: TemplateSettings) -> ChatTemplate:
    try:
        return ChatTemplate(
            source,
            special_tokens=tokenizer.special_tokens,
            name="the model's own" if name == "auto" else name,
            date=settings.date,
            arguments=settings.arguments,
        )
    except TemplateFailed as failure:
        raise UserError(
            f"the template `{name}` cannot be used: {failure}",
            where=f"tokenizer of `{tokenizer.source}`" if name == "auto" else name,
            fix="choose another template with `template.name`",
        ) from failure


def _warnings(name: str, template: ChatTemplate, tokenizer: LoadedTokenizer) -> Iterator[str]:
    asked = [{"role": "user", "content": "x"}]
    try:
        text = template.render(asked, template.probe_tools, add_generation_prompt=True)
        own = (
            _template("auto", tokenizer.chat_template, tokenizer, TemplateSettings())
            if tokenizer.chat_template
            else None
        )
        own_text = own.render(asked, own.probe_tools, add_generation_prompt=True) if own else text
    except (TemplateFailed, UserError):
        return
    if name in BUILTIN_NAMES and own_text != text:
        yield (
            f"the model has its own chat template, which differs from `{name}`, so it must learn a new format; to use "
            "its own, set `template.name: auto`"
        )
    bos = template.bos
    if bos and text.startswith(bos + bos):
        yield f"the template `{template.name}` writes `{bos}` twice at the start; most models are trained with one"


def _missing_markers(templates: Mapping[str, ChatTemplate | str], tokenizer: LoadedTokenizer) -> dict[str, list[str]]:
    missing = {
        name: [
            marker for marker in required_markers(template, tokenizer.special_tokens) if marker not in tokenizer.added
        ]
        for name, template in templates.items()
    }
    return {name: markers for name, markers in missing.items() if markers}


def _missing_markers_error(missing: dict[str, list[str]], tokenizer: LoadedTokenizer) -> UserError:
    name, markers = next(iter(missing.items()))
    fitting = [
        other
        for other in BUILTIN_NAMES
        if not _missing_markers({other: builtin_template(other)}, tokenizer)
        and tokenizer.special_tokens.get("eos_token")
    ]
    others = f", or use another template: {', '.join(fitting)}" if fitting else ""
    spelled = ", ".join(f"`{marker}`" for marker in markers)
    return UserError(
        f"the template `{name}` needs {spelled} as single tokens, which this tokenizer does not have",
        where=f"tokenizer of `{tokenizer.source}`",
        fix=f"set `template.add_missing_tokens: true` to add them (they are then trained){others}",
    )
