"""The mask is exactly the replies and their ends, whatever a template does; where that is in doubt, it is refused."""

import itertools
import random

import pytest
from chat_references import CHATML_MARKERS, MARKERS, TOOLS, Features, Ours, conversations, messages_of, train_bpe

from tunewell.core.errors import UserError
from tunewell.data.masking.masker import ASSISTANT_REPLIES, Masker, MaskPlan, SupervisionRule
from tunewell.data.rows.conversation import Conversation, Rejected
from tunewell.data.templates.chat_template import ChatTemplate, builtin_template, required_markers
from tunewell.data.tokenizers.load import AddedTokenInfo, LoadedTokenizer, load_tokenizer

ADDED = {text: AddedTokenInfo(number, True, False, False, False) for number, text in enumerate(MARKERS)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> LoadedTokenizer:
    return load_tokenizer(train_bpe(tmp_path_factory.mktemp("bpe")))


def masker_for(source: str, rule: SupervisionRule = ASSISTANT_REPLIES, added=ADDED) -> Masker:
    return Masker(ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}), added, rule)


def learned_spans(plan: MaskPlan, words: list[str]) -> list[tuple[int, int]]:
    """Give the learned stretches of the rendered text, in characters."""
    spans: list[tuple[int, int]] = []
    at = 0
    for piece in plan.pieces:
        text = piece.text if piece.slot < 0 else plan.trims[piece.slot](words[piece.slot])
        if piece.is_supervised and text:
            begin = spans.pop()[0] if spans and spans[-1][1] == at else at
            spans.append((begin, at + len(text)))
        at += len(text)
    return spans


# The oracle knows nothing of stand-ins: it renders the row twice and sees where the texts part.


def region_of(template: ChatTemplate, row: Conversation, index: int) -> tuple[int, int] | str | None:
    """Find where a message stands by changing it: its place, None if it is not rendered, or why that is unclear."""
    text = template.render(row.messages, row.tools)
    content = row.messages[index]["content"]
    found: set[tuple[int, int]] = set()
    for other in ("\ue001", "\ue002\ue003\ue004"):
        changed = [{**message, "content": other} if n == index else message for n, message in enumerate(row.messages)]
        second = template.render(changed, row.tools)
        if second == text:
            return None
        if second.count(other) != 1:
            return "it is rendered more than once, or not as it is"
        begin = second.index(other)
        rest = len(second) - begin - len(other)
        if text[:begin] != second[:begin] or (rest and text[-rest:] != second[-rest:]):
            return "other text depends on it"
        found.add((begin, len(text) - rest))
    if len(found) != 1:
        return "its place depends on it"
    [(begin, end)] = found
    shown = text[begin:end]
    if shown not in content or shown.strip() != content.strip():
        return "its words are changed"
    return begin, end


def oracle(template: ChatTemplate, row: Conversation, end_marker: str) -> list[tuple[int, int]] | str:
    text = template.render(row.messages, row.tools)
    spans = []
    for index, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        region = region_of(template, row, index)
        if isinstance(region, str):
            return region
        if region is not None:
            spans.append((region[0], text.index(end_marker, region[1]) + len(end_marker)))
    return sorted(spans)


ROWS = [
    *conversations(30, seed=3, features=Features()),
    messages_of(("user", "is this bad?"), ("assistant", "not bad at all")),
    messages_of(("user", "x"), ("assistant", 'say "x"\nand "y"')),
    messages_of(("user", "hi"), ("assistant", "hi")),
    messages_of(("user", "a"), ("assistant", "a"), ("user", "a"), ("assistant", "a")),
    messages_of(("user", "q"), ("assistant", "one two three four five six seven eight nine ten eleven twelve " * 3)),
]


def outcomes(source: str, rows: list[Conversation] = ROWS) -> tuple[int, int]:
    """Check every row against the oracle; count those that were laid out and those that were refused."""
    masker = masker_for(source)
    num_done = num_refused = 0
    for row in rows:
        try:
            plan, words = masker.plan(row)
        except Rejected as rejected:
            assert rejected.reason == "mask_uncertain"
            num_refused += 1
            continue
        assert plan.fill(words) == masker.template.render(row.messages, row.tools)
        assert learned_spans(plan, words) == oracle(masker.template, row, masker.frame.end_marker)
        num_done += 1
    return num_done, num_refused


def turns(reply: str, question: str = "m.content", before: str = "", each: str = "messages") -> str:
    """Write a template that renders questions and replies as the two expressions say."""
    return (
        f"{before}{{% for m in {each} %}}{{{{ '<|im_start|>' + m.role + '\n' }}}}"
        f"{{% if m.role == 'assistant' %}}{{{{ {reply} }}}}{{% else %}}{{{{ {question} }}}}{{% endif %}}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


GLM = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
KIMI = (
    "{% for m in messages %}{{ '<|open|>' + m.role + '<|sep|>' + m.content + '<|close|>reply<|sep|><|end_of_msg|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|open|>assistant<|sep|>' }}{% endif %}"
)
FOLLOWED = {
    "as it is": turns("m.content"),
    "trimmed": turns("m.content | trim"),
    "line ends trimmed": turns("m.content.strip('\n')"),
    "left side trimmed": turns("m.content.lstrip()"),
    "spaces and line ends trimmed": turns("m.content.rstrip(' \n')"),
    "earlier turns dropped": turns("m.content", each="messages[-2:]"),
    "last three turns kept": turns("m.content", each="messages[-3:]"),
    "date inserted": turns("m.content", before="{{ strftime_now('%d %B %Y') + '\n' }}"),
    "question in small letters": turns("m.content", "m.content | lower"),
    "question as JSON": turns("m.content", "m.content | tojson"),
    "question shown twice": turns("m.content", "m.content + ' (' + m.content + ')'"),
    "header glued to the words": turns("m.content").replace("+ '\n' }}", "}}"),
    "text before the end": turns("m.content + ' END'"),
    "generation block": turns("m.content").replace(
        "{{ m.content }}{% else %}", "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}", 1
    ),
    "markers that are plain text": builtin_template("zephyr"),
    "no generation prompt": builtin_template("instruct"),
    "system last": turns("m.content", each="(messages | rejectattr('role', 'equalto', 'system') | list)")
    + "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}",
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_every_row_is_followed_through_a_template_that(name):
    num_done, num_refused = outcomes(FOLLOWED[name])
    assert (num_done, num_refused) == (len(ROWS), 0)


def test_text_that_the_template_writes_between_the_header_and_a_reply_is_learned(tokenizer):
    """The prompt ends with the header, so the model has to write this text as well."""
    row = messages_of(("user", "weather now?"), ("assistant", "Sun."), ("user", "trams?"), ("assistant", "No."))
    supervised = Ours(tokenizer, turns("loop.index ~ ' of ' ~ loop.length ~ ': ' + m.content")).supervised_text(row)
    assert supervised == "2 of 4: Sun.<|im_end|>4 of 4: No.<|im_end|>"


IN_DOUBT = {
    "replaces text": turns("m.content | replace('bad', 'good')"),
    "branches on the words": turns("('[long] ' if m.content | length > 100 else '') + m.content"),
    "looks for a word": turns("m.content + ('!' if 'x' in m.content else '')"),
    "cuts long replies": turns("m.content[:40]"),
    "trims spaces only": turns("m.content.strip(' ')"),
    "drops a reply by its words": turns("m.content", each="(messages if 'x' not in messages[-1].content else [])"),
    "writes questions in capitals": turns("m.content", "m.content | upper"),  # two letters for some
    "replaces text in questions": turns("m.content", "m.content | replace('bad', 'good')"),
}


@pytest.mark.parametrize("name", IN_DOUBT)
def test_a_row_is_refused_only_where_it_is_in_doubt_by_a_template_that(name):
    num_done, num_refused = outcomes(IN_DOUBT[name])
    assert num_done > 0
    assert num_refused > 0


NEVER = {
    "repeats a reply": turns("m.content + m.content"),
    "repeats a reply elsewhere": turns("m.content") + "{{ messages[-1].content + '</s>' }}",
    "writes replies as JSON": turns("m.content | tojson"),
    "indents replies": turns("m.content | indent(2)"),
    "turns the order round": turns("m.content", each="messages[::-1]"),
    "tells the length of a reply": turns("(m.content | length) ~ ': ' + m.content"),
}


@pytest.mark.parametrize("name", NEVER)
def test_no_row_is_laid_out_by_a_template_that(name):
    assert outcomes(NEVER[name]) == (0, len(ROWS))


def test_a_template_that_cannot_be_learned_is_refused_before_any_row():
    for source, complaint in {
        turns("m.content | upper"): "changes the text of a reply",
        turns("m.content | reverse"): "changes the text of a reply",
        turns("m.content", each="messages[:1]"): "changes the text of a reply",
        turns("m.content").replace("<|im_end|>", ""): "does not end replies with a token",
        turns("m.content").replace("<|im_end|>", "<|unknown|>"): "does not end replies with a token",
        "{{ raise_exception('no') }}": "cannot render one question and one answer",
    }.items():
        with pytest.raises(UserError, match=complaint):
            masker_for(source)


def test_a_reply_that_only_the_next_header_ends_is_in_doubt():
    """Learning `<|im_start|>` as the end of a reply would teach the model to ask the next question itself."""
    headers = ["'<|im_start|>' + m.role + '\n'", "'<|im_start|>\n'", "'<s>' if m.role == 'user' else '<|im_start|>'"]
    for header in headers:
        source = turns("m.content").replace("'<|im_end|>\n'", "'</s>' if loop.last else ''")
        source = source.replace("'<|im_start|>' + m.role + '\n'", header)
        masker = masker_for(source)
        assert masker.frame.end_marker == "</s>"
        masker.plan(messages_of(("user", "q"), ("assistant", "a")))
        with pytest.raises(Rejected, match="not followed by"):
            masker.plan(messages_of(("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "a")))


@pytest.mark.parametrize(
    ("source", "supervised"),
    [
        (
            turns("m.content").replace("'<|im_end|>\n'", "'' if loop.last and m.role != 'user' else ' <|im_end|>\n'"),
            "one <|im_end|>two <|im_end|>",
        ),
        (GLM, "one<|user|>two<|user|>"),
        (KIMI, "one<|close|>reply<|sep|><|end_of_msg|>two<|close|>reply<|sep|><|end_of_msg|>"),
    ],
    ids=["the last reply has no end", "the next question ends it", "several markers end it"],
)
def test_a_reply_is_learned_with_the_end_that_it_has_between_turns(tokenizer, source, supervised):
    """Apertus and GLM write nothing after the last reply; a model that never sees an end there never stops."""
    markers = required_markers(source, tokenizer.special_tokens)
    ours = Ours(tokenizer.with_tokens(markers), source)
    row = messages_of(("user", "q"), ("assistant", "one"), ("user", "q"), ("assistant", "two"))
    assert ours.supervised_text(row) == supervised
    own = ours.masker.template.render(row.messages)
    theirs = ChatTemplate(source, special_tokens=tokenizer.special_tokens).render(row.messages)
    assert own == theirs + ours.masker.frame.added_end
    asked = ours.masker.template.render(row.messages[:3], add_generation_prompt=True)
    assert not asked.endswith("<|user|>") and own.startswith(asked)


def test_the_end_of_a_turn_without_words_is_not_taken_for_that_of_the_reply_before():
    source = turns("m.content").replace("'<|im_end|>\n'", "'<|im_end|>' if loop.last or m.role != 'assistant' else ''")
    masker = masker_for(source)
    with pytest.raises(Rejected, match="not followed by"):
        masker.plan(messages_of(("user", "q"), ("assistant", "a"), ("tool", ""), ("assistant", "b")))


def test_another_end_between_turns_than_at_the_end_is_learned(tokenizer):
    source = turns("m.content").replace("'<|im_end|>\n'", "'<|im_end|>' if loop.last else '<|eot_id|>'")
    row = messages_of(("user", "q"), ("assistant", "one"), ("user", "q"), ("assistant", "two"))
    assert Ours(tokenizer, source).supervised_text(row) == "one<|eot_id|>two<|im_end|>"


def test_a_space_that_the_generation_prompt_leaves_to_the_model_is_learned(tokenizer):
    """`ASSISTANT: yes`, prompted by `ASSISTANT:`: the token ` yes` is the model's own, and often the whole reply."""
    source = (
        "{% for m in messages %}{{ m.role | upper + ': ' + m.content + ('</s>' if m.role == 'assistant' else '\n') }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )
    row = messages_of(("user", "q"), ("assistant", "yes"), ("user", "q"), ("assistant", "the boy"))
    ours = Ours(tokenizer, source)
    assert ours.supervised_text(row) == " yes</s> the boy</s>"
    assert ours.documents([row])[0][2] == 0


def test_random_templates_never_give_a_mask_that_the_oracle_denies():
    """Pieces that templates are made of, put together at random."""
    draw = random.Random(8)
    replies = ["m.content", "m.content | trim", "m.content.strip('\n')", "m.content | capitalize", "m.content | tojson"]
    replies += [
        "m.content or 'none'",
        "m['content'] | string",
        "(m.content if m.content is string else 'x')",
        "m.content.rstrip()",
    ]
    replies += ["m.content.lstrip('\n') | trim", "m.content + ('' if m.content else 'x')", "m.get('content')"]
    replies += ["m.content | replace('a', 'e')", "m.content[:25]", "m.content + m.content", "' ' + m.content"]
    questions = ["m.content", "m.content | trim", "m.content | upper", "''", "m.content + m.content"]
    headers = [
        "'<|im_start|>' + m.role + '\n'",
        "m.role + ': '",
        "'<s>'",
        "('<s>' if loop.first else '\n\n') + m.role + ':'",
    ]
    ends = [
        "'<|im_end|>\n'",
        "'</s>'",
        "' </s>' if m.role == 'assistant' else '\n'",
        "'' if loop.last else '</s>'",
        "'\n'",
    ]
    lists = ["messages", "messages[-2:]", "messages[::-1]", "messages[1:]", "messages[:3]"]
    grid = list(itertools.product(replies, questions, headers, ends, lists))
    num_done = num_refused = num_templates = 0
    for reply, question, header, end, each in draw.sample(grid, 200):
        source = (
            f"{{% for m in {each} %}}{{{{ {header} }}}}{{% if m.role == 'assistant' %}}{{{{ {reply} }}}}"
            f"{{% else %}}{{{{ {question} }}}}{{% endif %}}{{{{ {end} }}}}{{% endfor %}}"
        )
        try:
            done, refused = outcomes(source, ROWS[20:])
        except UserError:
            continue
        num_templates += 1
        num_done += done
        num_refused += refused
    assert num_templates > 20
    assert num_done > 100
    assert num_refused > 100


def test_every_row_is_rendered_and_compared_with_the_plan_of_its_shape(monkeypatch):
    """A plan is reused for rows of one shape; only the comparison shows that the template treats them alike."""
    masker = masker_for(builtin_template("chatml"))
    rows = [messages_of(("user", f"q {number}"), ("assistant", "a")) for number in range(20)]
    rendered: list[str] = []
    render = masker.template.render
    monkeypatch.setattr(masker.template, "render", lambda *args: rendered.append("") or render(*args))
    first, _ = masker.plan(rows[0])
    num_for_the_plan = len(rendered)
    assert all(masker.plan(row)[0] is first for row in rows[1:])
    assert len(rendered) - num_for_the_plan == len(rows) - 1
    monkeypatch.setattr(masker.template, "render", lambda *args: render(*args).upper())
    with pytest.raises(Rejected, match="mask_uncertain"):
        masker.plan(rows[0])


# What is learned.

TALK = messages_of(
    ("system", "be brief"), ("user", "q one"), ("assistant", "r one"), ("user", "q two"), ("assistant", "r two")
)


@pytest.mark.parametrize(
    ("rule", "learn", "expected"),
    [
        (SupervisionRule(), None, "r one<|im_end|>r two<|im_end|>"),
        (SupervisionRule("last_response"), None, "r two<|im_end|>"),
        (
            SupervisionRule(roles=("assistant", "user")),
            None,
            "q one<|im_end|>r one<|im_end|>q two<|im_end|>r two<|im_end|>",
        ),
        (SupervisionRule(roles=("system",)), None, "be brief<|im_end|>"),
        (SupervisionRule(), [None, None, False, None, None], "r two<|im_end|>"),
        (SupervisionRule(), [None, None, None, None, True], "r one<|im_end|>r two<|im_end|>"),
        (SupervisionRule("last_response"), [None, None, True, None, None], "r one<|im_end|>r two<|im_end|>"),
        (SupervisionRule("last_response"), [None, None, True, None, False], "r one<|im_end|>"),
        (
            SupervisionRule(roles=("user",)),
            [None, None, True, None, None],
            "q one<|im_end|>r one<|im_end|>q two<|im_end|>",
        ),
    ],
)
def test_the_rule_and_the_weights_decide_what_is_learned(rule, learn, expected, tokenizer):
    row = Conversation(TALK.messages, learn=learn)
    assert Ours(tokenizer, builtin_template("chatml"), rule).supervised_text(row) == expected


def test_everything_is_everything_but_the_first_token_and_turns_of_weight_0(tokenizer):
    ours = Ours(tokenizer, builtin_template("chatml"), SupervisionRule("everything"))
    text = ours.masker.template.render(TALK.messages)
    assert ours.supervised_text(TALK) == text.removeprefix("<|im_start|>")
    without = Conversation(TALK.messages, learn=[None, None, False, None, None])
    assert ours.supervised_text(without) == text.removeprefix("<|im_start|>").replace("r one<|im_end|>", "")


def test_the_first_token_of_a_document_is_never_learned(tokenizer):
    """Nothing stands before it to learn it from; trainers shift labels by one."""
    source = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    ours = Ours(tokenizer, source, SupervisionRule(roles=("user", "assistant")))
    [(ids, learned, _)] = ours.documents([messages_of(("user", "the boy"), ("assistant", "yes"))])
    assert learned == [False] + [True] * (len(ids) - 1)


def test_rows_without_anything_to_learn_say_so(tokenizer):
    ours = Ours(tokenizer, builtin_template("chatml"))
    plan, _ = ours.masker.plan(Conversation(TALK.messages, learn=[None, None, False, None, False]))
    assert (plan.num_supervised_turns, plan.num_unrendered_turns) == (0, 0)
    dropping = Ours(tokenizer, turns("m.content", each="messages[-2:]"))
    plan, _ = dropping.masker.plan(TALK)
    assert (plan.num_supervised_turns, plan.num_unrendered_turns) == (1, 1)


def test_tool_calls_and_thinking_of_the_row_are_learned_with_their_frame(tokenizer):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "a <|im_end|> b"}}}
    row = Conversation(
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [call]},
            {"role": "tool", "content": "sunny", "name": "<|im_start|>"},
            {"role": "assistant", "content": "Sunny."},
        ],
        tools=[{**TOOLS[0], "note": "<|im_end|>"}],
    )
    ours = Ours(tokenizer, builtin_template("chatml"))
    thought = "<think>\nlook it up\n</think>\n\n"
    called = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a <|im_end|> b"}}\n</tool_call>'
    assert ours.supervised_text(row) == thought + called + "<|im_end|>Sunny.<|im_end|>"


# Like Qwen's: an empty frame of thoughts before the last reply, unless the row has thoughts of its own.
THINKING = turns(
    "('<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' if loop.last else '') + m.content"
    " + ('<call>' + m.tool_calls[0].function.name + '</call>' if m.tool_calls else '')"
)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"content": "Yes."}, "<think>\n\n</think>\n\nYes."),
        ({"content": "Yes.", "reasoning_content": "\nhm\n"}, "<think>\nhm\n</think>\n\nYes."),
        ({"content": "Yes.", "reasoning_content": ""}, "<think>\n\n</think>\n\nYes."),
        ({"content": "", "tool_calls": [{"function": {"name": "f"}}]}, "<think>\n\n</think>\n\n<call>f</call>"),
        ({"content": "Yes.", "tool_calls": [{"function": {"name": "f"}}]}, "<think>\n\n</think>\n\nYes.<call>f</call>"),
        (
            {"content": "", "thinking": "hm", "tool_calls": [{"function": {"name": "f"}}]},
            "<think>\nhm\n</think>\n\n<call>f</call>",
        ),
    ],
)
def test_a_frame_that_the_template_adds_after_the_prompt_is_learned(reply, expected, tokenizer):
    """The model must write it: as context only, `chat` and every server would ask with a prompt that no row has."""
    row = Conversation([{"role": "user", "content": "q"}, {"role": "assistant", **reply}])
    assert Ours(tokenizer, THINKING).supervised_text(row) == expected + "<|im_end|>"


def test_thinking_that_the_row_wrote_into_its_reply_is_learned_with_its_frame(tokenizer):
    """Templates take it out and put it back in a frame of their own; an empty one that the row wrote counts as well."""
    written = "m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else ''"
    thought = f"(m.reasoning_content if m.reasoning_content is string else {written})"
    words = "m.content.split('</think>')[-1].lstrip('\n')"
    source = turns(f"('<think>\n' + {thought} + '\n</think>\n\n' if loop.last else '') + {words}")
    ours = Ours(tokenizer, source)
    for reply, expected in {
        "<think>\nhm\n</think>\n\nYes.": "<think>\nhm\n</think>\n\nYes.",
        "<think>hm</think>Yes.": "<think>\nhm\n</think>\n\nYes.",
        "<think>\n\n</think>\n\nYes.": "<think>\n\n</think>\n\nYes.",
        "Yes.": "<think>\n\n</think>\n\nYes.",
    }.items():
        assert ours.supervised_text(messages_of(("user", "q"), ("assistant", reply))) == expected + "<|im_end|>"
        earlier = messages_of(("user", "q"), ("assistant", reply), ("user", "q"), ("assistant", "No."))
        assert ours.supervised_text(earlier) == "Yes.<|im_end|><think>\n\n</think>\n\nNo.<|im_end|>"


def test_thinking_that_the_template_drops_is_not_learned():
    masker = masker_for(turns("m.content.split('</think>')[-1]"))
    plan, words = masker.plan(messages_of(("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nYes.")))
    text = plan.fill(words)
    assert [text[a:b] for a, b in learned_spans(plan, words)] == ["\n\nYes.<|im_end|>"]


def test_a_call_that_the_template_leaves_out_teaches_no_empty_reply(tokenizer):
    """`<|im_start|>assistant\\n<|im_end|>` would teach the model to say nothing."""
    row = Conversation(
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
        ]
    )
    ours = Ours(tokenizer, turns("m.content"))
    plan, _ = ours.masker.plan(row)
    assert (plan.num_supervised_turns, plan.num_unrendered_turns) == (1, 1)
    assert ours.supervised_text(row) == "Sunny.<|im_end|>"


def test_calls_of_weight_0_do_not_shift_the_turn_that_follows(tokenizer):
    """Two turns of calls in a row, without words: only the letters of the calls tell them apart."""

    def call(name: str) -> dict:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}

    row = Conversation([{"role": "user", "content": "q"}, call("one"), call("two")], learn=[None, False, True])
    ours = Ours(tokenizer, builtin_template("chatml"))
    assert ours.supervised_text(row) == '<tool_call>\n{"name": "two", "arguments": {}}\n</tool_call><|im_end|>'


def test_calls_that_a_template_repeats_in_the_results_are_in_doubt():
    source = turns(
        "m.content + m.tool_calls[0].function.name if m.tool_calls else m.content",
        "messages[loop.index0 - 1].tool_calls[0].function.name + m.content if m.role == 'tool' else m.content",
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "fetch", "arguments": "{}"}}]}
    row = Conversation([{"role": "user", "content": "q"}, call, {"role": "tool", "content": "r"}])
    with pytest.raises(Rejected, match="in parts"):
        masker_for(source).plan(row)


def test_a_conversation_that_the_template_refuses_is_none():
    masker = masker_for(builtin_template("gemma"))
    with pytest.raises(Rejected) as caught:
        masker.plan(messages_of(("user", "one"), ("user", "two"), ("assistant", "three")))
    assert caught.value.reason == "not_a_conversation"


def test_words_that_look_like_a_stand_in_are_words():
    masker = masker_for(builtin_template("chatml"))
    plan, words = masker.plan(messages_of(("user", "Zq1wXv"), ("assistant", "Zq0wXv Ky1pRg")))
    assert plan.fill(words) == "<|im_start|>user\nZq1wXv<|im_end|>\n<|im_start|>assistant\nZq0wXv Ky1pRg<|im_end|>\n"
    for name in ("Zq77wXv", "Zq0wXv", "\U000f0000"):
        call = {"function": {"name": name, "arguments": "{}"}}
        reply = {"role": "assistant", "content": "a", "tool_calls": [call]}
        with pytest.raises(Rejected) as caught:
            masker.plan(Conversation([{"role": "user", "content": "q"}, reply]))
        assert caught.value.reason == "mask_uncertain"


def test_markers_need_not_be_special_tokens_and_tags_of_replies_are_none():
    """Line ends and `<think>` are added tokens in some tokenizers; they are no turn markers."""
    texts = [*CHATML_MARKERS, "\n", "\n\n", "<think>", "</think>"]
    added = {text: AddedTokenInfo(number, False, False, False, False) for number, text in enumerate(texts)}
    source = turns("'<think>\n\n</think>\n\n' + m.content")
    masker = masker_for(source, added=added)
    assert set(masker.frame.turn_markers) == set(CHATML_MARKERS)
    plan, words = masker.plan(messages_of(("user", "q"), ("assistant", "a")))
    assert [piece.text for piece in plan.pieces if piece.is_marker] == CHATML_MARKERS * 2
    text = plan.fill(words)
    assert [text[a:b] for a, b in learned_spans(plan, words)] == ["<think>\n\n</think>\n\na<|im_end|>"]


def test_a_marker_that_is_read_only_beside_spaces_is_refused():
    added = ADDED | {"<|im_end|>": AddedTokenInfo(99, True, False, False, True)}
    with pytest.raises(UserError, match="single_word"):
        masker_for(builtin_template("chatml"), added=added)
