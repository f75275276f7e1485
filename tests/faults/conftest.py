"""One line of JSON for each fault that was planted, at the end of the report."""

import json
from typing import Any

PROPERTY = "fault"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [value for report in reports for name, value in report.user_properties if name == PROPERTY]
    if lines:
        terminalreporter.section("faults")
        for line in sorted(lines, key=lambda line: (line["row"], line["fault"], line["seed"])):
            terminalreporter.write_line(json.dumps(line))
