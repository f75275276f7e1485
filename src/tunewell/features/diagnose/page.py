"""The page of one failure: what happened, why, the fix for each tool, and what it is recognised by."""

from dataclasses import dataclass
from difflib import get_close_matches

from tunewell.core.errors import UserError
from tunewell.core.features import modules
from tunewell.features.diagnose.knowledge import load_classes, load_tools


@dataclass(frozen=True)
class FailurePage:
    """The texts of a failure, in the order in which they are read."""

    id: str
    title: str
    about: str
    sections: dict[str, str]
    """Text by heading."""
    fixes: dict[str, str]
    """The change in each tool, by its label."""
    messages: tuple[str, ...]
    """Parts of messages that it is recognised by."""


def failure_page(name: str) -> FailurePage:
    """Return the page of a failure by its id; raise UserError if there is none."""
    from tunewell.cli.main import COMMANDS

    if (failure := load_classes().get(name)) is None:
        near = get_close_matches(name, load_classes(), n=3)
        fix = (
            f"did you mean {', '.join(f'`{one}`' for one in near)}?"
            if near
            else "`tunewell diagnose LOG` names failures"
        )
        raise UserError(f"`{name}` is neither a key nor a failure", fix=fix)

    page, labels = failure.page, {tool.name: tool.label for tool in load_tools()}
    commands = {name for name, _ in COMMANDS} | modules("commands").keys()
    caught = [f"`tunewell {name}`" for name in page.get("caught_by", ()) if name in commands]
    sections = {
        "Why": page["cause"],
        "Fix": page["fix"],
        "To be surer": page.get("next", ""),
        "Not to be confused with": page.get("not", ""),
        "Caught earlier by": ", ".join(caught),
    }
    found = (one.text for each in failure.signatures if not each.is_sentence for one in (*each.all, *each.any))
    return FailurePage(
        id=failure.id,
        title=failure.title,
        about=f"{failure.family}, {failure.severity}. {page['example']}",
        sections={heading: text for heading, text in sections.items() if text},
        fixes={labels[tool]: text for tool, text in page.get("fixes", {}).items()},
        messages=tuple(dict.fromkeys(found)),
    )
