"""`tunewell explain`: show what a config key or a failure means."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tunewell.cli.options import Argument, AsJson, ConfigFile
from tunewell.cli.render import emit, folded_table, hanging, json_text, one_line
from tunewell.core.errors import UserError

if TYPE_CHECKING:
    from tunewell.config.explain import Explanation
    from tunewell.config.load import LoadedConfig


def command(
    key: Annotated[
        str | None,
        Argument(
            "A key or a section, such as `packing.context_length` or `packing`, or a failure, such as `oom-cuda`. "
            "Default: list all keys.",
            "KEY",
        ),
    ] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> None:
    """Explain a config key (meaning, values, default, current value) or a failure (cause, fix for each tool)."""
    from tunewell.config.explain import explain, explain_all
    from tunewell.config.keys import all_keys
    from tunewell.core.features import require_hook

    if key is None:
        listed = explain_all()
        emit(json_text({"keys": dict(listed)}) if json else folded_table(listed))
    elif key not in all_keys() and ("-" in key or key == "overfitting"):
        page = require_hook("diagnose", "failure_page", needed_by=f"the page of `{key}`")(key)
        emit(json_text(asdict(page)) if json else _failure(page))
    else:
        found = explain(key, _loaded(config))
        emit(json_text(asdict(found)) if json else _page(found))


def _loaded(config: Path | None) -> "LoadedConfig | None":
    from tunewell.config.load import load_config

    try:
        loaded = load_config(config)
    except UserError:
        if config is not None:
            raise
        # `explain` must work with an invalid config, because that is when users need it.
        return None
    return loaded if loaded.file else None


def _page(found: "Explanation") -> str:
    lines = [found.key, hanging("  ", found.doc)]
    if found.keys:
        lines += ["", folded_table([(f"  {name}", doc) for name, doc in found.keys])]
    facts = [] if found.keys else [("takes", found.type), ("default", _shown(found.default))]
    if found.origin is not None and not found.keys:
        origin = "the default" if found.origin == "default" else found.origin
        facts.append(("now", f"{_shown(found.value)} ({origin})"))
    if found.aliases:
        facts.append(("aliases", ", ".join(found.aliases)))
    return "\n".join([*lines, *(["", folded_table(facts)] if facts else [])])


def _failure(page: Any) -> str:
    parts = [page.title, hanging("  ", f"{page.id}, {page.about}")]
    parts += [f"{heading}\n{hanging('  ', text)}" for heading, text in page.sections.items()]
    if page.fixes:
        parts.insert(4, folded_table([(f"  {tool}", text) for tool, text in page.fixes.items()]))
    messages = [hanging("  ", one_line(text)) for text in page.messages]
    return "\n\n".join([*parts, *(["Recognised by\n" + "\n".join(messages)] if messages else [])])


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json_module.dumps(value, ensure_ascii=False)
