"""The sandbox renders what transformers renders, and stops what would use up the machine or leave it."""

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_bombs import LIMITED, REFUSED
from transformers.utils.chat_template_utils import render_jinja_template

from examples_limit import examples
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed, TemplateLimit

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & kind.\n\tDo it."},
    {"role": "user", "content": "  What's 7 x 6?\n\nSay é, 中, \U0001f600.  ", "n": 42, "x": 1.5, "none": None},
    {
        "role": "assistant",
        "content": "42",
        "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": [2]}}}],
    },
    {"role": "user", "content": "a-b c_d e\r\nf", "flag": True},
]

EXPRESSIONS = """
messages|length, messages|count
messages[1].content|trim, messages[1].content|trim(' .'), messages[1]['content'].strip()
messages[1].content.lstrip('\\n ')
messages[1].content|upper, messages[1].content|lower, messages[0].content|title, messages[0].content|capitalize
messages[0].content|e, messages[0].content|escape|length, messages[0].content|forceescape
messages[0].content|safe
('<i>'|safe) + messages[0].content, ('%s'|safe) % '<', ('{}'|safe).format('<'), ('<'|safe).join(['<', '>'])
('<'|safe) ~ '<'
messages[0].content|striptags, messages[0].content|urlencode, {'a': 1, 'b': '<'}|xmlattr
'see http://x.org now'|urlize
messages[0].content|replace('b', 'BB'), messages[0].content|replace('b', 'BB', 1), 'aaa'.replace('', '-')
'aaa'.replace('a', '', 2)
messages[1].content|wordwrap(8), messages[1].content|wordcount, messages[1].content|truncate(9)
messages[1].content|truncate(9, true, '')
messages[1].content|indent, messages[1].content|indent(2, true, true), messages[1].content|indent('> ')
'ab'|center(9), 'ab'|center
messages|map(attribute='role')|join(', '), messages|join(',', attribute='role'), [1, 2, none]|join('|')
'abc'|join('.'), []|join
messages|selectattr('role', 'equalto', 'user')|list|length
messages|rejectattr('flag', 'defined')|map(attribute='role')|list
messages|selectattr('n')|list|length, [1, 2, 3, 4]|select('odd')|list
[1, 2, 3, 4]|reject('divisibleby', 2)|list
[3, 1, 2]|sort, ['b', 'A', 'c']|sort, ['b', 'A']|sort(case_sensitive=true)
messages|sort(attribute='role')|map(attribute='role')|list
[3, 1, 3]|unique|list, ['a', 'A']|unique|list, messages|groupby('role')|map('first')|list
(messages|groupby('role'))[0].grouper
[1, 2, 3]|sum, messages|sum(attribute='none', start=1) if false else 0, [[1], [2]]|sum(start=[]), [1, 2]|max
['b', 'A']|min
[1, 2, 3, 4, 5]|batch(2)|list, [1, 2, 3]|batch(2, 'x')|list, [1, 2, 3, 4]|slice(3)|list, [1, 2]|reverse|list
'abc'|reverse
{'b': 1, 'A': 2}|dictsort, {'b': 1, 'a': 2}|dictsort(true, 'value', true), {'a': 1}|items|list, 'abc'|list
{'a': 1}|list
1.567|round, 1.567|round(2), 1.567|round(1, 'floor'), 15|round(-1), -3|abs, '7'|int, 'x'|int(9)
'0x1f'|int(0, 16), '1.5'|float
1024|filesizeformat, 10000000|filesizeformat(true), [1, [2]]|pprint, '%s-%05.2f-%x'|format('a', 3.14159, 255)
'%(a)s'|format(a=1)
'%s %d %%' % ('a', 7), '%r' % (['x'],), '%5s|%-5s|' % ('a', 'b'), '%(role)s' % messages[0], '%c' % 'x'
'{} {1}'.format(1) if false else 'ok'
'{0} {1!r} {a[role]} {b.role}'.format(1, 'x', a=messages[0], b=messages[1]), '{:>6}|{:06.2f}'.format('a', 2.5)
'{a}'.format_map({'a': [1, 'b']}), '{:{w}}'.format('x', w=5), '{0.role}'.format(messages[0]), ''.format()
messages|tojson, messages|tojson(indent=2), messages[2]|tojson(sort_keys=true)
messages|tojson(ensure_ascii=true)
{'a': [1, {}]}|tojson(separators=(',', ':')), {'a': [1, [2, []]]}|tojson(indent='--'), 1.5|tojson, none|tojson
'中'|tojson
messages[1:]|length, messages[::-1]|map(attribute='role')|list, messages[-1].role, messages[1:3][0].role
'abcdef'[1:5:2], messages[9] is defined
messages[0] == messages[0], messages[0] == messages[1], messages[0] in messages, 'role' in messages[0]
'x' in messages[0], 'b' in 'abc'
1 < 2 < 3, 1 < 3 < 2, [1, 2] < [1, 3], (1, 'a') == (1, 'a'), 'a' not in ['b'], 3 in range(5), 1.5 in range(5)
none in [none], 'a' in {'a': 1}.values()
messages[1].n + 1, messages[1].n * 2, messages[1].n / 5, messages[1].n // 5, messages[1].n % 5, 2 ** 10
-messages[1].n, 2 ** -1, 2 ** 0.5
'a' * 3, 3 * 'a', [1] * 2, [1] + [2], (1,) + (2,), 'a' ~ 1 ~ none ~ [1] ~ undefined_thing, 'a' + 'b', true + 1
messages[1].x, messages[1].none, messages[1].missing, messages[1].missing|default('d')
messages[1].none|default('d'), messages[1].none|d('e', true)
missing is defined, missing is undefined, messages is iterable, messages is sequence, messages[0] is mapping
'a' is string, 1 is number
1 is odd, 2 is even, 9 is divisibleby 3, 'A' is upper, 'a' is lower, 1 is eq 1, 1 is ne 2, 2 is gt 1
1 is in [1], 'trim' is filter, 'odd' is test
none is none, true is true, 1 is integer, 1.5 is float, true is boolean, messages is sameas messages
raise_exception is callable, '<'|e is escaped
messages[0].content.split('b'), 'a b  c'.split(), 'a,b,c'.rsplit(',', 1), 'a\\nb\\r\\nc'.splitlines()
'a=b'.partition('='), 'a=b=c'.rpartition('=')
'abc'.find('c'), 'abcabc'.rfind('b'), 'abc'.startswith('a'), 'abc'.endswith(('x', 'c')), 'aXb'.swapcase()
'aXb'.casefold(), 'a b'.title()
'ab'.center(6, '*'), 'ab'.ljust(4) ~ '|', 'ab'.rjust(4), '7'.zfill(3), 'a\\tb'.expandtabs(4)
'abc'.translate({97: 'x', 98: none}), 'abc'.count('b')
'-'.join(['a', 'b']), '-'.join('ab'), '-'.join(messages|map(attribute='role')), 'abc'.removeprefix('a')
'abc'.isalpha(), 'x'.index('x')
messages[0].items()|list, messages[0].keys()|list, messages[0].values()|list|length, messages[0].get('role')
messages[0].get('zz', 'no')
[1, 2, 1].index(2), [1, 2, 1].count(1), (1, 2).index(2), {'a': 1}.copy(), dict(a=1, b=2), dict([('a', 1)])
dict.fromkeys(['a', 'b'], 0)
range(5)|list, range(2, 10, 3)|list, range(5), cycler('a', 'b').next(), joiner(', ')() ~ 'x', namespace(a=1).a
namespace({'a': 2}).a
(messages|first).role, (messages|last).role, 'abc'|first, [1, 2]|map('string')|list
['a', 'b']|map('upper')|join, ['a']|map('replace', 'a', 'b')|list
'yes' if messages else 'no', 'x' if false, not messages, messages and 1, none or 'b', (1, 2, 'a')
{'a': {'b': [1, 2]}}, [[], {}, ()]
strftime_now('%Y') is string, eos_token, bos_token ~ 'x', documents, tools, add_generation_prompt, self, loop
bad_name.x, 1 / 0, 'a' + 1, none + 'a', [] + 'a', messages.zz.y, 'a'|nosuchfilter, raise_exception('no!')
'a'.index('b'), none|trim ~ 1, [1, 'a']|sort
{}['a'], {}['a'].b, [1][5], messages['role'], messages[0].role.zz, 'abc'[0], 'abc'.zz, (1).real
(1.5).is_integer(), 'a' < 1, {[]: 1}
""".strip().splitlines()

STATEMENTS = {
    "loop variables": "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}"
    "{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.previtem.role }}{{ loop.nextitem.role }}"
    "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }} {% else %}none{% endfor %}",
    "loop over a lazy filter": "{% for m in messages|selectattr('role', 'ne', 'user') %}{{ loop.index }}"
    "/{{ loop.length }}"
    "{{ loop.last }}{{ m.role }} {% endfor %}",
    "loop with a condition": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}"
    "{{ m.role }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "recursive loop": "{% for x in [[1, [2, 3]], [4]] recursive %}{% if x is iterable %}[{{ loop(x) }}]{% else %}"
    "{{ x }}@{{ loop.depth }} {% endif %}{% endfor %}",
    "loop over a dict": "{% for k, v in messages[2].items() %}{{ k }}={{ v }};{% endfor %}"
    "{% for k in messages[0] %}{{ k }}{% endfor %}",
    "loop over text and nothing": "{% for c in 'abc' %}{{ c }}-{% endfor %}{% for c in nothing %}{% else %}"
    "else{% endfor %}",
    "macros": "{% macro f(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}"
    "{{ f(1, 2, 3, c=4) }}"
    "{{ f.name }}{{ f.arguments }}{% macro g(n) %}{{ n }}{{ g(n - 1) if n else '' }}{% endmacro %}{{ g(20) }}",
    "call blocks": "{% macro f(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) f(3) %}{{ y * 2 }}{% endcall %}",
    "namespace": "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen }}{{ ns.other }}{{ ns }}",
    "set blocks and filters": "{% set x %}a{{ messages[0].role }}{% endset %}{{ x }}{% set y | upper %}"
    "b{% endset %}{{ y }}"
    "{% filter trim %}  z  {% endfilter %}{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}",
    "scopes": "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}"
    "{% set a, b = (1, 2) %}{{ a }}{{ b }}",
    "blocks": "{% block one %}1{{ messages[0].role }}{% endblock %}{{ self.one() }}{% block two scoped %}"
    "2{% endblock %}",
    "white space": "  {% if true %}\n  a\n  {%- endif %}\n {{- 'b' }}   \n{% for i in [1] +%}"
    "\n c {%+ if true %} d{% endif %}\n{% endfor %}\n\n",
    "raw and comments": "{% raw %}{{ not this }}{% endraw %}{# nor this #}a{#- b -#} c",
    "numbers": "{{ 1_000 }}{{ 1.5e3 }}{{ 0x1f }}{{ 0b11 }}{{ 10 ** 30 }}{{ 1e400 }}",
    "include without files": "{% include 'x' %}",
    "no such test": "{% if messages is nosuchtest %}{% endif %}",
    "syntax error": "{% if %}",
    "unclosed": "{% for m in messages %}",
    "generation": "a{% for m in messages %}{% if m.role == 'user' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endif %}"
    "\n{% endfor %}{% generation %}end{% endgeneration %}",
    "generation in odd places": "{% macro f() %}x{% generation %}y{% endgeneration %}{% endmacro %}ab{{ f() }}c"
    "{% set z %}{% generation %}q{% generation %}r{% endgeneration %}{% endgeneration %}{% endset %}{{ z }}",
}


def theirs(source: str, **inputs: Any) -> Any:
    """Render with transformers; return an error instead of raising it."""
    try:
        texts, _ = render_jinja_template([inputs.pop("messages", MESSAGES)], chat_template=source, **inputs)
    except Exception as error:  # noqa: BLE001  whatever it raises, we must raise too
        return error
    return texts[0]


def ours(source: str, messages: Any = MESSAGES, **tokens: str) -> Any:
    """Render with tunewell; return a refusal instead of raising it."""
    try:
        return ChatTemplate(source, special_tokens=tokens).render(messages)
    except TemplateFailed as error:
        return error


def assert_same(source: str) -> None:
    expected, got = theirs(source, eos_token="</s>"), ours(source, eos_token="</s>")
    if isinstance(expected, Exception):
        assert isinstance(got, TemplateFailed), (source, expected, got)
    else:
        assert got == expected, source


@pytest.mark.parametrize("line", EXPRESSIONS)
def test_expressions_give_what_transformers_gives(line):
    """A bounded filter, operator or method that answers differently would change what a model learns."""
    for expression in split_expressions(line):
        assert_same("{{ " + expression + " }}")
        assert_same("{% set x = " + expression + " %}{% if x %}{{ x ~ '' }}{% endif %}")


def split_expressions(line: str) -> list[str]:
    """Split at the commas that stand between expressions, not inside brackets or quotes."""
    parts, depth, quoted = [""], 0, False
    for character in line:
        quoted ^= character == "'"
        depth += 0 if quoted else (character in "([{") - (character in ")]}")
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_give_what_transformers_gives(name):
    """The checks written into a template must not be visible to it: loops, scopes and white space stay the same."""
    assert_same(STATEMENTS[name])


PARTS = st.sampled_from(
    [
        "{{ m.content }}",
        "{{ m.role|upper }}",
        "{% if loop.first %}first{% endif %}",
        "{% if 'a' in m.content %}a{% else %}b{% endif %}",
        "{{ loop.index0 ~ '/' ~ loop.length }}",
        "{{ m|tojson }}",
        "{% set ns.n = ns.n + m.content|length %}",
        "{{ ns.n }}",
        "{{ m.x }}",
        "{{ messages[loop.index0 - 1].role }}",
        "{% if loop.last %}{% break %}{% endif %}",
        "{{- m.content.split('a')[-1] -}}",
        "\n  ",
        "{% if m == messages[-1] %}last{% endif %}",
        "{{ m.content[1:] + '\n' }}",
        "{% for c in m.content %}{{ c }}.{% endfor %}",
    ]
)
TEXT = st.text(alphabet="aAb \n\t<>&'\"{}%|é中\U0001f600", max_size=12)


@given(
    parts=st.lists(PARTS, min_size=1, max_size=8),
    contents=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), max_size=4),
)
@settings(max_examples=examples(100), deadline=None)
def test_made_up_templates_give_what_transformers_gives(parts, contents):
    """Combinations nobody thought of."""
    source = "{% set ns = namespace(n=0) %}{% for m in messages %}" + "".join(parts) + "{% endfor %}"
    messages = [{"role": role, "content": content} for role, content in contents]
    expected, got = theirs(source, messages=messages), ours(source, messages=messages)
    assert got == expected or (isinstance(expected, Exception) and isinstance(got, TemplateFailed))


@functools.cache
def outcomes() -> dict[str, Any]:
    """Render all bombs in a process of their own."""
    script = Path(__file__).with_name("template_bombs.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
def test_bombs_are_stopped_before_they_are_rendered_here():
    """A template that came with a model must not be able to hang a run or eat the machine, also when it is compiled."""
    ends = [outcomes()[name] for name in (*LIMITED, *REFUSED)]
    assert not [end for end in ends if end["seconds"] > 2]
    assert not [end for end in ends if end["name"] in LIMITED and end["outcome"] != "limit"]
    assert max(end["extra_bytes"] for end in ends) < 100_000_000


@pytest.mark.slow
def test_ways_out_of_the_sandbox_are_refused():
    """Template code must reach no Python object behind the data it was given."""
    assert not [name for name in REFUSED if outcomes()[name]["outcome"] == "rendered"]


def test_limits_leave_long_conversations_alone():
    """Limits follow the input: ten million characters in one reply are slow to tokenise, not forbidden to render."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b c\n" * 1_700_000}]
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content.split('</think>')[-1].strip() ~ '\n' }}{% endfor %}"
    )
    assert len(ours(source, messages=messages)) == 10_200_020
    many = [{"role": "user", "content": "some words"}] * 20_000
    assert len(ours(source, messages=many)) == 20_000 * 17


def test_a_deep_conversation_is_refused_not_crashed():
    """Rows may nest their JSON as deep as they like."""
    deep: Any = "x"
    for _ in range(5_000):
        deep = [deep]
    assert isinstance(ours("{{ messages }}", messages=[{"role": "user", "content": deep}]), TemplateLimit)


def test_renderings_on_many_threads_do_not_mix():
    """Each thread has its own sandbox and budget."""
    template = ChatTemplate(STATEMENTS["generation"], special_tokens={})
    conversations = [[{"role": "user", "content": "x" * n}] for n in range(1, 9)]
    expected = [theirs(STATEMENTS["generation"], messages=messages) for messages in conversations]
    wrong = []

    def work(index: int) -> None:
        for _ in range(200):
            if template.render(conversations[index]) != expected[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
