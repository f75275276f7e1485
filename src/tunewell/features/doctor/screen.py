"""The screen of `doctor`: the facts, the findings with their fixes, and versions that work together."""

from typing import TYPE_CHECKING

from tunewell.cli.render import folded_table, hanging, json_text
from tunewell.core.units import count, duration

if TYPE_CHECKING:
    from tunewell.features.doctor.findings import EnvironmentProblem, EnvironmentReport


def doctor_screen(found: "EnvironmentReport") -> str:
    """Return the screen: the facts, the findings with their fixes, and the result."""
    parts = [folded_table([[name, text] for name, text in found.facts.items()])]
    parts += ["\n" + finding_lines(finding) for finding in found.findings]
    numbers = {level: sum(one.level == level for one in found.findings) for level in ("broken", "warning", "note")}
    checked = f"{count(found.num_checks, 'check')} in {duration(found.seconds)}"
    if not numbers["broken"] and not numbers["warning"]:
        return "\n".join([*parts, "", f"nothing is wrong: {checked}"])
    result = [f"{numbers['broken']} broken"] if numbers["broken"] else []
    result += [count(numbers["warning"], "warning")] if numbers["warning"] else []
    script = "`tunewell doctor --fix > fix.sh`, read it, then `sh fix.sh`"
    has_commands = any(finding.commands for finding in found.findings if finding.level != "note")
    following = [hanging("next: ", script)] if has_commands else []
    return "\n".join([*parts, "", f"{', '.join(result)}; {checked}", *following])


def finding_lines(finding: "EnvironmentProblem") -> str:
    """Return one finding: what, why and the fix."""
    lines = [hanging(f"{finding.level}  ", f"{finding.id}: {finding.what}"), hanging("  why:  ", finding.why)]
    lines.append(hanging("  fix:  ", finding.fix))
    lines += [hanging("        ", f"`{command}`") for command in finding.commands]
    if finding.evidence:
        lines.append(hanging("  seen: ", "; ".join(finding.evidence)))
    return "\n".join(lines)


def known_good_screen(tool: str, *, as_json: bool) -> str:
    """Return the known-good sets of a tool, or those with a package; raise UserError if there are none."""
    from tunewell.core.errors import UserError
    from tunewell.machine.shield import known_good_sets, read_shield

    sets = known_good_sets(tool, read_shield())
    if not sets:
        names = sorted({entry.tool for entry in read_shield().known_good})
        raise UserError(f"no known-good versions for `{tool}`", fix=f"use one of: {', '.join(names)}")
    if as_json:
        return json_text([{"tool": one.tool, "packages": list(one.packages), "checked": one.checked} for one in sets])
    lines = []
    for one in sets:
        lines += [hanging("# ", one.checked).replace("\n  ", "\n# "), *one.packages, ""]
    return "\n".join(lines).rstrip()
