"""Templates that try to use up the machine or to leave the sandbox, and a runner for them.

Run as a program, it renders each and prints what happened as JSON: a process of its own, so that its memory can be
measured.
"""

import functools
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from tunewell.data.templates import chat_template
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed, TemplateLimit

_LOOP = "{% for i in range(99999) %}"
_NEST = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"


def _nest(start: str, step: str) -> str:
    return _NEST.replace("START", start).replace("STEP", step)


LIMITED = {
    # time
    "nested loops": _LOOP * 3 + "{% endfor %}" * 3,
    "nested loops with output": _LOOP * 2 + "{{ i }}" + "{% endfor %}" * 2,
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loop over a lazy filter": _LOOP + "{% for j in range(99999)|map('string') if j == 'x' %}{% endfor %}{% endfor %}",
    "lazy filter asked for its length": _LOOP + "{{ range(99999)|map('string')|list|length }}{% endfor %}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive macro that branches": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}"
    "{% endmacro %}{{ m(50) }}",
    "two macros": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "block that calls itself": "{% block b %}{{ self.b() }}{% endblock %}",
    "caller that calls itself": "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
    "strip many characters": "{{ ('a' * 2000000).strip('b' * 2000000 + 'a') }}",
    "trim many characters": "{{ ('a' * 2000000)|trim('b' * 2000000 + 'a') }}",
    "slow search in a loop": _LOOP
    + "{% if ('a' * 600 ~ 'b' ~ 'a' * 600) in ('a' * 2400) %}{% endif %}{% endfor %}" * 1,
    "long division": "{% set x = ('f' * 1900)|int(0, 16) %}" + "{% set x = x * x %}" * 12 + "{{ x // 7 }}",
    "sort of a long list": "{{ (range(99999)|list * 30)|sort|length }}",
    "words of a long text": "{{ ('a-' * 1000000)|wordwrap(10) }}",
    # size
    "doubling by ~": "{% set ns = namespace(x='ab') %}" + _LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(x='ab') %}" + _LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by + of lists": "{% set ns = namespace(x=[1]) %}" + _LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by set": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60 + "{{ x }}",
    "doubling by a block": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
    "doubling by a macro": "{% macro m(s, n) %}{{ m(s ~ s, n - 1) if n else s }}{% endmacro %}{{ m('ab', 60) }}",
    "doubling by join": "{% set ns = namespace(x='ab') %}" + _LOOP + "{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "doubling by format": "{% set ns = namespace(x='ab') %}"
    + _LOOP
    + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling by str.format": "{% set ns = namespace(x='ab') %}"
    + _LOOP
    + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubling by replace": "{% set ns = namespace(x='ab') %}"
    + _LOOP
    + "{% set ns.x = ns.x|replace('a', 'aab') %}{% endfor %}",
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition from the left": "{{ 10**9 * 'a' }}",
    "repetition of a list": "{{ ([1] * 10**9)|length }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "repeated squares": "{% set x = 9 ** 999 %}" + "{% set x = x * x %}" * 30 + "{{ x }}",
    "center": "{{ 'a'.center(10**9) }}",
    "center filter": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "expandtabs": "{{ ('\t' * 10).expandtabs(10**9) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent width from a value": "{{ '%*d' % (10**9, 1) }}",
    "percent with a name": "{{ '%(a)1000000000s' % {'a': 1} }}",
    "percent with odd brackets": "{{ '%(a(b))1000000000s' % {'a(b)': 1} }}",
    "percent filter": "{{ '%1000000000d'|format(1) }}",
    "slow search from behind": "{% for i in range(99999) %}{{ ('a' * 20000).rfind('b' + 'a' * 9999) }}{% endfor %}",
    "long attribute": "{{ (['a'] * 99999)|map(attribute='0' ~ '.0' * 400000)|list }}",
    "sort by a long attribute": "{{ (['a'] * 99999)|sort(attribute='0' ~ '.0' * 90000) }}",
    "number in a long range": _LOOP + "{% if 1.5 in range(99999) %}{% endif %}{% endfor %}",
    "long texts compared": "{% set a = 'a' * 900000 ~ 'b' %}{% set b = 'a' * 900000 ~ 'c' %}"
    + _LOOP
    + "{% if a == b %}{% endif %}{% endfor %}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format width inside": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format precision": "{{ '{:.1000000000f}'.format(1.0) }}",
    "format_map width": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format many fields": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "rounding the other way": "{{ 15|round(-1000000000) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list|length }}",
    "batches kept": "{% set ns = namespace(x=[]) %}"
    + _LOOP
    + "{% set ns.x = [ns.x, [1]|batch(99999, 0)|list] %}{% endfor %}",
    "slice": "{{ [1]|slice(10**9)|list|length }}",
    "slices kept": "{% set ns = namespace(x=[]) %}{% set s = 'é' * 3000000 %}"
    + _LOOP
    + "{% set ns.x = [ns.x, s[1:]] %}{% endfor %}",
    "pieces kept": "{% set ns = namespace(x=[]) %}{% set s = 'ab ' * 900000 %}"
    + _LOOP
    + "{% set ns.x = [ns.x, s.split(' ')] %}{% endfor %}",
    "lists kept": "{% set ns = namespace(x=[]) %}"
    + _LOOP * 2
    + "{% set ns.x = ["
    + "[]," * 300
    + "ns.x] %}"
    + "{% endfor %}" * 2,
    "characters kept": "{% set ns = namespace(x=[]) %}{% set s = '\u4e2d' * 3000000 %}"
    + _LOOP
    + "{% set ns.x = [ns.x, s|list] %}{% endfor %}",
    "cyclers kept": "{% set ns = namespace(x=[]) %}"
    + _LOOP
    + "{% set ns.x = [ns.x, cycler(*range(99999))] %}{% endfor %}",
    "namespaces kept": "{% set ns = namespace(x=[]) %}{% set d = dict.fromkeys(range(99999)) %}"
    + _LOOP
    + "{% set ns.x = [ns.x, namespace(d)] %}{% endfor %}",
    "macros kept": "{% set ns = namespace(x=[]) %}"
    + _LOOP * 2
    + "{% macro m() %}{% endmacro %}{% set ns.x = [ns.x, m] %}"
    + "{% endfor %}" * 2,
    "iterators kept": "{% set ns = namespace(x=[]) %}"
    + _LOOP * 2
    + "{% set ns.x = [ns.x, [1]|map('string')] %}"
    + "{% endfor %}" * 2,
    "wide texts kept": "{% set ns = namespace(x=[]) %}{% set s = '\U0001f600' * 4000 %}"
    + _LOOP * 2
    + "{% set ns.x = [ns.x, s + 'a', s ~ 'b'] %}"
    + "{% endfor %}" * 2,
    "undefined kept": "{% set ns = namespace(x=[]) %}"
    + _LOOP * 2
    + "{% set ns.x = ["
    + "ns.y," * 100
    + "ns.x] %}"
    + "{% endfor %}" * 2,
    "indent": "{{ ('a\n' * 100000)|indent(100000) }}",
    "indent of JSON": "{{ [1, 2, 3]|tojson(indent=10**9) }}",
    "indent of deep JSON": _nest("[1] * 50000", "[ns.x]") + "{{ ns.x|tojson(indent=60) }}",
    "separators of JSON": "{{ ([1] * 90000)|tojson(separators=('a' * 90000, ':')) }}",
    "replace": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "replace of nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "join of a long list": "{{ range(99999)|join('a' * 100000) }}",
    "str.join of a long list": "{{ ('a' * 100000).join(range(99999)|map('string')) }}",
    "sum of lists": "{{ ([range(99999)|list] * 5000)|sum(start=[])|length }}",
    "one block, many times": "{% set big = 'a' * 3000000 %}{% set x %}" + _LOOP + "{{ big }}{% endfor %}{% endset %}",
    "much output": _LOOP + "{{ 'a' * 100000 }}{% endfor %}",
    "many pieces of output": "{% set x %}"
    + _LOOP * 2
    + "a{% if i %}b{% endif %}" * 200
    + "{% endfor %}" * 2
    + "{% endset %}",
    "text spread over arguments": "{{ cycler(*('\u4e2d' * 3000000)) }}",
    "width from two values": "{{ '{:{a}{b}}'.format(1, a='99999', b='99999') }}",
    "groups kept": "{% set ns = namespace(x=[]) %}"
    + _LOOP
    + "{% set ns.x = [ns.x, range(5000)|groupby('real')] %}{% endfor %}",
    "methods kept": "{% set ns = namespace(x=[]) %}"
    + _LOOP * 2
    + "{% set ns.x = ["
    + "'a'.strip," * 100
    + "ns.x] %}"
    + "{% endfor %}" * 2,
    "macro given itself": "{% macro m(f) %}{{ f(f) }}{% endmacro %}{{ m(m) }}",
    # values within values: few bytes to hold, more than all memory to print, compare or hash
    "print a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "concatenate a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x ~ '' }}",
    "JSON of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x|tojson }}",
    "JSON of a doubled dict": _nest("{}", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|tojson }}",
    "string of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x|string|length }}",
    "safe of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x|safe }}",
    "trim of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x|trim }}",
    "join of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x|join }}",
    "pprint of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x|pprint }}",
    "percent of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ '%s' % (ns.x,) }}",
    "format of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ '{0!r}'.format(ns.x) }}",
    "format of a doubled list, plain": _nest("[1]", "[ns.x, ns.x]") + "{{ '{}'.format(ns.x) }}",
    "print a doubled namespace": _nest("1", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "message of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ raise_exception(ns.x) }}",
    "lookup by a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ {}[ns.x] + 1 }}",
    "case of a doubled list": _nest("[1]", "[ns.x, ns.x]") + "{{ ns.x is lower }}",
    "compare doubled lists": _nest("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _nest("[1]", "[ns.x, ns.x]")
    + "{{ a == ns.x }}",
    "order doubled lists": _nest("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _nest("[1]", "[ns.x, ns.x]")
    + "{{ a < ns.x }}",
    "find a doubled list": _nest("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _nest("[1]", "[ns.x, ns.x]")
    + "{{ a in [ns.x] }}",
    "test doubled lists": _nest("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _nest("[1]", "[ns.x, ns.x]")
    + "{{ a is eq ns.x }}",
    "select doubled lists": _nest("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _nest("[1]", "[ns.x, ns.x]")
    + "{{ [a]|select('in', [ns.x])|list }}",
    "index of a doubled list": _nest("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _nest("[1]", "[ns.x, ns.x]")
    + "{{ [a].index(ns.x) }}",
    "changed doubled list": "{% for i in [1, 2] %}"
    + _nest("[1]", "[ns.x, ns.x]")
    + "{{ loop.changed(ns.x) }}{% endfor %}",
    "hash a doubled tuple": _nest("(1,)", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "look up a doubled tuple": _nest("(1,)", "(ns.x, ns.x)") + "{{ {}.get(ns.x) }}",
    "subscript by a doubled tuple": _nest("(1,)", "(ns.x, ns.x)") + "{{ {}[ns.x] }}",
    "doubled tuple in a dict": _nest("(1,)", "(ns.x, ns.x)") + "{{ ns.x in {} }}",
    "unique doubled tuples": _nest("(1,)", "(ns.x, ns.x)") + "{{ [ns.x]|unique|list }}",
    "dict of doubled tuples": _nest("(1,)", "(ns.x, ns.x)") + "{{ dict([(ns.x, 1)]) }}",
    "fromkeys of doubled tuples": _nest("(1,)", "(ns.x, ns.x)") + "{{ dict.fromkeys([ns.x]) }}",
    "fromkeys of lazy doubled tuples": _nest("(1,)", "(ns.x, ns.x)") + "{{ dict.fromkeys([ns.x]|map('default')) }}",
    "doubled varargs": "{% set ns = namespace(x=1) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ m(ns.x, ns.x) }}{% endfor %}{{ {ns.x: 1} }}",
    "hash a deep tuple": "{% set ns = namespace(x=()) %}"
    + _LOOP
    + "{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "print a deep list": "{% set ns = namespace(x=[]) %}" + _LOOP + "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "JSON of a deep list": "{% set ns = namespace(x=[]) %}"
    + _LOOP
    + "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "lazily found among equals": _nest("(1,)", "(ns.x, ns.x)").replace("60", "17")
    + "{% set a = ns.x %}"
    + _nest("(1,)", "(ns.x, ns.x)").replace("60", "17")
    + "{{ (a, 1) in ([(ns.x, 2)] * 99999)|map('default') }}",
}

REFUSED = {
    "percent by a test": "{{ '%1000000000d' is odd }}",
    "percent by another test": "{{ '%1000000000d' is divisibleby 3 }}",
    "percent by a mapped test": "{{ ['%1000000000d']|select('even')|list }}",
    "rounding a text": "{{ ('a' * 3000000)|round(3, 'ceil') }}",
    "more budget": "{{ [1]|map('(spend)', -10**15)|list }}",
    "too many expressions": "{{ a }}" * 21000,
    "long source": "a" * 300000,
    "deep expression": "{{ " + "(" * 50000 + "a" + ")" * 50000 + " }}",
    "long sum": "{{ " + "a+" * 10000 + "a }}",
    "range": "{{ range(10**9)|list }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "random": "{{ [1, 2]|random }}",
    "class of a text": "{{ ''.__class__.__mro__ }}",
    "class by a subscript": "{{ ''['__class__']['__mro__'] }}",
    "class by attr": "{{ (''|attr('__class__')).mro() }}",
    "class by map": "{{ ['']|map(attribute='__class__')|map(attribute='__mro__')|list }}",
    "globals of a function": "{{ raise_exception.__globals__['sys'] }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "context of self": "{{ self._TemplateReference__context.environment }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of joiner": "{{ joiner.__init__.__globals__ }}",
    "format string attributes": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format_map attributes": "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
    "format string by attr": "{{ ('{0.__class__.__mro__}'|attr('format'))('') }}",
    "mutation of the conversation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'x'}) }}",
    "generator frame": "{{ ([1]|map('string')).gi_frame.f_back }}",
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as y %}",
    "integer to bytes": "{{ (1).to_bytes(10**9, 'big') }}",
}


def measure(compile_once: Callable[[], ChatTemplate]) -> dict[str, Any]:
    """Render one, and say how it ended, after how long."""
    begin = time.process_time()
    outcome, reason = "rendered", ""
    try:
        compile_once().render([{"role": "user", "content": "hello"}])
    except TemplateLimit as error:
        outcome, reason = "limit", error.reason
    except TemplateFailed as error:
        outcome, reason = "failed", error.reason
    return {"outcome": outcome, "reason": reason, "seconds": time.process_time() - begin}


def peak_bytes() -> int:
    """The most memory this process has ever held (Linux counts in KiB, macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Render every bomb and print one JSON object per line."""
    begin = peak_bytes()
    chat_template._TRIAL_SECONDS = 1
    for name, source in (LIMITED | REFUSED).items():
        line = {"name": name, **measure(functools.partial(ChatTemplate, source, special_tokens={}))}
        sys.stdout.write(json.dumps(line | {"extra_bytes": peak_bytes() - begin}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
